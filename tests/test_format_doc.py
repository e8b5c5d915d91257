"""``docs/format.md`` is enough to read an archive: a reader made from it alone does, and it names every field."""

import base64
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from blake3 import blake3

from trainarchive import manifest, run, sealing, segment
from trainarchive.finishing import finish
from trainarchive.frame import Framer, gap_frame
from trainarchive.run import Job, Kind, Lane, LaneReport, RunKey, Source, path_fields
from trainarchive.settings import Seal, Settings
from trainarchive.store.local import LocalStore
from trainarchive.stream import Append, Outcome, Stream

DOCUMENT = Path(__file__).parent.parent / "docs" / "format.md"

# -- the reader: from here to the next line like this it knows only docs/format.md --------------


def decompressed(data: bytes, most: int) -> bytes:
    """Decompress one zstd frame of at most ``most`` bytes of content."""
    if not 0 <= zstandard.frame_content_size(data) <= most:
        raise ValueError("too much")
    text: bytes = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    return text


def newest_manifest(store: Path, name: str) -> dict[str, Any]:
    """Read the manifest with the highest number of run ``cluster/job.attempt``."""
    books = [
        path for path in (store / "runs" / name / "manifest").iterdir() if re.fullmatch(r"\d{8}.json.zst", path.name)
    ]
    book: dict[str, Any] = json.loads(decompressed(max(books).read_bytes(), 2**30))
    if book.get("version", 1) != 1:
        raise ValueError("another version")
    return book


def index_of(body: bytes) -> list[list[Any]]:
    """Return the frames of a segment's index."""
    start, length, magic = struct.unpack("<QI8s", body[-20:])
    if magic != b"TASEG001" or struct.unpack("<II", body[start : start + 8]) != (0x184D2A5A, length + 20):
        raise ValueError("no segment")
    if len(body) != start + 8 + length + 20:
        raise ValueError("not all of it")
    frames: list[list[Any]] = json.loads(decompressed(body[-20 - length : -20], 2**28))["frames"]
    return frames


def frames_of(book: dict[str, Any], store: Path, source: str, number: int) -> list[tuple[int, int, bytes]]:
    """Return (offset, end, compressed bytes) of all frames of a generation, in the order in which they serve."""
    found = []
    for order, part in enumerate(book["parts"]):
        if any(span[:2] == [source, number] for span in part["spans"]):
            body = (store / part["key"]).read_bytes()
            for of, generation, offset, length, at, size, *rest in index_of(body):
                if [of, generation] == [source, number] and not "".join(rest[2:]):
                    found.append((offset, -length, order, body[at : at + size]))
    found.sort(key=lambda frame: frame[:3])
    return [(offset, offset - negative, data) for offset, negative, _, data in found]


def text_at(position: int, frames: list[tuple[int, int, bytes]]) -> bytes:
    """Return the text from ``position`` to the end of the first good frame that has it."""
    for offset, end, data in frames:
        if offset <= position < end:
            try:
                text = decompressed(data, 2**18)
            except (zstandard.ZstdError, ValueError):
                continue
            if len(text) == end - offset:
                return text[position - offset :]
    raise ValueError(f"damaged at {position}")


def text_of(made: dict[str, Any], frames: list[tuple[int, int, bytes]]) -> Iterator[bytes]:
    """Yield the text of a generation, without its gaps."""
    gaps = sorted((gap["start"], gap["end"]) for gap in made.get("gaps", []))
    position = 0
    while position < made["size"]:
        inside = [end for start, end in gaps if start <= position < end]
        if inside:
            position = inside[0]
        else:
            stop = min([made["size"], *(start for start, _ in gaps if start > position)])
            text = text_at(position, frames)[: stop - position]
            yield text
            position += len(text)


def read_run(store: Path, name: str) -> dict[tuple[str, bytes, int], bytes]:
    """Return the text of every generation of a run, by node, path and number."""
    book, found = newest_manifest(store, name), {}
    for entry in book["sources"]:
        source = entry["source"]
        path = base64.b64decode(source["path_base64"]) if source.get("path_base64") else source["path"].encode()
        for made in entry["generations"]:
            text = b"".join(text_of(made, frames_of(book, store, source["id"], made["number"])))
            if blake3(text).hexdigest() != made["blake3"]:
                raise ValueError(f"{path!r}: not its digest")
            found[source["node"], path, made["number"]] = text
    return found


# -- the tests ---------------------------------------------------------------------------------

RUN = RunKey("c", 7, 1)
SETTINGS = Settings(home=Path("/nonexistent"))


