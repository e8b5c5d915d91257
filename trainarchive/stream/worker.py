"""The workers' side of the door: what is done with lanes after the nodes filled them."""

import secrets
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import msgspec

from trainarchive.errors import DamagedError
from trainarchive.run import Lane, LaneReport, Source
from trainarchive.stream.connection import Argument, Connection
from trainarchive.stream.entries import read_entries
from trainarchive.stream.names import EVERY_LANE, LaneKeys, lane_of, lock_key, offset_field
from trainarchive.stream.words import Claim, StreamEntry

MAX_CLAIMED_ENTRIES = 4096
"""Bounds how long a claim keeps Redis busy (some 10 ms) when frames are tiny."""

Ends: TypeAlias = Mapping[tuple[str, int], int]


class WorkerSide:
    """Claims, commits, and what ends a lane."""

    _connection: Connection

    def lanes(self) -> Iterator[Lane]:
        """Yield every lane that Redis knows, by SCAN: one may come twice or, if it is just made, not yet."""
        cursor: int | None = None
        while cursor != 0:
            # redis-py reads SCAN's answer as (cursor, keys).
            cursor, keys = self._connection.command("SCAN", cursor or 0, "MATCH", EVERY_LANE, "COUNT", 1000)
            for key in keys:
                lane = lane_of(key)
                if lane is not None:
                    yield lane

    def about(self, lane: Lane) -> tuple[LaneReport, dict[str, Source]] | None:
        """Return the latest report and all descriptions."""
        keys = LaneKeys.of(lane)
        with self._connection.errors(), self._connection.client.pipeline(transaction=True) as pipeline:
            pipeline.hget(keys.meta, "report")
            pipeline.hgetall(keys.sources)
            report, sources = pipeline.execute()
        if report is None:
            return None
        try:
            described = {key.decode(): msgspec.json.decode(value, type=Source) for key, value in sources.items()}
            return msgspec.json.decode(report, type=LaneReport), described
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DamagedError(f"its report in the log Redis cannot be read: {error}", where=lane.name) from error

    def claim(self, lane: Lane, *, max_bytes: int, lease_s: float) -> Claim | None:
        """Claim entries from the head, about ``max_bytes`` of frames, at least one.

        None where the stream is empty or another's claim is not yet over. A claim that ran out
        is taken over; what its owner then commits is refused.
        """
        token = secrets.token_hex(8)
        found = self._connection.script(
            "claim", _claim_keys(lane), [token, int(lease_s * 1000), max_bytes, MAX_CLAIMED_ENTRIES]
        )
        if found is None:
            return None
        epoch, first, last = (part.decode() for part in found[:3])
        return Claim(lane, epoch, token, first, last, int(found[3]))

    def take(self, claim: Claim) -> list[StreamEntry]:
        """Read the claimed entries. Those that are no frames are left out: then they are fewer than the claim says."""
        answer = self._connection.command("XRANGE", LaneKeys.of(claim.lane).frames, claim.first, claim.last)
        return read_entries(answer)

    def commit(self, claim: Claim, ends: Ends) -> bool:
        """After the segment is stored: drop the entries, move sealed offsets to ``ends``, end the claim.

        A compare-and-set: False, and nothing done, where the claim is no longer this one's. The
        stored segment stays good then: never delete it, readers drop what comes twice.
        """
        arguments: list[Argument] = [claim.token, claim.epoch]
        for (source, generation), end in ends.items():
            arguments += (offset_field(source, generation), end)
        return bool(self._connection.script("commit", _claim_keys(claim.lane), arguments))

    def control(self, lane: Lane, values: dict[str, str]) -> None:
        """Tell the collector something: it reads these in ``status().control``. No-op on a missing lane.

        ``pressure`` set to ``1`` makes every ``append`` of new bytes answer FULL until it is another value.
        """
        keys = LaneKeys.of(lane)
        pairs: list[Argument] = [part for pair in values.items() for part in pair]
        self._connection.script("control", (keys.meta, keys.ctl), pairs)

    def archived(self, lane: Lane, epoch: str, ttl_s: int, *, covered: Ends | None = None) -> bool:
        """After the manifest: drop stream and descriptions, keep the ARCHIVED mark and offsets for ``ttl_s``.

        False, and nothing done, unless the lane is DRAINED, in that epoch, and its stream empty;
        and, where ``covered`` is given (the ends that the manifest covers), nothing was
        committed beyond them: late bytes may have come and been sealed meanwhile.
        """
        keys = LaneKeys.of(lane)
        arguments: list[Argument] = [epoch, ttl_s, int(covered is not None)]
        for (source, generation), end in (covered or {}).items():
            arguments += (offset_field(source, generation), end)
        every = (keys.meta, keys.frames, keys.offsets, keys.sources, keys.ctl, keys.claim)
        return bool(self._connection.script("archived", every, arguments))

    def lock(self, name: str, token: str, seconds: float) -> bool:
        """Take or renew a lock that ends by itself; True while ``token`` holds it."""
        milliseconds = max(1, int(seconds * 1000))
        return bool(self._connection.script("lock", (lock_key(name),), [token, milliseconds]))

    def unlock(self, name: str, token: str) -> None:
        """Give the lock back if ``token`` still holds it."""
        self._connection.script("unlock", (lock_key(name),), [token])


def _claim_keys(lane: Lane) -> tuple[str, ...]:
    keys = LaneKeys.of(lane)
    return keys.meta, keys.frames, keys.offsets, keys.claim
