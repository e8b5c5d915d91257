"""Finishing, with a real log Redis and a store in memory."""

import itertools
import random
from pathlib import Path
from typing import Any

import blake3
import msgspec
import pytest
import redis
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from trainarchive import keys, manifest, reaping, sealing, shelf
from trainarchive.contents import Contents
from trainarchive.coverage import DAMAGED_IN_STORE, NEVER_ARRIVED, NOT_IN_STORE, Text
from trainarchive.finishing import FINISHED, finish
from trainarchive.frame import Framer, gap_frame
from trainarchive.manifest import Generation, Manifest
from trainarchive.run import Gap, Job, Kind, Lane, LaneReport, RunKey, Source
from trainarchive.segment import Entry, Placed, build, frames_of
from trainarchive.settings import Finish, Seal, Settings
from trainarchive.store.memory import MemoryStore
from trainarchive.stream import Append, Outcome, State, Stream

RUN = RunKey("c", 7)
JOB = Job(1000, "ann", nodes="n[1-2]", num_nodes=2, started=1000.0)
ENDED = msgspec.structs.replace(JOB, ended=1100.0, exit_code="0:0", derived_exit_code="0:0")
CONFIG = Settings(home=Path("/nowhere"), seal=Seal(lease_s=30.0))
AT_ONCE = msgspec.structs.replace(CONFIG, finish=Finish(deadline_s=0.0))
UNMERGED = msgspec.structs.replace(CONFIG, seal=Seal(lease_s=30.0, merge_below_mib=0))


class KilledError(Exception):
    """Stands for a worker that dies here."""


class Node:
    """A pretend collector: one lane with one source."""

    def __init__(
        self,
        stream: Stream,
        node: str,
        token: str = "s1",  # noqa: S107 - a lane's token is no secret
        *,
        run: RunKey = RUN,
        job: Job = JOB,
        **source: Any,
    ) -> None:
        self.stream = stream
        self.lane = Lane(run, node, token)
        self.source = Source(f"{node}-a", node, Kind.TASK, f"/out/{node}.log", **source)
        self.offset = 0
        self.job = job
        stream.open(self.lane, LaneReport(self.job), [self.source])

    def write(self, text: bytes, *, generation: int = 0, at: int | None = None) -> None:
        """Send some text."""
        frame = Framer().frame(self.offset if at is None else at, text, 5000 + self.offset, 1)
        (answer,) = self.stream.append([Append(self.lane, self.source.id, generation, [frame])])
        assert answer.outcome is Outcome.OK
        self.offset = frame.end

    def lose(self, size: int, reason: str) -> None:
        """Send a gap."""
        frame = gap_frame(self.offset, self.offset + size, 1, 1, reason)
        self.stream.append([Append(self.lane, self.source.id, 0, [frame])])
        self.offset += size

    def done(self, job: Job = ENDED) -> None:
        """Say that all was sent."""
        self.stream.report(self.lane, LaneReport(job, drained=True, drained_at=1101.0))

    @property
    def state(self) -> State:
        """The lane's state."""
        found = self.stream.status(self.lane)
        assert found is not None
        return found.state


def text_of(store: MemoryStore, book: Manifest, source: str, generation: int = 0) -> bytes:
    """Read a generation's text by nothing but the manifest and its parts."""
    pieces: dict[int, bytes] = {}
    for part in book.parts:
        body = store.get(part.key)
        assert (len(body), blake3.blake3(body).hexdigest()) == (part.size, part.blake3)
        spans = [
            (span.start, span.end) for span in part.spans if (span.source, span.generation) == (source, generation)
        ]
        for entry in frames_of(body, shelf.index_of(body, part.key)):
            if (entry.source, entry.generation) == (source, generation) and not entry.frame.gap:
                text = entry.frame.text()
                for start, end in spans:
                    low, high = max(start, entry.frame.offset), min(end, entry.frame.end)
                    if low < high:
                        pieces[low] = max(
                            pieces.get(low, b""), text[low - entry.frame.offset : high - entry.frame.offset], key=len
                        )
    joined = b""
    for start in sorted(pieces):
        joined += pieces[start]
    return joined


