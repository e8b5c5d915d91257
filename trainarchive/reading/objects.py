"""Segments as a reader uses them: indexes and ranged reads, kept within a fixed memory."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from trainarchive.errors import DamagedError, NotFoundError
from trainarchive.frame import MAX_RAW
from trainarchive.run import LaneReport, Source
from trainarchive.segment import TAIL_GUESS, Placed, index_span, read_index
from trainarchive.store.contract import Store

MAX_TAILS = 32 * 1024 * 1024
"""Bytes of small objects' bodies that are kept: runs of many small segments are then read once."""

MAX_FRAMES = 200_000
"""Frames' places that are kept in all indexes together, about 50 MiB."""

THREADS = 8
"""Indexes read at once: each is one round trip to the store."""


class Contents:
    """A segment's index, by source and generation."""

    def __init__(
        self, key: str, frames: Iterable[Placed], sources: dict[str, Source], lanes: dict[str, LaneReport]
    ) -> None:
        """Group ``frames``; those that cannot be are left out."""
        self.key = key
        self.sources = sources
        self.lanes = lanes
        self.frames: dict[tuple[str, int], list[Placed]] = {}
        self.count = 0
        for placed in frames:
            if placed.offset >= 0 and placed.length > 0 and placed.at >= 0 and 0 <= placed.size <= 2 * MAX_RAW:
                self.frames.setdefault((placed.source, placed.generation), []).append(placed)
                self.count += 1


class Objects:
    """Reads segments of one store. May be used from many threads."""

    def __init__(self, store: Store) -> None:
        """Keep nothing yet."""
        self.store = store
        self._lock = threading.Lock()
        self._contents: OrderedDict[str, Contents] = OrderedDict()
        self._frames = 0
        self._tails: OrderedDict[str, bytes] = OrderedDict()
        self._tail_bytes = 0

    def contents(self, key: str) -> Contents:
        """Return the index of segment ``key``; raise NotFoundError or DamagedError."""
        with self._lock:
            found = self._contents.get(key)
            if found is not None:
                self._contents.move_to_end(key)
                return found
        made = self._load(key)
        with self._lock:
            self._keep(made)
        return made

    def prepare(self, keys: Iterable[str]) -> None:
        """Read several indexes at once, as far as they can be kept; an error shows when that one is asked for."""
        with self._lock:
            wanted = [key for key in keys if key not in self._contents]
        if len(wanted) < 2:
            return
        with ThreadPoolExecutor(min(THREADS, len(wanted)), "index") as pool:
            for future in [pool.submit(self.contents, key) for key in wanted]:
                error = future.exception()
                if error is not None and not isinstance(error, NotFoundError | DamagedError):
                    raise error

    def read(self, key: str, at: int, size: int) -> bytes:
        """Return ``size`` bytes from ``at`` of the object, fewer at its end; raise NotFoundError."""
        with self._lock:
            whole = self._tails.get(key)
        if whole is not None:
            return whole[at : at + size]
        return self.store.get_range(key, at, size)

    def _load(self, key: str) -> Contents:
        tail = self.store.get_range(key, -TAIL_GUESS, TAIL_GUESS)
        if len(tail) < TAIL_GUESS:
            self._keep_whole(key, tail)
        needed, _ = index_span(tail, key)
        if needed > len(tail):
            tail = self.store.get_range(key, -needed, needed)
        index = read_index(tail, key)
        return Contents(key, index.frames, index.sources, index.lanes)

    def _keep(self, made: Contents) -> None:
        if made.key in self._contents:
            return
        self._contents[made.key] = made
        self._frames += made.count
        while self._frames > MAX_FRAMES and len(self._contents) > 1:
            _, dropped = self._contents.popitem(last=False)
            self._frames -= dropped.count

    def _keep_whole(self, key: str, body: bytes) -> None:
        with self._lock:
            if key in self._tails:
                return
            self._tails[key] = body
            self._tail_bytes += len(body)
            while self._tail_bytes > MAX_TAILS:
                _, dropped = self._tails.popitem(last=False)
                self._tail_bytes -= len(dropped)
