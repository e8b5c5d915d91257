"""A flow: one generation of one source, on its way from the file to the shelf.

Offsets of a flow::

    sealed      below it all is in the store; the fd or the spooled bytes may be let go
    committed   below it all is in Redis (or further): the next frame sent must start here
    framed      below it all is in the queue or was sent from it
    position    below it all was read from the file

Frames wait in a queue in memory. Where they must outlive the file or a long silence of Redis
they are put on disk instead, into the spool, and the queue is filled from there.
"""

import time
from collections import deque
from pathlib import Path

from trainarchive.errors import UnavailableError
from trainarchive.frame import Frame, Framer, gap_frame
from trainarchive.spool import SpoolFile
from trainarchive.tail import Block, Tail


class Held:
    """What all flows of a collector hold together, in bytes of frames: in memory, and on the spool's disk."""

    def __init__(self, spool_limit: int) -> None:
        """``spool_limit`` in bytes: more is not put on disk."""
        self.memory = 0
        self.spooled = 0
        self.spool_limit = spool_limit


class Flow:
    """Bytes come in by ``add`` and ``skip``, go out by ``outgoing``, and are forgotten by ``accept``."""

    def __init__(self, source: str, generation: int, held: Held, spool_path: Path, *, start: int = 0) -> None:
        """``start`` is the sealed offset. ``spool_path`` is where this flow's spool is, when it needs one."""
        self.source = source
        self.generation = generation
        self.sealed = self.committed = self.framed = self.position = start
        self.ended = False
        self.spool_path = spool_path
        self.spool: SpoolFile | None = None
        self._to_spool = False
        self._keep_spool = False
        self._held = held
        self._queue: deque[Frame] = deque()
        self._last: Frame | None = None

    @classmethod
    def reopened(cls, source: str, generation: int, held: Held, spool_path: Path, *, start: int) -> "Flow":
        """Return the flow of an earlier life of the collector, with its spool if it left one."""
        flow = cls(source, generation, held, spool_path, start=start)
        if spool_path.exists():
            flow.spool = SpoolFile.open(spool_path)
            held.spooled += flow.spool.size
            flow.position = max(start, flow.spool.end)
            flow._to_spool = flow._keep_spool = True
        return flow

    @property
    def key(self) -> tuple[str, int]:
        """(source id, generation)."""
        return (self.source, self.generation)

    @property
    def done(self) -> bool:
        """Nothing more will come, and all of it is in the store."""
        return self.ended and self.sealed >= self.position

    @property
    def waiting(self) -> int:
        """Bytes of text that are read and not committed."""
        return max(0, self.position - self.committed)

    # -- in --------------------------------------------------------------------------------

    def add(self, block: Block, framer: Framer) -> None:
        """Take what was just read."""
        self._put(framer.frame(block.offset, block.data, block.wall_ns, block.mono_ns))

    def skip(self, end: int, reason: str) -> None:
        """Say that the bytes from ``position`` to ``end`` will not come."""
        if end > self.position:
            self._put(gap_frame(self.position, end, time.time_ns(), time.monotonic_ns(), reason))

    def lose(self, end: int, reason: str) -> None:
        """As ``skip``, where the spool cannot be written: the gap goes out behind everything else."""
        if end > self.position:
            self._last = gap_frame(self.position, end, time.time_ns(), time.monotonic_ns(), reason)
            self.position = end

    def _put(self, frame: Frame) -> None:
        if self._to_spool:
            self._spool_append(frame)
        else:
            self._enqueue(frame)
        self.position = frame.end

    def _enqueue(self, frame: Frame) -> None:
        self._queue.append(frame)
        self._held.memory += len(frame.data)
        self.framed = frame.end

    # -- the spool -------------------------------------------------------------------------

    def spill(self) -> None:
        """Move the queue to disk, and put there what comes from now on, until Redis has taken it all."""
        self._to_spool = True
        for frame in self._queue:
            if self.spool is None or self.spool.start == self.spool.end or frame.offset >= self.spool.end:
                self._spool_append(frame)
        self._clear_queue(self.committed)

    def secure(self, tail: Tail | None) -> None:
        """From now on everything that is not sealed is on disk: ``tail`` is read again from there, if need be."""
        self._keep_spool = True
        if tail is None or self.spool is not None:
            self.spill()
            return
        if self.sealed < self.position:
            if not _seek(tail, self.sealed):
                self.spill()
                return
            self.position = self.sealed
        self._to_spool = True
        self._clear_queue(self.committed)

    def _spool_append(self, frame: Frame) -> None:
        if self._held.spooled >= self._held.spool_limit:
            raise UnavailableError(
                f"the spool has its {self._held.spool_limit} bytes", where=str(self.spool_path.parent)
            )
        if self.spool is None:
            # One that an earlier life made after its last saved state: what it holds is read again.
            self.spool_path.unlink(missing_ok=True)
            self.spool = SpoolFile.create(self.spool_path, self.source, self.generation)
        before = self.spool.size
        self.spool.append(frame)
        self._held.spooled += self.spool.size - before

    def _drop_spool(self) -> None:
        if self.spool is not None:
            self._held.spooled -= self.spool.size
            self.spool.delete()
            self.spool = None

    # -- out -------------------------------------------------------------------------------

    def outgoing(self, max_bytes: int) -> list[Frame]:
        """Return the next frames to send, contiguous from ``committed``: about ``max_bytes``, at least one."""
        self._refill(max_bytes)
        last = self._last
        if last is not None and last.offset <= self.framed < last.end:
            self._enqueue(last if last.offset == self.framed else recut(last, self.framed))
        size = 0
        chosen: list[Frame] = []
        for frame in self._queue:
            if chosen and size + len(frame.data) > max_bytes:
                break
            size += len(frame.data)
            chosen.append(frame)
        return chosen

    def _refill(self, max_bytes: int) -> None:
        spool = self.spool
        if spool is None or self.framed >= spool.end:
            return
        wanted = max_bytes - sum(len(frame.data) for frame in self._queue)
        if wanted <= 0:
            return
        for frame in spool.frames(self.framed):
            self._enqueue(frame if frame.offset >= self.framed else recut(frame, self.framed))
            wanted -= len(frame.data)
            if wanted <= 0:
                break

    def accept(self, committed: int, sealed: int) -> None:
        """Take an answer's offsets: forget what Redis has; the spool, once it is no longer needed."""
        self.sealed = max(self.sealed, sealed)
        if committed > self.committed:
            self.committed = committed
            self._forget(committed)
        spool = self.spool
        if spool is None:
            if self._to_spool and not self._keep_spool and self.committed >= self.position:
                self._to_spool = False
        elif self.sealed >= spool.end or (not self._keep_spool and not self.ended and self.committed >= spool.end):
            self._drop_spool()
            self._to_spool = self._keep_spool

    def _forget(self, committed: int) -> None:
        queue = self._queue
        while queue and queue[0].end <= committed:
            self._held.memory -= len(queue.popleft().data)
        if queue and queue[0].offset < committed:
            whole = queue.popleft()
            rest = recut(whole, committed)
            self._held.memory += len(rest.data) - len(whole.data)
            queue.appendleft(rest)
        if not queue:
            self.framed = max(self.framed, committed)
        if not self._keep_spool:
            self.position = max(self.position, self.framed)

    def rewind(self, committed: int, tail: Tail | None) -> None:
        """Redis has what is below ``committed``: send from there, out of the spool, the queue or the file.

        ``tail`` is the open file, where it still is in this generation. Bytes that nobody has
        any more become a gap.
        """
        before = self.position
        if committed >= self.committed:
            self.accept(committed, self.sealed)
            if tail is not None and self.position > before:
                _seek(tail, self.position)
            return
        self.committed = committed
        if self.spool is not None and self.spool.start <= committed:
            self._requeue(committed)
        elif tail is not None and _seek(tail, committed):
            self._drop_spool()
            self._to_spool = self._keep_spool
            self._clear_queue(committed)
            self.position = committed
        else:
            self._lose(committed)

    def _requeue(self, committed: int) -> None:
        """Fill the queue from the spool again; what the queue has beyond it is put there first."""
        self.committed = committed
        self.spill()

    def _lose(self, committed: int) -> None:
        if self.spool is not None:
            self._requeue(committed)
            have = self.spool.start
        else:
            have = self._queue[0].offset if self._queue else self.position
        framed = self._queue[-1].end if self._queue else max(have, committed)
        if have > committed:
            reason = "lost: Redis lost its memory after the file was gone"
            self._queue.appendleft(gap_frame(committed, have, time.time_ns(), time.monotonic_ns(), reason))
        self.framed = framed

    def _clear_queue(self, framed: int) -> None:
        self._held.memory -= sum(len(frame.data) for frame in self._queue)
        self._queue.clear()
        self.framed = framed

    def sync(self) -> None:
        """Make the spool durable."""
        if self.spool is not None:
            self.spool.sync()

    def forget(self) -> None:
        """All is in the store and known to be: delete what is left."""
        self._clear_queue(self.framed)
        self._drop_spool()

    def close(self) -> None:
        """Let go of memory and of the spool's fd; the spool's file stays for the next life."""
        self._clear_queue(self.framed)
        if self.spool is not None:
            self._held.spooled -= self.spool.size
            self.spool.close()
            self.spool = None


def _seek(tail: Tail, offset: int) -> bool:
    """Go there; False where these bytes cannot be had from the file (any more)."""
    try:
        return tail.seek(offset)
    except UnavailableError:
        return False


def recut(frame: Frame, start: int) -> Frame:
    """Return the part of ``frame`` from offset ``start`` on."""
    if not frame.offset < start < frame.end:
        raise ValueError(f"offset {start} is not inside the frame {frame.offset}-{frame.end}")
    if frame.gap:
        return gap_frame(start, frame.end, frame.wall_ns, frame.mono_ns, frame.gap)
    return Framer().frame(start, frame.text()[start - frame.offset :], frame.wall_ns, frame.mono_ns)
