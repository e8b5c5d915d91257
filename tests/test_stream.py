"""The door, against real servers of the oldest version that is served and a current one."""

import threading
import time
from collections.abc import Iterator

import pytest
import redis
from tests_stream import DRAINED, LANE, REPORT, SOURCE, append, frames, seal

from trainarchive.errors import DamagedError, TrainarchiveError
from trainarchive.frame import MAX_OFFSET, Frame, gap_frame
from trainarchive.run import Kind, Lane, RunKey, Source
from trainarchive.stream import Answer, Append, LaneStatus, Outcome, State, Stream
from trainarchive.stream.names import LaneKeys
from trainarchive.stream.node import FRAMES_A_CALL

pytestmark = pytest.mark.parametrize("redis_url", ["6.2", "7"], indirect=True)

KEYS = LaneKeys.of(LANE)


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """Give bare access to the same Redis."""
    with redis.Redis.from_url(redis_url, protocol=2) as bare:
        yield bare


def test_frames_come_back_as_they_were_sent(stream: Stream) -> None:
    """Every field of a frame survives, gaps too, in stream order."""
    sent = [*frames(0, 10, 20), gap_frame(30, 90, 3, 4, "over the ceiling"), *frames(90, 5)]
    status = stream.open(LANE, REPORT, [SOURCE])
    answer = append(stream, sent)
    assert answer == Answer(Outcome.OK, status.epoch, 95, 0)
    assert [entry.frame for entry in stream.snapshot(LANE)] == sent
    assert {(entry.source, entry.generation) for entry in stream.snapshot(LANE)} == {("s1", 0)}


def test_an_unknown_lane_is_missing(stream: Stream) -> None:
    """Nothing is kept for a lane that was not opened."""
    assert append(stream, frames(0, 10)).outcome is Outcome.MISSING
    assert stream.status(LANE) is None
    assert stream.about(LANE) is None
    assert stream.claim(LANE, max_bytes=100, lease_s=1) is None
    stream.describe(LANE, [SOURCE])
    stream.report(LANE, REPORT)
    stream.control(LANE, {"pressure": "1"})
    assert list(stream.lanes()) == []


def test_a_resend_is_dropped_and_a_hole_refused(stream: Stream) -> None:
    """Old frames are passed over, frames after a hole or across the committed offset answer GAP."""
    stream.open(LANE, REPORT, [])
    sent = frames(0, 10, 10, 10)
    assert append(stream, sent).committed == 30
    assert append(stream, sent).outcome is Outcome.OK
    assert append(stream, [*sent[1:], *frames(30, 5)]).committed == 35
    assert append(stream, frames(40, 5)).outcome is Outcome.GAP
    across = append(stream, frames(30, 10))
    assert (across.outcome, across.committed) == (Outcome.GAP, 35)
    half = append(stream, [*frames(35, 5), *frames(50, 5)])
    assert (half.outcome, half.committed) == (Outcome.GAP, 40)
    assert sum(entry.frame.length for entry in stream.snapshot(LANE)) == 40


def test_the_floor_lifts_a_redis_that_knows_less(stream: Stream) -> None:
    """What the collector knows to be sealed need not be sent again."""
    stream.open(LANE, REPORT, [])
    answer = append(stream, frames(1000, 10), floor=1000)
    assert (answer.outcome, answer.committed, answer.sealed) == (Outcome.OK, 1010, 1000)
    answer = append(stream, frames(5000, 10), floor=3000)
    assert (answer.outcome, answer.committed, answer.sealed) == (Outcome.GAP, 3000, 3000)
    status = stream.status(LANE)
    assert status is not None
    assert status.sealed == {("s1", 0): 3000}