def generation_of(book: Manifest, source: str, number: int = 0) -> Generation:
    """Return one generation's entry."""
    (entry,) = [entry for entry in book.sources if entry.source.id == source]
    return next(each for each in entry.generations if each.number == number)


def digest(text: bytes) -> str:
    """Return the text's BLAKE3."""
    return blake3.blake3(text).hexdigest()


def test_a_whole_run(stream: Stream) -> None:
    """Two nodes' text ends in a complete manifest that says all there is to say, and the nodes may forget it."""
    store = MemoryStore()
    one = Node(stream, "n1", array_job_id=111, array_task_id=2)
    two = Node(stream, "n2", het_job_id=200, het_offset=1)
    one.write(b"hello\n")
    one.write(b"world\n")
    two.write(b"second\n")
    assert finish(stream, store, RUN, CONFIG) == ()
    one.done()
    assert finish(stream, store, RUN, CONFIG) == ()
    two.done()
    (book,) = finish(stream, store, RUN, CONFIG)
    assert book == manifest.newest(store, RUN)
    assert (book.number, book.run, book.complete) == (1, RUN, True)
    assert (book.state, book.state_from, book.exit_code) == ("COMPLETED", "epilog", "0:0")
    assert (book.started, book.ended) == (1000.0, 1100.0)
    assert [(node.node, node.state, node.tokens) for node in book.nodes] == [
        ("n1", "drained", ("s1",)),
        ("n2", "drained", ("s1",)),
    ]
    assert [entry.source for entry in book.sources] == [one.source, two.source]
    assert generation_of(book, "n1-a") == Generation(0, 12, digest(b"hello\nworld\n"), 5000, 5006)
    assert text_of(store, book, "n1-a") == b"hello\nworld\n"
    assert text_of(store, book, "n2-a") == b"second\n"
    assert book.aliases == ("111_2", "200+1")
    assert manifest.aliased(store, "c", "111_2") == manifest.aliased(store, "c", "200+1") == [RUN]
    assert (one.state, two.state) == (State.ARCHIVED, State.ARCHIVED)
    # Small, so it is one part; its segments wait for their deletion.
    assert len(book.parts) == 1
    assert set(book.replaces) == {info.key for info in store.list("live/")}


def test_nothing_new_writes_nothing(stream: Stream) -> None:
    """A second finish of an unchanged run leaves the books alone."""
    store = MemoryStore()
    node = Node(stream, "n1")
    for piece in (b"x", b"y"):
        node.write(piece)
        sealing.seal(stream, store, node.lane, CONFIG.seal)
    node.done(msgspec.structs.replace(ENDED, nodes="n1"))
    (book,) = finish(stream, store, RUN, CONFIG)
    before = [info.key for info in store.list("")]

    class Merged(MemoryStore):
        """Shows that replaced segments are no more looked at."""

        def get_range(self, key: str, start: int, length: int) -> bytes:
            assert not key.startswith("live/")
            return super().get_range(key, start, length)

    watched = Merged()
    watched._objects = store._objects
    assert finish(stream, watched, RUN, CONFIG) == (book,)
    assert [info.key for info in store.list("")] == before


def test_deadline(stream: Stream) -> None:
    """After the deadline the manifest says which node is open and which never came; late bytes make the next one."""
    store = MemoryStore()
    three = msgspec.structs.replace(ENDED, nodes="n[1-3]", num_nodes=3)
    running = msgspec.structs.replace(three, ended=0.0, exit_code="", derived_exit_code="")
    one, two = Node(stream, "n1", job=running), Node(stream, "n2", job=running)
    one.write(b"one")
    two.write(b"tw")
    one.done(three)
    (book,) = finish(stream, store, RUN, AT_ONCE)
    assert not book.complete
    assert [(node.node, node.state) for node in book.nodes] == [("n1", "drained"), ("n2", "open"), ("n3", "missing")]
    assert text_of(store, book, "n2-a") == b"tw"
    assert (one.state, two.state) == (State.ARCHIVED, State.OPEN)
    status = stream.status(two.lane)
    assert status is not None
    assert status.control[FINISHED].startswith("open ")
    two.write(b"o")
    two.done(three)
    Node(stream, "n3").done(three)
    (later,) = finish(stream, store, RUN, CONFIG)
    assert (later.number, later.complete) == (2, True)
    assert text_of(store, later, "n2-a") == b"two"
    assert generation_of(later, "n2-a").blake3 == digest(b"two")
    assert generation_of(later, "n1-a") == generation_of(book, "n1-a")
    assert two.state is State.ARCHIVED
    assert manifest.newest(store, RUN) == later


