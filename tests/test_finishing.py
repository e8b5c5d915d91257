"""Finishing, with a real log Redis and a store in memory."""

import time

import msgspec
import pytest
import redis
from conftest import MAX_PENDING, StartRedis
from tests_lane import (
    AT_ONCE,
    CONFIG,
    ENDED,
    JOB,
    RUN,
    UNMERGED,
    KilledError,
    Node,
    alone,
    digest,
    forget,
    generation_of,
    text_of,
)

from trainarchive import keys, manifest, reaping, sealing
from trainarchive.contents import GONE
from trainarchive.coverage import DAMAGED_IN_STORE, NEVER_ARRIVED, NOT_IN_STORE
from trainarchive.errors import UnavailableError
from trainarchive.finishing import FINISHED, finish
from trainarchive.frame import Framer
from trainarchive.manifest import Generation, Manifest
from trainarchive.reading import find
from trainarchive.run import Gap, Kind, LaneReport, RunKey, Source
from trainarchive.segment import Entry, build
from trainarchive.settings import Finish, Seal
from trainarchive.store.memory import MemoryStore
from trainarchive.stream import Append, State, Stream
from trainarchive.stream.names import LaneKeys


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
    node.done(msgspec.structs.replace(ENDED, nodes="n[1-9999999]", num_nodes=1))
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


def test_a_file_never_becomes_shorter(stream: Stream, redis_url: str) -> None:
    """What a manifest said to be there, and the store lost, is a gap with that reason in all later ones."""
    store = MemoryStore()
    one, two = Node(stream, "n1"), Node(stream, "n2")
    for piece in (b"abc", b"def", b"ghi", b"jkl"):
        one.write(piece)
        sealing.seal(stream, store, one.lane, CONFIG.seal)
    one.done()
    two.done()
    (first,) = finish(stream, store, RUN, UNMERGED)
    segments = [part.key for part in first.parts]
    store.delete(segments[1])
    store.delete(segments[3])
    forget(redis_url)
    late = Node(stream, "n2")
    late.write(b"late")
    late.done()
    (second,) = finish(stream, store, RUN, UNMERGED)
    assert (second.number, second.complete) == (2, True)
    lost = (Gap(0, 3, 6, GONE), Gap(0, 9, 12, GONE))
    assert generation_of(second, "n1-a") == Generation(0, 12, digest(b"abcghi"), 5000, 5006, lost)
    assert text_of(store, second, "n1-a") == b"abcghi"
    # Merged, all of it is lost; the files stay in the books.
    (third,) = finish(stream, store, RUN, CONFIG)
    assert generation_of(third, "n1-a") == generation_of(second, "n1-a")
    (part,) = third.parts
    store.delete(part.key)
    forget(redis_url)
    Node(stream, "n2").done()
    (fourth,) = finish(stream, store, RUN, CONFIG)
    assert generation_of(fourth, "n1-a") == Generation(0, 12, digest(b""), 0, 0, (Gap(0, 0, 12, GONE),))
    assert generation_of(fourth, "n2-a").gaps == (Gap(0, 0, 4, GONE),)
    assert finish(stream, store, RUN, CONFIG) == (fourth,)


def test_what_redis_said_to_be_stored_stays_said(stream: Stream, redis_url: str) -> None:
    """A gap of bytes that only Redis knew of does not end when Redis forgets them: the file would seem shorter."""
    store = MemoryStore()
    one, two = Node(stream, "n1"), Node(stream, "n2")
    one.write(b"abc")
    sealing.drain(stream, store, one.lane, CONFIG.seal)
    (info,) = store.list("live/")
    store.delete(info.key)
    one.done()
    two.done()
    (first,) = finish(stream, store, RUN, CONFIG)
    assert generation_of(first, "n1-a").gaps == (Gap(0, 0, 3, NOT_IN_STORE),)
    forget(redis_url)
    late = Node(stream, "n2")
    late.write(b"late")
    late.done()
    (second,) = finish(stream, store, RUN, CONFIG)
    assert generation_of(second, "n1-a") == generation_of(first, "n1-a")


@pytest.mark.parametrize("thief_node", ["a1", "n2"])
def test_a_forged_segment(stream: Stream, redis_url: str, thief_node: str) -> None:
    """Whatever a node sends, and whichever of two nodes comes first, each has its own text and is let go."""
    store = MemoryStore()
    job = msgspec.structs.replace(ENDED, nodes=f"n1,{thief_node}")
    honest, thief = Node(stream, "n1", job=job), Node(stream, thief_node, job=job)
    honest.write(b"honest")
    thief.write(b"own")
    stream.describe(thief.lane, [msgspec.structs.replace(honest.source, node=thief_node)])
    stream.append([Append(thief.lane, honest.source.id, 0, [Framer().frame(0, b"forged, and longer", 1, 1)])])
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        client.xadd(LaneKeys.of(thief.lane).frames, {"s": "x"})
    honest.done(job)
    thief.done(job)
    (book,) = finish(stream, store, RUN, CONFIG)
    assert text_of(store, book, "n1-a") == b"honest"
    assert text_of(store, book, f"{thief_node}-a") == b"own"
    assert generation_of(book, "n1-a") == Generation(0, 6, digest(b"honest"), 5000, 5000)
    assert [entry.source.node for entry in book.sources if entry.source.id == "n1-a"] == ["n1"]
    assert (book.complete, honest.state, thief.state) == (True, State.ARCHIVED, State.ARCHIVED)
    notes = {entry.node: entry.report.notes for entry in book.nodes if entry.report is not None}
    assert notes == {"n1": (), thief_node: (f"2 {sealing.DROPPED}",)}


