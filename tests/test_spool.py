"""Spool files: what goes in comes out, and a torn end costs only what was torn."""

import errno
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests_kernel import Refusing

from trainarchive.errors import DamagedError, TrainarchiveError, UnavailableError
from trainarchive.frame import MAX_OFFSET, MAX_RAW, Frame, Framer, gap_frame
from trainarchive.spool import SpoolFile, SpoolFullError

times = st.integers(-(2**63), 2**63 - 1)
pieces = st.lists(
    st.tuples(st.integers(1, 5000), st.one_of(st.just(""), st.text(min_size=1, max_size=20)), times, st.binary()),
    max_size=12,
)


def frames_of(start: int, made: list[tuple[int, str, int, bytes]]) -> list[Frame]:
    """Lay frames and gaps end to end."""
    frames = []
    for length, gap, time, data in made:
        frames.append(Frame(start, length, time, -1 - time, b"" if gap else data, gap))
        start += length
    return frames


@contextmanager
def directory() -> Iterator[Path]:
    """Give a directory for one Hypothesis example."""
    with tempfile.TemporaryDirectory(prefix="spool") as name:
        yield Path(name)


def filled(path: Path, frames: list[Frame]) -> list[int]:
    """Make a spool of these frames; return the file's size before the first and after each."""
    spool = SpoolFile.create(path, "source", 3)
    sizes = [spool.size]
    for frame in frames:
        spool.append(frame)
        sizes.append(spool.size)
    assert path.stat().st_size == spool.size
    spool.close()
    return sizes


@settings(max_examples=60, deadline=None)
@given(st.integers(0, MAX_OFFSET - 10**6), pieces, st.data())
def test_what_goes_in_comes_out(start: int, made: list[tuple[int, str, int, bytes]], data: st.DataObject) -> None:
    """Frames and gaps come back equal, after a reopening too, from any offset on."""
    frames = frames_of(start, made)
    with directory() as folder:
        filled(folder / "a", frames)
        spool = SpoolFile.open(folder / "a")
        assert (spool.source, spool.generation) == ("source", 3)
        assert list(spool.frames()) == frames
        if frames:
            assert (spool.start, spool.end) == (start, frames[-1].end)
            offset = data.draw(st.integers(start - 1, frames[-1].end + 1))
            assert list(spool.frames(offset)) == [frame for frame in frames if frame.end > offset]
        else:
            assert (spool.start, spool.end) == (0, 0)
        spool.delete()
        assert not list(folder.iterdir())


@settings(max_examples=150, deadline=None)
@given(pieces, st.data())
def test_any_torn_or_garbled_end_leaves_an_exact_prefix(
    made: list[tuple[int, str, int, bytes]], data: st.DataObject
) -> None:
    """Cut anywhere and followed by anything, the file opens with the records that are whole, and goes on."""
    frames = frames_of(10, made)
    with directory() as folder:
        path = folder / "a"
        sizes = filled(path, frames)
        keep = data.draw(st.one_of(st.sampled_from(sizes), st.integers(sizes[0], sizes[-1])))
        original = path.read_bytes()
        stale = [original[start:end] for start, end in pairwise(sizes)] or [b""]  # whole, but in a wrong place
        garbage = data.draw(
            st.one_of(st.just(b""), st.binary(max_size=200), st.integers(0, 300).map(bytes), st.sampled_from(stale))
        )
        torn = original[:keep] + garbage
        path.write_bytes(torn)
        # The garbage may by chance be the very bytes that stood there.
        whole = max(number for number, size in enumerate(sizes) if torn[:size] == original[:size] and size <= len(torn))
        spool = SpoolFile.open(path)
        assert list(spool.frames()) == frames[:whole]
        assert path.stat().st_size == spool.size == sizes[whole]
        for frame in frames[whole:]:
            spool.append(frame)
        spool.close()
        assert path.read_bytes() == original


