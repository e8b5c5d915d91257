"""What goes up next, and what an answer means for the lanes."""

from collections.abc import Iterator

from trainarchive.collector.flow import Flow
from trainarchive.collector.followed import MIB, Followed
from trainarchive.collector.keeper import Keeper
from trainarchive.collector.lanes import Lanes
from trainarchive.collector.saved import Phase
from trainarchive.collector.uplink import Reply, Request
from trainarchive.run import Lane, LaneReport, Source
from trainarchive.settings import Collector as Limits
from trainarchive.stream import Answer, Append, Outcome

STATUS_S = 1.0
QUIET_STATUS_S = 5.0
"""While files are followed the answers to appends tell what is sealed: a status is only a check."""
CLOCK_S = 60.0
FULL_WAIT_S = 0.2
STATUSES_A_TIME = 32

Key = tuple[Lane, str, int]
"""Lane, source, generation."""


class Sending:
    """Builds requests from the lanes' state and applies replies to it. No network here."""

    def __init__(self, lanes: Lanes, limits: Limits) -> None:
        self._lanes = lanes
        self._limits = limits
        self._waiting: dict[Key, tuple[Keeper, Followed, Flow]] = {}
        self._clock_at = 0.0
        self._full_until = 0.0

    def wants(self, keeper: Keeper, followed: Followed) -> None:
        """This source has bytes to send."""
        for flow in followed.flows:
            if flow.waiting:
                self._waiting[keeper.lane, *flow.key] = (keeper, followed, flow)

    def request(self, now: float) -> Request:
        """Return what to say to Redis now; empty when there is nothing."""
        opens = tuple(self._opens())
        describes = tuple(self._describes())
        reports = tuple(
            (keeper.lane, keeper.report) for keeper in self._lanes if keeper.known and keeper.report_changed
        )
        clock = now >= self._clock_at and bool(self._lanes.keepers)
        return Request(opens, describes, tuple(self._appends(now)), reports, tuple(self._statuses(now)), clock)

    def next_time(self) -> float:
        """When a status is due, if nothing else happens (monotonic s)."""
        return min((keeper.next_status for keeper in self._lanes), default=float("inf"))

    def _opens(self) -> Iterator[tuple[Lane, LaneReport, tuple[Source, ...]]]:
        for keeper in self._lanes:
            if not keeper.known:
                yield keeper.lane, keeper.report, tuple(one.source for one in keeper.followed.values())

    def _describes(self) -> Iterator[tuple[Lane, tuple[Source, ...]]]:
        for keeper in self._lanes:
            if keeper.known and keeper.undescribed:
                yield keeper.lane, tuple(keeper.undescribed)

    def _appends(self, now: float) -> Iterator[Append]:
        room = self._limits.batch_mib * MIB
        if now < self._full_until:
            return
        for key in list(self._waiting):
            keeper, _, flow = self._waiting[key]
            if room <= 0:
                return
            if not keeper.known or now < keeper.hold_until:
                continue
            frames = flow.outgoing(room)
            if not frames:
                continue
            room -= sum(len(frame.data) for frame in frames)
            # To the end of the line, so that every source has its turn.
            self._waiting[key] = self._waiting.pop(key)
            yield Append(keeper.lane, flow.source, flow.generation, frames, flow.sealed)

    def _statuses(self, now: float) -> Iterator[Lane]:
        due = [keeper for keeper in self._lanes if keeper.known and now >= keeper.next_status]
        for keeper in due[:STATUSES_A_TIME]:
            keeper.next_status = now + (QUIET_STATUS_S if keeper.phase is Phase.FOLLOWING else STATUS_S)
            yield keeper.lane

    # -- answers ---------------------------------------------------------------------------

    def apply(self, reply: Reply, now: float) -> None:
        """Move the lanes to where Redis is."""
        self._apply_opened(reply)
        for append, answer in zip(reply.request.appends, reply.answers, strict=False):
            self._answer(append, answer, now)
        self._apply_statuses(reply)
        if reply.full:
            self._full_until = now + FULL_WAIT_S
            for keeper in self._lanes:
                keeper.full_since = keeper.full_since or now
        if reply.clock is not None:
            self._clock(reply.clock, now)

    def _apply_opened(self, reply: Reply) -> None:
        keepers = self._lanes.keepers
        for lane, status in reply.opened.items():
            if lane in keepers:
                keepers[lane].opened(status)
                self._wants_all(keepers[lane])
        for lane, sources in reply.request.describes:
            if lane in keepers:
                undescribed = keepers[lane].undescribed
                keepers[lane].undescribed = [source for source in undescribed if source not in sources]

    def _apply_statuses(self, reply: Reply) -> None:
        keepers = self._lanes.keepers
        for lane, report in reply.request.reports:
            if lane in keepers and keepers[lane].report is report:
                keepers[lane].report_changed = False
        for lane, status in reply.statuses.items():
            if lane in keepers:
                keepers[lane].heard(status)
                self._wants_all(keepers[lane])

    def _wants_all(self, keeper: Keeper) -> None:
        for followed in keeper.followed.values():
            self.wants(keeper, followed)

    def _answer(self, append: Append, answer: Answer, now: float) -> None:
        key = (append.lane, append.source, append.generation)
        found = self._waiting.get(key)
        if found is None:
            return
        keeper, followed, flow = found
        if answer.outcome is Outcome.MISSING or answer.epoch != keeper.epoch:
            keeper.lost()
            return
        if answer.outcome is Outcome.FULL:
            keeper.hold_until = now + FULL_WAIT_S
            keeper.full_since = keeper.full_since or now
        else:
            keeper.full_since = None
        before = flow.sealed
        if answer.outcome is Outcome.GAP:
            flow.rewind(answer.committed, followed.tail_of(flow))
            flow.accept(flow.committed, answer.sealed)
        elif answer.outcome is Outcome.OK:
            flow.accept(answer.committed, answer.sealed)
        keeper.changed |= flow.sealed > before
        if not flow.waiting:
            self._waiting.pop(key, None)

    def _clock(self, clock: tuple[float, float, float], now: float) -> None:
        """Node minus Redis, taken at the middle of the round trip: half of it is the most it can be wrong by."""
        self._clock_at = now + CLOCK_S
        redis_time, round_trip, here = clock
        for keeper in self._lanes:
            report = keeper.report
            if report.skew_error_s == 0.0 or round_trip / 2 < report.skew_error_s:
                keeper.tell(skew_s=here - round_trip / 2 - redis_time, skew_error_s=round_trip / 2)

    def forget(self, lane: Lane) -> None:
        """A lane is over."""
        for key in [key for key in self._waiting if key[0] == lane]:
            del self._waiting[key]
