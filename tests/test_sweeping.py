"""What the sweep decides, and what it tells the lanes."""

from pathlib import Path

import msgspec
import pytest
import redis

from trainarchive.finishing import FINISHED
from trainarchive.frame import Framer
from trainarchive.nodes import ENDED_SEEN
from trainarchive.run import Job, Kind, Lane, LaneReport, RunKey, Source
from trainarchive.settings import Finish, Log, Seal, Settings
from trainarchive.stream import Append, LaneStatus, Outcome, State, Stream
from trainarchive.sweeping import LOOKED, PRESSURE, Plan, Sweeper, decide, to_look

CONFIG = Settings(home=Path("/nowhere"))
RUN = RunKey("c", 7)
NOW = 10_000.0


def lane(node: str, run: RunKey = RUN) -> Lane:
    """Return a lane of the run."""
    return Lane(run, node, "s1")


def status(node: str, state: State = State.OPEN, *, pending: int = 0, since: float = NOW, **control: str) -> LaneStatus:
    """Return a lane's status; ``since`` is when it was opened, and when what waits came."""
    named = {name.replace("_", "-"): value for name, value in control.items()}
    return LaneStatus(lane(node), "e", state, pending, int(pending > 0), since, since, since, {}, {}, named, since)


def reports(*nodes: str, expected: str, ended: float = 0.0) -> dict[Lane, LaneReport]:
    """Return what these nodes say."""
    return {lane(node): LaneReport(Job(1, nodes=expected, ended=ended)) for node in nodes}


def test_idle() -> None:
    """A running, quiet job needs nothing."""
    assert decide([status("n1")], {}, NOW, 0.0, CONFIG) == Plan()
    assert decide([], {}, NOW, 0.9, CONFIG) == Plan()


def test_seals_the_fullest_first() -> None:
    """Lanes that are ready come in the order of what waits in them."""
    lanes = [status("n1", pending=9 * 2**20), status("n2", pending=100), status("n3", pending=30 * 2**20)]
    assert decide(lanes, {}, NOW, 0.0, CONFIG).seals == (lane("n3"), lane("n1"))


def test_finishes_when_all_are_done() -> None:
    """A run is finished when every node that it has is drained and sealed, not before."""
    told = reports("n1", expected="n[1-2]")
    one = status("n1", State.DRAINED)
    assert decide([one], told, NOW, 0.0, CONFIG).finishes == ()
    assert decide([one, status("n2")], told, NOW, 0.0, CONFIG).finishes == ()
    assert decide([one, status("n2", State.DRAINED, pending=9)], told, NOW, 0.0, CONFIG).finishes == ()
    done = decide([one, status("n2", State.DRAINED)], told, NOW, 0.0, CONFIG)
    assert done.finishes == (RUN,)
    assert done.ended == (lane("n1"), lane("n2"))
    unknown = reports("n1", expected="")
    assert decide([one, status("n2")], unknown, NOW, 0.0, CONFIG).finishes == ()
    assert decide([one], unknown, NOW, 0.0, CONFIG).finishes == (RUN,)
    assert decide([one, status("n2", State.ARCHIVED)], told, NOW, 0.0, CONFIG).finishes == (RUN,)


def test_finishes_after_the_deadline() -> None:
    """Nodes that stay away are waited for only until the deadline after the first that ended."""
    told = reports("n1", expected="n[1-2]")
    ended = status("n1", State.DRAINED, ended_seen=str(NOW))
    assert decide([ended], told, NOW + 599, 0.0, CONFIG).finishes == ()
    assert decide([ended], told, NOW + 600, 0.0, CONFIG).finishes == (RUN,)
    assert decide([ended, status("n2", pending=5)], told, NOW + 600, 0.0, CONFIG).finishes == (RUN,)


