"""Sealing, with a real log Redis and a store in memory."""

import itertools
import random
import threading

import msgspec
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainarchive import keys, shelf
from trainarchive.errors import TrainarchiveError
from trainarchive.frame import Frame, Framer, gap_frame
from trainarchive.run import Job, Kind, Lane, LaneReport, RunKey, Source
from trainarchive.sealing import DAMAGED_ON_THE_WAY, DROPPED, Sealed, checked, drain, ready, seal
from trainarchive.segment import frames_of
from trainarchive.settings import Seal
from trainarchive.store.memory import MemoryStore
from trainarchive.stream import Append, LaneStatus, Outcome, State, Stream, StreamEntry
from trainarchive.stream.names import LaneKeys

LIMITS = Seal(lease_s=30.0)
LANE = Lane(RunKey("c", 7), "n1", "s1")
SOURCE = Source("n1-a", "n1", Kind.TASK, "/out/0.log", rank=0)
_numbers = itertools.count(1)


class KilledError(Exception):
    """Stands for a worker that dies here."""


def opened(stream: Stream, lane: Lane = LANE, source: Source = SOURCE) -> None:
    """Make the lane known."""
    stream.open(lane, LaneReport(Job(1000)), [source])


def framed(pieces: list[bytes], offset: int = 0) -> list[Frame]:
    """Frame pieces of text that follow one another."""
    framer = Framer()
    frames = []
    for piece in pieces:
        frames.append(framer.frame(offset, piece, 1000 + offset, 2000 + offset))
        offset += len(piece)
    return frames


def append(
    stream: Stream, frames: list[Frame], lane: Lane = LANE, source: str = SOURCE.id, generation: int = 0
) -> None:
    """Send frames as a node would; they must all be taken."""
    (answer,) = stream.append([Append(lane, source, generation, frames)])
    assert answer.outcome is Outcome.OK


def stored(store: MemoryStore, lane: Lane = LANE) -> dict[tuple[str, int], dict[int, bytes]]:
    """Return all stored text byte by byte; the same byte stored twice must be the same."""
    found: dict[tuple[str, int], dict[int, bytes]] = {}
    for info in store.list(keys.lane_prefix(lane)):
        body = store.get(info.key)
        for entry in frames_of(body, shelf.index_of(body, info.key)):
            if entry.frame.gap:
                continue
            text = found.setdefault((entry.source, entry.generation), {})
            for at, byte in enumerate(entry.frame.text(), entry.frame.offset):
                assert text.setdefault(at, bytes([byte])) == bytes([byte])
    return found


def status(stream: Stream, lane: Lane = LANE) -> LaneStatus:
    """Return the lane's status; it must be known."""
    found = stream.status(lane)
    assert found is not None
    return found


def test_seal(stream: Stream) -> None:
    """What waits becomes one object that says what it holds, and the sealed offset follows."""
    store = MemoryStore()
    opened(stream)
    append(stream, framed([b"one\n", b"two\n"]))
    sealed = seal(stream, store, LANE, LIMITS)
    assert sealed is not None
    assert (sealed.frames, sealed.bad) == (2, 0)
    body = store.get(sealed.key)
    assert len(body) == sealed.size
    index = shelf.index_of(body, sealed.key)
    assert index.lanes == {LANE.name: LaneReport(Job(1000))}
    assert index.sources == {SOURCE.id: SOURCE}
    assert b"".join(entry.frame.text() for entry in frames_of(body, index)) == b"one\ntwo\n"
    now = status(stream)
    assert now.sealed == now.committed == {(SOURCE.id, 0): 8}
    assert now.entries == 0


def test_nothing_to_seal(stream: Stream) -> None:
    """An empty and an unknown lane are no error and make no object."""
    store = MemoryStore()
    assert seal(stream, store, LANE, LIMITS) is None
    opened(stream)
    assert seal(stream, store, LANE, LIMITS) is None
    assert drain(stream, store, LANE, LIMITS) == 0
    assert list(store.list("live/")) == []


def test_only_described_sources_that_occur(stream: Stream) -> None:
    """A segment carries the descriptions of its own sources, with the lane's own node, and of no others."""
    store = MemoryStore()
    opened(stream)
    other = Source("n1-b", "another-node", Kind.TASK, "/out/1.log")
    stream.describe(LANE, [other, Source("n1-c", "n1", Kind.TASK, "/out/2.log")])
    append(stream, framed([b"x"]), source="n1-b")
    sealed = seal(stream, store, LANE, LIMITS)
    assert sealed is not None
    index = shelf.index_of(store.get(sealed.key), sealed.key)
    assert index.sources == {"n1-b": msgspec.structs.replace(other, node="n1")}


