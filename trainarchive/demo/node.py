"""A pretend node: directories of its own, real hooks with Slurm's environment, a real collector, rank processes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from trainarchive.errors import TrainarchiveError
from trainarchive.places import shipped

RANK_PROGRAM = Path(__file__).with_name("rank.py")
STOP_S = 20.0


class PretendJob(msgspec.Struct, frozen=True):
    """What Slurm would know of a job. ``user`` is whoever runs the demo."""

    job_id: int
    nodes: str
    num_nodes: int
    work_dir: str


class Rank(msgspec.Struct, frozen=True):
    """A rank, its habit (see ``rank.py``), and where its stdout goes, below the node's scratch."""

    number: int
    local: int
    habit: str
    stdout: str


class Node:
    """One pretend node, everything of it below ``root``."""

    def __init__(self, name: str, root: Path, home: Path) -> None:
        """``home`` is the demo's TRAINARCHIVE_HOME: the shelf and Redis, not on any node."""
        self.name = name
        self.root = root
        self.scratch = root / "scratch"
        self.spool = root / "spool"
        self._home = home
        self._log = home / f"collector-{name}.log"
        self._collector: subprocess.Popen[bytes] | None = None
        self.scratch.mkdir(parents=True)
        self.spool.mkdir(mode=0o711)

    # -- the collector ---------------------------------------------------------------------

    def start_collector(self) -> None:
        """Start this node's collector as a process of its own."""
        environment = os.environ | {
            "TRAINARCHIVE_HOME": os.fspath(self._home),
            "TRAINARCHIVE_NODE_SPOOL": os.fspath(self.spool),
            "TRAINARCHIVE_NODE_STATE": os.fspath(self.root / "state"),
        }
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "trainarchive", "collector"]
            self._collector = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def await_collector(self, seconds: float) -> None:
        """Return when the collector looks after its spool: a prolog may be earlier, a short process may not."""
        await_process(self._collector, self._log, (self.root / "state" / "alive").exists, seconds)

    def stop_collector(self) -> None:
        """Stop it gracefully, or by force when that takes too long."""
        if self._collector is not None:
            self._collector.send_signal(signal.SIGTERM)
            try:
                self._collector.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._collector.kill()
                self._collector.wait()
            self._collector = None

    def wipe(self) -> int:
        """Reimage the node: nothing of it is left. Return how many files went."""
        gone = sum(len(files) for _, _, files in os.walk(self.root))
        shutil.rmtree(self.root)
        return gone

    # -- hooks -----------------------------------------------------------------------------

    def prolog(self, job: PretendJob) -> None:
        """Run the prolog as slurmd does: nothing in the environment but Slurm's own words."""
        self._hook("prolog.d", self._slurm(job))

    def epilog(self, job: PretendJob, exit_code: str) -> None:
        """Run the epilog."""
        code, _, number = exit_code.partition(":")
        ends = {"SLURM_JOB_EXIT_CODE2": exit_code, "SLURM_JOB_DERIVED_EC": str(int(code) << 8 | int(number))}
        self._hook("epilog.d", self._slurm(job) | ends)

    def _hook(self, directory: str, environment: dict[str, str]) -> None:
        script = shipped(f"slurm/{directory}/50-trainarchive.sh")
        done = subprocess.run(
            ["/bin/sh", os.fspath(script)], env=environment, capture_output=True, timeout=10, check=False
        )
        if done.returncode != 0 or done.stdout or done.stderr:
            raise TrainarchiveError(f"status {done.returncode}, said {done.stderr!r}", where=os.fspath(script))

    def _slurm(self, job: PretendJob) -> dict[str, str]:
        user = os.environ.get("USER", "demo")
        return {
            "TRAINARCHIVE_SPOOL": os.fspath(self.spool),
            "SLURM_CLUSTER_NAME": "demo",
            "SLURMD_NODENAME": self.name,
            "SLURM_JOB_ID": str(job.job_id),
            "SLURM_JOBID": str(job.job_id),
            "SLURM_JOB_UID": str(os.getuid()),
            "SLURM_JOB_GID": str(os.getgid()),
            "SLURM_UID": str(os.getuid()),
            "SLURM_JOB_USER": user,
            "SLURM_JOB_PARTITION": "gpu",
            "SLURM_NODELIST": job.nodes,
            "SLURM_JOB_NUM_NODES": str(job.num_nodes),
            "SLURM_JOB_WORK_DIR": job.work_dir,
            "SLURM_JOB_RESTART_COUNT": "0",
        }

    # -- ranks -----------------------------------------------------------------------------

    def start_rank(self, job: PretendJob, rank: Rank, truth: Path) -> subprocess.Popen[bytes]:
        """Start a rank as slurmstepd does: TaskProlog's exports first, stdout opened for it."""
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "TRAINARCHIVE_SPOOL": os.fspath(self.spool),
            "SLURMD_NODENAME": self.name,
            "SLURM_CLUSTER_NAME": "demo",
            "SLURM_JOB_ID": str(job.job_id),
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank.number),
            "SLURM_LOCALID": str(rank.local),
            "RANK": str(rank.number),
            "LOCAL_RANK": str(rank.local),
            "TORCHELASTIC_ERROR_FILE": os.fspath(
                self.scratch / f"errors-{job.job_id}" / str(rank.local) / "error.json"
            ),
        }
        environment |= self._task_prolog(environment)
        stdout = self.scratch / rank.stdout
        stdout.parent.mkdir(parents=True, exist_ok=True)
        with stdout.open("ab") as out:
            command = [sys.executable, "-S", os.fspath(RANK_PROGRAM), rank.habit, os.fspath(truth)]
            return subprocess.Popen(command, env=environment, stdout=out, stderr=out, cwd=self.scratch)

    def _task_prolog(self, environment: dict[str, str]) -> dict[str, str]:
        script = shipped("slurm/taskprolog.d/50-trainarchive.sh")
        done = subprocess.run(
            ["/bin/sh", os.fspath(script)], env=environment, capture_output=True, timeout=10, check=True
        )
        exports = {}
        for line in done.stdout.decode().splitlines():
            word, _, assignment = line.partition(" ")
            if word == "export":
                name, _, value = assignment.partition("=")
                exports[name] = value
        return exports


def await_process(
    process: subprocess.Popen[bytes] | None, log: Path, is_ready: Callable[[], bool], seconds: float
) -> None:
    """Wait until ``is_ready``; raise, with the log's last line, where the process ends or takes too long."""
    deadline = time.monotonic() + seconds
    while not is_ready():
        ended = process is None or process.poll() is not None
        if ended or time.monotonic() > deadline:
            last = (log.read_text(errors="backslashreplace").splitlines() or ["no word"])[-1]
            raise TrainarchiveError(f"{'ended' if ended else 'not ready'}: {last}", where=os.fspath(log))
        time.sleep(0.05)


def wait_for(ranks: list[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """Wait for the ranks; return their statuses."""
    deadline = time.monotonic() + seconds
    return [rank.wait(max(0.1, deadline - time.monotonic())) for rank in ranks]