@settings(max_examples=100, deadline=None)
@given(pieces.filter(bool), st.data())
def test_a_changed_byte_is_never_delivered(made: list[tuple[int, str, int, bytes]], data: st.DataObject) -> None:
    """A flipped bit in a record cuts from there when opened, and is an error under an open file."""
    frames = frames_of(0, made)
    with directory() as folder:
        path = folder / "a"
        sizes = filled(path, frames)
        at = data.draw(st.integers(sizes[0], sizes[-1] - 1))
        held = SpoolFile.open(path)
        body = bytearray(path.read_bytes())
        body[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(body)
        hit = next(number for number, size in enumerate(sizes) if at < size) - 1
        got: list[Frame] = []
        with pytest.raises(DamagedError, match="changed after it was written"):
            got.extend(held.frames())
        assert got == frames[:hit]
        held.close()
        spool = SpoolFile.open(path)
        assert list(spool.frames()) == frames[:hit]
        spool.close()


def test_real_frames_stream_while_more_are_appended(tmp_path: Path) -> None:
    """A reader goes on with what is appended; a start in the middle finds its frame without reading all."""
    framer = Framer()
    spool = SpoolFile.create(tmp_path / "a", "s", 0)
    spool.append(framer.frame(0, os.urandom(MAX_RAW), 1, 2))
    reader = spool.frames()
    assert next(reader).offset == 0
    for number in range(1, 20):
        spool.append(framer.frame(number * MAX_RAW, os.urandom(MAX_RAW), 1, 2))
    spool.append(gap_frame(20 * MAX_RAW, 21 * MAX_RAW, 3, 4, "truncated"))
    spool.sync()
    rest = list(reader)
    assert [frame.offset for frame in rest] == [number * MAX_RAW for number in range(1, 21)]
    assert len(rest[0].text()) == MAX_RAW
    assert rest[-1].gap == "truncated"
    assert len(spool._marks) > 3
    assert [frame.offset for frame in spool.frames(19 * MAX_RAW + 1)] == [19 * MAX_RAW, 20 * MAX_RAW]
    spool.close()
    spool.close()


def test_frames_that_do_not_follow_are_refused(tmp_path: Path) -> None:
    """A hole, an overlap, an empty frame or an offset that Lua cannot hold is the caller's mistake."""
    spool = SpoolFile.create(tmp_path / "a", "s", 0)
    spool.append(Frame(100, 10, 0, 0, b"x"))
    for offset, length in ((111, 1), (109, 5), (110, 0), (100, 10)):
        with pytest.raises(ValueError, match="does not follow"):
            spool.append(Frame(offset, length, 0, 0, b"x"))
    with pytest.raises(ValueError, match="larger"):
        spool.append(Frame(110, 10, 0, 0, bytes(MAX_RAW * 2 + 1)))
    assert [frame.offset for frame in spool.frames()] == [100]
    spool.delete()
    spool.delete()
    other = SpoolFile.create(tmp_path / "b", "s", 0)
    with pytest.raises(ValueError, match="does not follow"):
        other.append(Frame(MAX_OFFSET, 1, 0, 0, b"x"))
    other.close()


def test_create_takes_no_name_that_is_taken(tmp_path: Path) -> None:
    """An older spool is never overwritten, and nothing half-made is left."""
    filled(tmp_path / "a", [Frame(0, 1, 0, 0, b"x")])
    before = (tmp_path / "a").read_bytes()
    with pytest.raises(UnavailableError, match="cannot be made: File exists"):
        SpoolFile.create(tmp_path / "a", "other", 0)
    with pytest.raises(ValueError, match="name"):
        SpoolFile.create(tmp_path / "b", "s" * 70_000, 0)
    assert (tmp_path / "a").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("body", [b"", b"TASPOOL1", b"x" * 100, b"TASPOOL1" + b"\xff" * 20])
def test_other_files_are_named_as_damaged(tmp_path: Path, body: bytes) -> None:
    """What is no spool file is refused with its name and left as it is."""
    path = tmp_path / "a"
    path.write_bytes(body)
    with pytest.raises(DamagedError, match=str(path)):
        SpoolFile.open(path)
    assert path.read_bytes() == body


def test_what_is_no_regular_file_is_no_spool(tmp_path: Path) -> None:
    """Nothing that may stand under a spool's name holds anybody up or leaves as an OSError."""
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name in ("link", "directory", "fifo", "socket"):
            with pytest.raises(DamagedError, match="not a spool file"):
                SpoolFile.open(tmp_path / name)
    with pytest.raises(UnavailableError, match="No such file"):
        SpoolFile.open(tmp_path / "nothing")
    with pytest.raises(UnavailableError, match="cannot be made"):
        SpoolFile.create(tmp_path / "nowhere" / "a", "s", 0)


def test_a_stray_record_is_not_taken(tmp_path: Path) -> None:
    """Blocks that the disk gave another file before may hold its records, whole, at the very same place."""
    sizes = filled(tmp_path / "a", [Frame(0, 10, 0, 0, b"x"), Frame(10, 10, 0, 0, b"y")])
    filled(tmp_path / "earlier", [Frame(500, 10, 0, 0, b"x"), Frame(510, 10, 0, 0, b"y")])
    stray = (tmp_path / "a").read_bytes()[: sizes[1]] + (tmp_path / "earlier").read_bytes()[sizes[1] :]
    (tmp_path / "a").write_bytes(stray)
    spool = SpoolFile.open(tmp_path / "a")
    assert ([frame.offset for frame in spool.frames()], spool.size) == ([0], sizes[1])
    spool.close()


def test_a_damaged_head_is_named(tmp_path: Path) -> None:
    """A source's name is never guessed."""
    path = tmp_path / "a"
    filled(path, [])
    path.write_bytes(path.read_bytes().replace(b"source", b"sourcf", 1))
    with pytest.raises(DamagedError, match="head of this spool file is damaged"):
        SpoolFile.open(path)


def test_a_full_disk_is_told_and_leaves_the_file_whole(tmp_path: Path) -> None:
    """When the kernel takes only a part, the part goes away, and later appends work."""
    spool = SpoolFile.create(tmp_path / "a", "s", 0)
    spool.append(Frame(0, 10, 0, 0, b"x" * 1000))
    size = spool.size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 500, hard))
    try:
        with pytest.raises(SpoolFullError, match="no space") as caught:
            spool.append(Frame(10, 10, 0, 0, b"y" * 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(caught.value, TrainarchiveError)
    assert caught.value.retry
    assert (tmp_path / "a").stat().st_size == spool.size == size
    spool.append(Frame(10, 10, 0, 0, b"z" * 1000))
    assert [frame.data[:1] for frame in spool.frames()] == [b"x", b"z"]
    spool.close()


_FILL = """
import sys
from pathlib import Path
from trainarchive.frame import Frame
from trainarchive.spool import SpoolFile, SpoolFullError
spool = SpoolFile.create(Path(sys.argv[1]) / "a", "s", 0)
try:
    while True:
        spool.append(Frame(spool.end, 1, 0, 0, bytes(100_000)))
except SpoolFullError:
    held = spool.end
spool.close()
again = SpoolFile.open(Path(sys.argv[1]) / "a")
assert again.end == held, (again.end, held)
try:
    SpoolFile.create(Path(sys.argv[1]) / "b", "s" * 60_000, 0)
except SpoolFullError:
    print(held)
again.delete()
for number in range(1000):
    try:
        (Path(sys.argv[1]) / str(number)).touch()
    except OSError:
        break
try:
    SpoolFile.create(Path(sys.argv[1]) / "c", "s", 0)
except SpoolFullError:
    print("no inode")
"""


def test_a_really_full_file_system(tmp_path: Path) -> None:
    """On a tmpfs of 1 MiB all appended frames are kept to the last; one without an inode left is full, too."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("no unshare(1) here")
    enter = [unshare, "--mount"] if os.geteuid() == 0 else [unshare, "--mount", "--map-root-user"]
    script = 'mount -t tmpfs -o size=1m,nr_inodes=50 none "$1" || exit 77; exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        [*enter, "sh", "-c", script, "sh", tmp_path, sys.executable, _FILL], capture_output=True, text=True, check=False
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no mount namespace for us here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["10", "no inode", ""]


def test_an_fd_that_cannot_be_written_is_unavailable(tmp_path: Path) -> None:
    """Other errors of the disk are told apart from a full one."""
    spool = SpoolFile.create(tmp_path / "a", "s", 0)
    spool.close()
    spool._fd = os.open(tmp_path / "a", os.O_RDONLY)
    with pytest.raises(UnavailableError, match="cannot be written"):
        spool.append(Frame(0, 1, 0, 0, b"x"))


FAILING = {
    errno.EIO: (UnavailableError, DamagedError),
    errno.ENOSPC: (SpoolFullError,),
    errno.EDQUOT: (SpoolFullError,),
    errno.EROFS: (UnavailableError,),
}


CALLS = ("open", "pread", "pwrite", "pwritev", "link", "fsync", "fdatasync", "fstat", "close", "unlink")


def life_of(path: Path, appended: list[Frame]) -> None:
    """Make, fill, sync, read, open again and delete a spool."""
    spool = SpoolFile.create(path, "s", 0)
    try:
        for at in range(3):
            frame = Frame(at, 1, 0, 0, b"x")
            spool.append(frame)
            appended.append(frame)
        spool.sync()
        assert list(spool.frames()) == appended
    finally:
        spool.close()
    spool = SpoolFile.open(path)
    try:
        assert list(spool.frames()) == appended
    finally:
        spool.delete()


def open_fds() -> int:
    """Return how many descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("number", FAILING)
def test_an_error_at_any_call_is_told_as_what_it_means(tmp_path: Path, number: int) -> None:
    """Whichever call the disk refuses, no OSError comes out, and what was appended before is still there."""
    for at in range(1, 100):
        path, appended, fds = tmp_path / str(at), list[Frame](), open_fds()
        told: TrainarchiveError | None = None
        with Refusing(CALLS, at, number) as kernel:
            try:
                life_of(path, appended)
            except TrainarchiveError as error:
                told = error
        assert told is None or (type(told) in FAILING[number] and told.where == str(path))
        assert told is None or os.strerror(number) in str(told)
        assert open_fds() == fds
        if path.exists():
            left = SpoolFile.open(path)
            assert list(left.frames()) == appended
            left.delete()
        if not kernel.reached:
            break
    assert at > 25


_SPOOLER = """
import os, sys
from pathlib import Path
from trainarchive.frame import Framer
from trainarchive.spool import SpoolFile
spool, framer = SpoolFile.create(Path(sys.argv[1]), "s", 0), Framer()
while True:
    spool.append(framer.frame(spool.end, os.urandom(20_000), 0, 0))
    os.write(1, b"%d\\n" % spool.end)
"""


def test_kill_9_loses_no_appended_frame(tmp_path: Path) -> None:
    """After SIGKILL in the middle of writing, everything that ``append`` returned from is there."""
    path = tmp_path / "a"
    with subprocess.Popen([sys.executable, "-c", _SPOOLER, path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(50):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        told = [int(line) for line in process.stdout.read().splitlines(keepends=True) if line.endswith(b"\n")]
    spool = SpoolFile.open(path)
    assert spool.end >= max(told, default=50 * 20_000)
    assert sum(len(frame.text()) for frame in spool.frames()) == spool.end
    spool.close()