def test_offsets_are_exact_up_to_the_limit(stream: Stream) -> None:
    """Lua would print large numbers in powers of ten; beyond 2**53 they would not be exact."""
    stream.open(LANE, REPORT, [])
    for at in (10**14 + 1, 10**15 + 3, MAX_OFFSET - 10):
        assert append(stream, frames(at, 7), floor=at).committed == at + 7
    assert [entry.frame.end for entry in stream.snapshot(LANE)][-1] == MAX_OFFSET - 3
    seal(stream)
    status = stream.status(LANE)
    assert status is not None
    assert status.sealed == {("s1", 0): MAX_OFFSET - 3}
    with pytest.raises(TrainarchiveError, match="offsets are 0 to"):
        append(stream, [Frame(MAX_OFFSET, 1, 0, 0, b"")])


def test_names_of_sources_do_not_mix(stream: Stream) -> None:
    """A source's name may look like a field of another's."""
    stream.open(LANE, REPORT, [])
    for at, name in enumerate(("a", "a:s", "a:0", ":", "é")):
        append(stream, frames(at * 10, 1), floor=at * 10, source=name)
    status = stream.status(LANE)
    assert status is not None
    assert status.committed == {("a", 0): 1, ("a:s", 0): 11, ("a:0", 0): 21, (":", 0): 31, ("é", 0): 41}
    assert status.sealed == {("a", 0): 0, ("a:s", 0): 10, ("a:0", 0): 20, (":", 0): 30, ("é", 0): 40}


def test_a_lane_takes_no_more_than_its_bound(stream: Stream, redis_url: str) -> None:
    """A full lane answers FULL and keeps nothing of the call; an empty one takes any frame."""
    small = Stream(redis_url, timeout_s=5, max_pending=2000)
    small.open(LANE, REPORT, [])
    assert append(small, frames(0, 5000)).outcome is Outcome.OK
    full = append(small, frames(5000, 10))
    assert (full.outcome, full.committed) == (Outcome.FULL, 5000)
    assert append(small, frames(9000, 10)).outcome is Outcome.GAP
    assert seal(stream) == 1
    assert append(small, frames(5000, 10)).outcome is Outcome.OK
    small.close()


def test_pressure_stops_new_bytes_only(stream: Stream) -> None:
    """Workers can stop a lane; a resend of what is there is still answered."""
    stream.open(LANE, REPORT, [])
    sent = frames(0, 10)
    append(stream, sent)
    stream.control(LANE, {"pressure": "1", "share": "0.5"})
    status = stream.status(LANE)
    assert status is not None
    assert status.control == {"pressure": "1", "share": "0.5"}
    assert append(stream, frames(10, 10)).outcome is Outcome.FULL
    assert append(stream, sent).outcome is Outcome.OK
    stream.control(LANE, {"pressure": "0"})
    assert append(stream, frames(10, 10)).outcome is Outcome.OK


def test_a_batch_is_one_round_trip_and_survives_forgotten_scripts(stream: Stream, client: redis.Redis) -> None:
    """Answers come in order, for several lanes, even when Redis has forgotten its scripts."""
    lanes = [Lane(RunKey("hpc", job), "n", "t1") for job in range(1, 40)]
    for lane in lanes:
        stream.open(lane, REPORT, [])
    client.script_flush()
    answers = stream.append([Append(lane, "s1", 0, frames(0, lane.run.job_id)) for lane in lanes])
    assert [answer.committed for answer in answers] == [lane.run.job_id for lane in lanes]
    assert stream.append([]) == []


def test_reports_and_descriptions(stream: Stream) -> None:
    """What a node says of itself is read back, and replaced."""
    stream.open(LANE, REPORT, [SOURCE])
    other = Source("s2", "node-1.site", Kind.NCCL, "/tmp/nccl.1")
    stream.describe(LANE, [other])
    assert stream.about(LANE) == (REPORT, {"s1": SOURCE, "s2": other})
    stream.report(LANE, DRAINED)
    assert stream.about(LANE) == (DRAINED, {"s1": SOURCE, "s2": other})
    status = stream.status(LANE)
    assert status is not None
    assert status.state is State.DRAINED
    assert status.opened > 1.6e9


