"""A text read as one run of bytes: its copies may be in objects of the store or wait in the log Redis."""

from collections.abc import Iterator, Sequence
from itertools import islice

from trainarchive.coverage import Text, Walk
from trainarchive.errors import DamagedError, NotFoundError
from trainarchive.frame import Frame
from trainarchive.reading.objects import Contents, Objects
from trainarchive.run import Gap

WINDOW = 4 * 1024 * 1024
"""Most bytes of an object in one ranged read."""

WINDOWS = 2
"""Ranges in memory: where one object is damaged all over, its bytes' copies are mostly in one other."""

HOLE = 64 * 1024
"""Bytes of no interest that are read through rather than asked around."""

NEIGHBOURS = WINDOW // 64
"""Frames that are looked at for what else a ranged read should bring."""

WAITING = 2**62
"""The number of the object that is none: frames in memory, at their places in a list. Any other object comes first."""

DAMAGED = "damaged: "
"""How the reason of a gap begins that is the archive's fault and in no node's account."""


class VanishedError(Exception):
    """Object ``key``, which a piece is in, is no longer in the store."""

    def __init__(self, key: str) -> None:
        """Remember which."""
        super().__init__(key)
        self.key = key


class Copies:
    """A text, and where its objects are: object ``number`` is ``keys[number]``, or WAITING, in ``waiting``."""

    def __init__(self, text: Text, objects: Objects) -> None:
        """Of a text that holds no frame yet."""
        self.text = text
        self.objects = objects
        self.hole = "missing from the archive"
        self._keys: list[str] = []
        self._waiting: list[Frame] = []

    def add_object(self, key: str, contents: Contents) -> None:
        """Take in the frames and gaps of this text that object ``key`` holds."""
        number = len(self._keys)
        self._keys.append(key)
        for row in contents.rows(self.text.name):
            self.text.place_row(number, *row)
        for gap, _ in contents.gaps.get(self.text.name, ()):
            self.text.lose(gap)

    def add_waiting(self, frame: Frame) -> None:
        """Take in a frame that is in memory."""
        if frame.gap:
            self.text.lose(Gap(self.text.name[1], frame.offset, frame.end, frame.gap))
            return
        self.text.place_row(WAITING, frame.offset, frame.end, len(self._waiting), len(frame.data), frame.wall_ns)
        self._waiting.append(frame)

    def read(self, start: int, end: int | None) -> Iterator[bytes | Gap]:
        """Yield the text from ``start`` to ``end`` in order, each byte once, and a Gap for every stretch without text.

        Where a copy is damaged, another of the same bytes is used; where there is none, and no
        reason was told, the gap's begins with ``DAMAGED``. ``end`` of None: as far as anything is
        known. Raises VanishedError where an object is gone.
        """
        gap: Gap | None = None
        for item in self._stretches(start, end):
            if isinstance(item, Gap) and gap is not None and gap.reason == item.reason:
                gap = Gap(gap.generation, gap.start, item.end, gap.reason)
                continue
            if gap is not None:
                yield gap
            gap = item if isinstance(item, Gap) else None
            if isinstance(item, bytes):
                yield item
        if gap is not None:
            yield gap

    def _stretches(self, start: int, end: int | None) -> Iterator[bytes | Gap]:
        walk = Walk(self.text, start, end)
        windows = _Windows(self.text, self._keys, self.objects)
        while walk.position < walk.end:
            row = walk.copy()
            if row is None:
                absence = walk.absence()
                reason = absence.reason or f"{DAMAGED}{absence.error or self.hole}"
                yield Gap(self.text.name[1], absence.start, absence.end, reason)
                continue
            try:
                text = self._text_of(row, walk, windows)
            except DamagedError as error:
                walk.reject(str(error))
                continue
            offset, _ = self.text.extent(row)
            begin, stop = walk.take(row)
            yield text[begin - offset : stop - offset]

    def _text_of(self, row: int, walk: Walk, windows: "_Windows") -> bytes:
        number, at, _ = self.text.where(row)
        if number == WAITING:
            return self._waiting[at].text()
        return self.text.decoded(row, windows.data(row, walk))


class _Windows:
    """The parts of objects that the next rows are in."""

    def __init__(self, text: Text, keys: Sequence[str], objects: Objects) -> None:
        self._text = text
        self._keys = keys
        self._objects = objects
        self._kept: list[tuple[int, int, bytes]] = []

    def data(self, row: int, walk: Walk) -> bytes:
        """Return the compressed bytes of ``row``; raise VanishedError."""
        number, at, size = self._text.where(row)
        for held, begin, block in self._kept:
            if held == number and begin <= at and at + size <= begin + len(block):
                return block[at - begin : at - begin + size]
        end = self._reach(row, walk)
        self._kept = self._kept[: WINDOWS - 1]
        try:
            block = self._objects.read(self._keys[number], at, end - at)
        except NotFoundError:
            raise VanishedError(self._keys[number]) from None
        self._kept.insert(0, (number, at, block))
        return block[:size]

    def _reach(self, row: int, walk: Walk) -> int:
        """Return up to where the object is to be read: as far as the rows after this one are its neighbours."""
        number, first, size = self._text.where(row)
        end = first + size
        for other in islice(walk.following(), NEIGHBOURS):
            of, at, size = self._text.where(other)
            if of != number:
                continue
            if not 0 <= at - end <= HOLE or at + size - first > WINDOW:
                break
            end = at + size
        return end
