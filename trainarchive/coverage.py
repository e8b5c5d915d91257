"""Where a run's text stands in the store: which frames give which bytes, and which bytes are missing.

Segments may overlap (a worker stored one and was killed before its commit, Redis lost its
memory and a node sent again). Here each byte is given to exactly one frame, by offset.

A long run has millions of frames, so they are kept as rows of numbers, not as objects.
"""

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping

import blake3
import msgspec

from trainarchive.errors import DamagedError
from trainarchive.frame import Frame
from trainarchive.manifest import Span
from trainarchive.run import Gap
from trainarchive.segment import Placed

NEVER_ARRIVED = "never arrived"
NOT_IN_STORE = "said to be sealed, but not in the store"
DAMAGED_IN_STORE = "damaged in the store"

Name = tuple[str, int]
"""A source's id and a generation of it."""

_ROW = 6  # object's number, offset, end, at, size, wall_ns
_PIECE = 3  # row, start, end


class Digest(msgspec.Struct, frozen=True):
    """The text's BLAKE3 (hex), when its first and last bytes were read (ns), and what turned out to be damaged."""

    blake3: str
    first_ns: int
    last_ns: int
    damaged: tuple[Gap, ...] = ()


class Text:
    """One generation of one source: ``add`` every frame of it, then ``settle``, then ask."""

    def __init__(self, name: Name) -> None:
        self.name = name
        self.size = 0
        self.gaps: tuple[Gap, ...] = ()
        self.objects: set[int] = set()
        self._rows = array("q")
        self._lost: list[Gap] = []
        self._pieces = array("q")

    def add(self, number: int, placed: Placed) -> None:
        """Take in a frame of object ``number`` (the caller's count of objects)."""
        if placed.gap:
            self._lost.append(Gap(placed.generation, placed.offset, placed.end, placed.gap))
        else:
            self._rows.extend((number, placed.offset, placed.end, placed.at, placed.size, placed.wall_ns))
        self.objects.add(number)

    def settle(self, sealed: int = 0, hole: str = NEVER_ARRIVED) -> None:
        """Give each byte to one frame and name the rest gaps.

        ``sealed``: up to there the log Redis says that all is in the store; ``hole`` is the
        reason where no gap frame gives one.
        """
        rows, holes, reached = self._rows, [], 0
        for row in sorted(range(0, len(rows), _ROW), key=self._order):
            offset, end = rows[row + 1], rows[row + 2]
            if end <= reached:
                continue
            if offset > reached:
                holes.append((reached, offset))
            self._pieces.extend((row, max(offset, reached), end))
            reached = end
        self.size = max([reached, sealed, *(gap.end for gap in self._lost)])
        told = max([reached, *(gap.end for gap in self._lost)])
        if told > reached:
            holes.append((reached, told))
        gaps = list(_explained(self.name[1], holes, self._lost, hole))
        if sealed > told:
            gaps.append(Gap(self.name[1], told, sealed, NOT_IN_STORE))
        self.gaps = tuple(gaps)

    def _order(self, row: int) -> tuple[int, int, int]:
        # Of frames that begin together the longest comes first, then the oldest object's.
        return self._rows[row + 1], -self._rows[row + 2], self._rows[row]

    @property
    def pieces(self) -> int:
        """Number of pieces of text, in order of offset."""
        return len(self._pieces) // _PIECE

    def object_of(self, piece: int) -> int:
        """Return the number of the object that holds this piece."""
        return self._rows[self._pieces[piece * _PIECE]]

    def place(self, piece: int) -> tuple[int, int, int]:
        """Return ``(start, end, at)``: the bytes of text that the piece gives, and its frame's place in the object."""
        row, start, end = self._pieces[piece * _PIECE : piece * _PIECE + _PIECE]
        return start, end, self._rows[row + 3]

    def wall_ns(self, piece: int) -> int:
        """Return when the node read it."""
        return self._rows[self._pieces[piece * _PIECE] + 5]

    def read(self, piece: int, body: bytes) -> bytes:
        """Return the piece's bytes out of its object; raise DamagedError."""
        row, start, end = self._pieces[piece * _PIECE : piece * _PIECE + _PIECE]
        _, offset, frame_end, at, size, _ = self._rows[row : row + _ROW]
        text = Frame(offset, frame_end - offset, 0, 0, body[at : at + size]).text()
        return text[start - offset : end - offset]

    def spans(self) -> Iterator[tuple[int, Span]]:
        """Yield ``(object's number, span)`` for what each object gives, joined where it is contiguous."""
        open_spans: dict[int, tuple[int, int]] = {}
        for piece in range(self.pieces):
            number = self.object_of(piece)
            start, end, _ = self.place(piece)
            before = open_spans.get(number)
            if before is not None and before[1] == start:
                start = before[0]
            elif before is not None:
                yield number, Span(*self.name, *before)
            open_spans[number] = (start, end)
        for number, (start, end) in open_spans.items():
            yield number, Span(*self.name, start, end)


