"""Which nodes a run has, which of them are done, and when those that are not are waited for no longer."""

import itertools

import msgspec
import pytest

from trainarchive import nodes
from trainarchive.manifest import NodeEntry
from trainarchive.nodes import ENDED_SEEN, Live
from trainarchive.run import Job, Lane, LaneReport, RunKey
from trainarchive.settings import Finish
from trainarchive.stream import LaneStatus, State

RUN = RunKey("c", 7)
ONE, TWO = Lane(RUN, "n1", "s1"), Lane(RUN, "n1", "s2")
OPEN, DONE = LaneReport(Job(1)), LaneReport(Job(1), drained=True)
NOW = 10_000.0
LIMITS = Finish(deadline_s=600.0, silence_s=5000.0)


def status(
    state: State = State.OPEN, *, opened: float = 0.0, last: float = 0.0, entries: int = 0, **control: str
) -> LaneStatus:
    """Return a lane's status."""
    named = {name.replace("_", "-"): value for name, value in control.items()}
    return LaneStatus(ONE, "e", state, entries, entries, opened, last, 0.0, {}, {}, named)


def told(nodes_: str = "", count: int = 0) -> LaneReport:
    """Return a report of a node that thinks the run has these nodes."""
    return LaneReport(Job(1, nodes=nodes_, num_nodes=count))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5000.5", 5000.5),
        ("0", 0.0),
        ("10059", NOW),
        ("10061", 7.0),
        ("1e300", 7.0),
        ("", 7.0),
        ("rubbish", 7.0),
        ("nan", 7.0),
        ("inf", 7.0),
        ("-inf", 7.0),
        ("1e999", 7.0),
    ],
)
def test_moment(text: str, expected: float) -> None:
    """A mark is a finite time that is over, or it is none."""
    assert nodes.moment(text, 7.0, NOW) == expected


@pytest.mark.parametrize(
    ("state", "report", "expected"),
    [
        (State.OPEN, None, False),
        (State.OPEN, OPEN, False),
        (State.OPEN, DONE, True),
        (State.OPEN, LaneReport(Job(1, ended=5.0)), True),
        (State.DRAINED, None, True),
        (State.DRAINED, OPEN, True),
        (State.ARCHIVED, DONE, False),
    ],
)
def test_has_ended(state: State, report: LaneReport | None, expected: bool) -> None:
    """A node is done when it says so, or when its job is over there; an archived lane is past all that."""
    assert nodes.has_ended(status(state), report) is expected
    assert nodes.ended_at(status(state), report, NOW) == (NOW if expected else None)


@pytest.mark.parametrize(
    ("mark", "opened", "expected"),
    [("9000", 0.0, 9000.0), ("9000", 9500.0, 9500.0), ("nan", 0.0, NOW), ("1e30", 0.0, NOW), ("0", 20.0, 20.0)],
)
def test_the_sweeps_mark(mark: str, opened: float, expected: float) -> None:
    """The mark counts, even of a lane that is open again, but it is not before the lane's opening or after now."""
    assert nodes.ended_at(status(opened=opened, ended_seen=mark), OPEN, NOW) == expected


def test_late_after_the_deadline() -> None:
    """The deadline runs from the first node that was seen done."""
    first, other = status(State.DRAINED, last=NOW, ended_seen=str(NOW)), status(last=NOW)
    for lanes in itertools.permutations([(first, DONE), (other, OPEN)]):
        assert not nodes.is_late(lanes, NOW + 599, LIMITS)
        assert nodes.is_late(lanes, NOW + 600, LIMITS)
    assert not nodes.is_late([(other, OPEN)], NOW + 601, LIMITS)


def test_late_after_a_long_silence() -> None:
    """Where no node ends, the last that was heard of counts; a node that is just opened is heard of."""
    quiet, newer = status(opened=100.0, last=1000.0), status(opened=2000.0)
    assert not nodes.is_late([(quiet, OPEN)], 5999.0, LIMITS)
    assert nodes.is_late([(quiet, OPEN)], 6000.0, LIMITS)
    assert not nodes.is_late([(quiet, OPEN), (newer, OPEN)], 6999.0, LIMITS)
    assert nodes.is_late([(quiet, OPEN), (newer, OPEN)], 7000.0, LIMITS)


