"""A run's state, from the little that its nodes know.

No hook on a node is told the final state (docs: only accounting has it), so what stands here is
a first word, and ``state_from`` says that it came from Epilog. Known to be wrong at times:

- a step fails and the script still exits 0: Slurm says COMPLETED with derived exit code 5:0, we say FAILED;
- scancel: Epilog sees 0:0, Slurm says CANCELLED, we say COMPLETED;
- a time limit: Slurm says TIMEOUT; Epilog sees a signal, we say FAILED;
- out of memory, a lost node, preemption: their own states in accounting, FAILED or UNKNOWN here.
"""

from collections.abc import Iterable

import msgspec

from trainarchive.run import Job

COMPLETED = "COMPLETED"
FAILED = "FAILED"
UNKNOWN = "UNKNOWN"
FROM_EPILOG = "epilog"

_GOOD = ("", "0:0")


class Ending(msgspec.Struct, frozen=True):
    """How a run ended: ``state``, who says so, and Slurm's two ``code:signal`` texts."""

    state: str
    state_from: str
    exit_code: str = ""
    derived_exit_code: str = ""


def ending(jobs: Iterable[Job]) -> Ending:
    """Tell a run's ending from what its nodes' Epilogs said; the latest of them has the last word."""
    told = [job for job in jobs if job.exit_code]
    if not told:
        return Ending(UNKNOWN, FROM_EPILOG)
    last = max(told, key=lambda job: (job.ended, job.exit_code, job.derived_exit_code))
    good = last.exit_code in _GOOD and last.derived_exit_code in _GOOD
    return Ending(COMPLETED if good else FAILED, FROM_EPILOG, last.exit_code, last.derived_exit_code)