def digests(
    texts: Mapping[Name, Text],
    read: Callable[[int], bytes],
) -> dict[Name, Digest]:
    """Return each text's digest, with one object at a time in memory.

    ``read(number)`` gives an object's body. An object is read when it holds the next piece of
    some text, the lowest number first: with objects numbered in the order in which they were
    made, that is once each.
    """
    hashing = {name: _Hashing(text) for name, text in texts.items()}
    waiting: dict[int, list[_Hashing]] = {}
    ready: list[int] = []

    def wait(each: _Hashing) -> None:
        number = each.wanted
        if number is not None:
            if number not in waiting:
                waiting[number] = []
                heapq.heappush(ready, number)
            waiting[number].append(each)

    for each in hashing.values():
        wait(each)
    while ready:
        number = heapq.heappop(ready)
        body = read(number)
        for each in waiting.pop(number):
            each.take(number, body)
            wait(each)
    return {name: each.digest() for name, each in hashing.items()}


class _Hashing:
    """One text's way through its objects."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._next = 0
        self._hasher = blake3.blake3()
        self._damaged: list[Gap] = []

    @property
    def wanted(self) -> int | None:
        return self._text.object_of(self._next) if self._next < self._text.pieces else None

    def take(self, number: int, body: bytes) -> None:
        while self.wanted == number:
            try:
                self._hasher.update(self._text.read(self._next, body))
            except DamagedError:
                start, end, _ = self._text.place(self._next)
                self._damaged.append(Gap(self._text.name[1], start, end, DAMAGED_IN_STORE))
            self._next += 1

    def digest(self) -> Digest:
        text = self._text
        first, last = (text.wall_ns(0), text.wall_ns(text.pieces - 1)) if text.pieces else (0, 0)
        return Digest(self._hasher.hexdigest(), first, last, tuple(self._damaged))


def joined(gaps: Iterable[Gap]) -> tuple[Gap, ...]:
    """Return the gaps in order, those that touch and have the same reason as one."""
    result: list[Gap] = []
    for gap in sorted(gaps, key=lambda gap: (gap.start, gap.end)):
        if result and result[-1].end == gap.start and result[-1].reason == gap.reason:
            result[-1] = Gap(gap.generation, result[-1].start, gap.end, gap.reason)
        else:
            result.append(gap)
    return tuple(result)


def _explained(generation: int, holes: list[tuple[int, int]], lost: list[Gap], hole: str) -> Iterator[Gap]:
    """Cut the holes at the gap frames' bounds; both in order, so one pass does."""
    reasons = _without_overlaps(lost)
    at = 0
    for start, end in holes:
        reached = start
        while at < len(reasons) and reasons[at].end <= start:
            at += 1
        look = at
        while look < len(reasons) and reasons[look].start < end:
            told = reasons[look]
            if told.start > reached:
                yield Gap(generation, reached, told.start, hole)
            yield Gap(generation, max(told.start, reached), min(told.end, end), told.reason)
            reached = min(told.end, end)
            look += 1
        at = max(at, look - 1)
        if reached < end:
            yield Gap(generation, reached, end, hole)


def _without_overlaps(lost: list[Gap]) -> list[Gap]:
    result: list[Gap] = []
    reached = 0
    for gap in sorted(lost, key=lambda gap: (gap.start, -gap.end, gap.reason)):
        if gap.end > reached:
            result.append(Gap(gap.generation, max(gap.start, reached), gap.end, gap.reason))
            reached = gap.end
    return list(joined(result))
