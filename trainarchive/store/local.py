"""A store in a directory: on a node's own disk, or on a parallel file system.

Key ``a/b`` is the file ``a/b`` below the root. New bytes go to a file in ``.tmp`` first, and get
their name when they are on disk; what a killed writer leaves there is removed a day later. Files
are 0600, directories 0700. Symbolic links and other special files below the root are no objects:
``list`` and ``children`` pass over them, other methods refuse them.
"""

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from trainarchive.errors import NotFoundError, TrainarchiveError, UnavailableError
from trainarchive.store.contract import ObjectInfo, check_key, check_prefix
from trainarchive.store.disk import MISSING, explained, read, sync, write

_TEMPORARY = ".tmp"
_LEFT_OVER_S = 86_400.0
_SWEEP_EVERY_S = 3600.0

_TRIES = 100
"""Times that a put makes its directories anew because deletes took them away."""


class LocalStore:
    """Keeps what ``contract.Store`` promises, among threads, processes and hosts that share the directory."""

    def __init__(self, root: str | Path) -> None:
        """``root`` is made at the first put. Nothing is touched before."""
        self._root = Path(root).absolute()
        self._next_sweep = 0.0

    def put(self, key: str, body: bytes) -> None:
        """Write or replace."""

        def replace(temporary: Path, path: Path) -> bool:
            temporary.replace(path)
            return True

        self._place(key, body, replace)

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """Write unless the key is taken; return whether the key now holds ``body``."""

        def link(temporary: Path, path: Path) -> bool:
            try:
                path.hardlink_to(temporary)
            except FileExistsError:
                return read(path) == body
            return True

        return self._place(key, body, link)

    def get(self, key: str) -> bytes:
        """Return the whole object, or raise NotFoundError."""
        return self._read(key, 0, None)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes from ``start``; a negative ``start`` counts from the end."""
        return self._read(key, start, length)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object whose key begins with ``prefix``, in byte order of keys.

        Memory holds the names of the directories on the way, not the whole tree.
        """
        check_prefix(prefix)
        return self._walk(prefix)

    def children(self, prefix: str) -> Iterator[str]:
        """Yield, in order and once each, what follows ``prefix`` up to and with the next ``/``."""
        check_prefix(prefix)
        return (name.removeprefix(prefix) for name in self._entries(prefix))

    def delete(self, key: str) -> None:
        """Remove, and the directories that are empty then; no error when there is none."""
        path = self._path(key)
        with explained(path):
            try:
                path.unlink()
            except MISSING:
                self._check_root()
            directory = path.parent
            # Whatever keeps an empty directory standing (others write into it, a mount) does no harm.
            with suppress(OSError):
                while directory != self._root:
                    with suppress(FileNotFoundError):
                        directory.rmdir()
                    directory = directory.parent
            while not sync(directory) and directory != self._root:
                directory = directory.parent

    def presign(self, key: str, seconds: int) -> str:
        """Raise TrainarchiveError: a directory has no server."""
        raise TrainarchiveError(
            f"a store in a directory has no URL that would be good for {seconds} s",
            where=str(self._path(key)),
            hint="read the file where the directory is mounted, use trainarchive fetch, or keep the archive in S3",
        )

    def _path(self, key: str) -> Path:
        check_key(key)
        return self._root / key

    def _read(self, key: str, start: int, length: int | None) -> bytes:
        path = self._path(key)
        with explained(path):
            try:
                return read(path, start, length)
            except MISSING:
                self._check_root()
                hint = "" if self._root.is_dir() else f"{self._root} is not there: not mounted, or nothing stored yet"
                raise NotFoundError("no such object", where=str(path), hint=hint) from None

    def _place(self, key: str, body: bytes, move: Callable[[Path, Path], bool]) -> bool:
        """Write ``body`` to a temporary file, ``move`` it to its name, and make that durable."""
        path = self._path(key)
        with explained(path), self._temporary(body) as temporary:
            for _ in range(_TRIES):
                try:
                    self._make(path.parent)
                    answer = move(temporary, path)
                except IsADirectoryError:
                    self._remove_empty(path)
                except (FileNotFoundError, NotADirectoryError):
                    pass  # a delete took away the object, or the empty directory that was to hold it
                else:
                    self._sync_up(path.parent)
                    return answer
        raise UnavailableError("others keep removing what this call needs", where=str(path), hint="try again")

    def _sync_up(self, directory: Path) -> None:
        """Make names durable up to the root: another process may have made a directory and not come to that yet."""
        sync(directory)
        while directory != self._root:
            directory = directory.parent
            sync(directory)

    @contextmanager
    def _temporary(self, body: bytes) -> Iterator[Path]:
        """Write ``body`` durably to a file of its own; it is gone afterwards unless it was moved."""
        directory = self._root / _TEMPORARY
        self._make(directory)
        self._sweep(directory)
        path = directory / f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            write(path, body)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _sweep(self, directory: Path) -> None:
        """Once an hour remove what killed writers left behind more than a day ago."""
        if time.monotonic() < self._next_sweep:
            return
        self._next_sweep = time.monotonic() + _SWEEP_EVERY_S
        oldest = time.time() - _LEFT_OVER_S
        for path in directory.iterdir():
            with suppress(*MISSING):  # others sweep too
                if path.lstat().st_mtime < oldest:
                    path.unlink()

    def _make(self, directory: Path) -> None:
        """Make a directory and those above it; raise TrainarchiveError where an object stands in the way."""
        if directory.is_dir():
            return
        self._make(directory.parent)
        try:
            directory.mkdir(0o700)
        except FileExistsError:
            if not directory.is_dir() and os.path.lexists(directory):
                raise _in_the_way(directory, self._root) from None
            return  # others made it just now, and perhaps removed it again
        if directory == self._root or directory in self._root.parents:
            sync(directory.parent)  # what is below the root becomes durable with the object

    def _remove_empty(self, path: Path) -> None:
        """Remove the directories that a crashed ``delete`` left at ``path``; raise where they hold objects."""
        try:
            for directory, _, _ in os.walk(path, topdown=False):
                Path(directory).rmdir()
        except FileNotFoundError:
            pass  # others did
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
            raise _in_the_way(path, self._root) from None

    def _check_root(self) -> None:
        if os.path.lexists(self._root) and not self._root.is_dir():
            raise _in_the_way(self._root, self._root)

    def _walk(self, prefix: str) -> Iterator[ObjectInfo]:
        pending = [*reversed(self._entries(prefix))]
        while pending:
            key = pending.pop()
            if key.endswith("/"):
                pending += reversed(self._entries(key))
            elif (info := self._info(key)) is not None:
                yield info

    def _entries(self, prefix: str) -> Sequence[str]:
        """Read one directory: the keys that begin with ``prefix`` and, with a ``/`` at the end, directories, in order.

        Sorted with that ``/``: the keys below ``a`` come after ``a-b`` and ``a.b``, and before ``a0``.
        """
        above, slash, begun = prefix.rpartition("/")
        path = f"{self._root}/{above}"
        with explained(path):
            try:
                with os.scandir(path) as entries:
                    names = filter(None, map(_name, entries))
                    return sorted(above + slash + name for name in names if name.startswith(begun))
            except MISSING:
                self._check_root()
                return ()

    def _info(self, key: str) -> ObjectInfo | None:
        path = f"{self._root}/{key}"
        with explained(path):
            try:
                found = os.lstat(path)
            except MISSING:
                return None  # deleted since its directory was read
        return ObjectInfo(key, found.st_size, found.st_mtime) if stat.S_ISREG(found.st_mode) else None


def _in_the_way(path: Path, root: Path) -> TrainarchiveError:
    if path == root or path in root.parents:
        hint = "[store] url must name a directory; move the file away or change the URL"
        return TrainarchiveError("not a directory", where=str(path), hint=hint)
    what = "on a file system this key and another that continues it with / exclude each other"
    return TrainarchiveError(what, where=str(path), hint="choose another key; what was there before is unharmed")


def _name(entry: os.DirEntry[str]) -> str:
    """Return an entry's part of a key, with ``/`` for a directory; empty for what cannot be ours."""
    name = entry.name
    if name.startswith("."):
        return ""
    if not (name.isascii() and name.isprintable()):
        try:
            check_key(name)
        except TrainarchiveError:
            return ""
    if entry.is_dir(follow_symlinks=False):
        return name + "/"
    return name if entry.is_file(follow_symlinks=False) else ""