def test_a_job_that_redis_forgot(stream: Stream, redis_url: str) -> None:
    """Another job with its key, months later, is not taken for it: its segments tell that it had ended."""
    store = MemoryStore()
    first = Node(stream, "n1", "t1000")
    first.write(b"first job")
    first.done(alone())
    sealing.drain(stream, store, first.lane, CONFIG.seal)
    forget(redis_url)
    second = Node(stream, "n1", "t9000000")
    second.write(b"second")
    second.done(alone(msgspec.structs.replace(ENDED, started=9e6, ended=9.1e6)))
    books = finish(stream, store, RUN, CONFIG)
    assert [text_of(store, book, "n1-a") for book in books] == [b"first job", b"second"]
    assert [book.run.generation for book in books] == [0, 1]
    forget(redis_url)
    assert [find(store, stream, f"c/7.0{number}")[0].manifest for number in ("~1", "")] == [books[1], books[0]]


def test_the_state_does_not_go_back(stream: Stream, redis_url: str) -> None:
    """Late bytes of a node that knows less take nothing away of what the others have said."""
    store = MemoryStore()
    bad = msgspec.structs.replace(ENDED, exit_code="1:0", derived_exit_code="1:0")
    one, two = Node(stream, "n1"), Node(stream, "n2")
    for node in (one, two):
        node.write(b"abcd")
    one.done(bad)
    (first,) = finish(stream, store, RUN, AT_ONCE)
    reaping.reap(store, RUN, 3600.0, now=first.written + 3700)
    forget(redis_url)
    late = Node(stream, "n2")
    stream.append([Append(late.lane, late.source.id, 0, [Framer().frame(4, b"late", 1, 1)], floor=4)])
    late.done(msgspec.structs.replace(JOB, started=1500.0))
    (second,) = finish(stream, store, RUN, AT_ONCE)
    assert second.number == 2
    assert (first.state, first.exit_code, first.started, first.ended) == ("FAILED", "1:0", 1000.0, 1100.0)
    assert (second.state, second.exit_code, second.started, second.ended) == ("FAILED", "1:0", 1000.0, 1100.0)
    assert second.complete


def test_nodes_that_are_only_counted(stream: Stream) -> None:
    """Without a host list, the number of nodes says whether the manifest is complete, and whether it is time."""
    store = MemoryStore()
    job = msgspec.structs.replace(ENDED, nodes="", num_nodes=2)
    Node(stream, "n1", job=job).done(job)
    assert finish(stream, store, RUN, CONFIG) == ()
    (book,) = finish(stream, store, RUN, AT_ONCE)
    assert not book.complete
    Node(stream, "n2", job=job).done(job)
    (later,) = finish(stream, store, RUN, CONFIG)
    assert (later.number, later.complete) == (2, True)


def test_what_a_segment_knows_after_the_manifest(stream: Stream, redis_url: str) -> None:
    """A node's last word may be in a segment only: it counts, though the last manifest had the node open."""
    store = MemoryStore()
    one, two = Node(stream, "n1"), Node(stream, "n2")
    one.done()
    two.write(b"a")
    (first,) = finish(stream, store, RUN, AT_ONCE)
    assert not first.complete
    two.write(b"b")
    two.done(msgspec.structs.replace(ENDED, ended=1200.0))
    sealing.drain(stream, store, two.lane, CONFIG.seal)
    forget(redis_url)
    (second,) = finish(stream, store, RUN, CONFIG)
    assert [(entry.node, entry.state) for entry in second.nodes] == [("n1", "drained"), ("n2", "drained")]
    assert (second.complete, second.ended, text_of(store, second, "n2-a")) == (True, 1200.0, b"ab")
    assert finish(stream, store, RUN, CONFIG) == ()


def test_a_node_that_goes_on_writing(stream: Stream) -> None:
    """A late finish ends although a node writes all the time; what it wrote meanwhile makes the next manifest."""
    store = MemoryStore()
    one, two = Node(stream, "n1"), Node(stream, "n2")
    one.done()
    two.write(b"x")

    def write(at: str) -> None:
        assert two.offset < 1000, "it never ends"
        if at in {"claimed", "stored", "committed", "read", "digested"}:
            two.write(b"x")

    (book,) = finish(stream, store, RUN, AT_ONCE, at=write)
    assert not book.complete
    status = stream.status(two.lane)
    assert status is not None
    assert status.last_append - 60 < float(status.control[FINISHED].split()[1]) < status.last_append
    two.done()
    (later,) = finish(stream, store, RUN, CONFIG)
    assert (later.number, later.complete, generation_of(later, "n2-a").size) == (2, True, two.offset)


