"""The way up: one exchange with the log Redis at a time, in a thread of its own.

The daemon never waits for the network: it hands over a ``Request`` and looks later for the
``Reply``. A request that failed is simply made again from the flows' state, since everything in
it may be sent twice.
"""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import msgspec

from trainarchive.errors import TrainarchiveError, UnavailableError
from trainarchive.run import Lane, LaneReport, Source
from trainarchive.stream import Answer, Append, LaneStatus, Stream

BACK_OFF_START_S = 0.1
MEMORY_EVERY_S = 0.5


class Request(msgspec.Struct, frozen=True):
    """What to tell and ask, in this order: open lanes, describe sources, append, report, ask for status."""

    opens: tuple[tuple[Lane, LaneReport, tuple[Source, ...]], ...] = ()
    describes: tuple[tuple[Lane, tuple[Source, ...]], ...] = ()
    appends: tuple[Append, ...] = ()
    reports: tuple[tuple[Lane, LaneReport], ...] = ()
    statuses: tuple[Lane, ...] = ()
    ask_clock: bool = False

    def __bool__(self) -> bool:
        return bool(self.opens or self.describes or self.appends or self.reports or self.statuses or self.ask_clock)


class Reply(msgspec.Struct):
    """Answers to a ``Request``. ``clock``: Redis time (Unix s), round trip (s), this node's time (Unix s).

    ``troubles``: lanes whose record in Redis cannot be used, and why. The others go on.
    """

    request: Request
    opened: dict[Lane, LaneStatus] = msgspec.field(default_factory=dict)
    answers: tuple[Answer, ...] = ()
    statuses: dict[Lane, LaneStatus | None] = msgspec.field(default_factory=dict)
    clock: tuple[float, float, float] | None = None
    full: bool = False
    troubles: dict[Lane, str] = msgspec.field(default_factory=dict)


class Uplink:
    """``submit`` when ``idle(now)``; ``collect`` gives the reply once. ``wake`` is called when there is one."""

    def __init__(
        self, stream: Stream, *, stop_at_ratio: float, back_off_max_s: float, wake: Callable[[], None]
    ) -> None:
        self._stream = stream
        self._stop_at_ratio = stop_at_ratio
        self._back_off_max_s = back_off_max_s
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, "uplink")
        self._underway: Future[Reply] | None = None
        self._retry_at = 0.0
        self._back_off_s = 0.0
        self._memory_at = 0.0
        self._full = False
        self.trouble = ""
        self.down_since: float | None = None

    def idle(self, now: float) -> bool:
        """Nothing is underway, and the back-off after a failure is over."""
        return self._underway is None and now >= self._retry_at

    @property
    def next_try(self) -> float:
        """When the back-off ends (monotonic s)."""
        return self._retry_at

    def hurry(self) -> None:
        """A file is about to go: ask Redis now, whatever the back-off."""
        self._retry_at = 0.0

    def submit(self, request: Request) -> None:
        """Begin an exchange."""
        self._underway = self._thread.submit(self._exchange, request)
        self._underway.add_done_callback(lambda _: self._wake())

    def collect(self, now: float) -> Reply | None:
        """Return the reply that came in, if one did. A failure sets the back-off and ``trouble``."""
        underway = self._underway
        if underway is None or not underway.done():
            return None
        self._underway = None
        try:
            reply = underway.result()
        except TrainarchiveError as error:
            self.trouble = str(error)
            if self.down_since is None:
                self.down_since = now
            self._back_off_s = min(max(self._back_off_s * 2, BACK_OFF_START_S), self._back_off_max_s)
            # The jitter keeps a thousand nodes from coming back in one moment.
            self._retry_at = now + self._back_off_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
            return None
        self.trouble = ""
        self.down_since = None
        self._back_off_s = 0.0
        return reply

    def close(self) -> None:
        """End the thread; what is underway is waited for (the socket's time-out bounds it)."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _exchange(self, request: Request) -> Reply:
        stream = self._stream
        reply = Reply(request)
        for lane, report, sources in request.opens:
            with _apart(reply, lane):
                reply.opened[lane] = stream.open(lane, report, sources)
        for lane, sources in request.describes:
            with _apart(reply, lane):
                stream.describe(lane, sources)
        if request.appends:
            reply.full = self._is_full()
            if not reply.full:
                reply.answers = tuple(stream.append(request.appends))
        for lane, report in request.reports:
            with _apart(reply, lane):
                stream.report(lane, report)
        for lane in request.statuses:
            with _apart(reply, lane):
                reply.statuses[lane] = stream.status(lane)
        if request.ask_clock:
            # From outside, whatever the call does meanwhile: only so half of the round trip bounds the error.
            before, (redis_time, _), after = time.time(), stream.now(), time.time()
            reply.clock = (redis_time, after - before, after)
        return reply

    def _is_full(self) -> bool:
        """Appends stop before Redis is full: at 100 % nothing could free its memory any more."""
        now = time.monotonic()
        if now >= self._memory_at:
            self._full = self._stream.memory_ratio() >= self._stop_at_ratio
            self._memory_at = now + MEMORY_EVERY_S
        return self._full


@contextmanager
def _apart(reply: Reply, lane: Lane) -> Iterator[None]:
    """Keep one lane's trouble from the others; a Redis that does not answer is everybody's."""
    try:
        yield
    except UnavailableError:
        raise
    except TrainarchiveError as error:
        reply.troubles[lane] = str(error)
