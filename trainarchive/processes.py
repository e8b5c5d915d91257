"""The live jobs' processes on this node, read from /proc: who they are and what they hold open for writing.

Only /proc is read here, never the files themselves: a hung file system cannot hang a scan.
Processes that vanish and processes that may not be read are left out without a word.
"""

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import msgspec

KEYS = (
    *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID"),
    *("SLURM_NTASKS", "SLURM_RESTART_COUNT", "SLURM_HET_JOB_ID", "SLURM_HET_JOB_OFFSET", "SLURMD_NODENAME"),
    *("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_LOG_DIR"),
    *("NCCL_DEBUG", "NCCL_DEBUG_FILE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"),
    "TRAINARCHIVE_DIR",
)
"""What is kept of an environment. The rest may hold secrets and is dropped at once."""

_VARIABLE = re.compile(rb"(?:\A|\0)(" + "|".join(KEYS).encode() + rb")=([^\0]*)")
_UIDS = re.compile(rb"^Uid:\t(\d+)\t(\d+)\t(\d+)\t(\d+)$", re.MULTILINE)
_FLAGS = re.compile(rb"^flags:\s*([0-7]+)$", re.MULTILINE)
_INODE = re.compile(rb"^ino:\s*(\d+)$", re.MULTILINE)
_STEP = re.compile(r"[A-Za-z0-9._+-]{1,32}")

_NO_FILES = ("/dev/", "/proc/", "/sys/", "/memfd:", "/dmabuf:", "/anon_hugepage", "/SYSV", "/[")
_O_PATH = 0o10000000
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
_MAX_ENVIRONMENT = 8 * 2**20
_MAX_VALUE = 4096
_MAX_FDS = 4096
"""Most descriptors looked at in one process: a user may hold a million and would stall every other job."""
_MAX_SKIPPED = 7
"""Most scans for which an unchanged list of descriptors is taken to mean unchanged files."""


class Write(msgspec.Struct, frozen=True):
    """One descriptor open for writing on something that has a path.

    ``path`` is the kernel's text: ``" (deleted)"`` stands behind a file that has lost its name,
    and a file may really be called so. Whether it is a regular file, opening decides. ``inode``
    is 0 where the kernel (before 5.14) does not tell it.
    """

    fd: int
    path: bytes
    flags: int
    inode: int = 0


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a job. ``start_time`` (clock ticks since boot) makes ``pid`` unique.

    ``rank`` and ``local_rank`` are what the launcher said (RANK, OMPI, PMI; LOCAL_RANK): Slurm's
    ``procid`` is the rank of a task, which may be a torchrun agent with many ranks below it.
    """

    pid: int
    start_time: int
    uid: int
    job_id: int
    name: str
    environment: dict[str, str]
    step: str = ""
    procid: int | None = None
    localid: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    writes: tuple[Write, ...] = ()

    @property
    def is_batch(self) -> bool:
        """Whether the batch script (or an interactive shell) runs it: there SLURM_PROCID is 0 and says nothing."""
        special = self.step.isdigit() and int(self.step) >= _FIRST_SPECIAL_STEP
        return self.rank is None and (special or (not self.step and self.procid in (0, None)))


class Stat(NamedTuple):
    """What is needed of ``/proc/PID/stat``. ``image`` (where stack, arguments and environment lie) changes by exec."""

    name: bytes
    state: bytes
    start_time: int
    image: tuple[bytes, ...]


class _Entry(msgspec.Struct):
    """What is known of a process until it calls exec; ``process`` is None where it is no job's."""

    uid: int
    start_time: int
    image: tuple[bytes, ...]
    process: Process | None
    fds: tuple[str, ...] = ()
    skip: int = 0
    pace: int = 0