def test_new_bytes_after_drained_make_the_lane_open(stream: Stream) -> None:
    """A lane is not drained any more when bytes came after; a resend changes nothing."""
    stream.open(LANE, REPORT, [])
    sent = frames(0, 10)
    append(stream, sent)
    stream.report(LANE, DRAINED)
    append(stream, sent)
    assert stream.status(LANE).state is State.DRAINED  # type: ignore[union-attr]  # a known lane
    append(stream, frames(10, 10))
    assert stream.status(LANE).state is State.OPEN  # type: ignore[union-attr]  # a known lane


def test_opening_again_keeps_epoch_and_offsets(stream: Stream) -> None:
    """A restarted collector finds where it was; an emptied Redis shows by its epoch."""
    first = stream.open(LANE, REPORT, [])
    append(stream, frames(0, 10))
    again = stream.open(LANE, REPORT, [])
    assert (again.epoch, again.committed, again.opened) == (first.epoch, {("s1", 0): 10}, first.opened)


def test_a_lost_stream_is_a_missing_lane(stream: Stream, client: redis.Redis) -> None:
    """When only the stream's key is gone, the node is sent back to what is sealed, under a new epoch."""
    first = stream.open(LANE, REPORT, [])
    append(stream, frames(0, 10))
    seal(stream)
    append(stream, frames(10, 10))
    client.delete(KEYS.frames)
    assert stream.status(LANE) is None
    assert append(stream, frames(0, 3), source="s2").outcome is Outcome.MISSING
    missing = append(stream, frames(20, 10))
    assert (missing.outcome, missing.committed) == (Outcome.MISSING, 10)
    status = stream.open(LANE, REPORT, [])
    assert status.epoch != first.epoch
    assert status.committed == status.sealed == {("s1", 0): 10}


def test_a_lost_stream_of_sealed_bytes_does_not_stop_the_lane(stream: Stream, client: redis.Redis) -> None:
    """Where the node knows all of the lost stream to be sealed, the lane goes on after it is opened."""
    stream.open(LANE, REPORT, [])
    append(stream, frames(0, 10))
    append(stream, [], floor=10)
    client.delete(KEYS.frames)
    assert append(stream, frames(10, 10), floor=10).outcome is Outcome.MISSING
    stream.open(LANE, REPORT, [])
    answer = append(stream, frames(10, 10), floor=10)
    assert (answer.outcome, answer.committed) == (Outcome.OK, 20)


def test_a_commit_cannot_hide_a_lost_stream(stream: Stream, client: redis.Redis) -> None:
    """A worker that found nothing to take, because the stream was lost after its claim, commits nothing."""
    stream.open(LANE, REPORT, [])
    append(stream, frames(0, 10))
    claim = stream.claim(LANE, max_bytes=1000, lease_s=60)
    assert claim is not None
    client.delete(KEYS.frames)
    assert stream.take(claim) == []
    assert not stream.commit(claim, {})
    assert append(stream, frames(0, 10), source="s2").outcome is Outcome.MISSING


def test_lanes_are_found_among_other_keys(stream: Stream, client: redis.Redis) -> None:
    """Keys that only look like a lane's are passed over."""
    lanes = {Lane(RunKey("hpc", job), f"n{job}", "t1") for job in range(2500)}
    with client.pipeline(transaction=False) as pipeline:
        for lane in lanes:
            pipeline.hset(LaneKeys.of(lane).meta, "epoch", "e")
        for junk in (
            b"ta:{hpc/1.0/t}:n:frames", b"ta:{}:n:meta", b"ta:{hpc/1.0}:n:meta", b"ta:{hpc/x.0/t}:n:meta",
            b"ta:{hpc/1.0/t/u}:n:meta", b"ta:{hpc/1.0/t}:../x:meta", b"ta:{hpc/1.0/t}:n:x:meta", b"ta:{\xff}:n:meta",
            b"ta:{hpc/01.0/t}:n:meta", "ta:{hpc/\N{ARABIC-INDIC DIGIT ONE}.0/t}:n:meta".encode(),
            b"ta:{hpc/1.0/t}:n\n:meta", b"celery",
        ):  # fmt: skip
            pipeline.set(junk, "x")
        pipeline.execute()
    assert set(stream.lanes()) == lanes


