"""From a job's name to its runs."""

from collections.abc import Iterable, Sequence

import msgspec

from trainarchive import generations, keys, manifest
from trainarchive.errors import DamagedError, NotFoundError, TrainarchiveError
from trainarchive.manifest import Manifest
from trainarchive.reading.live import Door, LiveLane, segments
from trainarchive.reading.objects import Objects
from trainarchive.reading.reference import Reference, parse
from trainarchive.reading.view import RunView
from trainarchive.run import Lane, LaneReport, RunKey, Source
from trainarchive.store.contract import Store
from trainarchive.stream import State, Stream


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which runs of a job: the newest attempt unless one or all are asked for.

    ``cluster`` limits the search; ``home`` only breaks the tie where a job is in several clusters.
    """

    cluster: str = ""
    home: str = ""
    attempt: int | None = None
    all_attempts: bool = False


def find(store: Store, stream: Stream | None, text: str, wanted: Wanted | None = None) -> list[RunView]:
    """Return the runs that ``text`` names, at least one, by run key.

    A plain id is also the id of an array or of a het job: then its tasks or components come too.
    Of each job the newest attempt, of each attempt the newest generation, unless ``wanted`` or
    the name says otherwise. Redis is asked before the store, since bytes go that way.

    Raises BadReferenceError for a text that is no job's name, and NotFoundError, which says where
    it was looked for.
    """
    return _Search(store, Door(stream)).find(parse(text), wanted or Wanted())


class _Search:
    """One look at Redis and the store."""

    def __init__(self, store: Store, door: Door) -> None:
        self._store = store
        self._door = door
        self._objects = Objects(store)
        self._lanes = door.lanes()
        self._sealed_clusters = {child.rstrip("/") for child in store.children(keys.LIVE)}

    def find(self, name: Reference, wanted: Wanted) -> list[RunView]:
        attempt = name.attempt if name.attempt is not None else wanted.attempt
        clusters = self._clusters(name, wanted)
        found = {cluster: runs for cluster in clusters if (runs := self._runs(cluster, name))}
        if len(found) > 1 and wanted.home in found:
            found = {wanted.home: found[wanted.home]}
        if len(found) > 1:
            raise TrainarchiveError(
                f"job {name.text} is in several clusters: {', '.join(sorted(found))}", hint="choose one with --cluster"
            )
        runs = next(iter(found.values()), set[RunKey]())
        if not runs:
            raise self._unknown(name, clusters)
        chosen = _attempts(runs, attempt, all_attempts=wanted.all_attempts)
        views = [view for key in chosen for view in self._views(key, name)]
        if not views:
            have = ", ".join(sorted({str(key) for key in runs}))
            raise NotFoundError(f"no such attempt of job {name.text}", hint=f"there are: {have}")
        return views

    def _clusters(self, name: Reference, wanted: Wanted) -> list[str]:
        only = name.cluster or wanted.cluster
        if only:
            return [only]
        live = {lane.run.cluster for lane in self._lanes} | self._sealed_clusters
        return sorted(live | set(manifest.clusters(self._store)))

    def _runs(self, cluster: str, name: Reference) -> set[RunKey]:
        """Return all attempts and generations of the jobs that the name stands for."""
        jobs = self._jobs_of_alias(cluster, name)
        if not name.alias:
            jobs.add(name.job_id)
        runs = {lane.run for lane in self._lanes if lane.run.cluster == cluster and lane.run.job_id in jobs}
        for job in jobs:
            runs |= _unfinished(self._store, cluster, job)
            runs |= set(manifest.runs(self._store, cluster, job))
        return runs

    def _jobs_of_alias(self, cluster: str, name: Reference) -> set[int]:
        """Return the ids of array tasks and het components, from the markers and from running jobs."""
        jobs: set[int] = set()
        if name.exact:
            return jobs
        for alias in [name.alias] if name.alias else self._aliases(cluster, name.job_id):
            jobs |= {key.job_id for key in manifest.aliased(self._store, cluster, alias)}
        one_a_run = {lane.run: lane for lane in self._lanes if lane.run.cluster == cluster}
        for lane in one_a_run.values():
            if any(_is_called(source, name) for source in self._door.sources(lane).values()):
                jobs.add(lane.run.job_id)
        return jobs

    def _aliases(self, cluster: str, job: int) -> list[str]:
        found: list[str] = []
        for mark in "_+":
            begun = keys.alias_prefix(cluster, f"{job}{mark}").rstrip("/")
            found += [f"{job}{mark}{child.rstrip('/')}" for child in self._store.children(begun)]
        return found

    def _views(self, key: RunKey, name: Reference) -> list[RunView]:
        """Return the newest generation of an attempt, or the one that is named, if it is there."""
        lanes = {lane: self._door.look(lane) for lane in self._lanes if lane.run == key}
        level0 = segments(self._store, key)
        books = _manifests(self._store, key)
        owned = {(entry.node, token) for book in books.values() for entry in book.nodes for token in entry.tokens}
        reports: dict[Lane, LaneReport | None] = {}
        for lane in {*lanes, *level0}:
            if (lane.node, lane.token) in owned:
                reports[lane] = None  # whose it is, is known by its token
            elif _is_unwritten(lanes.get(lane), level0.get(lane, ())):
                reports[lane] = self._report(lanes.get(lane), level0.get(lane, ()))
        shares = generations.assign(reports, books)
        number = name.generation if name.exact else max([*shares, *books], default=0)
        if number is None or (number not in shares and number not in books):
            return []
        mine = shares.get(number, [])
        return [
            RunView(
                self._objects,
                self._door,
                msgspec.structs.replace(key, generation=number),
                books.get(number),
                lanes=[lanes[lane] for lane in mine if lane in lanes],
                level0={lane: level0[lane] for lane in mine if lane in level0},
            )
        ]

    def _report(self, found: LiveLane | None, listed: Sequence[str]) -> LaneReport | None:
        """Return a lane's latest report: Redis' word, else its last segment's."""
        if found is not None and found.report is not None:
            return found.report
        for key in reversed(listed):
            try:
                return next(iter(self._objects.contents(key).lanes.values()), None)
            except (NotFoundError, DamagedError):
                continue  # an older segment may still tell
        return None

    def _unknown(self, name: Reference, clusters: Sequence[str]) -> NotFoundError:
        where = f"in {', '.join(clusters)}" if clusters else "in any cluster"
        looked = "archived runs, sealed segments" + (f" and {len(self._lanes)} live lanes" if self._door.open else "")
        more = f"; {self._door.notes[0]}" if self._door.notes else ""
        return NotFoundError(
            f"no job {name.text} {where}: looked at {looked}{more}", hint="`trainarchive ls` shows what there is"
        )


