"""Segments: what was built is read, what is damaged is told, and plain zstd prints it."""

import io
import random
import shutil
import struct
import subprocess

import blake3
import msgspec
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from trainarchive import segment
from trainarchive.errors import DamagedError, TrainarchiveError
from trainarchive.frame import Framer, gap_frame
from trainarchive.run import Job, Kind, Lane, LaneReport, RunKey, Source, path_fields
from trainarchive.segment import Entry, Placed

LANE = Lane(RunKey("c", 1), "n1", "t1")
LANES = {LANE.name: LaneReport(Job(1000, user="u"), notes=("a note",))}
SOURCES = {
    "s1": Source("s1", "n1", Kind.TASK, "/w/out.0", rank=0),
    "s2": msgspec.structs.replace(Source("s2", "n1", Kind.NCCL, ""), **path_fields(b"/w/\xff\n")),
}

FRAMES = st.one_of(
    st.builds(
        lambda offset, raw, wall, mono: Framer().frame(offset, raw, wall, mono),
        st.integers(0, 2**52), st.binary(min_size=1, max_size=300),
        st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1),
    ),
    st.builds(
        lambda start, length, reason: gap_frame(start, start + length, 1, 2, reason),
        st.integers(0, 2**52), st.integers(0, 2**40), st.text(min_size=1, max_size=9),
    ),
)  # fmt: skip
ENTRIES = st.lists(st.builds(Entry, st.sampled_from(["s1", "s2", "é\n"]), st.integers(0, 3), FRAMES), max_size=12)


def _order(entry: Entry) -> tuple[str, int, int]:
    return entry.source, entry.generation, entry.frame.offset


def _text(entries: list[Entry]) -> bytes:
    return b"".join(entry.frame.text() for entry in entries if not entry.frame.gap)


def _some(count: int = 6) -> list[Entry]:
    """Frames of two sources, in places that repeat, so that one could be taken for another."""
    return [
        Entry("s1" if number % 2 else "s2", 0, Framer().frame(number * 50, b"%03d" % number + b"line\n" * 9, number, 2))
        for number in range(count)
    ]


def _read(body: bytes) -> list[Entry]:
    return list(segment.frames_of(body, segment.read_index(body, "k")))


def _with_index(text: bytes, *, frames: bytes = b"") -> bytes:
    """Return a segment whose index is ``text``, made by hand."""
    packed = zstandard.ZstdCompressor(write_checksum=True, write_content_size=True).compress(text)
    return _with_packed(packed, frames=frames)


def _with_packed(packed: bytes, *, frames: bytes = b"") -> bytes:
    head = struct.pack("<II", segment.SKIPPABLE, len(packed) + segment.FOOTER_SIZE)
    return frames + head + packed + struct.pack("<QI8s", len(frames), len(packed), segment.MAGIC)


@given(ENTRIES)
def test_round_trip(entries: list[Entry]) -> None:
    """Any entries come back, in order of source, generation and offset, with lanes and sources."""
    body, digest = segment.build(LANES, SOURCES, entries)
    index = segment.read_index(body, "k")
    assert (index.lanes, index.sources) == (LANES, SOURCES)
    found = list(segment.frames_of(body, index))
    assert [_order(entry) for entry in found] == sorted(map(_order, entries))
    key = msgspec.json.encode
    assert sorted(map(key, found)) == sorted(map(key, entries))
    assert digest == blake3.blake3(body).hexdigest()
    assert [placed.end for placed in index.frames] == [entry.frame.end for entry in found]


@given(ENTRIES, st.randoms())
def test_the_order_of_entries_makes_no_difference(entries: list[Entry], chance: random.Random) -> None:
    """The same frames give the same bytes in whatever order they, the lanes and the sources come."""
    first = segment.build(LANES, SOURCES, entries)
    chance.shuffle(entries)
    assert segment.build(dict(reversed(LANES.items())), dict(reversed(SOURCES.items())), iter(entries)) == first


