"""Opening files that users chose: only what it should be, whatever they put in its place."""

import os
import resource
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainarchive import opening
from trainarchive.errors import RefusedError, UnavailableError
from trainarchive.opening import looks_like_text, open_fd_of, open_path
from trainarchive.processes import parse_stat

NOBODY = 65_534


@pytest.fixture(autouse=True)
def _no_fd_stays_open() -> Iterator[None]:
    """Whatever happens in a test, only what was returned is open afterwards, and the test closes that."""
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208 - bare names are what is compared
    yield
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - bare names are what is compared


def refusal_of(call: Callable[[], int]) -> str:
    """Return the reason of the refusal that the call must raise."""
    with pytest.raises(RefusedError) as caught:
        os.close(call())
    return caught.value.what


def reading(path: Path | bytes) -> bytes:
    """Open and read a path, as ourselves."""
    fd = open_path(os.fsencode(path), uid=os.geteuid())
    with os.fdopen(fd, "rb") as file:
        return file.read()


def refused(path: Path | bytes) -> str:
    """Return why a path is refused."""
    return refusal_of(lambda: open_path(os.fsencode(path), uid=os.geteuid()))


def test_a_regular_file_opens_for_reading_only_and_closes_on_exec(tmp_path: Path) -> None:
    """Names may hold anything; links on the way are followed."""
    directory = tmp_path / "real"
    directory.mkdir()
    (tmp_path / "way").symlink_to(directory)
    name = os.fsencode(tmp_path / "way") + b"/odd\n\xff name"
    with open(name, "wb") as file:  # noqa: PTH123 - a Path has no bytes
        file.write(b"text")
    assert reading(name) == b"text"
    fd = open_path(name, uid=os.geteuid())
    assert not os.get_inheritable(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fd, b"x")
    os.close(fd)


def test_everything_else_is_refused_with_its_reason(tmp_path: Path) -> None:
    """Links, FIFOs (at once, without waking a writer), sockets, directories, devices, kernel files, bad paths."""
    target = tmp_path / "target"
    target.write_bytes(b"secret")
    (tmp_path / "link").symlink_to(target)
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert refused(tmp_path / "link") == opening.LINK
    assert refused(tmp_path / "loop" / "x") == opening.LINK
    for name in (b"/dev/null", b"/dev/zero", b"/dev", os.fsencode(tmp_path / "fifo"), os.fsencode(tmp_path / "socket")):
        assert refused(name) == opening.NOT_REGULAR
    for name in (b"/proc/self/status", b"/proc/self/mem", b"/proc/kmsg", b"/sys/kernel/uevent_seqnum"):
        if os.path.exists(name):  # noqa: PTH110 - a Path has no bytes
            assert refused(name) == opening.KERNEL
    assert refused(tmp_path / "none") == opening.GONE
    assert refused(target / "below") == opening.GONE
    assert refused(b"/" + b"n" * 300) == opening.TOO_LONG
    for name in (b"", b"log", b"../log", b"/tmp/\0x"):
        assert refused(name) == opening.NOT_ABSOLUTE


@contextmanager
def nobody() -> Iterator[None]:
    """Be an unprivileged user for a while, where we are root."""
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        yield


def test_what_the_user_may_not_read_is_refused(tmp_path: Path) -> None:
    """The kernel decides."""
    path = tmp_path / "log"
    path.touch(mode=0o000)
    with nobody():
        assert refused(path) == opening.DENIED


def test_root_opens_no_other_users_files_yet(tmp_path: Path) -> None:
    """Until the child with the user's identity is there, root refuses; others see what they may."""
    path = tmp_path / "log"
    path.write_bytes(b"text")
    uid = os.geteuid() + 1
    if os.geteuid() == 0:
        assert refusal_of(lambda: open_path(os.fsencode(path), uid=uid)) == opening.OTHER_USER
        assert refusal_of(lambda: open_fd_of(os.getpid(), 1, 0, uid=uid)) == opening.OTHER_USER
    else:
        os.close(open_path(os.fsencode(path), uid=uid))


