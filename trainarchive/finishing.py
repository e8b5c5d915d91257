"""Finishing: when a run's nodes are done, or a deadline has passed, its manifest is written.

What is true is read from the store: the segments and their indexes. The log Redis only says
which lanes there are and whether their nodes are done. A lock keeps workers from doing the same
work, but nothing depends on it: the manifest's number, put if absent, is the fence. Killed
between any two steps and run again, it comes to the same end.
"""

import logging
import time
from collections.abc import Iterable, Mapping

import msgspec

from trainarchive import generations, keys, lease, manifest, nodes, sealing, shelf, states
from trainarchive.contents import RunContents, source_entries
from trainarchive.coverage import Name
from trainarchive.errors import NotFoundError, TrainarchiveError, UnavailableError
from trainarchive.frame import MAX_OFFSET
from trainarchive.manifest import Manifest, NodeEntry
from trainarchive.nodes import Live
from trainarchive.run import Lane, LaneReport, RunKey, Source, is_source_of
from trainarchive.sealing import MIB, Hook, no_hook
from trainarchive.settings import Settings
from trainarchive.shelf import Shelved
from trainarchive.store.contract import Store
from trainarchive.stream import State, Stream

TRIES = 8
FINISHED = "finished"
"""In a lane's control: ``<state> <when>`` of the last finish that could not let the lane go."""
MAX_ALIASES = 16
MAX_NOTES = 32

_log = logging.getLogger(__name__)


class _Group(msgspec.Struct, frozen=True):
    """One generation of the run: its lanes, those of them that Redis knows, and its newest manifest."""

    run: RunKey
    lanes: tuple[Lane, ...]
    live: dict[Lane, Live]
    previous: Manifest | None


def finish(stream: Stream, store: Store, run: RunKey, config: Settings, *, at: Hook = no_hook) -> tuple[Manifest, ...]:
    """Write what is due of the manifests of ``run`` (generation 0: a lane's run); return the newest ones.

    One a generation, mostly one at all; none where another worker is at it, or a node is still
    busy and the deadline has not passed. Nothing is written where nothing changed.
    """
    with lease.alone(stream, run, config.seal.lease_s) as keep:
        if keep is None:
            return ()

        def step(name: str) -> None:
            keep(name)
            at(name)

        return _Finish(stream, store, run, config, step).all()


