"""The door's promises under any order of resends, lost memories, roll-backs and slow workers."""

from itertools import pairwise
from typing import ClassVar

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from trainarchive.frame import Frame, Framer
from trainarchive.run import Job, Lane, LaneReport, RunKey
from trainarchive.stream import Append, Claim, Outcome, Stream, StreamEntry
from trainarchive.stream.names import LaneKeys

LANE = Lane(RunKey("c", 1), "n1", "t1")
REPORT = LaneReport(Job(uid=1000))
SOURCES = ("a", "b:s")
BOTH = pytest.mark.parametrize("redis_url", ["6.2", "7"], indirect=True)

sources = st.sampled_from(SOURCES)
cuts = st.lists(st.integers(1, 40), min_size=1, max_size=6)
workers = st.integers(0, 2)
# An over-long pause is a lease that is over at once.
leases = st.sampled_from([0.0, 0.0, 600.0])


class Worker:
    """One worker between its steps."""

    def __init__(self) -> None:
        """Start with nothing in hand."""
        self.claim: Claim | None = None
        self.taken: list[StreamEntry] | None = None
        self.put = False


class Places(RuleBasedStateMachine):
    """A node with two growing files, the door, three workers, and the store: what all runs below share."""

    # Set by the test: a machine is made without arguments.
    door: ClassVar[Stream]
    client: ClassVar[redis.Redis]

    def __init__(self) -> None:
        """Start with nothing anywhere."""
        super().__init__()
        self.texts = dict.fromkeys(SOURCES, b"")
        self.at = dict.fromkeys(SOURCES, 0)
        self.floor = dict.fromkeys(SOURCES, 0)
        self.epoch = ""
        self.store: list[StreamEntry] = []
        self.workers = [Worker() for _ in range(3)]
        self.framer = Framer()

    @initialize()
    def begin(self) -> None:
        """Empty Redis, and open the lane."""
        self.client.flushall()
        self.open()

    # -- the node ----------------------------------------------------------------------------

    @rule(source=sources, more=st.binary(min_size=1, max_size=120))
    def write(self, source: str, more: bytes) -> None:
        """Let the job write."""
        self.texts[source] += more

    def open(self) -> None:
        """Open the lane; another epoch means to begin again from what is sealed."""
        status = self.door.open(LANE, REPORT, [])
        if status.epoch != self.epoch:
            self.epoch = status.epoch
            self.at = dict(self.floor)

    def send(self, source: str, start: int, lengths: list[int], *, hear: bool = True) -> Outcome:
        """Send the text from ``start`` in frames of ``lengths``, and take the answer in unless it is lost."""
        frames = self.cut(source, start, lengths)
        (answer,) = self.door.append([Append(LANE, source, 0, frames, self.floor[source])])
        if hear and answer.outcome is Outcome.MISSING:
            self.open()
        elif hear:
            if answer.epoch != self.epoch:
                self.epoch = answer.epoch
                self.at = dict(self.floor)
            assert answer.committed >= answer.sealed >= self.floor[source], "the node let go what is asked for"
            self.at[source] = answer.committed
            self.floor[source] = answer.sealed
        if answer.outcome is Outcome.OK and frames:
            assert answer.committed >= frames[-1].end
        return answer.outcome

    def cut(self, source: str, start: int, lengths: list[int]) -> list[Frame]:
        """Cut frames; the end of the text ends them."""
        frames = []
        for length in lengths:
            piece = self.texts[source][start : start + length]
            if piece:
                frames.append(self.framer.frame(start, piece, 1, 1))
                start += len(piece)
        return frames

    # -- the workers -------------------------------------------------------------------------

    @rule(number=workers, size=st.integers(1, 900), lease=leases)
    def claim(self, number: int, size: int, lease: float) -> None:
        """Begin, or begin again, with a claim."""
        worker = self.workers[number] = Worker()
        worker.claim = self.door.claim(LANE, max_bytes=size, lease_s=lease)

    @rule(number=workers)
    def take(self, number: int) -> None:
        """Read what is claimed."""
        worker = self.workers[number]
        if worker.claim is not None and worker.taken is None:
            worker.taken = self.door.take(worker.claim)

    @rule(number=workers)
    def put(self, number: int) -> None:
        """Store the segment."""
        worker = self.workers[number]
        if worker.taken is not None and not worker.put:
            self.store += worker.taken
            worker.put = True

    @rule(number=workers, twice=st.booleans())
    def commit(self, number: int, twice: bool) -> None:
        """Commit what is stored; ``twice`` when the answer was lost."""
        worker = self.workers[number]
        if worker.claim is None or worker.taken is None or not worker.put:
            return
        ends: dict[tuple[str, int], int] = {}
        for entry in worker.taken:
            place = entry.source, entry.generation
            ends[place] = max(ends.get(place, 0), entry.frame.end)
        done = self.door.commit(worker.claim, ends)
        if twice:
            assert self.door.commit(worker.claim, ends) == done
        if done:
            self.committed(worker.taken)
        self.workers[number] = Worker()

    def committed(self, entries: list[StreamEntry]) -> None:
        """Note what a commit took out of the stream."""

    # -- what must hold ----------------------------------------------------------------------

    @invariant()
    def nothing_is_wrong(self) -> None:
        """Everything held is the text's; offsets promise no more than what is held; no byte waits twice."""
        waiting = self.door.snapshot(LANE)
        for source in SOURCES:
            text = self.texts[source]
            for entry in [*self.store, *waiting]:
                if entry.source == source:
                    assert entry.frame.text() == text[entry.frame.offset : entry.frame.end]
            in_stream = [entry.frame for entry in waiting if entry.source == source]
            assert all(one.end <= other.offset for one, other in pairwise(in_stream))
            stored = reach(self.store, source)
            assert self.floor[source] <= stored
            status = self.door.status(LANE)
            if status is not None:
                assert status.sealed.get((source, 0), 0) <= stored
                assert status.committed.get((source, 0), 0) <= reach([*self.store, *waiting], source)

    def drain(self) -> None:
        """Let everything calm down: all is sent, all is sealed."""
        for source in SOURCES:
            for _ in range(6):
                if self.send(source, self.at[source], [50] * 100) is Outcome.OK and self.at[source] == len(
                    self.texts[source]
                ):
                    break
        self.client.delete(LaneKeys.of(LANE).claim)  # stands for the end of a dead worker's lease
        self.workers = [Worker() for _ in range(3)]
        while True:
            self.claim(0, 1000, 600.0)
            if self.workers[0].claim is None:
                break
            self.take(0)
            self.put(0)
            self.commit(0, twice=False)

    def teardown(self) -> None:
        """After the drain the store holds the text, and the lane says so."""
        self.drain()
        status = self.door.status(LANE)
        assert status is not None
        assert (status.pending, status.entries) == (0, 0)
        for source, text in self.texts.items():
            assert read(self.store, source) == text
            assert status.sealed.get((source, 0), 0) == len(text)


