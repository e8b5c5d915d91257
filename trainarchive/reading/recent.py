"""The runs there are, newest first, without a catalog: each archived run costs one manifest."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from trainarchive import keys, manifest
from trainarchive.errors import TrainarchiveError
from trainarchive.manifest import Manifest
from trainarchive.reading.live import Door, LiveLane
from trainarchive.run import Lane, RunKey
from trainarchive.store.contract import Store
from trainarchive.stream import State, Stream

THREADS = 8
"""Manifests read at once: each is two round trips to the store."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One line about a run. Times: Unix seconds, 0.0 where not known. ``size``: bytes of text; ``missing``: of gaps.

    ``size`` is None for a run that is neither in the books nor, now, in Redis.
    """

    run: RunKey
    state: str
    running: bool
    complete: bool
    user: str = ""
    started: float = 0.0
    ended: float = 0.0
    nodes: int = 0
    ranks: int = 0
    sources: int = 0
    size: int | None = None
    missing: int = 0


class Listing(msgspec.Struct, frozen=True):
    """Runs, newest first; ``more``: others were left out; ``notes``: what a person should know."""

    runs: tuple[Summary, ...]
    more: bool
    notes: tuple[str, ...]


def recent(store: Store, stream: Stream | None, *, cluster: str = "", limit: int = 50) -> Listing:
    """Return at most ``limit`` runs, those that began last, of one cluster or all.

    Job ids stand for age when it is chosen which manifests to read; what was read is ordered by time.
    """
    door = Door(stream)
    lanes: dict[RunKey, list[Lane]] = {}
    for lane in door.lanes():
        if cluster in ("", lane.run.cluster):
            lanes.setdefault(lane.run, []).append(lane)
    sealed = set(_sealed(store, cluster))
    archived = [key for name in manifest.clusters(store) if cluster in ("", name) for key in manifest.runs(store, name)]
    archived.sort(key=lambda key: (key.job_id, key.attempt, key.generation), reverse=True)
    chosen = archived[:limit]
    with ThreadPoolExecutor(THREADS, "manifest") as pool:
        books = [book for book in pool.map(lambda key: manifest.newest(store, key), chosen) if book is not None]
    # A run in Redis may be older than all that were chosen: then its manifest is asked for by name.
    known = set(archived)
    found = [_of_manifest(book) for book in books]
    tokens = {(book.run.cluster, book.run.job_id, book.run.attempt): _tokens(book) for book in books}
    for key in sorted(set(lanes) | (sealed - known), reverse=True)[: 4 * limit]:
        covered = tokens.get((key.cluster, key.job_id, key.attempt), set())
        looked = [door.look(lane) for lane in lanes.get(key, ()) if (lane.node, lane.token) not in covered]
        open_lanes = [found for found in looked if found.state not in (None, State.ARCHIVED)]
        if open_lanes or (key in sealed and key not in known):
            found.append(_of_lanes(key, open_lanes))
    found.sort(key=lambda summary: (summary.started or float("inf"), summary.run), reverse=True)
    return Listing(tuple(found[:limit]), len(found) > limit or len(archived) > limit, tuple(door.notes))


def _sealed(store: Store, cluster: str) -> Iterable[RunKey]:
    """Yield the runs that have level-0 segments."""
    for child in [f"{cluster}/"] if cluster else store.children(keys.LIVE):
        for name in store.children(f"{keys.LIVE}{child}"):
            try:
                yield RunKey.parse(f"{child}{name.rstrip('/')}")
            except TrainarchiveError:
                continue  # not put there by a worker


def _tokens(book: Manifest) -> set[tuple[str, str]]:
    return {(entry.node, token) for entry in book.nodes for token in entry.tokens}


def _of_manifest(book: Manifest) -> Summary:
    generations = [made for entry in book.sources for made in entry.generations]
    missing = sum(gap.end - gap.start for made in generations for gap in made.gaps)
    users = [entry.report.job.user for entry in book.nodes if entry.report is not None]
    return Summary(
        run=book.run,
        state=book.state,
        running=False,
        complete=book.complete,
        user=next((user for user in users if user), ""),
        started=book.started,
        ended=book.ended,
        nodes=len(book.nodes),
        ranks=len({entry.source.rank for entry in book.sources} - {None}),
        sources=len(book.sources),
        size=sum(made.size for made in generations) - missing,
        missing=missing,
    )


def _of_lanes(key: RunKey, lanes: list[LiveLane]) -> Summary:
    sources = [source for found in lanes for source in found.sources.values()]
    jobs = [found.report.job for found in lanes if found.report is not None]
    ended = lanes and all(found.state is State.DRAINED for found in lanes)
    return Summary(
        run=key,
        state="ENDING" if ended else "RUNNING",
        running=True,
        complete=False,
        user=next((job.user for job in jobs if job.user), ""),
        started=min((job.started for job in jobs if job.started), default=0.0),
        nodes=len({found.lane.node for found in lanes}),
        ranks=len({source.rank for source in sources} - {None}),
        sources=len(sources),
        size=sum(size for found in lanes for size in found.committed.values()) if lanes else None,
    )
