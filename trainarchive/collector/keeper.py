"""One lane's life on its node: followed, closing, drained, archived; what is told of it, and what is kept."""

import logging
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from trainarchive.collector.files import Files, Shared
from trainarchive.collector.finding import Clock
from trainarchive.collector.followed import Followed
from trainarchive.collector.saved import Phase, SavedFlow, SavedLane, SavedSource, save
from trainarchive.errors import UnavailableError
from trainarchive.notice import Notice
from trainarchive.processes import Process
from trainarchive.run import Lane, LaneReport
from trainarchive.stream import LaneStatus, State
from trainarchive.tail import Saved

log = logging.getLogger("trainarchive.collector")

OPEN_REST_S = 0.2
SAVE_AGAIN_S = 1.0
SEND_UNSAVED_S = 5.0


class Keeper:
    """Keeps one lane. The daemon calls; nothing here waits for the network."""

    def __init__(
        self, lane: Lane, report: LaneReport, directory: Path, shared: Shared, *, first_generation: int
    ) -> None:
        """``first_generation`` is 0, or a number never used before where the lane's state was lost."""
        self.lane = lane
        self.report = report
        self.phase = Phase.FOLLOWING
        self.files = Files(lane, directory, shared, first_generation=first_generation)
        self.clock = Clock(shared.settings.collector.discovery_s)
        self.notices: list[str] = []
        self.epoch = ""
        self.known = False
        self.archived = False
        self.told_safe = False
        self.report_changed = False
        self.hold_until = 0.0
        self.full_since: float | None = None
        self.next_status = 0.0
        self.changed = True
        self._stirred = True
        self._directory = directory
        self._close_within_s = shared.settings.collector.close_within_s
        self._save_trouble = ""
        self._save_again_at = 0.0
        self._unsaved_since: float | None = None
        self._unsaved = False
        self._close_until = 0.0
        self._open_rest_at = 0.0

    @property
    def private_name(self) -> str:
        """Name of the run's own directory below the spool's ``jobs/``."""
        return Path(self.report.job.private_dir).name

    def stir(self) -> None:
        """Something changed: state is to be written, and the lane's end may have come."""
        self.changed = self._stirred = True

    # -- discovery -------------------------------------------------------------------------

    def discover(self, processes: Iterable[Process], now: float) -> list[Followed]:
        """Follow what is new; return it, and unlinked files that are let go."""
        self.clock.looked(now)
        fresh = self.files.discover(self.report.job, processes, now)
        self._tell_refusals()
        for followed in self.files:
            if followed.tail is not None and followed.tail.too_large:
                self.note(f"{followed.source.path}: larger than can be archived; the bytes beyond are left out")
        if fresh or self.files.undescribed:
            self.stir()
        return fresh + self.files.tidy(now, self._close_within_s)

    def _tell_refusals(self) -> None:
        refusals = tuple(self.files.finder.refused)
        if refusals != self.report.refusals:
            self.tell(refusals=refusals)

    def open_rest(self, now: float) -> list[Followed]:
        """While files are let go, try again what could not be opened for want of descriptors or the like."""
        finder = self.files.finder
        if self.phase is Phase.FOLLOWING or not finder.unopened or now < self._open_rest_at:
            return []
        self._open_rest_at = now + OPEN_REST_S
        if now >= self._close_until:
            finder.give_up()
            self._tell_refusals()
            self.stir()
            return []
        fresh = self.files.open([candidate for candidate, _ in finder.unopened], self.report.job.uid)
        for followed in fresh:
            followed.close(self._close_until)
        return fresh

    def tell(self, **changes: object) -> None:
        """Change the report, which goes up with the next exchange."""
        self.report = msgspec.structs.replace(self.report, **changes)
        self.report_changed = True
        self.stir()

    def note(self, text: str) -> None:
        """Keep a remark for the manifest, once."""
        if text not in self.report.notes:
            self.tell(notes=(*self.report.notes, text))

    def skewed(self, skew_s: float, error_s: float) -> None:
        """Take a new measurement of this node's clock, unless it says nothing new."""
        before = self.report
        if before.skew_error_s == 0.0 or abs(before.skew_s - skew_s) > before.skew_error_s + error_s:
            self.tell(skew_s=skew_s, skew_error_s=error_s)

    # -- the end ---------------------------------------------------------------------------

    def close(self, now: float, notice: Notice | None = None) -> list[Followed]:
        """The run is over on this node: look once more, then let every file go. Return all that is to be read."""
        if self.phase is Phase.FOLLOWING:
            self.discover((), now)
            if notice is not None:
                ends = {"exit_code": notice.job.exit_code, "derived_exit_code": notice.job.derived_exit_code}
                self.tell(job=msgspec.structs.replace(self.report.job, ended=notice.time, **ends))
            self.phase = Phase.CLOSING
            self.next_status = 0.0
            self.reclose(now)
            log.info("%s: over on this node, %d files are let go", self.lane.run, len(self.files.followed))
            self.save(durable=True)
        return [followed for followed in self.files if followed.is_open()]

    def reclose(self, now: float) -> None:
        """Go on closing after a restart."""
        self._close_until = now + self._close_within_s
        self.files.close(self._close_until)

    def let_go(self, followed: Followed) -> None:
        """A file was closed."""
        self.files.let_go(followed)
        self.stir()

    def settle(self) -> None:
        """With every file let go and every byte in Redis, the lane is drained; no longer, if Redis lost some."""
        if not self._stirred or self.phase is Phase.FOLLOWING:
            return
        self._stirred = False
        sent = self.files.sent
        if self.phase is Phase.DRAINED and not sent:
            self.phase = Phase.CLOSING
            self.tell(drained=False)
        elif self.phase is Phase.CLOSING and sent and self.known and not self._unsaid:
            self.phase = Phase.DRAINED
            self.next_status = 0.0
            self.tell(drained=True, drained_at=time.time())
            log.info("%s: drained", self.lane.run)

    @property
    def _unsaid(self) -> bool:
        return bool(self.files.undescribed or self.files.finder.unopened)

    @property
    def safe(self) -> bool:
        """All bytes of this node are in the store."""
        return self.phase is Phase.DRAINED and self.files.done

    def forget(self) -> None:
        """The manifest covers the lane: nothing of it is needed here any more."""
        for flow in self.files.flows:
            flow.forget()
        shutil.rmtree(self._directory, ignore_errors=True)
        log.info("%s: archived", self.lane.run)

    # -- what Redis says -------------------------------------------------------------------

    def opened(self, status: LaneStatus) -> None:
        """Redis knows the lane (again): go on from what it has."""
        self.known = True
        self.epoch = status.epoch
        self._take(status)

    def lost(self) -> None:
        """Redis does not know the lane, or not as we left it: it must be opened again."""
        self.known = False
        if self.phase is Phase.DRAINED:
            # It must not be opened as drained before Redis has all of it again.
            self.phase = Phase.CLOSING
            self.tell(drained=False)

    def heard(self, status: LaneStatus | None) -> None:
        """Take a status: what is sealed, and the end."""
        if status is None or status.epoch != self.epoch:
            self.lost()
        elif status.state is State.ARCHIVED and self.phase is Phase.DRAINED:
            self.archived = True
        else:
            self._take(status)

    def _take(self, status: LaneStatus) -> None:
        for followed in self.files:
            for flow in followed.flows:
                sealed = status.sealed.get(flow.key, 0)
                if sealed > flow.sealed:
                    flow.accept(flow.committed, sealed)
                    self.changed = True
                committed = max(status.committed.get(flow.key, 0), flow.sealed)
                flow.rewind(committed, followed.tail_of(flow))
        self._stirred = True

    # -- state -----------------------------------------------------------------------------

    def save(self, *, durable: bool = False) -> bool:
        """Write the state file; False, and said once, where the disk takes nothing."""
        tails = {one.source.id: one.state() for one in self.files}
        entries = tuple(_saved(one, tails[one.source.id]) for one in self.files)
        saved = SavedLane(1, self.lane.name, self.report, self.phase, tuple(self.notices), entries)
        try:
            save(self._directory, saved, durable=durable)
        except UnavailableError as error:
            if self._save_trouble != str(error):
                self._save_trouble = str(error)
                log.warning("%s: %s", self.lane.run, error)
            return False
        for one in self.files:
            one.saved_tail = tails[one.source.id]
        self._save_trouble = ""
        self.changed = False
        return True

    def save_starts(self, now: float) -> bool:
        """Before bytes go up, the state must be able to tell their file from one rewritten later.

        With a disk that takes nothing they go up all the same, after a while, and the manifest says so.
        """
        if not any(one.start_changed() for one in self.files):
            return True
        if now < self._save_again_at:
            return self._unsaved
        if self.save():
            self._unsaved_since = None
            self._unsaved = False
            return True
        self._save_again_at = now + SAVE_AGAIN_S
        self._unsaved_since = self._unsaved_since or now
        if self.phase is not Phase.FOLLOWING or now - self._unsaved_since > SEND_UNSAVED_S:
            self._unsaved = True
            self.note("state not saved for want of disk: a crash could have mixed generations of rewritten files")
        return self._unsaved

    def stop(self) -> None:
        """The collector stops: keep everything for its next life."""
        self.save(durable=True)
        for flow in self.files.flows:
            flow.close()
        for followed in self.files:
            if followed.tail is not None:
                followed.tail.close()


def _saved(followed: Followed, tail: Saved | None) -> SavedSource:
    flows = tuple(SavedFlow(flow.generation, flow.sealed, flow.position, flow.ended) for flow in followed.flows)
    return SavedSource(followed.source, tail, followed.tail is None, flows)
