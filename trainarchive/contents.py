"""What a run's objects hold, read from the objects themselves: the manifest's sources and parts."""

import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from trainarchive import keys, segment, shelf
from trainarchive.coverage import NEVER_ARRIVED, Digest, Name, Text, digests, joined
from trainarchive.errors import DamagedError
from trainarchive.frame import gap_frame
from trainarchive.manifest import Generation, Manifest, Part, SourceEntry, Span
from trainarchive.run import Gap, Kind, Lane, LaneReport, RunKey, Source, is_source_of
from trainarchive.sealing import DROPPED
from trainarchive.shelf import Shelved
from trainarchive.store.contract import Store

GONE = "was archived, but is no longer in the store"

_log = logging.getLogger(__name__)

Tick = Callable[[], None]
"""Called after each object that was read: a long work's sign of life."""


class RunContents:
    """The objects of one run's generation, and what their indexes say of it.

    ``texts`` are settled by ``settle``. Reports and descriptions: the latest object's. ``newer``:
    lanes whose reports come from objects that the previous manifest does not list. ``notes``: what
    sealing has noted, in whatever object of the lane.
    """

    def __init__(self, store: Store, objects: Sequence[Shelved], tick: Tick, previous: Manifest | None = None) -> None:
        """Read all indexes, one at a time. Raise NotFoundError where an object went away meanwhile.

        ``previous``: the manifest before: what it lists and is not among ``objects`` is gone.
        """
        self.objects = objects
        self.texts: dict[Name, Text] = {}
        self.sources: dict[str, Source] = {}
        self.reports: dict[Lane, LaneReport] = {}
        self.newer: set[Lane] = set()
        self.notes: dict[Lane, set[str]] = {}
        self.damaged: list[str] = []
        self._previous = previous
        self._known = {part.key: part for part in previous.parts} if previous is not None else {}
        self._digests: dict[int, str] = {}
        self._unread: set[Name] = set()
        self._store = store
        self._tick = tick
        for number, shelved, index in shelf.indexes(store, objects):
            if isinstance(index, DamagedError):
                self.damaged.append(shelved.key)
            else:
                self._add(number, shelved, index)
            tick()
        if previous is not None:
            self._miss(previous)

    def _add(self, number: int, shelved: Shelved, index: segment.Index) -> None:
        for name, report in index.lanes.items():
            lane = Lane.parse(name)
            self.reports[lane] = report
            self.notes.setdefault(lane, set()).update(note for note in report.notes if note.endswith(DROPPED))
            if shelved.key not in self._known:
                self.newer.add(lane)
        foreign: set[str] = set()
        for source in _described(shelved, index):
            if shelved.lane is None or is_source_of(shelved.lane.node, source.id):
                self.sources[source.id] = source
            else:
                foreign.add(source.id)
                _log.error("%s: source %s is another node's; left out", shelved.key, source.id)
        for placed in index.frames:
            if placed.source not in foreign:
                text = (placed.source, placed.generation)
                self.texts.setdefault(text, Text(text)).add(number, placed)

    def _miss(self, previous: Manifest) -> None:
        """Tell of each byte that was lost with an object why it is not there: now, and ever after."""
        there = {shelved.key for shelved in self.objects}
        for part in previous.parts:
            if part.key not in there:
                _log.error("%s: %s", part.key, GONE)
                for span in part.spans:
                    self._lose((span.source, span.generation), span.start, span.end)
        for entry in previous.sources:
            for generation in entry.generations:
                for gap in generation.gaps:
                    if gap.reason == GONE:
                        self._lose((entry.source.id, generation.number), gap.start, gap.end)

    def _lose(self, name: Name, start: int, end: int) -> None:
        self.texts.setdefault(name, Text(name)).lose(Gap(name[1], start, end, GONE))

    def settle(self, sealed: Mapping[Name, int]) -> None:
        """Give each byte to one frame. ``sealed``: the offsets below which all is said to be stored."""
        hole = NEVER_ARRIVED
        if self.damaged:
            hole += f", or in {self.damaged[0]}, which is damaged"
        for name in sealed:
            self.texts.setdefault(name, Text(name))
        for name, text in self.texts.items():
            text.settle(sealed.get(name, 0), hole)

    def generations(self) -> dict[Name, Generation]:
        """Return every text's entry. Those that the previous manifest has as they are now are not read again."""
        known = self._unchanged(self._previous) if self._previous is not None else {}
        self._unread = set(known)
        todo = {name: text for name, text in self.texts.items() if name not in known}
        found = digests(todo, self._body)
        return known | {name: _generation(self.texts[name], digest) for name, digest in found.items()}

    def parts(self) -> tuple[list[Part], list[str]]:
        """Return the parts in the order of objects, and the keys of objects that add nothing to the others.

        A damaged object is a part only if it was one before: it is kept, for it may be mended.
        """
        known = self._known
        spans = self._spans(known)
        telling = {number for text in self.texts.values() if text.gaps for number in text.objects}
        parts: list[Part] = []
        idle: list[str] = []
        for number, shelved in enumerate(self.objects):
            if shelved.key in self.damaged:
                parts += [known[shelved.key]] if shelved.key in known else []
                continue
            if number not in spans and number not in telling:
                idle.append(shelved.key)
                continue
            part = Part(
                shelved.key,
                int(shelved.lane is None),
                shelved.size,
                "",
                tuple(sorted(spans.get(number, []), key=msgspec.structs.astuple)),
            )
            old = known.get(shelved.key)
            parts.append(msgspec.structs.replace(part, blake3=old.blake3 if old else self._digest(number)))
        return parts, idle

    def _spans(self, known: Mapping[str, Part]) -> dict[int, list[Span]]:
        """Return what each object gives, by its number: of a text that was not read, what the last manifest says."""
        spans: dict[int, list[Span]] = {}
        for name, text in self.texts.items():
            if name not in self._unread:
                for number, span in text.spans():
                    spans.setdefault(number, []).append(span)
        for number, shelved in enumerate(self.objects):
            for span in known[shelved.key].spans if shelved.key in known else ():
                if (span.source, span.generation) in self._unread:
                    spans.setdefault(number, []).append(span)
        return spans

    def merged(self, run: RunKey, reports: Mapping[Lane, LaneReport]) -> tuple[str, bytes]:
        """Return key and body of one part that holds the text of all objects: for small runs only.

        Frames that give no byte of text are left behind; the others stay as the nodes made them. What
        the store lost is told in frames of gaps.
        """
        used = {
            (name, text.object_of(piece), text.place(piece)[2])
            for name, text in self.texts.items()
            for piece in range(text.pieces)
        }
        entries: dict[segment.Entry, None] = {}
        for number, shelved in enumerate(self.objects):
            if shelved.key in self.damaged:
                continue
            body = self._store.get(shelved.key)
            index = shelf.index_of(body, shelved.key)
            for placed, entry in zip(index.frames, segment.frames_of(body, index), strict=True):
                name = (placed.source, placed.generation)
                taken = name in self.texts and number in self.texts[name].objects
                if taken and (placed.gap or (name, number, placed.at) in used):
                    entries[entry] = None
            self._tick()
        for name, text in self.texts.items():
            for gap in text.gaps:
                if gap.reason == GONE:
                    entries[segment.Entry(*name, gap_frame(gap.start, gap.end, 0, 0, GONE))] = None
        lanes = {lane.name: report for lane, report in reports.items()}
        body, digest = segment.build(lanes, self.sources, entries)
        return keys.part_key(run, digest), body

    def _unchanged(self, previous: Manifest) -> dict[Name, Generation]:
        old = {
            (entry.source.id, generation.number): generation
            for entry in previous.sources
            for generation in entry.generations
        }
        result: dict[Name, Generation] = {}
        for name, text in self.texts.items():
            generation = old.get(name)
            if generation is None or self.damaged or (generation.size, generation.gaps) != (text.size, text.gaps):
                continue
            if all(self.objects[number].key in self._known for number in text.objects):
                result[name] = generation
        return result

    def _body(self, number: int) -> bytes:
        body, self._digests[number] = shelf.body_of(self._store, self.objects[number])
        self._tick()
        return body

    def _digest(self, number: int) -> str:
        if number not in self._digests:
            self._body(number)
        return self._digests[number]


def source_entries(sources: Mapping[str, Source], generations: Mapping[Name, Generation]) -> tuple[SourceEntry, ...]:
    """Return the manifest's sources in order of id, each with its generations, oldest first."""
    by_source: dict[str, list[Generation]] = {}
    for name in sorted(generations):
        by_source.setdefault(name[0], []).append(generations[name])
    return tuple(SourceEntry(sources[each], tuple(by_source.get(each, ()))) for each in sorted(sources))


def _described(shelved: Shelved, index: segment.Index) -> list[Source]:
    """Return the descriptions of all sources in the object; one that was never described gets a plain one."""
    found = dict(index.sources)
    for placed in index.frames:
        if placed.source not in found:
            node = shelved.lane.node if shelved.lane is not None else ""
            found[placed.source] = Source(placed.source, node, Kind.CUSTOM, f"undescribed-{placed.source}")
    return list(found.values())


def _generation(text: Text, digest: Digest) -> Generation:
    gaps = joined((*text.gaps, *digest.damaged))
    return Generation(text.name[1], text.size, digest.blake3, digest.first_ns, digest.last_ns, gaps)
