"""Frames on the node's own disk, while the log Redis takes none: one source's generation in one file.

Layout, all integers little-endian::

    file    = MAGIC  u32 length of head  u32 crc32 of head  head  record...
    head    = JSON {"source": ..., "generation": ...}
    record  = u32 crc32 of head, this record's place in the file (u64), and all that follows in it
              u32 length of data  u32 length of gap  u64 offset  u64 length  i64 wall_ns  i64 mono_ns
              data (a frame's zstd bytes, or none)  gap (a reason in UTF-8, or none)

Records are contiguous and ascending: each begins where the one before ends. A file is appended to
only. What a crash left half-written at its end is cut off by ``open``, as are stray records that
the disk's blocks held before. While the machine itself lives, nothing that ``append`` returned
from is lost; after ``sync`` it survives a power cut too. A file that was never synced may then be
there under its name and be empty: that, too, is a DamagedError of ``open``, and held nothing safe.
(To sync each new file before it gets its name would cost a job's end a disk flush a file.)

No OSError leaves this module: a disk that refuses now is an UnavailableError, one that has no room
a SpoolFullError, bytes that it does not give back a DamagedError.

The head of a file is not freed while the rest is needed: to let sealed frames go, spread a
generation over several files and ``delete`` them one by one.
"""

import bisect
import errno
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self
from zlib import crc32

import msgspec

from trainarchive.errors import DamagedError, UnavailableError
from trainarchive.frame import MAX_OFFSET, MAX_RAW, Frame

MAGIC = b"TASPOOL1"

_PREFIX = struct.Struct("<8sII")
_RECORD = struct.Struct("<IIIQQqq")
_AFTER_CRC = 4
_MAX_HEAD = 65_536
_MAX_DATA = 2 * MAX_RAW  # zstd adds a few bytes to what does not compress
_MAX_GAP = 65_536
_MARK_EVERY = 1024 * 1024  # bytes of file between two remembered places: a search reads at most that
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.ESPIPE, errno.EINVAL)
_BAD_DISK = (errno.EIO, errno.EUCLEAN, errno.EBADMSG)


class SpoolFullError(UnavailableError):
    """No space for a frame; the file holds what it held before."""


class _Head(msgspec.Struct, frozen=True):
    source: str
    generation: int