@given(ENTRIES)
def test_a_reader_needs_the_end_and_the_frames(entries: list[Entry]) -> None:
    """From the footer to the index to each frame, by ranges, as readers of a store do."""
    body, _ = segment.build(LANES, SOURCES, entries)
    needed, packed = segment.index_span(body[-segment.FOOTER_SIZE :], "k")
    assert packed < needed <= len(body)
    index = segment.read_index(body[-needed:], "k")
    assert index == segment.read_index(body, "k")
    read = [segment.frame_at(placed, body[placed.at : placed.at + placed.size]) for placed in index.frames]
    assert read == [entry.frame for entry in segment.frames_of(body, index)]


@given(ENTRIES.filter(lambda entries: any(not entry.frame.gap for entry in entries)))
def test_any_zstd_prints_the_text(entries: list[Entry]) -> None:
    """A decoder that knows nothing of segments gives the frames' text in order."""
    body, _ = segment.build(LANES, SOURCES, entries)
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body), read_across_frames=True) as reader:
        assert reader.read() == _text(_read(body))


def test_the_zstd_command_prints_the_text() -> None:
    """``zstd -dc`` prints it, and ``zstd -t`` finds nothing wrong."""
    zstd = shutil.which("zstd")
    if zstd is None:
        pytest.skip("the command is in the package zstd (apt install zstd)")
    entries = [*_some(), Entry("s1", 0, gap_frame(10_000, 20_000, 1, 2, "lost"))]
    for body in (segment.build(LANES, SOURCES, made)[0] for made in (entries, [])):
        printed = subprocess.run([zstd, "-dc"], input=body, capture_output=True, check=True).stdout
        assert printed == _text(_read(body))
        subprocess.run([zstd, "-tq"], input=body, check=True)


def test_every_flipped_byte_is_noticed() -> None:
    """A change of any byte raises DamagedError, from the index or from a text; never another error or text.

    The few bits that zstd itself does not use may pass: then nothing is lost.
    """
    body, _ = segment.build(LANES, SOURCES, _some())
    expected = _texts(body)
    passed = 0
    for at in range(len(body)):
        for mask in (0x01, 0x10, 0x80, 0xFF):
            damaged = bytearray(body)
            damaged[at] ^= mask
            try:
                texts = _texts(bytes(damaged))
            except DamagedError:
                continue
            assert texts == expected
            passed += 1
    assert passed < len(body) * 4 / 100


def _texts(body: bytes) -> list[bytes]:
    return [entry.frame.text() for entry in _read(body)]


def test_no_flip_outside_the_frames_passes_but_zstds_own() -> None:
    """Of all bits of header, index and footer only those pass that change nothing in the index's JSON."""
    body, _ = segment.build(LANES, SOURCES, [])
    expected = segment.read_index(body, "k")
    passed = []
    for at in range(len(body)):
        for bit in range(8):
            damaged = bytearray(body)
            damaged[at] ^= 1 << bit
            try:
                found = segment.read_index(bytes(damaged), "k")
            except DamagedError:
                continue
            assert found == expected
            passed.append(at)
    assert len(passed) < 10
    assert all(8 <= at < len(body) - segment.FOOTER_SIZE for at in passed)


def test_every_truncation_is_noticed() -> None:
    """A body cut anywhere, at its end, its beginning or within, raises DamagedError."""
    body, _ = segment.build(LANES, SOURCES, _some())
    for at in range(len(body)):
        for damaged in (body[:at], body[at + 1 :], body[:at] + body[at + 1 :], body[:at] + body[at + 60 :]):
            with pytest.raises(DamagedError):
                _texts(damaged)


def test_a_lost_frame_is_noticed() -> None:
    """Frames of one size are not taken for each other when one is cut out."""
    entries = [Entry("s1", 0, Framer().frame(number * 5, b"%05d" % number, 1, 2)) for number in range(5)]
    body, _ = segment.build(LANES, SOURCES, entries)
    size = len(entries[0].frame.data)
    assert {len(entry.frame.data) for entry in entries} == {size}
    index = segment.read_index(body, "k")
    with pytest.raises(DamagedError, match="bytes of a segment of"):
        list(segment.frames_of(body[size:], index))


@given(st.binary(max_size=300))
@example(b"")
def test_any_bytes_are_no_segment(body: bytes) -> None:
    """Whatever is read as a segment, the only error is DamagedError."""
    with pytest.raises(DamagedError):
        _read(body)
    with pytest.raises(DamagedError):
        _read(_with_index(body))
    with pytest.raises(DamagedError):
        _read(_with_packed(body))


