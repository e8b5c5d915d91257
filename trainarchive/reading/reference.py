"""How people name jobs: ``123``, ``111_2``, ``200+1``, ``cluster/123.0``."""

import re

import msgspec

from trainarchive.errors import TrainarchiveError
from trainarchive.run import is_safe_name

_FORM = re.compile(
    r"(?:(?P<cluster>[^/]+)/)?"
    r"(?P<job>\d{1,18})"
    r"(?:_(?P<task>\d{1,18})|\+(?P<offset>\d{1,18})|\.(?P<attempt>\d{1,9})(?:~(?P<generation>\d{1,9}))?)?"
)


class BadReferenceError(TrainarchiveError):
    """A text that names no job."""

    exit_status = 2


class Reference(msgspec.Struct, frozen=True):
    """A job as somebody named it. ``alias`` is ``111_2`` or ``200+1``; with ``exact`` the name is a whole run key."""

    text: str
    job_id: int
    cluster: str = ""
    alias: str = ""
    attempt: int | None = None
    generation: int | None = None

    @property
    def exact(self) -> bool:
        """Whether cluster, job, attempt and generation are all given."""
        return self.generation is not None


def parse(text: str) -> Reference:
    """Read a job's name; raise BadReferenceError, which tells the forms, for anything else."""
    found = _FORM.fullmatch(text.strip())
    if found is None or (found["cluster"] and not is_safe_name(found["cluster"])):
        raise BadReferenceError(
            "not a job's name",
            where=repr(text),
            hint="123, 111_2 for an array's task, 200+1 for a het component, or cluster/123.0",
        )
    job, attempt = int(found["job"]), found["attempt"]
    if attempt is not None and not found["cluster"]:
        raise BadReferenceError(
            "to Slurm that is a step, not a job", where=text, hint=f"for an attempt: {job} --attempt {attempt}"
        )
    alias = ""
    if found["task"]:
        alias = f"{job}_{int(found['task'])}"
    elif found["offset"]:
        alias = f"{job}+{int(found['offset'])}"
    return Reference(
        text=text.strip(),
        job_id=job,
        cluster=found["cluster"] or "",
        alias=alias,
        attempt=None if attempt is None else int(attempt),
        generation=None if attempt is None else int(found["generation"] or 0),
    )