class _Finish:
    """One finish of one run key."""

    def __init__(self, stream: Stream, store: Store, run: RunKey, config: Settings, step: Hook) -> None:
        self._stream = stream
        self._store = store
        self._run = run
        self._config = config
        self._step = step
        self._began, _ = stream.now()
        self._clock = time.monotonic()

    @property
    def _now(self) -> float:
        """Redis' clock (Unix s), without asking it again: it may be gone for a moment, and the work is long."""
        return self._began + time.monotonic() - self._clock

    def all(self) -> tuple[Manifest, ...]:
        done: dict[RunKey, Manifest] = {}
        problem: TrainarchiveError = UnavailableError("its manifests change faster than they are read")
        for _ in range(TRIES):
            try:
                groups = self._groups()
                again = False
                for group in groups:
                    if group.run not in done and self._is_due(group):
                        written = self._group(group)
                        again = again or written is None
                        if written is not None:
                            done[group.run] = written
            except NotFoundError as error:
                # A part that another worker's manifest replaced is gone: begin again from that manifest.
                problem = error
                continue
            if not again:
                return tuple(done.values())
        raise problem

    # -- what there is ---------------------------------------------------------------------

    def _groups(self) -> list[_Group]:
        live = {
            lane: found for lane in set(self._stream.lanes()) if lane.run == self._run and (found := self._look(lane))
        }
        known = {
            run.generation: manifest.newest(self._store, run) for run in manifest.generations(self._store, self._run)
        }
        books = {number: found for number, found in known.items() if found is not None}
        level0: dict[Lane, dict[str, Shelved]] = {}
        for each in shelf.level0(self._store, self._run):
            if each.lane is not None:
                level0.setdefault(each.lane, {})[each.key] = each
        every = {key: each for found in level0.values() for key, each in found.items()}
        shares = generations.shares(
            live,
            {lane: list(found) for lane, found in level0.items()},
            books,
            lambda key: shelf.read_index(self._store, every[key]).lanes,
        )
        self._step("listed")
        return [
            _Group(
                msgspec.structs.replace(self._run, generation=number),
                tuple(lanes),
                {lane: live[lane] for lane in lanes if lane in live},
                books.get(number),
            )
            for number, lanes in sorted(shares.items())
        ]

    def _look(self, lane: Lane) -> Live | None:
        try:
            status, about = self._stream.status(lane), self._stream.about(lane)
        except UnavailableError:
            raise
        except TrainarchiveError as error:
            _log.error("%s", error)
            return None
        if status is None or about is None:
            return None
        return Live(status, *about)

    def _objects(self, group: _Group) -> list[Shelved]:
        """Return the objects that hold the run's text, as far as they are there: merged parts, then what came since."""
        tokens = {lane.token for lane in group.lanes}
        previous = group.previous
        replaced = set(previous.replaces) if previous is not None else set()
        listed = [part for part in previous.parts if not keys.is_level0(part.key)] if previous is not None else []
        there = {info.key for info in self._store.list(keys.parts_prefix(group.run))} if listed else set()
        merged = [Shelved(part.key, part.size) for part in listed if part.key in there]
        found = [
            each
            for each in shelf.level0(self._store, self._run)
            if each.lane is not None and each.lane.token in tokens and each.key not in replaced
        ]
        return merged + found

    # -- whether it is time ----------------------------------------------------------------

    def _is_due(self, group: _Group) -> bool:
        """Seal what is left where it is time; say whether the manifest can be written."""
        if not group.live:
            return self._has_news(group)
        late = self._is_late(group)
        for lane, live in group.live.items():
            if live.status.entries and (late or live.status.state is not State.OPEN):
                self._drain(lane)
                if (again := self._look(lane)) is not None:
                    group.live[lane] = again
        self._step("sealed")
        return late or _is_complete(self._nodes(group, {}), _told(group, {}))

    def _is_late(self, group: _Group) -> bool:
        lanes = ((live.status, live.report) for live in group.live.values())
        return nodes.is_late(lanes, self._now, self._config.finish)

    def _has_news(self, group: _Group) -> bool:
        """Say of a run that Redis forgot whether the store has segments that no manifest lists."""
        listed = {part.key for part in group.previous.parts} if group.previous is not None else set()
        return any(each.key not in listed for each in self._objects(group))

    def _drain(self, lane: Lane) -> None:
        try:
            sealing.drain(self._stream, self._store, lane, self._config.seal, at=self._step)
        except UnavailableError:
            raise
        except TrainarchiveError as error:
            # One node's bad lane must not keep the other nodes' text from its manifest.
            _log.error("%s: cannot be sealed: %s", lane.name, error)

    # -- the manifest ----------------------------------------------------------------------

    def _group(self, group: _Group) -> Manifest | None:
        """Write the group's manifest and what follows it; None where another worker's came first."""
        seen = self._now
        contents = RunContents(self._store, self._objects(group), lambda: self._step("read"), group.previous)
        sources = _sources(group, contents)
        sealed = _sealed(group, sources)
        contents.settle(sealed)
        draft = self._draft(group, contents, sources)
        self._step("digested")
        draft = self._merge(group, contents, draft, sealed)
        if group.previous is None or _differs(draft, group.previous):
            if not self._store.put_if_absent(keys.manifest_key(group.run, draft.number), manifest.encode(draft)):
                return None
            self._step("written")
        else:
            draft = group.previous
        for alias in draft.aliases:
            self._store.put(keys.alias_key(group.run.cluster, alias, group.run), b"")
        self._step("aliased")
        self._release(group, draft, seen)
        return draft

    def _draft(self, group: _Group, contents: RunContents, sources: Mapping[str, Source]) -> Manifest:
        previous = group.previous
        reports = _reports(group, contents)
        entries = self._nodes(group, reports, contents.newer)
        found = contents.generations()
        parts, idle = contents.parts()
        # Those too of nodes of which nothing is left but what the last manifest says.
        jobs = [report.job for report in (*reports.values(), *(each.report for each in entries)) if report is not None]
        ending = states.ending(jobs)
        return Manifest(
            number=previous.number + 1 if previous is not None else 1,
            run=group.run,
            written=self._now,
            complete=_is_complete(entries, _told(group, reports)),
            state=ending.state,
            state_from=ending.state_from,
            exit_code=ending.exit_code,
            derived_exit_code=ending.derived_exit_code,
            started=min((job.started for job in jobs if job.started > 0), default=0.0),
            ended=max((job.ended for job in jobs), default=0.0),
            aliases=_aliases(sources.values()),
            nodes=entries,
            sources=source_entries(sources, found),
            parts=tuple(parts),
            replaces=_merged_keys(previous.replaces if previous is not None else (), idle),
        )

    def _merge(self, group: _Group, contents: RunContents, draft: Manifest, sealed: Mapping[Name, int]) -> Manifest:
        """Put a small run's segments together as one part, and prove it by reading it back."""
        total = sum(part.size for part in draft.parts)
        if len(draft.parts) < 2 or total >= self._config.seal.merge_below_mib * MIB or contents.damaged:
            return draft
        key, body = contents.merged(group.run, _reports(group, contents))
        # Not "if absent": a part that a killed worker left would go on looking old enough to be reaped.
        self._store.put(key, body)
        self._step("merged")
        proof = RunContents(self._store, [Shelved(key, len(body))], lambda: None)
        proof.settle(sealed)
        sources = {entry.source.id: entry.source for entry in draft.sources}
        if source_entries(sources, proof.generations()) != draft.sources:
            _log.error("%s: does not hold the same text as its segments, which stay", key)
            return draft
        parts, _ = proof.parts()
        replaces = _merged_keys(draft.replaces, [part.key for part in draft.parts if part.key != key])
        return msgspec.structs.replace(draft, parts=tuple(parts), replaces=replaces)

    def _nodes(
        self, group: _Group, reports: Mapping[Lane, LaneReport], newer: Iterable[Lane] = ()
    ) -> tuple[NodeEntry, ...]:
        """Return the run's nodes in order of name, the expected ones that never came included."""
        known = {lane: live.report for lane, live in group.live.items()} | dict(reports)
        before = {entry.node: entry for entry in group.previous.nodes} if group.previous is not None else {}
        fresh = set(newer)
        lanes: dict[str, list[Lane]] = {}
        for lane in group.lanes:
            lanes.setdefault(lane.node, []).append(lane)
        names = {*nodes.expected(_told(group, reports)), *lanes, *before}
        return tuple(
            nodes.entry(
                name,
                sorted(lanes.get(name, ()), key=lambda lane: lane.token),
                group.live,
                known,
                before.get(name),
                fresh,
            )
            for name in sorted(names)
        )

    # -- after the manifest ----------------------------------------------------------------

    def _release(self, group: _Group, written: Manifest, seen: float) -> None:
        """Let drained lanes go; note at the others that what there was at ``seen`` is done."""
        covered = {
            (entry.source.id, generation.number): generation.size
            for entry in written.sources
            for generation in entry.generations
        }
        for lane, live in sorted(group.live.items()):
            gone = live.drained and self._stream.archived(
                lane, live.status.epoch, self._config.log.archived_lane_ttl_s, covered=_of_lane(live, covered)
            )
            if not gone:
                self._stream.control(lane, {FINISHED: f"{live.status.state} {seen:.6f}"})
        self._step("archived")


