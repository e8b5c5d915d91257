"""The sweep: what should be done now, told from the lanes as the log Redis knows them.

Celery's messages are hints that may be lost, doubled or late. The sweep looks at the state and
finds whatever they should have done; to decide (``decide``, pure) stands apart from looking
(``Sweeper.plan``).
"""

import logging
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from trainarchive import nodes, sealing
from trainarchive.errors import DamagedError, TrainarchiveError, UnavailableError
from trainarchive.finishing import FINISHED
from trainarchive.nodes import ENDED_SEEN
from trainarchive.run import Lane, LaneReport, RunKey
from trainarchive.settings import Settings
from trainarchive.stream import LaneStatus, State, Stream

PRESSURE = "pressure"
"""In a lane's control: ``1`` makes appends answer FULL."""
LOOKED = "looked"
"""In a lane's control: when the sweep last read the report of a lane that is open but quiet."""

LOOK_EVERY_S = 60.0
EASE = 0.9
"""Pressure ends at this share of the ratio at which it began, so that it does not flutter."""
REMEMBER_S = 30.0
"""How long an archived lane's state is believed without asking: a day's worth of them stays in Redis."""

_log = logging.getLogger(__name__)


class Plan(msgspec.Struct, frozen=True):
    """What should be done now, the most urgent first.

    ``ended``: lanes to mark as seen ended; ``looked``: lanes whose report was read although
    they are open; ``press`` and ``ease``: lanes whose collector has to stop or may go on.
    ``reaps``: runs whose replaced objects may be deleted.
    """

    seals: tuple[Lane, ...] = ()
    finishes: tuple[RunKey, ...] = ()
    reaps: tuple[RunKey, ...] = ()
    ended: tuple[Lane, ...] = ()
    looked: tuple[Lane, ...] = ()
    press: tuple[Lane, ...] = ()
    ease: tuple[Lane, ...] = ()


class Sweeper:
    """Looks at all lanes. One a process; it remembers nothing but what archived lanes look like."""

    def __init__(self, stream: Stream, config: Settings) -> None:
        self._stream = stream
        self._config = config
        self._archived: dict[Lane, tuple[float, LaneStatus]] = {}

    def plan(self) -> Plan:
        """Return what should be done now, and tell the lanes what they have to know."""
        now, _ = self._stream.now()
        ratio = self._stream.memory_ratio()
        lanes = self._survey(now)
        reports = {
            lane: report for lane in to_look(lanes, now, self._config) if (report := self._report(lane)) is not None
        }
        plan = decide(lanes, reports, now, ratio, self._config)
        self._tell(plan, now)
        return plan

    def _survey(self, now: float) -> list[LaneStatus]:
        lanes = set(self._stream.lanes())
        kept = {lane: known for lane, known in self._archived.items() if lane in lanes and now < known[0]}
        found = {lane: status for lane, (_, status) in kept.items()}
        for lane, status in self._stream.statuses(sorted(lanes - found.keys())):
            if isinstance(status, DamagedError):
                _log.error("%s", status)
            elif status is not None:
                found[lane] = status
                if status.state is State.ARCHIVED:
                    kept[lane] = now + REMEMBER_S, status
        self._archived = kept
        return [found[lane] for lane in sorted(found)]

    def _report(self, lane: Lane) -> LaneReport | None:
        try:
            about = self._stream.about(lane)
        except UnavailableError:
            raise
        except TrainarchiveError as error:
            _log.error("%s", error)
            return None
        return about[0] if about is not None else None

    def _tell(self, plan: Plan, now: float) -> None:
        for lanes, values in (
            (plan.ended, {ENDED_SEEN: f"{now:.6f}"}),
            (plan.looked, {LOOKED: f"{now:.6f}"}),
            (plan.press, {PRESSURE: "1"}),
            (plan.ease, {PRESSURE: "0"}),
        ):
            for lane in lanes:
                self._stream.control(lane, values)


