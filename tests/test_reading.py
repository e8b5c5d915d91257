"""The reader: names to runs, and runs to bytes, from the log Redis, level-0 segments and parts."""

import contextlib
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from trainarchive import keys, manifest, opening, sealing, segment
from trainarchive.coverage import Text
from trainarchive.errors import DamagedError, NotFoundError, TrainarchiveError, UnavailableError
from trainarchive.finishing import FINISHED
from trainarchive.frame import Frame, Framer, gap_frame
from trainarchive.manifest import Generation, Manifest, NodeEntry, Part, SourceEntry, Span
from trainarchive.reading import DAMAGED, BadReferenceError, RunView, Wanted, find, passed_over, recent, unseen
from trainarchive.reading.objects import THREADS, Objects
from trainarchive.reading.pieces import Copies
from trainarchive.reading.reference import parse
from trainarchive.run import Gap, Job, Kind, Lane, LaneReport, Refusal, RunKey, Source
from trainarchive.segment import Entry
from trainarchive.settings import Seal
from trainarchive.store.contract import ObjectInfo, Store
from trainarchive.store.local import LocalStore
from trainarchive.store.memory import MemoryStore
from trainarchive.stream import Append, Outcome, Stream

RUN = RunKey("c", 123)
TOKEN = "t100"
LIMITS = Seal(segment_mib=1)


def source(name: str = "n1-a", node: str = "n1", **fields: object) -> Source:
    """Make a source; its path follows its name unless one is given."""
    return msgspec.convert({"id": name, "node": node, "kind": "task", "path": f"/logs/{name}.out", **fields}, Source)


def entries(name: str, text: bytes, *, start: int = 0, generation: int = 0, cut: int = 1000) -> list[Entry]:
    """Cut ``text``, which stands at ``start``, into frames."""
    framer = Framer()
    return [
        Entry(name, generation, framer.frame(start + at, text[at : at + cut], 1_000 + at, 1_000 + at))
        for at in range(0, len(text), cut)
    ]


def lane(run: RunKey = RUN, node: str = "n1", token: str = TOKEN) -> Lane:
    """Make a lane of a run's first generation's key."""
    return Lane(RunKey(run.cluster, run.job_id, run.attempt), node, token)


def report(*, started: float = 100.0, drained: bool = False, ended: float = 0.0) -> LaneReport:
    """Make a lane's report."""
    return LaneReport(Job(1000, "ada", started=started, ended=ended), drained=drained)


def put_segment(store: Store, of: Lane, sources: Iterable[Source], frames: Sequence[Entry], number: int = 1) -> str:
    """Store a level-0 segment of a lane, as sealing does, and return its key."""
    body, digest = segment.build({of.name: report()}, {each.id: each for each in sources}, frames)
    key = keys.segment_key(of, "epoch", f"{number}-0", f"{number}-9", digest)
    store.put(key, body)
    return key


def generation(text: bytes, *, number: int = 0, gaps: tuple[Gap, ...] = ()) -> Generation:
    """Make the entry of a generation whose present bytes are ``text``."""
    size = len(text) + sum(gap.end - gap.start for gap in gaps)
    return Generation(number, size, blake3(text).hexdigest(), 1, 2, gaps)


def put_manifest(  # noqa: PLR0913 (a manifest has many fields, and tests name the ones they mean)
    store: Store,
    run: RunKey,
    sources: Sequence[SourceEntry],
    parts: Sequence[str],
    *,
    number: int = 1,
    token: str = TOKEN,
    started: float = 100.0,
    replaces: Sequence[str] = (),
    aliases: Sequence[str] = (),
) -> Manifest:
    """Write a run's manifest; every part is said to hold all of every generation."""
    spans = tuple(Span(entry.source.id, made.number, 0, made.size) for entry in sources for made in entry.generations)
    nodes = sorted({entry.source.node for entry in sources} or {"n1"})
    book = Manifest(
        number=number,
        run=run,
        written=200.0,
        complete=True,
        state="COMPLETED",
        state_from="epilog",
        started=started,
        ended=started + 50,
        aliases=tuple(aliases),
        nodes=tuple(NodeEntry(node, "drained", (token,), report(drained=True)) for node in nodes),
        sources=tuple(sources),
        parts=tuple(Part(key, 0, 1, "", spans) for key in parts),
        replaces=tuple(replaces),
    )
    assert store.put_if_absent(keys.manifest_key(run, number), manifest.encode(book))
    for alias in aliases:
        store.put(keys.alias_key(run.cluster, alias, run), b"")
    return book


def archive(store: Store, run: RunKey = RUN, text: bytes = b"hello\n", token: str = TOKEN, **more: object) -> None:
    """Store a finished run of one source."""
    one = source(**more)  # type: ignore[arg-type] # fields of Source
    key = put_segment(store, lane(run, token=token), [one], entries("n1-a", text))
    put_manifest(store, run, [SourceEntry(one, (generation(text),))], [key], token=token)


def content(view: RunView, name: str = "n1-a", number: int = 0) -> tuple[bytes, list[Gap]]:
    """Read all of a generation: its bytes, and its gaps."""
    items = list(view.chunks(name, number))
    return b"".join(item for item in items if isinstance(item, bytes)), [
        item for item in items if isinstance(item, Gap)
    ]


def send(stream: Stream, of: Lane, sources: Sequence[Source], frames: Sequence[Entry]) -> None:
    """Put frames into a lane as a collector does."""
    stream.open(of, report(), sources)
    for entry in frames:
        (answer,) = stream.append([Append(of, entry.source, entry.generation, [entry.frame])])
        assert answer.outcome is Outcome.OK


