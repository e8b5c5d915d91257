"""The collector's loop: notices, discovery, reading, and exchanges with Redis, all in one thread.

Only the uplink's thread waits for the network, and watchdog's for the kernel; both wake the loop.
"""

import heapq
import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from trainarchive import processes
from trainarchive.collector.files import Shared
from trainarchive.collector.flow import Held
from trainarchive.collector.followed import MIB, Followed
from trainarchive.collector.holding import Holding
from trainarchive.collector.keeper import Keeper
from trainarchive.collector.lanes import Lanes, lock
from trainarchive.collector.saved import Phase
from trainarchive.collector.sending import Sending
from trainarchive.collector.uplink import Uplink
from trainarchive.collector.waking import Waking
from trainarchive.collector.watching import Watching
from trainarchive.errors import TrainarchiveError
from trainarchive.frame import Framer
from trainarchive.processes import Process
from trainarchive.settings import Settings
from trainarchive.stream import Stream
from trainarchive.tail import BUFFER_SIZE

log = logging.getLogger("trainarchive.collector")

LOOK_S = 5.0
"""The spool is looked at this often even when no event came: inotify can run out of watches."""
SILENT_S = 1.0
"""When Redis is silent for longer and memory is full, frames go to the spool."""
STALLED_S = 0.05
DEFECT_S = 5.0
"""A file whose reading brought a defect to light is tried again after so long."""
TURN_S = 0.05
"""Files are read for so long; then notices, answers and discovery have their turn."""
SYNCS_A_TURN = 4


