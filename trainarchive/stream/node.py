"""The node's side of the door: what a collector may do, on its own lanes only."""

import secrets
from collections.abc import Sequence

import msgspec

from trainarchive.errors import DamagedError, UnavailableError
from trainarchive.run import Lane, LaneReport, Source
from trainarchive.stream.connection import Argument, Connection
from trainarchive.stream.entries import frame_arguments
from trainarchive.stream.names import LaneKeys, read_offsets
from trainarchive.stream.words import Answer, Append, LaneStatus, Outcome, State


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
        calls = [(_append_keys(part.lane), self._append_arguments(part)) for part in batch]
        answers = []
        for answer in self._connection.script_many("append", calls):
            if isinstance(answer, UnavailableError):
                raise answer
            outcome, epoch, committed, sealed = answer
            answers.append(Answer(Outcome(outcome.decode()), epoch.decode(), int(committed), int(sealed)))
        return answers

    def report(self, lane: Lane, report: LaneReport) -> None:
        """Replace the lane's report; with ``drained`` the lane becomes DRAINED. No-op on a missing lane."""
        arguments: list[Argument] = [msgspec.json.encode(report), int(report.drained)]
        self._connection.script("report", (LaneKeys.of(lane).meta,), arguments)

    def status(self, lane: Lane) -> LaneStatus | None:
        """Return the lane's state, None where Redis does not know it, or lost its stream."""
        keys = LaneKeys.of(lane)
        answer = self._connection.script("status", (keys.meta, keys.frames, keys.offsets, keys.ctl), [])
        (epoch, state, opened, last_append, last_commit, pending), offsets, control, entries, exists = answer
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
                opened=float(opened), last_append=float(last_append), last_commit=float(last_commit),
                committed=committed, sealed=sealed,
                control={name.decode(): value.decode() for name, value in _pairs(control).items()},
            )  # fmt: skip
        except (AttributeError, TypeError, ValueError) as error:
            raise DamagedError(f"its state in the log Redis cannot be read: {error}", where=lane.name) from error

    def _append_arguments(self, part: Append) -> list[Argument]:
        return [part.source, part.generation, part.floor, self._max_pending, *frame_arguments(part.frames)]


def _append_keys(lane: Lane) -> tuple[str, ...]:
    keys = LaneKeys.of(lane)
    return keys.meta, keys.frames, keys.offsets, keys.ctl


def _described(sources: Sequence[Source]) -> list[Argument]:
    return [part for source in sources for part in (source.id, msgspec.json.encode(source))]


def _pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))
