"""Discovery: which files a run writes on this node, of what kind, and whose they are.

Two ways lead to a file: a living process holds it open for writing (``held``), or its path
follows from what is known of the run (``named``). Finding opens nothing and believes nothing:
every candidate still has to be opened with the job's own identity.

    candidate   what is found, and how it becomes a Source
    patterns    Slurm's, NCCL's and the site's file name patterns
    owners      rank, task and step of the processes that write a file
    held        files that processes hold
    named       files with known paths; this part looks into directories
"""

from collections.abc import Sequence

from trainarchive import settings as configuration
from trainarchive.processes import Process
from trainarchive.run import Job, Refusal, RunKey
from trainarchive.sources.candidate import Attribution, Candidate, describe, merge, source_id
from trainarchive.sources.held import held
from trainarchive.sources.named import Named
from trainarchive.sources.owners import Owners

__all__ = ["Attribution", "Candidate", "candidates", "describe", "merge", "source_id"]


def candidates(
    run: RunKey, job: Job, processes: Sequence[Process], settings: configuration.Sources, node: str
) -> tuple[list[Candidate], list[Refusal]]:
    """Return the files to follow, each once, and what was left out because of ``max_files_per_run``.

    ``processes``: the run's on this node. Ended ones are welcome: what they knew (the rank of a
    pid, the names of files) outlives them. A job's processes may die within the second in which
    they write their last words into a file that was never open before.
    """
    owners = Owners(run, job, processes, node)
    found: list[Candidate] = []
    paths: set[bytes] = set()
    limit = settings.max_files_per_run
    for candidate, has_name in held(owners, settings.names):
        if len(found) > limit:
            break
        found.append(candidate)
        if has_name:
            paths.add(candidate.path)
    named = Named(owners, settings)
    for candidate in named.files():
        if len(found) > limit:
            break
        if candidate.path not in paths:
            paths.add(candidate.path)
            found.append(candidate)
    if len(found) <= limit and not named.is_cut:
        return found, []
    reason = f"more files or directory entries than max_files_per_run = {limit}: the others are not followed"
    return found[:limit], [Refusal(job.work_dir or "/", reason)]
