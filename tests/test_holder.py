"""The holder process: files survive their collector."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainarchive.errors import NotFoundError, TrainarchiveError, UnavailableError
from trainarchive.holder import MAX_NAME, Holder

Start = Callable[..., Holder]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Give a function that connects to (and starts) the holder of this test's directory, which is ended after."""
    holders: list[Holder] = []

    def connect(state: Path = tmp_path / "state", **limits: Any) -> Holder:
        holders.append(Holder.start(state, **limits))
        return holders[-1]

    yield connect
    for holder in holders:
        holder.disconnect()
    for pid in {holder.pid for holder in holders}:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: not is_alive(pid))  # type: ignore[misc]  # loop variable


def is_alive(pid: int) -> bool:
    """Say whether the process runs; a zombie that nobody takes does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for something that must come."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def memory_file(text: bytes) -> int:
    """Return an fd of a file without a name."""
    fd = os.memfd_create("held")
    os.write(fd, text)
    return fd


def taken(holder: Holder, name: str) -> bytes:
    """Take a file and read it from its beginning."""
    fd = holder.take(name)
    assert not os.get_inheritable(fd)
    with os.fdopen(fd, "rb") as file:
        return os.pread(file.fileno(), 1_000_000, 0)


_COLLECTOR = """
import os, sys, time
from trainarchive.holder import Holder
state, log = sys.argv[1:]
holder = Holder.start(state)
fd = os.open(log, os.O_RDONLY)
holder.keep("source", fd)
os.unlink(log)
print(holder.pid, flush=True)
sys.stdin.read()
"""


def test_an_unlinked_file_survives_kill_9_of_its_collector(tmp_path: Path, start: Start) -> None:
    """What the job writes after the kill is there too, and a second killed successor changes nothing."""
    log = tmp_path / "log"
    with log.open("wb", buffering=0) as job:
        job.write(b"before\n" * 1000)
        with subprocess.Popen(
            [sys.executable, "-c", _COLLECTOR, tmp_path / "state", log], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as collector:
            assert collector.stdout is not None
            pid = int(collector.stdout.readline())
            collector.kill()
        assert not log.exists()
        job.write(b"after\n" * 1000)
    for holder in (start(), start()):
        assert holder.pid == pid
        assert holder.names() == ["source"]
        assert taken(holder, "source") == b"before\n" * 1000 + b"after\n" * 1000
    last = start()
    last.release("source")
    assert last.names() == []


def test_keep_take_and_release(start: Start) -> None:
    """A name holds the newest file; an unknown one is an error to take and none to release."""
    holder = start()
    for text in (b"one", b"two"):
        fd = memory_file(text)
        holder.keep("a/b\nc \udcff", fd)
        os.close(fd)
    assert holder.names() == ["a/b\nc \udcff"]
    assert taken(holder, "a/b\nc \udcff") == b"two"
    assert taken(holder, "a/b\nc \udcff") == b"two"
    with pytest.raises(NotFoundError, match="other"):
        holder.take("other")
    holder.release("a/b\nc \udcff")
    holder.release("a/b\nc \udcff")
    with pytest.raises(NotFoundError):
        holder.take("a/b\nc \udcff")
    for name in ("", "a\0b", "n" * (MAX_NAME + 1)):
        with pytest.raises(ValueError, match="not a name"):
            holder.keep(name, 0)


def test_many_names_come_in_order_and_every_fd_is_closed_again(start: Start) -> None:
    """Names fill more than one answer; the process's table is empty again after their release."""
    holder = start()
    fds = Path(f"/proc/{holder.pid}/fd")
    before = len(list(fds.iterdir()))
    names = [f"{number:0200}" for number in range(500)]
    for name in names:
        holder.keep(name, 0)
    holder.keep(names[-1], 0)
    assert holder.names() == names
    assert len(list(fds.iterdir())) == before + 500
    for name in names:
        holder.release(name)
    assert holder.names() == []
    assert len(list(fds.iterdir())) == before


def test_the_number_of_files_is_bounded(start: Start) -> None:
    """One more is refused without harm; one in place of another is not more."""
    holder = start(max_files=2)
    holder.keep("a", 0)
    holder.keep("b", 0)
    with pytest.raises(UnavailableError, match="it holds 2 files"):
        holder.keep("c", 0)
    holder.keep("a", 0)
    assert sorted(holder.names()) == ["a", "b"]