def test_a_name_swapped_while_it_is_opened_never_leads_elsewhere(tmp_path: Path) -> None:
    """A racing thread puts links and FIFOs in the file's place: it is the file or a refusal."""
    path, stop = tmp_path / "log", threading.Event()
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "good").write_bytes(b"good")

    def swap() -> None:
        while not stop.is_set():
            os.link(tmp_path / "good", tmp_path / "next")
            (tmp_path / "next").rename(path)
            (tmp_path / "next").unlink(missing_ok=True)  # where both were one file rename leaves both
            (tmp_path / "next").symlink_to(tmp_path / "secret")
            (tmp_path / "next").rename(path)
            os.mkfifo(tmp_path / "next")
            (tmp_path / "next").rename(path)

    thread = threading.Thread(target=swap)
    thread.start()
    expected = {b"good", opening.LINK.encode(), opening.NOT_REGULAR.encode()}
    outcomes: set[bytes] = set()
    try:
        until = time.monotonic() + 10
        while not expected <= outcomes and time.monotonic() < until:
            for _ in range(2000):
                try:
                    outcomes.add(reading(path))
                except RefusedError as error:
                    outcomes.add(error.what.encode())
    finally:
        stop.set()
        thread.join()
    assert outcomes - {opening.GONE.encode()} == expected


def start_time_of(pid: int) -> int:
    """Return field 22 of a process's stat: when it started."""
    found = parse_stat(Path(f"/proc/{pid}/stat").read_bytes())
    assert found is not None
    return found.start_time


class Job:
    """A process that opens things as told, and says the numbers of its fds."""

    def __init__(self, script: str, *arguments: Path) -> None:
        """``script`` prints one line when all is open."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.fds = [int(word) for word in self.process.stdout.readline().split()]
        self.pid = self.process.pid
        self.started = start_time_of(self.pid)

    def __enter__(self) -> Self:
        """Nothing more."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


_HOLDS = """
import os, sys
log, other = sys.argv[1:]
fds = [os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), os.open(log, os.O_RDWR), os.open(log, os.O_RDONLY)]
fds += [os.open(other, os.O_PATH), os.open("/dev/null", os.O_WRONLY), os.pipe()[1], os.open("/", os.O_RDONLY)]
os.write(fds[0], b"text")
os.unlink(log)
print(*fds, flush=True)
sys.stdin.read()
"""


def test_a_jobs_own_output_is_opened_and_nothing_else(tmp_path: Path) -> None:
    """Files open for writing, unlinked ones too; not what is only read, O_PATH, devices, pipes, directories."""
    (tmp_path / "other").write_bytes(b"secret")
    with Job(_HOLDS, tmp_path / "log", tmp_path / "other") as job:

        def answer(fd: int, **changed: int) -> int:
            who = {"pid": job.pid, "start_time": job.started, "uid": os.geteuid(), **changed}
            return open_fd_of(who["pid"], fd, who["start_time"], uid=who["uid"])

        append, both, reader, path_only, device, pipe, directory = job.fds
        for fd in (append, both):
            opened = answer(fd)
            assert os.read(opened, 10) == b"text"
            assert os.fstat(opened).st_nlink == 0
            os.close(opened)
        for fd in (reader, path_only, directory):
            assert refusal_of(lambda fd=fd: answer(fd)) == opening.NOT_WRITTEN  # type: ignore[misc]  # loop variable
        for fd in (device, pipe):
            assert refusal_of(lambda fd=fd: answer(fd)) == opening.NOT_REGULAR  # type: ignore[misc]  # loop variable
        assert refusal_of(lambda: answer(999)) == opening.GONE
        assert refusal_of(lambda: answer(-1)) == opening.GONE
        assert refusal_of(lambda: answer(append, start_time=job.started + 1)) == opening.GONE
        for pid in (0, -1, 2**30):
            assert refusal_of(lambda pid=pid: answer(append, pid=pid)) == opening.GONE  # type: ignore[misc]  # the same
        if os.geteuid() != 0:
            assert refusal_of(lambda: answer(append, uid=os.geteuid() + 1)) == opening.OTHERS_PROCESS
    assert refusal_of(lambda: answer(append)) == opening.GONE