class SpoolFile:
    """One spool file, held open; for one thread.

    ``source`` and ``generation`` tell whose frames it holds: bytes ``start`` to ``end``, both 0
    while it is empty. ``size`` is the file's bytes on disk. What a half-written or damaged end held
    is not among them after ``open``: it must be read again or is lost.
    """

    def __init__(self, path: Path, fd: int, head: _Head, body: int, seed: int) -> None:
        """Use ``create`` or ``open``; ``body`` is where records begin, ``seed`` the crc32 of the head."""
        self.path = path
        self.source = head.source
        self.generation = head.generation
        self.start = 0
        self.end = 0
        self.size = body
        self._fd = fd
        self._body = body
        self._seed = seed
        self._named = False  # whether the directory is known to be on disk with this file's name
        self._marks: list[tuple[int, int]] = []  # (offset, place in the file), ascending

    @classmethod
    def create(cls, path: Path, source: str, generation: int) -> Self:
        """Make a new file, readable to its owner only; it appears under its name with a whole head.

        Raise SpoolFullError where the disk has no room (or no inode) for it, UnavailableError where
        the name is taken or the file cannot be made: then nothing is left of it.
        """
        head = _Head(source, generation)
        packed = msgspec.json.encode(head)
        if len(packed) > _MAX_HEAD:
            raise ValueError(f"a source's name of {len(packed)} bytes")
        seed = crc32(packed)
        whole = _PREFIX.pack(MAGIC, len(packed), seed) + packed
        draft = path.with_name(f"{path.name}.{os.getpid()}.new")
        with _told(path, "cannot be made"):
            fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                _write(fd, [whole], 0, path)
                os.link(draft, path)
            except BaseException:
                _close(fd)
                raise
            finally:
                with suppress(OSError):  # left behind it is in nobody's way: the next draft overwrites it
                    draft.unlink()
        return cls(path, fd, head, len(whole), seed)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a file that may have been left at any moment; cut its end after the last whole record.

        Raise DamagedError where it does not begin as a spool file does or the disk does not give
        its bytes back, UnavailableError where there is none or it cannot be opened now.
        """
        with _told(path, "cannot be opened", reading=True):
            # O_NONBLOCK: a FIFO or a device of that name must not hold anybody up.
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                spool = cls(path, fd, *_read_head(fd, path))
                spool._recover()
            except BaseException:
                _close(fd)
                raise
        return spool

    def append(self, frame: Frame) -> None:
        """Add the frame (or gap) that begins at ``end``; the first one may begin anywhere.

        Raise SpoolFullError where there is no space: then the file is as it was.
        """
        if not self._fits(frame):
            raise ValueError(f"frame {frame.offset}+{frame.length} does not follow {self.start}-{self.end}")
        gap = frame.gap.encode(errors="backslashreplace")
        if len(gap) > _MAX_GAP or len(frame.data) > _MAX_DATA:
            raise ValueError("a frame larger than any frame may be")
        rest = _RECORD.pack(
            0, len(frame.data), len(gap), frame.offset, frame.length, frame.wall_ns, frame.mono_ns
        )[_AFTER_CRC:]  # fmt: skip
        crc = crc32(gap, crc32(frame.data, crc32(rest, _seed_at(self.size, self._seed))))
        size = _write(self._open_fd(), [crc.to_bytes(4, "little"), rest, frame.data, gap], self.size, self.path)
        self._took(frame.offset, frame.end, size)

    def sync(self) -> None:
        """Return when all that was appended survives a loss of power.

        After an UnavailableError some of it may be lost, whatever a later call says: the kernel
        tells an error of the disk once, and drops what it could not write.
        """
        with _told(self.path, "cannot be made durable"):
            os.fdatasync(self._open_fd())
            if not self._named:
                folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    os.fsync(folder)
                finally:
                    _close(folder)
                self._named = True

    def frames(self, from_offset: int = 0) -> Iterator[Frame]:
        """Yield the frames that reach beyond ``from_offset``, the first perhaps beginning before it.

        Streams: holds one frame at a time, and goes on with what is appended meanwhile. Raises
        DamagedError where the disk gives other bytes than were written, or does not give them back.
        """
        at = bisect.bisect_right(self._marks, from_offset, key=lambda mark: mark[0])
        place = self._marks[at - 1][1] if at else self._body
        while place < self.size:
            with _told(self.path, "does not read", reading=True):
                found = _read_record(self._open_fd(), place, self._seed)
            if found is None:
                raise DamagedError(f"the record at byte {place} changed after it was written", where=str(self.path))
            frame, size = found
            place += size
            if frame.end > from_offset:
                yield frame

    def park(self) -> None:
        """Give the descriptor back until it is needed again: a node may have thousands of spools."""
        self.close()

    def _open_fd(self) -> int:
        if self._fd < 0:
            with _told(self.path, "cannot be opened again"):
                self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        return self._fd

    def close(self) -> None:
        """Close; safe to call twice. The file stays."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            _close(fd)

    def delete(self) -> None:
        """Close, and remove the file; no error where it is gone. Raise UnavailableError where it cannot be removed."""
        self.close()
        with _told(self.path, "cannot be removed"):
            self.path.unlink(missing_ok=True)

    def _fits(self, frame: Frame) -> bool:
        if frame.length <= 0 or frame.offset < 0 or frame.end > MAX_OFFSET:
            return False
        return self.size == self._body or frame.offset == self.end

    def _took(self, offset: int, end: int, size: int) -> None:
        """Count a record of ``size`` bytes in."""
        if self.size == self._body:
            self.start = offset
        if not self._marks or self.size - self._marks[-1][1] >= _MARK_EVERY:
            self._marks.append((offset, self.size))
        self.end = end
        self.size += size

    def _recover(self) -> None:
        """Find the last whole record that continues the ones before, and cut what follows."""
        on_disk = os.fstat(self._fd).st_size
        while self.size < on_disk:
            found = _read_record(self._fd, self.size, self._seed)
            if found is None or not self._fits(found[0]):
                break
            frame, size = found
            self._took(frame.offset, frame.end, size)
        if on_disk > self.size:
            os.ftruncate(self._fd, self.size)


