"""Discovery, on real processes that write real files."""

import contextlib
import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainarchive import run, sources
from trainarchive.processes import Process, Scanner
from trainarchive.run import Job, Kind, Refusal, RunKey, Source
from trainarchive.settings import Sources as Settings
from trainarchive.sources import Candidate
from trainarchive.sources.held import _DUMP_NAME
from trainarchive.sources.named import _NCCL_PID
from trainarchive.sources.owners import _FIRST_NODE, TORCHRUN_PATH, Owners
from trainarchive.sources.patterns import nccl_name, nccl_path, site_parts, slurm_path
from trainarchive.tail import Identity

JOB = 1_100_000_000 + os.getpid()
"""No real job's id: Slurm's end at 67 million."""
RUN = RunKey("c", JOB)
NODE = "n01"
ME = os.geteuid()

BATCH = {"SLURM_PROCID": "0", "SLURM_JOB_NAME": "train"}

Start = Callable[..., subprocess.Popen[bytes]]
Find = Callable[..., list[Candidate]]


def task(number: int, **more: object) -> dict[str, str]:
    """Return the environment of one of srun's tasks."""
    said = {"SLURM_STEP_ID": 0, "SLURM_PROCID": number, "SLURM_LOCALID": number % 4, "SLURM_NODEID": number // 4}
    return {key: str(value) for key, value in {**said, **more}.items()}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return the job's working directory, as the kernel names it."""
    place = tmp_path.resolve() / "work"
    place.mkdir()
    return place


@pytest.fixture
def start(place: Path) -> Iterator[Start]:
    """Run Python code in a process of the job, in its working directory; it then waits."""
    running: list[subprocess.Popen[bytes]] = []

    def start(
        environment: Mapping[str, str], code: str = "", out: bytes | str | None = None, err: bytes | str | None = None
    ) -> subprocess.Popen[bytes]:
        ready, told = os.pipe()
        text = f"{code}\nimport os, time\nos.write({told}, b'x')\nos.close({told})\ntime.sleep(600)"
        command = [os.path.realpath(sys.executable), "-I", "-S", "-c", text]
        files = [os.open(output(place, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in (out, err)]
        given = {"SLURM_JOB_ID": str(JOB), **environment}
        process = subprocess.Popen(
            command, env=given, pass_fds=(told,), cwd=place, stdout=files[0], stderr=files[1], stdin=subprocess.DEVNULL
        )
        running.append(process)
        for fd in (told, *files):
            os.close(fd)
        assert os.read(ready, 1) == b"x"
        os.close(ready)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()


def output(place: Path, name: bytes | str | None) -> bytes:
    """Return where to write, /dev/null for None."""
    return b"/dev/null" if name is None else os.fsencode(place / os.fsdecode(name))


@pytest.fixture
def find(place: Path) -> Find:
    """Look for the job's files; ``job`` and ``settings`` change what is known."""

    def find(
        settings: Settings | None = None, known: list[Process] | None = None, node: str = NODE, **job: Any
    ) -> list[Candidate]:
        known = Scanner().scan({JOB: ME})[JOB] if known is None else known
        wanted = Job(**{"uid": ME, "user": "ada", "work_dir": str(place), "num_nodes": 1, **job})
        found, refusals = sources.candidates(RUN, wanted, known, settings or Settings(), node)
        assert not refusals
        return found

    return find


def by_path(found: list[Candidate], place: Path) -> dict[str, Candidate]:
    """Return the candidates by their paths below ``place``; no path may come twice."""
    names = [os.fsdecode(candidate.path.removeprefix(os.fsencode(place) + b"/")) for candidate in found]
    assert len(set(names)) == len(names)
    return dict(zip(names, found, strict=True))


def one(found: list[Candidate]) -> Candidate:
    """Return the only candidate."""
    (candidate,) = found
    return candidate


def write(path: Path, text: str = "x\n") -> Path:
    """Make a file, and its directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# -- stdout and stderr ---------------------------------------------------------------------


def test_batch_script(start: Start, find: Find, place: Path) -> None:
    """The batch script's files are Slurm's output, and SLURM_PROCID=0 is no rank there."""
    child = start(BATCH, out="slurm-1.out", err="odd name")
    found = by_path(find(), place)
    assert set(found) == {"slurm-1.out", "odd name"}
    for candidate in found.values():
        assert candidate.kind is Kind.SLURM_STDOUT
        assert (candidate.rank, candidate.task, candidate.mixed, candidate.step) == (None, None, False, "")
        assert candidate.pid == child.pid
    assert os.path.samefile(found["slurm-1.out"].proc_path, place / "slurm-1.out")  # noqa: PTH121 - bytes


def test_task(start: Start, find: Find) -> None:
    """A task's own file has the task's number as its rank."""
    child = start(task(6, SLURM_ARRAY_JOB_ID=40, SLURM_ARRAY_TASK_ID=2, SLURM_HET_JOB_ID=50), out="t6")
    candidate = one(find())
    assert (candidate.kind, candidate.rank, candidate.local_rank) == (Kind.TASK, 6, 2)
    assert (candidate.step, candidate.task, candidate.pid, candidate.fd) == ("0", 6, child.pid, 1)
    assert (candidate.array_job_id, candidate.array_task_id, candidate.het_job_id) == (40, 2, 50)


def test_rank_goes_before_task(start: Start, find: Find) -> None:
    """All workers of a torchrun agent have the agent's SLURM_PROCID: RANK tells them apart."""
    start(task(1, RANK=9, LOCAL_RANK=3), out="r9")
    start(task(2, OMPI_COMM_WORLD_RANK=10), out="r10")
    assert [(c.rank, c.local_rank, c.task) for c in find()] == [(9, 3, 1), (10, None, 2)]


def test_many_ranks_in_one_file(start: Start, find: Find) -> None:
    """What several ranks write is mixed, and has no rank."""
    for rank in (0, 1):
        start(task(rank), out="all.log")
    candidate = one(find())
    assert (candidate.kind, candidate.mixed, candidate.rank, candidate.local_rank) == (Kind.TASK, True, None, None)
    assert candidate.pid is not None


def test_parent_and_child_of_one_rank(start: Start, find: Find) -> None:
    """Data loaders and wrappers share their rank's file."""
    first = start(task(2, RANK=2), out="r2")
    start(task(2, RANK=2), out="r2")
    start(task(2), out="r2")
    candidate = one(find())
    assert (candidate.mixed, candidate.rank, candidate.pid) == (False, 2, first.pid)


def test_agent_and_its_only_worker(start: Start, find: Find) -> None:
    """An agent with one worker writes to the worker's file: the worker's RANK counts, not the agent's SLURM_PROCID."""
    start(task(1), out="o")
    worker = start(task(1, RANK=9, LOCAL_RANK=0), out="o")
    candidate = one(find())
    assert (candidate.mixed, candidate.rank, candidate.local_rank, candidate.pid) == (False, 9, 0, worker.pid)


def test_agents_task_is_no_rank(start: Start, find: Find, place: Path) -> None:
    """A task that has several ranks below it is none itself."""
    start(task(1), out="agent.txt")
    assert one(find()).rank == 1
    for rank in (8, 9):
        start(task(1, RANK=rank, LOCAL_RANK=rank - 8), out=f"w{rank}")
    found = by_path(find(), place)
    assert {name: candidate.rank for name, candidate in found.items()} == {"agent.txt": None, "w8": 8, "w9": 9}
    assert (found["agent.txt"].task, found["agent.txt"].mixed) == (1, False)


def test_batch_script_and_its_workers(start: Start, find: Find) -> None:
    """Slurm's output stays Slurm's output when torchrun's workers write to it too."""
    start(BATCH, out="o")
    for rank in (0, 1):
        start({**BATCH, "RANK": str(rank)}, out="o")
    candidate = one(find())
    assert (candidate.kind, candidate.mixed, candidate.rank) == (Kind.SLURM_STDOUT, True, None)


def test_what_srun_writes(start: Start, find: Find, place: Path) -> None:
    """A process called srun merges its tasks' output, into its stdout and into files of any name."""
    rename = "open('/proc/self/comm', 'w').write('srun')\nimport os\n"
    start(BATCH, f"{rename}os.open('merged', os.O_WRONLY | os.O_CREAT)\nos.open('.hid', os.O_WRONLY | os.O_CREAT)", "o")
    found = by_path(find(), place)
    assert {name: (c.kind, c.mixed) for name, c in found.items()} == {
        "o": (Kind.SLURM_STDOUT, True),
        "merged": (Kind.TASK, True),
    }


def test_slurms_pattern(start: Start, find: Find, place: Path) -> None:
    """The job's own output file is Slurm's output whoever holds it, for example a task that appends to it."""
    start(task(0), out=f"train-{JOB}.txt")
    pattern = {"stdout": "train-%j.txt"}
    assert one(find(**pattern)).kind is Kind.SLURM_STDOUT
    assert one(find()).kind is Kind.TASK
    link = place.parent / "link"
    link.symlink_to(place)
    assert one(find(**pattern, work_dir=str(link))).kind is Kind.SLURM_STDOUT


def test_job_too_short_to_be_seen(find: Find, place: Path) -> None:
    """Its output is found by the pattern, on the batch node, unless it is older than the run."""
    path = write(place / f"slurm-{JOB}.out")
    for job in ({}, {"started": time.time()}, {"num_nodes": 2, "nodes": "n[01-02],m1"}):
        candidate = one(find(known=[], **job))
        assert (candidate.kind, candidate.path, candidate.fd) == (Kind.SLURM_STDOUT, os.fsencode(path), None)
        assert candidate.proc_path == b""
    assert find(known=[], started=time.time() + 60) == []
    for nodes in ("n[02-03]", "n0,n01", "m1,n01", "", "[", "n01[1-2]"):
        assert find(known=[], num_nodes=2, nodes=nodes) == []


# -- other files ---------------------------------------------------------------------------


def test_other_files_by_name(start: Start, find: Find, place: Path) -> None:
    """Of other open files only those with names of logs are followed: no dotfiles, no checkpoints."""
    names = ["a.log", "two\nlines.out", "b.pt", "model.safetensors", ".hidden.log", "c.log.swp", "LOG", "d.jsonl"]
    start(task(0), f"import os\nfor name in {names!r}: os.open(name, os.O_WRONLY | os.O_CREAT)")
    found = by_path(find(), place)
    assert {name: c.kind for name, c in found.items()} == dict.fromkeys(
        ("a.log", "two\nlines.out", "d.jsonl"), Kind.CUSTOM
    )
    assert set(by_path(find(Settings(names=("*.pt",))), place)) == {"b.pt"}
    assert find(Settings(names=())) == []


def test_names_that_are_no_text(start: Start, find: Find, place: Path) -> None:
    """Paths are bytes from the kernel to the archive."""
    start(task(0), out=b"\xff\n.log")
    candidate = one(find())
    assert candidate.path == os.fsencode(place) + b"/\xff\n.log"
    assert sources.describe(candidate, "i", NODE).path_bytes == candidate.path


def test_deleted_files(start: Start, find: Find, place: Path) -> None:
    """A file without a name keeps its old one; a file may really be called "x (deleted)"."""
    code = """
import os
def make(name): return os.open(name, os.O_WRONLY | os.O_CREAT)
make("gone.log"); os.unlink("gone.log")
make("real.log (deleted)")
make("both.log (deleted)"); os.unlink("both.log (deleted)")
make("twice.log"); os.unlink("twice.log"); make("twice.log")
make("trap.log"); os.unlink("trap.log"); make("trap.log (deleted)")
"""
    start(task(0), code)
    found = find(Settings(names=("*.log", "*.log (deleted)")))
    names = sorted(os.fsdecode(c.path).removeprefix(f"{place}/") for c in found)
    wanted = ["gone.log", "real.log (deleted)", "both.log (deleted)", "twice.log", "twice.log", "trap.log"]
    assert names == sorted([*wanted, "trap.log (deleted)"])
    assert len({os.stat(c.proc_path).st_ino for c in found}) == 7  # noqa: PTH116 - bytes


def test_file_in_place_of_a_deleted_one(start: Start, find: Find, place: Path) -> None:
    """A path from a pattern is not hidden by a deleted file that once had it."""
    start(task(0), "import os\nos.open('a.log', os.O_WRONLY | os.O_CREAT); os.unlink('a.log')")
    write(place / "a.log")
    found = find(Settings(patterns=("{workdir}/*.log",)))
    assert [(c.path, c.fd is None) for c in found] == [
        (os.fsencode(place / "a.log"), False),
        (os.fsencode(place / "a.log"), True),
    ]


def test_devices_and_pipes(start: Start, find: Find) -> None:
    """Nothing of these is a file that a run writes."""
    start(task(0), "import os\nos.pipe(); os.openpty(); os.memfd_create('m.log'); os.open('/dev/shm', os.O_RDONLY)")
    assert find() == []


def test_ended_processes(start: Start, find: Find, place: Path) -> None:
    """What is held is opened through a living process; what only the dead held is not there any more."""
    first = start(task(0, RANK=0), out="shared.txt")
    start(task(0, RANK=0), out="only.txt")
    known = Scanner().scan({JOB: ME})[JOB]
    first.kill()
    first.wait()
    second = start(task(1, RANK=1), out="shared.txt")
    known += [process for process in Scanner().scan({JOB: ME})[JOB] if process.pid == second.pid]
    found = by_path(find(known=known), place)
    assert (found["shared.txt"].pid, found["shared.txt"].mixed) == (second.pid, True)
    second.kill()
    second.wait()
    assert set(by_path(find(known=known), place)) == {"only.txt"}


# -- torchrun ------------------------------------------------------------------------------


def torchrun(start: Start, place: Path, ranks: range, attempt: int = 0) -> Path:
    """Lay out a log directory as torchrun does, with an agent that holds all files and one process a rank."""
    agent = place / "logs" / "none_abc12345"
    names = []
    for local in range(len(ranks)):
        folder = agent / f"attempt_{attempt}" / str(local)
        folder.mkdir(parents=True)
        names += [str(folder / "stdout.log"), str(folder / "stderr.log")]
    start(task(1), f"import os\nfor name in {names!r}: os.open(name, os.O_WRONLY | os.O_CREAT)", out="agent.txt")
    for local, rank in enumerate(ranks):
        folder = agent / f"attempt_{attempt}" / str(local)
        said = {"RANK": rank, "LOCAL_RANK": local, "TORCHELASTIC_ERROR_FILE": folder / "error.json"}
        start(task(1, **said), out=f"{folder}/stdout.log", err=f"{folder}/stderr.log")
    return agent


def test_torchrun(start: Start, find: Find, place: Path) -> None:
    """The agent holds its workers' files too, and its SLURM_PROCID is not their rank."""
    agent = torchrun(start, place, range(8, 10))
    write(agent / "attempt_0" / "1" / "error.json", "{}")
    found = by_path(find(), agent / "attempt_0")
    found.pop(str(place / "agent.txt"))
    assert {name: (c.kind, c.rank, c.local_rank, c.mixed) for name, c in found.items()} == {
        "0/stdout.log": (Kind.TORCHRUN, 8, 0, False),
        "0/stderr.log": (Kind.TORCHRUN, 8, 0, False),
        "1/stdout.log": (Kind.TORCHRUN, 9, 1, False),
        "1/stderr.log": (Kind.TORCHRUN, 9, 1, False),
        "1/error.json": (Kind.ERROR_JSON, 9, 1, False),
    }


def test_torchrun_workers_that_ended(start: Start, find: Find, place: Path) -> None:
    """The rank that died first matters most: a living worker beside it tells its rank, but not those of before."""
    agent = torchrun(start, place, range(8, 9), attempt=1)
    write(agent / "attempt_1" / "2" / "error.json", "{}")
    write(agent / "attempt_1" / "2" / ".hidden")
    write(agent / "attempt_1" / "2" / "other.txt")
    write(agent / "attempt_0" / "2" / "stderr.log")
    (agent / "attempt_1" / "3").symlink_to(agent / "attempt_1" / "2")
    (agent / "attempt_1" / "2" / "stdout.log").symlink_to("/etc/passwd")
    found = by_path(find(), agent)
    assert (found["attempt_1/2/error.json"].rank, found["attempt_1/2/error.json"].local_rank) == (10, 2)
    assert (found["attempt_0/2/stderr.log"].rank, found["attempt_0/2/stderr.log"].local_rank) == (None, 2)
    assert "attempt_1/2/other.txt" not in found
    assert "attempt_1/2/stdout.log" not in found


def test_torchrun_agent_alone(start: Start, find: Find, place: Path) -> None:
    """Before its workers run, an agent's files have a local rank and no rank."""
    folder = place / "logs" / "x" / "attempt_0" / "3"
    folder.mkdir(parents=True)
    start(task(1), f"import os\nos.open({str(folder / 'stdout.log')!r}, os.O_WRONLY | os.O_CREAT)")
    candidate = one(find())
    assert (candidate.kind, candidate.rank, candidate.local_rank) == (Kind.TORCHRUN, None, 3)


def test_error_file_elsewhere(start: Start, find: Find, place: Path) -> None:
    """Without torchrun's layout, TORCHELASTIC_ERROR_FILE is still whose it is."""
    start(task(4, TORCHELASTIC_ERROR_FILE=place / "why.json"))
    assert find() == []
    write(place / "why.json", "{}")
    candidate = one(find())
    assert (candidate.kind, candidate.rank) == (Kind.ERROR_JSON, 4)


# -- NCCL and the flight recorder ----------------------------------------------------------


def test_nccl_file(start: Start, find: Find, place: Path) -> None:
    """NCCL_DEBUG_FILE names a file for each process: found while it is open and after it was closed."""
    pattern = f"{place}/debug-%h-%p"
    code = f"import os\nos.open(f'debug-{NODE}-{{os.getpid()}}', os.O_WRONLY | os.O_CREAT)"
    holding = start(task(0, RANK=0, NCCL_DEBUG_FILE=pattern), code)
    closed = start(task(1, RANK=1, NCCL_DEBUG_FILE=pattern))
    write(place / f"debug-{NODE}-{closed.pid}")
    write(place / f"debug-{NODE}-1")
    found = by_path(find(), place)
    assert {name: (c.kind, c.rank, c.fd is None) for name, c in found.items()} == {
        f"debug-{NODE}-{holding.pid}": (Kind.NCCL, 0, False),
        f"debug-{NODE}-{closed.pid}": (Kind.NCCL, 1, True),
    }


def test_nccl_file_of_all(start: Start, find: Find, place: Path) -> None:
    """A name without a pid is one file for all ranks, and an old one is of another run."""
    for rank in (0, 1):
        start(task(rank, NCCL_DEBUG_FILE="nccl.txt"))
    write(place / "nccl.txt")
    candidate = one(find())
    assert (candidate.kind, candidate.mixed, candidate.rank) == (Kind.NCCL, True, None)
    assert find(started=time.time() + 60) == []


def test_flight_recorder(start: Start, find: Find, place: Path) -> None:
    """Dumps are named by prefix and rank; the newer variable counts."""
    said = {"TORCH_FR_DUMP_TEMP_FILE": f"{place}/fr_", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{place}/old_"}
    start(task(0, RANK=3, **said), "import os\nos.open('fr_12', os.O_WRONLY | os.O_CREAT)")
    start(task(1, RANK=4, TORCH_NCCL_DEBUG_INFO_TEMP_FILE=f"{place}/old_"))
    for name in ("fr_3", "old_3", "old_4"):
        write(place / name)
    found = by_path(find(), place)
    assert {name: (c.kind, c.rank) for name, c in found.items()} == {
        name: (Kind.FLIGHT_RECORDER, rank) for name, rank in (("fr_12", 12), ("fr_3", 3), ("old_4", 4))
    }


# -- the private directory -----------------------------------------------------------------


def test_private_directory(start: Start, find: Find, place: Path) -> None:
    """Everything in it is followed, except what is hidden, a link or no file."""
    private = place / "private"
    child = start(task(5, RANK=5), "")
    for name in (f"nccl.{NODE}.{child.pid}.log", f"nccl.{NODE}.1.log", "nccl_trace_rank_7", "error.json", "a/b/deep"):
        write(private / name)
    for name in (".hidden", ".git/config"):
        write(private / name)
    (private / "link").symlink_to("/etc/passwd")
    (private / "folder").symlink_to("/etc")
    os.mkfifo(private / "pipe")
    found = by_path(find(private_dir=str(private)), private)
    assert {name: (c.kind, c.rank) for name, c in found.items()} == {
        f"nccl.{NODE}.{child.pid}.log": (Kind.NCCL, 5),
        f"nccl.{NODE}.1.log": (Kind.NCCL, None),
        "nccl_trace_rank_7": (Kind.FLIGHT_RECORDER, 7),
        "error.json": (Kind.ERROR_JSON, None),
        "a/b/deep": (Kind.CUSTOM, None),
    }
    private.rename(place / "moved")
    private.symlink_to("/etc")
    assert find(private_dir=f"{private}/", known=[]) == []


def test_held_files_in_the_private_directory(start: Start, find: Find, place: Path) -> None:
    """They have the same kind held as closed, whatever the site's list of names says."""
    private = place / "private"
    private.mkdir()
    names = ["nccl.x.1.log", "nccl_trace_rank_7", "metrics.bin", ".hidden"]
    start(task(5, RANK=5), f"import os\nfor name in {names!r}: os.open('private/' + name, os.O_WRONLY | os.O_CREAT)")
    found = by_path(find(private_dir=str(private)), private)
    assert {name: (c.kind, c.rank, c.fd is None) for name, c in found.items()} == {
        "nccl.x.1.log": (Kind.NCCL, 5, False),
        "nccl_trace_rank_7": (Kind.FLIGHT_RECORDER, 7, False),
        "metrics.bin": (Kind.CUSTOM, 5, False),
    }


def test_very_deep_directories(find: Find, place: Path) -> None:
    """A user may nest them without end."""
    path = place / "private"
    for _ in range(40):
        path /= "d"
    write(path / "x")
    assert find(private_dir=str(place / "private"), known=[]) == []


# -- site patterns -------------------------------------------------------------------------


def test_site_patterns(find: Find, place: Path) -> None:
    """What a site configures is found for the run at hand, if it was written since the run began."""
    for name in ("logs/a.log", "logs/.b.log", f"ada-{JOB}-{NODE}/x", "logs/sub/c.log"):
        write(place / name)
    (place / "logs" / "link.log").symlink_to(place / "logs" / "a.log")
    (place / "logs" / "folder.log").mkdir()
    os.utime(write(place / "logs" / "old.log"), (1, 1))
    patterns = ("{workdir}/logs/*.log", f"{place}/{{user}}-{{job_id}}-{{node}}/[x-z]", "{workdir}/logs", "no/*", "")
    found = by_path(find(Settings(patterns=patterns), known=[], started=time.time() - 5), place)
    assert set(found) == {"logs/a.log", f"ada-{JOB}-{NODE}/x"}
    assert {(c.kind, c.rank, c.mixed) for c in found.values()} == {(Kind.CUSTOM, None, False)}


def test_working_directory_is_no_pattern(find: Find, place: Path) -> None:
    """A user may call his directory ``*``, and gets his own files only."""
    write(place / "a" / "mine.log")
    write(place / "*" / "star.log")
    write(place / "[a]" / "set.log")
    settings = Settings(patterns=("{workdir}/*.log",))
    for name, wanted in (("*", "star.log"), ("[a]", "set.log"), ("?", None), ("{user}", None)):
        found = [Path(os.fsdecode(c.path)).name for c in find(settings, known=[], work_dir=f"{place}/{name}")]
        assert found == ([wanted] if wanted else [])


def test_a_file_found_twice(start: Start, find: Find, place: Path) -> None:
    """Held, and matched through a link to its directory: it is one file with one path."""
    start(task(3), out="a.log")
    link = place.parent / "link"
    link.symlink_to(place)
    candidate = one(find(Settings(patterns=("{workdir}/*.log",)), work_dir=str(link)))
    assert (candidate.kind, candidate.rank, candidate.path) == (Kind.TASK, 3, os.fsencode(place / "a.log"))


def test_too_many_files(find: Find, start: Start, place: Path) -> None:
    """Beyond the bound files are left out, those that processes hold last, and the refusal says so."""
    for number in range(50):
        write(place / "logs" / f"{number}.log")
    start(task(0), out="held")
    job = Job(uid=ME, work_dir=str(place), num_nodes=1)
    known = Scanner().scan({JOB: ME})[JOB]
    settings = Settings(patterns=("{workdir}/logs/*.log",), max_files_per_run=10)
    found, refusals = sources.candidates(RUN, job, known, settings, NODE)
    assert len(found) == 10
    assert found[0].path.endswith(b"/held")
    assert [refusal.path for refusal in refusals] == [str(place)]
    assert "max_files_per_run = 10" in refusals[0].reason
    assert isinstance(refusals[0], Refusal)
    assert len(find(Settings(patterns=("{workdir}/logs/*.log",)))) == 51


@pytest.mark.skipif(ME != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_process_with_its_own_mounts(find: Find, place: Path) -> None:
    """With a private /tmp, a path that a process names is reached through its root."""
    (place / "own").mkdir()
    script = f"mount -t tmpfs none {place}/own && echo inside > {place}/own/why.json && echo x && exec sleep 600"
    said = {"SLURM_JOB_ID": str(JOB), "TORCHELASTIC_ERROR_FILE": f"{place}/own/why.json", "PATH": os.environ["PATH"]}
    command = ["unshare", "--mount", "sh", "-c", script]
    with (
        subprocess.Popen(command, env={**said, **task(2)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
        contextlib.ExitStack() as at_end,
    ):
        at_end.callback(process.kill)
        assert process.stdout is not None
        if process.stdout.readline() != b"x\n":
            pytest.skip("no mount namespaces here")
        candidate = one(find())
        assert (candidate.kind, candidate.rank, candidate.path) == (
            Kind.ERROR_JSON,
            2,
            os.fsencode(place / "own/why.json"),
        )
        assert Path(os.fsdecode(candidate.proc_path)).read_text() == "inside\n"


# -- what becomes of candidates ------------------------------------------------------------


def source(**known: Any) -> Source:
    """Return a source that is known a little."""
    return Source(**{"id": "i", "node": NODE, "kind": Kind.TASK, "path": "/x", **known})


def candidate(**known: Any) -> Candidate:
    """Return the same file as seen by a later look."""
    return Candidate(**{"kind": Kind.TASK, "path": b"/x", **known})


@pytest.mark.parametrize(
    ("old", "new", "gained"),
    [
        (
            {},
            {"rank": 3, "local_rank": 1, "task": 3, "step": "0"},
            {"rank": 3, "local_rank": 1, "task": 3, "step": "0"},
        ),
        ({"rank": 3}, {"rank": 4}, {"rank": None, "mixed": True}),
        ({"rank": 3, "task": 3}, {"rank": 4, "task": 4}, {"rank": None, "task": None, "mixed": True}),
        (
            {"rank": 3, "local_rank": 3, "pid": 1},
            {"mixed": True},
            {"rank": None, "local_rank": None, "pid": None, "mixed": True},
        ),
        ({"rank": 1, "task": 1}, {"rank": 9, "local_rank": 1, "task": 1}, {"rank": 9, "local_rank": 1}),
        ({"rank": 1, "task": 1}, {"rank": None, "task": 1}, {"rank": None}),
        ({"kind": Kind.CUSTOM}, {"kind": Kind.NCCL}, {"kind": Kind.NCCL}),
        ({"rank": 3}, {"rank": 3, "array_job_id": 7, "array_task_id": 1}, {"array_job_id": 7, "array_task_id": 1}),
    ],
)
def test_merge(old: dict[str, Any], new: dict[str, Any], gained: dict[str, Any]) -> None:
    """A later look may know more."""
    assert sources.merge(source(**old), candidate(**new)) == source(**{**old, **gained})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {}),
        ({"rank": 3, "task": 3, "step": "0", "pid": 8}, {}),
        ({"rank": 3, "pid": 8}, {"rank": 3, "pid": 9}),
        ({"mixed": True}, {"rank": 3, "pid": 9, "task": 3}),
        ({"mixed": True}, {"mixed": True, "pid": 9}),
        ({"kind": Kind.NCCL}, {"kind": Kind.CUSTOM}),
    ],
)
def test_merge_of_nothing_new(old: dict[str, Any], new: dict[str, Any]) -> None:
    """What is known stays, and nothing is told twice."""
    assert sources.merge(source(**old), candidate(**new)) is None


attributions = st.builds(
    candidate,
    rank=st.none() | st.integers(0, 2),
    task=st.none() | st.integers(0, 2),
    mixed=st.just(value=False),
    pid=st.none() | st.integers(1, 2),
    kind=st.sampled_from(Kind),
)


@given(attributions, attributions)
def test_merge_settles(first: Candidate, second: Candidate) -> None:
    """The same look again changes nothing."""
    old = sources.describe(first, "i", NODE)
    better = sources.merge(old, second) or old
    assert sources.merge(better, second) is None


def test_describe() -> None:
    """A source says what the candidate knew; a mixed one has no pid."""
    known = candidate(rank=2, local_rank=1, step="0", task=2, pid=7, het_job_id=9, het_offset=1)
    assert sources.describe(known, "0123", NODE) == source(
        id="0123", rank=2, local_rank=1, step="0", task=2, pid=7, het_job_id=9, het_offset=1
    )
    assert sources.describe(msgspec.structs.replace(known, mixed=True), "i", NODE).pid is None


def test_source_id() -> None:
    """Node, file and path make the id, and nothing else."""
    file = Identity(fs=1, inode=2, birth_ns=3)
    ids = {
        sources.source_id(node, identity, path)
        for node in ("n1", "n2")
        for identity in (file, Identity(1, 2, 4), Identity(1, 3, 3), Identity(2, 2, 3))
        for path in (b"/x", b"/y\xff")
    }
    assert len(ids) == 16
    assert all(re.fullmatch("n[12]-[0-9a-f]{16}", name) for name in ids)
    assert len({name for name in ids if run.is_source_of("n1", name)}) == 8
    assert sources.source_id("n1", file, b"/x") == sources.source_id("n1", Identity(1, 2, 3), b"/x")


# -- patterns ------------------------------------------------------------------------------

VALUES: dict[str, str | int | None] = {
    "j": 128,
    "A": 120,
    "a": 3,
    "N": "n01",
    "x": "my job",
    "u": "ada",
    "t": 0,
    "s": None,
}


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("job%j.out", "/w/job128.out"),
        ("job%4j.out", "/w/job0128.out"),
        ("job%99j", "/w/job0000000128"),
        ("job%0j", "/w/job128"),
        ("%A_%2a-%3N.%x", "/w/120_03-n01.my job"),
        ("/a/%u/../%t", "/a/0"),
        ("100%%j", "/w/100%j"),
        ("100%", "/w/100%"),
        ("a\\%j", "/w/a%j"),
        ("//a", "/a"),
        ("%s", None),
        ("%q", None),
        ("a\0b", None),
        ("", None),
    ],
)
def test_slurm_path(pattern: str, path: str | None) -> None:
    """Slurm's symbols as its manual has them."""
    assert slurm_path(pattern, "/w", VALUES) == (path.encode() if path else None)


texts = st.text(st.sampled_from("/.%*?[]{}\\\0 \n-aé\udcff\ud800"), max_size=12) | st.text(max_size=12)

nasty_names = st.text(st.sampled_from("/.*?[!]a{}"), min_size=1, max_size=4) | texts


@given(st.text(st.sampled_from("a%%xuN5."), max_size=10), nasty_names, nasty_names, nasty_names)
@example("a%x", "b/../../c", "", "")
@example("%x", "..", "", "")
@example("%x%u", ".", ".", "")
def test_slurm_path_stays_in_its_directory(pattern: str, name: str, user: str, node: str) -> None:
    """No job name leads out of the working directory or into another one."""
    path = slurm_path(pattern, "/w/d", {"x": name, "u": user, "N": node})
    assert path is None or pattern in (".", "..") or path.rpartition(b"/")[0] == b"/w/d"


@given(st.text(st.sampled_from("%/.\\jx9a\n\0é\ud800"), max_size=12), texts)
def test_slurm_path_is_absolute(pattern: str, work_dir: str) -> None:
    """Whatever a user asks for: an absolute path without steps, or none."""
    path = slurm_path(pattern, work_dir, VALUES)
    assert path is None or (path.startswith(b"/") and b"\0" not in path and os.path.normpath(path) == path)


@given(texts, nasty_names, nasty_names)
@example("/w", "ada", "*")
@example("/*/[a]", "..", "a/b")
def test_site_values_are_only_themselves(workdir: str, user: str, node: str) -> None:
    """No working directory or name matches anything but itself, or leads out of where the site put it."""
    values = {"workdir": workdir, "user": user, "job_id": "7", "node": node}
    parts = site_parts("/logs/{user}/x-{node}.*/{job_id}", values)
    if parts is not None:
        first, second, third, last = parts
        assert (first, second, last) == (b"logs", os.fsencode(user), b"7")
        assert isinstance(second, bytes)
        assert second not in (b"", b".", b"..")
        assert b"/" not in second
        assert not isinstance(third, bytes)
        assert third.fullmatch(b"x-" + os.fsencode(node) + b".log")
        assert third.fullmatch(b"x-other-n0de.log") is None
    parts = site_parts("{workdir}/*.log", values)
    if parts is not None:
        names = [part for part in parts[:-1] if isinstance(part, bytes)]
        assert len(names) == len(parts) - 1
        assert not {b"", b".", b".."} & set(names)
        assert b"/" + b"/".join(names) == b"/" + os.path.normpath(os.fsencode(workdir)).lstrip(b"/")
    assert workdir.count("/") == 0 or site_parts("/logs{workdir}/x", values) is None


def test_site_patterns_that_cannot_be_used() -> None:
    """A value that is missing, or would add a directory, leaves the pattern without files."""
    good = {"workdir": "/w", "user": "ada", "job_id": "7", "node": "n"}
    assert site_parts("{workdir}/{user}", good) == (b"w", b"ada")
    assert site_parts("/a//{other}/..", good) == (b"a", b"{other}", b"..")
    for bad in ({"user": ""}, {"user": ".."}, {"user": "a/b"}, {"user": "a\0"}, {"workdir": ""}, {"workdir": "w"}):
        assert site_parts("{workdir}/{user}", {**good, **bad}) is None
    assert site_parts("relative/{user}", good) is None
    assert site_parts("/{user}{node}", {**good, "user": ".", "node": "."}) is None


@given(texts, st.integers(1, 2**22))
def test_nccl_name(pattern: str, pid: int) -> None:
    """What NCCL makes of a pattern is known by it again."""
    made = nccl_path(pattern, "n01", pid).rpartition("/")[2]
    if "\ud800" not in pattern:
        assert nccl_name(pattern).fullmatch(os.fsencode(made))


def test_an_nccl_pattern_knows_its_own_files_only() -> None:
    """One process has one host and one pid, however often the pattern names them."""
    known = nccl_name("/x/%h.%p.%h.%%.%p")
    assert known.fullmatch(b"n1.7.n1.%.7")
    assert known.fullmatch(b"n1.7.n2.%.7") is None
    assert known.fullmatch(b"n1.7.n1.%.8") is None
    assert nccl_name("%h%h").fullmatch(b"n1n1")
    assert nccl_name("%h").fullmatch(b"a" * 64)
    assert nccl_name("%h").fullmatch(b"a" * 65) is None
    assert nccl_name("a" * 600).fullmatch(b"a" * 600) is None


@contextlib.contextmanager
def at_most(cpu_s: float) -> Iterator[None]:
    """End what uses this much CPU time: thousands of times what it may need, however slow the machine is."""

    def over(_number: int, _frame: object) -> None:
        raise AssertionError(f"over {cpu_s} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, over)  # Python's matcher looks for signals while it works
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


dull = st.builds(
    lambda piece, times, end: (piece * times)[:254] + end,
    st.text(st.sampled_from("a1.X_-"), min_size=1, max_size=3),
    st.just(255),
    st.text(st.sampled_from("a1.X"), max_size=1),
)


@given(st.lists(st.sampled_from(["%h", "%p", "%%", "a", "1", ".", "X"]), max_size=300).map("".join), dull)
@example("%h" * 9 + "X", "a" * 100 + ".log")
@example("%h.%p" * 40, "1." * 120 + "x")
@example("%h1%p1" * 40, "1" * 254 + "x")
def test_no_nccl_pattern_holds_the_collector_up(pattern: str, name: str) -> None:
    """A user chooses both the pattern and the names."""
    with at_most(0.5):
        nccl_name(pattern).fullmatch(name.encode())


@given(st.text(st.sampled_from("*?[!]a1.-"), max_size=40), dull)
@example("*a" * 20 + "b", "a" * 254)
@example("*?" * 20 + "b", "a" * 254)
@example("*[!b]" * 9 + "b", "a" * 254)
def test_no_site_pattern_holds_the_collector_up(pattern: str, name: str) -> None:
    """Sites choose patterns, users the names that these are tried on and the values that are put in."""
    with at_most(0.5):
        parts = site_parts(f"/{{user}}{pattern}", {"workdir": "/", "user": pattern.replace("/", "") or "u"})
        for part in parts or ():
            if not isinstance(part, bytes):
                part.fullmatch(name.encode())
        re.compile(fnmatch.translate(pattern)).match(name)


@pytest.mark.parametrize(
    ("pattern", "unit", "end"),
    [
        (_DUMP_NAME, b"trace_", b"x"),
        (_DUMP_NAME, b"dump_rank_1", b"x"),
        (_DUMP_NAME, b"_", b""),
        (_NCCL_PID, b"nccl.1.", b"x"),
        (_NCCL_PID, b"1.log.", b""),
        (TORCHRUN_PATH, b"/attempt_1/1/", b"/"),
        (TORCHRUN_PATH, b"/attempt_1/1", b"/"),
        (TORCHRUN_PATH, b"/1", b"/"),
        (_FIRST_NODE, b"n[1", b""),
        (_FIRST_NODE, b"1", b"["),
    ],
)
def test_no_other_pattern_holds_the_collector_up(pattern: re.Pattern[Any], unit: bytes, end: bytes) -> None:
    """What users, or a list of many nodes, can make long is read in a time that grows with its length only."""
    text: Any = b"nccl./x" + unit * (100_000 // len(unit)) + end
    if isinstance(pattern.pattern, str):
        text = "n[" + (unit * (100_000 // len(unit)) + end).decode()
    with at_most(2.0):
        pattern.fullmatch(text)
        pattern.match(text)


def dead(rank: int, **environment: str) -> Process:
    """Return a process that has ended."""
    return Process(
        pid=2**30 + rank, start_time=1, uid=ME, job_id=JOB, name="x", environment=environment, rank=rank, writes=()
    )


def test_the_rank_in_a_dumps_name() -> None:
    """Every process may have its own prefix, and one that ends with digits takes none of the rank's."""
    prefixes = ("/tmp/a", "/tmp/a1", "/tmp/nccl_trace_rank_")
    known = [dead(rank, TORCH_FR_DUMP_TEMP_FILE=prefix) for rank, prefix in enumerate(prefixes)]
    about = Owners(RUN, Job(uid=ME), known, NODE)
    for name, rank in {
        b"nccl_trace_rank_12": 12,
        b"a7": 7,
        b"a15": 5,
        b"a": None,
        b"a" + b"7" * 11: None,
        b"b7": None,
        b"7": None,
    }.items():
        assert about.dump_rank(name) == rank, name


def test_one_look_costs_by_files_not_by_files_and_processes(tmp_path: Path) -> None:
    """With 4,096 processes, each with names of its own, 10,000 files take as good as no more time."""
    for number in range(10_000):
        (tmp_path / f"{number}.log").touch()
    known = [
        dead(rank, TORCH_FR_DUMP_TEMP_FILE=f"/x/{rank}_", NCCL_DEBUG_FILE=f"{tmp_path}/{rank}.%h")
        for rank in range(4096)
    ]
    job = Job(uid=ME, private_dir=os.fspath(tmp_path))
    with at_most(3.0):
        for _ in range(2):
            found, _ = sources.candidates(RUN, job, known, Settings(), NODE)
            assert len(found) == 10_000