def test_gaps(stream: Stream) -> None:
    """What is missing stands in the manifest with its reason, and the digest is of the bytes that are there."""
    store = MemoryStore()
    node = Node(stream, "n1")
    node.write(b"abc")
    node.lose(10, "over the ceiling")
    node.write(b"def")
    node.lose(4, "unlinked")
    node.write(b"new", generation=1, at=0)
    node.done(msgspec.structs.replace(ENDED, nodes="n1"))
    (book,) = finish(stream, store, RUN, CONFIG)
    assert generation_of(book, "n1-a") == Generation(
        0, 20, digest(b"abcdef"), 5000, 5013, (Gap(0, 3, 13, "over the ceiling"), Gap(0, 16, 20, "unlinked"))
    )
    assert generation_of(book, "n1-a", 1).blake3 == digest(b"new")
    assert text_of(store, book, "n1-a") == b"abcdef"


def test_a_floor_without_objects(stream: Stream) -> None:
    """Bytes that a node believes stored, and that are not, are a gap that says so."""
    store = MemoryStore()
    node = Node(stream, "n1")
    frame = Framer().frame(100, b"tail", 1, 1)
    stream.append([Append(node.lane, node.source.id, 0, [frame], floor=100)])
    node.done(msgspec.structs.replace(ENDED, nodes="n1"))
    (book,) = finish(stream, store, RUN, CONFIG)
    assert generation_of(book, "n1-a").gaps == (Gap(0, 0, 100, NEVER_ARRIVED),)
    assert node.state is State.ARCHIVED


def test_redis_lost_its_memory(stream: Stream, redis_url: str) -> None:
    """Segments of two epochs overlap; the text is whole and each byte is taken once."""
    store = MemoryStore()
    node = Node(stream, "n1")
    node.write(b"abcdef")
    assert sealing.seal(stream, store, node.lane, CONFIG.seal) is not None
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        client.flushall()
    # It knew only of 2 sealed bytes, so it sends from there.
    again = Node(stream, "n1")
    stream.append([Append(again.lane, again.source.id, 0, [Framer().frame(2, b"cdefgh", 9, 9)], floor=2)])
    again.done(msgspec.structs.replace(ENDED, nodes="n1"))
    (book,) = finish(stream, store, RUN, UNMERGED)
    assert generation_of(book, "n1-a") == Generation(0, 8, digest(b"abcdefgh"), 5000, 9)
    assert [[(span.start, span.end) for span in part.spans] for part in book.parts] == [[(0, 6)], [(6, 8)]]
    assert text_of(store, book, "n1-a") == b"abcdefgh"


def test_exit_codes(stream: Stream) -> None:
    """A failed step counts though the script exits 0; without any Epilog the state is unknown."""
    store = MemoryStore()
    for number, (exit_code, derived, state) in enumerate(
        [("0:0", "5:0", "FAILED"), ("1:0", "0:0", "FAILED"), ("0:9", "", "FAILED"), ("", "", "UNKNOWN")]
    ):
        run = RunKey("c", 100 + number)
        node = Node(stream, "n1", run=run)
        node.done(msgspec.structs.replace(ENDED, nodes="n1", exit_code=exit_code, derived_exit_code=derived))
        (book,) = finish(stream, store, run, CONFIG)
        assert (book.state, book.state_from) == (state, "epilog")


