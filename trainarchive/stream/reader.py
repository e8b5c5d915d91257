"""The reader's side of the door: looking at what waits in a lane, and waiting for more."""

import time

from trainarchive.run import Lane
from trainarchive.stream.connection import Connection
from trainarchive.stream.entries import read_entries
from trainarchive.stream.names import LaneKeys
from trainarchive.stream.words import StreamEntry

FOLLOWED_AT_ONCE = 256
"""Most entries that one ``follow`` returns: 64 MiB of text at most."""


class ReaderSide:
    """Reads only."""

    _connection: Connection

    def snapshot(self, lane: Lane) -> list[StreamEntry]:
        """Return all entries that wait in the lane now, in stream order."""
        answer = self._connection.command("XRANGE", LaneKeys.of(lane).frames, "-", "+")
        return read_entries(answer)

    def follow(self, lane: Lane, after: str, *, block_s: float) -> list[StreamEntry]:
        """Return entries after stream id ``after`` (``"0"``: from the head), waiting up to ``block_s`` for one.

        At most FOLLOWED_AT_ONCE; the next call, with the last id, brings the rest.
        """
        frames = LaneKeys.of(lane).frames
        deadline = time.monotonic() + block_s
        while True:
            # An answer must come within the connection's own time limit.
            wait_ms = int(1000 * min(deadline - time.monotonic(), self._connection.timeout_s / 2))
            with self._connection.errors():
                answer = self._connection.client.xread(
                    {frames: after}, count=FOLLOWED_AT_ONCE, block=wait_ms if wait_ms > 0 else None
                )
            if answer:
                found = read_entries(answer[0][1])
                if found:
                    return found
                after = answer[0][1][-1][0].decode()  # past what is no frame
            if time.monotonic() >= deadline:
                return []
