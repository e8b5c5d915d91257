"""One run as a reader sees it: archived, running, or both."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from trainarchive.coverage import Name, Text
from trainarchive.errors import DamagedError, NotFoundError
from trainarchive.frame import Frame
from trainarchive.manifest import Manifest, newest
from trainarchive.reading.ledger import Ledger
from trainarchive.reading.live import Door, LiveLane, segments_of
from trainarchive.reading.objects import Objects
from trainarchive.reading.pieces import Copies, VanishedError
from trainarchive.run import Gap, Lane, RunKey
from trainarchive.stream import State

DAMAGED = "DAMAGED"
"""The state of a run whose manifest cannot be read."""


class _LaneFrames(msgspec.Struct, frozen=True):
    """A lane's frames that waited in Redis, and its segments that no manifest lists, seen in this order."""

    waiting: dict[Name, list[Frame]]
    segments: tuple[str, ...]


class RunView:
    """A run's table of contents and its bytes.

    ``manifest`` is the newest, None before the first. ``running`` says whether more may come;
    ``notes`` what a person should know of this view. ``damaged`` tells the objects that cannot be
    read: nobody knows what was in them. ``nodes`` and ``sources`` are the manifest's, with what
    came after it.
    """

    def __init__(  # noqa: PLR0913 (all that a run is made of; only select.py calls it)
        self,
        objects: Objects,
        door: Door,
        key: RunKey,
        manifest: Manifest | None,
        *,
        lanes: Sequence[LiveLane] = (),
        level0: Mapping[Lane, Sequence[str]] | None = None,
        damaged: str = "",
    ) -> None:
        """``lanes`` were looked at before ``level0`` was listed, so that nothing sealed between is missed.

        ``damaged``: why there is no ``manifest`` though the store has one.
        """
        self.key = key
        self.manifest = manifest
        writing = any(lane.state is State.OPEN and not lane.given_up for lane in lanes)
        self.running = writing or (manifest is None and not damaged)
        self._objects = objects
        self._door = door
        self._newest = manifest
        self._parts = _parts_of(manifest)
        fresh = _unlisted(level0 or {}, manifest)
        waiting = [found for found in lanes if found.has_news]
        self._lanes = sorted({found.lane for found in waiting} | set(fresh))
        self._recent: OrderedDict[Lane, _LaneFrames] = OrderedDict()
        self._unreadable = bool(damaged)
        ledger = Ledger(manifest)
        ledger.add_segments(fresh, self._objects)
        for found in waiting:
            ledger.add_lane(found)
        self.damaged = (*([damaged] if damaged else ()), *ledger.damaged)
        self.sources = ledger.sources()
        self.nodes = ledger.nodes()
        self._generations = {
            (entry.source.id, made.number): made for entry in self.sources for made in entry.generations
        }
        self._node_of = {entry.source.id: entry.source.node for entry in self.sources}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know: that Redis did not answer matters only where bytes may be in it."""
        closed = self.manifest is not None and self.manifest.complete and not self.running
        return (*self.damaged, *(() if closed else self._door.notes))

    @property
    def unanswered(self) -> str:
        """Why it is not known what the newest bytes are; empty where that is known."""
        return self._door.unanswered if self.manifest is None else ""

    @property
    def state(self) -> str:
        """Slurm's word where the manifest has it; before that RUNNING, or ENDING once every node is drained."""
        if self.manifest is not None:
            return self.manifest.state
        if self._unreadable:
            return DAMAGED
        ended = self.nodes and all(node.state == "drained" for node in self.nodes)
        return "ENDING" if ended else "RUNNING"

    def table(self) -> Manifest:
        """Return all of this as a manifest; one that was never written has number 0."""
        if self.manifest is not None:
            return msgspec.structs.replace(self.manifest, nodes=self.nodes, sources=self.sources)
        jobs = [node.report.job for node in self.nodes if node.report is not None]
        return Manifest(
            number=0,
            run=self.key,
            written=0.0,
            complete=False,
            state=self.state,
            state_from="lanes",
            started=min((job.started for job in jobs if job.started), default=0.0),
            nodes=self.nodes,
            sources=self.sources,
            parts=(),
        )

    def chunks(self, source: str, generation: int) -> Iterator[bytes | Gap]:
        """Yield the text in order, every byte once, and a Gap for each stretch that is not there.

        Of an archived generation exactly what its manifest lists; of a live one all that is there
        when its lane is looked at. A gap whose reason begins with ``pieces.DAMAGED`` is the
        archive's own fault. Raises NotFoundError for a source or generation that the run does not
        have. Holds a few MiB, some fifty bytes a frame of this text, and of a live run what waits in
        one node's lane.
        """
        known = self._generations.get((source, generation))
        if known is None:
            raise NotFoundError(f"no generation {generation} of source {source!r}", where=str(self.key))
        end = known.size if known.blake3 else None
        position, lost = 0, frozenset[str]()
        while True:
            try:
                for item in self._copies((source, generation), lost).read(position, end):
                    position = item.end if isinstance(item, Gap) else position + len(item)
                    yield item
            except VanishedError as vanished:
                if not self._look_again():
                    lost |= {vanished.key}
            else:
                return

    def _copies(self, name: Name, lost: frozenset[str]) -> Copies:
        """Return all that is known of where the text is; raise VanishedError for an object that is gone."""
        copies = Copies(Text(name), self._objects)
        listed = [*self._parts.get(name, ())]
        waiting: list[Frame] = []
        for lane in self._lanes:
            if lane.node == self._node_of[name[0]]:
                found = self._lane(lane)
                waiting += found.waiting.get(name, ())
                listed += found.segments
        for key, contents in self._objects.each(key for key in listed if key not in lost):
            if isinstance(contents, NotFoundError):
                raise VanishedError(key)
            if isinstance(contents, DamagedError):
                copies.hole = f"perhaps it was in {key}, which cannot be read"
            else:
                copies.add_object(key, contents)
        for key in lost:
            copies.hole = f"perhaps it was in {key}, which is gone"
        for frame in waiting:
            copies.add_waiting(frame)
        for gap in self._generations[name].gaps:
            copies.text.lose(gap)
        return copies

    def _lane(self, lane: Lane) -> _LaneFrames:
        """Look at a lane: Redis first, then the store, so that what is sealed between is seen twice, not never."""
        found = self._recent.get(lane)
        if found is None:
            self._recent.clear()
            waiting: dict[Name, list[Frame]] = {}
            for entry in self._door.snapshot(lane):
                waiting.setdefault((entry.source, entry.generation), []).append(entry.frame)
            listed = _unlisted({lane: segments_of(self._objects.store, lane)}, self._newest)
            found = self._recent[lane] = _LaneFrames(waiting, tuple(listed.get(lane, ())))
        return found

    def _look_again(self) -> bool:
        """Read the newest manifest: an object is gone. Say whether it is a newer one, which has another instead."""
        self._recent.clear()
        found = newest(self._objects.store, self.key)
        if found is None or (self._newest is not None and found.number <= self._newest.number):
            return False
        self._newest = found
        self._parts = _parts_of(found)
        return True


def _parts_of(manifest: Manifest | None) -> dict[Name, list[str]]:
    """Return the keys of the parts that each generation is in."""
    found: dict[Name, list[str]] = {}
    for part in manifest.parts if manifest is not None else ():
        for name in {(span.source, span.generation) for span in part.spans}:
            found.setdefault(name, []).append(part.key)
    return found


def _unlisted(level0: Mapping[Lane, Sequence[str]], manifest: Manifest | None) -> dict[Lane, list[str]]:
    """Return the segments that came after ``manifest``."""
    listed: set[str] = set()
    if manifest is not None:
        listed = {part.key for part in manifest.parts} | set(manifest.replaces)
    found = {lane: [key for key in keys if key not in listed] for lane, keys in level0.items()}
    return {lane: keys for lane, keys in found.items() if keys}