class Passing:
    """A store that hands every call on, for tests that watch or disturb one of them."""

    def __init__(self, inner: Store) -> None:
        """Hand on to ``inner``."""
        self.inner = inner
        self.ranges: list[tuple[str, int, int]] = []

    def put(self, key: str, body: bytes) -> None:
        """Hand on."""
        self.inner.put(key, body)

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """Hand on."""
        return self.inner.put_if_absent(key, body)

    def get(self, key: str) -> bytes:
        """Hand on."""
        return self.inner.get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Hand on, and remember."""
        self.ranges.append((key, start, length))
        return self.inner.get_range(key, start, length)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Hand on."""
        return self.inner.list(prefix)

    def children(self, prefix: str) -> Iterator[str]:
        """Hand on."""
        return self.inner.children(prefix)

    def delete(self, key: str) -> None:
        """Hand on."""
        self.inner.delete(key)

    def presign(self, key: str, seconds: int) -> str:
        """Hand on."""
        return self.inner.presign(key, seconds)


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("123", (123, "", "", None, None)),
        (" 123 ", (123, "", "", None, None)),
        ("111_2", (111, "", "111_2", None, None)),
        ("111_002", (111, "", "111_2", None, None)),
        ("200+1", (200, "", "200+1", None, None)),
        ("c/123", (123, "c", "", None, None)),
        ("c/111_2", (111, "c", "111_2", None, None)),
        ("c/123.0", (123, "c", "", 0, 0)),
        ("c/123.2~1", (123, "c", "", 2, 1)),
    ],
)
def test_forms_of_names(text: str, expected: tuple[object, ...]) -> None:
    """Every documented form of a job's name is understood."""
    name = parse(text)
    assert (name.job_id, name.cluster, name.alias, name.attempt, name.generation) == expected


@pytest.mark.parametrize("text", ["", "abc", "123.", "-1", "1_2_3", "../1", ".x/1", "c/", "1e3", "1\n2", "²", "c/1.0~"])
def test_no_names(text: str) -> None:
    """What names no job is refused with the forms that do, as wrong usage."""
    with pytest.raises(BadReferenceError, match="111_2") as caught:
        parse(text)
    assert caught.value.exit_status == 2


def test_a_step_is_no_job() -> None:
    """``123.1``, a step to Slurm, is refused with a word on --attempt."""
    with pytest.raises(BadReferenceError, match="123 --attempt 1"):
        parse("123.1")


@given(st.text(max_size=30))
def test_any_text_as_a_name(text: str) -> None:
    """No text does anything else than name a job or be refused."""
    with contextlib.suppress(BadReferenceError):
        assert parse(text).job_id >= 0


@given(st.integers(0, 10**9), st.integers(0, 99), st.integers(0, 99))
def test_run_keys_are_names(job: int, attempt: int, generation: int) -> None:
    """What a run key is written as names exactly that run."""
    key = RunKey("c-1", job, attempt, generation)
    name = parse(f"c-1/{job}.{attempt}~{generation}")
    assert RunKey(name.cluster, name.job_id, name.attempt or 0, name.generation or 0) == key
    assert name.exact


# -- bytes -------------------------------------------------------------------------------------


def test_archived_bytes() -> None:
    """An archived generation comes out byte for byte, over several objects, its own and no other's."""
    store = MemoryStore()
    one, other = source(), source("n1-b")
    text, noise = bytes(range(256)) * 40, b"noise" * 2000
    first = put_segment(store, lane(), [one, other], [*entries("n1-a", text[:5000]), *entries("n1-b", noise)], 1)
    second = put_segment(store, lane(), [one], entries("n1-a", text[5000:], start=5000), 2)
    put_manifest(
        store, RUN, [SourceEntry(one, (generation(text),)), SourceEntry(other, (generation(noise),))], [first, second]
    )
    (view,) = find(store, None, "123")
    assert not view.running
    assert view.notes == ()
    assert content(view) == (text, [])
    assert content(view, "n1-b") == (noise, [])


def test_only_ranges_of_the_source_are_read(tmp_path: Path) -> None:
    """Reading one source of a big segment costs its bytes, and not the object's."""
    store = Passing(LocalStore(str(tmp_path)))
    framer = Framer()
    noise = [
        Entry("n1-c", 0, framer.frame(at, blake3(b"%d" % at).digest(100_000), 1, 1))
        for at in range(0, 5_000_000, 100_000)
    ]
    one = source("n1-a")
    key = put_segment(store, lane(), [source("n1-c"), one], [*noise, *entries("n1-a", b"x" * 5000)])
    put_manifest(store, RUN, [SourceEntry(one, (generation(b"x" * 5000),))], [key])
    (view,) = find(store, None, "123")
    assert content(view) == (b"x" * 5000, [])
    read_bytes = sum(length for _, _, length in store.ranges)
    assert read_bytes < 200_000
    assert len(store.ranges) == 2, "one for the index, one for neighbouring frames together"


def test_generations_apart() -> None:
    """Generations of one source are read apart."""
    store = MemoryStore()
    one = source()
    key = put_segment(store, lane(), [one], [*entries("n1-a", b"old"), *entries("n1-a", b"new text", generation=1)])
    put_manifest(store, RUN, [SourceEntry(one, (generation(b"old"), generation(b"new text", number=1)))], [key])
    (view,) = find(store, None, "123")
    assert content(view)[0] == b"old"
    assert content(view, number=1)[0] == b"new text"
    with pytest.raises(NotFoundError):
        list(view.chunks("n1-a", 2))


