"""A lane's files: found, opened, followed within bounds, and let go."""

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from trainarchive import opening, sources
from trainarchive.collector.finding import Finder, Opened
from trainarchive.collector.flow import Flow, Held
from trainarchive.collector.followed import MIB, Followed
from trainarchive.collector.holding import Holding
from trainarchive.errors import RefusedError, UnavailableError
from trainarchive.processes import Process
from trainarchive.run import Job, Lane, Refusal, Source
from trainarchive.settings import Settings
from trainarchive.tail import Tail

log = logging.getLogger("trainarchive.collector")

OVER_RUN_KEEP = MIB
"""Over the run's ceiling, this much of each source's end is still kept: where the last words are."""
UNLINKED_S = 60.0
"""An unlinked file that no process has and that was quiet for so long pins its disk space for nothing."""


class Shared(msgspec.Struct, frozen=True):
    """What all lanes of a collector use together."""

    settings: Settings
    held: Held
    holder: Holding
    buffer: bytearray


class Files:
    """The sources of one lane on this node, by id."""

    def __init__(self, lane: Lane, directory: Path, shared: Shared, *, first_generation: int) -> None:
        """``directory`` is the lane's own: spools are there."""
        self.finder = Finder(lane, shared.settings.sources)
        self.followed: dict[str, Followed] = {}
        self.undescribed: dict[str, Source] = {}
        self._lane = lane
        self._directory = directory
        self._shared = shared
        self._first_generation = first_generation
        self._unsynced: deque[Flow] = deque()
        self._uid = -1

    def __iter__(self) -> Iterator[Followed]:
        return iter(self.followed.values())

    @property
    def flows(self) -> Iterator[Flow]:
        """Every flow of every source."""
        return (flow for followed in self.followed.values() for flow in followed.flows)

    # -- finding ---------------------------------------------------------------------------

    def discover(self, job: Job, processes: Iterable[Process], now: float) -> list[Followed]:
        """Follow what is new; return it."""
        new = []
        for candidate in self.finder.candidates(job, processes):
            source_id = self.finder.known(candidate)
            if source_id is None:
                new.append(candidate)
                continue
            known = self.followed[source_id]
            if candidate.fd is not None:
                known.last_seen = now
            better = sources.merge(known.source, candidate)
            if better is not None:
                self._describe(known, better)
        fresh = self.open(new, job.uid)
        self._hold_to_ceiling()
        return fresh

    def open(self, new: Iterable[sources.Candidate], uid: int) -> list[Followed]:
        """Open and follow candidates; what may be opened later stays in ``finder.unopened``."""
        fresh = []
        self._uid = uid
        most = self._shared.settings.sources.max_files_per_run
        for one in self.finder.open(new, uid):
            if len(self.followed) >= most:
                one.close()
                self.finder.refuse(
                    Refusal("...", f"more than max_files_per_run = {most} files: others are not followed")
                )
                continue
            try:
                followed = self._follow(one)
            except UnavailableError as error:
                one.close()
                self.finder.unopened.append((one.candidate, error.what))
                continue
            if followed is not None:
                fresh.append(followed)
        return fresh

    def _follow(self, opened: Opened) -> Followed | None:
        tail = Tail(opened.fd, generation=self._first_generation, buffer=self._shared.buffer)
        source_id = sources.source_id(self._lane.node, tail.identity, opened.candidate.path)
        if source_id in self.followed:
            tail.close()
            return self._reopen(self.followed[source_id], opened.candidate)
        source = sources.describe(opened.candidate, source_id, self._lane.node)
        flow = Flow(source_id, tail.generation, self._shared.held, self.spool_path(source_id, tail.generation))
        followed = self.add(source, tail, [flow])
        self._describe(followed, source)
        log.info("%s: follows %s %s (rank %s)", self._lane.run, source.kind, ascii(source.path), source.rank)
        return followed

    def _reopen(self, known: Followed, candidate: sources.Candidate) -> Followed | None:
        """Take up again a file that was let go while the run goes on."""
        if known.is_open() or known.saved_tail is None or candidate.fd is None or candidate.pid is None:
            return None
        try:
            fd = opening.open_fd_of(candidate.pid, candidate.fd, candidate.start_time, self._uid)
        except RefusedError:
            return None
        tail = Tail.resume(fd, known.saved_tail, buffer=self._shared.buffer)
        known.reopen(tail)
        self.finder.follows(known.source.id, tail.identity)
        self._shared.holder.keep(self.held_name(known.source.id), tail.fileno())
        return known

    def _describe(self, followed: Followed, source: Source) -> None:
        followed.source = source
        self.undescribed[source.id] = source

    def described(self, sources_sent: Iterable[Source]) -> None:
        """Redis has these descriptions."""
        for source in sources_sent:
            if self.undescribed.get(source.id) is source:
                del self.undescribed[source.id]

    def add(self, source: Source, tail: Tail | None, flows: list[Flow]) -> Followed:
        """Take in a source, new or of an earlier life."""
        followed = Followed(source, tail, flows, self._shared.held, self._shared.settings.collector)
        self.followed[source.id] = followed
        if tail is not None:
            self.finder.follows(source.id, tail.identity)
            self._shared.holder.keep(self.held_name(source.id), tail.fileno())
        return followed

    # -- bounds ----------------------------------------------------------------------------

    def _hold_to_ceiling(self) -> None:
        ceiling = self._shared.settings.collector.run_ceiling_mib
        if sum(one.total for one in self) >= ceiling * MIB:
            for followed in self:
                followed.limit(OVER_RUN_KEEP, f"over the ceiling of {ceiling} MiB a run and node")

    def tidy(self, now: float, close_within_s: float) -> list[Followed]:
        """Forget generations that are in the store; close unlinked files that nobody needs, and return these."""
        closing = []
        for followed in self:
            followed.prune()
            tail = followed.tail
            quiet_since = max(followed.last_seen, followed.pace.last_bytes)
            if tail is not None and tail.unlinked and followed.closing_until is None and now - quiet_since > UNLINKED_S:
                followed.close(now + close_within_s)
                closing.append(followed)
        return closing

    # -- letting go ------------------------------------------------------------------------

    def close(self, until: float) -> None:
        """Let every file go, at the latest at ``until``."""
        for followed in self:
            followed.close(until)

    def let_go(self, followed: Followed) -> None:
        """A file was closed: the holder may close its copy."""
        self._shared.holder.release(self.held_name(followed.source.id))
        self.finder.lets_go(followed.source.id)
        self._unsynced.extend(flow for flow in followed.flows if flow.spool is not None)

    def sync(self, most: int) -> None:
        """Make some spools of closed files durable: a sync takes milliseconds, and others wait meanwhile."""
        for _ in range(min(most, len(self._unsynced))):
            flow = self._unsynced.popleft()
            try:
                flow.sync()
            except UnavailableError as error:
                log.warning("%s: %s", self._lane.run, error)

    def spill(self) -> None:
        """Put on disk what waits in memory; raise UnavailableError where it is full."""
        for flow in self.flows:
            if flow.waiting:
                flow.spill()

    @property
    def sent(self) -> bool:
        """Every file is let go, and Redis has every byte."""
        return all(one.tail is None and not any(flow.waiting for flow in one.flows) for one in self)

    @property
    def done(self) -> bool:
        """Every file is let go, and the store has every byte."""
        return all(one.done for one in self)

    # -- names -----------------------------------------------------------------------------

    def spool_path(self, source_id: str, generation: int) -> Path:
        """Where a flow's spool is."""
        return self._directory / f"{source_id}.{generation}"

    def held_name(self, source_id: str) -> str:
        """Under which name the holder has the file."""
        return f"{self._directory.name}/{source_id}"

    def open_files(self) -> dict[str, int]:
        """Return what the holder should have: name → fd."""
        return {self.held_name(one.source.id): one.tail.fileno() for one in self if one.tail is not None}
