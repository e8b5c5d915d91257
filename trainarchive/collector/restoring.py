"""A lane of an earlier life of the collector, brought back from its state file."""

import logging
import os
import time

import msgspec

from trainarchive import opening
from trainarchive.collector.files import Shared
from trainarchive.collector.flow import Flow
from trainarchive.collector.followed import Followed
from trainarchive.collector.keeper import Keeper
from trainarchive.collector.saved import Phase, SavedFlow, SavedLane, SavedSource
from trainarchive.errors import RefusedError, TrainarchiveError
from trainarchive.spool import SpoolFile
from trainarchive.tail import Tail

log = logging.getLogger("trainarchive.collector")


def restore(keeper: Keeper, saved: SavedLane, shared: Shared, held_names: frozenset[str]) -> list[Followed]:
    """Put ``saved`` into a new keeper: files come from the holder, or by path where they are the same.

    Return what is to be read.
    """
    keeper.phase = Phase.CLOSING if saved.phase is Phase.DRAINED else saved.phase
    keeper.report = msgspec.structs.replace(saved.report, drained=False)
    keeper.notices = list(saved.notices)
    for refusal in saved.report.refusals:
        keeper.files.finder.refuse(refusal)
    for entry in saved.sources:
        try:
            _source(keeper, entry, shared, held_names)
        except TrainarchiveError as error:
            log.warning("%s: %s", keeper.lane.run, error)
            keeper.note(f"{entry.source.path}: not found again after a restart of the collector: {error.what}")
    if keeper.phase is not Phase.FOLLOWING:
        keeper.reclose(time.monotonic())
    return [followed for followed in keeper.files if followed.is_open()]


def _source(keeper: Keeper, entry: SavedSource, shared: Shared, held_names: frozenset[str]) -> None:
    tail = None if entry.let_go else _reopen(keeper, entry, shared, held_names)
    flows = [_flow(keeper, entry, one, shared, is_open=tail is not None) for one in entry.flows]
    if tail is None and not entry.let_go:
        keeper.note(f"{entry.source.path}: gone while the collector was down; what was written meanwhile is lost")
    followed = keeper.files.add(entry.source, tail, flows)
    followed.saved_tail = entry.tail


def _flow(keeper: Keeper, entry: SavedSource, one: SavedFlow, shared: Shared, *, is_open: bool) -> Flow:
    path = keeper.files.spool_path(entry.source.id, one.generation)
    flow = Flow(entry.source.id, one.generation, shared.held, path, start=one.sealed)
    flow.ended = one.ended or not is_open
    if path.exists():
        try:
            flow.adopt(SpoolFile.open(path), keep=flow.ended)
        except TrainarchiveError as error:
            # Kept for people to look at; what of it the file still has is read again.
            path.replace(path.with_name(f"{path.name}.damaged"))
            keeper.note(f"{entry.source.path}: {error.what}")
    if flow.ended:
        flow.lose(one.position, "lost: the collector stopped before these bytes were sent, and the file is gone")
    return flow


def _reopen(keeper: Keeper, entry: SavedSource, shared: Shared, held_names: frozenset[str]) -> Tail | None:
    if entry.tail is None:
        return None
    name = keeper.files.held_name(entry.source.id)
    fd = -1
    try:
        if name in held_names:
            fd = shared.holder.take(name)
        else:
            fd = opening.open_path(entry.source.path_bytes, keeper.report.job.uid)
        tail = Tail.resume(fd, entry.tail, buffer=shared.buffer)
    except TrainarchiveError as error:
        if fd >= 0:
            os.close(fd)
        if not isinstance(error, RefusedError):
            keeper.note(f"{entry.source.path}: {error.what}")
        return None
    if tail.ended and tail.identity != entry.tail.identity:
        # Another file has this name now: discovery finds it as a source of its own.
        tail.close()
        return None
    if tail.ended:
        reason = tail.ended[-1].reason
        keeper.note(f"{entry.source.path}: {reason} while no collector ran; what was written in between is not known")
    return tail
