"""Frames as stream entries: what ``append.lua`` writes, read back."""

from collections.abc import Sequence
from typing import Any

from trainarchive.errors import DamagedError
from trainarchive.frame import MAX_OFFSET, Frame
from trainarchive.stream.words import StreamEntry


def frame_arguments(frames: Sequence[Frame]) -> list[str | bytes | int]:
    """Return the six values a frame that ``append.lua`` takes; raise ValueError for an offset that is too high."""
    arguments: list[str | bytes | int] = []
    for frame in frames:
        if not 0 <= frame.offset <= frame.end <= MAX_OFFSET:
            raise ValueError(f"a frame of bytes {frame.offset} to {frame.end}: offsets are 0 to {MAX_OFFSET}")
        arguments += (frame.offset, frame.length, frame.wall_ns, frame.mono_ns, frame.gap, frame.data)
    return arguments


def read_entries(answer: Sequence[Any], where: str) -> list[StreamEntry]:
    """Read what XRANGE or one stream of XREAD answered; raise DamagedError for an entry that is none of ours."""
    return [_read_entry(stream_id, fields, where) for stream_id, fields in answer]


def _read_entry(stream_id: bytes, fields: dict[bytes, bytes], where: str) -> StreamEntry:
    try:
        frame = Frame(
            int(fields[b"o"]), int(fields[b"l"]), int(fields[b"w"]), int(fields[b"m"]),
            fields[b"d"], fields.get(b"x", b"").decode(),
        )  # fmt: skip
        return StreamEntry(stream_id.decode(), fields[b"s"].decode(), int(fields[b"g"]), frame)
    except (KeyError, ValueError) as error:
        raise DamagedError(f"entry {stream_id!r} of its stream is no frame: {error!r}", where=where) from error