def reach(entries: list[StreamEntry], source: str) -> int:
    """Return up to where ``entries`` hold the source without a hole."""
    return len(read(entries, source))


def read(entries: list[StreamEntry], source: str) -> bytes:
    """Read as readers do: by offset, overlaps dropped, up to the first hole."""
    text = b""
    frames = [entry.frame for entry in entries if entry.source == source]
    for frame in sorted(frames, key=lambda frame: frame.offset):
        if frame.offset <= len(text) < frame.end:
            text += frame.text()[len(text) - frame.offset :]
    return text


class AnyResend(Places):
    """The node resends, skips, cuts anew and loses answers; Redis forgets, goes back in time, loses a stream."""

    def __init__(self) -> None:
        """Keep one older state of Redis."""
        super().__init__()
        self.saved: dict[bytes, bytes] = {}

    @rule(source=sources, lengths=cuts, hear=st.booleans())
    def follow_the_file(self, source: str, lengths: list[int], hear: bool) -> None:
        """Send on from where the node thinks that it is."""
        self.send(source, self.at[source], lengths, hear=hear)

    @rule(source=sources, lengths=cuts, share=st.floats(0, 1), hear=st.booleans())
    def send_from_anywhere(self, source: str, lengths: list[int], share: float, hear: bool) -> None:
        """Send from any place that the node still holds: old bytes in new cuts, or bytes too far ahead."""
        start = self.floor[source] + int(share * (len(self.texts[source]) - self.floor[source]))
        self.send(source, start, lengths, hear=hear)

    @rule()
    def come_back(self) -> None:
        """Open the lane again, as a restarted collector does."""
        self.open()

    @rule()
    def forget(self) -> None:
        """Redis comes back empty."""
        self.client.flushall()

    @rule()
    def save(self) -> None:
        """Remember the state of Redis as its disk might have it."""
        self.saved = {key: self.client.dump(key) for key in self.client.keys()}  # type: ignore[misc]  # noqa: SIM118 - a command

    @rule()
    def go_back(self) -> None:
        """Redis comes back with the older state."""
        self.client.flushall()
        for key, value in self.saved.items():
            self.client.restore(key, 0, value)

    @rule()
    def lose_the_stream(self) -> None:
        """Drop the one big key, as a Redis with a wrong eviction policy does."""
        self.client.delete(LaneKeys.of(LANE).frames)


class SlowWorkers(Places):
    """Three workers step on each other's claims; nothing else goes wrong."""

    def __init__(self) -> None:
        """Note how often each byte was committed."""
        super().__init__()
        self.sealed_once: set[tuple[str, int]] = set()

    @rule(source=sources, lengths=cuts)
    def follow_the_file(self, source: str, lengths: list[int]) -> None:
        """Send on from where the node is."""
        assert self.send(source, self.at[source], lengths) is Outcome.OK

    def committed(self, entries: list[StreamEntry]) -> None:
        """Every byte is committed by one worker only."""
        for entry in entries:
            for place in range(entry.frame.offset, entry.frame.end):
                assert (entry.source, place) not in self.sealed_once
                self.sealed_once.add((entry.source, place))

    def teardown(self) -> None:
        """And by one at least."""
        super().teardown()
        assert len(self.sealed_once) == sum(map(len, self.texts.values()))


def check(machine: type[Places], stream: Stream, redis_url: str, examples: int) -> None:
    """Run one kind of machine against one server."""
    Places.door = stream
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        Places.client = client
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                database=None,
            ),
        )


@BOTH
def test_any_resend_keeps_the_same_bytes_once(stream: Stream, redis_url: str) -> None:
    """Whatever the node sends again and Redis forgets, what is stored and waiting is the text, each byte once."""
    check(AnyResend, stream, redis_url, 60)


@BOTH
def test_slow_workers_seal_the_same_bytes_once(stream: Stream, redis_url: str) -> None:
    """However workers interleave, each byte is committed by one, after it is in the store."""
    check(SlowWorkers, stream, redis_url, 40)
