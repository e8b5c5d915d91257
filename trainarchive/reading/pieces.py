"""Pieces of one source's generation, from wherever they are, read as one run of bytes."""

from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from trainarchive.errors import DamagedError, NotFoundError
from trainarchive.frame import Frame
from trainarchive.reading.objects import Objects
from trainarchive.run import Gap
from trainarchive.segment import Placed

WINDOW = 4 * 1024 * 1024
"""Most bytes of an object in one ranged read."""

HOLE = 64 * 1024
"""Bytes of no interest that are read through rather than asked around."""

DAMAGED = "damaged: "
"""How the reason of a gap begins that is the archive's fault and in no node's account."""


class Piece(msgspec.Struct, frozen=True):
    """One frame's text: ``frame`` where it is in memory, else ``size`` bytes at ``at`` of object ``key``.

    With ``gap`` there is no text and never will be.
    """

    offset: int
    end: int
    gap: str = ""
    key: str = ""
    at: int = 0
    size: int = 0
    frame: Frame | None = None


class VanishedError(Exception):
    """Object ``key``, which a piece is in, is no longer in the store."""

    def __init__(self, key: str) -> None:
        """Remember which."""
        super().__init__(key)
        self.key = key


def piece_at(key: str, placed: Placed) -> Piece:
    """Return the piece that an index's line tells of."""
    return Piece(placed.offset, placed.end, placed.gap, key, placed.at, placed.size)


def piece_of(frame: Frame) -> Piece:
    """Return the piece that a frame in memory is."""
    return Piece(frame.offset, frame.end, frame.gap, frame=frame)


class _Window:
    """The part of an object that the next pieces are in."""

    def __init__(self, pieces: Sequence[Piece], objects: Objects, lost: frozenset[str]) -> None:
        self._pieces = pieces
        self._objects = objects
        self._lost = lost
        self._key = ""
        self._at = 0
        self._bytes = b""

    def text(self, number: int) -> bytes:
        """Return the text of piece ``number``; raise DamagedError or VanishedError."""
        piece = self._pieces[number]
        if piece.frame is not None:
            return piece.frame.text()
        if piece.key in self._lost:
            raise DamagedError(f"{piece.key} is not in the store")
        if self._key != piece.key or not (self._at <= piece.at and piece.at + piece.size <= self._end):
            self._move(number)
        start = piece.at - self._at
        data = self._bytes[start : start + piece.size]
        return Frame(piece.offset, piece.end - piece.offset, 0, 0, data).text()

    @property
    def _end(self) -> int:
        return self._at + len(self._bytes)

    def _move(self, number: int) -> None:
        """Read the object from piece ``number`` on as far as the pieces after it are its neighbours."""
        first = self._pieces[number]
        end = first.at + first.size
        for piece in islice(self._pieces, number + 1, number + 1 + WINDOW // 64):
            if piece.key != first.key or piece.gap:
                continue
            grown = piece.at + piece.size
            if not 0 <= piece.at - end <= HOLE or grown - first.at > WINDOW:
                break
            end = grown
        try:
            self._bytes = self._objects.read(first.key, first.at, end - first.at)
        except NotFoundError:
            raise VanishedError(first.key) from None
        self._key, self._at = first.key, first.at


def read(  # noqa: PLR0913 (one call, and each is a plain value)
    pieces: Sequence[Piece],
    objects: Objects,
    *,
    generation: int,
    start: int,
    end: int | None,
    lost: frozenset[str],
) -> Iterator[bytes | Gap]:
    """Yield the text from ``start`` to ``end`` in order, each byte once, and a Gap for every stretch without text.

    ``pieces`` stand in order of offset and may overlap: then the first that has the byte gives it.
    Where that one is damaged, another with the same bytes is used; where there is none, the gap's
    reason begins with ``DAMAGED``. ``end`` of None is the last piece's. Raises VanishedError where
    an object not in ``lost`` is gone.
    """
    gap: Gap | None = None
    for item in _stretches(pieces, _Window(pieces, objects, lost), start, end):
        if isinstance(item, bytes):
            if gap is not None:
                yield gap
                gap = None
            yield item
            continue
        begin, stop, reason = item
        if gap is not None and gap.reason == reason:
            gap = Gap(generation, gap.start, stop, reason)
            continue
        if gap is not None:
            yield gap
        gap = Gap(generation, begin, stop, reason)
    if gap is not None:
        yield gap


def _stretches(
    pieces: Sequence[Piece], window: _Window, start: int, end: int | None
) -> Iterator[bytes | tuple[int, int, str]]:
    """As ``read``, with gaps as (start, end, reason), not yet joined."""
    stop = max((piece.end for piece in pieces), default=0) if end is None else end
    position, upcoming = start, 0
    here: list[int] = []
    damage: list[tuple[int, str]] = []
    while position < stop:
        while upcoming < len(pieces) and pieces[upcoming].offset <= position:
            here.append(upcoming)
            upcoming += 1
        here = [number for number in here if pieces[number].end > position]
        following = pieces[upcoming].offset if upcoming < len(pieces) else stop
        number = next((number for number in here if not pieces[number].gap), None)
        if number is None:
            upto, reason = _absence(pieces, here, damage, position)
            upto = min(upto or stop, following, stop)
            yield (position, upto, reason)
            position = upto
            continue
        piece = pieces[number]
        try:
            text = window.text(number)
        except DamagedError as error:
            here.remove(number)
            damage.append((piece.end, f"{DAMAGED}{error}"))
            continue
        text = text[position - piece.offset :] if position > piece.offset else text
        text = text[: stop - position] if len(text) > stop - position else text
        yield text
        position += len(text)
        damage.clear()


def _absence(
    pieces: Sequence[Piece], here: Sequence[int], damage: Sequence[tuple[int, str]], position: int
) -> tuple[int, str]:
    """Say up to where (0: to the next piece) and why there is no text at ``position``."""
    if here:
        return pieces[here[0]].end, pieces[here[0]].gap
    for upto, reason in damage:
        if upto > position:
            return upto, reason
    return 0, f"{DAMAGED}missing from the archive"
