"""The runs' private directories, below the spool's ``jobs/``: whose they are, and how they go.

::

    jobs/<job>.<attempt>            TRAINARCHIVE_DIR of a run, its user's; Prolog makes it
    jobs/.<job>.<attempt>           the SLUID of the run that has that directory; Prolog writes it
    jobs/<job>.<attempt>~<number>   an earlier run's, which Prolog moved aside when the name came back

Users fill them as they like: with links, with a million files, with directories thousands deep.
"""

import itertools
import os
import re
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_MARK = 256
_ASIDE = re.compile(r"[0-9.]+~[0-9.]+")
_MARK = re.compile(r"\.[0-9]+\.[0-9]+")


def sluid_of(directory: Path) -> str:
    """Return the SLUID of the run whose private directory this is; "" where nobody noted it (before 25.11)."""
    try:
        fd = os.open(_mark_of(directory), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, _MAX_MARK).decode(errors="replace").strip()
    except OSError:
        return ""
    finally:
        os.close(fd)


def is_of(directory: Path, sluid: str) -> bool:
    """Whether the directory of that name still is the run's; a later run with its key may have it."""
    return len({sluid_of(directory), sluid} - {""}) < 2


def sweep(spool: Path, *, before: float, in_use: Collection[Path] = ()) -> None:
    """Remove what was moved aside, and marks of directories that are gone, unless changed after ``before`` (Unix s).

    ``in_use`` stays in any case. May take long: call it where nothing waits.
    """
    with suppress(OSError):
        for path in list((spool / "jobs").iterdir()):
            if path in in_use or not _is_old(path, before):
                continue
            if _ASIDE.fullmatch(path.name):
                remove(path)
            elif _MARK.fullmatch(path.name) and not os.path.lexists(path.with_name(path.name[1:])):
                with suppress(OSError):
                    path.unlink()


def remove(directory: Path) -> None:
    """Delete a directory with all in it, as far as that can be done; what cannot be deleted stays.

    Goes along no link, out of no directory, and needs no more memory and descriptors for a tree
    that is thousands of levels deep: a directory in a directory is moved to the top first.
    """
    with suppress(OSError):
        top = _open(directory)
        try:
            _empty(top)
        finally:
            os.close(top)
        directory.rmdir()


def _empty(top: int) -> None:
    number = itertools.count()
    waiting = deque(_clear(top))
    while waiting:
        name = waiting.popleft()
        with suppress(OSError):
            inner = _open(name, top)
            try:
                for below in _clear(inner):
                    with suppress(OSError):
                        os.close(_open(below, inner))  # with a mode that lets it be moved
                        fresh = f"~{os.getpid()}.{next(number)}"
                        os.rename(below, fresh, src_dir_fd=inner, dst_dir_fd=top)
                        waiting.append(fresh)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)


def _clear(directory: int) -> list[str]:
    """Delete what is no directory; return the directories that are not empty."""
    left = []
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    os.rmdir(entry.name, dir_fd=directory)
                else:
                    os.unlink(entry.name, dir_fd=directory)
            except OSError:
                left.append(entry.name)
    return left


def _open(name: str | Path, parent: int | None = None) -> int:
    """Open a directory for reading and writing in it, whatever mode its owner gave it."""
    pin = os.open(name, _DIRECTORY | os.O_PATH, dir_fd=parent)
    try:
        place = f"/proc/self/fd/{pin}"
        os.chmod(place, 0o700)  # noqa: PTH101 - a link of the kernel's to what is pinned, not a path
        return os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(pin)


def _is_old(path: Path, before: float) -> bool:
    """Say whether neither it nor what lies directly in it changed since; users cannot set a ctime."""
    try:
        if path.lstat().st_ctime >= before:
            return False
        if path.is_dir() and not path.is_symlink():
            with os.scandir(path) as entries:
                return all(entry.stat(follow_symlinks=False).st_ctime < before for entry in entries)
    except OSError:
        return False
    return True


def _mark_of(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}")
