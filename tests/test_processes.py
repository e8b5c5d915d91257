"""The /proc reader, on real processes."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainarchive import processes
from trainarchive.processes import Process, Scanner

JOB = 1_000_000_000 + os.getpid()
"""No real job's id: Slurm's end at 67 million."""
ME = os.geteuid()
NOBODY = 65534
DEADLINE_S = 20.0

as_root = pytest.mark.skipif(ME != 0, reason="only root may start processes of another user")

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Run Python code in a process of its own, which then waits; return when the code has run."""
    running: list[subprocess.Popen[bytes]] = []

    def start(
        code: str = "", environment: Mapping[str, str | bytes] | None = None, **options: object
    ) -> subprocess.Popen[bytes]:
        ready, told = os.pipe()
        text = f"{code}\nimport os, time\nos.write({told}, b'x')\nos.close({told})\ntime.sleep(600)"
        given: dict[str, str | bytes] = {"SLURM_JOB_ID": str(JOB), **(environment or {})}
        command = [os.path.realpath(sys.executable), "-I", "-S", "-c", text]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **options}
        process = subprocess.Popen(command, env=given, pass_fds=(told,), **quiet)  # type: ignore[call-overload]
        running.append(process)
        os.close(told)
        assert os.read(ready, 1) == b"x"
        os.close(ready)
        return process  # type: ignore[no-any-return]

    yield start
    for process in running:
        process.kill()
        process.wait()
        for stream in filter(None, (process.stdin, process.stderr)):
            stream.close()


def look(scanner: Scanner | None = None, uid: int = ME) -> list[Process]:
    """Return the test job's processes."""
    return (scanner or Scanner()).scan({JOB: uid})[JOB]


def paths(process: Process) -> set[bytes]:
    """Return what a process holds open for writing."""
    return {write.path for write in process.writes}


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until it holds, at most DEADLINE_S."""
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_finds_who_a_process_is(start: Start) -> None:
    """Job, step, task and ranks come from the environment that the process was started with."""
    said = {"SLURM_STEP_ID": "3", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "HOME": "/secret"}
    child = start(environment={**said, "RANK": "21", "LOCAL_RANK": "5"})
    (found,) = look()
    assert (found.pid, found.uid, found.job_id) == (child.pid, ME, JOB)
    assert (found.step, found.procid, found.localid) == ("3", 5, 1)
    assert (found.rank, found.local_rank) == (21, 5)
    assert not found.is_batch
    assert "HOME" not in found.environment
    ticks = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    assert found.start_time == ticks


@pytest.mark.parametrize(
    ("environment", "is_batch"),
    [
        ({"SLURM_PROCID": "0"}, True),
        ({}, True),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}, True),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, False),
        ({"SLURM_PROCID": "0", "RANK": "0"}, False),
    ],
)
def test_batch_script(start: Start, environment: dict[str, str], is_batch: bool) -> None:
    """In the batch script and in an interactive shell SLURM_PROCID=0 says nothing."""
    start(environment=environment)
    assert look()[0].is_batch is is_batch


def test_launchers_ranks(start: Start) -> None:
    """RANK goes before what MPI says, and MPI's variables stand where there is no RANK."""
    start(environment={"RANK": "1", "OMPI_COMM_WORLD_RANK": "2"})
    start(environment={"OMPI_COMM_WORLD_RANK": "3", "PMI_RANK": "4"})
    start(environment={"PMI_RANK": "5"})
    start(environment={"SLURM_PROCID": "6"})
    assert sorted(str(process.rank) for process in look()) == ["1", "3", "5", "None"]


def test_only_files_open_for_writing(start: Start, tmp_path: Path) -> None:
    """What is only read, only a path, a pipe or a device is no output."""
    (tmp_path / "read").touch()
    code = f"""
import os
os.chdir({os.fspath(tmp_path)!r})
os.open("write", os.O_WRONLY | os.O_CREAT)
os.open("append", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.open("both", os.O_RDWR | os.O_CREAT)
os.open("read", os.O_RDONLY)
os.open("read", os.O_PATH)
os.open("read", os.O_PATH | os.O_RDWR)
os.open(".", os.O_RDONLY)
os.open("/dev/null", os.O_WRONLY)
os.memfd_create("m")
os.pipe()
"""
    start(code, stderr=subprocess.PIPE)
    (found,) = look()
    assert {path.rpartition(b"/")[2] for path in paths(found)} == {b"write", b"append", b"both"}
    appending = next(write for write in found.writes if write.path.endswith(b"append"))
    assert appending.flags & os.O_APPEND
    assert appending.inode in (0, (tmp_path / "append").stat().st_ino)


