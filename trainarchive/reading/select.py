"""From a job's name to its runs."""

import re
from collections.abc import Iterable, Sequence

import msgspec

from trainarchive import generations, keys, manifest
from trainarchive.errors import DamagedError, NotFoundError, TrainarchiveError, UnavailableError
from trainarchive.manifest import Manifest
from trainarchive.reading.live import Door, clusters, no_cluster, segments, unfinished
from trainarchive.reading.objects import Objects
from trainarchive.reading.reference import Reference, parse
from trainarchive.reading.view import RunView
from trainarchive.run import RunKey, Source
from trainarchive.store.contract import Store
from trainarchive.stream import Stream

_NUMBER = re.compile(r"[0-9]{1,18}")


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
    it was looked for; UnavailableError where Redis may know the job and does not answer. A run
    whose manifest cannot be read is returned as far as it is known without, and says so.
    """
    return _Search(store, Door(stream)).find(parse(text), wanted or Wanted())


class _Search:
    """One look at Redis and the store."""

    def __init__(self, store: Store, door: Door) -> None:
        self._store = store
        self._door = door
        self._objects = Objects(store)
        self._lanes = door.lanes()

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
        views: list[RunView] = []
        for attempts in _attempts(runs, attempt):
            there = (several for key in attempts if (several := self._views(key, name)))
            views += [view for several in there for view in several] if wanted.all_attempts else next(there, [])
        if not views:
            have = ", ".join(sorted({str(key) for key in runs}))
            raise NotFoundError(f"no such attempt of job {name.text}", hint=f"there are: {have}")
        return sorted(views, key=lambda view: view.key)

    def _clusters(self, name: Reference, wanted: Wanted) -> list[str]:
        known = {lane.run.cluster for lane in self._lanes} | clusters(self._store)
        only = name.cluster or wanted.cluster
        if only and only not in known:
            raise no_cluster(only, known, self._door)
        return [only] if only else sorted(known)

    def _runs(self, cluster: str, name: Reference) -> set[RunKey]:
        """Return all attempts and generations of the jobs that the name stands for."""
        jobs = self._jobs_of_alias(cluster, name)
        if not name.alias:
            jobs.add(name.job_id)
        runs = {lane.run for lane in self._lanes if lane.run.cluster == cluster and lane.run.job_id in jobs}
        for job in jobs:
            runs |= set(unfinished(self._store, cluster, job))
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
            names = (child.rstrip("/") for child in self._store.children(begun))
            found += [f"{job}{mark}{name}" for name in names if _NUMBER.fullmatch(name)]
        return found

    def _views(self, key: RunKey, name: Reference) -> list[RunView]:
        """Return the newest generation of an attempt, or the one that is named, if it is there."""
        lanes = {lane: self._door.look(lane) for lane in self._lanes if lane.run == key}
        level0 = segments(self._store, key)
        books, damaged = _manifests(self._store, key)
        shares = generations.shares(lanes, level0, books, lambda segment: self._objects.contents(segment).lanes)
        number = name.generation if name.exact else max([*shares, *books, *damaged], default=0)
        if number is None or number not in {*shares, *books, *damaged}:
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
                damaged=damaged.get(number, ""),
            )
        ]

    def _unknown(self, name: Reference, clusters: Sequence[str]) -> TrainarchiveError:
        where = f"in {', '.join(clusters)}" if clusters else "in any cluster"
        if self._door.known and self._door.unanswered:
            return UnavailableError(
                f"no job {name.text} {where} is archived, and whether it runs is not known: {self._door.unanswered}",
                hint="try again when the log Redis answers",
            )
        count = len(self._lanes)
        lanes = f" and {count} live lane{'' if count == 1 else 's'}" if self._door.known else ""
        more = "" if self._door.known else f"; {self._door.unanswered}"
        return NotFoundError(
            f"no job {name.text} {where}: looked at archived runs, sealed segments{lanes}{more}",
            hint="`trainarchive ls` shows what there is",
        )


def _attempts(runs: Iterable[RunKey], attempt: int | None) -> list[list[RunKey]]:
    """Return, of each job, the attempts that may be meant, newest first, without generations."""
    jobs: dict[int, set[RunKey]] = {}
    for key in runs:
        if attempt in (None, key.attempt):
            jobs.setdefault(key.job_id, set()).add(msgspec.structs.replace(key, generation=0))
    return [sorted(found, reverse=True) for found in jobs.values()]


def _manifests(store: Store, key: RunKey) -> tuple[dict[int, Manifest], dict[int, str]]:
    """Return the newest manifest of each generation of an attempt, and what is wrong with those that cannot be read."""
    books: dict[int, Manifest] = {}
    damaged: dict[int, str] = {}
    for run in manifest.generations(store, key):
        try:
            book = manifest.newest(store, run)
        except DamagedError as error:
            damaged[run.generation] = str(error)
        else:
            if book is not None:
                books[run.generation] = book
    return books, damaged


def _is_called(source: Source, name: Reference) -> bool:
    """Say whether the run of this source is the array task or het component of that name."""
    task, component = (source.array_job_id, source.array_task_id), (source.het_job_id, source.het_offset)
    if not name.alias:
        return name.job_id in (task[0], component[0])
    return name.alias in (f"{task[0]}_{task[1]}", f"{component[0]}+{component[1]}")
