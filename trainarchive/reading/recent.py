"""The runs there are, newest first, without a catalog: each archived run costs one manifest."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec

from trainarchive import manifest
from trainarchive.errors import DamagedError
from trainarchive.manifest import Manifest, NodeEntry
from trainarchive.reading.live import Door, LiveLane, clusters, no_cluster, unfinished
from trainarchive.reading.unseen import unseen
from trainarchive.reading.view import DAMAGED
from trainarchive.run import Lane, RunKey
from trainarchive.store.contract import Store
from trainarchive.stream import Stream

THREADS = 8
"""Manifests read at once: each is two round trips to the store."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One line about a run. Times: Unix seconds, 0.0 where not known. ``size``: bytes of text; ``missing``: of gaps.

    ``size`` is None for a run that is neither in the books nor, now, in Redis. ``unseen`` counts what
    may mean that output is missing which nobody archived.
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
    unseen: int = 0


class Listing(msgspec.Struct, frozen=True):
    """Runs, newest first; ``more``: others were left out; ``notes``: what a person should know."""

    runs: tuple[Summary, ...]
    more: bool
    notes: tuple[str, ...]


def recent(store: Store, stream: Stream | None, *, cluster: str = "", limit: int = 50) -> Listing:
    """Return at most ``limit`` runs, those that began last, of one cluster or all.

    Of archived runs the highest job ids are looked at; what was looked at is ordered by time. A run
    whose manifest cannot be read has the state DAMAGED, and a note says why. Raises NotFoundError for
    a cluster that is asked for and has none, UnavailableError where Redis may know it and does not answer.
    """
    door = Door(stream)
    listed, lanes = door.lanes(), dict[RunKey, list[Lane]]()
    stored = clusters(store)
    known = {lane.run.cluster for lane in listed} | stored
    if cluster and cluster not in known:
        raise no_cluster(cluster, known, door)
    for lane in listed:
        if cluster in ("", lane.run.cluster):
            lanes.setdefault(lane.run, []).append(lane)
    wanted = [name for name in sorted(stored) if cluster in ("", name)]
    sealed = {key for name in wanted for key in unfinished(store, name)}
    archived = [key for name in wanted for key in manifest.runs(store, name)]
    archived.sort(key=lambda key: (key.job_id, key.attempt, key.generation), reverse=True)
    with ThreadPoolExecutor(THREADS, "manifest") as pool:
        books = list(pool.map(lambda key: _book(store, key), archived[:limit]))
    found = [_of_manifest(book) for book in books if isinstance(book, Manifest)]
    found += [_of_damaged(key) for key, book in zip(archived, books, strict=False) if isinstance(book, DamagedError)]
    found += _running(door, lanes, sealed - set(archived), [book for book in books if isinstance(book, Manifest)])
    found.sort(key=_newness, reverse=True)
    shown = tuple(found[:limit])
    notes = [str(book) for book in books if isinstance(book, DamagedError)]
    # Where there is no Redis no job runs; then it matters only for what is listed as unfinished.
    if door.known or any(summary.running for summary in shown):
        notes += door.notes
    return Listing(shown, len(found) > limit or len(archived) > limit, tuple(notes))


def _newness(summary: Summary) -> tuple[float, RunKey]:
    """When it began; of a run that goes on, if that is not known: just now."""
    return summary.started or (float("inf") if summary.running else 0.0), summary.run


def _book(store: Store, key: RunKey) -> Manifest | DamagedError | None:
    try:
        return manifest.newest(store, key)
    except DamagedError as error:
        return error


def _running(
    door: Door, lanes: dict[RunKey, list[Lane]], sealed: set[RunKey], books: list[Manifest]
) -> Iterator[Summary]:
    """Yield the runs with lanes that no manifest covers, and those that have segments and no manifest (``sealed``)."""
    tokens: dict[RunKey, set[tuple[str, str]]] = {}
    for book in books:
        tokens.setdefault(msgspec.structs.replace(book.run, generation=0), set()).update(_tokens(book))
    for key in {*lanes, *sealed}:
        covered = tokens.get(key, set())
        looked = [door.look(lane) for lane in lanes.get(key, ()) if (lane.node, lane.token) not in covered]
        live = [found for found in looked if found.has_news]
        if live or key in sealed:
            yield _of_lanes(key, live)


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
        unseen=len(unseen(book.nodes)),
    )


def _of_damaged(key: RunKey) -> Summary:
    return Summary(run=key, state=DAMAGED, running=False, complete=False)


def _of_lanes(key: RunKey, lanes: list[LiveLane]) -> Summary:
    sources = [source for found in lanes for source in found.sources.values()]
    jobs = [found.report.job for found in lanes if found.report is not None]
    ended = lanes and all(found.drained for found in lanes)
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
        unseen=len(unseen(NodeEntry(found.lane.node, "open", report=found.report) for found in lanes)),
    )