def test_it_is_detached(start: Start, tmp_path: Path) -> None:
    """It has its own session, no terminal, no directory, and none of our files."""
    ours = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(ours, True)
    holder = start()
    os.close(ours)
    assert os.getsid(holder.pid) not in (os.getsid(0), holder.pid)
    assert Path(f"/proc/{holder.pid}/cwd").readlink() == Path("/")
    open_files = {path.name: str(path.readlink()) for path in Path(f"/proc/{holder.pid}/fd").iterdir()}
    assert {open_files[fd] for fd in ("0", "1", "2")} == {os.devnull}
    assert str(tmp_path) not in open_files.values()
    with pytest.raises(ChildProcessError):
        os.waitpid(holder.pid, os.WNOHANG)


def test_it_ends_by_itself_only_when_nobody_is_connected(start: Start) -> None:
    """While a collector is there it stays; after that for ``idle_s``; the next one starts afresh."""
    holder = start(idle_s=0.2)
    holder.keep("a", 0)
    alive_at = time.monotonic()
    wait_until(lambda: time.monotonic() > alive_at + 0.5)
    assert holder.names() == ["a"]
    holder.disconnect()
    holder.disconnect()
    wait_until(lambda: not is_alive(holder.pid))
    with pytest.raises(UnavailableError):
        holder.names()
    again = start()
    assert again.pid != holder.pid
    assert again.names() == []


def test_stop_ends_it_and_lets_everything_go(start: Start, tmp_path: Path) -> None:
    """When asked it goes at once, and its socket with it."""
    holder = start()
    holder.stop()
    wait_until(lambda: not is_alive(holder.pid))
    assert [path.name for path in (tmp_path / "state" / "holder").iterdir()] == ["lock"]


def test_a_killed_holder_is_told_and_replaced(start: Start) -> None:
    """Its socket is left behind; the collector hears of it at its next word and starts another."""
    holder = start()
    os.kill(holder.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(holder.pid))
    with pytest.raises(UnavailableError, match="the holder process"):
        holder.keep("a", 0)
    again = start()
    again.keep("a", 0)
    assert again.names() == ["a"]


def test_starting_at_the_same_time_gives_one_process(start: Start) -> None:
    """A lock decides; all connect to the one."""
    pids: list[int] = []
    threads = [threading.Thread(target=lambda: pids.append(start().pid)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pids) == 4
    assert len(set(pids)) == 1


def test_a_long_directory_name(start: Start, tmp_path: Path) -> None:
    """A socket's path has at most 107 bytes, a directory's may have more."""
    holder = start(tmp_path / ("d" * 200) / ("e" * 200))
    holder.keep("a", 0)
    assert holder.names() == ["a"]


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    """Whoever could reach the socket could take files; so could who put a link in the directory's place."""
    (tmp_path / "holder").mkdir(mode=0o700)
    (tmp_path / "holder").chmod(0o711)
    with pytest.raises(TrainarchiveError, match="others may enter"):
        Holder.start(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "holder").symlink_to(tmp_path)
    with pytest.raises(TrainarchiveError, match="cannot be used"):
        Holder.start(tmp_path / "a")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_not_served(start: Start, tmp_path: Path) -> None:
    """Even where the directory and the socket would let him in."""
    holder = start()
    folder = os.open(tmp_path / "state" / "holder", os.O_RDONLY)
    os.fchmod(folder, 0o755)
    os.chmod("socket", 0o777, dir_fd=folder)  # noqa: S103 - so that only the process itself can refuse
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        os.seteuid(65_534)
        try:
            other.connect(f"/proc/self/fd/{folder}/socket")
        finally:
            os.seteuid(0)
        other.settimeout(10)
        assert other.recv(100) == b""
    os.close(folder)
    assert holder.names() == []


def test_nonsense_is_answered_and_does_no_harm(start: Start) -> None:
    """Unknown verbs, missing fds, too many fds, too long names."""
    holder = start()
    before = len(list(Path(f"/proc/{holder.pid}/fd").iterdir()))
    for request in (b"X", b"K", b"Kname", b"K" + b"n" * (MAX_NAME + 1), b"N-1", b"Nx", b"\xff" * 5000):
        with pytest.raises(UnavailableError, match="refuses"):
            holder._ask(request)
    with pytest.raises(UnavailableError, match="not understood"):
        holder._ask(b"X", 0)
    socket.send_fds(holder._connection, [b"P"], [0, 0, 0])
    assert holder._connection.recv(100) == b"+%d" % holder.pid
    assert holder.names() == []
    assert len(list(Path(f"/proc/{holder.pid}/fd").iterdir())) == before
