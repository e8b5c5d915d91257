"""The door: bounded streams of frames in the log Redis, one a lane. No other module knows its keys.

Keys of a lane, all in one Cluster slot, all within what one node's ACL allows
(``ta:{*}:<node>:*``)::

    ta:{<cluster>/<job>.<attempt>/<token>}:<node>:meta     hash: epoch, state, pending, report, times
    ta:{...}:<node>:frames                                 stream: one entry a frame
    ta:{...}:<node>:offsets                                hash: "<source>:<generation>" -> committed,
                                                           "<source>:<generation>:s" -> sealed
    ta:{...}:<node>:sources                                hash: source id -> description (JSON)
    ta:{...}:<node>:claim                                  hash: a worker's claim on the stream's head
    ta:{...}:<node>:ctl                                    hash: what workers tell the collector

The node's side (``open describe append report status``) and the workers' side (``lanes claim
take commit control forget``) are Lua scripts, each one atomic step, for Redis 6.2 and later.

Promises:

- ``append`` is a compare-and-set on the committed offset of (source, generation): the same bytes
  sent any number of times, in any order of resends, are kept once.
- The **epoch** is made when a lane's state is missing; another epoch in an answer tells the
  collector that Redis lost its memory. It then sends again from what is sealed.
- The sealed offset moves only in ``commit``, after the object is in the store. An empty stream
  means that all that is committed is sealed.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec

from trainarchive.frame import Frame
from trainarchive.run import Lane, LaneReport, Source


class Outcome(StrEnum):
    """What became of one ``append``."""

    OK = "ok"
    GAP = "gap"
    FULL = "full"
    MISSING = "missing"


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
    beyond ``committed``; cut the next frame there. FULL: ask later, nothing was added. MISSING:
    Redis does not know the lane; ``open`` it.
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

    ``sealed`` maps (source, generation) to the sealed offset; ``committed`` alike.
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


class Claim(msgspec.Struct, frozen=True):
    """One worker's exclusive right, for a while, to seal entries ``first`` to ``last`` of a lane."""

    lane: Lane
    epoch: str
    token: str
    first: str
    last: str


class StreamEntry(msgspec.Struct, frozen=True):
    """One frame in the stream, under its stream id."""

    id: str
    source: str
    generation: int
    frame: Frame


class Stream:
    """A connection to the log Redis.

    Every method raises ``UnavailableError`` where Redis does not answer, is loading, or refuses;
    every call may then be made again. Safe to use from several threads.
    """

    def __init__(self, url: str, *, timeout_s: float, max_pending: int) -> None:
        """``max_pending`` bytes of frames may wait in one lane; then ``append`` answers FULL."""
        raise NotImplementedError

    def now(self) -> tuple[float, float]:
        """Return Redis' clock (Unix s) and the round trip that reading it took (s)."""
        raise NotImplementedError

    def memory_ratio(self) -> float:
        """Return used memory over ``maxmemory``, 0.0 where there is no limit. The node stops in time."""
        raise NotImplementedError

    # -- the node's side -------------------------------------------------------------------

    def open(self, lane: Lane, report: LaneReport, sources: Sequence[Source]) -> LaneStatus:
        """Make the lane known, or come back to it: state is OPEN again unless ``report.drained``; offsets stay."""
        raise NotImplementedError

    def describe(self, lane: Lane, sources: Sequence[Source]) -> None:
        """Add or replace descriptions of sources. Before their first ``append``."""
        raise NotImplementedError

    def append(self, batch: Sequence[Append]) -> list[Answer]:
        """Send a batch in one round trip; one answer for each, in order."""
        raise NotImplementedError

    def report(self, lane: Lane, report: LaneReport) -> None:
        """Replace the lane's report; with ``drained`` the lane becomes DRAINED. No-op on a missing lane."""
        raise NotImplementedError

    def status(self, lane: Lane) -> LaneStatus | None:
        """Return the lane's state, None where Redis does not know it."""
        raise NotImplementedError

    # -- the workers' side -----------------------------------------------------------------

    def lanes(self) -> Iterator[Lane]:
        """Yield every lane that Redis knows, by SCAN: one may come twice or, if it is just made, not yet."""
        raise NotImplementedError

    def about(self, lane: Lane) -> tuple[LaneReport, dict[str, Source]] | None:
        """Return the latest report and all descriptions."""
        raise NotImplementedError

    def claim(self, lane: Lane, *, max_bytes: int, lease_s: float) -> Claim | None:
        """Claim entries from the head, about ``max_bytes`` of frames, at least one.

        None where the stream is empty or another's claim is not yet over. A claim that ran out
        is taken over; what its owner then commits is refused.
        """
        raise NotImplementedError

    def take(self, claim: Claim) -> list[StreamEntry]:
        """Read the claimed entries."""
        raise NotImplementedError

    def commit(self, claim: Claim, ends: dict[tuple[str, int], int]) -> bool:
        """After the segment is stored: drop the entries, move sealed offsets to ``ends``, end the claim.

        A compare-and-set: False, and nothing done, where the claim is no longer this one's.
        """
        raise NotImplementedError

    def control(self, lane: Lane, values: dict[str, str]) -> None:
        """Tell the collector something: it reads these in ``status().control``."""
        raise NotImplementedError

    def archived(self, lane: Lane, epoch: str, ttl_s: int) -> bool:
        """After the manifest: drop stream and descriptions, keep the ARCHIVED mark and offsets for ``ttl_s``.

        False, and nothing done, unless the lane is DRAINED, in that epoch, and its stream empty.
        """
        raise NotImplementedError

    def lock(self, name: str, token: str, seconds: float) -> bool:
        """Take or renew a lock that ends by itself; True while ``token`` holds it."""
        raise NotImplementedError

    def unlock(self, name: str, token: str) -> None:
        """Give the lock back if ``token`` still holds it."""
        raise NotImplementedError

    # -- the reader's side -----------------------------------------------------------------

    def snapshot(self, lane: Lane) -> list[StreamEntry]:
        """Return all entries that wait in the lane now, in stream order."""
        raise NotImplementedError

    def follow(self, lane: Lane, after: str, *, block_s: float) -> list[StreamEntry]:
        """Return entries after stream id ``after`` (``"0"``: from the head), waiting up to ``block_s`` for one."""
        raise NotImplementedError