def _is_unwritten(found: LiveLane | None, listed: Sequence[str]) -> bool:
    """Say whether a lane that no manifest names may still come into one: else its run is purged, or it went away."""
    if found is None or found.state is None:
        return bool(listed)
    return found.state is not State.ARCHIVED


def _attempts(runs: Iterable[RunKey], attempt: int | None, *, all_attempts: bool) -> list[RunKey]:
    """Return, of each job, the attempts that are asked for, without generations."""
    jobs: dict[int, set[RunKey]] = {}
    for key in runs:
        jobs.setdefault(key.job_id, set()).add(msgspec.structs.replace(key, generation=0))
    chosen: list[RunKey] = []
    for job in sorted(jobs):
        if attempt is not None:
            chosen += [key for key in jobs[job] if key.attempt == attempt]
        else:
            chosen += sorted(jobs[job]) if all_attempts else [max(jobs[job])]
    return chosen


def _manifests(store: Store, key: RunKey) -> dict[int, Manifest]:
    """Return the newest manifest of each generation of an attempt."""
    found = {run.generation: manifest.newest(store, run) for run in manifest.generations(store, key)}
    return {number: book for number, book in found.items() if book is not None}


def _unfinished(store: Store, cluster: str, job: int) -> set[RunKey]:
    """Return the attempts of a job that have level-0 segments."""
    begun = keys.live_prefix(RunKey(cluster, job)).removesuffix("0/")
    found = (_key(f"{cluster}/{job}.{child}") for child in store.children(begun))
    return {key for key in found if key is not None}


def _key(text: str) -> RunKey | None:
    """Read a run key that stands in the store; None where somebody else put something there."""
    try:
        return RunKey.parse(text.rstrip("/"))
    except TrainarchiveError:
        return None


def _is_called(source: Source, name: Reference) -> bool:
    """Say whether the run of this source is the array task or het component of that name."""
    task, component = (source.array_job_id, source.array_task_id), (source.het_job_id, source.het_offset)
    if not name.alias:
        return name.job_id in (task[0], component[0])
    return name.alias in (f"{task[0]}_{task[1]}", f"{component[0]}+{component[1]}")
