"""When a lane's files are looked for, and which of what is found is new."""

import logging
import os
import time
from collections.abc import Iterable, Iterator

import msgspec

from trainarchive import opening, sources
from trainarchive.errors import RefusedError, UnavailableError
from trainarchive.processes import Process
from trainarchive.run import Job, Lane, Refusal
from trainarchive.settings import Sources
from trainarchive.tail import Identity

log = logging.getLogger("trainarchive.collector")

GONE = "gone"
"""What opening says of a file that is no longer there: nothing to tell anybody."""

AFTER_START_S = (0.0, 0.1, 0.5, 1.0, 2.0)
"""A lane is looked through at these times after its start, then every ``discovery_s``."""
KICK_S = 0.1
"""Directory events may bring a look forward, but not more often than this."""
MAX_PROCESSES = 4096
MAX_REFUSALS = 1000


class Clock:
    """When to look next (monotonic s)."""

    def __init__(self, discovery_s: float) -> None:
        self._opened = time.monotonic()
        self._looks = 0
        self._last = 0.0
        self._every = discovery_s
        self.due = 0.0

    def looked(self, now: float) -> None:
        """A look was taken."""
        self._last = now
        self._looks += 1
        if self._looks < len(AFTER_START_S):
            self.due = max(now + KICK_S, self._opened + AFTER_START_S[self._looks])
        else:
            self.due = now + self._every

    def kick(self) -> None:
        """Something was made in the run's own directory: look soon."""
        self.due = min(self.due, self._last + KICK_S)


class Opened(msgspec.Struct, frozen=True):
    """A candidate that nobody follows yet, and its open file."""

    candidate: sources.Candidate
    fd: int


class Finder:
    """Remembers a lane's processes, what is followed and what was refused."""

    def __init__(self, lane: Lane, wanted: Sources) -> None:
        self._lane = lane
        self._wanted = wanted
        self._processes: dict[tuple[int, int], Process] = {}
        self._by_inode: dict[tuple[int, int], str] = {}
        self.refused: dict[Refusal, None] = {}

    def follows(self, source_id: str, identity: Identity) -> None:
        """This inode is open here, so the kernel cannot give it to another file meanwhile."""
        self._by_inode[identity.fs, identity.inode] = source_id

    def lets_go(self, source_id: str) -> None:
        """It no longer is."""
        for key in [key for key, value in self._by_inode.items() if value == source_id]:
            del self._by_inode[key]

    def candidates(self, job: Job, processes: Iterable[Process]) -> list[sources.Candidate]:
        """Return what the run's processes, those that ended too, may have written."""
        for process in processes:
            # Several slurmd, or pretend nodes, may share this machine's /proc.
            if process.environment.get("SLURMD_NODENAME", self._lane.node) != self._lane.node:
                continue
            key = (process.pid, process.start_time)
            if key in self._processes or len(self._processes) < MAX_PROCESSES:
                self._processes[key] = process
        mine = tuple(self._processes.values())
        found, refusals = sources.candidates(self._lane.run, job, mine, self._wanted, self._lane.node)
        for refusal in refusals:
            self._refuse(refusal)
        return found

    def known(self, candidate: sources.Candidate) -> str | None:
        """Return the id of the source that already follows this very file."""
        try:
            at = os.lstat(candidate.path) if not candidate.proc_path else os.stat(candidate.proc_path)  # noqa: PTH116 - bytes
        except OSError:
            return None
        return self._by_inode.get((at.st_dev, at.st_ino))

    def open(self, candidates: Iterable[sources.Candidate], uid: int) -> Iterator[Opened]:
        """Open what may be opened; keep the refusals."""
        for candidate in candidates:
            try:
                yield Opened(candidate, _open(candidate, uid))
            except UnavailableError as error:
                log.warning("%s: %s", self._lane.run, error)
            except RefusedError as error:
                if error.what != GONE:
                    shown = candidate.path.decode(errors="backslashreplace")
                    self._refuse(Refusal(shown, error.what))

    def _refuse(self, refusal: Refusal) -> None:
        if len(self.refused) < MAX_REFUSALS:
            self.refused[refusal] = None


def _open(candidate: sources.Candidate, uid: int) -> int:
    if candidate.fd is not None and candidate.pid is not None:
        return opening.open_fd_of(candidate.pid, candidate.fd, candidate.start_time, uid)
    return opening.open_path(candidate.proc_path or candidate.path, uid)