def test_claims_are_bounded_exclusive_and_end(stream: Stream) -> None:
    """A claim takes about what was asked for, at least one entry, and nobody else's."""
    stream.open(LANE, REPORT, [])
    append(stream, frames(0, 1000, 1000, 1000, 1000))
    claim = stream.claim(LANE, max_bytes=2500, lease_s=60)
    assert claim is not None
    assert [entry.frame.offset for entry in stream.take(claim)] == [0, 1000]
    assert stream.claim(LANE, max_bytes=2500, lease_s=60) is None
    assert stream.commit(claim, {("s1", 0): 2000})
    tiny = stream.claim(LANE, max_bytes=1, lease_s=0)
    assert tiny is not None
    assert [entry.frame.offset for entry in stream.take(tiny)] == [2000]
    taken_over = stream.claim(LANE, max_bytes=1 << 20, lease_s=60)
    assert taken_over is not None
    assert not stream.commit(tiny, {("s1", 0): 3000})
    assert stream.status(LANE).sealed == {("s1", 0): 2000}  # type: ignore[union-attr]  # a known lane
    assert stream.commit(taken_over, {("s1", 0): 4000})
    assert stream.commit(taken_over, {("s1", 0): 4000}), "a repeat after a lost answer"
    status = stream.status(LANE)
    assert status is not None
    assert (status.pending, status.entries, status.sealed) == (0, 0, {("s1", 0): 4000})


def test_a_claim_of_tiny_frames_is_bounded_in_entries(stream: Stream) -> None:
    """Many tiny frames do not keep Redis busy for long."""
    stream.open(LANE, REPORT, [])
    append(stream, [Frame(at, 1, 1, 1, b"x") for at in range(5000)])
    claim = stream.claim(LANE, max_bytes=8 << 20, lease_s=60)
    assert claim is not None
    assert len(stream.take(claim)) == 4096


def test_a_claim_from_before_redis_forgot_is_refused(stream: Stream, client: redis.Redis) -> None:
    """A worker cannot commit into a lane's next life."""
    stream.open(LANE, REPORT, [])
    append(stream, frames(0, 10))
    claim = stream.claim(LANE, max_bytes=100, lease_s=60)
    assert claim is not None
    client.delete(KEYS.meta)
    stream.open(LANE, REPORT, [])
    assert not stream.commit(claim, {("s1", 0): 10})
    assert len(stream.snapshot(LANE)) == 1
    assert stream.claim(LANE, max_bytes=100, lease_s=60) is not None, "its lease does not hold up the next life"


def test_a_commit_that_stopped_after_its_trim_is_completed(stream: Stream, client: redis.Redis) -> None:
    """An empty stream means sealed: for status at once, and for good with the next claim or append."""
    stream.open(LANE, REPORT, [])
    append(stream, frames(0, 10))
    assert stream.claim(LANE, max_bytes=100, lease_s=0) is not None
    client.xtrim(KEYS.frames, maxlen=0)
    assert stream.status(LANE).sealed == {("s1", 0): 10}  # type: ignore[union-attr]  # a known lane
    assert stream.claim(LANE, max_bytes=100, lease_s=60) is None
    assert client.hget(KEYS.offsets, "s1:0:s") == b"10"
    assert not client.exists(KEYS.claim)
    answer = append(stream, frames(10, 10))
    assert (answer.committed, answer.sealed) == (20, 10)
    client.xtrim(KEYS.frames, maxlen=0)
    answer = append(stream, frames(20, 10))
    assert (answer.committed, answer.sealed) == (30, 20)