class Collector:
    """``run`` until ``stop`` is called; ``tick`` is one turn of the loop."""

    def __init__(self, settings: Settings, stream: Stream) -> None:
        limits = settings.collector
        settings.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = lock(settings.state)
        self.held = Held(limits.memory_mib * MIB, limits.spool_mib * MIB)
        self._limits = limits
        self._holding = Holding(settings.state)
        self._holding.connect()
        self.lanes = Lanes(Shared(settings, self.held, self._holding, bytearray(BUFFER_SIZE)))
        self.sending = Sending(self.lanes, limits)
        self._scanner = processes.Scanner()
        self._framer = Framer()
        self._waking = Waking()
        self._stopping = False
        self._watching = Watching(settings.spool, self._waking.wake)
        self.uplink = Uplink(
            stream,
            stop_at_ratio=settings.log.stop_at_memory_ratio,
            back_off_max_s=limits.back_off_max_s,
            wake=self._waking.wake,
        )
        self._heap: list[tuple[float, int, Keeper, Followed]] = []
        self._count = itertools.count()
        self.look_at = 0.0
        self._save_at = 0.0
        self._trouble = ""
        self._said = ""

    # -- life ------------------------------------------------------------------------------

    def start(self) -> None:
        """Watch, and go on from what an earlier life left."""
        self._watching.start()
        for keeper, followed in self.lanes.restore(time.monotonic()):
            self._schedule(keeper, (followed,))
        self._holding.reconcile(self._open_files())
        log.info("ready: %d runs", len(self.lanes.keepers))

    def run(self) -> None:
        """Turn until stopped."""
        self.start()
        while not self._stopping:
            wait = self.tick(time.monotonic())
            self._waking.wait(wait)
        self._end()

    def stop(self) -> None:
        """Ask for the end; safe in a signal handler."""
        self._stopping = True
        self._waking.wake()

    def _end(self) -> None:
        """The files stay open in the holder, everything unsealed is read again by the next life."""
        self._watching.stop()
        self.uplink.close()
        self.lanes.alive()
        reply = self.uplink.collect(time.monotonic())
        if reply is not None:
            self.sending.apply(reply, time.monotonic())
        nothing_open = not self._open_files()
        self.lanes.stop()
        self._holding.disconnect(end=nothing_open)
        log.info("stopped")

    # -- one turn --------------------------------------------------------------------------

    def tick(self, now: float) -> float:
        """Do what is due; return for how long (s) nothing will be, unless something wakes the loop."""
        self._look(now)
        reply = self.uplink.collect(now)
        if reply is not None:
            with self._apart("an answer of Redis"):
                self.sending.apply(reply, now)
        self._tell_trouble()
        self._discover(now)
        stalled = self._read(now)
        for keeper in self.lanes:
            with self._apart(str(keeper.lane.run)):
                self._schedule(keeper, keeper.open_rest(now))
                keeper.files.sync(SYNCS_A_TURN)
                keeper.settle()
        with self._apart("archived runs"):
            for lane in self.lanes.finish():
                self.sending.forget(lane)
        sent = True
        with self._apart("a request to Redis"):
            sent = self._send(now)
        if now >= self._save_at:
            self._save_at = now + self._limits.state_every_s
            self.lanes.alive()
            self.lanes.save()
        return self._rest(now, sent=sent, stalled=stalled)

    def _look(self, now: float) -> None:
        noticed, kicked = self._watching.collect()
        if noticed or now >= self.look_at:
            self.look_at = now + LOOK_S
            if self._holding.connect():
                self._holding.reconcile(self._open_files())
            with self._apart("notices"):
                self.lanes.sweep(now)
                closing = self.lanes.take_notices(now)
                if closing:
                    self.uplink.hurry()
                for keeper, followed in closing:
                    self._schedule(keeper, (followed,))
        for keeper in self.lanes:
            if kicked and keeper.private_name in kicked:
                keeper.clock.kick()

    def _discover(self, now: float) -> None:
        due = [keeper for keeper in self.lanes if keeper.phase is Phase.FOLLOWING and now >= keeper.clock.due]
        if not due:
            return
        found: dict[int, list[Process]] = {}
        with self._apart("processes"):
            found = self._scanner.scan({keeper.lane.run.job_id: keeper.report.job.uid for keeper in due})
        for keeper in due:
            with self._apart(f"{keeper.lane.run}: discovery"):
                self._schedule(keeper, keeper.discover(found.get(keeper.lane.run.job_id, ()), now))

    def _open_files(self) -> dict[str, int]:
        return {name: fd for keeper in self.lanes for name, fd in keeper.files.open_files().items()}

    @contextmanager
    def _apart(self, what: str) -> Iterator[None]:
        """Keep a defect that one run brings to light from the node's other runs; it is logged, with its traceback."""
        try:
            yield
        except TrainarchiveError as error:
            self._say(f"{what}: {error}")
        except Exception:
            log.exception("%s: a defect", what)

    def _schedule(self, keeper: Keeper, fresh: Iterable[Followed]) -> None:
        for followed in fresh:
            followed.entry = next(self._count)
            heapq.heappush(self._heap, (followed.pace.due, followed.entry, keeper, followed))

    def _read(self, now: float) -> bool:
        """Read every file that is due; say whether reading waits for room. Closing files have the spool."""
        heap = self._heap
        stalled = self._no_room(now)
        waiting = []
        enough = time.monotonic() + TURN_S
        while heap and heap[0][0] <= now and time.monotonic() < enough:
            entry = heapq.heappop(heap)
            _, number, keeper, followed = entry
            if not followed.is_open() or number != followed.entry:
                continue
            stalled = stalled or self.held.full
            if stalled and followed.closing_until is None:
                waiting.append(entry)
                with self._apart(f"{keeper.lane.run}: {followed.source.path!a}"):
                    followed.look()
                continue
            followed.pace.due = now + DEFECT_S
            with self._apart(f"{keeper.lane.run}: {followed.source.path!a}"):
                followed.read(now, self._framer)
            self.sending.wants(keeper, followed)
            if followed.is_open():
                self._schedule(keeper, (followed,))
            else:
                keeper.let_go(followed)
        for entry in waiting:
            heapq.heappush(heap, entry)
        return stalled

    def _no_room(self, now: float) -> bool:
        """With memory full, what cannot be sent now goes to disk; say whether memory is full all the same."""
        if not self.held.full:
            return False
        down = self.uplink.down_since is not None and now - self.uplink.down_since >= SILENT_S
        try:
            for keeper in self.lanes:
                if down or self.sending.full_for(keeper, now) >= SILENT_S:
                    keeper.files.spill()
        except TrainarchiveError as error:
            self._say(f"{error}: reading waits")
        return self.held.full

    def _send(self, now: float) -> bool:
        if not self.uplink.idle(now):
            return True
        request = self.sending.request(now)
        if not request:
            return False
        self.uplink.submit(request)
        return True

    def _rest(self, now: float, *, sent: bool, stalled: bool) -> float:
        times = [self.look_at]
        if self._heap:
            times.append(now + STALLED_S if stalled else self._heap[0][0])
        if not sent:
            times.append(self.sending.next_time())
        elif self.uplink.next_try > now:
            times.append(self.uplink.next_try)
        times.extend(keeper.clock.due for keeper in self.lanes if keeper.phase is Phase.FOLLOWING)
        return min(max(0.0, min(times) - time.monotonic()), LOOK_S)

    def _tell_trouble(self) -> None:
        if self.uplink.trouble != self._trouble:
            self._trouble = self.uplink.trouble
            log.warning("%s", self._trouble or "Redis answers again")

    def _say(self, text: str) -> None:
        """Log a trouble that comes back every turn, but not every turn."""
        if text != self._said:
            self._said = text
            log.warning("%s", text)