def test_does_not_finish_again_and_again() -> None:
    """A lane that a finish had to leave open is left alone until something new came, and a while passed."""
    old = status("n1", since=NOW - 10, ended_seen="1000", finished=f"open {NOW}")
    assert decide([old], {}, NOW + 10_000, 0.0, CONFIG).finishes == ()
    new = msgspec.structs.replace(old, last_append=NOW + 5)
    assert decide([new], {}, NOW + 10, 0.0, CONFIG).finishes == ()
    assert decide([new], {}, NOW + 601, 0.0, CONFIG).finishes == (RUN,)
    # When it is drained at last, that is news at once; if it then cannot be let go, again only after a while.
    drained = msgspec.structs.replace(old, state=State.DRAINED)
    assert decide([drained], {}, NOW + 1, 0.0, CONFIG).finishes == (RUN,)
    stuck = msgspec.structs.replace(drained, control={**old.control, FINISHED: f"drained {NOW}"})
    assert decide([stuck], {}, NOW + 1, 0.0, CONFIG).finishes == ()
    assert decide([stuck], {}, NOW + 601, 0.0, CONFIG).finishes == (RUN,)


def test_archived_runs_are_reaped_later() -> None:
    """An archived run is no more finished; an hour later its leftovers are looked for."""
    done = [status("n1", State.ARCHIVED), status("n2", State.ARCHIVED)]
    assert decide(done, {}, NOW, 0.0, CONFIG) == Plan()
    assert decide(done, {}, NOW + 3601, 0.0, CONFIG) == Plan(reaps=(RUN,))
    assert decide([*done, status("n3")], {}, NOW + 3601, 0.0, CONFIG).reaps == ()


def test_a_collector_that_died() -> None:
    """A lane that is open but long quiet has its report read, once a minute; a job that ended there is seen."""
    quiet = status("n1", since=NOW - 601)
    assert to_look([status("n1"), quiet], NOW, CONFIG) == [lane("n1")]
    assert to_look([status("n1", since=NOW - 601, looked=str(NOW - 59))], NOW, CONFIG) == []
    assert to_look([status("n1", since=NOW - 601, looked=str(NOW - 61))], NOW, CONFIG) == [lane("n1")]
    running = decide([quiet], reports("n1", expected="n1"), NOW, 0.0, CONFIG)
    assert running == Plan(looked=(lane("n1"),))
    over = decide([quiet], reports("n1", expected="n1", ended=5.0), NOW, 0.0, CONFIG)
    assert over == Plan(ended=(lane("n1"),))
    later = status("n1", since=NOW - 1201, ended_seen=str(NOW - 600))
    assert decide([later], {}, NOW, 0.0, CONFIG).finishes == (RUN,)


def test_pressure() -> None:
    """When Redis fills up, everything is sealed and collectors stop; with a margin, they go on."""
    open_lane, pressed = status("n1", pending=10), status("n2", pending=10, pressure="1")
    plan = decide([open_lane, pressed], {}, NOW, 0.61, CONFIG)
    assert (plan.press, plan.ease) == ((lane("n1"),), ())
    assert set(plan.seals) == {lane("n1"), lane("n2")}
    between = decide([open_lane, pressed], {}, NOW, 0.57, CONFIG)
    assert (between.press, between.ease) == ((), ())
    over = decide([open_lane, pressed], {}, NOW, 0.5, CONFIG)
    assert (over.press, over.ease) == ((), (lane("n2"),))


@pytest.mark.parametrize("mark", ["", "rubbish", "nan", "inf", "-inf", "1e300", "1e999"])
def test_a_mark_that_is_no_time(mark: str) -> None:
    """A control that a node wrote itself costs the others nothing, and is no way to stay unfinished for ever."""
    liar, honest = status("n1", ended_seen=mark), status("n2", State.DRAINED, ended_seen=str(NOW))
    told = reports("n2", expected="n[1-2]")
    assert decide([liar, honest], told, NOW + 599, 0.0, CONFIG) == Plan()
    assert decide([liar, honest], told, NOW + 600, 0.0, CONFIG) == Plan(finishes=(RUN,))
    quiet = status("n1", since=NOW - 601, looked=mark)
    assert to_look([quiet], NOW, CONFIG) == [lane("n1")]
    assert to_look([quiet], NOW + 60, CONFIG) == [lane("n1")]
    drained = status("n1", State.DRAINED, ended_seen=str(NOW), finished=f"drained {mark}")
    assert decide([drained], reports("n1", expected="n1"), NOW, 0.0, CONFIG).finishes == (RUN,)


