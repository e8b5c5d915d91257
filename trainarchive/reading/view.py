"""One run as a reader sees it: archived, running, or both."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from trainarchive.errors import DamagedError, NotFoundError
from trainarchive.manifest import Manifest, newest
from trainarchive.reading.ledger import Ledger
from trainarchive.reading.live import Door, LiveLane, segments_of
from trainarchive.reading.objects import Objects
from trainarchive.reading.pieces import Piece, VanishedError, piece_at, piece_of, read
from trainarchive.run import Gap, Lane, RunKey
from trainarchive.stream import State

Address = tuple[str, int]
"""Source id and generation."""


class _LanePieces(msgspec.Struct, frozen=True):
    """A lane's frames that waited in Redis, and its segments that no manifest lists, seen in this order."""

    waiting: dict[Address, list[Piece]]
    segments: tuple[str, ...]


class RunView:
    """A run's table of contents and its bytes.

    ``manifest`` is the newest, None before the first. ``running`` says whether more may come;
    ``notes`` what a person should know of this view. ``nodes`` and ``sources`` are the
    manifest's, with what came after it.
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
    ) -> None:
        """``lanes`` were looked at before ``level0`` was listed, so that nothing sealed between is missed."""
        self.key = key
        self.manifest = manifest
        self.running = manifest is None or any(lane.state is State.OPEN for lane in lanes)
        self._objects = objects
        self._door = door
        self._newest = manifest
        self._parts = _parts_of(manifest)
        fresh = _unlisted(level0 or {}, manifest)
        waiting = [found for found in lanes if found.state not in (None, State.ARCHIVED)]
        self._lanes = sorted({found.lane for found in waiting} | set(fresh))
        self._recent: OrderedDict[Lane, _LanePieces] = OrderedDict()
        ledger = Ledger(manifest)
        ledger.add_segments(fresh, self._objects)
        for found in waiting:
            ledger.add_lane(found)
        self.sources = ledger.sources()
        self.nodes = ledger.nodes()
        self._generations = {
            (entry.source.id, made.number): made for entry in self.sources for made in entry.generations
        }
        self._node_of = {entry.source.id: entry.source.node for entry in self.sources}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know: that Redis did not answer matters only where bytes may be in it."""
        return tuple(self._door.notes) if self.running else ()

    @property
    def state(self) -> str:
        """Slurm's word where the manifest has it; before that RUNNING, or ENDING once every node is drained."""
        if self.manifest is not None:
            return self.manifest.state
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
        have. Holds a few MiB, and of a live run what waits in one node's lane.
        """
        known = self._generations.get((source, generation))
        if known is None:
            raise NotFoundError(f"no generation {generation} of source {source!r}", where=str(self.key))
        end = known.size if known.blake3 else None
        position, asked, lost = 0, False, frozenset[str]()
        while True:
            try:
                pieces = self._pieces(source, generation, lost)
                for item in read(pieces, self._objects, generation=generation, start=position, end=end, lost=lost):
                    position = item.end if isinstance(item, Gap) else position + len(item)
                    yield item
            except VanishedError as vanished:
                if asked:
                    lost |= {vanished.key}
                asked = True
                self._look_again()
            else:
                return

    def _pieces(self, source: str, generation: int, lost: frozenset[str]) -> list[Piece]:
        """Return all that is known of where the text is, in order of offset."""
        address = (source, generation)
        waiting: list[Piece] = []
        listed = [*self._parts.get(address, ())]
        for lane in self._lanes:
            if lane.node == self._node_of[source]:
                found = self._lane(lane)
                waiting += found.waiting.get(address, ())
                listed += found.segments
        self._objects.prepare(key for key in listed if key not in lost)
        pieces: list[Piece] = []
        for key in listed:
            if key not in lost:
                pieces += self._pieces_in(key, address)
        gaps = [Piece(gap.start, gap.end, gap.reason) for gap in self._generations[address].gaps]
        # Of pieces that begin together the longest comes first, then the oldest: as where digests are made.
        return sorted([*pieces, *waiting, *gaps], key=lambda piece: (piece.offset, -piece.end))

    def _pieces_in(self, key: str, address: Address) -> list[Piece]:
        try:
            contents = self._objects.contents(key)
        except NotFoundError:
            raise VanishedError(key) from None
        except DamagedError:
            return []  # its bytes are then missing, which the reader of the pieces tells
        return [piece_at(key, placed) for placed in contents.frames.get(address, ())]

    def _lane(self, lane: Lane) -> _LanePieces:
        """Look at a lane: Redis first, then the store, so that what is sealed between is seen twice, not never."""
        found = self._recent.get(lane)
        if found is None:
            self._recent.clear()
            waiting: dict[Address, list[Piece]] = {}
            for entry in self._door.snapshot(lane):
                waiting.setdefault((entry.source, entry.generation), []).append(piece_of(entry.frame))
            listed = _unlisted({lane: segments_of(self._objects.store, lane)}, self._newest)
            found = self._recent[lane] = _LanePieces(waiting, tuple(listed.get(lane, ())))
        return found

    def _look_again(self) -> None:
        """Read the newest manifest: an object is gone, and it says what stands in for it."""
        self._recent.clear()
        found = newest(self._objects.store, self.key)
        if found is not None:
            self._newest = found
            self._parts = _parts_of(found)


def _parts_of(manifest: Manifest | None) -> dict[Address, list[str]]:
    """Return the keys of the parts that each generation is in."""
    found: dict[Address, list[str]] = {}
    for part in manifest.parts if manifest is not None else ():
        for address in {(span.source, span.generation) for span in part.spans}:
            found.setdefault(address, []).append(part.key)
    return found


def _unlisted(level0: Mapping[Lane, Sequence[str]], manifest: Manifest | None) -> dict[Lane, list[str]]:
    """Return the segments that came after ``manifest``."""
    listed: set[str] = set()
    if manifest is not None:
        listed = {part.key for part in manifest.parts} | set(manifest.replaces)
    found = {lane: [key for key in keys if key not in listed] for lane, keys in level0.items()}
    return {lane: keys for lane, keys in found.items() if keys}
