"""A followed source: an open file, its generations' flows, and when to look at it next."""

import logging

import msgspec

from trainarchive.collector.flow import Flow, Held
from trainarchive.errors import TrainarchiveError
from trainarchive.frame import MAX_RAW, Framer
from trainarchive.run import Source
from trainarchive.settings import Collector as Limits
from trainarchive.tail import Saved, Tail

log = logging.getLogger("trainarchive.collector")

MIB = 1024 * 1024
BLOCKS_A_TURN = 8
"""Blocks read from one file before the others have their turn."""
SMALL = MAX_RAW // 4
SPOOL_RETRY_S = 0.5


class Pace(msgspec.Struct):
    """When a file is read next (monotonic s), by when it last had bytes."""

    due: float = 0.0
    last_bytes: float = 0.0

    def after(self, now: float, got: int, limits: Limits) -> None:
        """Set ``due``: at once after full blocks, a little later after small writes, ever later when idle.

        A file that gets many small writes is read every ``busy_wait_ms``, so that a frame holds
        many of them; one that wakes up is seen within ``poll_min_ms`` to ``poll_max_ms``, the
        later the longer it slept.
        """
        if got:
            self.last_bytes = now
            self.due = now if got >= SMALL else now + limits.busy_wait_ms / 1000
            return
        slept = (now - self.last_bytes) / 8
        self.due = now + min(max(slept, limits.poll_min_ms / 1000), limits.poll_max_ms / 1000)


class Followed:
    """One source on this node. ``tail`` is None once the file is let go; flows may still be on their way."""

    def __init__(self, source: Source, tail: Tail | None, flows: list[Flow], held: Held, limits: Limits) -> None:
        self.source = source
        self.tail = tail
        self.flows = flows
        self.pace = Pace()
        self.closing_until: float | None = None
        self.saved_tail = tail.saved() if tail is not None else None
        self._skipping = False
        self._close_at = 0
        self._head = self._keep = limits.source_ceiling_mib * MIB // 2
        self._why_skipped = f"over the ceiling of {limits.source_ceiling_mib} MiB a source; its head and tail are kept"
        self._held = held
        self._limits = limits

    @property
    def current(self) -> Flow:
        """The flow of the newest generation."""
        return self.flows[-1]

    def is_open(self) -> bool:
        """The file is still followed (a call, since reading may let it go)."""
        return self.tail is not None

    @property
    def done(self) -> bool:
        """The file is let go and every byte of it is in the store."""
        return self.tail is None and all(flow.done for flow in self.flows)

    def tail_of(self, flow: Flow) -> Tail | None:
        """Return the open file if it still is in this flow's generation."""
        return self.tail if self.tail is not None and flow is self.current else None

    def read(self, now: float, framer: Framer) -> int:
        """Read what is there, a few blocks at most; return the bytes of text that came.

        A closing source goes to the spool, and its file is closed at its end.
        """
        tail = self.tail
        if tail is None:
            return 0
        got = 0
        try:
            self._note_ends(tail)
            if tail.offset != self.current.position:
                # What was read last could not be kept, or an earlier life read further.
                tail.seek(self.current.position)
                self._note_ends(tail)
            for _ in range(BLOCKS_A_TURN):
                block = None if self._at_ceiling(tail) else tail.read()
                self._note_ends(tail)
                if block is not None:
                    self.current.add(block, framer)
                    got += len(block.data)
                if self.closing_until is not None and (block is None or self.current.position >= self._close_at):
                    self.let_go()
                    return got
                if block is None or len(block.data) < SMALL:
                    break
        except TrainarchiveError as error:
            self._put_off(now, tail, str(error))
            return got
        self.pace.after(now, got, self._limits)
        return got

    def _put_off(self, now: float, tail: Tail, why: str) -> None:
        """Nothing can be put on disk (or read) now: stay where we are, and give up only when the file must go."""
        self.pace.due = now + SPOOL_RETRY_S
        if self.closing_until is not None and now >= self.closing_until:
            self.current.lose(max(self._close_at, tail.offset + tail.pending()), f"not kept: {why}")
            self.let_go()

    def limit(self, keep: int, reason: str) -> None:
        """Archive no more of this source than is read by now and, at its end, the last ``keep`` bytes."""
        if self._keep > keep:
            self._head, self._keep, self._why_skipped = self.current.position, keep, reason

    def _at_ceiling(self, tail: Tail) -> bool:
        """Keep the head and, when the end is known, the tail of what is over the ceiling."""
        position = self.current.position
        if position < self._head or self._skipping:
            return False
        if self.closing_until is None:
            return True
        start = self._close_at - self._keep
        if position < start and tail.seek(start):
            self.current.skip(start, self._why_skipped)
        self._skipping = True
        return False

    def note_ends(self) -> None:
        """Take in what a resumed file says of the time in between."""
        if self.tail is not None:
            self._note_ends(self.tail)

    def _note_ends(self, tail: Tail) -> None:
        for ended in tail.ended:
            flow = self.current
            flow.skip(ended.known_size, f"{ended.reason} before they could be read")
            flow.ended = True
            path = flow.spool_path.with_suffix(f".{ended.generation + 1}")
            self.flows.append(Flow(self.source.id, ended.generation + 1, self._held, path))
            self._skipping = False
            if self.closing_until is not None:
                self.current.secure(None)
                self._close_at = tail.offset + tail.pending()
        tail.ended.clear()

    def start_changed(self) -> bool:
        """Say whether the saved state could no longer tell this file from a rewritten one."""
        saved, tail = self.saved_tail, self.tail
        return tail is not None and (
            saved is None or saved.fingerprint != tail.fingerprint or saved.generation != tail.generation
        )

    def state(self) -> Saved | None:
        """Return what a later life needs to go on with this file from what is sealed."""
        if self.tail is not None:
            self.saved_tail = self.tail.saved(min(self.current.sealed, self.tail.offset))
        return self.saved_tail

    # -- letting go ------------------------------------------------------------------------

    def close(self, until: float) -> None:
        """From here on what is not sealed goes to disk; at the file's end, or at ``until``, it is closed."""
        if self.closing_until is not None:
            return
        try:
            self._close(until)
        except TrainarchiveError as error:
            log.warning("%s: %s", ascii(self.source.path), error)

    def _close(self, until: float) -> None:
        self.closing_until = until
        self.pace.due = 0.0
        if self.tail is not None:
            self.tail.poll()
            self._close_at = self.tail.offset + self.tail.pending()
        for flow in self.flows:
            flow.secure(self.tail_of(flow))

    def let_go(self) -> None:
        """Close the file. What was read stays in the flows."""
        if self.tail is not None:
            self.state()
            self.tail.close()
            self.tail = None
        for flow in self.flows:
            flow.ended = True
            flow.sync()
