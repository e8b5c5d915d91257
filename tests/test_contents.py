"""What a run's objects hold, and what of it comes into a manifest."""

import itertools
import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from tests_lane import digest

from trainarchive import keys, segment
from trainarchive.contents import GONE, RunContents, source_entries
from trainarchive.coverage import NEVER_ARRIVED, NOT_IN_STORE, Text
from trainarchive.frame import Framer, gap_frame
from trainarchive.manifest import Generation, Manifest
from trainarchive.run import Gap, Job, Kind, Lane, LaneReport, RunKey, Source
from trainarchive.sealing import DROPPED
from trainarchive.segment import Entry, Placed
from trainarchive.shelf import Shelved
from trainarchive.store.memory import MemoryStore

RUN = RunKey("c", 7)
LANE = Lane(RUN, "n1", "s1")
SOURCE = Source("n1-a", "n1", Kind.TASK, "/out/a.log")
NAME = (SOURCE.id, 0)


def text(offset: int, raw: bytes, source: str = SOURCE.id) -> Entry:
    """Return an entry with text."""
    return Entry(source, 0, Framer().frame(offset, raw, 1, 1))


def lost(start: int, end: int, reason: str = "lost", source: str = SOURCE.id) -> Entry:
    """Return an entry that says what is missing."""
    return Entry(source, 0, gap_frame(start, end, 1, 1, reason))


def put(
    store: MemoryStore, number: int, *entries: Entry, lane: Lane = LANE, report: LaneReport | None = None
) -> Shelved:
    """Store a segment of the lane."""
    sources = {entry.source: Source(entry.source, lane.node, Kind.TASK, "/x") for entry in entries}
    body, name = segment.build({lane.name: report or LaneReport(Job(1))}, sources, entries)
    key = keys.segment_key(lane, "e", f"{number}-0", f"{number}-9", name)
    store.put(key, body)
    return Shelved(key, len(body), lane)


def contents(
    store: MemoryStore, objects: Sequence[Shelved], previous: Manifest | None = None, floor: int = 0
) -> RunContents:
    """Read the objects and settle them."""
    found = RunContents(store, objects, lambda: None, previous)
    found.settle({NAME: floor} if floor else {})
    return found


def book(found: RunContents, previous: Manifest | None = None) -> Manifest:
    """Write down what was found."""
    generations = found.generations()
    parts, idle = found.parts()
    return Manifest(
        number=previous.number + 1 if previous else 1, run=RUN, written=1.0, complete=True, state="", state_from="",
        nodes=(), sources=source_entries(found.sources or {SOURCE.id: SOURCE}, generations),
        parts=tuple(parts), replaces=tuple(idle),
    )  # fmt: skip


def only(of: Manifest) -> Generation:
    """Return the one generation of the one source."""
    ((generation,),) = [entry.generations for entry in of.sources]
    return generation


def test_what_adds_nothing_is_idle() -> None:
    """A segment whose bytes others give is replaced; one that alone tells why bytes are missing is a part."""
    store = MemoryStore()
    whole, again, told = put(store, 1, text(0, b"abcdef")), put(store, 2, text(0, b"abc")), put(store, 3, lost(6, 9))
    first = book(contents(store, [whole, again]))
    assert [part.key for part in first.parts] == [whole.key]
    assert first.replaces == (again.key,)
    second = book(contents(store, [whole, told], first), first)
    assert [part.key for part in second.parts] == [whole.key, told.key]
    assert only(second).gaps == (Gap(0, 6, 9, "lost"),)
    assert book(contents(store, [whole, told], second), second).sources == second.sources


def test_what_is_lost_by_the_store_is_a_gap_ever_after() -> None:
    """A listed object that vanished leaves gaps with that reason, for all of its bytes that no other has."""
    store = MemoryStore()
    objects = [put(store, number, text(3 * number, b"abc")) for number in range(4)]
    first = book(contents(store, objects))
    left = [objects[0], objects[2]]
    second = book(contents(store, left, first, 12), first)
    assert only(second) == Generation(0, 12, digest(b"abcabc"), 1, 1, (Gap(0, 3, 6, GONE), Gap(0, 9, 12, GONE)))
    third = book(contents(store, left, second, 12), second)
    assert (third.sources, third.parts) == (second.sources, second.parts)
    # A node that still has them fills the gap.
    mended = book(contents(store, [*left, put(store, 9, text(3, b"abc"))], third, 12), third)
    assert only(mended).gaps == (Gap(0, 9, 12, GONE),)


def test_all_of_it_is_lost() -> None:
    """A source of which nothing is left stays in the books with its size."""
    store = MemoryStore()
    first = book(contents(store, [put(store, 1, text(0, b"abc"))]))
    second = book(contents(store, [], first, 3), first)
    assert only(second) == Generation(0, 3, digest(b""), 0, 0, (Gap(0, 0, 3, GONE),))
    assert second.parts == ()