def test_an_archived_lane_is_kept_for_a_while(stream: Stream, client: redis.Redis) -> None:
    """Only what is drained, sealed and covered is archived; then mark and offsets stay, with a time limit."""
    epoch = stream.open(LANE, REPORT, [SOURCE]).epoch
    stream.control(LANE, {"share": "1"})
    append(stream, frames(0, 10))
    assert not stream.archived(LANE, epoch, 60), "not drained"
    stream.report(LANE, DRAINED)
    assert not stream.archived(LANE, epoch, 60), "not sealed"
    seal(stream)
    assert not stream.archived(LANE, "another", 60)
    assert not stream.archived(LANE, epoch, 60, covered={("s1", 0): 9}), "late bytes"
    assert stream.archived(LANE, epoch, 60, covered={("s1", 0): 10})
    assert stream.archived(LANE, epoch, 60), "a repeat after a lost answer"
    status = stream.status(LANE)
    assert status is not None
    assert (status.state, status.sealed) == (State.ARCHIVED, {("s1", 0): 10})
    assert {key: 0 < client.ttl(key) <= 60 for key in client.scan_iter()} == dict.fromkeys(
        (KEYS.meta.encode(), KEYS.offsets.encode(), KEYS.ctl.encode()), True
    )
    assert append(stream, frames(10, 10)).outcome is Outcome.MISSING


def test_late_bytes_open_an_archived_lane_again(stream: Stream, client: redis.Redis) -> None:
    """Opened again, nothing of it runs out, and the epoch and offsets are those of before."""
    epoch = stream.open(LANE, DRAINED, []).epoch
    append(stream, frames(0, 10))
    stream.report(LANE, DRAINED)
    seal(stream)
    assert stream.archived(LANE, epoch, 60)
    status = stream.open(LANE, REPORT, [])
    assert (status.epoch, status.state, status.committed) == (epoch, State.OPEN, {("s1", 0): 10})
    assert {client.ttl(key) for key in client.scan_iter()} == {-1}
    assert append(stream, frames(10, 10)).committed == 20


def test_follow_waits_and_wakes(stream: Stream) -> None:
    """A follower gets what is there, then waits, and is woken by the next frame."""
    stream.open(LANE, REPORT, [])
    append(stream, frames(0, 10, 10))
    (first, second) = stream.follow(LANE, "0", block_s=5)
    assert stream.follow(LANE, first.id, block_s=0) == [second]
    started = time.monotonic()
    assert stream.follow(LANE, second.id, block_s=0.05) == []
    assert time.monotonic() - started >= 0.04
    later = threading.Timer(0.05, append, (stream, frames(20, 10)))
    later.start()
    (third,) = stream.follow(LANE, second.id, block_s=30)
    later.join()
    assert third.frame.offset == 20


def test_following_outlasts_the_connection_time_limit(redis_url: str) -> None:
    """Waiting longer than an answer may take is no error."""
    short = Stream(redis_url, timeout_s=0.8, max_pending=1000)
    assert short.follow(Lane(RunKey("hpc", 99), "n", "t"), "0", block_s=1.0) == []
    short.close()


def test_locks(stream: Stream) -> None:
    """One token holds a lock, may renew it and give it back, and loses it with time."""
    assert stream.lock("sweep", "a", 60)
    assert stream.lock("sweep", "a", 60)
    assert not stream.lock("sweep", "b", 60)
    stream.unlock("sweep", "b")
    assert not stream.lock("sweep", "b", 60)
    stream.unlock("sweep", "a")
    assert stream.lock("sweep", "b", 0.001)
    deadline = time.monotonic() + 5
    while not stream.lock("sweep", "a", 60):
        assert time.monotonic() < deadline


def test_the_clock_and_the_memory_are_read(stream: Stream) -> None:
    """The clock of Redis comes with its round trip; without a memory limit nothing is ever full."""
    at, took = stream.now()
    assert abs(at - time.time()) < 10
    assert 0 < took < 5
    assert stream.memory_ratio() == 0.0