def test_late_bytes_keep_their_lane(stream: Stream) -> None:
    """Bytes that came and were sealed while the manifest was made are in none yet: the node is not told otherwise."""
    store = MemoryStore()
    node = Node(stream, "n1")
    node.write(b"abc")
    node.done(alone())

    def heal(at: str) -> None:
        if at == "digested" and node.offset == 3:
            node.write(b"def")
            node.done(alone())
            sealing.drain(stream, store, node.lane, CONFIG.seal)

    (book,) = finish(stream, store, RUN, CONFIG, at=heal)
    assert generation_of(book, "n1-a").size == 3
    assert str(node.state) == "drained"
    (later,) = finish(stream, store, RUN, CONFIG)
    assert text_of(store, later, "n1-a") == b"abcdef"
    assert node.state is State.ARCHIVED


def test_a_run_whose_nodes_all_died(stream: Stream) -> None:
    """After a long silence there is a manifest without a word of an end; should a node live, more come."""
    store = MemoryStore()
    node = Node(stream, "n1", job=alone(JOB))
    node.write(b"abc")
    assert finish(stream, store, RUN, CONFIG) == ()
    silent = msgspec.structs.replace(CONFIG, finish=Finish(deadline_s=0.0, silence_s=0.0))
    (book,) = finish(stream, store, RUN, silent)
    assert (book.complete, book.state, [entry.state for entry in book.nodes]) == (False, "UNKNOWN", ["open"])
    assert text_of(store, book, "n1-a") == b"abc"
    assert finish(stream, store, RUN, silent) == (book,)
    node.write(b"def")
    node.done(alone())
    (later,) = finish(stream, store, RUN, CONFIG)
    assert (later.number, later.complete, text_of(store, later, "n1-a")) == (2, True, b"abcdef")


def test_redis_goes_away_meanwhile(start_redis: StartRedis) -> None:
    """A Redis that dies in the middle costs what is to be told to it, and not the manifest."""
    server, store = start_redis(), MemoryStore()
    door = Stream(server.url, timeout_s=5.0, max_pending=MAX_PENDING)
    node = Node(door, "n1")
    node.write(b"abc")
    node.done(alone())

    def die(at: str) -> None:
        if at == "sealed":
            server.process.kill()
            server.process.wait()

    hasty = msgspec.structs.replace(CONFIG, seal=Seal(lease_s=0.001))
    with pytest.raises(UnavailableError):
        finish(door, store, RUN, hasty, at=die)
    book = manifest.newest(store, RUN)
    assert book is not None
    assert (book.complete, text_of(store, book, "n1-a")) == (True, b"abc")
    assert book.written == pytest.approx(time.time(), abs=60)
    door.close()


def test_a_part_that_the_store_garbles(stream: Stream) -> None:
    """Segments are given up for a merged part only if it reads back as the same text."""

    class Garbling(MemoryStore):
        """Changes a byte of every part."""

        def put(self, key: str, body: bytes) -> None:
            if "/parts/" in key:
                body = body[:12] + bytes([body[12] ^ 255]) + body[13:]
            super().put(key, body)

    store = Garbling()
    node = Node(stream, "n1")
    for piece in (b"abc" * 100, b"def" * 100):
        node.write(piece)
        sealing.seal(stream, store, node.lane, CONFIG.seal)
    node.done(alone())
    (book,) = finish(stream, store, RUN, CONFIG)
    assert [part.level for part in book.parts] == [0, 0]
    assert book.replaces == ()
    assert text_of(store, book, "n1-a") == b"abc" * 100 + b"def" * 100


def test_what_is_damaged_is_not_merged_away(stream: Stream) -> None:
    """A listed segment that cannot be read is not given up, even where others hold all of its bytes."""
    store = MemoryStore()
    node = Node(stream, "n1")
    node.write(b"abcdef")
    sealing.seal(stream, store, node.lane, CONFIG.seal)
    node.write(b"ghi")
    node.done(alone())
    (first,) = finish(stream, store, RUN, UNMERGED)
    damaged = first.parts[0].key
    store.put(damaged, b"rubbish")
    frame = Framer().frame(0, b"abcdef", 9, 9)
    body, name = build({node.lane.name: LaneReport(ENDED)}, {node.source.id: node.source}, [Entry("n1-a", 0, frame)])
    store.put(keys.segment_key(node.lane, "zz", "1-0", "2-0", name), body)
    (second,) = finish(stream, store, RUN, CONFIG)
    assert damaged in [part.key for part in second.parts]
    assert damaged not in second.replaces
    assert (generation_of(second, "n1-a").gaps, generation_of(second, "n1-a").blake3) == ((), digest(b"abcdefghi"))
