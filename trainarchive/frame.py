"""A frame: one piece of one source, compressed on the node, and carried unchanged to the shelf."""

import threading

import msgspec
import zstandard

from trainarchive.errors import DamagedError, TrainarchiveError

MAX_RAW = 256 * 1024
"""Most bytes of text in one frame."""

MAX_OFFSET = 2**53 - 1
"""Offsets must stay exact as Lua numbers."""


class Frame(msgspec.Struct, frozen=True):
    """Bytes ``offset`` to ``offset + length`` of one source's generation.

    ``data`` is one whole zstd frame with content size and checksum; it is empty when ``gap``
    gives a reason: then these bytes will never come. ``wall_ns`` and ``mono_ns`` are when the
    node read them (CLOCK_REALTIME and CLOCK_MONOTONIC, ns).
    """

    offset: int
    length: int
    wall_ns: int
    mono_ns: int
    data: bytes
    gap: str = ""

    @property
    def end(self) -> int:
        """Offset just after the last byte."""
        return self.offset + self.length

    def text(self) -> bytes:
        """Return the ``length`` raw bytes; raise DamagedError where they are not what was framed."""
        if self.gap:
            raise DamagedError(f"bytes {self.offset}-{self.end} are a gap: {self.gap}")
        try:
            # The header is looked at first: decompress() allocates whatever size it claims.
            claimed = zstandard.get_frame_parameters(self.data)
            if claimed.content_size != self.length or not 0 < self.length <= MAX_RAW:
                raise DamagedError(
                    f"frame at offset {self.offset} claims {claimed.content_size} bytes, not {self.length}"
                )
            if not claimed.has_checksum:
                raise DamagedError(f"frame at offset {self.offset} has no checksum")
            raw: bytes = _decompressor().decompress(self.data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise DamagedError(f"frame at offset {self.offset} does not decompress: {error}") from error
        return raw


class Framer:
    """Makes frames; one a thread, since zstandard's compressors are not to be shared."""

    def __init__(self, level: int = 1) -> None:
        """``level`` is zstd's; 1 is what a busy node can afford (archive-facts: 1.6 GB/s)."""
        self._compressor = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)

    def frame(self, offset: int, raw: bytes | bytearray | memoryview, wall_ns: int, mono_ns: int) -> Frame:
        """Compress ``raw`` (1 to MAX_RAW bytes) that stands at ``offset``; see ``check_offsets``."""
        if not 0 < len(raw) <= MAX_RAW:
            raise ValueError(f"a frame holds 1 to {MAX_RAW} bytes, not {len(raw)}")
        check_offsets(offset, offset + len(raw))
        return Frame(offset, len(raw), wall_ns, mono_ns, self._compressor.compress(raw))


def gap_frame(start: int, end: int, wall_ns: int, mono_ns: int, reason: str) -> Frame:
    """Return the frame that says bytes ``start`` to ``end`` are lost, and why; see ``check_offsets``."""
    check_offsets(start, end)
    return Frame(start, end - start, wall_ns, mono_ns, b"", reason)


def check_offsets(start: int, end: int) -> None:
    """Raise TrainarchiveError unless ``start`` and ``end`` are a frame's: in order, from 0 to MAX_OFFSET."""
    if not 0 <= start <= end <= MAX_OFFSET:
        raise TrainarchiveError(f"a frame of bytes {start} to {end}: offsets are 0 to {MAX_OFFSET}")


_of_this_thread = threading.local()


def _decompressor() -> zstandard.ZstdDecompressor:
    found: zstandard.ZstdDecompressor | None = getattr(_of_this_thread, "decompressor", None)
    if found is None:
        found = _of_this_thread.decompressor = zstandard.ZstdDecompressor()
    return found
