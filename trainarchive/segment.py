"""Level-0 segments: many sources' frames in one object that ``zstd -dc`` can still print.

Layout (docs/format.md): the frames as the nodes made them, grouped by source and generation,
ordered by offset; then the index, zstd-compressed JSON, inside a zstd skippable frame; the last
``FOOTER_SIZE`` bytes, inside that skippable frame too, tell where the index begins.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import Annotated

import blake3
import msgspec
import zstandard

from trainarchive.errors import DamagedError, TrainarchiveError
from trainarchive.frame import MAX_OFFSET, Frame
from trainarchive.run import LaneReport, Source

MAGIC = b"TASEG001"
SKIPPABLE = 0x184D2A5A
"""One of zstd's sixteen skippable-frame magics: decoders pass over it."""

_HEADER = struct.Struct("<II")
_FOOTER = struct.Struct("<QI8s")
FOOTER_SIZE = _FOOTER.size
TAIL_GUESS = 64 * 1024
"""A reader's first ranged read from the end: holds footer and, nearly always, the index."""

MAX_INDEX = 256 * 1024 * 1024
"""Most bytes of an index, packed or not."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """One frame's place: in the text (source, generation, offset, length) and in the object (at, size)."""

    source: str
    generation: _Count
    offset: _Count
    length: _Count
    at: _Count
    size: _Count
    wall_ns: int
    mono_ns: int
    gap: str = ""

    @property
    def end(self) -> int:
        """Offset just after the last byte of text."""
        return self.offset + self.length


class Index(msgspec.Struct, frozen=True):
    """Table of contents of one segment, enough to rebuild a manifest from segments alone.

    ``lanes`` maps lane names to their latest report; ``sources`` to the description at sealing.
    """

    version: int
    lanes: dict[str, LaneReport]
    sources: dict[str, Source]
    frames: tuple[Placed, ...]


class Entry(msgspec.Struct, frozen=True):
    """A frame with the source and generation it belongs to."""

    source: str
    generation: int
    frame: Frame


def build(
    lanes: dict[str, LaneReport],
    sources: dict[str, Source],
    entries: Iterable[Entry],
) -> tuple[bytes, str]:
    """Return a segment's body and its BLAKE3 (hex). The same lanes, sources and frames give the same bytes."""
    placed: list[Placed] = []
    pieces: list[bytes] = []
    at = 0
    for entry in sorted(entries, key=_order):
        frame = entry.frame
        size = len(frame.data)
        placed.append(
            Placed(
                entry.source, entry.generation, frame.offset, frame.length,
                at, size, frame.wall_ns, frame.mono_ns, frame.gap,
            )
        )  # fmt: skip
        pieces.append(frame.data)
        at += size
    text = msgspec.json.encode(Index(1, lanes, sources, tuple(placed)), order="deterministic")
    if len(text) > MAX_INDEX:
        raise TrainarchiveError(f"an index of {len(text)} bytes: too many frames for one segment")
    packed = zstandard.ZstdCompressor(level=1, write_checksum=True, write_content_size=True).compress(text)
    pieces += (
        _HEADER.pack(SKIPPABLE, len(packed) + FOOTER_SIZE),
        packed,
        _FOOTER.pack(at, len(packed), MAGIC),
    )
    body = b"".join(pieces)
    return body, blake3.blake3(body).hexdigest()


def index_span(tail: bytes, where: str) -> tuple[int, int]:
    """From an object's last bytes tell ``(bytes needed from the end, length of the packed index)``."""
    _, packed = _footer(tail, where)
    return _HEADER.size + packed + FOOTER_SIZE, packed


def read_index(tail: bytes, where: str) -> Index:
    """Decode the index from ``tail``, an object's last bytes, at least as many as ``index_span`` tells.

    Raises DamagedError for anything but what ``build`` makes: the frames that the index names are
    all that stands before it, in its order.
    """
    start, packed = _footer(tail, where)
    needed = _HEADER.size + packed + FOOTER_SIZE
    if len(tail) < needed:
        raise DamagedError("its index is cut off", where=where)
    if _HEADER.unpack_from(tail, len(tail) - needed) != (SKIPPABLE, packed + FOOTER_SIZE):
        raise DamagedError("its index does not begin where its footer says", where=where)
    index = _unpacked(tail[len(tail) - packed - FOOTER_SIZE : len(tail) - FOOTER_SIZE], where)
    at = 0
    for placed in index.frames:
        if placed.at != at:
            raise DamagedError(f"a frame at {placed.at} where {at} is due", where=where)
        at += placed.size
    if at != start:
        raise DamagedError(f"frames of {at} bytes before an index at {start}", where=where)
    return index


def frame_at(placed: Placed, data: bytes) -> Frame:
    """Return the frame whose compressed bytes are ``data``."""
    return Frame(placed.offset, placed.length, placed.wall_ns, placed.mono_ns, data, placed.gap)


def frames_of(body: bytes, index: Index) -> Iterator[Entry]:
    """Yield all entries of a whole segment in memory; raise DamagedError where bytes are missing from it."""
    start, packed = _footer(body, "segment")
    whole = start + _HEADER.size + packed + FOOTER_SIZE
    if len(body) != whole:
        raise DamagedError(f"{len(body)} bytes of a segment of {whole}", where="segment")
    for placed in index.frames:
        yield Entry(placed.source, placed.generation, frame_at(placed, body[placed.at : placed.at + placed.size]))


def _order(entry: Entry) -> tuple[str, int, int, int, int, int, bytes, str]:
    """Sort by place in the text; the rest only settles which of two frames of one place comes first."""
    frame = entry.frame
    return (
        entry.source, entry.generation, frame.offset, frame.length,
        frame.wall_ns, frame.mono_ns, frame.data, frame.gap,
    )  # fmt: skip


def _footer(tail: bytes, where: str) -> tuple[int, int]:
    """Return ``(where the index's skippable frame begins, length of the packed index)``."""
    if len(tail) < FOOTER_SIZE:
        raise DamagedError("shorter than a segment's footer", where=where)
    start, packed, magic = _FOOTER.unpack_from(tail, len(tail) - FOOTER_SIZE)
    if magic != MAGIC:
        raise DamagedError("not a segment: its footer is not there", where=where)
    if packed > MAX_INDEX:
        raise DamagedError(f"its index claims {packed} bytes", where=where)
    return start, packed


def _unpacked(packed: bytes, where: str) -> Index:
    try:
        # The header is looked at first: decompress() allocates whatever size it claims.
        claimed = zstandard.get_frame_parameters(packed)
        if claimed.content_size > MAX_INDEX or not claimed.has_checksum:
            raise DamagedError(f"its index claims {claimed.content_size} bytes", where=where)
        text = zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
        index = msgspec.json.decode(text, type=Index)
    except (zstandard.ZstdError, msgspec.DecodeError, RecursionError, MemoryError) as error:
        raise DamagedError(f"its index does not decode: {error}", where=where) from error
    if index.version != 1:
        raise DamagedError(f"format version {index.version}", where=where, hint="update trainarchive")
    return index
