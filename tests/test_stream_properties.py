"""The door's promises under any order of resends, lost memories, roll-backs and slow workers."""

from itertools import pairwise
from random import Random
from typing import ClassVar, NamedTuple

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


class Send(NamedTuple):
    """Send on; or send what the node still holds, from any place: old bytes in new cuts, or far too early."""

    source: str
    lengths: list[int]
    hear: bool
    old: bool
    percent: int


class Work(NamedTuple):
    """One worker takes its next few steps; ``twice``: the commit's answer was lost once."""

    number: int
    steps: int
    max_bytes: int
    lease_s: float
    twice: bool


class Break(NamedTuple):
    """The collector restarts; Redis comes back empty, or older; a wrong eviction policy drops the one big key."""

    what: str


def sends(*, lossless: bool) -> st.SearchStrategy[Send]:
    """Return any sending, or those of a node to which nothing happens."""
    odd = st.just(False) if lossless else st.booleans()
    cuts = st.lists(st.integers(1, 40), min_size=1, max_size=6)
    return st.builds(Send, st.sampled_from(SOURCES), cuts, odd.map(lambda lost: not lost), odd, st.integers(0, 100))


# A lease that is over at once is a worker that paused for too long.
works = st.builds(
    Work, st.integers(0, 2), st.integers(1, 4), st.integers(1, 900), st.sampled_from([0.0, 0.0, 600.0]), st.booleans()
)
breaks = st.builds(Break, st.sampled_from(["come back", "save", "go back", "go back", "forget", "lose the stream"]))


class Worker:
    """One worker between its steps."""

    def __init__(self) -> None:
        """Start with nothing in hand."""
        self.claim: Claim | None = None
        self.taken: list[StreamEntry] | None = None
        self.put = False


class Places(RuleBasedStateMachine):
    """A node with two files, the door, three workers, and the store: what all runs below share."""

    # Set by the test: a machine is made without arguments.
    door: ClassVar[Stream]
    client: ClassVar[redis.Redis]

    def __init__(self) -> None:
        """Start with two files that nobody has sent."""
        super().__init__()
        self.texts = {source: Random(source).randbytes(600) for source in SOURCES}  # noqa: S311 - no secret
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

    def work(self, work: Work) -> None:
        """Let one worker go on."""
        for _ in range(work.steps):
            worker = self.workers[work.number]
            if worker.claim is None:
                worker.claim = self.door.claim(LANE, max_bytes=work.max_bytes, lease_s=work.lease_s)
            elif worker.taken is None:
                worker.taken = self.door.take(worker.claim)
            elif not worker.put:
                self.store += worker.taken
                worker.put = True
            else:
                self.commit(worker.claim, worker.taken, twice=work.twice)
                self.workers[work.number] = Worker()

    def commit(self, claim: Claim, taken: list[StreamEntry], *, twice: bool) -> None:
        """Commit what is stored."""
        ends: dict[tuple[str, int], int] = {}
        for entry in taken:
            place = entry.source, entry.generation
            ends[place] = max(ends.get(place, 0), entry.frame.end)
        done = self.door.commit(claim, ends)
        if twice:
            assert self.door.commit(claim, ends) == done
        if done:
            self.committed(taken)

    def committed(self, entries: list[StreamEntry]) -> None:
        """Note what a commit took out of the stream."""

    # -- what must hold ----------------------------------------------------------------------

    @invariant()
    def nothing_is_wrong(self) -> None:
        """Everything held is the text's; offsets promise no more than what is held; no byte waits twice."""
        waiting = self.door.snapshot(LANE)
        status = self.door.status(LANE)
        if status is not None:
            assert status.pending == sum(len(entry.frame.data) + 100 for entry in waiting)
        for source, text in self.texts.items():
            for entry in [*self.store, *waiting]:
                if entry.source == source:
                    assert entry.frame.text() == text[entry.frame.offset : entry.frame.end]
            in_stream = [entry.frame for entry in waiting if entry.source == source]
            assert all(one.end <= other.offset for one, other in pairwise(in_stream))
            stored = reach(self.store, source)
            assert self.floor[source] <= stored
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
        for _ in range(len(self.door.snapshot(LANE))):
            self.work(Work(0, 4, 1000, 600.0, twice=False))

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
        self.saved: dict[bytes, bytes | None] = {}

    # One rule: hypothesis leaves whole rules out of most runs, and a run that only sends, or never does, shows nothing.
    @rule(action=st.one_of(*[sends(lossless=False), works] * 4, breaks))
    def step(self, action: Send | Work | Break) -> None:
        """Do the next thing."""
        if isinstance(action, Send):
            left = len(self.texts[action.source]) - self.floor[action.source]
            old = self.floor[action.source] + action.percent * left // 100
            start = old if action.old else self.at[action.source]
            self.send(action.source, start, action.lengths, hear=action.hear)
        elif isinstance(action, Work):
            self.work(action)
        else:
            self.break_something(action.what)

    def break_something(self, what: str) -> None:
        """Let something go wrong."""
        if what == "come back":
            self.open()
        elif what == "save":
            self.saved = {key: self.client.dump(key) for key in self.client.scan_iter()}
        elif what == "lose the stream":
            self.client.delete(LaneKeys.of(LANE).frames)
        else:
            self.client.flushall()
            for key, value in self.saved.items() if what == "go back" else ():
                self.client.restore(key, 0, value or b"")


class SlowWorkers(Places):
    """Three workers step on each other's claims; nothing else goes wrong."""

    def __init__(self) -> None:
        """Note how often each byte was committed."""
        super().__init__()
        self.sealed_once: set[tuple[str, int]] = set()

    @rule(action=st.one_of(sends(lossless=True), works, works))
    def step(self, action: Send | Work) -> None:
        """Do the next thing."""
        if isinstance(action, Work):
            self.work(action)
        else:
            assert self.send(action.source, self.at[action.source], action.lengths) is Outcome.OK

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
    check(AnyResend, stream, redis_url, 50)


@BOTH
def test_slow_workers_seal_the_same_bytes_once(stream: Stream, redis_url: str) -> None:
    """However workers interleave, each byte is committed by one, after it is in the store."""
    check(SlowWorkers, stream, redis_url, 30)