def test_a_segment_is_about_as_large_as_told(stream: Stream) -> None:
    """A long stream is sealed in several segments; together they hold all of it."""
    store = MemoryStore()
    opened(stream)
    noise = [random.Random(number).randbytes(200_000) for number in range(8)]  # noqa: S311 - no secret
    append(stream, framed(noise))
    limits = Seal(segment_mib=1)
    count = drain(stream, store, LANE, limits)
    bodies = [store.get(info.key) for info in store.list("live/")]
    assert count == len(bodies) == 2
    entries = [entry for body in bodies for entry in frames_of(body, shelf.index_of(body, "a segment"))]
    assert [entry.frame.text() for entry in entries] == noise
    assert status(stream).pending == 0


@pytest.mark.parametrize("step", ["claimed", "taken", "built", "stored"])
def test_killed_at_a_step(stream: Stream, step: str) -> None:
    """A worker that dies before its commit moves no offset; the next one, after the lease, seals the same bytes."""
    store = MemoryStore()
    opened(stream)
    append(stream, framed([b"abc", b"def"]))

    def die(at: str) -> None:
        if at == step:
            raise KilledError

    with pytest.raises(KilledError):
        seal(stream, store, LANE, Seal(lease_s=0.05), at=die)
    assert status(stream).sealed.get((SOURCE.id, 0), 0) == 0
    while seal(stream, store, LANE, LIMITS) is None:
        threading.Event().wait(0.01)
    assert status(stream).sealed == {(SOURCE.id, 0): 6}
    assert stored(store)[SOURCE.id, 0] == {at: bytes([byte]) for at, byte in enumerate(b"abcdef")}


def test_a_late_commit_is_refused(stream: Stream) -> None:
    """A worker that slept past its lease finds its claim taken over and says so; nothing is lost or doubled."""
    store = MemoryStore()
    opened(stream)
    append(stream, framed([b"abc"]))
    inner: list[Sealed] = []

    def sleep(at: str) -> None:
        if at == "stored":
            while not inner:
                threading.Event().wait(0.01)
                other = seal(stream, store, LANE, LIMITS)
                if other is not None:
                    inner.append(other)

    assert seal(stream, store, LANE, Seal(lease_s=0.05), at=sleep) is None
    assert len(inner) == 1
    assert status(stream).sealed == {(SOURCE.id, 0): 3}
    # The same entries under the same claim range give the same object.
    assert len(list(store.list("live/"))) == 1


class Step(msgspec.Struct, frozen=True):
    """One move of the property test: ``who`` goes on to its next step, or dies, or a node appends."""

    who: int
    kind: str
    size: int = 0


class Worker:
    """A sealing worker in a thread that takes one step each time it is told to."""

    def __init__(self, stream: Stream, store: MemoryStore, lane: Lane) -> None:
        self._go = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)
        self._die = False
        self.failure: Exception | None = None
        self.done = False
        self._thread = threading.Thread(target=self._work, args=(stream, store, lane), daemon=True)
        self._thread.start()

    def _pause(self, _: str) -> None:
        self._arrived.release()
        self._go.acquire()
        if self._die:
            raise KilledError

    def _work(self, stream: Stream, store: MemoryStore, lane: Lane) -> None:
        try:
            self._pause("begin")
            # Leases as short as can be: every claim can be taken over at once.
            seal(stream, store, lane, Seal(lease_s=0.001), at=self._pause)
        except KilledError:
            pass
        except Exception as error:  # noqa: BLE001 - the main thread raises it
            self.failure = error
        self.done = True
        self._arrived.release()

    def step(self, *, die: bool = False) -> None:
        """Run on to the next step and wait there."""
        if self.done:
            return
        self._arrived.acquire()
        self._die = die
        self._go.release()
        self._arrived.acquire()
        self._arrived.release()
        if self.failure is not None:
            raise self.failure


