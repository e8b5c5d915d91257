"""Following one open file: its bytes in order, and a new generation where its content began again.

A ``Tail`` owns an fd and never looks at a path, so renaming and unlinking change nothing. What it
goes by is the size, the change time (ctime, which no user can set), the first bytes (up to HEAD,
as a ``Fingerprint``) and the ``GUARD`` bytes before the offset. A new **generation** begins, and
is read from 0, where

- the size is smaller than it was last seen, or smaller than the offset ("truncated");
- the first bytes or the guard are not what was read before ("rewritten"): Slurm's requeue
  truncates the same inode, and the file may be longer than before when it is next looked at;
- at a resume the fd is of another file ("replaced").

What cannot be noticed, and then counts as the same generation:

- a rewrite between two looks that leaves the size at or above the last seen one, the fingerprinted
  first bytes equal and the guard equal (a rewrite with equal content is the plainest case);
- bytes changed in place that are neither among the first bytes nor in the guard;
- bytes that came and were cut off again between two looks;
- what is stored through a shared mapping, until the file system moves the ctime.

A change within the grain of a file system's clock is noticed: for SETTLE_NS after each change of
size or ctime every look compares the bytes themselves.

Bytes beyond MAX_OFFSET, which a user can make by a word (``truncate -s 1E``), count as not there:
no size and no offset here is ever larger, and ``too_large`` tells of it. No OSError leaves this
module: what the kernel refuses now is an UnavailableError.
"""

import ctypes
import errno
import functools
import os
import struct
import time
from contextlib import suppress
from typing import Self

import msgspec
from blake3 import blake3

from trainarchive.errors import UnavailableError
from trainarchive.frame import MAX_OFFSET, MAX_RAW

HEAD = 4096
"""Most bytes under a fingerprint."""

GUARD = 64
"""Most bytes before the offset that are read again with each block."""

BUFFER_SIZE = GUARD + MAX_RAW
"""Bytes of the buffer that tails of one thread may share."""

SETTLE_NS = 50_000_000
"""Timestamps are at worst this coarse (a kernel tick is 1-10 ms)."""

_ATTEMPTS = 8
_AT_EMPTY_PATH = 0x1000
_STATX_BTIME = 0x800
_NO_STATX = (errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP)
"""The kernel has none, or a sandbox does not let us: any other error is the file system's, and may pass."""


class Identity(msgspec.Struct, frozen=True):
    """Which file: file system (st_dev, of this node and mount), inode, birth time (ns; 0 where none is known)."""

    fs: int
    inode: int
    birth_ns: int


class Fingerprint(msgspec.Struct, frozen=True):
    """BLAKE3 (hex, 16 bytes) of the first ``length`` bytes, all of them read before; grows up to HEAD."""

    length: int
    blake3: str


class Saved(msgspec.Struct, frozen=True):
    """What ``resume`` needs, for the state file.

    ``offset``: where to go on. ``read_to``: how far it was read; ``guard`` are the bytes before
    that. ``known_size``: the last seen size.
    """

    identity: Identity
    fingerprint: Fingerprint
    generation: int
    offset: int
    read_to: int
    guard: bytes
    known_size: int


class Ended(msgspec.Struct, frozen=True):
    """A generation that will have no more bytes: read up to ``offset_read``, last known to have ``known_size``."""

    generation: int
    offset_read: int
    known_size: int
    reason: str


class Block(msgspec.Struct, frozen=True, gc=False):
    """1 to MAX_RAW bytes at ``offset``. ``data`` lies in the shared buffer: valid until the next read.

    ``wall_ns`` and ``mono_ns`` are when it was read (CLOCK_REALTIME, CLOCK_MONOTONIC).
    """

    generation: int
    offset: int
    data: memoryview
    wall_ns: int
    mono_ns: int


