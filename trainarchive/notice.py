"""Notices: what a node's Prolog and Epilog leave for the collector, one small file a hook call.

A notice is ``NAME=value`` records, each ended by NUL, the last one ``TRAINARCHIVE_END=1``. Hooks
write it under a name that begins with a dot and rename it, so it is whole or not there; the last
record tells of what a crash of the machine cut off. Its time is the file's mtime.
"""

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from trainarchive.errors import TrainarchiveError
from trainarchive.run import Job, Lane, RunKey

MAX_SIZE = 1024 * 1024
"""Most bytes of one notice."""

_END = b"TRAINARCHIVE_END=1"
_NAME = re.compile(rb"[A-Z_][A-Z0-9_]*")
_JOB_ID = re.compile(r"[1-9][0-9]{0,9}")
_COUNT = re.compile(r"[0-9]{1,10}")
_SLUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,63}")


class Notice(msgspec.Struct, frozen=True):
    """One call of Prolog or Epilog on ``node``. ``time``: Unix seconds of the node's clock.

    ``run.attempt`` is Slurm's restart count, 0 where it tells none. **In the Epilog of a run that
    is requeued it is already one higher than in its Prolog**: an epilog closes the run that the
    prolog opened on this node, whatever its attempt says. ``token`` is Slurm's SLUID, the same in
    both; where there is none (22.05) it is ``t<whole seconds of time>``, and then only the prolog's
    means anything.
    """

    event: Literal["prolog", "epilog"]
    run: RunKey
    node: str
    job: Job
    token: str
    time: float
    path: Path

    @property
    def lane(self) -> Lane:
        """The lane that a prolog opens."""
        return Lane(self.run, self.node, self.token)


def encode(values: Mapping[str, bytes]) -> bytes:
    """Return a notice's bytes. Names are upper case, values without NUL; else ValueError."""
    records: list[bytes] = []
    for name, value in values.items():
        record = name.encode() + b"=" + value
        if not _NAME.fullmatch(name.encode()) or b"\0" in value or record == _END:
            raise ValueError(f"no record of a notice: {record!r}")
        records.append(record)
    return b"".join(record + b"\0" for record in [*records, _END])


def decode(data: bytes) -> dict[str, bytes]:
    """Return the records; raise TrainarchiveError for anything that ``encode`` and the hooks do not write."""
    *records, rest = data.split(b"\0")
    if rest or not records or records.pop() != _END:
        raise TrainarchiveError("the notice is torn: its end is missing")
    values: dict[str, bytes] = {}
    for record in records:
        name, equals, value = record.partition(b"=")
        if not equals or not _NAME.fullmatch(name) or name.decode() in values or record == _END:
            raise TrainarchiveError(f"not a notice: a record is {record[:60]!r}")
        values[name.decode()] = value
    return values


def read_notice(path: Path) -> Notice:
    r"""Read one notice; raise TrainarchiveError, with its path and the reason, where it is not one.

    Only a regular file of this process' own user counts: nobody else can have put it there.
    Bytes that are not UTF-8 stand as ``\xNN``.
    """
    try:
        data, mtime = _read(path)
        values = {name: value.decode(errors="backslashreplace") for name, value in decode(data).items()}
        return _notice(values, mtime, path)
    except OSError as error:
        raise TrainarchiveError(f"the notice cannot be read: {error.strerror}", where=str(path)) from error
    except TrainarchiveError as error:
        raise TrainarchiveError(error.what, where=str(path), hint=error.hint) from error


def waiting(spool: Path) -> list[Path]:
    """Return what waits in ``spool``, oldest first (mtime, then name); not what is being written."""
    found: list[tuple[int, str, Path]] = []
    for path in _entries(spool):
        if path.name.startswith(".") or path.name == "bad":
            continue
        try:
            found.append((path.lstat().st_mtime_ns, path.name, path))
        except FileNotFoundError:
            continue
    return [path for _, _, path in sorted(found)]


def set_aside(path: Path) -> Path | None:
    """Move what is no notice to ``bad/`` beside it, for people to look at; return where, None if it is gone."""
    bad = path.parent / "bad"
    bad.mkdir(mode=0o700, exist_ok=True)
    place, number = bad / path.name, 0
    while os.path.lexists(place):
        number += 1
        place = bad / f"{path.name}.{number}"
    try:
        return path.rename(place)
    except FileNotFoundError:
        return None


