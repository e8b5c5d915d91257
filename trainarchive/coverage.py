"""Where a run's text stands in the store: which frames give which bytes, and which bytes are missing.

Segments may overlap (a worker stored one and was killed before its commit, Redis lost its
memory and a node sent again). Here each byte is given to exactly one frame, by offset; where
that frame turns out to be damaged, to another that holds the same byte. Manifests are made by
this, and readers read by it.

A long run has millions of frames, so they are kept as rows of numbers, not as objects.
"""

import heapq
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

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

BODIES = 2
"""Objects in memory while digests are made: where one is damaged all over, its copies are mostly in one other."""

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
    """One generation of one source: ``add`` every frame of it, then ``settle`` and ask, or ``Walk`` through it.

    A frame in here is a row, a number: where in ``rows`` its six numbers begin. Objects are
    numbers too, the caller's count of them.
    """

    def __init__(self, name: Name) -> None:
        self.name = name
        self.size = 0
        self.gaps: tuple[Gap, ...] = ()
        self.objects: set[int] = set()
        self.rows = array("q")
        self._runs: list[int] = []
        self._lost: list[Gap] = []
        self._pieces = array("q")

    def add(self, number: int, placed: Placed) -> None:
        """Take in a frame of object ``number``."""
        if placed.gap:
            self.lose(Gap(placed.generation, placed.offset, placed.end, placed.gap))
        else:
            self.place_row(number, placed.offset, placed.end, placed.at, placed.size, clock(placed.wall_ns))
        self.objects.add(number)

    def place_row(  # noqa: PLR0913, PLR0917 (a row's fields, once for each of millions of frames)
        self, number: int, offset: int, end: int, at: int, size: int, wall_ns: int
    ) -> None:
        """Take in a frame: bytes ``offset`` to ``end`` are in ``size`` bytes at ``at`` of object ``number``."""
        rows = self.rows
        if not rows or (offset, -end) < (rows[-5], -rows[-4]):
            self._runs.append(len(rows))
        rows.extend((number, offset, end, at, size, wall_ns))

    def lose(self, gap: Gap) -> None:
        """Take in a reason for which bytes are not there, unless a frame has them after all."""
        self._lost.append(gap)

    def settle(self, sealed: int = 0, hole: str = NEVER_ARRIVED) -> None:
        """Give each byte to one frame and name the rest gaps.

        ``sealed``: up to there the log Redis says that all is in the store; ``hole`` is the
        reason where no gap frame gives one.
        """
        walk, gaps, self._pieces = Walk(self), [], array("q")
        while walk.position < walk.end:
            row = walk.copy()
            if row is None:
                absence = walk.absence()
                gaps.append(Gap(self.name[1], absence.start, absence.end, absence.reason or hole))
            else:
                start, end = walk.take(row)
                self._pieces.extend((row, start, end))
        self.size = max(walk.end, sealed)
        if sealed > walk.end:
            gaps.append(Gap(self.name[1], walk.end, sealed, NOT_IN_STORE))
        self.gaps = joined(gaps)

    def give(self, pieces: "array[int]") -> None:
        """Give each byte to the frame that was found to have it: rows of (row, start, end), in order."""
        self._pieces = pieces

    # -- rows ------------------------------------------------------------------------------

    def ordered(self) -> Sequence[int]:
        """Return all rows in the order in which they serve.

        Of frames that begin together the longest comes first, then the oldest object's.
        """
        if len(self._runs) < 2:
            return range(0, len(self.rows), _ROW)
        # An object's frames stand in order already, and sorting would need ten times the rows' memory.
        runs = [range(start, end, _ROW) for start, end in pairwise([*self._runs, len(self.rows)])]
        return array("q", heapq.merge(*runs, key=self._rank))

    def last(self) -> Sequence[int]:
        """Return the offset just after the last byte that a frame has, if there is a frame."""
        return [max(self.rows[2::_ROW])] if self.rows else []

    def reasons(self) -> list[Gap]:
        """Return the reasons that were told, in order, without overlaps."""
        result: list[Gap] = []
        reached = 0
        for gap in sorted(self._lost, key=lambda gap: (gap.start, -gap.end, gap.reason)):
            if gap.end > reached:
                result.append(Gap(gap.generation, max(gap.start, reached), gap.end, gap.reason))
                reached = gap.end
        return list(joined(result))

    def extent(self, row: int) -> tuple[int, int]:
        """Return the bytes of text that the row's frame holds, as ``(offset, end)``."""
        return self.rows[row + 1], self.rows[row + 2]

    def where(self, row: int) -> tuple[int, int, int]:
        """Return where the row's frame is: ``(object's number, at, size)``."""
        return self.rows[row], self.rows[row + 3], self.rows[row + 4]

    def decoded(self, row: int, data: bytes) -> bytes:
        """Return the text of a row's frame, whose compressed bytes are ``data``; raise DamagedError."""
        offset, end = self.extent(row)
        return Frame(offset, end - offset, 0, 0, data).text()

    def _rank(self, row: int) -> tuple[int, int, int]:
        return self.rows[row + 1], -self.rows[row + 2], self.rows[row]

    # -- pieces ----------------------------------------------------------------------------

    @property
    def pieces(self) -> int:
        """Number of pieces of text, in order of offset."""
        return len(self._pieces) // _PIECE

    def object_of(self, piece: int) -> int:
        """Return the number of the object that holds this piece."""
        return self.rows[self._pieces[piece * _PIECE]]

    def place(self, piece: int) -> tuple[int, int, int]:
        """Return ``(start, end, at)``: the bytes of text that the piece gives, and its frame's place in the object."""
        row, start, end = self._pieces[piece * _PIECE : piece * _PIECE + _PIECE]
        return start, end, self.rows[row + 3]

    def wall_ns(self, piece: int) -> int:
        """Return when the node read it."""
        return self.rows[self._pieces[piece * _PIECE] + 5]

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


