"""The door: bounded streams of frames in the log Redis, one a lane. No other module knows its keys.

Keys of a lane, all in one Cluster slot, all within what one node's ACL allows
(``ta:{*}:<node>:*``)::

    ta:{<cluster>/<job>.<attempt>/<token>}:<node>:meta     hash: epoch, state, pending, report, times, last sealer
    ta:{...}:<node>:frames                                 stream: one entry a frame
    ta:{...}:<node>:offsets                                hash: "<source>:<generation>" -> committed,
                                                           "<source>:<generation>:s" -> sealed
    ta:{...}:<node>:sources                                hash: source id -> description (JSON)
    ta:{...}:<node>:claim                                  hash: a worker's claim on the stream's head
    ta:{...}:<node>:ctl                                    hash: what workers tell the collector

The node's side (``open describe append report status``) and the workers' side (``lanes claim
take commit control archived``) are Lua scripts, each one atomic step, for Redis 6.2 and later.

Promises:

- ``append`` is a compare-and-set on the committed offset of (source, generation): the same bytes
  sent any number of times, in any order of resends, are kept once.
- The **epoch** is made when a lane's state is missing; another epoch in an answer tells the
  collector that Redis lost its memory. It then sends again from what is sealed.
- The sealed offset moves only in ``commit``, after the object is in the store. An empty stream
  means that all that is committed is sealed. (Emptied, its key is still there: a stream whose
  key is gone was lost, and the lane counts as missing.)
"""

from trainarchive.stream.connection import Connection
from trainarchive.stream.node import NodeSide
from trainarchive.stream.reader import ReaderSide
from trainarchive.stream.words import (
    Answer,
    Append,
    Claim,
    LaneStatus,
    Outcome,
    State,
    StreamEntry,
)
from trainarchive.stream.worker import WorkerSide

__all__ = [
    "NODE_COMMANDS",
    "Answer",
    "Append",
    "Claim",
    "LaneStatus",
    "Outcome",
    "State",
    "Stream",
    "StreamEntry",
]

NODE_COMMANDS = (
    "ping", "time", "info", "eval", "evalsha", "exists", "persist",
    "hget", "hgetall", "hmget", "hset", "xadd", "xlen",
)  # fmt: skip
"""All that a node's ACL user has to be allowed, on keys ``ta:{*}:<node>:*``."""


class Stream(NodeSide, WorkerSide, ReaderSide):
    """A connection to the log Redis.

    Every method raises ``UnavailableError`` where Redis does not answer, is loading, or refuses;
    every call may then be made again. A ``DamagedError`` is about one lane: what somebody else
    wrote into its keys cannot be used. Safe to use from several threads.
    """

    def __init__(self, url: str, *, timeout_s: float, max_pending: int) -> None:
        """``max_pending`` bytes of frames may wait in one lane; then ``append`` answers FULL."""
        self._connection = Connection(url, timeout_s)
        self._max_pending = max_pending

    def now(self) -> tuple[float, float]:
        """Return Redis' clock (Unix s) and the round trip that reading it took (s)."""
        return self._connection.clock()

    def memory_ratio(self) -> float:
        """Return used memory over ``maxmemory``, 0.0 where there is no limit. The node stops in time."""
        memory = self._connection.command("INFO", "memory")
        limit = int(memory["maxmemory"])
        return int(memory["used_memory"]) / limit if limit else 0.0

    def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        self._connection.close()