def test_a_damaged_part_is_kept_and_not_counted_on() -> None:
    """Other copies of its bytes come into the manifest; mended, it serves again."""
    store = MemoryStore()
    first_half, second_half = put(store, 1, text(0, b"abcdef")), put(store, 2, text(6, b"ghi"))
    first = book(contents(store, [first_half, second_half]))
    body = store.get(first_half.key)
    store.put(first_half.key, b"rubbish")
    copy = put(store, 3, text(0, b"abcdef"))
    found = contents(store, [first_half, second_half, copy], first, 9)
    second = book(found, first)
    assert found.damaged == [first_half.key]
    assert [part.key for part in second.parts] == [first_half.key, second_half.key, copy.key]
    assert [(span.start, span.end) for span in second.parts[2].spans] == [(0, 6)]
    assert (only(second).gaps, only(second).blake3) == ((), digest(b"abcdefghi"))
    store.delete(copy.key)
    without = book(contents(store, [first_half, second_half], first, 9), first)
    assert [(gap.start, gap.end) for gap in only(without).gaps] == [(0, 6)]
    assert first_half.key in only(without).gaps[0].reason
    store.put(first_half.key, body)
    assert only(book(contents(store, [first_half, second_half], without, 9), without)) == only(first)


def test_a_copy_that_was_not_needed_before() -> None:
    """Where a part that gave the bytes is damaged now, another listed part is read again and gives them."""
    store = MemoryStore()
    part, copy = put(store, 1, text(0, b"abcdef")), put(store, 2, text(0, b"abcdef"), lost(6, 9))
    first = book(contents(store, [part, copy]))
    assert [[(span.start, span.end) for span in each.spans] for each in first.parts] == [[(0, 6)], []]
    store.put(part.key, b"rubbish")
    second = book(contents(store, [part, copy], first, 9), first)
    assert second.sources == first.sources
    assert [(span.start, span.end) for span in second.parts[1].spans] == [(0, 6)]


def test_another_nodes_source() -> None:
    """A segment tells of its own node's sources only, whichever is looked at first; merged, nothing of it is left."""
    thief = Lane(RUN, "a1", "s1")
    store = MemoryStore()
    forged = put(store, 1, text(0, b"forged, and longer"), lost(30, 40), lane=thief)
    honest = put(store, 1, text(0, b"honest"))
    for objects in itertools.permutations([forged, honest]):
        found = contents(store, objects)
        assert {name: source.node for name, source in found.sources.items()} == {"n1-a": "n1"}
        assert only(book(found)) == Generation(0, 6, digest(b"honest"), 1, 1)
        key, body = found.merged(RUN, {})
        store.put(key, body)
        merged = book(contents(store, [Shelved(key, len(body))]))
        assert only(merged) == Generation(0, 6, digest(b"honest"), 1, 1)


def test_reports_and_notes() -> None:
    """The last segment's report counts; what sealing noted is kept; that it is newer than the manifest is known."""
    store = MemoryStore()
    note, own = f"2 {DROPPED}", "the spool is full"
    old = put(store, 1, text(0, b"abc"), report=LaneReport(Job(1), notes=(own, note)))
    first = book(contents(store, [old]))
    assert contents(store, [old], first).newer == set()
    new = put(store, 2, text(3, b"def"), report=LaneReport(Job(1), drained=True))
    found = contents(store, [old, new], first)
    assert (found.reports[LANE].drained, found.newer) == (True, {LANE})
    assert found.notes == {LANE: {note}}


frames = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(1, 12), st.sampled_from(["", "", "", "lost"])),
    max_size=25,
)


@given(frames, st.integers(0, 60))
def test_every_byte_once(found: list[tuple[int, int, int, str]], sealed: int) -> None:
    """Pieces and gaps together are each byte from 0 to the size once; data wins over gaps."""
    whole = Text(("a", 0))
    for number, offset, size, gap in found:
        whole.add(number, Placed("a", 0, offset, size, 0, 0, 0, 0, gap))
    whole.settle(sealed)
    kinds: list[str] = [""] * whole.size
    for piece in range(whole.pieces):
        start, end, _ = whole.place(piece)
        for at in range(start, end):
            assert kinds[at] == ""
            kinds[at] = "data"
    for hole in whole.gaps:
        assert hole.start < hole.end
        for at in range(hole.start, hole.end):
            assert kinds[at] == ""
            kinds[at] = hole.reason
    for at, kind in enumerate(kinds):
        covering = {gap for _, offset, size, gap in found if offset <= at < offset + size}
        known_to = max([offset + size for _, offset, size, _ in found], default=0)
        expected = NEVER_ARRIVED if at < known_to else NOT_IN_STORE
        assert kind == ("data" if "" in covering else "lost" if covering else expected)
    assert [span for _, span in whole.spans() if span.start >= span.end] == []
    assert sum(span.end - span.start for _, span in whole.spans()) == kinds.count("data")


@settings(max_examples=40, deadline=None)
@given(
    pieces=st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=12),
    cuts=st.lists(st.tuples(st.integers(0, 11), st.integers(1, 6)), min_size=1, max_size=8),
    order=st.randoms(use_true_random=False),
)
def test_segments_in_any_order(pieces: list[bytes], cuts: list[tuple[int, int]], order: random.Random) -> None:
    """However overlapping segments lie in the store, the digest is that of the text."""
    store = MemoryStore()
    offsets = [0, *itertools.accumulate(map(len, pieces))]
    ranges = [(0, len(pieces)), *((start, start + count) for start, count in cuts)]
    order.shuffle(ranges)
    objects = [
        put(store, number, *(text(offsets[at], pieces[at]) for at in range(start, min(end, len(pieces)))))
        for number, (start, end) in enumerate(ranges)
    ]
    generation = only(book(contents(store, objects)))
    whole = b"".join(pieces)
    assert (generation.size, generation.blake3, generation.gaps) == (len(whole), digest(whole), ())
