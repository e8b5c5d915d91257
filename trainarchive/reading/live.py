"""What a run has that no manifest lists yet: lanes in the log Redis and level-0 segments."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from trainarchive import keys, manifest, nodes, shelf
from trainarchive.errors import DamagedError, NotFoundError, TrainarchiveError, UnavailableError
from trainarchive.finishing import FINISHED
from trainarchive.run import Lane, LaneReport, RunKey, Source, is_safe_name
from trainarchive.store.contract import Store
from trainarchive.stream import LaneStatus, State, Stream, StreamEntry

NO_REDIS = "there is no log Redis here: no worker is running"
UNREACHABLE = "running jobs, or their newest bytes, may be missing"

T = TypeVar("T")


class LiveLane(msgspec.Struct, frozen=True):
    """A lane as it was when looked at. ``state`` is None where Redis does not know it (any more, or not now).

    ``committed`` maps (source, generation) to the bytes that Redis has accepted so far.
    ``given_up``: a manifest was written without its end, and nothing came since.
    """

    lane: Lane
    state: State | None = None
    report: LaneReport | None = None
    sources: dict[str, Source] = {}
    committed: dict[tuple[str, int], int] = {}
    given_up: bool = False

    @property
    def drained(self) -> bool:
        """Whether the node has sent everything; some of it may wait in Redis."""
        return self.state is not State.OPEN

    @property
    def has_news(self) -> bool:
        """Whether Redis knows the lane and no manifest covers it yet."""
        return self.state not in (None, State.ARCHIVED)


class Door:
    """The log Redis as a reader sees it: where it does not answer, a note is kept and nothing is found there."""

    def __init__(self, stream: Stream | None) -> None:
        """``stream`` of None: it is known not to be there, and ``known`` is False.

        ``unanswered`` tells why Redis did not answer, and is empty as long as it does.
        """
        self._stream = stream
        self.known = stream is not None
        self.unanswered = "" if self.known else NO_REDIS
        self._left_out: list[str] = []

    @property
    def notes(self) -> list[str]:
        """What a person should know of what was asked."""
        return [*([f"{UNREACHABLE}: {self.unanswered}"] if self.unanswered else ()), *self._left_out]

    def lanes(self) -> list[Lane]:
        """Return every lane that Redis knows, in order."""
        none: list[Lane] = []
        return sorted(set(self._ask(lambda stream: list(stream.lanes()), none)))

    def sources(self, lane: Lane) -> dict[str, Source]:
        """Return the descriptions of a lane's sources."""
        about = self._ask(lambda stream: stream.about(lane), None)
        return about[1] if about else {}

    def look(self, lane: Lane) -> LiveLane:
        """Return the lane's state, report, sources and offsets."""
        status = self._ask(lambda stream: stream.status(lane), None)
        if status is None:
            return LiveLane(lane)
        if status.state is State.ARCHIVED:
            return LiveLane(lane, status.state)
        about = self._ask(lambda stream: stream.about(lane), None)
        report, sources = about or (None, {})
        return LiveLane(lane, status.state, report, sources, status.committed, _is_given_up(status))

    def snapshot(self, lane: Lane) -> list[StreamEntry]:
        """Return the frames that wait in the lane now."""
        none: list[StreamEntry] = []
        return self._ask(lambda stream: stream.snapshot(lane), none)

    def _ask(self, question: Callable[[Stream], T], otherwise: T) -> T:
        """Ask, unless an earlier question went unanswered: each would wait for the time-out again."""
        if self._stream is None:
            return otherwise
        try:
            return question(self._stream)
        except UnavailableError as error:
            self._stream = None
            self.unanswered = str(error)
        except DamagedError as error:
            # What one node put into its own lane must not hide the others'.
            self._left_out.append(f"left out: {error}")
        return otherwise


def _is_given_up(status: LaneStatus) -> bool:
    state, _, when = status.control.get(FINISHED, "").partition(" ")
    last = max(status.last_append, status.last_commit)
    return state == status.state and nodes.moment(when, 0.0, float("inf")) >= last


def segments_of(store: Store, lane: Lane) -> list[str]:
    """Return the keys of one lane's level-0 segments, in the order they were sealed."""
    return [info.key for info in store.list(keys.lane_prefix(lane)) if info.key.endswith(".seg")]


def segments(store: Store, run: RunKey) -> dict[Lane, list[str]]:
    """Return the keys of a run's level-0 segments by lane, each lane's in the order they were sealed."""
    found: dict[Lane, list[str]] = {}
    for shelved in shelf.level0(store, run):
        if shelved.lane is not None:
            found.setdefault(shelved.lane, []).append(shelved.key)
    return found


def clusters(store: Store) -> set[str]:
    """Return the clusters that have runs or segments in the store; what else lies there is passed over."""
    found = {child.rstrip("/") for child in store.children(keys.LIVE)} | set(manifest.clusters(store))
    return {name for name in found if is_safe_name(name)}


def no_cluster(name: str, known: Iterable[str], door: Door) -> TrainarchiveError:
    """Return the error for a cluster that is asked for and is not among those that are ``known``."""
    what = f"no cluster {name}"
    if door.known and door.unanswered:
        return UnavailableError(
            f"{what} is archived, and whether it has running jobs is not known: {door.unanswered}",
            hint="try again when the log Redis answers",
        )
    return NotFoundError(what, hint=f"there are: {', '.join(sorted(known)) or 'none yet'}")


def unfinished(store: Store, cluster: str, job: int | None = None) -> Iterator[RunKey]:
    """Yield the runs of a cluster, or of one of its jobs, that have level-0 segments."""
    begun = "" if job is None else f"{job}."
    children = store.children(keys.live_cluster_prefix(cluster) + begun)
    runs = manifest.parsed_runs(cluster, (begun + child for child in children))
    return (run for run in runs if not run.generation)  # level 0 knows of none
