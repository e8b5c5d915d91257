"""Files as a store needs them: whole reads, durable names, and errors that say what to do."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainarchive.errors import TrainarchiveError, UnavailableError

MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""What the system raises where a path leads to no file."""

_NO_OBJECT = "symbolic links and special files cannot be objects: remove it"
_NO_LINKS = "the store needs a file system with hard links"

_FINAL = {
    errno.EACCES: "let this user read and write there, or choose another with --home, TRAINARCHIVE_HOME or [store] url",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or use another file system",
    errno.ELOOP: _NO_OBJECT,
    errno.ENAMETOOLONG: "set [store] url to a directory with a shorter path",
    errno.ENOSYS: _NO_LINKS,
    errno.ENXIO: _NO_OBJECT,
    errno.EOPNOTSUPP: _NO_LINKS,
    errno.EPERM: f"{_NO_LINKS} on which this process' user may write",
    errno.EROFS: "mount it writable, or set [store] url to another directory",
    errno.EXDEV: "everything below the store's root must be one file system",
}
"""Errors that stay until somebody acts, and how."""

_PASSING = {
    errno.EDQUOT: "the quota is used up: raise it or free space; nothing was stored under this key",
    errno.EIO: "look for disk errors in the kernel's log",
    errno.ENOSPC: "free space there; nothing was stored under this key",
    errno.ESTALE: "mount the network file system again if this stays",
}


@contextmanager
def explained(path: str | Path) -> Iterator[None]:
    """Raise TrainarchiveError for an OSError that stays, UnavailableError for any other."""
    try:
        yield
    except OSError as error:
        what, number = error.strerror or str(error), error.errno or 0
        if number in _FINAL:
            raise TrainarchiveError(what, where=str(path), hint=_FINAL[number]) from error
        raise UnavailableError(what, where=str(path), hint=_PASSING.get(number, "try again")) from error


def read(path: Path, start: int = 0, length: int | None = None) -> bytes:
    """Return a regular file's bytes, all or ``length`` from ``start`` (negative: from the end, up to the end).

    Raises OSError; for special files too, and without waiting for what they may do.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.ELOOP, "not a regular file")
        begin = max(found.st_size + start, 0) if start < 0 else start
        end = found.st_size
        if start >= 0 and length is not None:
            end = min(end, begin + max(length, 0))
        pieces = []
        while begin < end and (piece := os.pread(handle, end - begin, begin)):
            pieces.append(piece)
            begin += len(piece)
        return b"".join(pieces)
    finally:
        os.close(handle)


def write(path: Path, body: bytes) -> None:
    """Make a new file, 0600, and return when its bytes are on disk."""
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        rest = memoryview(body)
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def sync(directory: Path) -> bool:
    """Return when a directory's entries are on disk; False where it is gone."""
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except MISSING:
        return False
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems know no fsync of directories
            raise
    finally:
        os.close(handle)
    return True
