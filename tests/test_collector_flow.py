"""A flow alone: queue, spool and file, where each must stand in for another."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainarchive.collector.flow import Flow, Held
from trainarchive.errors import UnavailableError
from trainarchive.frame import MAX_OFFSET, Frame, Framer
from trainarchive.spool import SpoolFile
from trainarchive.tail import Tail

BLOCK = 262_144
PLENTY = 1 << 40


class Bench:
    """A file, its tail and its flow."""

    def __init__(self, directory: Path, *, memory: int = PLENTY, spool: int = PLENTY) -> None:
        """``memory`` and ``spool`` are the limits, in bytes."""
        self.path = directory / "x.log"
        self.text = os.urandom(5 * BLOCK)
        self.path.write_bytes(self.text)
        self.tail = Tail(os.open(self.path, os.O_RDONLY))
        self.held = Held(memory, spool)
        self.flow = Flow("s", 0, self.held, directory / "s.0")

    def read(self, blocks: int) -> None:
        """Read some blocks into the flow."""
        for _ in range(blocks):
            block = self.tail.read()
            if block is None:
                return
            self.flow.add(block, Framer())

    def send(self, most: int = PLENTY) -> list[Frame]:
        """Send what goes out, and have Redis take it."""
        frames = self.flow.outgoing(most)
        end = self.flow.committed
        for frame in frames:
            assert frame.offset == end
            end = frame.end
        self.flow.accept(end, 0)
        return frames

    def all_of(self) -> bytes:
        """Send everything; return the text from ``committed`` on."""
        sent = b""
        while frames := self.send(BLOCK):
            assert not any(frame.gap for frame in frames)
            sent += b"".join(frame.text() for frame in frames)
        return sent


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Give a function that makes a bench."""
    made: list[Bench] = []

    def make(**limits: int) -> Bench:
        made.append(Bench(tmp_path, **limits))
        return made[-1]

    yield make
    for one in made:
        one.tail.close()
        one.flow.close()


def test_secured_bytes_outlive_the_file_and_redis(bench: Callable[..., Bench]) -> None:
    """What was sent, but not sealed, is on disk when the file goes: also when a spill had begun later than that."""
    one = bench()
    one.read(2)
    one.send()
    one.read(1)
    one.flow.spill()
    one.flow.secure(one.tail)
    one.read(9)
    one.tail.close()
    one.flow.ended = True
    one.flow.rewind(0, None)
    assert one.all_of() == one.text
    assert one.flow.waiting == 0


def test_a_hole_before_the_spool_is_read_from_the_file(bench: Callable[..., Bench]) -> None:
    """The spool begins later than what an emptied Redis needs; the file has it."""
    one = bench()
    one.read(2)
    one.send()
    one.read(2)
    one.flow.spill()
    one.flow.rewind(0, one.tail)
    one.read(9)
    assert one.all_of() == one.text


def test_a_hole_before_the_spool_is_a_gap_without_the_file(bench: Callable[..., Bench]) -> None:
    """Nobody has these bytes any more: what comes behind them still goes up, and the gap says so."""
    one = bench()
    one.read(2)
    one.send()
    one.read(2)
    one.flow.spill()
    one.flow.rewind(0, None)
    first, *rest = one.send()
    assert (first.offset, first.end, bool(first.gap)) == (0, 2 * BLOCK, True)
    assert b"".join(frame.text() for frame in rest) == one.text[2 * BLOCK : 4 * BLOCK]


def test_an_earlier_lifes_spool_that_begins_too_late(bench: Callable[..., Bench], tmp_path: Path) -> None:
    """After a restart Redis has less than where the spool begins, though no more than was known to be sealed."""
    one = bench()
    one.read(2)
    one.send()
    one.read(2)
    one.flow.spill()
    one.flow.close()
    again = Flow("s", 0, one.held, tmp_path / "s.0")
    again.adopt(SpoolFile.open(tmp_path / "s.0"), keep=False)
    one.flow = again
    again.rewind(0, one.tail)
    one.read(9)
    assert one.all_of() == one.text