class Tail:
    """Follows the regular file behind ``fd``, which it owns and closes; for one thread.

    ``generation`` and ``offset`` tell where the next block starts. ``ended`` collects the ends of
    generations; the caller empties it. ``unlinked``: no name is left, as last seen. ``too_large``:
    it has bytes beyond MAX_OFFSET, as last seen. ``identity`` is asked for once, at the beginning.

    ``poll``, ``read``, ``seek`` and the constructor raise UnavailableError where the kernel gives
    an error (EIO, ESTALE ...): nothing has moved, and the call may be made again. A constructor
    that raises leaves the fd with the caller.
    """

    __slots__ = (
        "_changed_ns",
        "_fd",
        "_guard",
        "_known",
        "_seen_ns",
        "_size",
        "_start",
        "_unsure",
        "_view",
        "ended",
        "generation",
        "identity",
        "offset",
        "too_large",
        "unlinked",
    )

    def __init__(
        self,
        fd: int,
        *,
        generation: int = 0,
        offset: int = 0,
        start: Fingerprint | None = None,
        buffer: bytearray | None = None,
    ) -> None:
        """``buffer`` of BUFFER_SIZE bytes may be shared; ``start`` is what the first bytes must still be."""
        self._fd = fd
        self.generation = generation
        self.offset = offset
        self.ended: list[Ended] = []
        self.unlinked = False
        self.too_large = False
        self._start = start or _fingerprint(b"")
        self._view = memoryview(buffer if buffer is not None else bytearray(BUFFER_SIZE))
        self._size = 0  # as last seen
        self._known = offset  # as last seen when the first bytes and the guard were right
        self._changed_ns = -1
        self._seen_ns = 0  # when size or ctime was first seen to be what it is
        self._unsure = True  # the content is to be compared at the next read
        try:
            self.identity = _identity(fd)
        except OSError as error:
            raise self._unavailable(error) from error
        self._guard = self._guard_at(offset)

    @property
    def fingerprint(self) -> Fingerprint:
        """The first bytes of this generation, as far as they were read."""
        return self._start

    def fileno(self) -> int:
        """Return the fd, -1 after ``close``."""
        return self._fd

    def pending(self) -> int:
        """Return how many bytes were unread at the last look."""
        return max(0, self._size - self.offset)

    def poll(self) -> bool:
        """Look once (one fstat) and say whether ``read`` has something to do: bytes, or a change to examine."""
        try:
            now = os.fstat(self._fd)
        except OSError as error:
            raise self._unavailable(error) from error
        if now.st_ctime_ns == self._changed_ns and min(now.st_size, MAX_OFFSET) == self._size:
            return self._unsure or self._size > self.offset
        self._note(now)
        return True

    def read(self) -> Block | None:
        """Return the next bytes, at most MAX_RAW, or None when caught up."""
        try:
            for _ in range(_ATTEMPTS):  # a writer may begin again under our eyes, but not hold us here
                if not self.poll():
                    return None
                generation = self.generation
                block = self._next()
                if block is not None or self.generation == generation:
                    return block
        except OSError as error:
            raise self._unavailable(error) from error
        return None

    def seek(self, offset: int) -> bool:
        """Go to ``offset`` of this generation; False where it is found to have ended (see ``ended``).

        Back, when the log lost bytes. Forward, when others know that bytes up to ``offset`` were
        delivered before: a file that is now shorter than that has ended.
        """
        if offset < 0:
            raise ValueError(f"offset {offset}")
        generation = self.generation
        try:
            self.poll()
            if generation == self.generation and not self._is_same():
                self._begin_again("rewritten", self._known)
            if generation == self.generation and self._size < offset:
                self._begin_again("truncated", offset)
        except OSError as error:
            raise self._unavailable(error) from error
        if generation != self.generation:
            last = self.ended.pop()
            self.ended.append(Ended(last.generation, offset, last.known_size, last.reason))
            return False
        self._guard = self._guard_at(offset)
        self.offset = offset
        return True

    def saved(self, offset: int | None = None) -> Saved:
        """Return the state from which ``resume`` goes on at ``offset`` (default: where reading stands).

        Asks nobody: it never fails.
        """
        return Saved(
            identity=self.identity,
            fingerprint=self._start,
            generation=self.generation,
            offset=self.offset if offset is None else offset,
            read_to=self.offset,
            guard=self._guard,
            known_size=max(self._size, self.offset),
        )

    @classmethod
    def resume(
        cls,
        fd: int,
        saved: Saved,
        *,
        buffer: bytearray | None = None,
    ) -> Self:
        """Go on where ``saved`` was, or begin the next generation at 0, see ``ended``.

        The state proves only what it holds: **before a frame is sent, the state with its
        generation and its fingerprint must be saved**, or a file rewritten after a crash could
        continue the old generation. Saves with the same two may be late; ``seek`` to where the log
        stands tells a file that is shorter than that. On UnavailableError the fd stays the caller's.
        """
        tail = cls(fd, generation=saved.generation, offset=saved.offset, start=saved.fingerprint, buffer=buffer)
        try:
            size = min(os.fstat(fd).st_size, MAX_OFFSET)
            known = min(max(saved.known_size, saved.offset), MAX_OFFSET)
            if tail.identity != saved.identity:
                reason = "replaced"
            elif size < known:
                reason = "truncated"
            elif not tail._is_same() or tail._pread_guard(saved.read_to, len(saved.guard)) != saved.guard:
                reason = "rewritten"
            else:
                tail._size = tail._known = known
                return tail
        except OSError as error:
            raise tail._unavailable(error) from error
        tail._begin_again(reason, known)
        return tail

    def close(self) -> None:
        """Close the fd; safe to call twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(OSError):  # it is closed in any case, and was only read
                os.close(fd)

    def _note(self, now: os.stat_result) -> None:
        """Take in a changed size or ctime."""
        size = min(now.st_size, MAX_OFFSET)
        if size < self._size or size < self.offset:
            self._begin_again("truncated", self._size)
        self._size = size
        self.too_large = now.st_size > MAX_OFFSET
        self._changed_ns = now.st_ctime_ns
        self.unlinked = now.st_nlink == 0
        self._seen_ns = time.monotonic_ns()
        self._unsure = True

    def _next(self) -> Block | None:
        """Read guard and data in one call, then look again: only what no change can have touched is delivered."""
        guard, offset = self._guard, self.offset
        known = len(guard)
        most = min(MAX_RAW, MAX_OFFSET - offset)
        count = os.preadv(self._fd, [self._view[: known + most]], offset - known)
        wall_ns, mono_ns = time.time_ns(), time.monotonic_ns()
        now = os.fstat(self._fd)
        if now.st_ctime_ns != self._changed_ns or min(now.st_size, MAX_OFFSET) != self._size:
            generation = self.generation
            self._note(now)
            if generation != self.generation:
                return None
        if count < known:  # cut while it was being read: the next look shows what it has become
            return None
        data = self._view[known:count]
        end = offset + count - known
        if self._view[:known] != guard or not self._has_start(data, end):
            self._begin_again("rewritten", self._known)
            return None
        self._known = max(self._size, end)
        if mono_ns - self._seen_ns > SETTLE_NS:
            self._unsure = False
        if not data:
            return None
        self._guard = bytes(data[-GUARD:]) if len(data) >= GUARD else (guard + bytes(data))[-GUARD:]
        self.offset = end
        return Block(self.generation, offset, data, wall_ns, mono_ns)

    def _has_start(self, data: memoryview | bytes, end: int) -> bool:
        """Compare the first bytes, where something changed, and extend the fingerprint over ``data``."""
        length = self._start.length
        wanted = max(length, min(HEAD, end))
        if not wanted or (wanted == length and not self._unsure):
            return True
        head = os.pread(self._fd, wanted, 0)
        if len(head) < length or _fingerprint(head[:length]) != self._start:
            return False
        fresh = head[self.offset : end]
        if fresh != data[: len(fresh)]:
            return False
        if len(head) == wanted > length:
            self._start = _fingerprint(head)
        return True

    def _is_same(self) -> bool:
        """Compare guard and first bytes now."""
        self._unsure = True
        guard = self._guard
        return self._pread_guard(self.offset, len(guard)) == guard and self._has_start(b"", self.offset)

    def _begin_again(self, reason: str, known_size: int) -> None:
        self.ended.append(Ended(self.generation, self.offset, max(known_size, self.offset), reason))
        self.generation += 1
        self.offset = self._known = self._size = 0
        self._changed_ns = -1  # what was seen may have been the old content: look again
        self._guard = b""
        self._start = _fingerprint(b"")
        self._unsure = True

    def _guard_at(self, offset: int) -> bytes:
        try:
            guard = self._pread_guard(offset, min(GUARD, offset)) if offset else b""
        except OSError as error:
            raise self._unavailable(error) from error
        return guard if len(guard) == min(GUARD, offset) else b""  # shorter: the next look finds it truncated

    def _pread_guard(self, end: int, length: int) -> bytes:
        return os.pread(self._fd, length, end - length) if length else b""

    def _unavailable(self, error: OSError) -> UnavailableError:
        return UnavailableError(
            f"the file does not read: {os.strerror(error.errno or 0)}",
            where=f"fd {self._fd}, offset {self.offset}",
            hint="it is tried again",
        )


def _identity(fd: int) -> Identity:
    status = os.fstat(fd)
    return Identity(status.st_dev, status.st_ino, _birth_ns(fd))


def _fingerprint(head: bytes) -> Fingerprint:
    return Fingerprint(len(head), blake3(head).hexdigest(length=16))


@functools.cache
def _statx() -> "ctypes._NamedFuncPointer | None":
    """Return libc's statx, which Python has only from 3.15 on; None before glibc 2.28."""
    try:
        return ctypes.CDLL(None, use_errno=True).statx
    except AttributeError:
        return None


def _birth_ns(fd: int) -> int:
    """Return the birth time, 0 where kernel, libc or file system have none."""
    statx = _statx()
    if statx is None:
        return 0
    answer = ctypes.create_string_buffer(256)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_BTIME, answer) != 0:
        number = ctypes.get_errno()
        if number in _NO_STATX:
            return 0
        raise OSError(number, os.strerror(number))  # 0 now and a time later would make it two files
    (mask,) = struct.unpack_from("=I", answer, 0)
    seconds, nanoseconds = struct.unpack_from("=qI", answer, 0x50)
    return int(seconds) * 1_000_000_000 + int(nanoseconds) if mask & _STATX_BTIME else 0
