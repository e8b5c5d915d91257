"""The books of a run that has none yet: what its level-0 segments and its lanes tell."""

from collections.abc import Iterable, Mapping

import msgspec

from trainarchive import nodes
from trainarchive.coverage import Name
from trainarchive.errors import DamagedError, NotFoundError
from trainarchive.manifest import Generation, Manifest, NodeEntry, SourceEntry
from trainarchive.reading.live import LiveLane
from trainarchive.reading.objects import Contents, Objects
from trainarchive.run import Gap, Kind, Lane, LaneReport, Source, is_source_of


class _Growing:
    """A generation as far as it is known."""

    def __init__(self, number: int, known: Generation | None = None) -> None:
        self.number = number
        self.size = known.size if known else 0
        self.blake3 = known.blake3 if known else ""
        self.first_ns = known.first_ns if known else 0
        self.last_ns = known.last_ns if known else 0
        self.gaps = {(gap.start, gap.end): gap for gap in known.gaps} if known else {}

    def add(self, start: int, end: int, wall_ns: int) -> None:
        """Take a frame into account. A digest holds only for exactly the bytes that it was made over."""
        if self.blake3 and any(first < end and start < last for first, last in self.gaps):
            self.blake3 = ""
        self._reach(end, wall_ns)

    def lose(self, gap: Gap, wall_ns: int) -> None:
        """Take a gap into account."""
        self._reach(gap.end, wall_ns)
        self.gaps[gap.start, gap.end] = gap

    def _reach(self, end: int, wall_ns: int) -> None:
        self.grow(end)
        self.first_ns = min(self.first_ns or wall_ns, wall_ns)
        self.last_ns = max(self.last_ns, wall_ns)

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
        self._before: dict[str, NodeEntry] = {}
        self._lanes: dict[str, set[Lane]] = {}
        self._live: dict[Lane, LiveLane] = {}
        self._reports: dict[Lane, LaneReport] = {}
        self.damaged: list[str] = []
        if manifest is None:
            return
        for entry in manifest.sources:
            self._sources[entry.source.id] = entry.source
            self._generations[entry.source.id] = {
                known.number: _Growing(known.number, known) for known in entry.generations
            }
        self._before = {entry.node: entry for entry in manifest.nodes}

    def add_segments(self, segments: Mapping[Lane, Iterable[str]], objects: Objects) -> None:
        """Take level-0 segments into account: ``damaged`` tells those that cannot be read. What is gone shows later."""
        lane_of = {key: lane for lane, listed in segments.items() for key in listed}
        for key, contents in objects.each(lane_of):
            if isinstance(contents, DamagedError):
                self.damaged.append(str(contents))
            elif not isinstance(contents, NotFoundError):
                self._add_contents(lane_of[key], contents)

    def add_lane(self, found: LiveLane) -> None:
        """Take a lane into account."""
        if found.state is None:
            return
        self._describe(found.lane, found.sources)
        for (source, number), size in found.committed.items():
            if not self._is_foreign(found.lane, source):
                self._generation(found.lane, source, number).grow(size)
        self._lanes.setdefault(found.lane.node, set()).add(found.lane)
        self._live[found.lane] = found
        if found.report is not None:
            self._reports[found.lane] = found.report

    def sources(self) -> tuple[SourceEntry, ...]:
        """Return all sources with their generations."""
        return tuple(
            SourceEntry(source, tuple(found[number].done() for number in sorted(found)))
            for source, found in ((self._sources[key], self._generations.get(key, {})) for key in self._sources)
        )

    def nodes(self) -> tuple[NodeEntry, ...]:
        """Return all nodes that were heard of or are in the manifest, by name."""
        return tuple(self._node(name) for name in sorted({*self._before, *self._lanes}))

    def _node(self, name: str) -> NodeEntry:
        before, lanes = self._before.get(name), self._lanes.get(name, set())
        if before is not None and not lanes:
            return before
        ordered = sorted(lanes, key=lambda lane: lane.token)
        return nodes.entry(name, ordered, self._live, self._reports, before)

    def _add_contents(self, lane: Lane, contents: Contents) -> None:
        self._describe(lane, contents.sources)
        for name in {*contents.frames, *contents.gaps}:
            if not self._is_foreign(lane, name[0]):
                self._add_frames(self._generation(lane, *name), contents, name)
        self._lanes.setdefault(lane.node, set()).add(lane)
        report = contents.lanes.get(lane.name)
        if report is not None:
            self._reports[lane] = report

    @staticmethod
    def _add_frames(growing: _Growing, contents: Contents, name: Name) -> None:
        for start, end, _, _, wall_ns in contents.rows(name):
            growing.add(start, end, wall_ns)
        for gap, wall_ns in contents.gaps.get(name, ()):
            growing.lose(gap, wall_ns)

    def _describe(self, lane: Lane, sources: Mapping[str, Source]) -> None:
        for key, source in sources.items():
            if not self._is_foreign(lane, key):
                self._sources[key] = msgspec.structs.replace(source, id=key, node=lane.node)

    @staticmethod
    def _is_foreign(lane: Lane, source: str) -> bool:
        """Say whether a source is another node's: a lane may tell of its own node's only."""
        return not is_source_of(lane.node, source)

    def _generation(self, lane: Lane, source: str, number: int) -> _Growing:
        if source not in self._sources:
            self._sources[source] = Source(source, lane.node, Kind.CUSTOM, f"undescribed-{source}")
        found = self._generations.setdefault(source, {})
        return found.setdefault(number, _Growing(number))
