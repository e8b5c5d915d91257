"""A run's nodes: which it has, and which of them are done."""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from trainarchive import hosts
from trainarchive.errors import TrainarchiveError
from trainarchive.manifest import NodeEntry
from trainarchive.run import Lane, LaneReport, Source
from trainarchive.stream import LaneStatus, State

ENDED_SEEN = "ended-seen"
"""In a lane's control: when (Redis' clock, Unix s) the sweep first saw that its node was done."""

_log = logging.getLogger(__name__)


class Live(msgspec.Struct, frozen=True):
    """A lane as the log Redis knows it."""

    status: LaneStatus
    report: LaneReport
    sources: dict[str, Source]

    @property
    def drained(self) -> bool:
        """Whether the node is done and all that it sent is sealed."""
        return self.status.state is not State.OPEN and self.status.entries == 0


def ended_at(status: LaneStatus, report: LaneReport) -> float | None:
    """When the lane's node was done with its job (Redis' clock, Unix s), None while it is not.

    The sweep's own mark is believed first: it does not depend on the node's clock.
    """
    mark = status.control.get(ENDED_SEEN, "")
    with contextlib.suppress(ValueError):
        return float(mark)
    told = [moment - report.skew_s for moment in (report.drained_at, report.job.ended) if moment > 0]
    if not told and status.state is State.OPEN:
        return None
    # Not before its last bytes, whatever a clock says that is years behind.
    return max(min(told, default=0.0), status.opened, status.last_append)


def expected(reports: Iterable[LaneReport]) -> tuple[str, ...]:
    """Return the nodes that the run has by what most of its nodes say; none where nobody says it usably."""
    said = Counter(report.job.nodes for report in reports if report.job.nodes)
    for expression, _ in sorted(said.items(), key=lambda item: (-item[1], item[0])):
        try:
            return hosts.expand(expression)
        except TrainarchiveError as error:
            _log.warning("%s", error)
    return ()


def entry(
    name: str,
    lanes: list[Lane],
    live: Mapping[Lane, Live],
    reports: Mapping[Lane, LaneReport],
    before: NodeEntry | None,
) -> NodeEntry:
    """Put one node's entry together; what Redis no longer knows stays as the last manifest had it."""
    tokens = tuple(sorted({*(lane.token for lane in lanes), *(before.tokens if before is not None else ())}))
    if not tokens:
        return NodeEntry(name, "missing")
    now_known = [live[lane] for lane in lanes if lane in live]
    report = next((reports[lane] for lane in reversed(lanes) if lane in reports), before.report if before else None)
    if now_known:
        drained = all(each.drained for each in now_known)
    elif before is not None and before.state != "missing":
        drained = before.state == "drained"
    else:
        drained = report is not None and report.drained
    return NodeEntry(name, "drained" if drained else "open", tokens, report)