def _sealed(group: _Group, sources: Mapping[str, Source]) -> dict[Name, int]:
    """Return the offsets below which all has been stored: by the last manifest, and as Redis knows of each lane."""
    sealed: dict[Name, int] = {}
    for entry in group.previous.sources if group.previous is not None else ():
        sealed |= {(entry.source.id, generation.number): generation.size for generation in entry.generations}
    for lane, live in group.live.items():
        for name, end in live.status.sealed.items():
            if sealing.is_own(lane.node, name) and name[0] in sources and 0 < end <= MAX_OFFSET:
                sealed[name] = max(sealed.get(name, 0), end)
    return sealed


def _of_lane(live: Live, covered: Mapping[Name, int]) -> dict[Name, int]:
    """Return what the manifest covers of a lane. What its node may not send is in none: it counts as covered."""
    node = live.status.lane.node
    return {
        name: covered.get(name, 0) if sealing.is_own(node, name) else end for name, end in live.status.committed.items()
    }


def _sources(group: _Group, contents: RunContents) -> dict[str, Source]:
    """Return all descriptions, the latest of each: files that stayed empty are sources too."""
    sources = {entry.source.id: entry.source for entry in group.previous.sources} if group.previous is not None else {}
    sources |= contents.sources
    for lane, live in sorted(group.live.items()):
        for name, source in live.sources.items():
            if is_source_of(lane.node, name):
                sources[name] = msgspec.structs.replace(source, id=name, node=lane.node)
    return sources