class Scanner:
    """Looks again and again; the second look costs a fraction of the first.

    Environments are read once an exec. A worker between fork and exec still shows its parent's;
    exec moves the stack, so the changed ``Stat.image`` tells when to read again. Names do not:
    programs rename themselves, and some (setproctitle) write their new title over the
    environment, which only the first reading then has.

    Descriptors are listed at every scan and followed to their paths where the list has changed;
    where it has not, up to ``_MAX_SKIPPED`` scans are skipped, fewer after each change.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}

    def scan(self, jobs: Mapping[int, int]) -> dict[int, list[Process]]:
        """Return these jobs' living processes, by pid, in one pass over /proc. ``jobs``: job id → uid.

        A process is a job's only where its uid is the job's and ``job_of`` says so: nothing that
        another user's process claims is believed.
        """
        found: dict[int, list[Process]] = {job_id: [] for job_id in jobs}
        uids = set(jobs.values())
        pids = _pids()
        for pid in pids:
            process = self._look(pid, uids)
            if process is not None and jobs.get(process.job_id) == process.uid:
                found[process.job_id].append(self._with_files(process))
        for pid in self._entries.keys() - set(pids):
            del self._entries[pid]
        return found

    def _look(self, pid: int, uids: set[int]) -> Process | None:
        """Return the process with its files as of the last scan, None where it is nobody's of ``uids`` or no job's."""
        try:
            uid = os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116 - a Path for every process doubles the cost of a scan
        except OSError:
            return None
        stat = parse_stat(_read(f"/proc/{pid}/stat", 4096)) if uid in uids else None
        if stat is None or stat.state in b"ZXx":
            return None
        entry = self._entries.get(pid)
        if entry is None or (entry.uid, entry.start_time, entry.image) != (uid, stat.start_time, stat.image):
            entry = self._entries[pid] = _Entry(uid, stat.start_time, stat.image, _learn(pid, uid, stat))
        return entry.process

    def _with_files(self, process: Process) -> Process:
        """Return what ``_look`` gave with its files as of now."""
        entry = self._entries[process.pid]
        fds = _fds(process.pid)
        if fds == entry.fds and entry.skip:
            entry.skip -= 1
            return process
        writes = _writes(process.pid, fds)
        if (fds, writes) == (entry.fds, process.writes):
            entry.pace = min(2 * entry.pace + 1, _MAX_SKIPPED)
        else:
            entry.pace, entry.fds = 0, fds
            process = entry.process = msgspec.structs.replace(process, writes=writes)
        entry.skip = entry.pace
        return process


def job_of(pid: int) -> int | None:
    """Return the id of the job that a process belongs to, None where there is none.

    The environment says so, and a user may write there what he likes: callers check the uid.
    """
    return _number(_environment(pid).get("SLURM_JOB_ID"))


def parse_stat(raw: bytes) -> Stat | None:
    """Read ``/proc/PID/stat``; None for anything else. The name may hold spaces, newlines and ``)``."""
    name_at, name_end = raw.find(b"("), raw.rfind(b")")
    fields = raw[name_end + 1 :].split()
    if name_at < 0 or name_end < name_at or len(fields) < 20 or not fields[19].isdigit():
        return None
    # Fields 28 and 48-51 of proc(5): startstack, arg_start, arg_end, env_start, env_end.
    return Stat(raw[name_at + 1 : name_end], fields[0], int(fields[19]), (*fields[25:26], *fields[45:49]))


def _pids() -> list[int]:
    names = os.listdir("/proc")  # noqa: PTH208 - a Path for every process doubles the cost of a scan
    return sorted(int(name) for name in names if name.isdecimal())


def _learn(pid: int, uid: int, stat: Stat) -> Process | None:
    job_id = job_of(pid)
    if job_id is None or not _is_wholly(pid, uid):
        return None
    environment = _environment(pid)
    step = environment.get("SLURM_STEP_ID", "")
    ranks = (_number(environment.get(key)) for key in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))
    return Process(
        pid=pid,
        start_time=stat.start_time,
        uid=uid,
        job_id=job_id,
        name=os.fsdecode(stat.name),
        environment=environment,
        step=step if _STEP.fullmatch(step) else "",
        procid=_number(environment.get("SLURM_PROCID")),
        localid=_number(environment.get("SLURM_LOCALID")),
        rank=next((rank for rank in ranks if rank is not None), None),
        local_rank=_number(environment.get("LOCAL_RANK")),
    )


def _is_wholly(pid: int, uid: int) -> bool:
    """Whether real, effective, saved and file system uid are all ``uid``.

    The owner of /proc/PID is the effective uid only: with a setuid bit, the environment is somebody else's.
    """
    uids = _UIDS.search(_read(f"/proc/{pid}/status", 4096))
    return uids is not None and {int(text) for text in uids.groups()} == {uid}


def _environment(pid: int) -> dict[str, str]:
    """Return the variables of KEYS that the process was started with; like getenv, the first of two counts."""
    found: dict[str, str] = {}
    for key, value in _VARIABLE.findall(_read(f"/proc/{pid}/environ", _MAX_ENVIRONMENT)):
        if len(value) <= _MAX_VALUE:
            found.setdefault(key.decode(), os.fsdecode(value))
    return found


def _number(text: str | None) -> int | None:
    """Return a count or an id; None where the text is none: users set these variables too."""
    return int(text) if text and len(text) <= 10 and text.isascii() and text.isdigit() else None


def _fds(pid: int) -> tuple[str, ...]:
    """Return the process's lowest open descriptors, as texts."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            return tuple([entry.name for entry in islice(entries, _MAX_FDS)])
    except OSError:
        return ()


def _writes(pid: int, fds: tuple[str, ...]) -> tuple[Write, ...]:
    """Return those of the descriptors that are open for writing on something that has a path."""
    found = []
    for fd in fds:
        try:
            path = os.readlink(f"/proc/{pid}/fd/{fd}")  # noqa: PTH115 - link texts are not always paths
        except OSError:
            continue
        if path.startswith("/") and not path.startswith(_NO_FILES):
            found.append(_write(pid, int(fd), os.fsencode(path)))
    return tuple(write for write in found if write is not None)


def _write(pid: int, fd: int, path: bytes) -> Write | None:
    """Return the descriptor if it can write; O_PATH ones cannot: root may open through them what the user may not."""
    info = _read(f"/proc/{pid}/fdinfo/{fd}", 4096)
    flags, inode = _FLAGS.search(info), _INODE.search(info)
    mode = int(flags[1], 8) if flags else 0
    if mode & _O_PATH or mode & os.O_ACCMODE not in (os.O_WRONLY, os.O_RDWR):
        return None
    return Write(fd, path, mode, int(inode[1]) if inode else 0)


def _read(path: str, limit: int) -> bytes:
    """Return up to ``limit`` bytes of a file in /proc; nothing where it cannot be read."""
    data = b""
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while len(data) < limit and (chunk := os.read(handle, min(limit, 65536))):
                data += chunk
        except OSError:
            data = b""
        finally:
            os.close(handle)
    return data
