"""Level-0 segments: many sources' frames in one object that ``zstd -dc`` can still print.

Layout (docs/format.md): the frames as the nodes made them, grouped by source and generation,
ordered by offset; then the index, zstd-compressed JSON, inside a zstd skippable frame; the last
``FOOTER_SIZE`` bytes, inside that skippable frame too, tell where the index begins.
"""

import struct
from collections.abc import Iterable, Iterator

import blake3
import msgspec
import zstandard

from trainarchive.errors import DamagedError
from trainarchive.frame import Frame
from trainarchive.run import Lane, LaneReport, Source

MAGIC = b"TASEG001"
SKIPPABLE = 0x184D2A5A
"""One of zstd's sixteen skippable-frame magics: decoders pass over it."""

_HEADER = struct.Struct("<II")
_FOOTER = struct.Struct("<QI8s")
FOOTER_SIZE = _FOOTER.size
TAIL_GUESS = 64 * 1024
"""A reader's first ranged read from the end: holds footer and, nearly always, the index."""

MAX_INDEX = 256 * 1024 * 1024


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """One frame's place: in the text (source, generation, offset, length) and in the object (at, size)."""

    source: str
    generation: int
    offset: int
    length: int
    at: int
    size: int
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
    """Return a segment's body and its BLAKE3 (hex). The same input gives the same bytes."""
    ordered = sorted(entries, key=lambda entry: (entry.source, entry.generation, entry.frame.offset))
    placed: list[Placed] = []
    body = bytearray()
    for entry in ordered:
        frame = entry.frame
        placed.append(
            Placed(
                entry.source, entry.generation, frame.offset, frame.length,
                len(body), len(frame.data), frame.wall_ns, frame.mono_ns, frame.gap,
            )
        )  # fmt: skip
        body += frame.data
    index = Index(1, lanes, sources, tuple(placed))
    packed = zstandard.ZstdCompressor(level=9, write_checksum=True, write_content_size=True).compress(
        msgspec.json.encode(index, order="deterministic")
    )
    start = len(body)
    body += _HEADER.pack(SKIPPABLE, len(packed) + FOOTER_SIZE)
    body += packed
    body += _FOOTER.pack(start, len(packed), MAGIC)
    return bytes(body), blake3.blake3(body).hexdigest()


def index_span(tail: bytes, where: str) -> tuple[int, int]:
    """From an object's last bytes tell ``(bytes needed from the end, length of the packed index)``."""
    if len(tail) < FOOTER_SIZE:
        raise DamagedError("shorter than a segment's footer", where=where)
    _, packed, magic = _FOOTER.unpack(tail[-FOOTER_SIZE:])
    if magic != MAGIC:
        raise DamagedError("not a segment: its footer is not there", where=where)
    if packed > MAX_INDEX:
        raise DamagedError(f"its index claims {packed} bytes", where=where)
    return packed + FOOTER_SIZE, packed


def read_index(tail: bytes, where: str) -> Index:
    """Decode the index from ``tail``, an object's last bytes, at least as many as ``index_span`` tells."""
    needed, packed = index_span(tail, where)
    if len(tail) < needed:
        raise DamagedError("its index is cut off", where=where)
    try:
        # The packed length is bounded above; the text's length stands in the frame and is bounded here.
        text = zstandard.ZstdDecompressor().decompress(tail[-needed : len(tail) - FOOTER_SIZE])
        index = msgspec.json.decode(text, type=Index)
    except (zstandard.ZstdError, msgspec.DecodeError, MemoryError) as error:
        raise DamagedError(f"its index does not decode: {error}", where=where) from error
    if index.version != 1:
        raise DamagedError(f"format version {index.version}", where=where, hint="update trainarchive")
    return index


def frame_at(placed: Placed, data: bytes) -> Frame:
    """Return the frame whose compressed bytes are ``data``."""
    return Frame(placed.offset, placed.length, placed.wall_ns, placed.mono_ns, data, placed.gap)


def frames_of(body: bytes, index: Index) -> Iterator[Entry]:
    """Yield all entries of a whole segment in memory."""
    for placed in index.frames:
        yield Entry(placed.source, placed.generation, frame_at(placed, body[placed.at : placed.at + placed.size]))
