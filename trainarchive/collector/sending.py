"""What goes up next, and what an answer means for the lanes."""

import logging
from collections.abc import Iterator

from trainarchive.collector.flow import Flow, weight
from trainarchive.collector.followed import MIB, Followed
from trainarchive.collector.keeper import Keeper
from trainarchive.collector.lanes import Lanes
from trainarchive.collector.saved import Phase
from trainarchive.collector.uplink import Reply, Request
from trainarchive.errors import TrainarchiveError
from trainarchive.frame import Frame
from trainarchive.run import Lane, LaneReport, Source
from trainarchive.settings import Collector as Limits
from trainarchive.stream import Answer, Append, Outcome

log = logging.getLogger("trainarchive.collector")

STATUS_S = 1.0
QUIET_STATUS_S = 5.0
"""While files are followed the answers to appends tell what is sealed: a status is only a check."""
CLOCK_S = 60.0
FULL_WAIT_S = 0.2
FULL_WAIT_MAX_S = 2.0
TROUBLE_WAIT_S = 10.0
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
        self._skew: tuple[float, float] | None = None
        self._full_since: float | None = None
        self._full_until = 0.0

    def wants(self, keeper: Keeper, followed: Followed) -> None:
        """This source has bytes to send."""
        for flow in followed.flows:
            if flow.waiting:
                self._waiting[keeper.lane, *flow.key] = (keeper, followed, flow)

    def forget(self, lane: Lane) -> None:
        """A lane is over."""
        for key in [key for key in self._waiting if key[0] == lane]:
            del self._waiting[key]

    def full_for(self, keeper: Keeper, now: float) -> float:
        """Return for how long (s) Redis has taken nothing of this lane for want of room."""
        since = [one for one in (keeper.full_since, self._full_since) if one is not None]
        return now - min(since) if since else 0.0

    # -- requests --------------------------------------------------------------------------

    def request(self, now: float) -> Request:
        """Return what to say to Redis now; empty when there is nothing."""
        ready = [keeper for keeper in self._lanes if now >= keeper.hold_until]
        return Request(
            opens=tuple(self._opens(ready)),
            describes=tuple(
                (one.lane, tuple(one.files.undescribed.values()))
                for one in ready
                if one.known and one.files.undescribed
            ),
            appends=tuple(self._appends(now)),
            reports=tuple((one.lane, one.report) for one in ready if one.known and one.report_changed),
            statuses=tuple(self._statuses(ready, now)),
            ask_clock=now >= self._clock_at and bool(ready),
        )

    def next_time(self) -> float:
        """When a status is due, if nothing else happens (monotonic s)."""
        return min((max(keeper.next_status, keeper.hold_until) for keeper in self._lanes), default=float("inf"))

    def _opens(self, ready: list[Keeper]) -> Iterator[tuple[Lane, LaneReport, tuple[Source, ...]]]:
        for keeper in ready:
            if not keeper.known:
                yield keeper.lane, keeper.report, tuple(one.source for one in keeper.files)

    def _appends(self, now: float) -> Iterator[Append]:
        room = self._limits.batch_mib * MIB
        if now < self._full_until:
            return
        starts_saved: dict[Lane, bool] = {}
        for key in list(self._waiting):
            keeper, followed, flow = self._waiting[key]
            if room <= 0:
                return
            if not keeper.known or now < keeper.hold_until:
                continue
            if keeper.lane not in starts_saved:
                starts_saved[keeper.lane] = keeper.save_starts(now)
            if not starts_saved[keeper.lane]:
                continue
            # A lane that is full is only asked whether it still is.
            frames = _outgoing(flow, followed, room if keeper.full_since is None else 1)
            if frames:
                room -= sum(weight(frame) for frame in frames)
                # To the end of the line, so that every source has its turn.
                self._waiting[key] = self._waiting.pop(key)
                yield Append(keeper.lane, flow.source, flow.generation, frames, flow.sealed)

    def _statuses(self, ready: list[Keeper], now: float) -> Iterator[Lane]:
        due = [keeper for keeper in ready if keeper.known and now >= keeper.next_status]
        for keeper in due[:STATUSES_A_TIME]:
            keeper.next_status = now + (QUIET_STATUS_S if keeper.phase is Phase.FOLLOWING else STATUS_S)
            yield keeper.lane

    # -- answers ---------------------------------------------------------------------------

    def apply(self, reply: Reply, now: float) -> None:
        """Move the lanes to where Redis is."""
        for lane, trouble in reply.troubles.items():
            self._trouble(lane, trouble, now)
        self._apply_opened(reply)
        for append, answer in zip(reply.request.appends, reply.answers, strict=False):
            try:
                self._answer(append, answer, now)
            except TrainarchiveError as error:
                self._trouble(append.lane, str(error), now)
        self._apply_statuses(reply)
        if reply.request.appends:
            self._full_since = (self._full_since or now) if reply.full else None
            self._full_until = now + FULL_WAIT_S if reply.full else 0.0
        if reply.clock is not None:
            self._clock(reply.clock, now)

    def _trouble(self, lane: Lane, trouble: str, now: float) -> None:
        keeper = self._lanes.keepers.get(lane)
        if keeper is not None:
            log.warning("%s: waits, since its record in Redis, or its disk, cannot be used: %s", lane.run, trouble)
            keeper.hold_until = now + TROUBLE_WAIT_S
            keeper.full_since = keeper.full_since or now  # its frames go to disk: the others need the memory
            keeper.next_status = keeper.hold_until

    def _apply_opened(self, reply: Reply) -> None:
        keepers = self._lanes.keepers
        for lane, status in reply.opened.items():
            if lane in keepers:
                keepers[lane].opened(status)
                self._wants_all(keepers[lane])
                if self._skew is not None:
                    keepers[lane].skewed(*self._skew)
        for lane, sources in reply.request.describes:
            if lane in keepers and lane not in reply.troubles:
                keepers[lane].files.described(sources)
                keepers[lane].stir()

    def _apply_statuses(self, reply: Reply) -> None:
        keepers = self._lanes.keepers
        for lane, report in reply.request.reports:
            if lane in keepers and keepers[lane].report is report and lane not in reply.troubles:
                keepers[lane].report_changed = False
        for lane, status in reply.statuses.items():
            if lane in keepers:
                keepers[lane].heard(status)
                self._wants_all(keepers[lane])

    def _wants_all(self, keeper: Keeper) -> None:
        for followed in keeper.files:
            self.wants(keeper, followed)

    def _answer(self, append: Append, answer: Answer, now: float) -> None:
        key = (append.lane, append.source, append.generation)
        found = self._waiting.get(key)
        if found is None:
            return
        keeper, followed, flow = found
        if answer.outcome is Outcome.BROKEN:
            self._trouble(append.lane, "an append failed", now)
            return
        if answer.outcome is Outcome.MISSING or answer.epoch != keeper.epoch:
            keeper.lost()
            return
        _note_full(keeper, answer, now)
        before = flow.sealed
        if answer.outcome is Outcome.GAP:
            flow.rewind(answer.committed, followed.tail_of(flow))
            flow.accept(flow.committed, answer.sealed)
        else:
            flow.accept(answer.committed, answer.sealed)
        keeper.changed |= flow.sealed > before
        if not flow.waiting:
            self._waiting.pop(key, None)
            keeper.stir()

    def _clock(self, clock: tuple[float, float, float], now: float) -> None:
        """Node minus Redis, taken at the middle of the round trip: half of it is the most it can be wrong by."""
        self._clock_at = now + CLOCK_S
        redis_time, round_trip, here = clock
        self._skew = (here - round_trip / 2 - redis_time, round_trip / 2)
        for keeper in self._lanes:
            keeper.skewed(*self._skew)


def _outgoing(flow: Flow, followed: Followed, room: int) -> list[Frame]:
    try:
        return flow.outgoing(room)
    except TrainarchiveError as error:
        log.warning("%s: %s", ascii(followed.source.path), error)
        flow.give_up_spool(followed.tail_of(flow), error.what)
        return []


def _note_full(keeper: Keeper, answer: Answer, now: float) -> None:
    if answer.outcome is not Outcome.FULL:
        keeper.full_since = None
        return
    keeper.full_since = keeper.full_since or now
    keeper.hold_until = now + min(max(FULL_WAIT_S, (now - keeper.full_since) / 4), FULL_WAIT_MAX_S)
