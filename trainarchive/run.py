"""The words for a job's runs: who ran, where, and which files it wrote. All frozen."""

import base64
import os
import re
from enum import StrEnum
from typing import Self

import msgspec

from trainarchive.errors import DamagedError, TrainarchiveError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_TOKEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,63}")
_SOURCE = re.compile(r"(.+)-[A-Za-z0-9]{1,64}")
_NUMBER = "(?:0|[1-9][0-9]{0,17})"
_RUN_KEY = re.compile(rf"([^/]+)/({_NUMBER})\.({_NUMBER})(?:~([1-9][0-9]{{0,17}}))?")


def is_safe_name(name: str) -> bool:
    """Say whether a cluster or node name may become part of object and Redis keys."""
    return _NAME.fullmatch(name) is not None


def source_id(node: str, name: str) -> str:
    """Return the id of a node's source; ``name``, 1 to 64 ASCII letters and digits, tells it from the node's others."""
    return f"{node}-{name}"


def is_source_of(node: str, source: str) -> bool:
    """Say whether ``source`` can be the id of one of the node's sources, as ``source_id`` makes them.

    Of one id this is true for one node only. Whoever takes a source's id from a lane has to ask:
    so a node cannot put text into another node's file.
    """
    found = _SOURCE.fullmatch(source)
    return found is not None and found[1] == node


class RunKey(msgspec.Struct, frozen=True, order=True):
    """One attempt of one Slurm job: ``cluster/job_id.attempt``, ``~N`` when the key came back.

    ``attempt`` is Slurm's restart count as Prolog sees it; ``generation`` counts other jobs
    that had the same three values before (job ids wrap, controllers lose their state).
    """

    cluster: str
    job_id: int
    attempt: int = 0
    generation: int = 0

    def __post_init__(self) -> None:
        """Refuse what could reach outside its place in keys."""
        if not is_safe_name(self.cluster):
            raise TrainarchiveError("not a cluster's name", where=repr(self.cluster), hint="letters, digits and . _ -")
        if min(self.job_id, self.attempt, self.generation) < 0:
            raise TrainarchiveError("job, attempt and generation are not below 0", where=str(self))

    def __str__(self) -> str:
        """Return the text form that ``parse`` reads."""
        tail = f"~{self.generation}" if self.generation else ""
        return f"{self.cluster}/{self.job_id}.{self.attempt}{tail}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form and no other spelling of it; raise TrainarchiveError for anything else."""
        found = _RUN_KEY.fullmatch(text)
        if found is None or not is_safe_name(found[1]):
            raise TrainarchiveError("not a run key", where=text, hint="a run key looks like cluster/123.0")
        return cls(found[1], int(found[2]), int(found[3]), int(found[4] or 0))


class Lane(msgspec.Struct, frozen=True, order=True):
    """One run's way from one node: the unit that is streamed, claimed and sealed.

    ``run`` has generation 0: which generation a lane belongs to is known only when its
    manifest is written. ``token`` tells two runs with one key apart: Slurm's SLUID where
    there is one, else ``t<prolog's time, whole seconds>``.
    """

    run: RunKey
    node: str
    token: str

    def __post_init__(self) -> None:
        """Refuse names that could reach outside their place in keys."""
        if not (is_safe_name(self.node) and _TOKEN.fullmatch(self.token)):
            raise TrainarchiveError("node or token has characters that keys cannot hold", where=repr(self))

    @property
    def name(self) -> str:
        """``cluster/job.attempt/token/node``: unique, and safe in keys and file names' parts."""
        return f"{self.run}/{self.token}/{self.node}"

    @classmethod
    def parse(cls, name: str) -> Self:
        """Read ``name`` back."""
        parts = name.split("/")
        if len(parts) != 4:
            raise TrainarchiveError("not a lane's name", where=name)
        return cls(RunKey.parse("/".join(parts[:2])), node=parts[3], token=parts[2])


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a node's Prolog and Epilog tell of a run. Times are Unix seconds of that node's clock.

    ``nodes`` is Slurm's own host list expression. ``exit_code`` and ``derived_exit_code`` are
    Slurm's ``code:signal`` texts, known only after Epilog; ``ended`` is 0.0 until then.
    """

    uid: int
    user: str = ""
    gid: int = -1
    nodes: str = ""
    num_nodes: int = 0
    partition: str = ""
    account: str = ""
    comment: str = ""
    work_dir: str = ""
    stdout: str = ""
    stderr: str = ""
    sluid: str = ""
    private_dir: str = ""
    started: float = 0.0
    ended: float = 0.0
    exit_code: str = ""
    derived_exit_code: str = ""


class Kind(StrEnum):
    """Where a source comes from."""

    SLURM_STDOUT = "slurm-stdout"
    TASK = "task"
    TORCHRUN = "torchrun"
    NCCL = "nccl"
    FLIGHT_RECORDER = "flight-recorder"
    ERROR_JSON = "error-json"
    KERNEL = "kernel"
    CUSTOM = "custom"


class Gap(msgspec.Struct, frozen=True):
    """Bytes ``start`` to ``end`` of a source's generation that are not archived, and why."""

    generation: int
    start: int
    end: int
    reason: str


class Source(msgspec.Struct, frozen=True, omit_defaults=True):
    r"""One file that a run writes, as one node sees it.

    ``path`` is for people: bytes that are not UTF-8 stand as ``\\xNN``; the exact bytes are
    then in ``path_base64``. ``rank`` is the global rank, ``None`` where many ranks share the
    file (``mixed``) or none is known. ``generation`` numbers are not kept here: they belong to
    frames.
    """

    id: str
    node: str
    kind: Kind
    path: str
    path_base64: str = ""
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

    @property
    def path_bytes(self) -> bytes:
        """The path exactly as the node knew it; raise DamagedError where ``path_base64`` is not base64."""
        if not self.path_base64:
            return self.path.encode()
        try:
            return base64.b64decode(self.path_base64, validate=True)
        except ValueError as error:
            raise DamagedError(f"path_base64 is not base64: {error}", where=self.id) from error


def path_fields(path: bytes | str) -> dict[str, str]:
    """Return ``path`` and, where needed, ``path_base64`` for a ``Source``."""
    raw = os.fsencode(path)
    try:
        return {"path": raw.decode()}
    except UnicodeDecodeError:
        return {"path": raw.decode(errors="backslashreplace"), "path_base64": base64.b64encode(raw).decode()}


class Refusal(msgspec.Struct, frozen=True):
    """A file that a run has, and why it is not followed."""

    path: str
    reason: str


class LaneReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a collector says of its lane: written at its opening, again when things change.

    ``drained`` is set when every byte that this node will send is committed. ``boot_id`` and
    ``skew_s`` (node clock minus Redis clock, seconds, ± ``skew_error_s``) let readers place
    read times on one time line. ``notes``: what people should know of this node's part of the run.
    """

    job: Job
    boot_id: str = ""
    skew_s: float = 0.0
    skew_error_s: float = 0.0
    refusals: tuple[Refusal, ...] = ()
    drained: bool = False
    drained_at: float = 0.0
    notes: tuple[str, ...] = ()