def test_a_spill_that_ended_half_way_goes_on(bench: Callable[..., Bench]) -> None:
    """The disk was full for a while; frames stay in order, none twice on disk, none lost."""
    one = bench(spool=BLOCK + 1, memory=1)
    one.read(4)
    with pytest.raises(UnavailableError):
        one.flow.spill()
    one.held.spool_limit = PLENTY
    one.read(1)
    assert one.all_of() == one.text


def test_with_a_full_spool_closing_files_go_up_from_memory(bench: Callable[..., Bench]) -> None:
    """The last words of a job need no disk where Redis takes them."""
    one = bench(spool=0)
    one.read(1)
    one.send()
    one.flow.secure(one.tail)
    one.read(9)
    one.flow.rewind(one.flow.committed, one.tail)
    assert one.all_of() == one.text[BLOCK:]


def test_what_redis_takes_in_the_middle_of_a_frame_is_cut(bench: Callable[..., Bench]) -> None:
    """A frame that straddles the committed offset is framed anew from there."""
    one = bench()
    one.read(1)
    one.flow.rewind(1000, one.tail)
    (frame,) = one.flow.outgoing(1)
    assert (frame.offset, frame.text()) == (1000, one.text[1000:BLOCK])


def test_a_lost_end_follows_everything_else(bench: Callable[..., Bench]) -> None:
    """The gap at the end goes out after the bytes before it, and again when Redis forgot it."""
    one = bench()
    one.read(1)
    one.flow.lose(2 * BLOCK, "not kept: test")
    *frames, gap = one.send()
    assert b"".join(frame.text() for frame in frames) == one.text[:BLOCK]
    assert (gap.offset, gap.end, gap.gap) == (BLOCK, 2 * BLOCK, "not kept: test")
    one.flow.rewind(0, None)
    assert [(frame.offset, frame.end, bool(frame.gap)) for frame in one.send()] == [
        (0, BLOCK, True),
        (BLOCK, 2 * BLOCK, True),
    ]


def test_a_gap_never_reaches_beyond_what_offsets_can_say(bench: Callable[..., Bench]) -> None:
    """A sparse file of an exabyte is a user's right."""
    one = bench()
    one.flow.skip(1 << 60, "over the ceiling")
    assert one.flow.position == MAX_OFFSET


def test_memory_is_counted_back_to_nothing(bench: Callable[..., Bench]) -> None:
    """Every way out of the queue gives its memory back."""
    one = bench()
    one.read(3)
    assert one.held.memory > 3 * BLOCK
    one.flow.spill()
    assert one.held.memory == 0
    one.all_of()
    assert one.held.memory == 0
    assert one.held.spooled == 0


def test_after_frames_went_up_past_the_spool(bench: Callable[..., Bench]) -> None:
    """The disk was full for some frames, which went up from memory: later ones do too, until it is sealed."""
    one = bench(spool=1)
    one.flow.secure(one.tail)
    one.read(1)
    sent = b"".join(frame.text() for frame in one.send())
    one.read(1)
    sent += b"".join(frame.text() for frame in one.send())
    one.held.spool_limit = PLENTY
    one.read(9)
    assert sent + one.all_of() == one.text


def test_an_empty_spool_secures_nothing_by_itself(bench: Callable[..., Bench], tmp_path: Path) -> None:
    """A disk that was full just after the spool was made: what is not sealed is read again all the same."""
    one = bench()
    one.read(2)
    one.send()
    one.flow.adopt(SpoolFile.create(tmp_path / "s.0", "s", 0), keep=False)
    one.flow.secure(one.tail)
    one.read(9)
    one.flow.ended = True
    one.flow.rewind(0, None)
    assert one.all_of() == one.text


def test_losing_twice_leaves_no_hole(bench: Callable[..., Bench]) -> None:
    """The end is given up, then Redis forgets what came before it."""
    one = bench(spool=1)
    one.flow.secure(one.tail)
    one.read(1)
    one.send()
    one.read(1)
    one.flow.lose(3 * BLOCK, "not kept: test")
    one.send()
    one.flow.rewind(0, None)
    sent = one.send()
    assert sent[-1].end == 3 * BLOCK
    assert one.flow.waiting == 0