@contextmanager
def _told(path: Path, what: str, *, reading: bool = False) -> Iterator[None]:
    """Say what an OSError means for the spool file at ``path``."""
    try:
        yield
    except OSError as error:
        raise _meaning(error, path, what, reading=reading) from error


def _meaning(error: OSError, path: Path, what: str, *, reading: bool = False) -> UnavailableError | DamagedError:
    text = f"{what}: {os.strerror(error.errno or 0)}"
    if error.errno in _NO_SPACE:
        return SpoolFullError(text, where=str(path), hint="free space on this node, or lower [collector] spool_mib")
    if reading and error.errno in _NO_FILE:
        return DamagedError(f"not a spool file: {text}", where=str(path))
    if reading and error.errno in _BAD_DISK:
        return DamagedError(text, where=str(path), hint="look at this node's disk")
    return UnavailableError(text, where=str(path))


def _close(fd: int) -> None:
    with suppress(OSError):  # the fd is closed in any case, and only what `sync` said was promised
        os.close(fd)


def _write(fd: int, pieces: list[bytes], place: int, path: Path) -> int:
    """Write all pieces at ``place`` and return their length, or leave the file's end at ``place``."""
    whole = sum(map(len, pieces))
    try:
        done = os.pwritev(fd, pieces, place)
        if done < whole:  # a full disk takes part first, and gives the reason at the next call
            rest = b"".join(pieces)
            while done < whole:
                done += os.pwrite(fd, rest[done:], place + done)
    except OSError as error:
        with suppress(OSError):  # the next append writes at the same place in any case
            os.ftruncate(fd, place)
        what = f"no space for {whole} bytes" if error.errno in _NO_SPACE else "cannot be written"
        raise _meaning(error, path, what) from error
    return whole


def _seed_at(place: int, seed: int) -> int:
    return crc32(place.to_bytes(8, "little"), seed)


def _read_head(fd: int, path: Path) -> tuple[_Head, int, int]:
    """Return the head, where it ends, and its crc32."""
    prefix = os.pread(fd, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size:
        raise DamagedError("too short for a spool file: power was cut before its first sync", where=str(path))
    magic, length, crc = _PREFIX.unpack(prefix)
    if magic != MAGIC or length > _MAX_HEAD:
        raise DamagedError("not a spool file", where=str(path))
    packed = os.pread(fd, length, _PREFIX.size)
    if crc32(packed) != crc:
        raise DamagedError("the head of this spool file is damaged", where=str(path))
    try:
        return msgspec.json.decode(packed, type=_Head), _PREFIX.size + length, crc
    except msgspec.DecodeError as error:
        raise DamagedError(f"the head of this spool file does not decode: {error}", where=str(path)) from error


def _read_record(fd: int, place: int, seed: int) -> tuple[Frame, int] | None:
    """Return the frame at ``place`` and its record's size, None where no whole record stands there."""
    header = os.pread(fd, _RECORD.size, place)
    if len(header) < _RECORD.size:
        return None
    crc, data_size, gap_size, offset, length, wall_ns, mono_ns = _RECORD.unpack(header)
    if data_size > _MAX_DATA or gap_size > _MAX_GAP:
        return None
    body = os.pread(fd, data_size + gap_size, place + _RECORD.size)
    if len(body) < data_size + gap_size or crc32(body, crc32(header[_AFTER_CRC:], _seed_at(place, seed))) != crc:
        return None
    frame = Frame(offset, length, wall_ns, mono_ns, body[:data_size], body[data_size:].decode())
    return frame, _RECORD.size + len(body)
