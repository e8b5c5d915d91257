"""Files that living processes hold open for writing: what they are, and which are to be followed."""

import fnmatch
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice

from trainarchive.processes import Process, Write
from trainarchive.run import Kind
from trainarchive.sources.candidate import Candidate
from trainarchive.sources.owners import Attributed, Owners
from trainarchive.sources.patterns import nccl_name

_DELETED = b" (deleted)"
_DUMP_NAME = re.compile(rb"(?s)(?:.*_)?(?:trace|dump)_(?:rank_?)?(\d{1,10})")

_MAX_PATTERNS = 16
"""Most NCCL_DEBUG_FILEs of one file's writers that are tried: they agree, but a user may give each its own."""

Hold = tuple[Process, Write]


def held(owners: Owners, names: Sequence[str]) -> Iterator[tuple[Candidate, bool]]:
    """Yield what is held, and whether its path still leads to it. ``names``: globs of other files to follow."""
    wanted = re.compile(b"|".join(os.fsencode(fnmatch.translate(name)) for name in names) or b"(?!)")
    there = {name for name in os.listdir("/proc") if name.isdecimal()}  # noqa: PTH208 - names are all that is wanted
    alive = {process.pid for process in owners.processes if str(process.pid) in there}
    files: dict[tuple[bytes, int], list[Hold]] = defaultdict(list)
    for process in owners.processes:
        for write in process.writes:
            files[write.path, write.inode].append((process, write))
    for (raw, _), holds in files.items():
        living = [hold for hold in holds if hold[0].pid in alive and _is_open(owners, *hold)]
        if not living:
            continue
        path, has_name = _true_path(raw, *living[0])
        found = _classify(owners, path, holds, wanted)
        if found is not None:
            kind, whose = found
            process, write = next((hold for hold in living if hold[0].pid == whose["pid"]), living[0])
            opening = {"pid": process.pid, "fd": write.fd, "start_time": process.start_time, "inode": write.inode}
            yield Candidate(kind=kind, path=path, **{**whose, **opening}), has_name


def by_name(owners: Owners, path: bytes) -> tuple[Kind, int | None]:
    """Return the kind, and a dump's rank, that a file has by its name; in the private directory names say more."""
    name = path.rpartition(b"/")[2]
    private = owners.is_private(path)
    dump = _DUMP_NAME.fullmatch(name) if private else None
    rank = int(dump[1]) if dump else owners.dump_rank(name)
    if rank is not None:
        return Kind.FLIGHT_RECORDER, rank
    if private and name.startswith(b"nccl."):
        return Kind.NCCL, None
    return Kind.ERROR_JSON if name == b"error.json" else Kind.CUSTOM, None


def _is_open(owners: Owners, process: Process, write: Write) -> bool:
    """Say whether the process seems to live and to hold the file still; opening makes sure."""
    newest = owners.by_pid[process.pid] is process
    return newest and os.path.lexists(b"/proc/%d/fd/%d" % (process.pid, write.fd))


def _true_path(raw: bytes, process: Process, write: Write) -> tuple[bytes, bool]:
    """Return the path without the kernel's " (deleted)", and whether the file still has its name.

    A file may really be called so: then the path leads to it as it stands.
    """
    if not raw.endswith(_DELETED):
        return raw, True
    with suppress(OSError):
        at_path = os.lstat(b"/proc/%d/root%b" % (process.pid, raw))
        if os.path.samestat(at_path, os.stat(b"/proc/%d/fd/%d" % (process.pid, write.fd))):  # noqa: PTH116 - bytes
            return raw, True
    return raw.removesuffix(_DELETED), False


def _classify(owners: Owners, path: bytes, holds: Sequence[Hold], wanted: re.Pattern[bytes]) -> Attributed | None:
    """Return kind and attribution; None for a file that is not to be followed."""
    holders = [process for process, _ in holds]
    found = owners.torchrun(path, holders)
    if found is not None:
        return found
    whose = owners.whose(holders)
    by_its_name, rank = by_name(owners, path)
    if rank is not None:
        return by_its_name, {**whose, "rank": rank, "mixed": False}
    kind = _announced(path, holders) or _output(owners, path, holds)
    name = path.rpartition(b"/")[2]
    if kind is None and not name.startswith(b".") and (owners.is_private(path) or wanted.match(name)):
        kind = by_its_name
    return None if kind is None else (kind, whose)


def _announced(path: bytes, holders: Sequence[Process]) -> Kind | None:
    """Return the kind of a file that its writers' environments, or everybody's custom, name."""
    name = path.rpartition(b"/")[2]
    patterns = dict.fromkeys(filter(None, (process.environment.get("NCCL_DEBUG_FILE") for process in holders)))
    if any(nccl_name(pattern).fullmatch(name) for pattern in islice(patterns, _MAX_PATTERNS)):
        return Kind.NCCL
    error_files = {process.environment.get("TORCHELASTIC_ERROR_FILE") for process in holders}
    return Kind.ERROR_JSON if name == b"error.json" or os.fsdecode(path) in error_files else None


def _output(owners: Owners, path: bytes, holds: Sequence[Hold]) -> Kind | None:
    """Return the kind of a file that is stdout or stderr of a process, or what srun was told to write."""
    printers = [process for process, write in holds if write.fd in (1, 2)]
    if path in owners.slurm_paths or any(process.is_batch for process in printers):
        return Kind.SLURM_STDOUT
    is_of_srun = any(process.name == "srun" for process, _ in holds) and b"/." not in path[path.rfind(b"/") :]
    return Kind.TASK if printers or is_of_srun else None
