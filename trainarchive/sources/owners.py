"""Whose a file is: rank, task and step of the processes that write it."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trainarchive.private import is_of
from trainarchive.processes import Process
from trainarchive.run import Job, Kind, RunKey
from trainarchive.sources.patterns import slurm_path

TORCHRUN_NAMES = {b"stdout.log": Kind.TORCHRUN, b"stderr.log": Kind.TORCHRUN, b"error.json": Kind.ERROR_JSON}
TORCHRUN_PATH = re.compile(rb"(?s)(?P<agent>/.+)/attempt_(?P<attempt>\d{1,6})/(?P<local>\d{1,6})/(?P<name>[^/]+)")
_FIRST_NODE = re.compile(r"([^\[\],]+)(?:\[(\d++)[^\]]*+\]([^\[\],]*))?")
_MAX_RANK_DIGITS = 10

_T = TypeVar("_T")

Attributed = tuple[Kind, dict[str, Any]]
"""A kind, and the fields of an ``Attribution``."""


class Agent(msgspec.Struct):
    """A torchrun agent: who writes in its directory, and by attempt the global rank of its local rank 0.

    It numbers its workers without holes: one worker tells the ranks of all beside it.
    """

    processes: dict[int, Process] = {}
    bases: dict[int, set[int]] = msgspec.field(default_factory=lambda: defaultdict(set))


class Owners:
    """What a run's processes, dead ones too, tell about its files; for one look."""

    def __init__(self, run: RunKey, job: Job, processes: Sequence[Process], node: str) -> None:
        """``processes``: all that are known of the run on this node."""
        self.run = run
        self.job = job
        self.node = node
        self.processes = sorted(processes, key=lambda process: process.start_time)
        self.by_pid = {process.pid: process for process in self.processes}
        self._directories: dict[bytes, bytes] = {}
        self._ids = self._job_ids()
        self._task_ranks: dict[tuple[str, int | None], set[int]] = defaultdict(set)
        self._workers: dict[tuple[int, int | None], Process] = {}
        for process in self.processes:
            if process.rank is not None:
                self._workers.setdefault((process.rank, process.local_rank), process)
                self._task_ranks[process.step, process.procid].add(process.rank)
        private = os.fsencode(job.private_dir).rstrip(b"/")
        # Another run may have come with the same key while this one was still here.
        mine = private.startswith(b"/") and is_of(Path(job.private_dir), job.sluid)
        self.private_dir = self.real(private) if mine else b""
        self.agents = self._torchrun_agents()
        prefixes = (dump_prefix(process).rpartition("/")[2] for process in self.processes)
        self._dump_prefixes = {os.fsencode(prefix) for prefix in prefixes if prefix}
        self.slurm_paths = self._slurm_paths()

    # -- the run ---------------------------------------------------------------------------

    def _job_ids(self) -> dict[str, int | None]:
        keys = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_HET_JOB_ID", "SLURM_HET_JOB_OFFSET")
        fields = ("array_job_id", "array_task_id", "het_job_id", "het_offset")
        return {field: self._said(key) for field, key in zip(fields, keys, strict=True)}

    def _said(self, key: str) -> int | None:
        texts = (process.environment.get(key, "") for process in self.processes)
        return next((int(text) for text in texts if re.fullmatch(r"[0-9]{1,10}", text)), None)

    def _slurm_paths(self) -> set[bytes]:
        """Return where Slurm writes the batch script's output, as far as it can be known."""
        job_id, task_id = self.run.job_id, self._ids["array_task_id"]
        names = (process.environment.get("SLURM_JOB_NAME") for process in self.processes if process.is_batch)
        values: dict[str, str | int | None] = {"j": job_id, "J": job_id, "n": 0, "t": 0, "a": task_id}
        values |= {"A": self._ids["array_job_id"] or job_id, "N": self.node.split(".")[0]}
        values |= {"u": self.job.user or None, "x": next((name for name in names if name), None)}
        default = "slurm-%j.out" if task_id is None else "slurm-%A_%a.out"
        patterns = (self.job.stdout or default, self.job.stderr or self.job.stdout or default)
        paths = (slurm_path(pattern, self.job.work_dir, values) for pattern in patterns)
        return {self.real(path) for path in paths if path is not None and not path.startswith(b"/dev/")}

    @property
    def on_batch_node(self) -> bool:
        """Whether the batch script runs here: on the first of the job's nodes."""
        first = _FIRST_NODE.match(self.job.nodes)
        if self.job.num_nodes <= 1 or first is None:
            return self.job.num_nodes <= 1
        return self.node == "".join(text or "" for text in first.groups())

    def real(self, path: bytes) -> bytes:
        """Return the path with its directory as the kernel names it, so that both ways to a file give one path."""
        directory, _, name = path.rpartition(b"/")
        if directory not in self._directories:
            self._directories[directory] = os.path.realpath(directory or b"/")
        return self._directories[directory].rstrip(b"/") + b"/" + name

    def is_private(self, path: bytes) -> bool:
        """Whether it lies in the run's private directory."""
        return bool(self.private_dir) and path.startswith(self.private_dir + b"/")

    # -- torchrun --------------------------------------------------------------------------

    def _torchrun_agents(self) -> dict[bytes, Agent]:
        """Return the torchrun agents by their directories."""
        agents: dict[bytes, Agent] = defaultdict(Agent)
        for process in self.processes:
            for found in filter(None, map(TORCHRUN_PATH.fullmatch, self._torchrun_paths(process))):
                agent = agents[found["agent"]]
                agent.processes[process.pid] = process
                if process.rank is not None and process.local_rank == int(found["local"]):
                    agent.bases[int(found["attempt"])].add(process.rank - process.local_rank)
        return agents

    def _torchrun_paths(self, process: Process) -> Iterator[bytes]:
        """Yield the files in agents' directories that a process writes or is to write."""
        error_file = process.environment.get("TORCHELASTIC_ERROR_FILE", "")
        if error_file.startswith("/"):
            yield self.real(os.fsencode(error_file))
        for write in process.writes:
            if b"/attempt_" in write.path and write.path.rpartition(b"/")[2] in TORCHRUN_NAMES:
                yield write.path

    def torchrun(self, path: bytes, holders: Sequence[Process] = ()) -> Attributed | None:
        """Return kind and attribution of a file in a torchrun agent's directory, None for any other.

        The agent holds its workers' files too, but its SLURM_PROCID is no rank.
        """
        found = TORCHRUN_PATH.fullmatch(path)
        if found is None or found["name"] not in TORCHRUN_NAMES:
            return None
        local = int(found["local"])
        agent = self.agents.get(found["agent"])
        base = only(agent.bases[int(found["attempt"])]) if agent else None
        rank = None if base is None else base + local
        workers = [process for process in holders if process.rank is not None]
        if not workers and rank is not None:
            workers = [self._workers[rank, local]] if (rank, local) in self._workers else []
        whose = self.whose(workers)
        if not workers:
            whose["rank"] = rank
        return TORCHRUN_NAMES[found["name"]], {**whose, "local_rank": None if whose["mixed"] else local}

    # -- ranks -----------------------------------------------------------------------------

    def rank(self, process: Process) -> int | None:
        """Return what its launcher gave, else its task's number, unless that task has several ranks."""
        if process.rank is not None or process.is_batch:
            return process.rank
        return only(self._task_ranks.get((process.step, process.procid)) or {process.procid})

    def whose(self, holders: Iterable[Process]) -> dict[str, Any]:
        """Return the attribution of a file that these processes write. What srun writes comes from all its tasks."""
        holders = list(holders)
        launched = [process for process in holders if process.rank is not None]
        named = [process for process in holders if self.rank(process) is not None] or holders
        ranks = {self.rank(process) for process in named}
        mixed = len(ranks) > 1 or any(process.name == "srun" for process in holders)
        tasks = [process for process in named if not process.is_batch]
        return {
            "rank": None if mixed else only(ranks),
            "local_rank": None
            if mixed
            else only(one.local_rank for one in launched)
            if launched
            else only(one.localid for one in tasks),
            "mixed": mixed,
            "step": only(process.step for process in named) or "",
            "task": only(process.procid for process in tasks),
            "pid": next((process.pid for process in (*launched, *named)), None),
            **self._ids,
        }

    def dump_rank(self, name: bytes) -> int | None:
        """Return the rank at the end of a flight recorder's file name, None for any other name."""
        digits = len(name) - len(name.rstrip(b"0123456789"))
        # Not prefix by prefix: every process of a job may have its own.
        widths = range(1, min(digits, _MAX_RANK_DIGITS) + 1)
        return next((int(name[-width:]) for width in widths if name[:-width] in self._dump_prefixes), None)


def dump_prefix(process: Process) -> str:
    """Return what PyTorch puts before the rank in the names of flight recorder dumps; newer name first."""
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    return next((process.environment[name] for name in names if process.environment.get(name)), "")


def only(values: Iterable[_T]) -> _T | None:
    """Return the one value that all are, None where there are several or none."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


class Roots:
    """Where each process's paths begin: ``/proc/PID/root`` for one with mounts of its own, else nothing."""

    def __init__(self) -> None:
        self._own = os.readlink("/proc/self/ns/mnt")  # noqa: PTH115 - this link's text is no path
        self._known: dict[int, bytes] = {}

    def of(self, process: Process) -> bytes:
        """Return the beginning; nothing also where it cannot be known."""
        if process.pid not in self._known:
            self._known[process.pid] = b""
            with suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/ns/mnt") != self._own:  # noqa: PTH115 - as above
                    self._known[process.pid] = b"/proc/%d/root" % process.pid
        return self._known[process.pid]
