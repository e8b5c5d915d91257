"""Segments as a reader uses them: indexes and ranged reads, kept within a fixed memory."""

import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from trainarchive import shelf
from trainarchive.coverage import Name, clock
from trainarchive.errors import DamagedError, NotFoundError
from trainarchive.frame import MAX_RAW
from trainarchive.run import Gap, LaneReport, Source
from trainarchive.segment import TAIL_GUESS, Index, read_index
from trainarchive.store.contract import Store

MAX_TAILS = 32 * 1024 * 1024
"""Bytes of small objects' bodies that are kept: runs of many small segments are then read once."""

MAX_FRAMES = 500_000
"""Frames' places that are kept in all indexes together, 20 MiB."""

THREADS = 8
"""Indexes fetched at once, and how many are held ready: each is one round trip to the store."""

COLUMNS = 5


class Contents:
    """A segment's index, by source and generation.

    ``frames``: rows of (offset, end, at, size, wall_ns); ``gaps``: what will never come, and when that was said.
    """

    def __init__(self, key: str, index: Index) -> None:
        """Group the frames; those that cannot be are left out."""
        self.key = key
        self.sources: dict[str, Source] = index.sources
        self.lanes: dict[str, LaneReport] = index.lanes
        self.frames: dict[Name, array[int]] = {}
        self.gaps: dict[Name, list[tuple[Gap, int]]] = {}
        self.count = 0
        for placed in index.frames:
            name = (placed.source, placed.generation)
            if placed.gap and placed.length:
                gap = Gap(placed.generation, placed.offset, placed.end, placed.gap)
                self.gaps.setdefault(name, []).append((gap, placed.wall_ns))
            elif placed.length and placed.size <= 2 * MAX_RAW:
                row = (placed.offset, placed.end, placed.at, placed.size, clock(placed.wall_ns))
                self.frames.setdefault(name, array("q")).extend(row)
            self.count += 1

    def rows(self, name: Name) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield (offset, end, at, size, wall_ns) of every frame of a generation."""
        columns = iter(self.frames.get(name, ()))
        return zip(columns, columns, columns, columns, columns, strict=True)


class Objects:
    """Reads segments of one store. May be used from many threads."""

    def __init__(self, store: Store) -> None:
        """Keep nothing yet."""
        self.store = store
        self._lock = threading.Lock()
        self._decoding = threading.Lock()
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

    def each(self, keys: Iterable[str]) -> Iterator[tuple[str, Contents | NotFoundError | DamagedError]]:
        """Yield every index in order, or what is wrong with it; a few are fetched ahead, however many there are."""
        wanted = list(keys)
        with self._lock:
            missing = sum(key not in self._contents for key in wanted)
        if missing < 2:
            for key in wanted:
                yield key, self._found(key)
            return
        upcoming = iter(wanted)
        ahead: deque[tuple[str, Future[Contents | NotFoundError | DamagedError]]] = deque()
        with ThreadPoolExecutor(min(THREADS, missing), "index") as pool:
            while True:
                for key in islice(upcoming, THREADS - len(ahead)):
                    ahead.append((key, pool.submit(self._found, key)))
                if not ahead:
                    return
                key, future = ahead.popleft()
                yield key, future.result()

    def read(self, key: str, at: int, size: int) -> bytes:
        """Return ``size`` bytes from ``at`` of the object, fewer at its end; raise NotFoundError."""
        with self._lock:
            whole = self._tails.get(key)
        if whole is not None:
            return whole[at : at + size]
        return self.store.get_range(key, at, size)

    def _found(self, key: str) -> Contents | NotFoundError | DamagedError:
        try:
            return self.contents(key)
        except (NotFoundError, DamagedError) as error:
            return error

    def _load(self, key: str) -> Contents:
        tail = shelf.read_end(self.store, key)
        if len(tail) < TAIL_GUESS:
            self._keep_whole(key, tail)
        with self._decoding:  # an index of many frames takes much memory until it is made into rows
            return Contents(key, read_index(tail, key))

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
