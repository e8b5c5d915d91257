"""Frames as stream entries: what ``append.lua`` writes, read back."""

from collections.abc import Sequence
from typing import Any

from trainarchive.frame import Frame, check_offsets
from trainarchive.stream.words import StreamEntry


def frame_arguments(frames: Sequence[Frame]) -> list[str | bytes | int]:
    """Return the six values a frame that ``append.lua`` takes; TrainarchiveError for an offset that is too high."""
    arguments: list[str | bytes | int] = []
    for frame in frames:
        check_offsets(frame.offset, frame.end)
        arguments += (frame.offset, frame.length, frame.wall_ns, frame.mono_ns, frame.gap, frame.data)
    return arguments


def read_entries(answer: Sequence[Any]) -> list[StreamEntry]:
    """Read what XRANGE or one stream of XREAD answered, less the entries that are no frames.

    A node can write those into its own stream; what it wrote before and after them is as good as ever.
    """
    return [entry for stream_id, fields in answer if (entry := _read_entry(stream_id, fields)) is not None]


def _read_entry(stream_id: bytes, fields: dict[bytes, bytes]) -> StreamEntry | None:
    try:
        frame = Frame(
            int(fields[b"o"]), int(fields[b"l"]), int(fields[b"w"]), int(fields[b"m"]),
            fields[b"d"], fields.get(b"x", b"").decode(),
        )  # fmt: skip
        return StreamEntry(stream_id.decode(), fields[b"s"].decode(), int(fields[b"g"]), frame)
    except (KeyError, ValueError):
        return None
