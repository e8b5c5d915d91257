"""A lane of an earlier life of the collector, brought back from its state file."""

import time

import msgspec

from trainarchive import opening
from trainarchive.collector.flow import Flow
from trainarchive.collector.followed import Followed
from trainarchive.collector.keeper import Keeper, Shared
from trainarchive.collector.saved import Phase, SavedLane, SavedSource
from trainarchive.errors import RefusedError, TrainarchiveError
from trainarchive.tail import Tail


def restore(keeper: Keeper, saved: SavedLane, shared: Shared, held_names: frozenset[str]) -> list[Followed]:
    """Put ``saved`` into a new keeper: files come from the holder, or by path where they are the same.

    Return what is to be read.
    """
    keeper.phase = Phase.CLOSING if saved.phase is Phase.DRAINED else saved.phase
    keeper.report = msgspec.structs.replace(saved.report, drained=False)
    keeper.notices = list(saved.notices)
    until = time.monotonic() + shared.settings.collector.close_within_s
    for entry in saved.sources:
        followed = _source(keeper, entry, shared, held_names)
        if keeper.phase is not Phase.FOLLOWING:
            followed.close(until)
    return [followed for followed in keeper.followed.values() if followed.tail is not None]


def _source(keeper: Keeper, entry: SavedSource, shared: Shared, held_names: frozenset[str]) -> Followed:
    flows = [
        Flow.reopened(
            entry.source.id,
            one.generation,
            shared.held,
            keeper.spool_path(entry.source.id, one.generation),
            start=one.sealed,
        )
        for one in entry.flows
    ]
    tail = None if entry.let_go else _reopen(keeper, entry, shared, held_names)
    for flow, one in zip(flows, entry.flows, strict=True):
        flow.ended = one.ended or tail is None
        if flow.ended:
            flow.lose(one.position, "lost: the collector stopped before these bytes were sent, and the file is gone")
    if tail is None and not entry.let_go:
        keeper.note(f"{entry.source.path}: gone while the collector was down; what was written meanwhile is lost")
    followed = keeper.add(entry.source, tail, flows)
    followed.saved_tail = entry.tail
    followed.note_ends()
    return followed


def _reopen(keeper: Keeper, entry: SavedSource, shared: Shared, held_names: frozenset[str]) -> Tail | None:
    if entry.tail is None:
        return None
    name = keeper.held_name(entry.source.id)
    try:
        if name in held_names:
            fd = shared.holder.take(name)
        else:
            fd = opening.open_path(entry.source.path_bytes, keeper.report.job.uid)
    except TrainarchiveError as error:
        if not isinstance(error, RefusedError):
            keeper.note(f"{entry.source.path}: {error}")
        return None
    tail = Tail.resume(fd, entry.tail, buffer=shared.buffer)
    if tail.ended and tail.identity != entry.tail.identity:
        # Another file has this name now: discovery finds it as a source of its own.
        tail.close()
        return None
    return tail
