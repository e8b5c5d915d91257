"""A flow: one generation of one source, on its way from the file to the shelf.

Offsets of a flow::

    sealed      below it all is in the store; the fd or the spooled bytes may be let go
    committed   below it all is in Redis (or further): the next frame sent must start here
    framed      below it all is in the queue or was sent from it
    position    below it all was read from the file

Frames wait in a queue in memory. Where they must outlive the file or a long silence of Redis
they are put on disk instead, into the spool, and the queue is filled from there. ``secure`` asks
for more than ``spill``: everything that is not *sealed* is on disk, not only what Redis lacks.
"""

import logging
import time
from collections import deque
from pathlib import Path

from trainarchive.errors import UnavailableError
from trainarchive.frame import MAX_OFFSET, Frame, Framer, gap_frame
from trainarchive.spool import SpoolFile
from trainarchive.tail import Block, Tail

log = logging.getLogger("trainarchive.collector")

FRAME_OVERHEAD = 300
"""Bytes that a frame takes beside its data, as an object in memory or as an entry in Redis."""


LOST = "lost: Redis lost its memory after the file was gone"


class Held:
    """What all flows of a collector hold together, in bytes of frames: in memory, and on the spool's disk."""

    def __init__(self, memory_limit: int, spool_limit: int) -> None:
        """``spool_limit`` in bytes: more is not put on disk. ``memory_limit``: reading waits beyond it."""
        self.memory = 0
        self.spooled = 0
        self.memory_limit = memory_limit
        self.spool_limit = spool_limit

    @property
    def full(self) -> bool:
        """There is no room for more frames in memory."""
        return self.memory >= self.memory_limit


