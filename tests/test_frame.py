"""Frames: any bytes come back, and nothing else does."""

import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from trainarchive.errors import DamagedError, TrainarchiveError
from trainarchive.frame import MAX_OFFSET, MAX_RAW, Frame, Framer, gap_frame

PLAIN = zstandard.ZstdCompressor(level=1, write_checksum=True, write_content_size=True)


def _framed(raw: bytes, offset: int = 7) -> Frame:
    return Framer().frame(offset, raw, 11, 13)


def _swapped(frame: Frame, data: bytes) -> Frame:
    return msgspec.structs.replace(frame, data=data)


@given(st.binary(min_size=1, max_size=2000), st.integers(1, 20), st.integers(0, 2**53 - MAX_RAW))
def test_round_trip(raw: bytes, times: int, offset: int) -> None:
    """Any bytes at any offset come back."""
    raw *= times
    frame = Framer().frame(offset, raw, 1, 2)
    assert frame.text() == raw
    assert (frame.offset, frame.length, frame.end) == (offset, len(raw), offset + len(raw))


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_the_largest_frame(make: Callable[[bytes], bytes | bytearray | memoryview]) -> None:
    """MAX_RAW bytes fit, from any kind of buffer."""
    raw = bytes(range(256)) * (MAX_RAW // 256)
    assert Framer().frame(0, make(raw), 1, 2).text() == raw


@pytest.mark.parametrize("size", [0, MAX_RAW + 1])
def test_other_sizes_are_refused(size: int) -> None:
    """Nothing, and more than a frame holds, cannot be framed."""
    with pytest.raises(ValueError, match="1 to"):
        _framed(b"x" * size)


@given(st.binary(min_size=1, max_size=300), st.integers(0), st.integers(0, 7))
def test_a_flipped_bit(raw: bytes, at: int, bit: int) -> None:
    """A damaged frame raises DamagedError, or the bit was one of the few that zstd does not use; never other text."""
    frame = _framed(raw)
    data = bytearray(frame.data)
    data[at % len(data)] ^= 1 << bit
    try:
        found = _swapped(frame, bytes(data)).text()
    except DamagedError:
        return
    assert found == raw


def test_nearly_every_flipped_bit_is_noticed() -> None:
    """In a frame of bytes that do not compress only the bit that zstd's format calls unused passes."""
    frame = _framed(random.Random(5).randbytes(200))  # noqa: S311 - bytes that do not compress, no secrets
    passed = []
    for at in range(len(frame.data)):
        for bit in range(8):
            data = bytearray(frame.data)
            data[at] ^= 1 << bit
            try:
                _swapped(frame, bytes(data)).text()
            except DamagedError:
                continue
            passed.append((at, bit))
    assert passed == [(4, 4)]


@given(st.binary(min_size=1, max_size=300), st.integers(0), st.binary(min_size=1, max_size=9))
def test_cut_or_longer(raw: bytes, at: int, more: bytes) -> None:
    """Neither a part of a frame nor a frame with something behind it is taken for it."""
    frame = _framed(raw)
    for data in (frame.data[: at % len(frame.data)], frame.data + more, more + frame.data, frame.data * 2):
        with pytest.raises(DamagedError):
            _swapped(frame, data).text()


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    """Whatever stands in the place of a frame, the only error is DamagedError."""
    with pytest.raises(DamagedError):
        Frame(0, 5, 1, 2, data).text()


@pytest.mark.parametrize(
    "data",
    [
        zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(b"hello"),
        zstandard.ZstdCompressor(write_checksum=False, write_content_size=True).compress(b"hello"),
        b"\x5a\x2a\x4d\x18\x00\x00\x00\x00",
        PLAIN.compress(b"hell"),
        PLAIN.compress(b"hello!"),
        PLAIN.compress(b""),
    ],
    ids=["no size", "no checksum", "skippable", "shorter", "longer", "empty"],
)
def test_other_zstd_data(data: bytes) -> None:
    """What is valid zstd, but not the frame of these five bytes, is damage."""
    with pytest.raises(DamagedError):
        Frame(0, 5, 1, 2, data).text()


@pytest.mark.parametrize("length", [-1, 0, MAX_RAW + 1, 2**40])
def test_lengths_that_no_frame_has(length: int) -> None:
    """A frame that announces too much, and holds it, is damage too."""
    data = PLAIN.compress(b"x" * min(max(length, 0), 2 * MAX_RAW))
    with pytest.raises(DamagedError):
        Frame(0, length, 1, 2, data).text()


GREEDY = """
    import resource, sys
    from trainarchive.errors import DamagedError, TrainarchiveError
    from trainarchive.frame import Frame
    with open("/proc/self/statm") as pages:
        limit = int(pages.read().split()[0]) * 4096 + 100_000_000
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    size = 1 << int(sys.argv[1])
    data = b"\\x28\\xb5\\x2f\\xfd\\xe4" + size.to_bytes(8, "little") + b"\\x01\\x00\\x00" + bytes(4)
    try:
        Frame(0, size if sys.argv[2] == "same" else 5, 1, 2, data).text()
    except DamagedError as error:
        print(error)
"""


@pytest.mark.parametrize("size", ["29", "40", "62"])
@pytest.mark.parametrize("length", ["same", "other"])
def test_a_header_that_claims_much_gets_no_memory(size: str, length: str) -> None:
    """With 100 MB left, a header that claims 512 MB and more is damage, not want of memory."""
    program = [sys.executable, "-c", textwrap.dedent(GREEDY), size, length]
    ended = subprocess.run(program, capture_output=True, text=True, check=True)
    assert f"claims {1 << int(size)} bytes" in ended.stdout


def test_a_gap_has_no_text() -> None:
    """A gap tells which bytes are lost, and why."""
    gap = gap_frame(5, 2**40, 1, 2, "disk full")
    assert (gap.offset, gap.end, gap.data) == (5, 2**40, b"")
    with pytest.raises(DamagedError, match="5-1099511627776 are a gap: disk full"):
        gap.text()


@pytest.mark.parametrize(("start", "end"), [(-1, 5), (6, 5), (0, MAX_OFFSET + 1), (2**60, 2**60 + 1)])
def test_offsets_that_lua_cannot_hold_are_refused(start: int, end: int) -> None:
    """No frame and no gap is made that could not travel; the error is one that people can read."""
    with pytest.raises(TrainarchiveError, match="offsets are 0 to"):
        gap_frame(start, end, 1, 2, "lost")
    with pytest.raises(TrainarchiveError, match="offsets are 0 to"):
        Framer().frame(start if start < 0 else MAX_OFFSET - 1, b"xx", 1, 2)
    assert gap_frame(0, MAX_OFFSET, 1, 2, "all").end == MAX_OFFSET


def test_threads_read_at_once() -> None:
    """Each thread has its own decompressor."""
    frames = [(_framed(raw), raw) for raw in (bytes([number]) * 50_000 for number in range(16))]
    wrong: list[int] = []

    def read() -> None:
        for turn in range(200):
            frame, raw = frames[turn % len(frames)]
            if frame.text() != raw:
                wrong.append(turn)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_same_bytes_make_the_same_frame() -> None:
    """A framer carries nothing over from one frame to the next."""
    framer = Framer()
    first = framer.frame(0, b"one two three" * 99, 1, 2)
    framer.frame(0, b"other", 1, 2)
    assert framer.frame(0, b"one two three" * 99, 1, 2) == first == Framer().frame(0, b"one two three" * 99, 1, 2)
