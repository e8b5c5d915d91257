"""The node's side of the door: what a collector may do, on its own lanes only."""

import math
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from trainarchive.errors import DamagedError, UnavailableError
from trainarchive.run import Lane, LaneReport, Source
from trainarchive.stream.connection import Argument, Connection
from trainarchive.stream.entries import frame_arguments
from trainarchive.stream.names import LaneKeys, read_offset, read_offsets
from trainarchive.stream.words import Answer, Append, LaneStatus, Outcome, State

STATUSES_AT_ONCE = 1000
"""Lanes that one round trip asks for: some 10 ms of Redis' time."""


FRAMES_A_CALL = 4096
"""Redis 6.2 takes 2**20 arguments a call, and a frame is six; so many tiny frames keep it busy for some 10 ms."""


class NodeSide:
    """Scripts that write only the lane's ``meta frames offsets sources``, and never delete."""

    _connection: Connection
    _max_pending: int

    def open(self, lane: Lane, report: LaneReport, sources: Sequence[Source]) -> LaneStatus:
        """Make the lane known, or come back to it: state is OPEN again unless ``report.drained``; offsets stay."""
        keys = LaneKeys.of(lane)
        state = State.DRAINED if report.drained else State.OPEN
        self._connection.script(
            "open",
            (keys.meta, keys.frames, keys.offsets, keys.sources, keys.ctl, keys.claim),
            [secrets.token_hex(8), msgspec.json.encode(report), state.value, *_described(sources)],
        )
        status = self.status(lane)
        if status is None:
            raise UnavailableError("the log Redis forgot a lane at once", where=self._connection.where)
        return status

    def describe(self, lane: Lane, sources: Sequence[Source]) -> None:
        """Add or replace descriptions of sources. Before their first ``append``. No-op on a missing lane."""
        keys = LaneKeys.of(lane)
        self._connection.script("describe", (keys.meta, keys.sources), _described(sources))

    def append(self, batch: Sequence[Append]) -> list[Answer]:
        """Send a batch in one round trip; one answer for each, in order.

        New bytes in a DRAINED lane make it OPEN: the node has to report again when it is done.
        """
        if not batch:
            return []
        calls = [(number, arguments) for number, part in enumerate(batch) for arguments in self._append_calls(part)]
        found: list[list[Answer]] = [[] for _ in batch]
        answers = self._connection.script_many(
            "append", [(_append_keys(batch[number].lane), arguments) for number, arguments in calls]
        )
        for (number, _), answer in zip(calls, answers, strict=True):
            found[number].append(_read_answer(answer))
        # What follows one that was not taken answers GAP: the first tells what happened.
        return [next((one for one in each if one.outcome is not Outcome.OK), each[-1]) for each in found]

    def report(self, lane: Lane, report: LaneReport) -> None:
        """Replace the lane's report; with ``drained`` the lane becomes DRAINED. No-op on a missing lane."""
        arguments: list[Argument] = [msgspec.json.encode(report), int(report.drained)]
        self._connection.script("report", (LaneKeys.of(lane).meta,), arguments)

    def status(self, lane: Lane) -> LaneStatus | None:
        """Return the lane's state, None where Redis does not know it, or lost its stream."""
        return _read_status(lane, self._connection.script("status", _status_keys(lane), []))

    def statuses(self, lanes: Sequence[Lane]) -> Iterator[tuple[Lane, LaneStatus | DamagedError | None]]:
        """Yield each lane with its state, None where there is none, or an error where that cannot be read.

        The same as ``status`` for each, in a round trip for every thousand.
        """
        for start in range(0, len(lanes), STATUSES_AT_ONCE):
            some = lanes[start : start + STATUSES_AT_ONCE]
            answers = self._connection.script_many("status", [(_status_keys(lane), []) for lane in some])
            for lane, answer in zip(some, answers, strict=True):
                if isinstance(answer, UnavailableError):
                    raise answer
                try:
                    yield lane, answer if isinstance(answer, DamagedError) else _read_status(lane, answer)
                except DamagedError as error:
                    yield lane, error

    def _append_calls(self, part: Append) -> Iterator[list[Argument]]:
        """Yield the arguments of one call after the other: at least one, also where there are no frames."""
        for start in range(0, len(part.frames) or 1, FRAMES_A_CALL):
            frames = part.frames[start : start + FRAMES_A_CALL]
            yield [part.source, part.generation, part.floor, self._max_pending, *frame_arguments(frames)]


def _status_keys(lane: Lane) -> tuple[str, ...]:
    keys = LaneKeys.of(lane)
    return keys.meta, keys.frames, keys.offsets, keys.ctl


def _read_status(lane: Lane, answer: Sequence[Any]) -> LaneStatus | None:
    (epoch, state, opened, last_append, last_commit, pending, waiting), offsets, control, entries, exists = answer
    if epoch is None:
        return None
    committed, sealed = read_offsets(_pairs(offsets), lane.name)
    sealed = {place: sealed.get(place, 0) for place in committed}
    if not entries:
        if not exists and sealed != committed:
            return None
        sealed = dict(committed)
    try:
        return LaneStatus(
            lane=lane, epoch=epoch.decode(), state=State(state.decode()),
            pending=int(pending) if entries else 0, entries=entries,
            opened=_seconds(opened), last_append=_seconds(last_append), last_commit=_seconds(last_commit),
            committed=committed, sealed=sealed,
            control={name.decode(): value.decode() for name, value in _pairs(control).items()},
            waiting=_seconds(waiting or b"0"),
        )  # fmt: skip
    except (AttributeError, TypeError, ValueError) as error:
        raise DamagedError(f"its state in the log Redis cannot be read: {error}", where=lane.name) from error


def _seconds(text: bytes) -> float:
    """Read a time that a node may have written itself."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{value} is no time")
    return value


def _read_answer(answer: Any) -> Answer:
    """Read what one call said; BROKEN where that is an error over this lane's keys, or nothing a script says."""
    if isinstance(answer, UnavailableError):
        raise answer
    try:
        outcome, epoch, committed, sealed = answer
        return Answer(Outcome(outcome.decode()), epoch.decode(), read_offset(committed), read_offset(sealed))
    except (TypeError, ValueError):
        return Answer(Outcome.BROKEN, "", 0, 0)


def _append_keys(lane: Lane) -> tuple[str, ...]:
    keys = LaneKeys.of(lane)
    return keys.meta, keys.frames, keys.offsets, keys.ctl


def _described(sources: Sequence[Source]) -> list[Argument]:
    return [part for source in sources for part in (source.id, msgspec.json.encode(source))]


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