def test_the_key_came_back(stream: Stream) -> None:
    """Another job with the same key is the next generation, with books of its own."""
    store = MemoryStore()
    first = Node(stream, "n1", "s1")
    first.write(b"first")
    first.done(msgspec.structs.replace(ENDED, nodes="n1"))
    (book,) = finish(stream, store, RUN, CONFIG)
    second = Node(stream, "n1", "s2")
    second.write(b"second")
    second.done(msgspec.structs.replace(ENDED, nodes="n1", started=2000.0, ended=2100.0))
    finish(stream, store, RUN, CONFIG)
    other = manifest.newest(store, RunKey("c", 7, 0, 1))
    assert other is not None
    assert text_of(store, other, "n1-a") == b"second"
    assert manifest.newest(store, RUN) == book
    assert manifest.generations(store, RUN) == [RUN, RunKey("c", 7, 0, 1)]


def test_tokens_by_time(stream: Stream) -> None:
    """Nodes without SLUIDs are one run if they began before it ended, and the next one if later."""
    store = MemoryStore()
    one, two = Node(stream, "n1", "t1000"), Node(stream, "n2", "t1003")
    for node in (one, two):
        node.write(b"x")
        node.done()
    (book,) = finish(stream, store, RUN, CONFIG)
    assert [node.tokens for node in book.nodes] == [("t1000",), ("t1003",)]
    late = Node(stream, "n3", "t1150")
    late.write(b"late")
    late.done()
    (book,) = finish(stream, store, RUN, CONFIG)
    assert (book.number, book.run.generation) == (2, 0)
    new = Node(stream, "n1", "t5000")
    new.write(b"new")
    new.done(msgspec.structs.replace(ENDED, nodes="n1", started=5000.0, ended=5100.0))
    books = finish(stream, store, RUN, CONFIG)
    assert [each.run.generation for each in books] == [0, 1]


def test_hostile_node_lists(stream: Stream) -> None:
    """A host list that would be millions of nodes, or none at all, is passed over."""
    store = MemoryStore()
    node = Node(stream, "n1")
    node.done(msgspec.structs.replace(ENDED, nodes="n[1-9999999]"))
    (book,) = finish(stream, store, RUN, CONFIG)
    assert [entry.node for entry in book.nodes] == ["n1"]


def test_rot_in_the_store(stream: Stream) -> None:
    """A frame that rotted in the store is a gap; a segment that cannot be read at all is named in the gap's reason."""
    store = MemoryStore()
    node = Node(stream, "n1")
    for piece in (b"abc" * 100, b"def" * 100, b"ghi" * 100):
        node.write(piece)
        sealing.seal(stream, store, node.lane, CONFIG.seal)
    first, second, _ = [info.key for info in store.list("live/")]
    body = bytearray(store.get(first))
    body[12] ^= 255
    store.put(first, bytes(body))
    store.put(second, b"rubbish")
    node.done(msgspec.structs.replace(ENDED, nodes="n1"))
    (book,) = finish(stream, store, RUN, CONFIG)
    gaps = generation_of(book, "n1-a").gaps
    assert [(gap.start, gap.end) for gap in gaps] == [(0, 300), (300, 600)]
    assert gaps[0].reason == DAMAGED_IN_STORE
    assert second in gaps[1].reason
    assert generation_of(book, "n1-a").blake3 == digest(b"ghi" * 100)
    # Nothing is merged away, and thereby deleted, that could not be read.
    assert book.replaces == ()


STEPS = ("listed", "claimed", "stored", "committed", "sealed", "read", "digested", "merged", "written", "aliased")


@pytest.mark.parametrize("step", STEPS)
def test_killed_and_run_again(stream: Stream, step: str) -> None:
    """Killed at any step and run again, finishing comes to the same end."""
    store = MemoryStore()
    one, two = Node(stream, "n1", array_job_id=7, array_task_id=1), Node(stream, "n2")
    one.write(b"one")
    sealing.seal(stream, store, one.lane, CONFIG.seal)
    one.write(b" more")
    two.write(b"two")
    one.done()
    two.done()
    # A killed worker's lock and claim end by themselves: here at once.
    quick = msgspec.structs.replace(CONFIG, seal=Seal(lease_s=0.001))

    def die(at: str) -> None:
        if at == step:
            raise KilledError

    with pytest.raises(KilledError):
        finish(stream, store, RUN, quick, at=die)
    books: tuple[Manifest, ...] = ()
    for _ in range(100):
        books = finish(stream, store, RUN, CONFIG)
        if books:
            break
    (book,) = books
    assert book.complete
    assert text_of(store, book, "n1-a") == b"one more"
    assert text_of(store, book, "n2-a") == b"two"
    assert len(book.parts) == 1
    assert manifest.newest(store, RUN) == book
    assert len(list(store.list(keys.manifest_prefix(RUN)))) == 1
    assert manifest.aliased(store, "c", "7_1") == [RUN]
    assert (one.state, two.state) == (State.ARCHIVED, State.ARCHIVED)


