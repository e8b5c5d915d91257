"""Writing files below one directory, and never outside it, whatever lies there already.

Directories are opened one name after another, relative to each other and without following
symbolic links. A file gets its name by a rename when it is whole, so an interrupted fetch leaves
whole files only. Errors of the operating system come out as TrainarchiveError, with the file.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import blake3

from trainarchive.errors import TrainarchiveError
from trainarchive.fetching.naming import Name, shown

_BLOCK = 1024 * 1024
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Folder:
    """An output directory, made with its parents where it is not there. Use it in a ``with`` block."""

    def __init__(self, path: Path, *, follow: bool = True) -> None:
        """``follow``: ``path`` itself may be a symbolic link (the user named it)."""
        self.path = path
        with self._errors(()):
            path.mkdir(parents=True, exist_ok=True)
            self._root = os.open(path, _OPEN_DIRECTORY | (0 if follow else os.O_NOFOLLOW))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        os.close(self._root)

    def read(self, name: Name) -> bytes | None:
        """Return the bytes of a regular file, None where there is none of that name."""
        found = self._open(name)
        if found is None:
            return None
        try:
            if not stat.S_ISREG(os.fstat(found).st_mode):
                return None
            with self._errors(name), open(found, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(found)

    def _open(self, name: Name) -> int | None:
        """Open what is there for reading: along no link, and without waiting for a FIFO's writer."""
        try:
            with self._parent(name, make=False) as folder:
                return os.open(name[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except (OSError, TrainarchiveError):
            return None  # writing it will tell what is wrong, if anything is

    def holds(self, name: Name, size: int, digest: str) -> bool:
        """Say whether there is a regular file of that name, size and BLAKE3 (hex)."""
        found = self._open(name)
        if found is None:
            return False
        try:
            status = os.fstat(found)
            if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                return False
            hasher = blake3.blake3()
            with self._errors(name):
                while block := os.read(found, _BLOCK):
                    hasher.update(block)
        finally:
            os.close(found)
        return hasher.hexdigest() == digest

    @contextlib.contextmanager
    def writing(self, name: Name) -> "Iterator[Draft]":
        """Give a file to write to; it is ``name`` after the block, or, after an exception, nothing is there.

        ``Draft.name`` may be changed in the block, in its last component.
        """
        with self._errors(name), self._parent(name, make=True) as folder:
            temporary = f".trainarchive-{secrets.token_hex(8)}.tmp".encode()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                draft = Draft(name, os.open(temporary, flags, 0o666, dir_fd=folder))
                try:
                    yield draft
                finally:
                    draft.close()
                os.rename(temporary, draft.name[-1], src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=folder)
                raise

    def remove(self, name: Name) -> None:
        """Remove a file that may be there."""
        with self._errors(name), contextlib.suppress(FileNotFoundError), self._parent(name, make=False) as folder:
            os.unlink(name[-1], dir_fd=folder)

    @contextlib.contextmanager
    def _parent(self, name: Name, *, make: bool) -> Iterator[int]:
        """Give the descriptor of the directory that ``name`` is in."""
        here = os.dup(self._root)
        try:
            for depth, part in enumerate(name[:-1], 1):
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=here)
                try:
                    below = os.open(part, _OPEN_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
                except NotADirectoryError:
                    raise self._in_the_way(name[:depth]) from None
                except OSError as error:
                    if error.errno == errno.ELOOP:
                        raise self._in_the_way(name[:depth]) from None
                    raise
                os.close(here)
                here = below
            yield here
        finally:
            os.close(here)

    def _in_the_way(self, name: Name) -> TrainarchiveError:
        return TrainarchiveError(
            "a directory is needed here, and a file or a symbolic link is there",
            where=self._shown(name),
            hint="move it away, or choose another directory with -o",
        )

    @contextlib.contextmanager
    def _errors(self, name: Name) -> Iterator[None]:
        try:
            yield
        except (BrokenPipeError, InterruptedError):
            raise
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            hint = "what is whole is kept: free some space and fetch again" if full else "choose another with -o"
            what = f"cannot be written: {os.strerror(error.errno or 0)}"
            raise TrainarchiveError(what, where=self._shown(name), hint=hint) from error

    def _shown(self, name: Name) -> str:
        return ascii(f"{self.path}/{shown(name)}" if name else str(self.path))[1:-1]


class Draft:
    """A file on its way; ``size`` and ``digest`` are of what was written so far."""

    def __init__(self, name: Name, descriptor: int) -> None:
        """Take over ``descriptor``."""
        self.name = name
        self.size = 0
        self._hasher = blake3.blake3()
        self._file = open(descriptor, "wb", buffering=_BLOCK)  # noqa: SIM115 (``close`` closes it)

    def write(self, text: bytes) -> None:
        """Add ``text``."""
        self._file.write(text)
        self._hasher.update(text)
        self.size += len(text)

    @property
    def digest(self) -> str:
        """BLAKE3 (hex)."""
        return self._hasher.hexdigest()

    def close(self) -> None:
        """Hand everything to the operating system; an error of it shows here at the latest."""
        self._file.close()