def test_hostile_names(start: Start, tmp_path: Path) -> None:
    """Paths are the kernel's bytes, whatever is in them."""
    base = os.fsencode(tmp_path)
    names = [b"two\nlines.log", b"\xff\xfe.log", b"x (deleted)", b"flags:\t01", b" ", b"gone"]
    code = f"import os\nfor name in {names!r}: os.open({base!r} + b'/' + name, os.O_WRONLY | os.O_CREAT)\n"
    start(f"{code}os.unlink({base!r} + b'/gone')")
    (found,) = look()
    assert {path.removeprefix(base + b"/") for path in paths(found)} == {*names[:-1], b"gone (deleted)"}


def test_hostile_process_names(start: Start) -> None:
    """A name may look like the rest of /proc/PID/stat."""
    child = start("open('/proc/self/comm', 'w').write(') R 1 (\\n')", {"RANK": "4"})
    (found,) = look()
    assert (found.pid, found.name, found.rank) == (child.pid, ") R 1 (\n", 4)


@pytest.mark.parametrize("value", ["", "x", "-1", "1.5", "99999999999", "٣", " 1", b"\xff"])
def test_garbage_numbers(start: Start, value: str | bytes) -> None:
    """Users set these variables: what is no number is none."""
    start(environment={"RANK": value, "SLURM_PROCID": value, "SLURM_STEP_ID": "../x"})
    (found,) = look()
    assert (found.rank, found.procid, found.step) == (None, None, "")


def test_values_that_are_no_text(start: Start) -> None:
    """A path in an environment keeps its bytes; one longer than any path is dropped."""
    start(environment={"NCCL_DEBUG_FILE": b"/\xff\n%p", "TORCHELASTIC_RUN_ID": "x" * 5000})
    (found,) = look()
    assert os.fsencode(found.environment["NCCL_DEBUG_FILE"]) == b"/\xff\n%p"
    assert "TORCHELASTIC_RUN_ID" not in found.environment


def test_other_jobs(start: Start) -> None:
    """A process belongs to the one job that its environment names, and every job asked for gets an answer."""
    mine = start()
    other = start(environment={"SLURM_JOB_ID": str(JOB + 1)})
    start(environment={"SLURM_JOB_ID": "none"})
    found = Scanner().scan({JOB: ME, JOB + 1: ME, JOB + 2: ME})
    assert {job: [process.pid for process in there] for job, there in found.items()} == {
        JOB: [mine.pid],
        JOB + 1: [other.pid],
        JOB + 2: [],
    }
    assert Scanner().scan({}) == {}
    assert processes.job_of(mine.pid) == JOB


def test_uid_must_be_the_jobs(start: Start) -> None:
    """A job of another user does not get our processes."""
    start()
    assert look(uid=ME + 1) == []


@as_root
def test_other_users_processes_are_not_believed(start: Start) -> None:
    """Anybody may write our job's id into his environment."""
    # Giving up root makes a process undumpable; exec would mend that, but nobody may not run this Python.
    ids = f"os.setgroups([]); os.setresgid({NOBODY}, {NOBODY}, {NOBODY}); os.setresuid({NOBODY}, {NOBODY}, {NOBODY})"
    theirs = start(f"import ctypes, os; libc = ctypes.CDLL(None); {ids}; assert libc.prctl(4, 1, 0, 0, 0) == 0")
    mine = start()
    assert [process.pid for process in look(uid=0)] == [mine.pid]
    assert [process.pid for process in look(uid=NOBODY)] == [theirs.pid]
    both = Scanner().scan({JOB: 0, JOB + 1: NOBODY})
    assert {job: [process.pid for process in there] for job, there in both.items()} == {JOB: [mine.pid], JOB + 1: []}


@as_root
def test_process_with_two_uids(start: Start) -> None:
    """A program that is root only by its setuid bit got its environment from somebody else."""
    start(f"import os; os.setresuid({NOBODY}, 0, 0)")
    start(f"import os; os.setresuid(0, {NOBODY}, 0)")
    assert look(uid=0) == []
    assert look(uid=NOBODY) == []


def test_exec_brings_a_new_environment(start: Start) -> None:
    """A torchrun agent forks, then its worker execs: only then does the worker's RANK show."""
    scanner = Scanner()
    again = f"import os, time; os.environ['RANK']='7'; time.sleep(600)  # {'x' * 40}"
    command = [os.path.realpath(sys.executable), "-I", "-S", "-c", again]
    code = f"""
import os, sys, threading
def later():
    os.read(0, 1)
    os.execve({command[0]!r}, {command!r}, {{**os.environ, "RANK": "6"}})
threading.Thread(target=later).start()
"""
    child = start(code, stdin=subprocess.PIPE)
    assert [process.rank for process in look(scanner)] == [None]
    assert child.stdin is not None
    child.stdin.write(b"x")
    child.stdin.close()
    wait_for(lambda: [process.rank for process in look(scanner)] == [6])
    assert [process.pid for process in look(scanner)] == [child.pid]


