"""Which lanes with one run key are one run, and which belong to another job that had the same key.

Slurm's SLUID tells: the same token is the same run, another one is another. Without it tokens
are the nodes' Prolog times, which differ a little within one run: such a lane belongs to the
newest run if it began before that one had ended (and a minute, for clocks that disagree).
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from trainarchive.errors import DamagedError, NotFoundError
from trainarchive.manifest import Manifest
from trainarchive.run import Lane, LaneReport
from trainarchive.stream import State

SLACK_S = 60.0
_TIME = re.compile(r"t(\d{1,12})")


class Seen(Protocol):
    """A lane that the log Redis was asked for; None: it does not know it, or not that."""

    @property
    def state(self) -> State | None:
        """The lane's state."""
        ...

    @property
    def report(self) -> LaneReport | None:
        """Its latest report."""
        ...


class _Run:
    """One generation while it is put together."""

    def __init__(self, tokens: set[str], until: float) -> None:
        self.tokens = tokens
        self.until = until
        self.timed = any(_TIME.fullmatch(token) for token in tokens)

    def has(self, lane: Lane) -> bool:
        return lane.token in self.tokens


def shares(
    live: Mapping[Lane, Seen],
    level0: Mapping[Lane, Sequence[str]],
    known: Mapping[int, Manifest],
    lanes_in: Callable[[str], Mapping[str, LaneReport]],
) -> dict[int, list[Lane]]:
    """Return the lanes by generation number, as ``assign`` does: the one way for those who write and those who read.

    ``level0``: the keys of each lane's segments in the order of their making. ``lanes_in(key)``
    reads what a segment's index says of its lanes; it may raise NotFoundError and DamagedError.
    """
    owned = {(entry.node, token) for book in known.values() for entry in book.nodes for token in entry.tokens}
    reports: dict[Lane, LaneReport | None] = {}
    for lane in {*live, *level0}:
        if (lane.node, lane.token) in owned:
            reports[lane] = None  # whose it is, is known by its token
        elif _is_unwritten(live.get(lane), level0.get(lane, ())):
            reports[lane] = _last_report(live.get(lane), level0.get(lane, ()), lanes_in)
    return assign(reports, known)


def assign(lanes: Mapping[Lane, LaneReport | None], known: Mapping[int, Manifest]) -> dict[int, list[Lane]]:
    """Return the lanes by generation number. All have one cluster, job and attempt.

    ``known``: the newest manifest of each generation that has one. The same arguments give the
    same answer, whoever asks and in whatever order the lanes come.
    """
    runs = {number: _known(manifest) for number, manifest in known.items()}
    result: dict[int, list[Lane]] = {}
    for lane in sorted(lanes, key=lambda lane: (began(lane, lanes[lane]), lane.name)):
        number = _place(lane, began(lane, lanes[lane]), runs)
        if number is None:
            number = max(runs, default=-1) + 1
            runs[number] = _Run({lane.token}, until=0.0)
        run = runs[number]
        run.tokens.add(lane.token)
        run.timed = run.timed or _TIME.fullmatch(lane.token) is not None
        if number not in known:
            run.until = max(run.until, _ended(lanes[lane]) + SLACK_S)
        result.setdefault(number, []).append(lane)
    return result


def began(lane: Lane, report: LaneReport | None) -> float:
    """When the lane's Prolog ran (Unix s), as near to Redis' clock as is known."""
    skew = report.skew_s if report is not None else 0.0
    timed = _TIME.fullmatch(lane.token)
    if timed is not None:
        return float(timed[1]) - skew
    return report.job.started - skew if report is not None else 0.0


def _is_unwritten(found: Seen | None, listed: Sequence[str]) -> bool:
    """Say whether a lane that no manifest names may still come into one: else its run is purged, or it went away."""
    if found is None or found.state is None:
        return bool(listed)
    return found.state is not State.ARCHIVED


def _last_report(
    found: Seen | None, listed: Sequence[str], lanes_in: Callable[[str], Mapping[str, LaneReport]]
) -> LaneReport | None:
    """Return a lane's latest report: Redis' word, else its last segment's."""
    if found is not None and found.report is not None:
        return found.report
    for key in reversed(listed):
        try:
            return next(iter(lanes_in(key).values()), None)
        except (NotFoundError, DamagedError):
            continue  # an older segment may still tell
    return None


def _place(lane: Lane, start: float, runs: Mapping[int, _Run]) -> int | None:
    for number, run in runs.items():
        if run.has(lane):
            return number
    if _TIME.fullmatch(lane.token) is None:
        return None
    timed = [number for number, run in runs.items() if run.timed]
    if timed and start < runs[max(timed)].until:
        return max(timed)
    return None


def _known(manifest: Manifest) -> _Run:
    tokens = {token for node in manifest.nodes for token in node.tokens}
    return _Run(tokens, (manifest.ended or manifest.written) + SLACK_S)


def _ended(report: LaneReport | None) -> float:
    if report is None or not report.job.ended:
        return math.inf
    return report.job.ended - report.skew_s
