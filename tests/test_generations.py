"""Which lanes are one run, and which belong to another job that had the same key."""

import itertools
from collections.abc import Mapping

import msgspec
import pytest

from trainarchive.errors import DamagedError, NotFoundError
from trainarchive.generations import SLACK_S, assign, began, shares
from trainarchive.manifest import Manifest, NodeEntry
from trainarchive.run import Job, Lane, LaneReport, RunKey
from trainarchive.stream import State

RUN = RunKey("c", 7)


def lane(token: str, node: str = "n1") -> Lane:
    """Return a lane of the run's key."""
    return Lane(RUN, node, token)


def report(*, ended: float = 0.0, skew: float = 0.0, started: float = 0.0) -> LaneReport:
    """Return a lane's report."""
    return LaneReport(Job(1, started=started, ended=ended), skew_s=skew)


def book(*tokens: str, ended: float = 0.0, written: float = 0.0) -> Manifest:
    """Return a manifest of a run whose node n1 had these tokens."""
    return Manifest(
        number=1, run=RUN, written=written, complete=True, state="", state_from="", ended=ended,
        nodes=(NodeEntry("n1", "drained", tokens),), sources=(), parts=(),
    )  # fmt: skip


class Found(msgspec.Struct, frozen=True):
    """A lane as it is found in Redis."""

    state: State | None = None
    report: LaneReport | None = None


def numbers(lanes: Mapping[Lane, LaneReport | None], known: dict[int, Manifest] | None = None) -> dict[str, int]:
    """Return each lane's generation by token and node; the same whatever the order of the lanes."""
    answers = [
        {
            f"{each.token}/{each.node}": number
            for number, found in assign(dict(order), known or {}).items()
            for each in found
        }
        for order in itertools.permutations(lanes.items())
    ]
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def test_a_sluid_is_a_run() -> None:
    """The same token is the same run on every node; another is another run, the older first."""
    lanes = {
        lane("s2"): report(started=50.0),
        lane("s1"): report(started=900.0),
        lane("s1", "n2"): report(started=901.0),
    }
    assert numbers(lanes) == {"s2/n1": 0, "s1/n1": 1, "s1/n2": 1}


def test_times_that_differ_a_little() -> None:
    """Prolog's times of one run differ; one that began after the end of it, and the slack, is another run's."""
    first = {lane("t1000"): report(ended=1100.0), lane("t1003", "n2"): report(ended=1100.0)}
    late = 1100 + int(SLACK_S)
    assert numbers({**first, lane(f"t{late - 1}", "n3"): None}) == {"t1000/n1": 0, "t1003/n2": 0, f"t{late - 1}/n3": 0}
    assert numbers({**first, lane(f"t{late}", "n3"): None}) == {"t1000/n1": 0, "t1003/n2": 0, f"t{late}/n3": 1}


def test_a_run_lasts_until_its_last_node_ends() -> None:
    """A node that ended early does not end the run for those that come after it."""
    lanes = {lane("t1000"): report(ended=5000.0), lane("t1003", "n2"): report(ended=1100.0), lane("t3000", "n3"): None}
    assert set(numbers(lanes).values()) == {0}
    running = {lane("t1000"): report(), lane("t1003", "n2"): report(ended=1100.0), lane("t9000", "n3"): None}
    assert set(numbers(running).values()) == {0}


def test_clocks_that_are_wrong() -> None:
    """Times are compared on Redis' clock: a node that is an hour ahead still belongs to its run, and ends with it."""
    assert began(lane("t4600"), report(skew=3600.0)) == 1000.0
    assert began(lane("s1"), report(skew=10.0, started=1010.0)) == 1000.0
    assert began(lane("t4600"), None) == 4600.0
    lanes = {lane("t1000"): report(ended=1100.0), lane("t4650", "n2"): report(skew=3600.0, ended=4700.0)}
    assert set(numbers(lanes).values()) == {0}
    ahead = {lane("t4600"): report(skew=3600.0, ended=4700.0), lane("t1161", "n2"): None}
    assert numbers(ahead) == {"t4600/n1": 0, "t1161/n2": 1}


def test_what_manifests_say() -> None:
    """A token that a manifest names is that manifest's; else its end decides, or where it knows none, its writing."""
    known = {0: book("t1000", ended=1100.0), 1: book("t5000", written=6000.0)}
    assert numbers({lane("t1000"): None, lane("t5000"): None}, known) == {"t1000/n1": 0, "t5000/n1": 1}
    assert numbers({lane("t6059", "n2"): None}, known) == {"t6059/n2": 1}
    assert numbers({lane("t6060", "n2"): None}, known) == {"t6060/n2": 2}
    # A manifest's end is final: what its forgotten lane says later does not stretch it.
    assert numbers({lane("t1000"): report(), lane("t2000", "n2"): None}, {0: known[0]}) == {
        "t1000/n1": 0,
        "t2000/n2": 1,
    }


def test_a_time_joins_no_sluid() -> None:
    """A lane without SLUID never joins a run that has one."""
    assert numbers({lane("s1"): report(started=1.0), lane("t2", "n2"): None}) == {"s1/n1": 0, "t2/n2": 1}


SEGMENTS: Mapping[str, LaneReport | Exception] = {
    "old": report(ended=1100.0),
    "newest": DamagedError("rubbish"),
    "gone": NotFoundError("away"),
    "running": report(),
}


def lanes_in(key: str) -> Mapping[str, LaneReport]:
    """Read a segment's index."""
    found = SEGMENTS[key]
    if isinstance(found, Exception):
        raise found
    return {"its lane": found}


@pytest.mark.parametrize(
    ("listed", "expected"),
    [(["old"], 2), (["running", "old"], 2), (["old", "newest", "gone"], 2), (["old", "running"], 1), (["newest"], 1)],
)
def test_a_lane_that_redis_forgot(listed: list[str], expected: int) -> None:
    """Its last segment that can be read tells whether it had ended before another job took its key."""
    new = {lane("t9000000", "n2"): Found(State.OPEN, report())}
    assert len(shares(new, {lane("t1000"): listed}, {}, lanes_in)) == expected


def test_which_lanes_count() -> None:
    """Lanes that Redis or the store has, less those whose run was purged; known tokens are not looked up."""
    archived, gone, owned = lane("a"), lane("g"), lane("o")
    live = {archived: Found(State.ARCHIVED, report()), gone: Found(), owned: Found(State.ARCHIVED, report())}
    level0 = {archived: ["never read"], owned: ["never read"], lane("new"): ["old"]}
    assert shares(live, level0, {4: book("o")}, lanes_in) == {4: [owned], 5: [lane("new")]}
