"""The lanes of this node: opened and closed by notices, found again after a restart."""

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainarchive import notice as notices
from trainarchive.collector.followed import Followed
from trainarchive.collector.keeper import Keeper, Shared
from trainarchive.collector.restoring import restore
from trainarchive.collector.saved import Phase, load
from trainarchive.errors import TrainarchiveError
from trainarchive.notice import Notice
from trainarchive.run import Lane, LaneReport, RunKey

SWEEP_S = 3600.0

Waiting = tuple[Keeper, Followed]
"""A source that is to be read at once, with its lane's keeper."""

log = logging.getLogger("trainarchive.collector")


class Lanes:
    """All keepers, by lane."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.keepers: dict[Lane, Keeper] = {}
        spool = shared.settings.spool
        self._spool = spool
        self._open = spool / "open"
        self._safe = spool / "safe"
        self._directories = shared.settings.state / "lanes"
        for directory, mode in (
            (spool, 0o711),
            (spool / "jobs", 0o711),
            (spool / "notices", 0o700),
            (self._open, 0o700),
            (self._safe, 0o700),
            (self._directories, 0o700),
        ):
            directory.mkdir(parents=True, exist_ok=True, mode=mode)
        self._sweep_at = 0.0
        self._boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    def __iter__(self) -> Iterator[Keeper]:
        return iter(list(self.keepers.values()))

    # -- notices ---------------------------------------------------------------------------

    def take_notices(self, now: float) -> list[Waiting]:
        """Process what hooks left; return sources that are to be read at once."""
        to_read: list[Waiting] = []
        for path in notices.waiting(self._spool):
            to_read += self._take(path, now)
        return to_read

    def _take(self, path: Path, now: float) -> list[Waiting]:
        try:
            notice = notices.read_notice(path)
        except TrainarchiveError as error:
            log.warning("notice set aside: %s", error)
            notices.set_aside(path)
            return []
        # Moved before it is acted on: what is in open/ is acted on again after a crash, and may be.
        kept = self._open / path.name
        try:
            path.replace(kept)
            return self._act(notice, kept, now, first_generation=0)
        except OSError as error:
            log.warning("%s: not acted on yet, tried again: %s", path, error)
            with suppress(OSError):
                kept.replace(path)
            return []

    def _act(self, notice: Notice, kept: Path, now: float, *, first_generation: int) -> list[Waiting]:
        if notice.event == "prolog":
            return self._begin(notice, kept, now, first_generation)
        return self._end(notice, kept, now)

    def _begin(self, notice: Notice, kept: Path, now: float, first_generation: int) -> list[Waiting]:
        to_read: list[Waiting] = []
        wanted = self._shared.settings.collector
        if wanted.opt_out_comment and notice.job.comment == wanted.opt_out_comment:
            log.info("%s opted out", notice.run)
            self._drop_private(notice)
            kept.unlink(missing_ok=True)
            return to_read
        lane = Lane(notice.run, notice.node, notice.token)
        for keeper in self._following(notice.run):
            # Slurm may run a prolog twice; another attempt or SLUID shows that it is another run.
            if keeper.lane.run == notice.run and notice.job.sluid == keeper.report.job.sluid:
                keeper.notices.append(kept.name)
                keeper.changed = True
                return to_read
            keeper.note("its epilog never came: closed when the job came back to this node")
            to_read += [(keeper, followed) for followed in keeper.close(now)]
        if lane in self.keepers:
            return to_read
        directory = self._directories / lane.name.replace("/", "_")
        directory.mkdir(mode=0o700, exist_ok=True)
        report = LaneReport(job=notice.job, boot_id=self._boot_id)
        keeper = Keeper(lane, report, directory, self._shared, first_generation=first_generation)
        keeper.notices.append(kept.name)
        self.keepers[lane] = keeper
        keeper.save(durable=True)
        log.info("%s: begins on this node", lane.run)
        return to_read

    def _end(self, notice: Notice, kept: Path, now: float) -> list[Waiting]:
        """Close the runs that Prolog opened here: the notice's own restart count may be one too high."""
        if any(kept.name in keeper.notices for keeper in self):
            return []
        to_read: list[Waiting] = []
        closed = False
        for keeper in self._following(notice.run):
            sluids = {keeper.report.job.sluid, notice.job.sluid} - {""}
            if len(sluids) < 2:
                closed = True
                keeper.notices.append(kept.name)
                to_read += [(keeper, followed) for followed in keeper.close(now, notice)]
        if not closed:
            log.info("%s: epilog without its prolog, nothing to close", notice.run)
            kept.unlink(missing_ok=True)
        return to_read

    def _following(self, run: RunKey) -> list[Keeper]:
        """Return the keepers of any attempt of this job that still follow files."""
        return [
            keeper
            for keeper in self
            if keeper.phase is Phase.FOLLOWING
            and (keeper.lane.run.cluster, keeper.lane.run.job_id) == (run.cluster, run.job_id)
        ]

    def _drop_private(self, notice: Notice) -> None:
        if notice.job.private_dir:
            shutil.rmtree(notice.job.private_dir, ignore_errors=True)

    # -- over a restart --------------------------------------------------------------------

    def restore(self, now: float) -> list[Waiting]:
        """Find the lanes that an earlier life left, then act again on the notices that were taken."""
        to_read: list[Waiting] = []
        held_names = self._shared.holder.names()
        for directory in sorted(self._directories.iterdir()):
            to_read += self._restore_lane(directory, held_names, now)
        fresh_number = int(time.time())
        for path in sorted(self._open.iterdir(), key=lambda one: (one.stat().st_mtime_ns, one.name)):
            try:
                notice = notices.read_notice(path)
            except TrainarchiveError as error:
                log.warning("taken notice cannot be read again: %s", error)
                path.unlink(missing_ok=True)
                continue
            if any(path.name in keeper.notices for keeper in self):
                continue
            # Its lane's state is gone: generations get numbers that no earlier life can have used.
            to_read += self._act(notice, path, now, first_generation=fresh_number)
        return to_read

    def _restore_lane(self, directory: Path, held_names: frozenset[str], now: float) -> list[Waiting]:
        try:
            saved = load(directory)
        except TrainarchiveError as error:
            log.warning("state lost: %s", error)
            saved = None
        if saved is None:
            shutil.rmtree(directory, ignore_errors=True)
            return []
        lane = Lane.parse(saved.lane)
        keeper = Keeper(lane, saved.report, directory, self._shared, first_generation=0)
        to_read = [(keeper, followed) for followed in restore(keeper, saved, self._shared, held_names)]
        self.keepers[lane] = keeper
        log.info("%s: resumed with %d files", lane.run, len(keeper.followed))
        if keeper.phase is Phase.FOLLOWING and saved.report.boot_id != self._boot_id:
            keeper.note("the node was started anew while the job ran")
            to_read = [(keeper, followed) for followed in keeper.close(now)]
        return to_read

    # -- the end ---------------------------------------------------------------------------

    def finish(self) -> list[Lane]:
        """Tell waiting epilogs what is safe; forget what is archived, and return it."""
        over = []
        for keeper in self:
            if keeper.safe and not keeper.told_safe:
                keeper.told_safe = True
                for name in keeper.notices:
                    (self._safe / name).touch(mode=0o600)
            if keeper.archived:
                self._forget(keeper)
                over.append(keeper.lane)
        return over

    def _forget(self, keeper: Keeper) -> None:
        # The notices go first: a lane without notices is forgotten again after a crash, harmlessly.
        for name in keeper.notices:
            (self._open / name).unlink(missing_ok=True)
            (self._safe / name).unlink(missing_ok=True)
        keeper.forget()
        del self.keepers[keeper.lane]

    def sweep(self, now: float) -> None:
        """Remove, now and then, what killed hooks left half written."""
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S
            notices.sweep(self._spool, before=time.time() - SWEEP_S)

    def save(self) -> None:
        """Write what changed."""
        for keeper in self:
            if keeper.changed:
                keeper.save()

    def stop(self) -> None:
        """Keep everything for the next life."""
        for keeper in self:
            keeper.stop()
