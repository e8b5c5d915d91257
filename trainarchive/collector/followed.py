"""A followed source: an open file, its generations' flows, and when to look at it next."""

import math

import msgspec

from trainarchive.collector.flow import Flow, Held
from trainarchive.errors import UnavailableError
from trainarchive.frame import MAX_RAW, Framer
from trainarchive.run import Source
from trainarchive.settings import Collector as Limits
from trainarchive.tail import Saved, Tail

MIB = 1024 * 1024
BLOCKS_A_TURN = 8
"""Blocks read from one file before the others have their turn."""
SMALL = MAX_RAW // 4
RETRY_S = 0.5
STARTS = (1, 64, 1024, 4096)
"""A state is saved before bytes go up when the fingerprinted beginning first has this length."""


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
        wait = min(max(slept, limits.poll_min_ms / 1000), limits.poll_max_ms / 1000)
        # Many files share a wake-up: those that sleep long are due on a coarse grid of time.
        grid = max(wait / 8, 0.001)
        self.due = math.ceil((now + wait) / grid) * grid


class Ceiling(msgspec.Struct):
    """How much of a source is archived: ``head`` bytes from its beginning, ``keep`` from its end (all generations)."""

    head: int
    keep: int
    reason: str
    lowered: bool = False


class Followed:
    """One source on this node. ``tail`` is None once the file is let go; flows may still be on their way."""

    def __init__(self, source: Source, tail: Tail | None, flows: list[Flow], held: Held, limits: Limits) -> None:
        self.source = source
        self.tail = tail
        self.flows = flows
        self.pace = Pace()
        self.entry = 0
        self.last_seen = 0.0
        self.closing_until: float | None = None
        self.saved_tail: Saved | None = None
        self._prepared = False
        self._close_at = 0
        self._passed = sum(flow.position for flow in flows[:-1])
        self._cut = False
        self._held = held
        self._limits = limits
        half = limits.source_ceiling_mib * MIB // 2
        self._ceiling = Ceiling(half, half, f"over the ceiling of {limits.source_ceiling_mib} MiB a source")

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

    @property
    def total(self) -> int:
        """Bytes of text read so far, of all generations."""
        return self._passed + self.current.position

    def tail_of(self, flow: Flow) -> Tail | None:
        """Return the open file if it still is in this flow's generation."""
        return self.tail if self.tail is not None and flow is self.current else None

    # -- reading ---------------------------------------------------------------------------

    def read(self, now: float, framer: Framer) -> int:
        """Read what is there, a few blocks at most; return the bytes of text that came.

        A closing source goes to the spool, and its file is closed at its end.
        """
        tail = self.tail
        if tail is None:
            return 0
        got = 0
        try:
            self._align(tail)
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
        except UnavailableError as error:
            self._put_off(now, tail, error.what)
            return got
        self.pace.after(now, got, self._limits)
        return got

    def look(self) -> None:
        """Reading waits: see at least what is cut off meanwhile, so that it is told."""
        if self.tail is not None:
            self.tail.poll()
            self._note_ends(self.tail)

    def _align(self, tail: Tail) -> None:
        """Read on where the flow stands: what was read last may not have been kept, or Redis has more."""
        self._note_ends(tail)
        if self.closing_until is not None and not self._prepared:
            tail.poll()
            self._note_ends(tail)
            self._close_at = tail.offset + tail.pending()
            for flow in self.flows[:-1]:
                flow.secure(None)
            self.current.secure(tail)
            self._prepared = True
            self._note_ends(tail)
        if tail.offset != self.current.position:
            tail.seek(self.current.position)
            self._note_ends(tail)

    def _put_off(self, now: float, tail: Tail, why: str) -> None:
        """Nothing can be kept (or read) now: try again, and give up only when the file must go."""
        self.pace.due = now + RETRY_S
        if self.closing_until is not None and now >= self.closing_until:
            for ended in tail.ended:
                self.current.lose(ended.known_size, f"not kept: {why}")
                self._begin_generation(ended.generation + 1)
            tail.ended.clear()
            self.current.lose(max(self._close_at, tail.offset + tail.pending()), f"not kept: {why}")
            self.let_go()

    def _note_ends(self, tail: Tail) -> None:
        for ended in list(tail.ended):
            flow = self.current
            over = self.total >= self._ceiling.head and not self._cut
            flow.skip(ended.known_size, self._ceiling.reason if over else f"{ended.reason} before it was read")
            tail.ended.pop(0)
            self._begin_generation(ended.generation + 1)
            if self._prepared:
                self.current.secure(None)
                self._close_at = tail.offset + tail.pending()

    def _begin_generation(self, number: int) -> None:
        flow = self.current
        flow.ended = True
        flow.park()
        self._passed += flow.position
        self._cut = False
        self.flows.append(Flow(self.source.id, number, self._held, flow.spool_path.with_suffix(f".{number}")))

    def reopen(self, tail: Tail) -> None:
        """Follow the file again: it was let go, unlinked and quiet, and somebody writes to it all the same."""
        self.tail = tail
        self.closing_until = None
        self._prepared = self._cut = False
        self.current.resumed()

    # -- ceilings --------------------------------------------------------------------------

    def limit(self, keep: int, reason: str) -> None:
        """Archive no more of this source than is read by now and, at its end, the last ``keep`` bytes."""
        if not self._ceiling.lowered:
            self._ceiling = Ceiling(self.total, min(keep, self._ceiling.keep), reason, lowered=True)

    def _at_ceiling(self, tail: Tail) -> bool:
        """Keep the head and, when the end is known, the tail of what is over the ceiling."""
        if self.total < self._ceiling.head or self._cut:
            return False
        if self.closing_until is None:
            tail.poll()  # what is cut off or unlinked must be seen all the same
            return True
        start = self._close_at - self._ceiling.keep
        if self.current.position < start and tail.seek(start):
            self.current.skip(start, f"{self._ceiling.reason}; its head and tail are kept")
        self._cut = True
        return False

    # -- state -----------------------------------------------------------------------------

    def start_changed(self) -> bool:
        """Say whether the saved state could no longer tell this file from a rewritten one."""
        saved, tail = self.saved_tail, self.tail
        if tail is None:
            return False
        if saved is None or saved.generation != tail.generation:
            return True
        return _steps(saved.fingerprint.length) < _steps(tail.fingerprint.length)

    def state(self) -> Saved | None:
        """Return what a later life needs to go on with this file from what is sealed."""
        if self.tail is None or self.tail.ended:
            return self.saved_tail
        return self.tail.saved(min(self.current.sealed, self.tail.offset))

    # -- letting go ------------------------------------------------------------------------

    def prune(self) -> None:
        """Forget generations that are in the store: a file rewritten every second makes one each time."""
        for flow in [flow for flow in self.flows[:-1] if flow.done]:
            flow.forget()
            self.flows.remove(flow)

    def close(self, until: float) -> None:
        """From here on what is not sealed goes to disk; at the file's end, or at ``until``, it is closed."""
        if self.closing_until is None:
            self.closing_until = until
            self.pace.due = 0.0

    def let_go(self) -> None:
        """Close the file. What was read stays in the flows."""
        if self.tail is not None:
            self.saved_tail = self.state()
            self.tail.close()
            self.tail = None
        for flow in self.flows:
            flow.ended = True


def _steps(length: int) -> int:
    return sum(length >= start for start in STARTS)