def to_look(lanes: Iterable[LaneStatus], now: float, config: Settings) -> list[Lane]:
    """Return the lanes whose reports are needed: of each ending run one, and open ones that are long quiet.

    A collector that died after its job's Epilog never drains its lane; its report says that the job ended.
    """
    wanted: list[Lane] = []
    ending: set[tuple[RunKey, str]] = set()
    for status in lanes:
        lane = status.lane
        if status.state is State.DRAINED and (lane.run, lane.token) not in ending:
            ending.add((lane.run, lane.token))
            wanted.append(lane)
        elif status.state is State.OPEN and ENDED_SEEN not in status.control:
            quiet = now - max(status.opened, status.last_append) >= config.finish.deadline_s
            if quiet and now - nodes.moment(status.control.get(LOOKED, ""), 0.0, now) >= LOOK_EVERY_S:
                wanted.append(lane)
    return wanted


def decide(
    lanes: Sequence[LaneStatus],
    reports: Mapping[Lane, LaneReport],
    now: float,
    ratio: float,
    config: Settings,
) -> Plan:
    """Return what should be done. ``now``: Unix s, Redis' clock; ``ratio``: its used memory over its limit."""
    stop = config.log.stop_at_memory_ratio
    pressed = ratio > stop
    waiting = [status for status in lanes if sealing.ready(status, now, config.seal, pressed=pressed)]
    runs: dict[RunKey, list[LaneStatus]] = {}
    for status in lanes:
        runs.setdefault(status.lane.run, []).append(status)
    held = [status for status in lanes if status.state is State.OPEN]
    return Plan(
        seals=tuple(status.lane for status in sorted(waiting, key=lambda status: (-status.pending, status.lane))),
        finishes=tuple(run for run, found in runs.items() if _is_due(found, reports, now, config)),
        reaps=tuple(run for run, found in runs.items() if _is_old(found, now, config)),
        ended=tuple(s.lane for s in lanes if ENDED_SEEN not in s.control and nodes.has_ended(s, reports.get(s.lane))),
        looked=tuple(s.lane for s in held if s.lane in reports and not nodes.has_ended(s, reports[s.lane])),
        press=tuple(s.lane for s in held if pressed and s.control.get(PRESSURE) != "1"),
        ease=tuple(s.lane for s in lanes if ratio <= stop * EASE and s.control.get(PRESSURE) == "1"),
    )


def _is_due(lanes: Sequence[LaneStatus], reports: Mapping[Lane, LaneReport], now: float, config: Settings) -> bool:
    """Say whether a run should be finished: all its nodes are done and sealed, or it is late."""
    late = nodes.is_late(((status, reports.get(status.lane)) for status in lanes), now, config.finish)
    if not late and not _all_done(lanes, reports):
        return False
    return any(_has_news(status, now, config) for status in lanes if status.state is not State.ARCHIVED)


def _all_done(lanes: Sequence[LaneStatus], reports: Mapping[Lane, LaneReport]) -> bool:
    busy = {status.lane.node for status in lanes if status.state is State.OPEN or status.entries}
    done = {status.lane.node for status in lanes} - busy
    told = [reports[status.lane] for status in lanes if status.lane in reports]
    return not busy and done.issuperset(nodes.expected(told)) and len(done) >= nodes.number(told)


def _has_news(status: LaneStatus, now: float, config: Settings) -> bool:
    """Say whether a finish would find more than the last one did, or may at last let a drained lane go."""
    state, _, when = status.control.get(FINISHED, "").partition(" ")
    if state != status.state:
        return True
    finished = nodes.moment(when, 0.0, now)
    if now < finished + config.finish.deadline_s:
        return status.state is State.DRAINED and max(status.last_append, status.last_commit) > finished
    return status.state is State.DRAINED or max(status.last_append, status.last_commit) > finished


def _is_old(lanes: Sequence[LaneStatus], now: float, config: Settings) -> bool:
    last = max(max(status.opened, status.last_commit) for status in lanes)
    return all(status.state is State.ARCHIVED for status in lanes) and now >= last + config.finish.keep_level0_s
