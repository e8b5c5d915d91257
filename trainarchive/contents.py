"""What a run's objects hold, read from the objects themselves: the manifest's sources and parts."""

import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from trainarchive import keys, segment, shelf
from trainarchive.coverage import NEVER_ARRIVED, Digest, Name, Text, digests, joined
from trainarchive.errors import DamagedError
from trainarchive.manifest import Generation, Manifest, Part, SourceEntry, Span
from trainarchive.run import Kind, Lane, LaneReport, RunKey, Source
from trainarchive.shelf import Shelved
from trainarchive.store.contract import Store

_log = logging.getLogger(__name__)

Tick = Callable[[], None]
"""Called after each object that was read: a long work's sign of life."""


class Contents:
    """The objects of one run's generation, and what their indexes say of it.

    ``texts`` are settled by ``settle``. Reports and descriptions: the latest object's.
    """

    def __init__(self, store: Store, objects: Sequence[Shelved], tick: Tick) -> None:
        """Read all indexes, one at a time. Raise NotFoundError where an object went away meanwhile."""
        self.objects = objects
        self.texts: dict[Name, Text] = {}
        self.sources: dict[str, Source] = {}
        self.reports: dict[Lane, LaneReport] = {}
        self.damaged: list[str] = []
        self._digests: dict[int, str] = {}
        self._store = store
        self._tick = tick
        for number, shelved, index in shelf.indexes(store, objects):
            if isinstance(index, DamagedError):
                self.damaged.append(shelved.key)
            else:
                self._add(number, shelved, index)
            tick()

    def _add(self, number: int, shelved: Shelved, index: segment.Index) -> None:
        for name, report in index.lanes.items():
            self.reports[Lane.parse(name)] = report
        foreign: set[str] = set()
        for source in _described(shelved, index):
            if self.sources.get(source.id, source).node == source.node:
                self.sources[source.id] = source
            else:
                foreign.add(source.id)
                _log.error("%s: source %s is another node's; left out", shelved.key, source.id)
        for placed in index.frames:
            if placed.source not in foreign:
                text = (placed.source, placed.generation)
                self.texts.setdefault(text, Text(text)).add(number, placed)

    def settle(self, sealed: Mapping[Name, int]) -> None:
        """Give each byte to one frame. ``sealed``: the offsets below which the log Redis says all is stored."""
        hole = NEVER_ARRIVED
        if self.damaged:
            hole += f", or in {self.damaged[0]}, which is damaged"
        for name in sealed:
            self.texts.setdefault(name, Text(name))
        for name, text in self.texts.items():
            text.settle(sealed.get(name, 0), hole)

    def generations(self, previous: Manifest | None) -> dict[Name, Generation]:
        """Return every text's entry. Those that ``previous`` has and no new object touches are not read again."""
        known = _unchanged(self, previous) if previous is not None else {}
        todo = {name: text for name, text in self.texts.items() if name not in known}
        found = digests(todo, self._body)
        return known | {name: _generation(self.texts[name], digest) for name, digest in found.items()}

    def parts(self, previous: Manifest | None) -> tuple[list[Part], list[str]]:
        """Return the parts in the order of objects, and the keys of objects that add nothing to the others."""
        spans: dict[int, list[Span]] = {}
        for text in self.texts.values():
            for number, span in text.spans():
                spans.setdefault(number, []).append(span)
        known = {part.key: part for part in previous.parts} if previous is not None else {}
        telling = {number for text in self.texts.values() if text.gaps for number in text.objects}
        parts: list[Part] = []
        idle: list[str] = []
        for number, shelved in enumerate(self.objects):
            if shelved.key in self.damaged:
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

    def merged(self, run: RunKey, reports: Mapping[Lane, LaneReport]) -> tuple[str, bytes]:
        """Return key and body of one part that holds the text of all objects: for small runs only.

        Frames that give no byte of text are left behind; the others stay as the nodes made them.
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
                if name in self.texts and (placed.gap or (name, number, placed.at) in used):
                    entries[entry] = None
            self._tick()
        lanes = {lane.name: report for lane, report in reports.items()}
        body, digest = segment.build(lanes, self.sources, entries)
        return keys.part_key(run, digest), body

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


def _unchanged(contents: Contents, previous: Manifest) -> dict[Name, Generation]:
    old_objects = {part.key for part in previous.parts}
    old = {
        (entry.source.id, generation.number): generation
        for entry in previous.sources
        for generation in entry.generations
    }
    result: dict[Name, Generation] = {}
    for name, text in contents.texts.items():
        generation = old.get(name)
        if generation is None or generation.size != text.size or contents.damaged:
            continue
        if all(contents.objects[number].key in old_objects for number in text.objects):
            result[name] = generation
    return result


def _generation(text: Text, digest: Digest) -> Generation:
    gaps = joined((*text.gaps, *digest.damaged))
    return Generation(text.name[1], text.size, digest.blake3, digest.first_ns, digest.last_ns, gaps)
