"""A file that may be followed: what is known of it, and how it becomes a ``Source``."""

from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from trainarchive import run
from trainarchive.run import Kind, Source, path_fields


class Identity(Protocol):
    """Which file it is on this node: file system, inode, birth time (ns; 0 where none is known)."""

    @property
    def fs(self) -> int: ...  # noqa: D102 - the class says it
    @property
    def inode(self) -> int: ...  # noqa: D102 - the class says it
    @property
    def birth_ns(self) -> int: ...  # noqa: D102 - the class says it


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """Whose a file is, in the words of ``Source``. ``mixed``: several ranks write to it, ``rank`` is None."""

    rank: int | None = None
    local_rank: int | None = None
    mixed: bool = False
    step: str = ""
    task: int | None = None
    pid: int | None = None
    array_job_id: int | None = None
    array_task_id: int | None = None
    het_job_id: int | None = None
    het_offset: int | None = None


class Candidate(Attribution, frozen=True, kw_only=True):
    """A file that may be followed, and how to open it.

    With ``fd``: through ``/proc/PID/fd/FD``, if the process's start time still is ``start_time``
    and the file's inode ``inode`` (0: not known, as before Linux 5.14).
    With ``root``: below that directory, since the process has mounts of its own (a private /tmp).
    Else at ``path``, which is the path as the process or the user names it.
    """

    kind: Kind
    path: bytes
    fd: int | None = None
    start_time: int = 0
    inode: int = 0
    root: bytes = b""

    @property
    def proc_path(self) -> bytes:
        """Where the file is reached through /proc; empty where ``path`` itself leads to it."""
        if self.fd is not None and self.pid is not None:
            return b"/proc/%d/fd/%d" % (self.pid, self.fd)
        return self.root + self.path if self.root else b""


def source_id(node: str, identity: Identity, path: bytes) -> str:
    """Return the node and 16 hex digits: the same for the same file at the same path, after a restart too."""
    text = f"{node}\0{identity.fs}\0{identity.inode}\0{identity.birth_ns}\0".encode()
    return run.source_id(node, blake2b(text + path, digest_size=8).hexdigest())


def describe(candidate: Candidate, id: str, node: str) -> Source:  # noqa: A002 - Source's own word for it
    """Return what the archive keeps of a candidate. A mixed file's pid was only a way to open it."""
    whose: dict[str, Any] = {name: getattr(candidate, name) for name in Attribution.__struct_fields__}
    if candidate.mixed:
        whose["pid"] = None
    return Source(id=id, node=node, kind=candidate.kind, **{**path_fields(candidate.path), **whose})


def merge(old: Source, new: Candidate) -> Source | None:
    """Return ``old`` with what a later look knows better; None if that is nothing.

    A rank replaces none; two ranks make it mixed, for good. A rank that was only its task's
    number (an agent's, seen before its workers) gives way to what is then known of that task.
    """
    kind = new.kind if old.kind is Kind.CUSTOM else old.kind
    better = msgspec.structs.replace(old, kind=kind, **_gained(old, new))
    return None if better == old else better


def _gained(old: Source, new: Candidate) -> dict[str, Any]:
    if old.mixed:
        return {}
    provisional = old.rank is not None and old.rank == old.task == new.task
    if new.mixed or (not provisional and None not in (old.rank, new.rank) and old.rank != new.rank):
        task = old.task if old.task == new.task else None
        return {"mixed": True, "rank": None, "local_rank": None, "pid": None, "task": task}
    if new.rank == old.rank:
        names = [name for name in Attribution.__struct_fields__ if getattr(old, name) in (None, "")]
    elif new.rank is not None or provisional:
        names = ["rank", "local_rank", "step", "task", "pid"]
    else:
        names = []
    return {name: getattr(new, name) for name in names}
