"""Files with known paths: the run's private directory, torchrun's, what environments name, site patterns.

This part looks into directories, also on network file systems, and each look is bounded.
"""

import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from trainarchive import settings as configuration
from trainarchive.processes import Process
from trainarchive.run import Kind
from trainarchive.sources.candidate import Candidate
from trainarchive.sources.held import by_name
from trainarchive.sources.owners import TORCHRUN_NAMES, TORCHRUN_PATH, Owners, Roots, dump_prefix
from trainarchive.sources.patterns import Part, absolute, nccl_path, site_parts

_ATTEMPT = re.compile(rb"attempt_\d{1,6}")
_LOCAL_RANK = re.compile(rb"\d{1,6}")
_NCCL_PID = re.compile(rb"(?s)nccl\..+\.(\d{1,10})\.log")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_DEPTH = 8
"""Most levels of directories below the run's private one: each holds a descriptor while it is walked."""
_SLACK_S = 1.0
"""How much older than the run a file at a known path may be: clocks differ a little."""

_T = TypeVar("_T")


class Named:
    """One look. ``is_cut``: directories held more entries than the look may take."""

    def __init__(self, owners: Owners, settings: configuration.Sources) -> None:
        """``max_files_per_run`` also bounds how many directory entries are looked at."""
        self.is_cut = False
        self._owners = owners
        self._job = owners.job
        self._patterns = settings.patterns
        self._budget = iter(range(settings.max_files_per_run))
        self._roots = Roots()

    def files(self) -> Iterator[Candidate]:
        """Yield regular files that are there, whether or not a process holds them; one may come twice."""
        yield from self._torchrun()
        yield from self._announced()
        yield from self._private()
        for pattern in self._patterns:
            yield from self._site(pattern)
        if self._owners.on_batch_node:
            for path in sorted(self._owners.slurm_paths):
                if self._is_fresh(path):
                    yield Candidate(kind=Kind.SLURM_STDOUT, path=path, **self._owners.whose(()))

    # -- torchrun --------------------------------------------------------------------------

    def _torchrun(self) -> Iterator[Candidate]:
        """Yield stdout, stderr and error.json of every attempt and local rank, of ended workers too."""
        for agent, about in self._owners.agents.items():
            root = next(filter(None, map(self._roots.of, about.processes.values())), b"")
            for attempt in self._list(root + agent, _ATTEMPT):
                for local in self._list(b"/".join((root + agent, attempt)), _LOCAL_RANK):
                    for name in TORCHRUN_NAMES:
                        path = b"/".join((agent, attempt, local, name))
                        found = self._owners.torchrun(path) if _is_regular(root + path) else None
                        if found is not None:
                            yield Candidate(kind=found[0], path=path, root=root, **found[1])

    # -- environments ----------------------------------------------------------------------

    def _announced(self) -> Iterator[Candidate]:
        """Yield NCCL's, the flight recorder's and the error files that environments name."""
        writers: dict[tuple[Kind, bytes, bytes], list[Process]] = defaultdict(list)
        for process in self._owners.processes:
            for kind, text in self._announcements(process):
                path = absolute(text, self._job.work_dir)
                if path is not None and not path.startswith((b"/dev/", b"/proc/", b"/sys/")):
                    root = self._roots.of(process)
                    writers[kind, path if root else self._owners.real(path), root].append(process)
        for (kind, path, root), processes in writers.items():
            if self._is_fresh(root + path):
                yield Candidate(kind=kind, path=path, root=root, **self._owners.whose(processes))

    def _announcements(self, process: Process) -> Iterator[tuple[Kind, str]]:
        # What lies in the private directory is found there, without a look for every process.
        private = f"{self._job.private_dir or '/dev'}/"
        pattern = process.environment.get("NCCL_DEBUG_FILE", "")
        if pattern and not pattern.startswith(private):
            for host in {self._owners.node.split(".")[0], os.uname().nodename.split(".")[0]}:
                yield Kind.NCCL, nccl_path(pattern, host, process.pid)
        prefix, rank = dump_prefix(process), self._owners.rank(process)
        if prefix and rank is not None and not prefix.startswith(private):
            yield Kind.FLIGHT_RECORDER, f"{prefix}{rank}"
        error_file = process.environment.get("TORCHELASTIC_ERROR_FILE", "")
        if error_file and TORCHRUN_PATH.fullmatch(os.fsencode(error_file)) is None:
            yield Kind.ERROR_JSON, error_file

    # -- the private directory and the site's ----------------------------------------------

    def _private(self) -> Iterator[Candidate]:
        """Yield all that lies below the run's private directory."""
        if not self._owners.private_dir:
            return
        for path in self._below(self._owners.private_dir):
            found = self._owners.torchrun(path)
            if found is not None:
                yield Candidate(kind=found[0], path=path, **found[1])
                continue
            kind, rank = by_name(self._owners, path)
            nccl = _NCCL_PID.fullmatch(path.rpartition(b"/")[2])
            writer = self._owners.by_pid.get(int(nccl[1])) if nccl else None
            whose = self._owners.whose([writer] if writer else [])
            yield Candidate(kind=kind, path=path, **(whose if rank is None else {**whose, "rank": rank}))

    def _site(self, pattern: str) -> Iterator[Candidate]:
        values = {"workdir": self._job.work_dir, "user": self._job.user, "node": self._owners.node}
        parts = site_parts(pattern, {**values, "job_id": str(self._owners.run.job_id)})
        for path in self._matching(b"", parts) if parts else ():
            if self._is_fresh(path):
                yield Candidate(kind=Kind.CUSTOM, path=self._owners.real(path), **self._owners.whose(()))

    # -- directories -----------------------------------------------------------------------

    def _list(self, directory: bytes, wanted: re.Pattern[bytes]) -> Iterator[bytes]:
        """Yield the matching names in a directory, never hidden ones."""
        with suppress(OSError), os.scandir(directory) as entries:
            for entry in self._affordable(entries):
                if not entry.name.startswith(b".") and wanted.fullmatch(entry.name):
                    yield entry.name

    def _affordable(self, entries: Iterable[_T]) -> Iterator[_T]:
        for entry in entries:
            if next(self._budget, None) is None:
                self.is_cut = True
                return
            yield entry

    def _matching(self, base: bytes, parts: Sequence[Part]) -> Iterator[bytes]:
        if not parts:
            yield base
            return
        first, rest = parts[0], parts[1:]
        for name in [first] if isinstance(first, bytes) else self._list(base or b"/", first):
            yield from self._matching(base + b"/" + name, rest)

    def _below(self, path: bytes, parent: int | None = None, depth: int = 0) -> Iterator[bytes]:
        """Yield the regular files below a directory. It is the user's: links may appear in it at any time."""
        name = path if parent is None else path.rpartition(b"/")[2]
        with suppress(OSError):
            handle = os.open(name, _DIRECTORY, dir_fd=parent)
            try:
                with os.scandir(handle) as entries:
                    for entry in self._affordable(entries):
                        below = path + b"/" + os.fsencode(entry.name)
                        if entry.name.startswith("."):
                            continue
                        if entry.is_file(follow_symlinks=False):
                            yield below
                        elif depth < _MAX_DEPTH and entry.is_dir(follow_symlinks=False):
                            yield from self._below(below, handle, depth + 1)
            finally:
                os.close(handle)

    def _is_fresh(self, path: bytes) -> bool:
        """Say whether it is a regular file that was written since the run began: names outlive runs."""
        return _is_regular(path, since=self._job.started - _SLACK_S)


def _is_regular(path: bytes, since: float = 0.0) -> bool:
    try:
        status = os.lstat(path)
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode) and status.st_mtime >= since