def test_a_node_that_dies() -> None:
    """A run whose nodes are all silent for a day is finished, once; what comes after that is news."""
    silent = [status("n1", since=NOW), status("n2", since=NOW + 100)]
    day = CONFIG.finish.silence_s
    assert decide(silent, {}, NOW + day + 99, 0.0, CONFIG).finishes == ()
    assert decide(silent, {}, NOW + day + 100, 0.0, CONFIG).finishes == (RUN,)
    told = [msgspec.structs.replace(each, control={FINISHED: f"open {NOW + day + 100}"}) for each in silent]
    assert decide(told, {}, NOW + 9 * day, 0.0, CONFIG).finishes == ()
    again = msgspec.structs.replace(told[0], last_append=NOW + day + 200)
    assert decide([again, told[1]], {}, NOW + day + 1000, 0.0, CONFIG).finishes == ()
    assert decide([again, told[1]], {}, NOW + 3 * day, 0.0, CONFIG).finishes == (RUN,)


def test_as_many_nodes_as_were_counted() -> None:
    """Where no host list is known, the number of nodes tells whether some are still to come."""
    done = status("n1", State.DRAINED, ended_seen=str(NOW))
    told = {lane("n1"): LaneReport(Job(1, num_nodes=2))}
    assert decide([done], told, NOW, 0.0, CONFIG).finishes == ()
    assert decide([done, status("n2", State.ARCHIVED)], told, NOW, 0.0, CONFIG).finishes == (RUN,)
    assert decide([done], told, NOW + 600, 0.0, CONFIG).finishes == (RUN,)


def test_a_real_sweep(stream: Stream, redis_url: str) -> None:
    """The sweep finds the lanes, tells them what it saw, and passes over what a hostile node wrote."""
    config = msgspec.structs.replace(CONFIG, seal=Seal(min_age_s=0.0, max_age_s=0.0), finish=Finish(deadline_s=0.0))
    for node in ("n1", "n2", "n3"):
        stream.open(lane(node), LaneReport(Job(1, nodes="n[1-3]")), [Source(f"{node}-a", node, Kind.TASK, "/x")])
    (answer,) = stream.append([Append(lane("n1"), "n1-a", 0, [Framer().frame(0, b"x", 1, 1)])])
    assert answer.outcome is Outcome.OK
    stream.report(lane("n2"), LaneReport(Job(1, nodes="n[1-3]"), drained=True))
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        client.hset(f"ta:{{{RUN}/s1}}:n3:offsets", "rubbish", "x")
    sweeper = Sweeper(stream, config)
    plan = sweeper.plan()
    assert plan.seals == (lane("n1"),)
    assert plan.ended == (lane("n2"),)
    seen = stream.status(lane("n2"))
    assert seen is not None
    assert float(seen.control[ENDED_SEEN]) == pytest.approx(stream.now()[0], abs=30)
    looked = stream.status(lane("n1"))
    assert looked is not None
    assert LOOKED in looked.control


def test_real_pressure(stream: Stream, redis_url: str) -> None:
    """A Redis over its share of memory makes the sweep press its lanes, and ease them after."""
    stream.open(lane("n1"), LaneReport(Job(1)), [])
    tight = msgspec.structs.replace(CONFIG, log=Log(stop_at_memory_ratio=0.0001))
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        client.config_set("maxmemory", "1gb")
        try:
            Sweeper(stream, tight).plan()
            pressed = stream.status(lane("n1"))
            Sweeper(stream, CONFIG).plan()
            eased = stream.status(lane("n1"))
        finally:
            client.config_set("maxmemory", "0")
    assert pressed is not None
    assert eased is not None
    assert (pressed.control[PRESSURE], eased.control[PRESSURE]) == ("1", "0")


def test_archived_lanes_are_remembered(stream: Stream) -> None:
    """An archived lane's state is believed for a while, and it still counts among its run's nodes."""
    config = msgspec.structs.replace(CONFIG, finish=Finish(keep_level0_s=0.0))
    stream.open(lane("n1"), LaneReport(Job(1), drained=True), [])
    found = stream.status(lane("n1"))
    assert found is not None
    assert stream.archived(lane("n1"), found.epoch, 60)
    sweeper = Sweeper(stream, config)
    assert sweeper.plan().reaps == sweeper.plan().reaps == (RUN,)