def send(stream: Stream, lane: Lane, source: Source, generation: int, text: bytes) -> None:
    """Put ``text`` into a lane in frames of some 70,000 bytes; a stretch of NUL bytes becomes a gap."""
    framer = Framer()
    frames = []
    at = 0
    for piece in re.findall(rb"\0+|[^\0]{1,70000}", text, re.DOTALL):
        gap = not piece.strip(b"\0")
        frames.append(gap_frame(at, at + len(piece), 9, 9, "lost") if gap else framer.frame(at, piece, 9, 9))
        at = frames[-1].end
    (answer,) = stream.append([Append(lane, source.id, generation, frames)])
    assert answer.outcome is Outcome.OK


@pytest.mark.parametrize("merge_below_mib", [0, 64])
def test_a_reader_made_from_the_document(tmp_path: Path, stream: Stream, merge_below_mib: int) -> None:
    """A run with gaps, generations, overlapping segments and odd names comes out of its directory byte for byte."""
    store = LocalStore(str(tmp_path))
    seal = msgspec.structs.replace(SETTINGS.seal, merge_below_mib=merge_below_mib)
    expected: dict[tuple[str, bytes, int], bytes] = {}
    noise = blake3(b"noise").digest(300_000).replace(b"\0", b"\1")
    for node in ("n1", "n2"):
        lane = Lane(RUN, node, "SLUID1")
        job = Job(1000, nodes="n[1-2]", started=100.0, ended=200.0, exit_code="0:0")
        paths = (b"/logs/rank 0.out", b"/logs/\xff\n.err")
        sources = [
            msgspec.convert(
                {"id": f"{node}-{at}", "node": node, "kind": Kind.TASK, "rank": at, **path_fields(path)}, Source
            )
            for at, path in enumerate(paths)
        ]
        first = b"begin\n" + bytes(500) + noise
        for life in range(2):  # the second time Redis has forgotten what was sealed, and some is sent again
            stream.open(lane, LaneReport(job), sources)
            send(stream, lane, sources[0], 0, first if life == 0 else first[:100_000])
            send(stream, lane, sources[1], life, b"life %d\r\n" % life)
            assert sealing.drain(stream, store, lane, Seal())
            if life == 0:
                for key in stream._connection.client.keys(f"*{node}*"):
                    stream._connection.client.delete(key)
        stream.report(lane, LaneReport(job, drained=True, drained_at=201.0))
        expected |= {
            (node, paths[0], 0): first.replace(b"\0", b""),
            (node, paths[1], 0): b"life 0\r\n",
            (node, paths[1], 1): b"life 1\r\n",
        }
    (book,) = finish(stream, store, RUN, msgspec.structs.replace(SETTINGS, seal=seal))
    assert book.complete
    assert len(book.parts) == (1 if merge_below_mib else 4)
    assert read_run(tmp_path, "c/7.1") == expected


RECORDS = (
    *(manifest.Manifest, manifest.NodeEntry, manifest.SourceEntry, manifest.Generation, manifest.Part, manifest.Span),
    *(run.RunKey, run.Source, run.LaneReport, run.Job, run.Gap, run.Refusal),
    *(segment.Index, segment.Placed),
)


def section_of(name: str) -> str:
    """Return what the document says of a record: from its name in bold, or as a title, to the next."""
    text = DOCUMENT.read_text()
    found = re.search(
        rf"^(?:\*\*{name}\*\*|#+ {name}$)(.*?)(?=^\*\*[A-Z]|^## |^### |\Z)", text, re.MULTILINE | re.DOTALL
    )
    assert found is not None, name
    return found[1]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_field_is_in_the_document(record: type[msgspec.Struct]) -> None:
    """The document names every field of every record, with its default, and none that is not there."""
    told = section_of(record.__name__)
    fields = msgspec.structs.fields(record)
    for field in fields:
        assert f"`{field.encode_name}`" in told
    listed: dict[str, str] = {}
    for row in re.findall(r"^\| .*`.*\|$", told, re.MULTILINE):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        names, _, default = cells[1:4] if cells[0].isdigit() else cells[:3]
        listed |= dict.fromkeys(re.findall(r"`(\w+)`", names), default.strip("`"))
    if not listed:
        return  # too few to be a table
    assert set(listed) == {field.encode_name for field in fields}
    for field in fields:
        default = "" if field.required else json.dumps(msgspec.to_builtins(field.default))
        assert listed[field.encode_name] == {"0.0": "0"}.get(default, default.replace("()", "[]"))


def test_kinds_and_bounds_are_in_the_document() -> None:
    """The document tells every kind of source, and the numbers that the code goes by."""
    text = DOCUMENT.read_text()
    assert re.findall(r"`([\w-]+)`", section_of("Source").partition("`kind`")[2].partition("\n")[0]) == list(Kind)
    for told in (
        f"0x{segment.SKIPPABLE:X}",
        segment.MAGIC.decode(),
        f"the last {segment.FOOTER_SIZE} bytes",
        "262,144",
    ):
        assert told in text