def sweep(spool: Path, *, before: float) -> None:
    """Remove what killed hooks left half written before ``before`` (Unix s). A hook never takes over 2 s."""
    for path in _entries(spool):
        try:
            if path.name.startswith(".tmp-") and path.lstat().st_mtime < before:
                path.unlink()
        except FileNotFoundError:
            continue


def _entries(spool: Path) -> list[Path]:
    directory = spool / "notices"
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TrainarchiveError(f"the spool cannot be read: {error.strerror}", where=str(directory)) from error


def _read(path: Path) -> tuple[bytes, float]:
    """Return content and mtime. O_NONBLOCK: a FIFO must not hold the collector up."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor, not a path
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise TrainarchiveError("not a regular file")
        if found.st_uid != os.geteuid():
            raise TrainarchiveError(f"the notice belongs to uid {found.st_uid}, not to uid {os.geteuid()}")
        data = file.read(MAX_SIZE + 1)
    if len(data) > MAX_SIZE:
        raise TrainarchiveError(f"the notice is larger than {MAX_SIZE} bytes")
    return data, found.st_mtime


def _notice(values: Mapping[str, str], mtime: float, path: Path) -> Notice:
    event = values.get("TRAINARCHIVE_EVENT", "")
    if event not in ("prolog", "epilog"):
        raise TrainarchiveError(f"the notice tells of {event!r}, which is neither prolog nor epilog")
    job_id = values.get("SLURM_JOB_ID", "")
    if not _JOB_ID.fullmatch(job_id):
        raise TrainarchiveError(f"the notice's job id is {job_id[:60]!r}")
    sluid = values.get("SLURM_JOB_SLUID", "")
    run = RunKey(values.get("SLURM_CLUSTER_NAME", ""), int(job_id), _count(values, "SLURM_JOB_RESTART_COUNT"))
    notice = Notice(
        event="prolog" if event == "prolog" else "epilog",
        run=run,
        node=values.get("SLURMD_NODENAME", ""),
        job=_job(values, event, mtime),
        token=sluid if _SLUID.fullmatch(sluid) else f"t{max(int(mtime), 0)}",
        time=mtime,
        path=path,
    )
    notice.lane  # noqa: B018 - made for its check: names that keys cannot hold are refused here
    return notice


def _job(values: Mapping[str, str], event: str, mtime: float) -> Job:
    uid = values.get("SLURM_JOB_UID", "")
    if not _COUNT.fullmatch(uid) or int(uid) >= 2**32 - 1:
        raise TrainarchiveError(f"the notice's user id is {uid[:60]!r}")  # never to be taken for 0: files open as it
    start = float(_count(values, "SLURM_JOB_START_TIME"))  # 25.11, controller's clock: for an epilog without prolog
    return Job(
        uid=int(uid),
        user=values.get("SLURM_JOB_USER", ""),
        gid=_count(values, "SLURM_JOB_GID", -1),
        nodes=values.get("SLURM_JOB_NODELIST", ""),
        num_nodes=_count(values, "SLURM_JOB_NUM_NODES"),
        partition=values.get("SLURM_JOB_PARTITION", ""),
        account=values.get("SLURM_JOB_ACCOUNT", ""),
        comment=values.get("SLURM_JOB_COMMENT", ""),
        work_dir=values.get("SLURM_JOB_WORK_DIR", ""),
        stdout=values.get("SLURM_JOB_STDOUT", ""),
        stderr=values.get("SLURM_JOB_STDERR", ""),
        sluid=values.get("SLURM_JOB_SLUID", ""),
        private_dir=values.get("TRAINARCHIVE_DIR", ""),
        started=mtime if event == "prolog" else start,
        ended=mtime if event == "epilog" else 0.0,
        exit_code=values.get("SLURM_JOB_EXIT_CODE2") or _code_and_signal(values.get("SLURM_JOB_EXIT_CODE", "")),
        derived_exit_code=_code_and_signal(values.get("SLURM_JOB_DERIVED_EC", "")),
    )


def _count(values: Mapping[str, str], name: str, default: int = 0) -> int:
    text = values.get(name, "")
    return int(text) if _COUNT.fullmatch(text) else default


def _code_and_signal(text: str) -> str:
    """Return ``code:signal`` for a wait status as Slurm prints it in hooks; what has that form already stays."""
    if not _COUNT.fullmatch(text):
        return text
    return f"{int(text) >> 8 & 0xFF}:{int(text) & 0x7F}"
