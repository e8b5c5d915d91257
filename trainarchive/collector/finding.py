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

AFTER_START_S = (0.0, 0.1, 0.5, 1.0, 2.0)
"""A lane is looked through at these times after its start, then every ``discovery_s``."""
KICK_S = 0.1
"""Directory events may bring a look forward, but not more often than this."""
MAX_PROCESSES = 4096
OWN_CHOICE_FD = 3
"""From this descriptor on it is the program's own choice what a file is for: only text is followed."""

ProcessKey = tuple[int, int]
"""pid, start time."""

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

    def close(self) -> None:
        """Not to be followed after all."""
        os.close(self.fd)


class Finder:
    """Remembers a lane's processes, what is followed and what was refused."""

    def __init__(self, lane: Lane, wanted: Sources) -> None:
        self._lane = lane
        self._wanted = wanted
        self._processes: dict[ProcessKey, Process] = {}
        self._by_inode: dict[tuple[int, int], str] = {}
        self._inode_of: dict[str, tuple[int, int]] = {}
        self.refused: dict[Refusal, None] = {}
        self.unopened: list[tuple[sources.Candidate, str]] = []
        self._said = ""

    def follows(self, source_id: str, identity: Identity) -> None:
        """This inode is open here, so the kernel cannot give it to another file meanwhile."""
        self._by_inode[identity.fs, identity.inode] = source_id
        self._inode_of[source_id] = (identity.fs, identity.inode)

    def lets_go(self, source_id: str) -> None:
        """It no longer is."""
        self._by_inode.pop(self._inode_of.pop(source_id, (0, 0)), None)

    def candidates(self, job: Job, processes: Iterable[Process]) -> list[sources.Candidate]:
        """Return what the run's processes, those that ended too, may have written."""
        living = {
            (process.pid, process.start_time): process
            for process in processes
            # Several slurmd, or pretend nodes, may share this machine's /proc.
            if process.environment.get("SLURMD_NODENAME", self._lane.node) == self._lane.node
        }
        self._remember(living)
        mine = tuple(self._processes.values())
        found, refusals = sources.candidates(self._lane.run, job, mine, self._wanted, self._lane.node)
        for refusal in refusals:
            self.refuse(refusal)
        return found

    def _remember(self, living: dict[ProcessKey, Process]) -> None:
        """Ended processes are kept for what they knew, those with a rank the longest; the living come first."""
        self._processes |= living
        excess = len(self._processes) - MAX_PROCESSES
        if excess > 0:
            ended = [key for key in self._processes if key not in living]
            ended.sort(key=lambda key: self._processes[key].rank is not None)
            for key in ended[:excess]:
                del self._processes[key]

    def known(self, candidate: sources.Candidate) -> str | None:
        """Return the id of the source that already follows this very file."""
        try:
            at = os.lstat(candidate.path) if not candidate.proc_path else os.stat(candidate.proc_path)  # noqa: PTH116 - bytes
        except OSError:
            return None
        if candidate.inode not in (0, at.st_ino):
            return None
        return self._by_inode.get((at.st_dev, at.st_ino))

    def open(self, candidates: Iterable[sources.Candidate], uid: int) -> Iterator[Opened]:
        """Open what may be opened; keep the refusals, and in ``unopened`` what may be opened later, with the reason."""
        self.unopened = []
        for candidate in candidates:
            try:
                fd = _open(candidate, uid)
            except UnavailableError as error:
                self.unopened.append((candidate, error.what))
                if error.what != self._said:
                    self._said = error.what
                    log.warning("%s: %s: tried again", self._lane.run, error)
            except RefusedError as error:
                if error.what != opening.GONE:
                    self.refuse(Refusal(candidate.path.decode(errors="backslashreplace"), error.what))
            else:
                yield Opened(candidate, fd)

    def give_up(self) -> None:
        """What could not be opened to the last is told."""
        for candidate, reason in self.unopened:
            self.refuse(Refusal(candidate.path.decode(errors="backslashreplace"), reason))
        self.unopened = []

    def refuse(self, refusal: Refusal) -> None:
        """Keep a refusal for the manifest, once."""
        if len(self.refused) < MAX_REFUSALS:
            self.refused[refusal] = None


def _open(candidate: sources.Candidate, uid: int) -> int:
    if candidate.fd is None or candidate.pid is None:
        return opening.open_path(candidate.proc_path or candidate.path, uid)
    fd = opening.open_fd_of(candidate.pid, candidate.fd, candidate.start_time, uid)
    if candidate.inode not in (0, os.fstat(fd).st_ino):
        os.close(fd)
        raise RefusedError(opening.GONE)  # the number stands for another file by now, whose name we do not know yet
    if candidate.fd >= OWN_CHOICE_FD and not _is_text(fd):
        os.close(fd)
        raise RefusedError("not text", where=candidate.path.decode(errors="backslashreplace"))
    return fd


def _is_text(fd: int) -> bool:
    try:
        return opening.looks_like_text(fd)
    except UnavailableError:
        os.close(fd)
        raise
