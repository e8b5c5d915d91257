"""A run's nodes: which it has, and which of them are done."""

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

import msgspec

from trainarchive import hosts
from trainarchive.errors import TrainarchiveError
from trainarchive.manifest import NodeEntry
from trainarchive.run import Lane, LaneReport, Source
from trainarchive.settings import Finish
from trainarchive.stream import LaneStatus, State

ENDED_SEEN = "ended-seen"
"""In a lane's control: when (Redis' clock, Unix s) the sweep first saw that its node was done."""

SLACK_S = 60.0
"""How far Redis' clock may have been set back."""

_log = logging.getLogger(__name__)


class Known(Protocol):
    """A lane that the log Redis knows."""

    @property
    def drained(self) -> bool:
        """Whether the node is done."""
        ...


class Live(msgspec.Struct, frozen=True):
    """A lane as the log Redis knows it."""

    status: LaneStatus
    report: LaneReport
    sources: dict[str, Source]

    @property
    def state(self) -> State:
        """The lane's state."""
        return self.status.state

    @property
    def drained(self) -> bool:
        """Whether the node is done and all that it sent is sealed."""
        return self.status.state is not State.OPEN and self.status.entries == 0


def moment(text: str, otherwise: float, now: float) -> float:
    """Read a time in a lane's control; ``otherwise`` where it is none that a sweep can have written by ``now``."""
    try:
        value = float(text)
    except ValueError:
        return otherwise
    return min(value, now) if math.isfinite(value) and value <= now + SLACK_S else otherwise


def has_ended(status: LaneStatus, report: LaneReport | None) -> bool:
    """Say whether the lane's node is done with its job, or the job is over there and the collector did not say more."""
    if status.state is State.OPEN:
        return report is not None and (report.drained or report.job.ended > 0)
    return status.state is State.DRAINED


def ended_at(status: LaneStatus, report: LaneReport | None, now: float) -> float | None:
    """When the sweep first saw the lane's node done (``now`` where it is seen now), None while it is not.

    Redis' clock, Unix s: no node's clock has a say. A mark that a node got in an earlier life of
    its lane still counts: the run had ended then.
    """
    mark = status.control.get(ENDED_SEEN)
    if mark is not None:
        return max(moment(mark, now, now), status.opened)
    return now if has_ended(status, report) else None


def is_late(lanes: Iterable[tuple[LaneStatus, LaneReport | None]], now: float, limits: Finish) -> bool:
    """Say whether a run is closed without those of its nodes that are not done.

    Yes some time after the first has ended, or long after the last has sent anything.
    """
    held = [(status, report) for status, report in lanes if status.state is not State.ARCHIVED]
    ended = [at for status, report in held if (at := ended_at(status, report, now)) is not None]
    if ended and now >= min(ended) + limits.deadline_s:
        return True
    heard = max((max(status.opened, status.last_append) for status, _ in held), default=math.inf)
    return now >= heard + limits.silence_s


def expected(reports: Iterable[LaneReport]) -> tuple[str, ...]:
    """Return the nodes that the run has by what most of its nodes say; none where nobody says it usably."""
    said = Counter(report.job.nodes for report in reports if report.job.nodes)
    for expression, _ in sorted(said.items(), key=lambda item: (-item[1], item[0])):
        try:
            return hosts.expand(expression)
        except TrainarchiveError as error:
            _log.warning("%s", error)
    return ()


def number(reports: Iterable[LaneReport]) -> int:
    """Return how many nodes the run has: those of ``expected``, else as most nodes count them, 0 where none does."""
    known = list(reports)
    named = expected(known)
    if named:
        return len(named)
    said = Counter(report.job.num_nodes for report in known if report.job.num_nodes > 0)
    return max(said, key=lambda count: (said[count], count), default=0)


def entry(  # noqa: PLR0913, PLR0917 (all that is known of one node)
    name: str,
    lanes: list[Lane],
    live: Mapping[Lane, Known],
    reports: Mapping[Lane, LaneReport],
    before: NodeEntry | None,
    newer: Collection[Lane] | None = None,
) -> NodeEntry:
    """Put one node's entry together; what Redis no longer knows stays as the last manifest, ``before``, had it.

    ``newer``: the lanes whose reports are younger than that; None: all.
    """
    tokens = tuple(sorted({*(lane.token for lane in lanes), *(before.tokens if before is not None else ())}))
    if not tokens:
        return NodeEntry(name, "missing")
    now_known = [live[lane] for lane in lanes if lane in live]
    report = next((reports[lane] for lane in reversed(lanes) if lane in reports), before.report if before else None)
    if now_known:
        drained = all(each.drained for each in now_known)
    elif news := [reports[lane] for lane in lanes if lane in reports and (newer is None or lane in newer)]:
        drained = all(each.drained for each in news)
    elif before is not None and before.state != "missing":
        drained = before.state == "drained"
    else:
        drained = report is not None and report.drained
    return NodeEntry(name, "drained" if drained else "open", tokens, report)
