"""The lanes of this node: opened and closed by notices, found again after a restart."""

import fcntl
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

from trainarchive import notice as notices
from trainarchive import private
from trainarchive.collector.files import Shared
from trainarchive.collector.followed import Followed
from trainarchive.collector.keeper import Keeper
from trainarchive.collector.restoring import restore
from trainarchive.collector.saved import Phase, load
from trainarchive.errors import SettingsError, TrainarchiveError
from trainarchive.notice import Notice
from trainarchive.run import Lane, LaneReport, RunKey

SWEEP_S = 3600.0
LATE_S = 2.0
"""A prolog's notice is taken within milliseconds where a collector runs."""
FORGOTTEN_S = 86_400.0
"""Directories that Prolog moved aside are removed when they are this old."""
ABSENCE_S = 3.0
"""A shorter absence is told by nothing: the sign of life itself comes every second or so."""

Waiting = tuple[Keeper, Followed]
"""A source that is to be read at once, with its lane's keeper."""

log = logging.getLogger("trainarchive.collector")


def lock(state: Path) -> IO[bytes]:
    """Take the state directory, for as long as the file is open; raise SettingsError where another process has it."""
    file = (state / "lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        hint = "give each collector its own [node] spool and state"
        raise SettingsError("another collector works here", where=str(state), hint=hint) from error
    return file


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
        self._lost = shared.settings.state / "lost"
        self._alive = shared.settings.state / "alive"
        for directory, mode in (
            (spool, 0o711),
            (spool / "jobs", 0o711),
            (spool / "notices", 0o700),
            (self._open, 0o700),
            (self._safe, 0o700),
            (self._directories, 0o700),
            (self._lost, 0o700),
        ):
            if not directory.exists():
                directory.mkdir(parents=True)
                directory.chmod(mode)  # whatever the umask: users must get through to their own directories
        self._sweep_at = 0.0
        self._remover = ThreadPoolExecutor(1, "remover")
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
        except (OSError, TrainarchiveError) as error:
            self._put_back(kept, error)
            return []

    def _put_back(self, kept: Path, error: Exception) -> None:
        log.warning("%s: not acted on yet, tried again: %s", kept, error)
        with suppress(OSError):
            kept.replace(self._spool / "notices" / kept.name)

    def _act(self, notice: Notice, kept: Path, now: float, *, first_generation: int) -> list[Waiting]:
        if notice.event == "prolog":
            return self._begin(notice, kept, now, first_generation)
        return self._end(notice, kept, now)

    def _begin(self, notice: Notice, kept: Path, now: float, first_generation: int) -> list[Waiting]:
        to_read: list[Waiting] = []
        wanted = self._shared.settings.collector
        if wanted.opt_out_comment and notice.job.comment == wanted.opt_out_comment:
            # Its private directory stays: the job's tasks may have it in their environment.
            log.info("%s: opted out", notice.run)
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
            self.keepers[lane].notices.append(kept.name)
            self.keepers[lane].stir()
            return to_read
        directory = self._directories / lane.name.replace("/", "_")
        directory.mkdir(mode=0o700, exist_ok=True)
        report = LaneReport(job=notice.job, boot_id=self._boot_id)
        keeper = Keeper(lane, report, directory, self._shared, first_generation=first_generation)
        keeper.notices.append(kept.name)
        late = time.time() - notice.time
        if late > LATE_S:
            keeper.note(
                f"first looked at {late:.0f} s after its prolog: files of processes that had ended are not found"
            )
        self.keepers[lane] = keeper
        keeper.save(durable=True)
        log.info("%s: begins on this node", lane.run)
        return to_read

    def _end(self, notice: Notice, kept: Path, now: float) -> list[Waiting]:
        """Close the runs that Prolog opened here: the notice's own restart count may be one too high."""
        to_read: list[Waiting] = []
        for keeper in self:
            if kept.name in keeper.notices:
                return [(keeper, followed) for followed in keeper.close(now)]
        closed = False
        for keeper in self._following(notice.run):
            sluids = {keeper.report.job.sluid, notice.job.sluid} - {""}
            if len(sluids) < 2:
                closed = True
                keeper.notices.append(kept.name)
                to_read += [(keeper, followed) for followed in keeper.close(now, notice)]
        for keeper in self if not closed else ():
            run = keeper.lane.run
            if (run.cluster, run.job_id) == (notice.run.cluster, notice.run.job_id) and not keeper.told_safe:
                # Slurm runs hooks again after a restart of its daemons: this one waits for the same bytes.
                keeper.notices.append(kept.name)
                keeper.stir()
                return []
        if not closed:
            log.info("%s: nothing to close for this epilog", notice.run)
            self._answer(kept.name)
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

    # -- over a restart --------------------------------------------------------------------

    def restore(self, now: float) -> list[Waiting]:
        """Find the lanes that an earlier life left, then act again on the notices that were taken."""
        to_read: list[Waiting] = []
        held_names = self._shared.holder.names()
        for directory in sorted(path for path in self._directories.iterdir() if path.is_dir()):
            try:
                to_read += self._restore_lane(directory, held_names, now)
            except (OSError, TrainarchiveError) as error:
                log.warning("%s: not restored: %s", directory, error)
        fresh_number = int(time.time())
        taken = [path for path in self._open.iterdir() if path.is_file()]
        for path in sorted(taken, key=lambda one: (one.stat().st_mtime_ns, one.name)):
            try:
                notice = notices.read_notice(path)
            except TrainarchiveError as error:
                log.warning("taken notice cannot be read again: %s", error)
                path.unlink(missing_ok=True)
                continue
            if any(path.name in keeper.notices for keeper in self):
                continue
            # Its lane's state is gone: generations get numbers that no earlier life can have used.
            try:
                to_read += self._act(notice, path, now, first_generation=fresh_number)
            except (OSError, TrainarchiveError) as error:
                self._put_back(path, error)
                continue
            for keeper in self:
                if path.name in keeper.notices:
                    keeper.note(f"the collector lost its state of this run; what it had not sent is in {self._lost}")
        self._tell_absence()
        return to_read

    def alive(self) -> None:
        """Leave a sign that the collector looks after its files."""
        with suppress(OSError):
            self._alive.touch()

    def _tell_absence(self) -> None:
        """Processes that lived only while no collector ran were never seen: the manifest has to say so."""
        with suppress(FileNotFoundError):
            away = time.time() - self._alive.stat().st_mtime
            if away > ABSENCE_S:
                for keeper in self:
                    keeper.note(
                        f"no collector ran for {away:.0f} s: files of processes that lived only then are not found"
                    )

    def _restore_lane(self, directory: Path, held_names: frozenset[str], now: float) -> list[Waiting]:
        try:
            saved = load(directory)
        except TrainarchiveError as error:
            log.warning("state lost: %s", error)
            saved = None
        if saved is None:
            # Kept for people to look at: its spools may hold what is nowhere else.
            with suppress(OSError):
                directory.rename(self._lost / f"{directory.name}.{time.time_ns()}")
            return []
        lane = Lane.parse(saved.lane)
        keeper = Keeper(lane, saved.report, directory, self._shared, first_generation=0)
        to_read = [(keeper, followed) for followed in restore(keeper, saved, self._shared, held_names)]
        self.keepers[lane] = keeper
        log.info("%s: resumed with %d files", lane.run, len(keeper.files.followed))
        if keeper.phase is Phase.FOLLOWING and saved.report.boot_id != self._boot_id:
            keeper.note("the node was started anew while the job ran")
            to_read = [(keeper, followed) for followed in keeper.close(now)]
        return to_read

    # -- the end ---------------------------------------------------------------------------

    def finish(self) -> list[Lane]:
        """Tell waiting epilogs what is safe; forget what is archived, and return it."""
        over = []
        for keeper in self:
            if keeper.phase is Phase.DRAINED and not keeper.told_safe and keeper.safe:
                keeper.told_safe = True
                for name in keeper.notices:
                    self._answer(name)
            if keeper.archived:
                self._forget(keeper)
                over.append(keeper.lane)
        return over

    def _answer(self, name: str) -> None:
        """Tell the epilog that left this notice, and may wait, that nothing of this node is unsafe."""
        with suppress(OSError):
            (self._safe / name).touch(mode=0o600)

    def _forget(self, keeper: Keeper) -> None:
        # The notices go first: a lane without notices is forgotten again after a crash, harmlessly.
        for name in keeper.notices:
            (self._open / name).unlink(missing_ok=True)
        keeper.forget()
        del self.keepers[keeper.lane]
        job = keeper.report.job
        if job.private_dir and not any(other.report.job.private_dir == job.private_dir for other in self):
            path = Path(job.private_dir)
            if private.is_of(path, job.sluid):
                # Apart from the loop: users may have put any number of files there.
                self._remover.submit(private.remove, path)

    def sweep(self, now: float) -> None:
        """Remove, now and then, what killed hooks left half written."""
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S
            notices.sweep(self._spool, before=time.time() - SWEEP_S)
            mine = tuple(Path(keeper.report.job.private_dir) for keeper in self if keeper.report.job.private_dir)
            self._remover.submit(private.sweep, self._spool, before=time.time() - FORGOTTEN_S, in_use=mine)

    def save(self) -> None:
        """Write what changed."""
        for keeper in self:
            if keeper.changed:
                keeper.save()

    def stop(self) -> None:
        """Keep everything for the next life."""
        for keeper in self:
            keeper.stop()
        self._remover.shutdown(wait=False, cancel_futures=True)
