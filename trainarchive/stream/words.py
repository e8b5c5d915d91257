"""The door's words: what is sent, what is answered, and what a lane looks like. All frozen."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from trainarchive.frame import Frame
from trainarchive.run import Lane


class Outcome(StrEnum):
    """What became of one ``append``."""

    OK = "ok"
    GAP = "gap"
    FULL = "full"
    MISSING = "missing"
    BROKEN = "broken"


class Append(msgspec.Struct, frozen=True):
    """Frames of one source's generation, contiguous, in order. ``floor``: the collector's own sealed offset.

    What lies below ``floor`` is in the store: a Redis that knows less (restored from older
    state, or empty) moves its committed and sealed offsets up to it.
    """

    lane: Lane
    source: str
    generation: int
    frames: Sequence[Frame]
    floor: int = 0


class Answer(msgspec.Struct, frozen=True):
    """``committed``: where the next frame must start. ``sealed``: below it all is in the store.

    OK: everything offered is in the stream (or was before). GAP: nothing at all was added
    beyond ``committed``; cut the next frame there. FULL: ask later; what was offered below
    ``committed`` is in (of many frames a part may be). MISSING: Redis does not know the lane, or
    lost its stream; ``open`` it. BROKEN: the lane's state in Redis cannot be used (somebody else
    wrote into its keys); nothing else is known, offsets and epoch are empty, other lanes go on.
    """

    outcome: Outcome
    epoch: str
    committed: int
    sealed: int


class State(StrEnum):
    """Of a lane: ARCHIVED means a manifest covers it and the node may forget it."""

    OPEN = "open"
    DRAINED = "drained"
    ARCHIVED = "archived"


class LaneStatus(msgspec.Struct, frozen=True):
    """A lane as Redis knows it. Times: Unix seconds of the Redis clock. ``pending``: bytes in the stream.

    ``sealed`` maps (source, generation) to the sealed offset; ``committed`` alike. An entry
    counts for its data and a small fixed overhead. ``waiting``: since when the oldest entry
    waits; it means nothing where there is none.
    """

    lane: Lane
    epoch: str
    state: State
    pending: int
    entries: int
    opened: float
    last_append: float
    last_commit: float
    committed: dict[tuple[str, int], int]
    sealed: dict[tuple[str, int], int]
    control: dict[str, str]
    waiting: float = 0.0


class Claim(msgspec.Struct, frozen=True):
    """One worker's exclusive right, for a while, to seal a lane's ``entries`` entries from ``first`` to ``last``."""

    lane: Lane
    epoch: str
    token: str
    first: str
    last: str
    entries: int = 0


class StreamEntry(msgspec.Struct, frozen=True):
    """One frame in the stream, under its stream id."""

    id: str
    source: str
    generation: int
    frame: Frame
