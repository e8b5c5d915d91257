"""One lane's life on its node: find its files, follow them, let them go, and see them archived."""

import logging
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from trainarchive import sources
from trainarchive.collector.finding import Clock, Finder, Opened
from trainarchive.collector.flow import Flow, Held
from trainarchive.collector.followed import MIB, Followed
from trainarchive.collector.holding import Holding
from trainarchive.collector.saved import Phase, SavedFlow, SavedLane, SavedSource, save
from trainarchive.errors import UnavailableError
from trainarchive.notice import Notice
from trainarchive.processes import Process
from trainarchive.run import Lane, LaneReport, Source
from trainarchive.settings import Settings
from trainarchive.stream import LaneStatus, State
from trainarchive.tail import Tail

log = logging.getLogger("trainarchive.collector")

OVER_RUN_KEEP = MIB
"""Over the run's ceiling, this much of each source's end is still kept: where the last words are."""


class Shared(msgspec.Struct, frozen=True):
    """What all lanes of a collector use together."""

    settings: Settings
    held: Held
    holder: Holding
    buffer: bytearray


class Keeper:
    """Keeps one lane. The daemon calls; nothing here waits for the network."""

    def __init__(
        self, lane: Lane, report: LaneReport, directory: Path, shared: Shared, *, first_generation: int
    ) -> None:
        """``first_generation`` is 0, or a number never used before where the lane's state was lost."""
        self.lane = lane
        self.report = report
        self.phase = Phase.FOLLOWING
        self.notices: list[str] = []
        self.followed: dict[str, Followed] = {}
        self.clock = Clock(shared.settings.collector.discovery_s)
        self.finder = Finder(lane, shared.settings.sources)
        self.undescribed: list[Source] = []
        self.epoch = ""
        self.known = False
        self.archived = False
        self.told_safe = False
        self.report_changed = False
        self.hold_until = 0.0
        self.full_since: float | None = None
        self.next_status = 0.0
        self.changed = True
        self._directory = directory
        self._shared = shared
        self._first_generation = first_generation
        self._save_trouble = ""

    @property
    def private_name(self) -> str:
        """Name of the run's own directory below the spool's ``jobs/``."""
        return Path(self.report.job.private_dir).name

    # -- discovery -------------------------------------------------------------------------

    def discover(self, processes: Iterable[Process], now: float) -> list[Followed]:
        """Follow what is new; return it."""
        self.clock.looked(now)
        job = self.report.job
        new = []
        for candidate in self.finder.candidates(job, processes):
            source_id = self.finder.known(candidate)
            if source_id is None:
                new.append(candidate)
            else:
                self._learn(self.followed[source_id], candidate)
        fresh = [followed for one in self.finder.open(new, job.uid) if (followed := self._follow(one)) is not None]
        refusals = tuple(self.finder.refused)
        if len(refusals) > len(self.report.refusals):
            self.tell(refusals=refusals)
        self._hold_to_ceiling()
        return fresh

    def _learn(self, followed: Followed, candidate: sources.Candidate) -> None:
        better = sources.merge(followed.source, candidate)
        if better is not None:
            followed.source = better
            self.undescribed.append(better)
            self.changed = True

    def _follow(self, opened: Opened) -> Followed | None:
        tail = Tail(opened.fd, generation=self._first_generation, buffer=self._shared.buffer)
        source_id = sources.source_id(self.lane.node, tail.identity, opened.candidate.path)
        if source_id in self.followed:
            tail.close()
            return None
        source = sources.describe(opened.candidate, source_id, self.lane.node)
        flow = Flow(source_id, tail.generation, self._shared.held, self.spool_path(source_id, tail.generation))
        followed = self.add(source, tail, [flow])
        self.undescribed.append(source)
        self.changed = True
        log.info("%s: follows %s %s (rank %s)", self.lane.run, source.kind, ascii(source.path), source.rank)
        return followed

    def add(self, source: Source, tail: Tail | None, flows: list[Flow]) -> Followed:
        """Take in a source, new or of an earlier life."""
        followed = Followed(source, tail, flows, self._shared.held, self._shared.settings.collector)
        self.followed[source.id] = followed
        if tail is not None:
            self.finder.follows(source.id, tail.identity)
            self._shared.holder.keep(self.held_name(source.id), tail.fileno())
        return followed

    def spool_path(self, source_id: str, generation: int) -> Path:
        """Where a flow's spool is."""
        return self._directory / f"{source_id}.{generation}"

    def held_name(self, source_id: str) -> str:
        """Under which name the holder has the file."""
        return f"{self._directory.name}/{source_id}"

    def open_files(self) -> dict[str, int]:
        """Return what the holder should have: name → fd."""
        return {
            self.held_name(one.source.id): one.tail.fileno() for one in self.followed.values() if one.tail is not None
        }

    def _hold_to_ceiling(self) -> None:
        ceiling = self._shared.settings.collector.run_ceiling_mib
        if sum(flow.position for one in self.followed.values() for flow in one.flows) < ceiling * MIB:
            return
        reason = f"over the ceiling of {ceiling} MiB a run and node; heads and the last {OVER_RUN_KEEP} bytes are kept"
        for followed in self.followed.values():
            followed.limit(OVER_RUN_KEEP, reason)

    def spill(self) -> None:
        """Put on disk what waits in memory."""
        for followed in self.followed.values():
            for flow in followed.flows:
                if flow.waiting:
                    flow.spill()

    def tell(self, **changes: object) -> None:
        """Change the report, which goes up with the next exchange."""
        self.report = msgspec.structs.replace(self.report, **changes)
        self.report_changed = True
        self.changed = True

    def note(self, text: str) -> None:
        """Keep a remark for the manifest, once."""
        if text not in self.report.notes:
            self.tell(notes=(*self.report.notes, text))

    # -- the end ---------------------------------------------------------------------------

    def close(self, now: float, notice: Notice | None = None) -> list[Followed]:
        """The run is over on this node: look once more, then let every file go. Return all that is to be read."""
        if self.phase is not Phase.FOLLOWING:
            return []
        self.discover((), now)
        if notice is not None:
            ends = {"exit_code": notice.job.exit_code, "derived_exit_code": notice.job.derived_exit_code}
            self.tell(job=msgspec.structs.replace(self.report.job, ended=notice.time, **ends))
        self.phase = Phase.CLOSING
        self.next_status = 0.0
        until = now + self._shared.settings.collector.close_within_s
        for followed in self.followed.values():
            followed.close(until)
        log.info("%s: over on this node, %d files are let go", self.lane.run, len(self.followed))
        self.save(durable=True)
        return list(self.followed.values())

    def let_go(self, followed: Followed) -> None:
        """A file was closed: the holder may close its copy."""
        self._shared.holder.release(self.held_name(followed.source.id))
        self.finder.lets_go(followed.source.id)
        self.changed = True

    def check_drained(self) -> None:
        """With every file let go and every byte in Redis, the lane is drained; no longer, if Redis lost some."""
        if self.phase is Phase.FOLLOWING or not self.known or self.undescribed:
            return
        sent = all(one.tail is None and not any(flow.waiting for flow in one.flows) for one in self.followed.values())
        if self.phase is Phase.DRAINED and not sent:
            self.phase = Phase.CLOSING
            self.tell(drained=False)
        elif self.phase is Phase.CLOSING and sent:
            self.phase = Phase.DRAINED
            self.tell(drained=True, drained_at=time.time())
            log.info("%s: drained", self.lane.run)

    @property
    def safe(self) -> bool:
        """All bytes of this node are in the store."""
        return self.phase is Phase.DRAINED and all(one.done for one in self.followed.values())

    def forget(self) -> None:
        """The manifest covers the lane: nothing of it is needed here any more."""
        for followed in self.followed.values():
            for flow in followed.flows:
                flow.forget()
        shutil.rmtree(self._directory, ignore_errors=True)
        if self.report.job.private_dir:
            # rmtree goes by directory fds: the user's symbolic links lead it nowhere.
            shutil.rmtree(self.report.job.private_dir, ignore_errors=True)
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
        for followed in self.followed.values():
            for flow in followed.flows:
                sealed = status.sealed.get(flow.key, 0)
                if sealed > flow.sealed:
                    flow.accept(flow.committed, sealed)
                    self.changed = True
                committed = max(status.committed.get(flow.key, 0), flow.sealed)
                if committed != flow.committed:
                    flow.rewind(committed, followed.tail_of(flow))

    # -- state -----------------------------------------------------------------------------

    def save(self, *, durable: bool = False) -> None:
        """Write the state file."""
        entries = tuple(_saved(followed) for followed in self.followed.values())
        saved = SavedLane(1, self.lane.name, self.report, self.phase, tuple(self.notices), entries)
        try:
            save(self._directory, saved, durable=durable)
        except UnavailableError as error:
            # The run is more than its state: go on, and try again at the next turn of saving.
            if self._save_trouble != str(error):
                self._save_trouble = str(error)
                log.warning("%s: %s", self.lane.run, error)
            return
        self._save_trouble = ""
        self.changed = False

    def save_starts(self) -> None:
        """Before bytes go up, the state must be able to tell their file from one rewritten later."""
        if any(followed.start_changed() for followed in self.followed.values()):
            self.save()

    def stop(self) -> None:
        """The collector stops: keep everything for its next life."""
        self.save(durable=True)
        for followed in self.followed.values():
            for flow in followed.flows:
                flow.close()
            if followed.tail is not None:
                followed.tail.close()


def _saved(followed: Followed) -> SavedSource:
    flows = tuple(SavedFlow(flow.generation, flow.sealed, flow.position, flow.ended) for flow in followed.flows)
    return SavedSource(followed.source, followed.state(), followed.tail is None, flows)