class Flow:
    """Bytes come in by ``add`` and ``skip``, go out by ``outgoing``, and are forgotten by ``accept``.

    ``add``, ``skip``, ``spill`` and ``secure`` raise UnavailableError where the spool takes
    nothing; what could not be kept is then not counted in ``position``.
    """

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

    def adopt(self, spool: SpoolFile, *, keep: bool) -> None:
        """Take the spool of an earlier life; ``keep`` it until sealed, where the file is let go."""
        self.spool = spool
        self._held.spooled += spool.size
        self.position = max(self.position, spool.end)
        self._to_spool = True
        self._keep_spool = keep

    # -- in --------------------------------------------------------------------------------

    def add(self, block: Block, framer: Framer) -> None:
        """Take what was just read."""
        self._put(framer.frame(block.offset, block.data, block.wall_ns, block.mono_ns))

    def skip(self, end: int, reason: str) -> None:
        """Say that the bytes from ``position`` to ``end`` will not come."""
        end = min(end, MAX_OFFSET)
        if end > self.position:
            self._put(gap_frame(self.position, end, time.time_ns(), time.monotonic_ns(), reason))

    def lose(self, end: int, reason: str) -> None:
        """As ``skip``, where the spool cannot be written: the gap goes out behind everything else."""
        end = min(end, MAX_OFFSET)
        if end > self.position:
            start = min(self._last.offset, self.position) if self._last is not None else self.position
            self._last = gap_frame(start, end, time.time_ns(), time.monotonic_ns(), reason)
            self.position = end

    def _put(self, frame: Frame) -> None:
        if self._to_spool:
            self._put_on_disk(frame)
        else:
            self._enqueue(frame)
        self.position = frame.end

    def _put_on_disk(self, frame: Frame) -> None:
        try:
            if self._queue and (self.spool is None or self._queue[-1].end > self.spool.end):
                self.spill()  # again: the last time it came to an end half-way
            self._spool_append(frame)
        except UnavailableError:
            # With the disk full it may still go up from memory, if nothing on disk has to go first.
            if self._held.full or self.framed < self.position:
                raise
            self._enqueue(frame)

    def _enqueue(self, frame: Frame) -> None:
        self._queue.append(frame)
        self._held.memory += weight(frame)
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
        self._keep_spool = self._to_spool = True
        begins = self.spool.start if self.spool is not None and self.spool.end > self.spool.start else self.position
        if tail is not None and begins > self.sealed and _seek(tail, self.sealed):
            self._drop_spool()
            self._clear_queue(self.committed)
            self.position = self.sealed
        else:
            self.spill()

    def resumed(self) -> None:
        """The file is followed again after it was let go."""
        self.ended = self._keep_spool = False

    def park(self) -> None:
        """Give the spool's descriptor back until it is needed."""
        if self.spool is not None:
            self.spool.park()

    def _spool_append(self, frame: Frame) -> None:
        if self._held.spooled >= self._held.spool_limit:
            raise UnavailableError(
                f"the spool has its {self._held.spool_limit} bytes", where=str(self.spool_path.parent)
            )
        if self.spool is None:
            # One that an earlier life made after its last saved state: what it holds is read again.
            self.spool_path.unlink(missing_ok=True)
            self.spool = SpoolFile.create(self.spool_path, self.source, self.generation)
            self._held.spooled += self.spool.size
        if self.spool.start < self.spool.end != frame.offset:
            # Frames went up past the spool while the disk was full: it has to be sealed first.
            raise UnavailableError("the spool ends before these bytes", where=str(self.spool_path))
        before = self.spool.size
        self.spool.append(frame)
        self._held.spooled += self.spool.size - before

    def _drop_spool(self) -> None:
        spool, self.spool = self.spool, None
        if spool is not None:
            self._held.spooled -= spool.size
            try:
                spool.delete()
            except UnavailableError as error:
                log.warning("%s: nobody needs it any more: %s", self.spool_path, error)

    # -- out -------------------------------------------------------------------------------

    def outgoing(self, most: int) -> list[Frame]:
        """Return the next frames to send, contiguous from ``committed``: about ``most`` bytes, at least one frame."""
        self._refill(most)
        self._bridge()
        last = self._last
        if last is not None and last.offset <= self.framed < last.end:
            self._enqueue(last if last.offset == self.framed else recut(last, self.framed))
        size = 0
        chosen: list[Frame] = []
        for frame in self._queue:
            if chosen and size + weight(frame) > most:
                break
            size += weight(frame)
            chosen.append(frame)
        return chosen

    def _bridge(self) -> None:
        """Frames went up past the spool, and Redis lost them: what nobody has any more is a gap."""
        end = self._last.offset if self._last is not None else self.position
        if self.spool is not None and self.spool.end <= self.framed < end:
            self._enqueue(gap_frame(self.framed, end, time.time_ns(), time.monotonic_ns(), LOST))

    def _refill(self, most: int) -> None:
        spool = self.spool
        if spool is None or self.framed >= spool.end:
            return
        wanted = most - sum(weight(frame) for frame in self._queue)
        if wanted <= 0:
            return
        for frame in spool.frames(self.framed):
            self._enqueue(frame if frame.offset >= self.framed else recut(frame, self.framed))
            wanted -= weight(frame)
            if wanted <= 0:
                break
        if self.ended:
            spool.park()

    def accept(self, committed: int, sealed: int) -> None:
        """Take an answer's offsets: forget what Redis has; the spool, once it is no longer needed."""
        self.sealed = max(self.sealed, sealed)
        if committed >= self.committed:
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
            self._held.memory -= weight(queue.popleft())
        if queue and queue[0].offset < committed:
            whole = queue.popleft()
            rest = recut(whole, committed)
            self._held.memory += weight(rest) - weight(whole)
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
        if committed >= self.committed:
            self.accept(committed, self.sealed)
        else:
            if self.spool is not None:
                self._empty_queue(self.spool, tail)
                if tail is not None and self.spool is not None:
                    self.position = min(self.position, self.spool.end)  # from there the file is read again
            if not self._queue:
                self.framed = committed
            self.committed = committed
            self._forget(committed)
        begins = self._begins()
        if begins > committed:
            self._fill_hole(committed, begins, tail)

    def _begins(self) -> int:
        """Return where the bytes begin that can be sent without reading the file again."""
        if self._queue:
            return self._queue[0].offset
        if self.spool is not None and self.framed < self.spool.end:
            return max(self.spool.start, self.framed)
        return self._last.offset if self._last is not None else self.position

    def _empty_queue(self, spool: SpoolFile, tail: Tail | None) -> None:
        """Have all that was read on disk; what the disk does not take is read again, or lost."""
        try:
            self.spill()
        except UnavailableError as error:
            end = self.position
            self._clear_queue(self.committed)
            self.position = spool.end
            if tail is None:
                self.lose(end, f"not kept: {error.what}")

    def _fill_hole(self, committed: int, begins: int, tail: Tail | None) -> None:
        if tail is not None and _seek(tail, committed):
            self._drop_spool()
            self._to_spool = self._keep_spool
            self._clear_queue(committed)
            self._last = None
            self.position = committed
            return
        gap = gap_frame(committed, begins, time.time_ns(), time.monotonic_ns(), LOST)
        self._queue.appendleft(gap)
        self._held.memory += weight(gap)
        self.framed = self._queue[-1].end

    def give_up_spool(self, tail: Tail | None, reason: str) -> None:
        """The disk does not give back what was written: read the file again, or say what is lost."""
        end = self.spool.end if self.spool is not None else self.framed
        self._drop_spool()
        self._to_spool = self._keep_spool
        if tail is not None and _seek(tail, self.committed):
            self._clear_queue(self.committed)
            self.position = self.committed
        elif end > self.framed:
            self._enqueue(gap_frame(self.framed, end, time.time_ns(), time.monotonic_ns(), f"not kept: {reason}"))

    def _clear_queue(self, framed: int) -> None:
        self._held.memory -= sum(weight(frame) for frame in self._queue)
        self._queue.clear()
        self.framed = framed

    def sync(self) -> None:
        """Make the spool durable."""
        if self.spool is not None:
            self.spool.sync()
            self.spool.park()

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


def weight(frame: Frame) -> int:
    """Return what a frame costs in memory and in Redis, in bytes."""
    return len(frame.data) + FRAME_OVERHEAD


def recut(frame: Frame, start: int) -> Frame:
    """Return the part of ``frame`` from offset ``start`` on."""
    if not frame.offset < start < frame.end:
        raise ValueError(f"offset {start} is not inside the frame {frame.offset}-{frame.end}")
    if frame.gap:
        return gap_frame(start, frame.end, frame.wall_ns, frame.mono_ns, frame.gap)
    return Framer().frame(start, frame.text()[start - frame.offset :], frame.wall_ns, frame.mono_ns)


def _seek(tail: Tail, offset: int) -> bool:
    """Go there; False where these bytes cannot be had from the file (any more)."""
    try:
        return tail.seek(offset)
    except UnavailableError:
        return False