def test_another_worker_was_first(stream: Stream) -> None:
    """Two workers that both think they have the lock: one manifest a number, and the loser looks again."""
    store = MemoryStore()
    node = Node(stream, "n1")
    node.write(b"abc")
    node.done(msgspec.structs.replace(ENDED, nodes="n1"))
    inner: list[Manifest] = []
    lost = msgspec.structs.replace(CONFIG, seal=Seal(lease_s=0.001))

    def meanwhile(at: str) -> None:
        while at == "digested" and not inner:
            inner.extend(finish(stream, store, RUN, CONFIG))

    (book,) = finish(stream, store, RUN, lost, at=meanwhile)
    assert inner == [book]
    assert len(list(store.list(keys.manifest_prefix(RUN)))) == 1


def test_reap(stream: Stream) -> None:
    """Replaced segments are deleted an hour after the manifest, not before; what is listed stays."""
    store = MemoryStore()
    node = Node(stream, "n1")
    for piece in (b"abc", b"def"):
        node.write(piece)
        sealing.seal(stream, store, node.lane, CONFIG.seal)
    assert reaping.reap(store, RUN, 0.0) == reaping.Reaped()
    node.done(msgspec.structs.replace(ENDED, nodes="n1"))
    (book,) = finish(stream, store, RUN, CONFIG)
    stray = keys.part_key(RUN, "f" * 64)
    store.put(stray, b"a part of a worker that was killed")
    assert reaping.reap(store, RUN, 3600.0).deleted == ()
    assert reaping.reap(store, RUN, 3600.0, now=book.written + 3599).deleted == ()
    assert set(reaping.reap(store, RUN, 3600.0, now=book.written + 3700).deleted) == {*book.replaces, stray}
    assert reaping.reap(store, RUN, 3600.0, now=book.written + 3700).deleted == ()
    assert text_of(store, book, "n1-a") == b"abcdef"
    assert list(store.list("live/")) == []
    # Late bytes after that still find all that is there.
    node.stream.open(node.lane, LaneReport(node.job), [node.source])
    node.write(b"ghi")
    node.done(msgspec.structs.replace(ENDED, nodes="n1"))
    (later,) = finish(stream, store, RUN, CONFIG)
    assert text_of(store, later, "n1-a") == b"abcdefghi"
    assert generation_of(later, "n1-a").blake3 == digest(b"abcdefghi")


def test_forgotten_segments(stream: Stream, redis_url: str) -> None:
    """Segments of a run that Redis forgot are found by upkeep and finished from the store alone."""
    store = MemoryStore()
    node = Node(stream, "n1")
    node.write(b"abc")
    sealing.seal(stream, store, node.lane, CONFIG.seal)
    (info,) = store.list("live/")
    assert not reaping.reap(store, RUN, 3600.0, now=info.modified + 3700).forgotten
    assert reaping.reap(store, RUN, 3600.0, now=info.modified + 90_000).forgotten
    other = Stream(redis_url.replace("db=0", "db=9"), timeout_s=5.0, max_pending=1)
    (book,) = finish(other, store, RUN, CONFIG)
    other.close()
    assert not book.complete
    assert text_of(store, book, "n1-a") == b"abc"
    assert not reaping.reap(store, RUN, 3600.0, now=info.modified + 90_000).forgotten