_BECOMES_NOBODY = """
import os, sys
os.setresuid(65534, 65534, 65534)
print(os.memfd_create("x"), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as somebody else")
def test_another_users_process_is_refused() -> None:
    """The process must wholly be the job's user's."""
    with Job(_BECOMES_NOBODY) as job:
        (fd,) = job.fds
        assert refusal_of(lambda: open_fd_of(job.pid, fd, job.started, uid=0)) == opening.OTHERS_PROCESS


_SWAPS = """
import os, sys
log, secret = sys.argv[1:]
good, bad, number = os.open(log, os.O_WRONLY), os.open(secret, os.O_RDONLY), os.open("/", os.O_PATH)
print(number, flush=True)
while True:
    os.dup2(good, number)
    os.dup2(bad, number)
"""


def test_an_fd_swapped_while_it_is_opened_never_leads_elsewhere(tmp_path: Path) -> None:
    """A job that puts a file it may not write under the same number again and again gains nothing."""
    log, secret = tmp_path / "log", tmp_path / "secret"
    log.write_bytes(b"good")
    secret.write_bytes(b"secret")
    outcomes: set[str] = set()
    with Job(_SWAPS, log, secret) as job:
        until = time.monotonic() + 10
        while len(outcomes) < 3 and time.monotonic() < until:
            for _ in range(2000):
                try:
                    fd = open_fd_of(job.pid, job.fds[0], job.started, uid=os.geteuid())
                except RefusedError as error:
                    outcomes.add(error.what)
                else:
                    outcomes.add(os.read(fd, 10).decode())
                    os.close(fd)
    assert outcomes == {"good", opening.NOT_WRITTEN, opening.GONE}


def text_or_not(data: bytes) -> bool:
    """Ask about a file of these bytes."""
    fd = os.memfd_create("sample")
    try:
        os.write(fd, data)
        return looks_like_text(fd)
    finally:
        os.close(fd)


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"])), st.integers(0, 5000))
def test_any_text_is_text_wherever_the_sample_is_cut(text: str, repeated: int) -> None:
    """Letters of any script in UTF-8, also where the first 4 KiB end within one."""
    assert text_or_not((text * repeated)[:5000].encode())


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", True),
        (b"x", True),
        (b"\r 50%|#####     | 1/2\r\x1b[32mdone\x1b[0m\x07\b\n", True),
        ("Gr\u00fc\u00dfe aus K\u00f6ln, \u00c9t\u00e9".encode("latin-1"), True),
        (b"a\0b", False),
        (b"\x80\x05\x95\x10", False),
        (b"\x01\x02\x03", False),
        (b"PK\x03\x04\x14\x08\x08\x02", False),
        (bytes(range(1, 256)) * 16, False),
        (b"x" * 4096 + b"\0" * 100, True),
    ],
)
def test_what_looks_like_text(data: bytes, expected: bool) -> None:
    """Progress bars, colours and Latin letters do; pickles, archives and anything with NUL do not."""
    assert text_or_not(data) is expected


def test_a_file_that_does_not_read_is_unavailable(tmp_path: Path) -> None:
    """An error of the kernel is told, not taken for an answer."""
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(UnavailableError):
        looks_like_text(fd)
    os.close(fd)


def test_no_more_fds_is_for_now_only(tmp_path: Path) -> None:
    """Running out of fds is no reason to refuse a file for good."""
    path = tmp_path / "log"
    path.touch()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(2)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        with pytest.raises(UnavailableError, match="Too many open files"):
            open_path(os.fsencode(path), uid=os.geteuid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    fd = open_path(os.fsencode(path), uid=os.geteuid())
    assert stat.S_ISREG(os.fstat(fd).st_mode)
    os.close(fd)