class Absence(msgspec.Struct, frozen=True):
    """Bytes ``start`` to ``end`` that no copy gives.

    ``reason`` is what was told of them, if anything was. ``row`` is a copy that was found damaged
    and ``error`` what is wrong with it, where there is one.
    """

    start: int
    end: int
    reason: str = ""
    row: int | None = None
    error: str = ""


class Walk:
    """One way through a text: for the byte at ``position`` the copy to read, another where that one is damaged.

    While ``position`` is below ``end``: ``take`` the row that ``copy`` returns or ``reject`` it;
    where there is none, ``absence`` tells the stretch that is not there and goes past it. The
    whole way costs one look at each row, however they overlap.
    """

    def __init__(self, text: Text, start: int = 0, end: int | None = None) -> None:
        """``end`` of None is that of the last byte of which anything is known."""
        self._text = text
        self._order = text.ordered()
        self._reasons = text.reasons()
        self._upcoming = 0
        self._told = 0
        self._here: deque[int] = deque()
        self._rejected: deque[tuple[int, str]] = deque()
        self.position = start
        if end is None:
            end = max([0, *(gap.end for gap in self._reasons[-1:]), *text.last()])
        self.end = end

    def copy(self) -> int | None:
        """Return the row to read for the byte at ``position``, None where there is none (any more)."""
        rows, order, here, position = self._text.rows, self._order, self._here, self.position
        while self._upcoming < len(order):
            row = order[self._upcoming]
            if rows[row + 1] > position:
                break
            self._upcoming += 1
            if rows[row + 2] > position:
                here.append(row)
        while here and rows[here[0] + 2] <= position:
            here.popleft()
        return here[0] if here else None

    def following(self) -> Iterator[int]:
        """Yield the rows that may come after the one that ``copy`` returned, in order."""
        for number in range(self._upcoming, len(self._order)):
            yield self._order[number]

    def take(self, row: int) -> tuple[int, int]:
        """Go past what ``row`` gives, and return it as ``(start, end)``."""
        start = self.position
        self.position = min(self._text.extent(row)[1], self.end)
        return start, self.position

    def reject(self, error: str) -> None:
        """Never return the row again that ``copy`` returned: it is damaged."""
        self._rejected.append((self._here.popleft(), error))

    def absence(self) -> Absence:
        """Return the stretch at ``position`` that no copy has, as far as one reason goes, and go past it."""
        start = end = self.position
        end = self.end
        if self._upcoming < len(self._order):
            end = min(end, self._text.extent(self._order[self._upcoming])[0])
        while self._rejected and self._text.extent(self._rejected[0][0])[1] <= start:
            self._rejected.popleft()
        row, error = self._rejected[0] if self._rejected else (None, "")
        if row is not None:
            end = min(end, self._text.extent(row)[1])
        reason = ""
        while self._told < len(self._reasons) and self._reasons[self._told].end <= start:
            self._told += 1
        if self._told < len(self._reasons):
            told = self._reasons[self._told]
            reason = told.reason if told.start <= start else ""
            end = min(end, told.end if reason else told.start)
        self.position = end
        return Absence(start, end, reason, row, error)