def test_archived_lanes_make_no_run_late() -> None:
    """What ended before a manifest has no say in how long its late nodes are waited for."""
    archived = status(State.ARCHIVED, ended_seen="1")
    assert not nodes.is_late([(archived, DONE)], 1e9, LIMITS)
    assert not nodes.is_late([(archived, DONE), (status(opened=NOW, last=NOW), OPEN)], NOW + 700, LIMITS)


def test_expected() -> None:
    """What most nodes say counts; what cannot be used is passed over."""
    assert nodes.expected([told("n[1-2]"), told("n[1-2]"), told("evil[1-9]")]) == ("n1", "n2")
    assert nodes.expected([told("n[1-9999999]"), told("n[1-9999999]"), told("n1")]) == ("n1",)
    assert nodes.expected([told(), told("n[")]) == ()
    assert nodes.expected([]) == ()


def test_number() -> None:
    """A host list counts its nodes; where there is none, what most nodes count; more where they are divided."""
    assert nodes.number([told("n[1-3]", 64)]) == 3
    assert nodes.number([told("", 64), told("", 64), told("", 10**9)]) == 64
    assert nodes.number([told("n[1-9999999]", 2)]) == 2
    assert nodes.number([told("", 2), told("", 3)]) == 3
    assert nodes.number([told(), told("", -5)]) == 0


def live(state: State, entries: int = 0) -> Live:
    """Return a lane as Redis knows it."""
    return Live(status(state, entries=entries), OPEN, {})


BEFORE_OPEN, BEFORE_DONE = NodeEntry("n1", "open", ("s1",), OPEN), NodeEntry("n1", "drained", ("s1",), DONE)


@pytest.mark.parametrize(
    ("known", "reports", "before", "newer", "state"),
    [
        ({}, {}, None, None, "open"),
        ({ONE: live(State.OPEN)}, {}, None, None, "open"),
        ({ONE: live(State.DRAINED)}, {}, None, None, "drained"),
        ({ONE: live(State.DRAINED, 1)}, {}, None, None, "open"),
        ({ONE: live(State.ARCHIVED)}, {}, None, None, "drained"),
        ({ONE: live(State.DRAINED), TWO: live(State.OPEN)}, {}, None, None, "open"),
        ({}, {ONE: DONE}, None, None, "drained"),
        ({}, {ONE: OPEN}, None, None, "open"),
        ({}, {ONE: OPEN, TWO: DONE}, None, None, "open"),
        ({}, {}, BEFORE_DONE, None, "drained"),
        ({}, {}, BEFORE_OPEN, None, "open"),
        # A segment that came after the manifest knows better than it, an older one does not.
        ({}, {ONE: DONE}, BEFORE_OPEN, {ONE}, "drained"),
        ({}, {ONE: OPEN}, BEFORE_DONE, {ONE}, "open"),
        ({}, {ONE: OPEN}, BEFORE_DONE, set[Lane](), "drained"),
        ({}, {ONE: DONE}, BEFORE_OPEN, set[Lane](), "open"),
        ({}, {ONE: DONE}, NodeEntry("n1", "missing"), set[Lane](), "drained"),
        ({ONE: live(State.OPEN)}, {ONE: DONE}, BEFORE_DONE, {ONE}, "open"),
    ],
)
def test_entry(
    known: dict[Lane, Live],
    reports: dict[Lane, LaneReport],
    before: NodeEntry | None,
    newer: set[Lane] | None,
    state: str,
) -> None:
    """Redis knows best, then what is newer than the last manifest, then that manifest."""
    assert nodes.entry("n1", [ONE, TWO], known, reports, before, newer).state == state


def test_tokens_and_report() -> None:
    """All tokens stay; the last lane's report counts, else what the last manifest had."""
    before = msgspec.structs.replace(BEFORE_DONE, tokens=("s0",))
    both = nodes.entry("n1", [ONE, TWO], {}, {ONE: DONE, TWO: OPEN}, before)
    assert (both.tokens, both.report) == (("s0", "s1", "s2"), OPEN)
    assert nodes.entry("n1", [], {}, {}, before) == before
    assert nodes.entry("n9", [], {}, {}, None) == NodeEntry("n9", "missing")


def test_the_mark_has_its_name() -> None:
    """The sweep's mark of one release is read by the next."""
    assert ENDED_SEEN == "ended-seen"