def _index(**changes: object) -> bytes:
    return msgspec.json.encode({"version": 1, "lanes": {}, "sources": {}, "frames": [], **changes})


def _placed(**changes: object) -> list[object]:
    fields: dict[str, object] = {
        "source": "s", "generation": 0, "offset": 0, "length": 5, "at": 0, "size": 0, "wall_ns": 0, "mono_ns": 0,
        **changes,
    }  # fmt: skip
    return list(fields.values())


@pytest.mark.parametrize(
    "text",
    [
        b'{"x":' + b"[" * 1_000_000,
        b'{"x":' + b'{"x":' * 100_000,
        b"[" * 1_000_000,
        b"null", b"", b"{}", b"\xff", b'"\\ud800"',
        _index(frames=[_placed(at=-1)]),
        _index(frames=[_placed(size=-1)]),
        _index(frames=[_placed(size=1)]),
        _index(frames=[_placed(at=1)]),
        _index(frames=[_placed(size=2**60)]),
        _index(frames=[_placed(offset=2**53)]),
        _index(frames=[_placed(length=-5)]),
        _index(frames=[_placed(length="5")]),
        _index(frames=[_placed()[:-1]]),
        _index(frames=7),
        _index(lanes={"x": {}}),
        _index(sources={"x": {"id": "x", "node": "n", "kind": "no such", "path": ""}}),
        _index(frames=[]).replace(b'"version":1', b'"version":' + b"9" * 6000),
    ],
    ids=lambda text: text[:60].decode(errors="replace"),
)  # fmt: skip
def test_crafted_indexes(text: bytes) -> None:
    """An index with a right checksum and wrong content is damage: no recursion, no overlap, no reach beyond."""
    with pytest.raises(DamagedError):
        _read(_with_index(text))


def test_nothing_may_follow_the_index() -> None:
    """Bytes between the packed index and the footer, counted in both, are damage."""
    packed = zstandard.ZstdCompressor(write_checksum=True, write_content_size=True).compress(_index())
    assert segment.read_index(_with_packed(packed), "k").frames == ()
    with pytest.raises(DamagedError, match="does not decode"):
        segment.read_index(_with_packed(packed + b"x"), "k")


def test_a_newer_format_says_so() -> None:
    """Another version is an error with a hint, even where the rest reads well."""
    with pytest.raises(DamagedError, match=r"format version 2 \(update trainarchive\)"):
        segment.read_index(_with_index(_index(version=2)), "k")


def test_crafted_sizes_get_no_memory() -> None:
    """Sizes beyond the bound, in the footer or in the index's own header, are refused before they are allocated."""
    for size in (segment.MAX_INDEX + 1, 2**40, 2**62):
        greedy = b"\x28\xb5\x2f\xfd\xe4" + size.to_bytes(8, "little") + b"\x01\x00\x00" + b"\0" * 4
        with pytest.raises(DamagedError, match=f"claims {size} bytes"):
            segment.read_index(_with_packed(greedy), "k")
    footer = struct.pack("<QI8s", 0, segment.MAX_INDEX + 1, segment.MAGIC)
    with pytest.raises(DamagedError, match="claims"):
        segment.index_span(footer, "k")
    unknown = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(_index())
    with pytest.raises(DamagedError, match="claims"):
        segment.read_index(_with_packed(unknown), "k")


def test_errors_name_the_object() -> None:
    """The message begins with where the damage is."""
    with pytest.raises(DamagedError, match=r"^live/x\.seg: "):
        segment.read_index(b"x" * 100, "live/x.seg")


def test_too_many_frames_are_refused_when_building(monkeypatch: pytest.MonkeyPatch) -> None:
    """No segment is written that nobody could read."""
    monkeypatch.setattr(segment, "MAX_INDEX", 2000)
    segment.build(LANES, SOURCES, _some(4))
    with pytest.raises(TrainarchiveError, match="too many frames"):
        segment.build(LANES, SOURCES, _some(100))


def test_gaps_and_records_are_small_in_the_index() -> None:
    """A placed frame is an array, without the names of its fields."""
    placed = Placed("s", 0, 1, 2, 3, 4, 5, 6)
    assert msgspec.json.encode(placed) == b'["s",0,1,2,3,4,5,6,""]'
    assert placed.end == 3