def test_overwritten_environment(start: Start) -> None:
    """What setproctitle goes over the environment: what was read before stays known."""
    scanner = Scanner()
    code = """
import os, threading
def later():
    os.read(0, 1)
    fields = open("/proc/self/stat").read().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(begin)
        memory.write(b"x" * (end - begin))
    open("/proc/self/comm", "w").write("renamed")
threading.Thread(target=later).start()
"""
    child = start(code, {"RANK": "3"}, stdin=subprocess.PIPE)
    assert look(scanner)[0].rank == 3
    assert child.stdin is not None
    child.stdin.write(b"x")
    child.stdin.close()
    wait_for(lambda: Path(f"/proc/{child.pid}/comm").read_text() == "renamed\n")
    assert processes.job_of(child.pid) is None
    assert look(scanner)[0].rank == 3


def test_files_opened_later(start: Start, tmp_path: Path) -> None:
    """A new descriptor is seen by the next scan, and a closed one is gone."""
    scanner = Scanner()
    code = f"""
import os, threading
def later():
    os.read(0, 1)
    fd = os.open({os.fspath(tmp_path / "late.log")!r}, os.O_WRONLY | os.O_CREAT)
    os.read(0, 1)
    os.close(fd)
threading.Thread(target=later).start()
"""
    child = start(code, stdin=subprocess.PIPE, bufsize=0)
    late = os.fsencode(tmp_path / "late.log")
    for _ in range(12):
        assert late not in paths(look(scanner)[0])
    assert child.stdin is not None
    child.stdin.write(b"x")
    wait_for((tmp_path / "late.log").exists)
    assert late in paths(look(scanner)[0])
    child.stdin.write(b"x")
    wait_for(lambda: late not in paths(look()[0]))
    assert late not in paths(look(scanner)[0])


def test_another_file_under_the_same_descriptor(start: Start, tmp_path: Path) -> None:
    """Where the list of descriptors does not change, the files are still looked at again after a few scans."""
    scanner = Scanner()
    code = f"""
import os, threading
os.chdir({os.fspath(tmp_path)!r})
fd = os.open("epoch-1.log", os.O_WRONLY | os.O_CREAT)
def later():
    os.read(0, 1)
    os.dup2(os.open("epoch-2.log", os.O_WRONLY | os.O_CREAT), fd, inheritable=False)
    os.close(fd + 1)
threading.Thread(target=later).start()
"""
    child = start(code, stdin=subprocess.PIPE, bufsize=0)
    for _ in range(20):
        assert len(look(scanner)) == 1
    assert child.stdin is not None
    child.stdin.write(b"x")
    second = os.fsencode(tmp_path / "epoch-2.log")
    wait_for(lambda: second in paths(look()[0]))
    seen = [second in paths(look(scanner)[0]) for _ in range(8)]
    assert seen[-1]


def test_ended_processes_are_gone(start: Start) -> None:
    """Neither a zombie nor one that was waited for is listed, and nothing is kept of the latter."""
    scanner = Scanner()
    child = start()
    assert len(look(scanner)) == 1
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert look(scanner) == []
    child.wait()
    assert look(scanner) == []
    assert child.pid not in scanner._entries


def test_processes_that_come_and_go() -> None:
    """A scan in the middle of many short lives does not fail."""
    script = "while :; do /bin/true & /bin/true; done"
    busy = subprocess.Popen(["/bin/sh", "-c", script], env={"SLURM_JOB_ID": str(JOB)}, stderr=subprocess.DEVNULL)
    try:
        scanner = Scanner()
        wait_for(lambda: bool(look(scanner)))
        for _ in range(100):
            assert busy.pid in {process.pid for process in look(scanner)}
    finally:
        busy.kill()
        busy.wait()


names = st.binary(min_size=0, max_size=20).filter(lambda name: b"\0" not in name)
numbers = st.lists(st.integers(0, 2**64 - 1), min_size=49, max_size=49)


@given(names, st.sampled_from("RSDZTtXIP"), numbers)
def test_parse_stat(name: bytes, state: str, fields: list[int]) -> None:
    """Any name is told from the fields behind it."""
    texts = [str(number).encode() for number in fields]
    found = processes.parse_stat(b"17 (" + name + b") " + state.encode() + b" " + b" ".join(texts) + b"\n")
    assert found == (name, state.encode(), fields[18], (texts[24], *texts[44:48]))


@given(st.binary(max_size=400))
def test_parse_stat_of_garbage(raw: bytes) -> None:
    """What is no stat is None, never an exception."""
    found = processes.parse_stat(raw)
    assert found is None or found.start_time >= 0