def test_threads_share_one_door(stream: Stream) -> None:
    """Eight threads send at once, and each byte is kept once."""
    lanes = [Lane(RunKey("hpc", job), "n", "t1") for job in range(8)]

    def send(lane: Lane) -> None:
        stream.open(lane, REPORT, [])
        for at in range(0, 500, 10):
            append(stream, frames(at, 10), lane=lane)

    threads = [threading.Thread(target=send, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for lane in lanes:
        assert [entry.frame.offset for entry in stream.snapshot(lane)] == list(range(0, 500, 10))


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [("meta", "report", "{"), ("sources", "s1", '{"id": 1}'), ("sources", b"\xff", "{}")],
)
def test_a_report_that_is_none(stream: Stream, client: redis.Redis, key: str, field: str, value: str) -> None:
    """A node that writes rubbish harms its own lane only, with an error that names it."""
    stream.open(LANE, REPORT, [SOURCE])
    client.hset(getattr(KEYS, key), field, value)
    with pytest.raises(DamagedError, match=r"node-1\.site"):
        stream.about(LANE)


def test_entries_that_are_none(stream: Stream, client: redis.Redis) -> None:
    """What is no frame is passed over by those who read the stream; a worker can tell how many it were."""
    stream.open(LANE, REPORT, [])
    append(stream, frames(0, 10))
    client.xadd(KEYS.frames, {"s": "s1"})
    client.xadd(KEYS.frames, {"s": "s1", "g": "x", "o": "1", "l": "1", "w": "1", "m": "1", "d": ""})
    client.xadd(KEYS.frames, {"x": b"\xff"})
    assert stream.follow(LANE, "0", block_s=0.0) == stream.snapshot(LANE)
    assert stream.follow(LANE, stream.snapshot(LANE)[-1].id, block_s=0.01) == []
    append(stream, frames(10, 10))
    assert [entry.frame.offset for entry in stream.snapshot(LANE)] == [0, 10]
    (after,) = stream.follow(LANE, stream.snapshot(LANE)[0].id, block_s=0.0)
    assert after.frame.offset == 10
    claim = stream.claim(LANE, max_bytes=1 << 20, lease_s=60)
    assert claim is not None
    assert (claim.entries, len(stream.take(claim))) == (5, 2)


def test_many_statuses(stream: Stream, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for together, lanes answer as they do alone; one that cannot be read does not hide the others."""
    monkeypatch.setattr("trainarchive.stream.node.STATUSES_AT_ONCE", 2)
    lanes = [Lane(LANE.run, f"n{number}", "t1") for number in range(5)]
    for lane in lanes[:4]:
        stream.open(lane, REPORT, [])
    append(stream, frames(0, 10), lane=lanes[1])
    client.hset(LaneKeys.of(lanes[2]).meta, "opened", "nan")
    found = dict(stream.statuses(lanes))
    assert list(found) == lanes
    assert [found[lane] for lane in (lanes[0], lanes[1], lanes[3])] == [
        stream.status(lane) for lane in (lanes[0], lanes[1], lanes[3])
    ]
    assert isinstance(found[lanes[2]], DamagedError)
    assert found[lanes[4]] is None
    assert dict(stream.statuses([])) == {}


def test_since_when_the_oldest_waits(stream: Stream) -> None:
    """The oldest entry's time is known at its coming, and again when those before it are sealed."""
    stream.open(LANE, REPORT, [])
    append(stream, frames(0, 10))
    first = status_of(stream)
    assert first.waiting == first.last_append
    append(stream, frames(10, 10))
    assert status_of(stream).waiting == first.waiting < status_of(stream).last_append
    second = float(stream.snapshot(LANE)[1].id.partition("-")[0]) / 1000
    claim = stream.claim(LANE, max_bytes=1, lease_s=60)
    assert claim is not None
    assert stream.commit(claim, {("s1", 0): 10})
    assert status_of(stream).waiting == pytest.approx(second, abs=0.001)


def status_of(stream: Stream) -> LaneStatus:
    """Return the lane's state; it must be known."""
    found = stream.status(LANE)
    assert found is not None
    return found


def test_states_that_are_none(stream: Stream, client: redis.Redis) -> None:
    """Offsets and states that no script wrote are errors that name the lane."""
    stream.open(LANE, REPORT, [])
    client.hset(KEYS.meta, "state", "asleep")
    with pytest.raises(DamagedError, match=r"node-1\.site"):
        stream.status(LANE)
    client.hset(KEYS.offsets, "s1", "x")
    with pytest.raises(DamagedError, match=r"node-1\.site"):
        stream.status(LANE)


def spoiled(client: redis.Redis, lane: Lane) -> Iterator[str]:
    """Put into each of the lane's keys in turn what no script writes there."""
    keys = LaneKeys.of(lane)
    for name in ("meta", "frames", "offsets", "ctl"):
        key = getattr(keys, name)
        there = client.dump(key)
        client.delete(key)
        client.set(key, "x")
        yield name
        client.delete(key)
        if there is not None:
            client.restore(key, 0, there)
    for key, field, value in (
        (keys.meta, "epoch", b"\xff"),
        (keys.offsets, "s1:0", "1e400"),
        (keys.offsets, "s1:0", "nan"),
        (keys.offsets, "s1:0:s", "9007199254740993"),
    ):
        before = client.hget(key, field)
        client.hset(key, field, value)
        yield f"{field} {value!r}"
        client.hdel(key, field)
        if before is not None:
            client.hset(key, field, before)


def test_one_lanes_broken_record_stops_no_other(stream: Stream, client: redis.Redis) -> None:
    """Each part of a batch has its own answer; what is asked about the broken lane is an error of that lane."""
    lanes = [Lane(LANE.run, node, "t1") for node in ("a", "bad", "c")]
    for lane in lanes:
        stream.open(lane, REPORT, [SOURCE])
        append(stream, frames(0, 10), lane=lane)
    at = 10
    for what in spoiled(client, lanes[1]):
        batch = [Append(lane, "s1", 0, frames(at, 10)) for lane in lanes]
        good, bad, other = stream.append(batch)
        at += 10
        assert [(one.outcome, one.committed) for one in (good, other)] == [(Outcome.OK, at)] * 2, what
        if bad.outcome is not Outcome.BROKEN:
            assert what == "ctl" or what.startswith("s1:0"), what
            assert bad.outcome in (Outcome.GAP, Outcome.MISSING), what
        else:
            assert bad == Answer(Outcome.BROKEN, "", 0, 0)
        found = dict(stream.statuses(lanes))
        assert isinstance(found[lanes[0]], LaneStatus)
        assert not isinstance(found[lanes[1]], LaneStatus), what
        if what in ("meta", "frames", "offsets"):
            assert bad.outcome is Outcome.BROKEN, what
            with pytest.raises(DamagedError, match="not ours") as caught:
                stream.status(lanes[1])
            assert "bad:" in caught.value.where
            with pytest.raises(DamagedError, match="not ours"):
                stream.open(lanes[1], REPORT, [])
    assert [entry.frame.offset for entry in stream.snapshot(lanes[1])] == [0]


def test_a_large_append_that_is_not_taken_tells_how_far_it_came(redis_url: str, stream: Stream) -> None:
    """The first call that is not OK speaks for all after it, and nothing after it is in."""
    narrow = Stream(redis_url, timeout_s=10, max_pending=1_000_000)
    narrow.open(LANE, REPORT, [])
    sent = frames(0, *[5] * 20_000)
    (first,) = narrow.append([Append(LANE, "s1", 0, sent)])
    entries = status_of(stream).entries
    assert (first.outcome, first.committed) == (Outcome.FULL, 5 * entries)
    assert entries % FRAMES_A_CALL == 0 < entries < 20_000
    assert seal(stream) == entries
    (rest,) = narrow.append([Append(LANE, "s1", 0, sent[:entries])])
    assert (rest.outcome, rest.committed) == (Outcome.OK, first.committed)
    (hole,) = narrow.append([Append(LANE, "s1", 0, sent[entries + 1 :])])
    assert (hole.outcome, hole.committed) == (Outcome.GAP, first.committed)
    (none,) = narrow.append([Append(LANE, "s1", 0, [])])
    assert (none.outcome, none.committed) == (Outcome.OK, first.committed)
    narrow.close()
