"""What a collector keeps on disk of each lane, so that another life of it goes on where this one was.

One directory a lane, ``state.json`` in it, beside the spools. Only sealed offsets are kept:
whatever is above them is asked of Redis, or read again.
"""

import os
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

import msgspec

from trainarchive.errors import DamagedError, TrainarchiveError, UnavailableError
from trainarchive.run import Lane, LaneReport, Source
from trainarchive.tail import Saved

FILE = "state.json"
BEFORE = "state.json.1"
"""The state before the last: a power cut can leave the last one torn, since not every save waits for the disk."""


class Phase(StrEnum):
    """Of a lane on its node: files are followed; are being let go; all their bytes are sent."""

    FOLLOWING = "following"
    CLOSING = "closing"
    DRAINED = "drained"


class SavedFlow(msgspec.Struct, frozen=True):
    """One generation: below ``sealed`` it is in the store; ``ended``: nothing more is read for it."""

    generation: int
    sealed: int
    position: int
    ended: bool


class SavedSource(msgspec.Struct, frozen=True):
    """One source. ``let_go``: its file is closed and what was not sealed then is in the spool."""

    source: Source
    tail: Saved | None
    let_go: bool
    flows: tuple[SavedFlow, ...]


class SavedLane(msgspec.Struct, frozen=True):
    """One lane; ``notices`` are the names of the notice files that belong to it."""

    version: int
    lane: str
    report: LaneReport
    phase: Phase
    notices: tuple[str, ...]
    sources: tuple[SavedSource, ...]


def save(directory: Path, saved: SavedLane, *, durable: bool) -> None:
    """Replace the state file in one step. ``durable`` also survives a power cut.

    Raise UnavailableError where the disk takes nothing; the file is then as it was.
    """
    temporary = directory / (FILE + ".new")
    try:
        with temporary.open("wb") as file:
            file.write(msgspec.json.encode(saved))
            if durable:
                file.flush()
                os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            (directory / FILE).replace(directory / BEFORE)
        temporary.replace(directory / FILE)
    except OSError as error:
        hint = "free space on this node: after a restart more would be sent again"
        raise UnavailableError(f"state not saved: {error.strerror}", where=str(directory), hint=hint) from error


def load(directory: Path) -> SavedLane | None:
    """Return what was saved, None where nothing was; raise DamagedError where no state can be read."""
    trouble: DamagedError | None = None
    for name in (FILE, BEFORE):
        path = directory / name
        try:
            return _read(path)
        except FileNotFoundError:
            continue
        except (msgspec.DecodeError, TrainarchiveError, RecursionError, OSError) as error:
            hint = "the lane's files are read again from their beginning"
            trouble = trouble or DamagedError(str(error), where=str(path), hint=hint)
    if trouble is not None:
        raise trouble
    return None


def _read(path: Path) -> SavedLane:
    """Decode one state file; O_NONBLOCK, since a FIFO in its place must not hold the collector up."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:  # noqa: PTH123 - a descriptor, not a path
        saved = msgspec.json.decode(file.read(), type=SavedLane)
    Lane.parse(saved.lane)
    return saved
