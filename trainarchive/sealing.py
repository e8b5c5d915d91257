"""Sealing: from a lane's stream in the log Redis to a level-0 segment in the store.

Safe to run twice, by two workers, and to be killed between any two steps: a segment's key says
what it holds, readers drop overlaps, and only ``commit`` (a compare-and-set on the claim) moves
the sealed offset and frees the stream. What a node sent is not believed: a frame that does not
decode becomes a gap with its reason, so one bad node cannot poison a run's archive.
"""

import logging
from collections.abc import Callable, Iterable

import msgspec

from trainarchive import keys, segment, settings
from trainarchive.errors import DamagedError
from trainarchive.frame import MAX_OFFSET, Frame, gap_frame
from trainarchive.run import Lane, LaneReport, Source, is_source_of
from trainarchive.segment import Entry
from trainarchive.store.contract import Store
from trainarchive.stream import LaneStatus, State, Stream, StreamEntry

MIB = 1024 * 1024
DAMAGED_ON_THE_WAY = "damaged on the way"
DROPPED = "entries of its stream were no frames of its own files, and were dropped"
MAX_GENERATION = 2**31 - 1
MAX_REASON = 500
MAX_SEGMENTS = 32
BUSY_SHARE = 8
"""A lane with a segment's eighth waiting is busy: it is sealed after ``min_age_s``."""

_MAX_NS = 2**63 - 1
_log = logging.getLogger(__name__)

Hook = Callable[[str], None]
"""Called after each step with its name: for tests that stop there, and for workers that renew a lock."""


def no_hook(step: str) -> None:
    """Do nothing."""


class Sealed(msgspec.Struct, frozen=True):
    """One seal: the object's key, its size in bytes, how many entries were taken.

    ``frames`` of them are in the object; ``bad`` were damaged: they are gaps there, or were dropped.
    """

    lane: Lane
    key: str
    size: int
    taken: int
    frames: int
    bad: int


def ready(status: LaneStatus, now: float, limits: settings.Seal, *, pressed: bool = False) -> bool:
    """Say whether a lane should be sealed now (``now``: Unix s, Redis' clock).

    Yes when a segment is full, the node is done, or Redis is short of memory (``pressed``);
    else by age: ``min_age_s`` where much waits, up to ``max_age_s`` where little does, so that
    quiet runs do not end as thousands of tiny objects.
    """
    if status.entries == 0:
        return False
    full = limits.segment_mib * MIB
    if pressed or status.state is not State.OPEN or status.pending >= full:
        return True
    quiet = 1.0 - min(1.0, BUSY_SHARE * status.pending / full)
    wait = limits.min_age_s + quiet * max(0.0, limits.max_age_s - limits.min_age_s)
    return now - status.waiting >= wait


def seal(stream: Stream, store: Store, lane: Lane, limits: settings.Seal, *, at: Hook = no_hook) -> Sealed | None:
    """Seal up to one segment from the lane's head.

    None where nothing waits, another worker has the claim, or this one lost it on the way:
    then its object, if it was stored, holds nothing that another will not.
    """
    claim = stream.claim(lane, max_bytes=limits.segment_mib * MIB, lease_s=limits.lease_s)
    if claim is None:
        return None
    at("claimed")
    taken = stream.take(claim)
    about = stream.about(lane)
    if about is None:
        return None
    at("taken")
    entries, dropped = checked(taken, lane.node)
    dropped += max(0, claim.entries - len(taken))
    bad = dropped + sum(entry.frame.gap == DAMAGED_ON_THE_WAY for entry in entries)
    if bad:
        _log.error("%s: %d of %d frames were damaged on the way", lane.name, bad, claim.entries)
    report, described = about
    body, digest = segment.build({lane.name: _noted(report, dropped)}, _sources(lane, entries, described), entries)
    key = keys.segment_key(lane, claim.epoch, claim.first, claim.last, digest)
    at("built")
    if not store.put_if_absent(key, body):
        raise DamagedError("the store holds other bytes under this key, which has their digest", where=key)
    at("stored")
    if not stream.commit(claim, _ends(entries)):
        return None
    at("committed")
    return Sealed(lane, key, len(body), claim.entries, len(entries), bad)


