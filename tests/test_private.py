"""Private directories: whose they are, and how they go, whatever users made of them."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainarchive import private
from trainarchive.run import Job, RunKey
from trainarchive.settings import Sources
from trainarchive.sources import candidates

DEEP = 1500
"""More levels than Python recurses, and than a process usually has descriptors."""


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """A spool's ``jobs/``."""
    place = tmp_path / "spool" / "jobs"
    place.mkdir(parents=True)
    return place


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """What links lead to; it must be as it was."""
    place = tmp_path / "outside"
    place.mkdir(mode=0o711)
    (place / "file").write_bytes(b"x")
    (place / "file").chmod(0o644)
    yield place
    assert (place / "file").read_bytes() == b"x"
    assert (place.stat().st_mode & 0o777, (place / "file").stat().st_mode & 0o777) == (0o711, 0o644)


def after_all_in(jobs: Path) -> float:
    """Return a time after the last change in there, when it has come: no test can set a ctime."""
    last = max(one.lstat().st_ctime_ns for one in (jobs, *jobs.rglob("*")))
    probe = jobs.parent / "probe"
    deadline = time.monotonic() + 10
    while True:  # the file system's clock moves by some ms
        probe.touch()
        now = probe.stat()
        probe.unlink()
        if now.st_ctime_ns > last:
            return now.st_ctime
        assert time.monotonic() < deadline


def test_whose_a_directory_is(jobs: Path, outside: Path) -> None:
    """A mark beside it says so; what is no mark says nothing, and nobody waits for it."""
    directory, mark = jobs / "7.0", jobs / ".7.0"
    assert (private.sluid_of(directory), private.is_of(directory, "sA")) == ("", True)
    mark.write_bytes(b"sA\n")
    assert private.sluid_of(directory) == "sA"
    assert [private.is_of(directory, sluid) for sluid in ("sA", "sB", "")] == [True, False, True]
    odd: list[Callable[[], None]] = [lambda: mark.symlink_to(outside / "file"), lambda: os.mkfifo(mark), mark.mkdir]
    for make in odd:
        mark.unlink()
        make()
        assert private.sluid_of(directory) == ""
    mark.rmdir()


def test_another_runs_directory_is_not_looked_into(jobs: Path) -> None:
    """Where a later run came with the same key, the earlier one does not take its files."""
    directory = jobs / "7.0"
    directory.mkdir()
    (directory / "x.log").write_bytes(b"x")
    (jobs / ".7.0").write_bytes(b"sB\n")
    for sluid, number in (("sA", 0), ("sB", 1), ("", 1)):
        job = Job(uid=os.geteuid(), private_dir=str(directory), sluid=sluid)
        assert len(candidates(RunKey("c", 7), job, [], Sources(), "n1")[0]) == number


def test_a_very_deep_tree_goes(jobs: Path) -> None:
    """Recursion would end at a thousand levels, with an error that nobody expects."""
    place = jobs / "7.0"
    place.mkdir()
    inner = os.open(place, os.O_RDONLY)
    for _ in range(DEEP):
        os.mkdir("d", dir_fd=inner)
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=inner))
        below = os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(inner)
        inner = below
    os.close(inner)
    fds = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only their number is wanted
    private.remove(place)
    assert not place.exists()
    assert len(os.listdir("/proc/self/fd")) == fds  # noqa: PTH208 - as above


def test_links_lead_nowhere(jobs: Path, outside: Path) -> None:
    """Links go, what they lead to stays as it is; so does what a top that is a link leads to."""
    place = jobs / "7.0"
    (place / "a" / "b").mkdir(parents=True)
    for name in ("l", "a/l", "a/b/l"):
        (place / name).symlink_to(outside)
        (place / f"{name}f").symlink_to(outside / "file")
    os.mkfifo(place / "a" / "fifo")
    (place / "a" / "b").chmod(0)
    (place / "a").chmod(0o500)
    private.remove(place)
    assert not place.exists()
    place.symlink_to(outside)
    private.remove(place)
    assert place.is_symlink()
    private.remove(jobs / "nothing")


names = st.sampled_from(["a", "b", "c"])


@given(st.lists(st.lists(names, min_size=1, max_size=6), max_size=30), st.data())
def test_any_tree_goes(tmp_path_factory: pytest.TempPathFactory, paths: list[list[str]], data: st.DataObject) -> None:
    """Whatever directories, files and modes."""
    place = tmp_path_factory.mktemp("jobs") / "7.0"
    place.mkdir()
    made = []
    for path in paths:
        whole = place.joinpath(*path)
        try:
            if data.draw(st.booleans()):
                whole.mkdir(parents=True)
                made.append(whole)
            else:
                whole.parent.mkdir(parents=True, exist_ok=True)
                whole.touch()
        except (FileExistsError, NotADirectoryError):
            continue
    for directory in reversed(made):
        directory.chmod(data.draw(st.sampled_from([0, 0o500, 0o700])))
    private.remove(place)
    assert not place.exists()


def test_what_was_moved_aside_goes_when_it_is_old_and_not_in_use(jobs: Path) -> None:
    """Directories of runs stay, and so do other things; a mark goes with its directory."""
    for name in ("7.0", "7.0~12", "7.0~12.1", "8.0", "odd~x", "9.0~5"):
        (jobs / name).mkdir()
        (jobs / name / "x.log").touch()
    for name in (".7.0", ".5.0", ".tmp"):
        (jobs / name).touch()
    before = after_all_in(jobs)
    (jobs / "7.0~12.1" / "late.log").touch()
    private.sweep(jobs.parent, before=before, in_use=[jobs / "9.0~5"])
    there = {path.name for path in jobs.iterdir()}
    assert there == {"7.0", "7.0~12.1", "8.0", "odd~x", "9.0~5", ".7.0", ".tmp"}
    private.sweep(jobs.parent / "nowhere", before=before)


def test_what_is_written_in_counts_as_a_change(jobs: Path) -> None:
    """A process of the earlier run may still write there, and may set any time but the ctime."""
    log = jobs / "7.0~1" / "x.log"
    log.parent.mkdir()
    log.touch()
    before = after_all_in(jobs)
    log.write_bytes(b"x")
    os.utime(log, (1, 1))
    private.sweep(jobs.parent, before=before)
    assert log.exists()