def _reports(group: _Group, contents: RunContents) -> dict[Lane, LaneReport]:
    """Return each lane's latest report, with what sealing has noted.

    From Redis, else a segment that came after the last manifest, else that manifest, else an older segment.
    """
    reports = {lane: contents.reports[lane] for lane in group.lanes if lane in contents.reports}
    notes = {lane: set(contents.notes.get(lane, ())) for lane in group.lanes}
    before = {entry.node: entry for entry in group.previous.nodes} if group.previous is not None else {}
    for lane in group.lanes:
        entry = before.get(lane.node)
        if entry is not None and entry.report is not None and entry.tokens[-1:] == (lane.token,):
            notes[lane].update(note for note in entry.report.notes if note.endswith(sealing.DROPPED))
            if lane not in contents.newer:
                reports[lane] = entry.report
    reports |= {lane: live.report for lane, live in group.live.items()}
    return {lane: _noted(report, notes[lane]) for lane, report in reports.items()}


def _noted(report: LaneReport, notes: Iterable[str]) -> LaneReport:
    more = sorted(set(notes) - set(report.notes))
    return msgspec.structs.replace(report, notes=(*report.notes, *more[:MAX_NOTES])) if more else report


def _told(group: _Group, reports: Mapping[Lane, LaneReport]) -> list[LaneReport]:
    """Return all that was said of the run: now, and where a lane is forgotten, up to the last manifest."""
    known = {lane: live.report for lane, live in group.live.items()} | dict(reports)
    before = group.previous.nodes if group.previous is not None else ()
    return [*known.values(), *(entry.report for entry in before if entry.report is not None)]


def _is_complete(entries: Iterable[NodeEntry], told: Iterable[LaneReport]) -> bool:
    """Say whether all of the run's nodes are there and done."""
    found = list(entries)
    return len(found) >= nodes.number(told) and all(entry.state == "drained" for entry in found)


def _aliases(sources: Iterable[Source]) -> tuple[str, ...]:
    """Return ``111_2`` and ``200+1`` as the sources' processes knew them: a bounded number, since users can lie."""
    found: set[str] = set()
    for source in sources:
        for job, separator, member in (
            (source.array_job_id, "_", source.array_task_id),
            (source.het_job_id, "+", source.het_offset),
        ):
            if job is not None and member is not None and 0 < job < 2**32 and 0 <= member < 2**32:
                found.add(f"{job}{separator}{member}")
    return tuple(sorted(found)[:MAX_ALIASES])


def _merged_keys(old: Iterable[str], new: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({*old, *new}))


def _differs(draft: Manifest, previous: Manifest) -> bool:
    """Say whether there is anything new to write down."""
    return msgspec.structs.replace(draft, number=previous.number, written=previous.written) != previous