def drain(stream: Stream, store: Store, lane: Lane, limits: settings.Seal, *, at: Hook = no_hook) -> int:
    """Seal what waits now, not what comes meanwhile, unless another worker is at it; return the number of segments."""
    status = stream.status(lane)
    left = status.entries if status is not None else 0
    count = 0
    while left > 0 and (sealed := seal(stream, store, lane, limits, at=at)) is not None:
        count += 1
        left -= max(1, sealed.taken)
    return count


def catch_up(stream: Stream, store: Store, lane: Lane, limits: settings.Seal, *, at: Hook = no_hook) -> int:
    """Seal once, then as long as the lane is ready again; return the number of segments.

    Bounded by ``MAX_SEGMENTS``: a lane that never ends does not keep a worker from the others.
    """
    count = 0
    while count < MAX_SEGMENTS and seal(stream, store, lane, limits, at=at) is not None:
        count += 1
        status = stream.status(lane)
        if status is None or not ready(status, stream.now()[0], limits):
            break
    return count


def checked(taken: Iterable[StreamEntry], node: str) -> tuple[list[Entry], int]:
    """Return the entries of the node's lane that may be archived, and how many were dropped.

    A frame that does not decode becomes a gap of the bytes that it claimed; one whose source is
    not the node's own, or whose generation or place cannot be, is dropped: not even a gap could be placed.
    """
    kept: list[Entry] = []
    dropped = 0
    for entry in taken:
        if is_own(node, (entry.source, entry.generation)) and 0 <= entry.frame.offset < entry.frame.end <= MAX_OFFSET:
            kept.append(Entry(entry.source, entry.generation, _believable(entry.frame)))
        else:
            dropped += 1
    return kept, dropped


def is_own(node: str, name: tuple[str, int]) -> bool:
    """Say whether a node may send text of that source and generation."""
    return is_source_of(node, name[0]) and 0 <= name[1] <= MAX_GENERATION


def _believable(frame: Frame) -> Frame:
    wall, mono = _nanoseconds(frame.wall_ns), _nanoseconds(frame.mono_ns)
    if frame.gap:
        reason = frame.gap[:MAX_REASON].encode(errors="backslashreplace").decode()
        return gap_frame(frame.offset, frame.end, wall, mono, reason)
    try:
        frame.text()
    except DamagedError:
        return gap_frame(frame.offset, frame.end, wall, mono, DAMAGED_ON_THE_WAY)
    if (wall, mono) == (frame.wall_ns, frame.mono_ns):
        return frame
    return Frame(frame.offset, frame.length, wall, mono, frame.data)


def _nanoseconds(value: int) -> int:
    return min(max(value, 0), _MAX_NS)


def _sources(lane: Lane, entries: Iterable[Entry], described: dict[str, Source]) -> dict[str, Source]:
    """Return the descriptions that these entries need, as this lane's node may give them: of its own files."""
    wanted = {entry.source for entry in entries}
    return {
        name: msgspec.structs.replace(source, id=name, node=lane.node)
        for name, source in described.items()
        if name in wanted
    }


def _noted(report: LaneReport, dropped: int) -> LaneReport:
    if not dropped:
        return report
    return msgspec.structs.replace(report, notes=(*report.notes, f"{dropped} {DROPPED}"))


def _ends(entries: Iterable[Entry]) -> dict[tuple[str, int], int]:
    ends: dict[tuple[str, int], int] = {}
    for entry in entries:
        name = (entry.source, entry.generation)
        ends[name] = max(ends.get(name, 0), entry.frame.end)
    return ends
