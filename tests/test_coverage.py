"""Which frames give a text's bytes: each byte once, from a copy that is not damaged where there is one."""

import tracemalloc

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from trainarchive import keys, segment
from trainarchive.contents import RunContents, source_entries
from trainarchive.coverage import DAMAGED_IN_STORE, NEVER_ARRIVED, Digest, Text, digests
from trainarchive.frame import Frame, Framer, gap_frame
from trainarchive.manifest import Manifest, Span
from trainarchive.reading.objects import Objects
from trainarchive.reading.pieces import Copies
from trainarchive.run import Gap, Job, Kind, Lane, LaneReport, RunKey, Source
from trainarchive.segment import Entry, Placed
from trainarchive.shelf import Shelved
from trainarchive.store.memory import MemoryStore

RUN = RunKey("c", 7)
LANE = Lane(RUN, "n1", "s1")
SOURCE = Source("n1-a", "n1", Kind.TASK, "/out/a.log")
NAME = (SOURCE.id, 0)
TEXT = blake3(b"text").digest(600)
EVERY = frozenset(range(1000))

Stretches = list[tuple[int, int]]


def put(store: MemoryStore, number: int, stretches: Stretches, rotten: frozenset[int] = frozenset()) -> Shelved:
    """Store a segment that holds these stretches of TEXT; frames with the numbers in ``rotten`` are damaged."""
    framer = Framer()
    entries = [Entry(SOURCE.id, 0, framer.frame(start, TEXT[start:end], number, 1)) for start, end in stretches]
    body, digest = segment.build({LANE.name: LaneReport(Job(1))}, {SOURCE.id: SOURCE}, entries)
    key = keys.segment_key(LANE, "e", f"{number}-0", f"{number}-9", digest)
    whole = bytearray(body)
    for at, placed in enumerate(segment.read_index(body, key).frames):
        if at in rotten:
            whole[placed.at + placed.size - 1] ^= 0xFF
    store.put(key, bytes(whole))
    return Shelved(key, len(body), LANE)


def book_of(contents: RunContents, previous: Manifest | None = None) -> Manifest:
    """Write down ``contents`` as finishing does."""
    contents.settle({})
    generations = contents.generations()
    parts, idle = contents.parts()
    return Manifest(
        number=previous.number + 1 if previous else 1,
        run=RUN,
        written=1.0,
        complete=True,
        state="COMPLETED",
        state_from="epilog",
        nodes=(),
        sources=source_entries({SOURCE.id: SOURCE}, generations),
        parts=tuple(parts),
        replaces=tuple(idle),
    )


def look(store: MemoryStore, *objects: Shelved, previous: Manifest | None = None) -> RunContents:
    """Read the objects' indexes."""
    return RunContents(store, objects, lambda: None, previous)


def hex_of(text: bytes) -> str:
    """Return a text's digest."""
    return blake3(text).hexdigest()


# -- copies ------------------------------------------------------------------------------------


def test_an_intact_copy_stands_in_for_a_rotten_one() -> None:
    """Where the first copy is rotten the manifest lists the other, misses nothing, and gives up the rotten one."""
    store = MemoryStore()
    stretches = [(0, 200), (200, 400)]
    rotten, intact = put(store, 1, stretches, EVERY), put(store, 2, stretches)
    book = book_of(look(store, rotten, intact))
    (made,) = book.sources[0].generations
    assert (made.size, made.blake3, made.gaps) == (400, hex_of(TEXT[:400]), ())
    assert [(part.key, part.spans) for part in book.parts] == [(intact.key, (Span(*NAME, 0, 400),))]
    assert book.replaces == (rotten.key,)


def test_a_copy_in_use_stays_in_use() -> None:
    """A later manifest that does not read the text again keeps the copy that was found intact."""
    store = MemoryStore()
    objects = put(store, 1, [(0, 200), (200, 400)], frozenset({1})), put(store, 2, [(100, 400)])
    first = book_of(look(store, *objects))
    assert [part.spans for part in first.parts] == [(Span(*NAME, 0, 200),), (Span(*NAME, 200, 400),)]
    second = book_of(look(store, *objects, previous=first), first)
    assert (second.parts, second.replaces) == (first.parts, ())
    assert second.sources == first.sources


def test_a_merged_part_holds_the_good_copies() -> None:
    """Objects that are put together as one part leave their rotten frames behind where there are good ones."""
    store = MemoryStore()
    contents = look(store, put(store, 1, [(0, 200), (200, 400)], frozenset({1})), put(store, 2, [(100, 400)]))
    book = book_of(contents)
    key, body = contents.merged(RUN, {})
    store.put(key, body)
    merged = book_of(look(store, Shelved(key, len(body))))
    assert merged.sources == book.sources
    assert len(segment.read_index(body, key).frames) == 2


