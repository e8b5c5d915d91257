"""The books of a run that has none yet: what its level-0 segments and its lanes tell."""

from collections.abc import Iterable, Mapping

import msgspec

from trainarchive.errors import DamagedError, NotFoundError
from trainarchive.manifest import Generation, Manifest, NodeEntry, SourceEntry
from trainarchive.reading.live import LiveLane
from trainarchive.reading.objects import Contents, Objects
from trainarchive.run import Gap, Kind, Lane, LaneReport, Source
from trainarchive.segment import Placed
from trainarchive.stream import State


class _Growing:
    """A generation as far as it is known."""

    def __init__(self, number: int, known: Generation | None = None) -> None:
        self.number = number
        self.size = known.size if known else 0
        self.blake3 = known.blake3 if known else ""
        self.first_ns = known.first_ns if known else 0
        self.last_ns = known.last_ns if known else 0
        self.gaps = {(gap.start, gap.end): gap for gap in known.gaps} if known else {}

    def add(self, placed: Placed) -> None:
        """Take a frame into account. A digest holds only for exactly the bytes that it was made over."""
        fills = not placed.gap and any(start < placed.end and placed.offset < end for start, end in self.gaps)
        if fills or placed.end > self.size:
            self.blake3 = ""
        self.size = max(self.size, placed.end)
        self.first_ns = min(self.first_ns or placed.wall_ns, placed.wall_ns)
        self.last_ns = max(self.last_ns, placed.wall_ns)
        if placed.gap:
            self.gaps[placed.offset, placed.end] = Gap(self.number, placed.offset, placed.end, placed.gap)

    def grow(self, size: int) -> None:
        """Take the offset that a lane has committed into account."""
        if size > self.size:
            self.size, self.blake3 = size, ""

    def done(self) -> Generation:
        """Return what is known."""
        gaps = tuple(self.gaps[span] for span in sorted(self.gaps))
        return Generation(self.number, self.size, self.blake3, self.first_ns, self.last_ns, gaps)


class Ledger:
    """Sources, generations and nodes, from a manifest (or none) and what came after it."""

    def __init__(self, manifest: Manifest | None) -> None:
        """Begin with what ``manifest`` lists."""
        self._sources: dict[str, Source] = {}
        self._generations: dict[str, dict[int, _Growing]] = {}
        self._nodes: dict[str, NodeEntry] = {}
        if manifest is None:
            return
        for entry in manifest.sources:
            self._sources[entry.source.id] = entry.source
            self._generations[entry.source.id] = {
                known.number: _Growing(known.number, known) for known in entry.generations
            }
        self._nodes = {entry.node: entry for entry in manifest.nodes}

    def add_segments(self, segments: Mapping[Lane, Iterable[str]], objects: Objects) -> None:
        """Take level-0 segments into account; what is gone or damaged shows when it is read."""
        objects.prepare(key for listed in segments.values() for key in listed)
        for lane, listed in segments.items():
            for key in listed:
                try:
                    contents = objects.contents(key)
                except (NotFoundError, DamagedError):
                    continue
                self._add_contents(lane, contents)

    def add_lane(self, found: LiveLane) -> None:
        """Take a lane into account."""
        if found.state is None:
            return
        self._describe(found.lane, found.sources)
        for (source, number), size in found.committed.items():
            if not self._is_foreign(found.lane, source):
                self._generation(found.lane, source, number).grow(size)
        self._node(found.lane, "open" if found.state is State.OPEN else "drained", found.report)

    def sources(self) -> tuple[SourceEntry, ...]:
        """Return all sources with their generations."""
        return tuple(
            SourceEntry(source, tuple(found[number].done() for number in sorted(found)))
            for source, found in ((self._sources[key], self._generations.get(key, {})) for key in self._sources)
        )

    def nodes(self) -> tuple[NodeEntry, ...]:
        """Return all nodes, by name."""
        return tuple(self._nodes[name] for name in sorted(self._nodes))

    def _add_contents(self, lane: Lane, contents: Contents) -> None:
        self._describe(lane, contents.sources)
        for (source, number), frames in contents.frames.items():
            if self._is_foreign(lane, source):
                continue
            growing = self._generation(lane, source, number)
            for placed in frames:
                growing.add(placed)
        report = contents.lanes.get(lane.name)
        if report is not None:
            self._node(lane, "drained" if report.drained else "open", report)

    def _describe(self, lane: Lane, sources: Mapping[str, Source]) -> None:
        for key, source in sources.items():
            if not self._is_foreign(lane, key):
                self._sources[key] = msgspec.structs.replace(source, id=key, node=lane.node)

    def _is_foreign(self, lane: Lane, source: str) -> bool:
        """Say whether a source is another node's: a lane may tell of its own node's only."""
        known = self._sources.get(source)
        return known is not None and known.node != lane.node

    def _generation(self, lane: Lane, source: str, number: int) -> _Growing:
        if source not in self._sources:
            self._sources[source] = Source(source, lane.node, Kind.CUSTOM, f"undescribed-{source}")
        found = self._generations.setdefault(source, {})
        return found.setdefault(number, _Growing(number))

    def _node(self, lane: Lane, state: str, report: LaneReport | None) -> None:
        before = self._nodes.get(lane.node)
        tokens = before.tokens if before else ()
        if lane.token not in tokens:
            tokens = (*tokens, lane.token)
        self._nodes[lane.node] = NodeEntry(lane.node, state, tokens, report or (before.report if before else None))