def test_gaps_have_their_reason() -> None:
    """Lost bytes come as a Gap with the node's reason, in their place."""
    store = MemoryStore()
    one = source()
    lost = Gap(0, 3, 10, "spool full")
    frames = [
        *entries("n1-a", b"abc"),
        Entry("n1-a", 0, gap_frame(3, 10, 1, 1, "spool full")),
        *entries("n1-a", b"def", start=10),
    ]
    key = put_segment(store, lane(), [one], frames)
    put_manifest(store, RUN, [SourceEntry(one, (generation(b"abcdef", gaps=(lost,)),))], [key])
    (view,) = find(store, None, "123")
    assert list(view.chunks("n1-a", 0)) == [b"abc", lost, b"def"]


def test_damaged_frame_is_told_and_the_rest_is_given() -> None:
    """Flipped bits in one frame cost that frame only, and its place and nature are told."""
    store = MemoryStore()
    one = source()
    text = bytes(range(250)) * 12
    key = put_segment(store, lane(), [one], entries("n1-a", text))
    body = bytearray(store.get(key))
    index = segment.read_index(bytes(body), key)
    body[index.frames[1].at + index.frames[1].size // 2] ^= 0xFF
    store.put(key, bytes(body))
    put_manifest(store, RUN, [SourceEntry(one, (generation(text),))], [key])
    (view,) = find(store, None, "123")
    got, gaps = content(view)
    assert got == text[:1000] + text[2000:]
    assert [(gap.start, gap.end) for gap in gaps] == [(1000, 2000)]
    assert gaps[0].reason.startswith(DAMAGED)


def test_another_copy_stands_in_for_a_damaged_one() -> None:
    """Where two objects hold the same bytes, damage in one is no loss."""
    store = MemoryStore()
    one = source()
    text = bytes(range(250)) * 12
    first = put_segment(store, lane(), [one], entries("n1-a", text), 1)
    second = put_segment(store, lane(), [one], entries("n1-a", text[500:], start=500), 2)
    body = bytearray(store.get(first))
    index = segment.read_index(bytes(body), first)
    body[index.frames[1].at + index.frames[1].size // 2] ^= 0xFF
    store.put(first, bytes(body))
    put_manifest(store, RUN, [SourceEntry(one, (generation(text),))], [first, second])
    (view,) = find(store, None, "123")
    assert content(view) == (text, [])


@pytest.mark.parametrize("what", ["gone", "cut", "garbage"])
def test_a_lost_object_is_a_gap(what: str) -> None:
    """An object that is gone for good, cut off or garbage is told as damage; the others are read."""
    store = MemoryStore()
    one = source()
    first = put_segment(store, lane(), [one], entries("n1-a", b"a" * 1500), 1)
    second = put_segment(store, lane(), [one], entries("n1-a", b"b" * 1500, start=1500), 2)
    put_manifest(store, RUN, [SourceEntry(one, (generation(b"a" * 1500 + b"b" * 1500),))], [first, second])
    if what == "gone":
        store.delete(first)
    else:
        store.put(first, store.get(first)[:40] if what == "cut" else b"\0" * 4000)
    (view,) = find(store, None, "123")
    got, gaps = content(view)
    assert got == b"b" * 1500
    assert [(gap.start, gap.end) for gap in gaps] == [(0, 1500)]
    assert gaps[0].reason.startswith(DAMAGED)


def test_a_part_replaced_meanwhile() -> None:
    """A reader whose segments are compacted away under it goes on with what replaced them."""
    store = MemoryStore()
    one = source()
    text = blake3(b"seed").digest(600_000)
    frames = entries("n1-a", text, cut=100_000)
    old = [put_segment(store, lane(), [one], frames[:3], 1), put_segment(store, lane(), [one], frames[3:], 2)]
    put_manifest(store, RUN, [SourceEntry(one, (generation(text),))], old)
    (view,) = find(store, None, "123")
    chunks = view.chunks("n1-a", 0)
    first = next(chunks)
    body, digest = segment.build({}, {"n1-a": one}, frames)
    part = keys.part_key(RUN, digest)
    store.put(part, body)
    put_manifest(store, RUN, [SourceEntry(one, (generation(text),))], [part], number=2, replaces=old)
    for key in old:
        store.delete(key)
    assert isinstance(first, bytes)
    rest = [item for item in chunks if isinstance(item, bytes)]
    assert b"".join([first, *rest]) == text


def test_parts_replaced_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader goes on however often what it reads is replaced; only what nothing replaces is lost."""
    monkeypatch.setattr("trainarchive.reading.pieces.WINDOW", 0)
    store = MemoryStore()
    text = blake3(b"seed").digest(800_000)
    frames = entries("n1-a", text, cut=100_000)
    old = ""

    def replace(number: int) -> None:
        nonlocal old
        body, digest = segment.build({}, {"n1-a": source(rank=number)}, frames)
        part = keys.part_key(RUN, digest)
        store.put(part, body)
        put_manifest(store, RUN, [SourceEntry(source(), (generation(text),))], [part], number=number)
        if old:
            store.delete(old)
        old = part

    replace(1)
    (view,) = find(store, None, "123")
    chunks = view.chunks("n1-a", 0)
    got = [next(chunks)]
    for number in range(2, 6):
        replace(number)
        got.append(next(chunks))
    assert b"".join(item for item in got if isinstance(item, bytes)) == text[:500_000]
    store.delete(old)
    (gap,) = chunks
    assert isinstance(gap, Gap)
    assert (gap.start, gap.end) == (500_000, 800_000)
    assert gap.reason.startswith(DAMAGED)


TEXT = bytes(range(256)) * 2


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.integers(0, 500), st.integers(1, 200), st.sampled_from(["text", "text", "gap", "bad"])),
        max_size=12,
    ),
    st.integers(0, 100),
)
def test_pieces_in_any_arrangement(layout: list[tuple[int, int, str]], start: int) -> None:
    """However pieces overlap, leave holes, are gaps or are damaged: each byte once, in order, or in a gap."""
    framer = Framer()
    copies = Copies(Text(("n1-a", 3)), Objects(MemoryStore()))
    end = 0
    have: set[int] = set()
    for offset, length, kind in layout:
        raw = TEXT[offset : min(offset + length, len(TEXT))]
        frame = framer.frame(offset, raw, 1, 1)
        if kind == "gap":
            frame = gap_frame(offset, frame.end, 1, 1, "lost")
        elif kind == "bad":
            frame = Frame(offset, frame.length, 1, 1, frame.data[:-1])
        else:
            have |= set(range(offset, frame.end))
        copies.add_waiting(frame)
        end = max(end, frame.end)
    position = start
    last: Gap | None = None
    for item in copies.read(start, None):
        if isinstance(item, Gap):
            assert item.start == position < item.end
            assert not have & set(range(item.start, item.end))
            assert last is None or last.reason != item.reason, "gaps that touch and have one reason come as one"
            position, last = item.end, item
        else:
            assert item == TEXT[position : position + len(item)]
            assert item
            assert set(range(position, position + len(item))) <= have
            position, last = position + len(item), None
    assert position == max(start, end)


def test_a_frame_that_claims_a_gigabyte() -> None:
    """A compressed bomb in the place of a frame is refused before any memory is taken for it."""
    bomb = Framer()._compressor.compress(b"\0" * (1 << 28))
    tracemalloc.start()
    try:
        copies = Copies(Text(("n1-a", 0)), Objects(MemoryStore()))
        copies.add_waiting(Frame(0, 1000, 1, 1, bomb))
        (gap,) = copies.read(0, None)
        assert isinstance(gap, Gap)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_memory_does_not_follow_size(tmp_path: Path) -> None:
    """Reading 64 MB of text that hardly compresses takes a few windows of memory."""
    store = LocalStore(str(tmp_path))
    one = source()
    block = blake3(b"seed").digest(250_000)
    framer = Framer()
    listed = [
        put_segment(
            store,
            lane(),
            [one],
            [Entry("n1-a", 0, framer.frame(at, block, 1, 1)) for at in range(start, start + 8_000_000, 250_000)],
            number,
        )
        for number, start in enumerate(range(0, 64_000_000, 8_000_000))
    ]
    put_manifest(store, RUN, [SourceEntry(one, (Generation(0, 64_000_000, "x"),))], listed)
    (view,) = find(store, None, "123")
    tracemalloc.start()
    try:
        assert sum(len(item) for item in view.chunks("n1-a", 0) if isinstance(item, bytes)) == 64_000_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16_000_000


def test_memory_does_not_follow_the_number_of_frames(tmp_path: Path) -> None:
    """Of a text in very many small frames a row each is held, and only a few indexes at once."""
    store = LocalStore(str(tmp_path))
    framer, each, count = Framer(), 5_000, 4
    frame = framer.frame(0, b"line\n", 1, 1)
    listed = [
        put_segment(
            store,
            lane(),
            [source()],
            [
                Entry("n1-a", 0, msgspec.structs.replace(frame, offset=5 * at))
                for at in range(number * each, (number + 1) * each)
            ],
            number,
        )
        for number in range(count)
    ]
    put_manifest(store, RUN, [SourceEntry(source(), (Generation(0, 5 * each * count, "x"),))], listed)
    (view,) = find(store, None, "123")
    tracemalloc.start()
    try:
        assert sum(len(item) for item in view.chunks("n1-a", 0) if isinstance(item, bytes)) == 5 * each * count
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200 * each * count


def test_indexes_are_fetched_a_few_at_a_time() -> None:
    """Of many segments only the next few indexes are fetched before the first is used, and all come in order."""
    store = Passing(MemoryStore())
    listed = [put_segment(store, lane(), [source()], entries("n1-a", b"x" * at), at) for at in range(1, 40)]
    store.delete(listed[3])
    store.put(listed[5], b"rubbish")
    found = Objects(store).each(listed)
    assert next(found)[0] == listed[0]
    assert len(store.ranges) <= THREADS
    rest = list(found)
    assert [key for key, _ in rest] == listed[1:]
    assert isinstance(rest[2][1], NotFoundError)
    assert isinstance(rest[4][1], DamagedError)


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many small segments only some are kept, and what was let go is read again when it is needed."""
    monkeypatch.setattr("trainarchive.reading.objects.MAX_TAILS", 5000)
    monkeypatch.setattr("trainarchive.reading.objects.MAX_FRAMES", 20)
    store = MemoryStore()
    one, text = source(), blake3(b"seed").digest(50_000)
    frames = entries("n1-a", text)
    listed = [put_segment(store, lane(), [one], frames[at : at + 2], at) for at in range(0, 50, 2)]
    put_manifest(store, RUN, [SourceEntry(one, (generation(text),))], listed)
    (view,) = find(store, None, "123")
    assert content(view) == content(view) == (text, [])
    objects = view._objects
    assert sum(map(len, objects._tails.values())) == objects._tail_bytes <= 5000
    assert sum(made.count for made in objects._contents.values()) == objects._frames <= 20


# -- running -----------------------------------------------------------------------------------


def test_live_bytes(stream: Stream) -> None:
    """Of a running job come the sealed bytes and those that still wait in Redis, each once."""
    store = MemoryStore()
    one = source(rank=0)
    text = bytes(range(256)) * 30
    frames = entries("n1-a", text)
    send(stream, lane(), [one], frames[:4])
    assert sealing.seal(stream, store, lane(), LIMITS) is not None
    send(stream, lane(), [one], frames[4:])
    (view,) = find(store, stream, "123")
    assert view.running
    assert view.manifest is None
    assert view.state == "RUNNING"
    assert view.notes == ()
    assert [made.size for entry in view.sources for made in entry.generations] == [len(text)]
    assert [node.state for node in view.nodes] == ["open"]
    assert content(view) == (text, [])
    stream.report(lane(), report(drained=True))
    (view,) = find(store, stream, "123")
    assert (view.state, [node.state for node in view.nodes]) == ("ENDING", ["drained"])


def test_bytes_that_come_after_finding(stream: Stream) -> None:
    """What a running job writes between the finding and the reading is read too."""
    store = MemoryStore()
    frames = entries("n1-a", b"line\n" * 1000)
    send(stream, lane(), [source()], frames[:2])
    (view,) = find(store, stream, "123")
    send(stream, lane(), [source()], frames[2:4])
    sealing.drain(stream, store, lane(), LIMITS)
    send(stream, lane(), [source()], frames[4:])
    assert content(view) == (b"line\n" * 1000, [])


class SealsAtListing(Passing):
    """A store in which a seal happens just before or just after each listing of segments."""

    def __init__(self, inner: Store, stream: Stream, moment: str) -> None:
        """Seal what waits in ``stream``; ``moment`` is before or after."""
        super().__init__(inner)
        self.stream = stream
        self.moment = moment
        self.armed = False

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Hand on, and seal."""
        armed = self.armed and prefix.startswith(keys.LIVE)
        if armed and self.moment == "before":
            sealing.drain(self.stream, self.inner, lane(), LIMITS)
        found = [*super().list(prefix)]
        if armed and self.moment == "after":
            sealing.drain(self.stream, self.inner, lane(), LIMITS)
        return iter(found)


@pytest.mark.parametrize("when", ["finding", "reading"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_seal_between_looking_and_listing_loses_nothing(stream: Stream, when: str, moment: str) -> None:
    """Bytes that go from Redis to the store while a reader looks at one after the other are seen."""
    store = SealsAtListing(MemoryStore(), stream, moment)
    text = b"line\n" * 1000
    send(stream, lane(), [source()], entries("n1-a", text))
    store.armed = when == "finding"
    (view,) = find(store, stream, "123")
    store.armed = True
    assert content(view) == (text, [])
    status = stream.status(lane())
    assert status is not None
    assert status.entries == 0, "the seal did happen"


def test_late_bytes_of_an_archived_run(stream: Stream) -> None:
    """Bytes that a healed node sends after the manifest are read with the archived ones."""
    store = MemoryStore()
    archive(store, text=b"a" * 1500)
    send(stream, lane(), [source()], [])
    (view,) = find(store, stream, "123")
    assert content(view)[0] == b"a" * 1500
    put_segment(store, lane(), [source()], entries("n1-a", b"b" * 500, start=1500), 7)
    (view,) = find(store, stream, "123")
    assert view.running
    assert view.key == RUN
    assert content(view) == (b"a" * 1500 + b"b" * 500, [])
    assert [made.blake3 for entry in view.sources for made in entry.generations] == [""], "the digest is of less"


def test_a_node_that_never_ends_does_not_run_for_ever(stream: Stream) -> None:
    """A manifest was written without it and nothing came since: the run is over; later bytes change that."""
    store = MemoryStore()
    archive(store, complete=False)
    silent = lane(node="n2")
    stream.open(silent, report(), [])
    now, _ = stream.now()
    (view,) = find(store, stream, "123")
    assert view.running
    stream.control(silent, {FINISHED: f"open {now + 1:.6f}"})
    (view,) = find(store, stream, "123")
    assert not view.running
    stream.control(silent, {FINISHED: f"open {now - 10:.6f}"})
    send(stream, silent, [source("n2-a", "n2")], entries("n2-a", b"late"))
    (view,) = find(store, stream, "123")
    assert view.running


def test_without_redis(tmp_path: Path) -> None:
    """Without Redis archived runs read as ever, and running ones say that bytes may be missing."""
    store = MemoryStore()
    archive(store)
    put_segment(store, lane(RunKey("c", 124)), [source()], entries("n1-a", b"sealed"))
    away = Stream(f"unix://{tmp_path}/nothing.sock", timeout_s=1.0, max_pending=1)
    (view,) = find(store, away, "123")
    assert content(view)[0] == b"hello\n"
    assert view.notes == ()
    (view,) = find(store, away, "124")
    assert view.running
    assert content(view)[0] == b"sealed"
    (note,) = view.notes
    assert "may be missing" in note
    assert "does not answer" in view.unanswered
    with pytest.raises(UnavailableError, match="whether it runs is not known"):
        find(store, away, "125")
    with pytest.raises(NotFoundError, match="no worker is running"):
        find(store, None, "125")
    away.close()


def test_segments_that_cannot_be_read(stream: Stream) -> None:
    """Of a running job's segments each that cannot be read is told by its key, and the others are read."""
    store = MemoryStore()
    send(stream, lane(), [source()], [])
    first, second, third = (
        put_segment(store, lane(), [source()], entries("n1-a", b"x" * 10, start=10 * number), number + 1)
        for number in range(3)
    )
    store.put(first, b"rubbish")
    store.put(third, store.get(third)[:-1])
    (view,) = find(store, stream, "123")
    assert [what.partition(": ")[0] for what in view.damaged] == [first, third]
    assert view.notes == view.damaged
    got, (gap,) = content(view)
    assert (got, gap.start, gap.end) == (b"x" * 10, 0, 10)
    assert gap.reason.startswith(DAMAGED)
    assert second not in gap.reason


def test_a_late_segment_that_cannot_be_read() -> None:
    """Of an archived run, too, a segment that no manifest lists and nobody can read is told."""
    store = MemoryStore()
    archive(store)
    bad = put_segment(store, lane(), [source()], entries("n1-a", b"late", start=6), 9)
    store.put(bad, b"rubbish")
    (view,) = find(store, None, "123")
    assert not view.running
    assert [what.partition(": ")[0] for what in view.damaged] == [bad]
    assert content(view) == (b"hello\n", [])


def test_a_manifest_that_cannot_be_read() -> None:
    """A run whose manifest is rubbish is found, with what its segments tell, and hides no other run of the job."""
    store = MemoryStore()
    for attempt in (0, 1):
        archive(store, RunKey("c", 123, attempt), b"attempt %d" % attempt)
    store.put(keys.manifest_key(RUN, 1), b"rubbish")
    (view,) = find(store, None, "123")
    assert (str(view.key), view.damaged) == ("c/123.1", ())
    first, second = find(store, None, "123", Wanted(all_attempts=True))
    assert (first.state, first.running, content(first)[0]) == ("DAMAGED", False, b"attempt 0")
    assert keys.manifest_key(RUN, 1) in first.damaged[0]
    assert content(second)[0] == b"attempt 1"


class Unavailable(Passing):
    """A store that does not answer for ranges."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Refuse."""
        raise UnavailableError("no answer", where=f"{key} {start} {length}")


def test_a_store_that_does_not_answer_is_no_gap() -> None:
    """That the store does not answer is an error, and never passed off as missing bytes."""
    store = MemoryStore()
    archive(store)
    (view,) = find(Unavailable(store), None, "123")
    with pytest.raises(UnavailableError):
        content(view)


@pytest.mark.parametrize("liar", ["n2", "a1"])
def test_a_lane_cannot_speak_for_another_node(stream: Stream, liar: str) -> None:
    """What one node's lane says of another node's source is not believed, whichever of them is looked at first."""
    store = MemoryStore()
    send(stream, lane(), [source(rank=0)], entries("n1-a", b"true\n"))
    send(stream, lane(node=liar), [source(rank=7)], entries("n1-a", b"a lie that is longer\n"))
    (view,) = find(store, stream, "123")
    assert [(entry.source.node, entry.source.rank) for entry in view.sources] == [("n1", 0)]
    assert content(view) == (b"true\n", [])


# -- finding -----------------------------------------------------------------------------------


def keys_of(views: Iterable[RunView]) -> list[str]:
    """Return the run keys as text."""
    return [str(view.key) for view in views]


def test_newest_attempt_and_generation() -> None:
    """The newest attempt is meant unless another is asked for, and of an attempt the newest generation."""
    store = MemoryStore()
    for attempt, made in ((0, 0), (0, 1), (1, 0)):
        archive(store, RunKey("c", 123, attempt, made), b"%d %d" % (attempt, made), token=f"T{attempt}{made}")
    assert keys_of(find(store, None, "123")) == ["c/123.1"]
    assert keys_of(find(store, None, "123", Wanted(attempt=0))) == ["c/123.0~1"]
    assert keys_of(find(store, None, "123", Wanted(all_attempts=True))) == ["c/123.0~1", "c/123.1"]
    assert keys_of(find(store, None, "c/123.0")) == ["c/123.0"]
    assert content(find(store, None, "c/123.0")[0])[0] == b"0 0"
    assert content(find(store, None, "c/123.0~1")[0])[0] == b"0 1"
    with pytest.raises(NotFoundError, match=r"no such attempt.*c/123\.1"):
        find(store, None, "123", Wanted(attempt=5))
    with pytest.raises(NotFoundError):
        find(store, None, "c/123.0~7")


def test_a_running_job_with_an_old_jobs_key(stream: Stream) -> None:
    """A lane that no manifest names is the key's next generation, and the old one is not touched by it."""
    store = MemoryStore()
    archive(store, text=b"old", token="SLUID1")
    send(stream, lane(token="SLUID2"), [source()], entries("n1-a", b"new one"))
    (view,) = find(store, stream, "123")
    assert (str(view.key), content(view)[0]) == ("c/123.0~1", b"new one")
    (view,) = find(store, stream, "c/123.0")
    assert (view.running, content(view)[0]) == (False, b"old")


def test_several_clusters() -> None:
    """A job that several clusters have is asked back, unless one of them is named or is home."""
    store = MemoryStore()
    for cluster in ("a", "b"):
        archive(store, RunKey(cluster, 5), cluster.encode())
    with pytest.raises(TrainarchiveError, match=r"a, b.*--cluster"):
        find(store, None, "5")
    assert keys_of(find(store, None, "5", Wanted(cluster="b"))) == ["b/5.0"]
    assert keys_of(find(store, None, "5", Wanted(home="a"))) == ["a/5.0"]
    assert keys_of(find(store, None, "b/5")) == ["b/5.0"]
    with pytest.raises(NotFoundError, match="in b"):
        find(store, None, "6", Wanted(cluster="b"))


@pytest.mark.parametrize("there", [("a", "b"), ()])
def test_an_unknown_cluster_is_told_with_those_there_are(there: Sequence[str]) -> None:
    """A mistyped cluster is no missing job: the clusters that exist are named, by finding and by listing."""
    store = MemoryStore()
    for cluster in there:
        archive(store, RunKey(cluster, 5), cluster.encode())
    says = rf"no cluster x \(there are: {', '.join(there) or 'none yet'}\)"
    with pytest.raises(NotFoundError, match=says):
        find(store, None, "5", Wanted(cluster="x"))
    with pytest.raises(NotFoundError, match=says):
        find(store, None, "x/5")
    with pytest.raises(NotFoundError, match=says):
        recent(store, None, cluster="x")


def test_an_unknown_cluster_while_redis_does_not_answer() -> None:
    """It may have running jobs: trying again may help."""
    stream = Stream("unix:///nonexistent/redis.sock", timeout_s=1.0, max_pending=1)
    for ask in (lambda: find(MemoryStore(), stream, "x/5"), lambda: recent(MemoryStore(), stream, cluster="x")):
        with pytest.raises(UnavailableError, match=r"no cluster x.*not known"):
            ask()
    stream.close()


def test_what_nobody_saw() -> None:
    """Notes, and files that could not be read, may mean missing output; links, devices and binaries do not."""
    harmless = (opening.LINK, opening.NOT_REGULAR, opening.KERNEL, opening.GONE, opening.NOT_WRITTEN, "not text")
    costly = (
        opening.DENIED,
        opening.OTHER_USER,
        opening.FAILED,
        opening.TOO_LONG,
        "not opened now: Too many open files",
        "more than max_files_per_run = 5 files: others are not followed",
        "a reason of a later version",
    )
    refusals = tuple(Refusal(f"/{number}", reason) for number, reason in enumerate((*harmless, *costly)))
    nodes = [
        NodeEntry(
            "n1", "drained", ("t1",), LaneReport(Job(1), refusals=refusals, notes=("no collector ran for 60 s",))
        ),
        NodeEntry("n2", "missing"),
        NodeEntry("n3", "drained", ("t1",), LaneReport(Job(1))),
    ]
    found = unseen(nodes)
    assert {(each.node, each.reason) for each in found} == {("n1", "no collector ran for 60 s")} | {
        ("n1", reason) for reason in costly
    }
    assert str(found[0]) == "node n1: no collector ran for 60 s"
    assert str(found[1]) == "node n1: /6: not followed: permission denied"
    assert {refusal.reason for _, refusal in passed_over(nodes)} == set(harmless)


def test_what_nobody_saw_is_counted_in_lists(stream: Stream) -> None:
    """Of archived and of running runs."""
    store = MemoryStore()
    told = LaneReport(Job(1000), notes=("late",), refusals=(Refusal("/a", opening.DENIED),))
    archive(store, RunKey("c", 1))
    book = manifest.newest(store, RunKey("c", 1))
    assert book is not None
    again = msgspec.structs.replace(book, number=2, nodes=(NodeEntry("n1", "drained", (TOKEN,), told),))
    store.put(keys.manifest_key(book.run, 2), manifest.encode(again))
    stream.open(lane(RunKey("c", 2)), told, [source()])
    archive(store, RunKey("c", 3))
    assert {run.run.job_id: run.unseen for run in recent(store, stream).runs} == {1: 2, 2: 2, 3: 0}


def test_arrays_and_het_jobs() -> None:
    """Array tasks and het components are found by their alias, and all of them by the plain id."""
    store = MemoryStore()
    for job, alias in ((111, "111_2"), (109, "111_0"), (200, "200+0"), (201, "200+1")):
        one = source()
        key = put_segment(store, lane(RunKey("c", job)), [one], entries("n1-a", alias.encode()))
        put_manifest(store, RunKey("c", job), [SourceEntry(one, (generation(alias.encode()),))], [key], aliases=[alias])
    assert keys_of(find(store, None, "111_2")) == ["c/111.0"]
    assert keys_of(find(store, None, "111_0")) == ["c/109.0"]
    assert keys_of(find(store, None, "111")) == ["c/109.0", "c/111.0"]
    assert keys_of(find(store, None, "200+1")) == ["c/201.0"]
    assert keys_of(find(store, None, "200")) == ["c/200.0", "c/201.0"]
    assert keys_of(find(store, None, "c/111.0")) == ["c/111.0"]
    assert keys_of(find(store, None, "109")) == ["c/109.0"]
    with pytest.raises(NotFoundError):
        find(store, None, "111_9")


def test_running_array_tasks(stream: Stream) -> None:
    """Tasks of an array that still run are found though no marker leads to them yet."""
    store = MemoryStore()
    for job, task in ((111, 2), (109, 0)):
        one = source(array_job_id=111, array_task_id=task)
        send(stream, lane(RunKey("c", job)), [one], entries("n1-a", b"x"))
    assert keys_of(find(store, stream, "111_0")) == ["c/109.0"]
    assert keys_of(find(store, stream, "111")) == ["c/109.0", "c/111.0"]


def test_unknown_says_where_it_was_looked_for(stream: Stream) -> None:
    """For an unknown job the error tells the places that were looked at, and what to do."""
    store = MemoryStore()
    archive(store)
    with pytest.raises(NotFoundError, match=r"no job 999 in c: .*archived.*0 live lanes.*trainarchive ls"):
        find(store, stream, "999")


# -- listing -----------------------------------------------------------------------------------


def test_recent_runs(stream: Stream) -> None:
    """Running and archived runs are listed by the time they began, newest first, and no more than asked for."""
    store = MemoryStore()
    archive(store, RunKey("c", 1))
    for job, started in ((2, 300.0), (3, 200.0)):
        one = source(rank=4)
        key = put_segment(store, lane(RunKey("c", job)), [one], entries("n1-a", b"abcdef"))
        lost = Gap(0, 6, 10, "lost")
        put_manifest(
            store, RunKey("c", job), [SourceEntry(one, (generation(b"abcdef", gaps=(lost,)),))], [key], started=started
        )
    send(stream, lane(RunKey("d", 9)), [source(rank=0)], entries("n1-a", b"xyz"))
    stream.report(lane(RunKey("d", 9)), report(started=250.0))
    listing = recent(store, stream)
    assert [str(run.run) for run in listing.runs] == ["c/2.0", "d/9.0", "c/3.0", "c/1.0"]
    by_job = {run.run.job_id: run for run in listing.runs}
    assert (by_job[9].state, by_job[9].running, by_job[9].size, by_job[9].ranks) == ("RUNNING", True, 3, 1)
    assert (by_job[2].state, by_job[2].running, by_job[2].size, by_job[2].missing) == ("COMPLETED", False, 6, 4)
    assert by_job[2].user == "ada"
    assert not listing.more
    assert [run.run.job_id for run in recent(store, stream, cluster="c").runs] == [2, 3, 1]
    short = recent(store, stream, limit=1)
    assert (len(short.runs), short.more) == (1, True)


def test_recent_runs_without_redis() -> None:
    """Without Redis a run that has only segments is listed, without a size, and it is said why."""
    store = MemoryStore()
    put_segment(store, lane(), [source()], entries("n1-a", b"sealed"))
    listing = recent(store, None)
    assert [(str(run.run), run.running, run.size) for run in listing.runs] == [("c/123.0", True, None)]
    assert "may be missing" in listing.notes[0]
    archived = MemoryStore()
    archive(archived)
    assert recent(archived, None).notes == (), "where there is no Redis nothing runs"
    away = Stream("unix:///nonexistent/redis.sock", timeout_s=1.0, max_pending=1)
    (note,) = recent(archived, away).notes
    assert "may be missing" in note
    away.close()


def test_recent_live_runs_are_not_cut_by_others(stream: Stream) -> None:
    """Of more live runs than are listed the youngest are, whatever their ids, and archived lanes push none out."""
    store = MemoryStore()
    for job in range(50, 60):
        done = lane(RunKey("z", job))
        send(stream, done, [], [])
        stream.report(done, report(drained=True))
        status = stream.status(done)
        assert status is not None
        assert stream.archived(done, status.epoch, 1000)
    for job, started in ((1, 900.0), (2, 800.0), (3, 100.0), (4, 950.0)):
        send(stream, lane(RunKey("a", job)), [source()], [])
        stream.report(lane(RunKey("a", job)), report(started=started))
    listing = recent(store, stream, limit=2)
    assert [str(run.run) for run in listing.runs] == ["a/4.0", "a/1.0"]
    assert listing.more
    assert not recent(store, stream, limit=4).more


def test_recent_runs_with_a_manifest_that_cannot_be_read() -> None:
    """A manifest that is rubbish costs its own run's line only, which says so, with a note."""
    store = MemoryStore()
    archive(store, RunKey("c", 1))
    archive(store, RunKey("c", 2))
    store.put(keys.manifest_key(RunKey("c", 2), 1), b"rubbish")
    listing = recent(store, None)
    assert [(str(run.run), run.state, run.complete) for run in listing.runs] == [
        ("c/1.0", "COMPLETED", True),
        ("c/2.0", "DAMAGED", False),
    ]
    (note,) = listing.notes
    assert keys.manifest_key(RunKey("c", 2), 1) in note


def test_what_others_put_into_the_store(tmp_path: Path, stream: Stream) -> None:
    """Files and directories that no worker made, wherever they lie, are passed over."""
    store = LocalStore(str(tmp_path))
    archive(store)
    put_manifest(store, RunKey("c", 7), [], [], aliases=["111_2"])
    for folder in (
        "live/two words/1.0/x",
        "live/c/notes/x",
        "live/c/9.x/y",
        "live/c/9.0~1/t1/x",
        "runs/üü/1.0",
        "runs/c/7.x/y",
        "runs/c/trash",
        "alias/c/111_x/7.0",
        "alias/c/111_/7.0",
        "alias/a b/111_2/7.0",
        "alias/c/111_2/junk",
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "README").write_bytes(b"hello")
    for file in ("live/README", "live/c/README", "runs/README", "runs/c/README", "runs/c/123.9", "live/c/123.9"):
        (tmp_path / file).write_bytes(b"hello")
    assert {str(run.run) for run in recent(store, stream).runs} == {"c/123.0", "c/7.0"}
    assert [str(run) for run in manifest.runs(store, "c")] == ["c/7.0", "c/123.0"]
    assert keys_of(find(store, stream, "123")) == ["c/123.0"]
    assert keys_of(find(store, stream, "111_2")) == keys_of(find(store, stream, "111")) == ["c/7.0"]
    with pytest.raises(NotFoundError):
        find(store, stream, "9")


def test_kind_is_kept() -> None:
    """A source's description comes back as it was stored."""
    store = MemoryStore()
    archive(store, kind="nccl", rank=3, path="/x/y")
    (view,) = find(store, None, "123")
    (entry,) = view.sources
    assert (entry.source.kind, entry.source.rank, entry.source.path) == (Kind.NCCL, 3, "/x/y")
    assert view.table() == view.manifest