def test_a_stolen_source_id(stream: Stream) -> None:
    """A node that sends text under another node's source id does not get into that node's text."""
    store = MemoryStore()
    honest, thief = Node(stream, "n1"), Node(stream, "n2")
    honest.write(b"honest")
    sealing.seal(stream, store, honest.lane, CONFIG.seal)
    stream.describe(thief.lane, [msgspec.structs.replace(honest.source, node="n1")])
    frame = Framer().frame(0, b"forged, and longer", 1, 1)
    stream.append([Append(thief.lane, honest.source.id, 0, [frame])])
    honest.done()
    thief.done()
    (book,) = finish(stream, store, RUN, CONFIG)
    assert text_of(store, book, "n1-a") == b"honest"
    assert generation_of(book, "n1-a") == Generation(0, 6, digest(b"honest"), 5000, 5000)


def test_each_object_is_read_once(stream: Stream) -> None:
    """A long run's segments are read in stream order, one at a time and once each, whatever its sources do."""

    class Counting(MemoryStore):
        """Keeps the keys of whole objects that were read."""

        def get(self, key: str) -> bytes:
            body = super().get(key)
            reads.append(key)
            return body

        def get_range(self, key: str, start: int, length: int) -> bytes:
            body = super().get(key)
            return body[start:] if start < 0 else body[start : start + length]

    reads: list[str] = []
    store = Counting()
    node = Node(stream, "n1")
    stream.describe(node.lane, [Source("n1-b", "n1", Kind.TASK, "/out/b")])
    for number in range(6):
        node.write(b"several ")
        node.write(b"frames ")
        if number % 2:
            frame = Framer().frame(number // 2, b"b", 1, 1)
            stream.append([Append(node.lane, "n1-b", 0, [frame])])
        sealing.seal(stream, store, node.lane, CONFIG.seal)
    node.done(msgspec.structs.replace(ENDED, nodes="n1"))
    (book,) = finish(stream, store, RUN, UNMERGED)
    assert reads == [part.key for part in book.parts]
    assert generation_of(book, "n1-a").blake3 == digest(b"several frames " * 6)


frames = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(1, 12), st.sampled_from(["", "", "", "lost"])),
    max_size=25,
)


@given(frames, st.integers(0, 60))
def test_every_byte_once(found: list[tuple[int, int, int, str]], sealed: int) -> None:
    """Pieces and gaps together are each byte from 0 to the size once; data wins over gaps."""
    text = Text(("a", 0))
    for number, offset, size, gap in found:
        text.add(number, Placed("a", 0, offset, size, 0, 0, 0, 0, gap))
    text.settle(sealed)
    kinds: list[str] = [""] * text.size
    for piece in range(text.pieces):
        start, end, _ = text.place(piece)
        for at in range(start, end):
            assert kinds[at] == ""
            kinds[at] = "data"
    for hole in text.gaps:
        assert hole.start < hole.end
        for at in range(hole.start, hole.end):
            assert kinds[at] == ""
            kinds[at] = hole.reason
    for at, kind in enumerate(kinds):
        covering = {gap for _, offset, size, gap in found if offset <= at < offset + size}
        known_to = max([offset + size for _, offset, size, _ in found], default=0)
        expected = NEVER_ARRIVED if at < known_to else NOT_IN_STORE
        assert kind == ("data" if "" in covering else "lost" if covering else expected)
    assert [span for _, span in text.spans() if span.start >= span.end] == []
    assert sum(span.end - span.start for _, span in text.spans()) == kinds.count("data")


@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    objects = []
    lane = Lane(RUN, "n1", "s1")
    for number, (start, end) in enumerate(ranges):
        entries = [
            Entry("n1-a", 0, Framer().frame(offsets[at], pieces[at], 1, 1))
            for at in range(start, min(end, len(pieces)))
        ]
        body, name = build({lane.name: LaneReport(JOB)}, {"n1-a": Source("n1-a", "n1", Kind.TASK, "x")}, entries)
        key = keys.segment_key(lane, "e", f"{number}-0", f"{number}-1", name)
        store.put(key, body)
        objects.append(shelf.Shelved(key, len(body), lane))
    found = Contents(store, objects, lambda: None)
    found.settle({})
    text = b"".join(pieces)
    generation = found.generations(None)["n1-a", 0]
    assert (generation.size, generation.blake3, generation.gaps) == (len(text), digest(text), ())