def test_damage_without_a_copy_is_a_gap_and_keeps_its_object() -> None:
    """Where no copy is good the manifest says so, and the damaged object is not given up: it may yet be mended."""
    store = MemoryStore()
    rotten, other = put(store, 1, [(0, 100), (100, 200)], EVERY), put(store, 2, [(50, 150)], EVERY)
    book = book_of(look(store, rotten, other))
    (made,) = book.sources[0].generations
    assert (made.blake3, made.gaps) == (hex_of(b""), (Gap(0, 0, 200, DAMAGED_IN_STORE),))
    assert rotten.key in {part.key for part in book.parts}
    assert rotten.key not in book.replaces


def test_an_object_that_is_rotten_all_over_is_read_once() -> None:
    """However many frames need their copy from another object, both are read once."""
    framer = Framer()
    bodies, texts = [b"", b""], {NAME: Text(NAME)}
    for number in range(2):
        for at in range(300):
            frame = framer.frame(at, TEXT[at : at + 1], 1, 1)
            texts[NAME].add(number, Placed(*NAME, at, 1, len(bodies[number]), len(frame.data), 1, 1))
            bodies[number] += frame.data
    bodies[0] = bytes(len(bodies[0]))
    reads: list[int] = []

    def read(number: int) -> bytes:
        reads.append(number)
        return bodies[number]

    assert digests(texts, read) == {NAME: Digest(hex_of(TEXT[:300]), 1, 1)}
    assert reads == [0, 1]


LAYOUT = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(0, 500),
        st.integers(1, 90),
        st.sampled_from(["text", "text", "text", "bad", "gap"]),
    ),
    max_size=14,
)


@settings(max_examples=300, deadline=None)
@given(LAYOUT)
def test_any_arrangement(layout: list[tuple[int, int, int, str]]) -> None:
    """Whatever is damaged or lost, books and readers agree: all bytes with a good copy, and no other."""
    framer = Framer()
    text, bodies = Text(NAME), [b"", b"", b"", b""]
    copies = Copies(Text(NAME), Objects(MemoryStore()))
    have: set[int] = set()
    told: set[int] = set()
    kept: set[int] = set()
    for number, start, length, kind in layout:
        frame = framer.frame(start, TEXT[start : start + length], 1, 1)
        if kind == "gap":
            frame = gap_frame(start, frame.end, 1, 1, "lost")
        elif kind == "bad":
            frame = Frame(start, frame.length, 1, 1, frame.data[:-1] + bytes([frame.data[-1] ^ 0xFF]))
        {"text": have, "gap": told, "bad": kept}[kind].update(range(start, frame.end))
        at = len(bodies[number])
        text.add(number, Placed(*NAME, start, frame.length, at, len(frame.data), 1, 1, frame.gap))
        bodies[number] += frame.data
        copies.add_waiting(frame)
    text.settle()
    digest = digests({NAME: text}, lambda number: bodies[number])[NAME]
    good = bytes(TEXT[at] for at in sorted(have))
    assert digest.blake3 == hex_of(good)
    gaps = {at: gap.reason for gap in (*text.gaps, *digest.damaged) for at in range(gap.start, gap.end)}
    assert set(gaps) == set(range(text.size)) - have
    for at, reason in gaps.items():
        assert reason == ("lost" if at in told else DAMAGED_IN_STORE if at in kept else NEVER_ARRIVED)
    pieces = [text.place(piece)[:2] for piece in range(text.pieces)]
    assert pieces == sorted(pieces)
    given_bytes = [at for start, end in pieces for at in range(start, end)]
    assert len(given_bytes) == len(set(given_bytes))
    assert set(given_bytes) >= have, "and what is damaged without a copy"
    assert sum(span.end - span.start for _, span in text.spans()) == len(given_bytes)
    items = list(copies.read(0, None))
    assert b"".join(item for item in items if isinstance(item, bytes)) == good
    assert {at for item in items if isinstance(item, Gap) for at in range(item.start, item.end)} == set(gaps)


# -- bounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["in order", "two lives", "all at once"])
def test_many_frames_are_rows(order: str) -> None:
    """A frame costs some fifty bytes, and a few times that while they are put in order, however they overlap."""
    count = 60_000
    tracemalloc.start()
    try:
        text = Text(NAME)
        for at in range(count):
            offset = {"in order": at, "two lives": at % (count // 2), "all at once": at // 2}[order]
            text.place_row(0, offset, offset + (1 if order == "in order" else 1000), at, 1, 1)
        text.settle()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 150 * count
    assert text.pieces


def test_a_clock_that_is_none() -> None:
    """A time that fits no row, which a node may have told, costs the time and not the run."""
    text = Text(NAME)
    text.add(0, Placed(*NAME, 0, 1, 0, 1, 2**63, 1))
    text.settle()
    assert text.wall_ns(0) == 0