def digests(
    texts: Mapping[Name, Text],
    read: Callable[[int], bytes],
) -> dict[Name, Digest]:
    """Return each text's digest, with ``BODIES`` objects at a time in memory.

    ``read(number)`` gives an object's body. An object is read when it holds the next bytes of
    some text, the lowest number first: with objects numbered in the order in which they were
    made, that is once each. A damaged frame's bytes are taken from another object that has them;
    the texts' pieces are then those that were good, and, where there was no other, the damaged ones.
    """
    hashing = {name: _Hashing(text) for name, text in texts.items()}
    waiting: dict[int, list[_Hashing]] = {}
    ready: list[int] = []
    bodies: OrderedDict[int, bytes] = OrderedDict()

    def wait(each: _Hashing) -> None:
        number = each.wanted()
        if number is not None:
            if number not in waiting:
                waiting[number] = []
                heapq.heappush(ready, number)
            waiting[number].append(each)

    for each in hashing.values():
        wait(each)
    while ready:
        number = heapq.heappop(ready)
        body = bodies.pop(number, None)
        if body is None:
            while len(bodies) >= BODIES:
                bodies.popitem(last=False)
            body = read(number)
        bodies[number] = body
        for each in waiting.pop(number):
            each.take(number, body)
            wait(each)
    return {name: each.digest() for name, each in hashing.items()}


class _Hashing:
    """One text's way through its objects."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._walk = Walk(text)
        self._hasher = blake3.blake3()
        self._pieces = array("q")
        self._damaged: list[Gap] = []

    def wanted(self) -> int | None:
        """Return the number of the object that has the next bytes, None at the end."""
        while self._walk.position < self._walk.end:
            row = self._walk.copy()
            if row is not None:
                return self._text.where(row)[0]
            absence = self._walk.absence()
            if absence.row is not None:
                # The damaged frame keeps its place: a part that holds it is not done with.
                reason = absence.reason or DAMAGED_IN_STORE
                self._damaged.append(Gap(self._text.name[1], absence.start, absence.end, reason))
                self._pieces.extend((absence.row, absence.start, absence.end))
        return None

    def take(self, number: int, body: bytes) -> None:
        """Take in all that object ``number`` gives next."""
        while self.wanted() == number:
            row = self._walk.copy()
            if row is None:
                return
            _, at, size = self._text.where(row)
            try:
                text = self._text.decoded(row, body[at : at + size])
            except DamagedError as error:
                self._walk.reject(str(error))
                continue
            start, end = self._walk.take(row)
            offset, _ = self._text.extent(row)
            self._hasher.update(text[start - offset : end - offset])
            self._pieces.extend((row, start, end))

    def digest(self) -> Digest:
        """Return the digest, and let the text know its good pieces."""
        text = self._text
        text.give(self._pieces)
        first, last = (text.wall_ns(0), text.wall_ns(text.pieces - 1)) if text.pieces else (0, 0)
        return Digest(self._hasher.hexdigest(), first, last, tuple(self._damaged))


def clock(wall_ns: int) -> int:
    """Return a time that a node told as one that fits a row: 0 where it is none."""
    return wall_ns if 0 <= wall_ns < 2**63 else 0


def joined(gaps: Iterable[Gap]) -> tuple[Gap, ...]:
    """Return the gaps in order, those that touch and have the same reason as one."""
    result: list[Gap] = []
    for gap in sorted(gaps, key=lambda gap: (gap.start, gap.end)):
        if result and result[-1].end == gap.start and result[-1].reason == gap.reason:
            result[-1] = Gap(gap.generation, result[-1].start, gap.end, gap.reason)
        else:
            result.append(gap)
    return tuple(result)
