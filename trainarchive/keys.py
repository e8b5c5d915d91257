"""Names of objects in the store. Nothing else in the project builds or takes apart a key.

::

    live/<cluster>/<job>.<attempt>/<token>/<node>/<epoch>-<first>-<last>-<digest>.seg   level 0
    runs/<cluster>/<job>.<attempt>[~generation]/manifest/<number>.json.zst               the books
    runs/<cluster>/<job>.<attempt>[~generation]/parts/<digest>.seg                       merged small runs
    alias/<cluster>/<array job>_<task>/<job>.<attempt>[~generation]                      empty markers
    alias/<cluster>/<het job>+<offset>/<job>.<attempt>[~generation]

Level 0 has a prefix of its own: it is deleted once a later part replaces it, so no Object Lock
may cover it.
"""

import re

from trainarchive.errors import TrainarchiveError
from trainarchive.run import Lane, RunKey, is_safe_name

LIVE = "live/"
RUNS = "runs/"
ALIAS = "alias/"

_ALIAS = re.compile(r"[0-9]{1,18}[_+][0-9]{0,18}")
_EPOCH = re.compile(r"[A-Za-z0-9]{1,64}")
_STREAM_ID = re.compile(r"([0-9]{1,20})(?:-([0-9]{1,20}))?")
_DIGEST = re.compile(r"[0-9a-f]{32,}")


def live_prefix(run: RunKey) -> str:
    """Prefix of all level-0 segments of a run, whatever its generation."""
    return f"{LIVE}{run.cluster}/{run.job_id}.{run.attempt}/"


def live_cluster_prefix(cluster: str) -> str:
    """Prefix whose children are the runs of a cluster that have level-0 segments: ``<job>.<attempt>/``."""
    return f"{LIVE}{cluster}/"


def lane_prefix(lane: Lane) -> str:
    """Prefix of one lane's level-0 segments."""
    return f"{LIVE}{lane.name}/"


def segment_key(lane: Lane, epoch: str, first: str, last: str, digest: str) -> str:
    """Key of one level-0 segment: stream ids ``first`` to ``last`` of that epoch, and the body's digest.

    The padded ids make keys sort in stream order within an epoch. Raises TrainarchiveError for
    what cannot be an epoch, a stream id or a digest: a node may have written it.
    """
    if not _EPOCH.fullmatch(epoch):
        raise TrainarchiveError("not an epoch", where=repr(epoch[:100]))
    return f"{lane_prefix(lane)}{epoch}-{_padded(first)}-{_padded(last)}-{_hex(digest)[:16]}.seg"


def lane_of_segment(key: str) -> Lane:
    """Return the lane that a level-0 segment key belongs to; raise TrainarchiveError for other keys."""
    if not (key.startswith(LIVE) and key.endswith(".seg")):
        raise TrainarchiveError("not a level-0 segment's key", where=key)
    return Lane.parse(key.removeprefix(LIVE).rpartition("/")[0])


def is_level0(key: str) -> bool:
    """Say whether a key is below level 0's prefix."""
    return key.startswith(LIVE)


def epoch_of(key: str) -> str:
    """Return the epoch in a level-0 segment's key."""
    return key.rpartition("/")[2].partition("-")[0]


def digest_in(key: str) -> str:
    """Return the beginning of the digest (hex) that the key of a segment or part holds."""
    return key.rpartition("/")[2].removesuffix(".seg").rpartition("-")[2]


def run_prefix(run: RunKey) -> str:
    """Prefix of everything permanent of a run."""
    return f"{RUNS}{run}/"


def cluster_prefix(cluster: str) -> str:
    """Prefix whose children are a cluster's runs: ``<job>.<attempt>[~generation]/``."""
    return f"{RUNS}{cluster}/"


def job_prefix(cluster: str, job_id: int) -> str:
    """Prefix whose children are one job's attempts and generations: ``<attempt>[~generation]/``."""
    return f"{RUNS}{cluster}/{job_id}."


def manifest_prefix(run: RunKey) -> str:
    """Prefix of a run's numbered manifests."""
    return f"{run_prefix(run)}manifest/"


def manifest_key(run: RunKey, number: int) -> str:
    """Key of manifest ``number`` (from 1); the padding makes the newest sort last."""
    return f"{manifest_prefix(run)}{number:08d}.json.zst"


def part_key(run: RunKey, digest: str) -> str:
    """Key of a part that replaces level-0 segments."""
    return f"{run_prefix(run)}parts/{_hex(digest)[:32]}.seg"


def alias_prefix(cluster: str, alias: str) -> str:
    """Prefix of the markers that lead from ``111_2`` or ``200+1`` (or a begun ``111_``) to run keys.

    Raises TrainarchiveError for anything else.
    """
    if not (is_safe_name(cluster) and _ALIAS.fullmatch(alias)):
        raise TrainarchiveError(
            "not an array task or het component", where=f"{cluster}/{alias}", hint="like 111_2, 200+1"
        )
    return f"{ALIAS}{cluster}/{alias}/"


def parts_prefix(run: RunKey) -> str:
    """Prefix of a run's parts."""
    return f"{run_prefix(run)}parts/"


def alias_key(cluster: str, alias: str, run: RunKey) -> str:
    """Key of one such marker."""
    return f"{alias_prefix(cluster, alias)}{str(run).partition('/')[2]}"


def _padded(stream_id: str) -> str:
    """Pad for 64 bits each: while its clock stands behind, Redis counts the second number up and up."""
    found = _STREAM_ID.fullmatch(stream_id)
    if found is None:
        raise TrainarchiveError("not a stream id", where=repr(stream_id[:100]))
    return f"{int(found[1]):020d}.{int(found[2] or 0):020d}"


def _hex(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise TrainarchiveError("not a digest of 32 or more hex digits", where=repr(digest[:100]))
    return digest