steps = st.lists(
    st.one_of(
        st.builds(Step, st.integers(0, 1), st.just("go")),
        st.builds(Step, st.integers(0, 1), st.just("go")),
        st.builds(Step, st.integers(0, 1), st.just("die")),
        st.builds(Step, st.just(0), st.just("append"), st.integers(1, 9)),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=steps)
def test_two_workers_in_any_order(stream: Stream, script: list[Step]) -> None:
    """Whatever two workers do, and wherever they die, every byte ends in the store, and no offset runs ahead of it."""
    lane = Lane(RunKey("c", 7), "n1", f"s{next(_numbers)}")
    store = MemoryStore()
    opened(stream, lane)
    workers: list[Worker | None] = [None, None]
    sent = 0

    def check() -> None:
        text = stored(store, lane).get((SOURCE.id, 0), {})
        sealed = status(stream, lane).sealed.get((SOURCE.id, 0), 0)
        assert all(at in text for at in range(sealed))

    for step in script:
        if step.kind == "append":
            piece = bytes((sent + at) % 251 for at in range(step.size))
            append(stream, framed([piece], sent), lane)
            sent += step.size
            continue
        worker = workers[step.who]
        if worker is None or worker.done:
            worker = workers[step.who] = Worker(stream, store, lane)
        worker.step(die=step.kind == "die")
        check()
    for worker in workers:
        while worker is not None and not worker.done:
            worker.step()
    while status(stream, lane).entries:
        seal(stream, store, lane, LIMITS)
    check()
    text = stored(store, lane).get((SOURCE.id, 0), {})
    assert text == {at: bytes([at % 251]) for at in range(sent)}
    assert status(stream, lane).sealed.get((SOURCE.id, 0), 0) == sent


def test_hostile_frames() -> None:
    """A frame that does not decode becomes a gap that says so; one without a possible place is dropped."""
    good = Framer().frame(0, b"good", 1, 1)
    cases = [
        StreamEntry("0-0", "n2-a", 0, good),
        StreamEntry("1-0", "n1-a", 0, good),
        StreamEntry("2-0", "n1-a", 0, Frame(4, 4, 1, 1, b"\x00rubbish")),
        StreamEntry("3-0", "n1-a", 0, Frame(8, 5, 1, 1, good.data)),
        StreamEntry("4-0", "n1-a", 0, Frame(13, 3, 2**70, -5, b"")),
        StreamEntry("5-0", "n1-a", 0, gap_frame(16, 20, 1, 1, "lost \udcff")),
        StreamEntry("6-0", "", 0, good),
        StreamEntry("7-0", "n1-a\nb", 0, good),
        StreamEntry("8-0", "n1-" + "a" * 300, 0, good),
        StreamEntry("9-0", "n1-a", -1, good),
        StreamEntry("10-0", "n1-a", 2**40, good),
        StreamEntry("11-0", "n1-a", 0, Frame(-4, 4, 1, 1, good.data)),
        StreamEntry("12-0", "n1-a", 0, Frame(2**53, 4, 1, 1, good.data)),
        StreamEntry("13-0", "n1-a", 0, Frame(20, 0, 1, 1, b"")),
    ]
    kept, dropped = checked(cases, "n1")
    assert dropped == 9
    assert [(entry.frame.offset, entry.frame.end, entry.frame.gap) for entry in kept] == [
        (0, 4, ""),
        (4, 8, DAMAGED_ON_THE_WAY),
        (8, 13, DAMAGED_ON_THE_WAY),
        (13, 16, DAMAGED_ON_THE_WAY),
        (16, 20, "lost \\udcff"),
    ]
    assert (kept[3].frame.wall_ns, kept[3].frame.mono_ns) == (2**63 - 1, 0)


def test_another_nodes_source(stream: Stream) -> None:
    """What a node sends under another node's source is dropped, noted, and costs it nothing but that."""
    store = MemoryStore()
    for node in ("a1", "n2"):
        thief = Lane(LANE.run, node, "s1")
        opened(stream, thief, SOURCE)
        append(stream, framed([b"forged"]), thief)
        append(stream, framed([b"honest"]), thief, f"{node}-b")
        sealed = seal(stream, store, thief, LIMITS)
        assert sealed is not None
        assert (sealed.taken, sealed.frames, sealed.bad) == (2, 1, 1)
        index = shelf.index_of(store.get(sealed.key), sealed.key)
        assert ([placed.source for placed in index.frames], index.sources) == ([f"{node}-b"], {})
        assert index.lanes[thief.name].notes == (f"1 {DROPPED}",)
        assert status(stream, thief).entries == 0


def test_entries_that_are_no_frames(stream: Stream, redis_url: str) -> None:
    """What somebody wrote into the stream by other means is dropped and noted, and the honest bytes go on."""
    store = MemoryStore()
    opened(stream)
    append(stream, framed([b"one"]))
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        for fields in ({"s": "x"}, {"s": SOURCE.id, "g": "0", "o": "-", "l": "1", "w": "1", "m": "1", "d": "x"}):
            client.xadd(LaneKeys.of(LANE).frames, fields)
    append(stream, framed([b" two"], 3))
    sealed = seal(stream, store, LANE, LIMITS)
    assert sealed is not None
    assert (sealed.taken, sealed.frames, sealed.bad) == (4, 2, 2)
    assert b"".join(stored(store)[SOURCE.id, 0].values()) == b"one two"
    assert shelf.index_of(store.get(sealed.key), sealed.key).lanes[LANE.name].notes == (f"2 {DROPPED}",)
    assert status(stream).sealed == {(SOURCE.id, 0): 7}
    # Nothing but rubbish is no obstacle either.
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        client.xadd(LaneKeys.of(LANE).frames, {"s": "x"})
    assert drain(stream, store, LANE, LIMITS) == 1
    assert status(stream).entries == 0


def test_a_drain_ends(stream: Stream) -> None:
    """What a node goes on writing is not waited for: what waited at the beginning is sealed."""
    store = MemoryStore()
    opened(stream)
    append(stream, framed([b"x"]))
    sent = 1

    def write(at: str) -> None:
        nonlocal sent
        assert sent < 100, "it never ends"
        if at == "stored":
            append(stream, framed([b"yz"], sent))
            sent += 2

    assert drain(stream, store, LANE, LIMITS, at=write) == 1
    assert status(stream).sealed == {(SOURCE.id, 0): 1}
    assert status(stream).entries == 1


def test_a_quiet_lane_is_not_sealed_at_once(stream: Stream) -> None:
    """Of a lane whose last seal is long ago the first new byte begins to wait; it does not end that by coming."""
    opened(stream)
    append(stream, framed([b"abc"]))
    drain(stream, MemoryStore(), LANE, LIMITS)
    append(stream, framed([b"def"], 3))
    old = msgspec.structs.replace(status(stream), opened=0.0, last_commit=0.0)
    now = stream.now()[0]
    assert not ready(old, now, Seal())
    assert ready(old, now + 601, Seal())


def test_a_damaged_frame_in_the_stream(stream: Stream) -> None:
    """A broken frame is sealed as a gap, counted, and lets the lane go on."""
    store = MemoryStore()
    opened(stream)
    frames = framed([b"abc", b"def", b"ghi"])
    frames[1] = msgspec.structs.replace(frames[1], data=frames[1].data[:-2] + b"xx")
    append(stream, frames)
    sealed = seal(stream, store, LANE, LIMITS)
    assert sealed is not None
    assert sealed.bad == 1
    assert b"".join(stored(store)[SOURCE.id, 0].values()) == b"abcghi"
    assert status(stream).sealed == {(SOURCE.id, 0): 9}


@pytest.mark.parametrize(
    ("pending", "age", "state", "pressed", "expected"),
    [
        (0, 9999.0, State.DRAINED, True, False),
        (100, 0.0, State.OPEN, False, False),
        (100, 0.0, State.DRAINED, False, True),
        (100, 0.0, State.OPEN, True, True),
        (8 * 2**20, 0.0, State.OPEN, False, True),
        (2**20, 59.0, State.OPEN, False, False),
        (2**20, 61.0, State.OPEN, False, True),
        (100, 590.0, State.OPEN, False, False),
        (100, 600.0, State.OPEN, False, True),
        (2**19, 320.0, State.OPEN, False, False),
        (2**19, 340.0, State.OPEN, False, True),
    ],
)
def test_ready(pending: int, age: float, state: State, pressed: bool, expected: bool) -> None:
    """Full, drained or pressed lanes are sealed at once, others by an age that rises as less waits."""
    lane = LaneStatus(LANE, "e", state, pending, int(pending > 0), 0.0, 0.0, 0.0, {}, {}, {}, waiting=1000.0)
    assert ready(lane, 1000.0 + age, Seal(), pressed=pressed) is expected


def test_a_store_that_lies_is_an_error(stream: Stream) -> None:
    """A key that holds other bytes than its digest says is never committed."""

    class Lying(MemoryStore):
        """Holds other bytes already."""

        def put_if_absent(self, key: str, body: bytes) -> bool:
            return super().put_if_absent(key, b"other" + body) and False

    opened(stream)
    append(stream, framed([b"abc"]))
    with pytest.raises(TrainarchiveError):
        seal(stream, Lying(), LANE, LIMITS)
    assert status(stream).sealed.get((SOURCE.id, 0), 0) == 0
