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

from trainarchive.run import Lane, RunKey

LIVE = "live/"
RUNS = "runs/"
ALIAS = "alias/"


def live_prefix(run: RunKey) -> str:
    """Prefix of all level-0 segments of a run, whatever its generation."""
    return f"{LIVE}{run.cluster}/{run.job_id}.{run.attempt}/"


def lane_prefix(lane: Lane) -> str:
    """Prefix of one lane's level-0 segments."""
    return f"{LIVE}{lane.name}/"


def segment_key(lane: Lane, epoch: str, first: str, last: str, digest: str) -> str:
    """Key of one level-0 segment: stream ids ``first`` to ``last`` of that epoch, and the body's digest.

    The padded ids make keys sort in stream order within an epoch.
    """
    return f"{lane_prefix(lane)}{epoch}-{_padded(first)}-{_padded(last)}-{digest[:16]}.seg"


def lane_of_segment(key: str) -> Lane:
    """Return the lane that a level-0 segment key belongs to."""
    return Lane.parse(key.removeprefix(LIVE).rpartition("/")[0])


def run_prefix(run: RunKey) -> str:
    """Prefix of everything permanent of a run."""
    return f"{RUNS}{run}/"


def manifest_prefix(run: RunKey) -> str:
    """Prefix of a run's numbered manifests."""
    return f"{run_prefix(run)}manifest/"


def manifest_key(run: RunKey, number: int) -> str:
    """Key of manifest ``number`` (from 1); the padding makes the newest sort last."""
    return f"{manifest_prefix(run)}{number:08d}.json.zst"


def part_key(run: RunKey, digest: str) -> str:
    """Key of a part that replaces level-0 segments."""
    return f"{run_prefix(run)}parts/{digest[:32]}.seg"


def alias_prefix(cluster: str, alias: str) -> str:
    """Prefix of the markers that lead from ``111_2`` or ``200+1`` to run keys."""
    return f"{ALIAS}{cluster}/{alias}/"


def alias_key(cluster: str, alias: str, run: RunKey) -> str:
    """Key of one such marker."""
    return f"{alias_prefix(cluster, alias)}{str(run).partition('/')[2]}"


def _padded(stream_id: str) -> str:
    milliseconds, _, sequence = stream_id.partition("-")
    return f"{int(milliseconds):015d}.{int(sequence or 0):06d}"
