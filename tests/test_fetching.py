"""Fetching: names that stay below the output directory, files that are whole, and what is missing told."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from trainarchive import keys, manifest, opening, segment
from trainarchive.errors import NotFoundError, TrainarchiveError
from trainarchive.fetching import Copied, Folder, Selection, fetch, wording
from trainarchive.fetching.naming import DAMAGED, GAPS, MANIFEST, Name, damaged_name, names_of, shown
from trainarchive.frame import Framer, gap_frame
from trainarchive.manifest import Generation, Manifest, NodeEntry, Part, SourceEntry, Span
from trainarchive.reading import RunView, find
from trainarchive.run import Gap, Job, Kind, Lane, LaneReport, Refusal, RunKey, Source, path_fields
from trainarchive.segment import Entry
from trainarchive.store.contract import Store
from trainarchive.store.memory import MemoryStore

RUN = RunKey("c", 123)
EVERYTHING = Selection()

Made = tuple[Source, Sequence[Sequence[bytes | Gap]]]
"""A source and its generations, each of which is bytes and gaps in order."""


def source(name: str, path: bytes, *, node: str = "n1", rank: int | None = None, kind: Kind = Kind.TASK) -> Source:
    """Make a source."""
    return msgspec.convert({"id": name, "node": node, "kind": kind, "rank": rank, **path_fields(path)}, Source)


def put_run(store: Store, made: Sequence[Made], nodes: Sequence[NodeEntry] = ()) -> None:
    """Store a finished run in one part."""
    framer = Framer()
    frames: list[Entry] = []
    entries: list[SourceEntry] = []
    for one, generations in made:
        known: list[Generation] = []
        for number, items in enumerate(generations):
            at, text, gaps = 0, b"", []
            for item in items:
                if isinstance(item, Gap):
                    frames.append(Entry(one.id, number, gap_frame(item.start, item.end, 1, 1, item.reason)))
                    gaps.append(msgspec.structs.replace(item, generation=number))
                    at = item.end
                    continue
                frames += [
                    Entry(one.id, number, framer.frame(at + cut, item[cut : cut + 100_000], 1, 1))
                    for cut in range(0, len(item), 100_000)
                ]
                text += item
                at += len(item)
            known.append(Generation(number, at, blake3(text).hexdigest(), 1, 1, tuple(gaps)))
        entries.append(SourceEntry(one, tuple(known)))
    body, digest = segment.build({}, {one.id: one for one, _ in made}, frames)
    key = keys.part_key(RUN, digest)
    store.put(key, body)
    spans = tuple(
        Span(entry.source.id, known.number, 0, known.size) for entry in entries for known in entry.generations
    )
    book = Manifest(
        number=1,
        run=RUN,
        written=1.0,
        complete=True,
        state="COMPLETED",
        state_from="epilog",
        nodes=tuple(nodes)
        or tuple(NodeEntry(node, "drained", ("t1",)) for node in sorted({one.node for one, _ in made})),
        sources=tuple(entries),
        parts=(Part(key, 1, len(body), digest, spans),),
    )
    store.put(keys.manifest_key(RUN, 1), manifest.encode(book))


def view_of(*made: Made, nodes: Sequence[NodeEntry] = ()) -> RunView:
    """Store a run in memory and look at it."""
    store = MemoryStore()
    put_run(store, made, nodes)
    (view,) = find(store, None, "123")
    return view


def fetched(view: RunView, out: Path, selection: Selection = EVERYTHING) -> Copied:
    """Fetch into ``out``."""
    with Folder(out) as folder:
        return fetch(view, folder, selection)


def tree(top: Path) -> dict[bytes, bytes]:
    """Return every file below ``top`` with its content; links are not followed."""
    files = [Path(folder) / name for folder, _, names in os.walk(top) for name in names]
    return {os.fsencode(file.relative_to(top)): file.read_bytes() for file in files}


def text_of(top: Path) -> dict[bytes, bytes]:
    """Return the run's files below ``top``, without the books."""
    return {name: text for name, text in tree(top).items() if (name,) not in (MANIFEST, GAPS)}


# -- names -------------------------------------------------------------------------------------


def name_of(path: bytes, node: str = "n1") -> Name:
    """Return the name that a lone source of that path gets."""
    (name,) = names_of([SourceEntry(source("s", path, node=node), ())]).values()
    return name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (b"/scratch/a b/train.out", (b"n1", b"scratch", b"a b", b"train.out")),
        (b"/a\nb\xff\x1b[2J", (b"n1", b"a\nb\xff\x1b[2J")),
        (b"/../../etc/./passwd", (b"n1", b"__", b"__", b"etc", b"passwd")),
        (b"//a//b/", (b"n1", b"a", b"b")),
        (b"/...", (b"n1", b"...")),
        (b"kernel", (b"n1", b"kernel")),
        (b"", (b"n1", b"unnamed")),
        (b"/", (b"n1", b"unnamed")),
        (b"/a\0b", (b"n1", b"a_b")),
    ],
)
def test_names(path: bytes, name: Name) -> None:
    """A path keeps its exact bytes, less what could lead elsewhere."""
    assert name_of(path) == name


def test_long_names() -> None:
    """Names that are too long with what may be added are cut, and stay apart by a hash."""
    first, second = name_of(b"/" + b"a" * 250 + b"1"), name_of(b"/" + b"a" * 250 + b"2")
    assert first != second
    assert len(first[-1]) == len(second[-1]) == 180
    deep = name_of(b"/x" * 5000)
    assert len(deep) < 70


def test_node_names_are_not_believed() -> None:
    """A node's name in a hostile manifest leads nowhere else, and hides no book."""
    assert name_of(b"/a", node="..")[0] == b"__"
    assert name_of(b"/a", node="../../x")[0] == b".._.._x"
    assert name_of(b"/a", node="GAPS.txt")[0] == b"GAPS.txt~"
    assert name_of(b"/a", node="")[0] == b"unnamed"


def test_names_that_would_meet() -> None:
    """Generations, rotated files and files where others need a directory all get names of their own."""
    entries = [
        SourceEntry(source("first", b"/log"), (Generation(0, 1, "", 1), Generation(1, 1, "", 2))),
        SourceEntry(source("second", b"/log"), (Generation(0, 1, "", 3),)),
        SourceEntry(source("third", b"/log.~1"), (Generation(0, 1, "", 4),)),
        SourceEntry(source("fourth", b"/dir"), (Generation(0, 1, "", 5),)),
        SourceEntry(source("fifth", b"/dir/x"), (Generation(0, 1, "", 6),)),
        SourceEntry(source("../../evil", b"/log"), (Generation(0, 1, "", 7),)),
    ]
    found = {key: shown(name) for key, name in names_of(entries).items()}
    assert found == {
        ("first", 0): "n1/log",
        ("first", 1): "n1/log.~1",
        ("second", 0): "n1/log.~ssecond",
        ("third", 0): "n1/log.~1.~sthird",
        ("fourth", 0): "n1/dir.~sfourth",
        ("fifth", 0): "n1/dir/x",
        ("../../evil", 0): "n1/log.~s______evil",
    }
    assert names_of(list(reversed(entries))) == names_of(entries)


PATHS = st.lists(st.sampled_from([b"a", b"b", b"..", b".", b"", b"a.~1", b"a.~ss0", b"\xff", b"x" * 300]), max_size=4)


@given(
    st.lists(
        st.tuples(PATHS, st.sampled_from(["n1", "..", "manifest.json", "a/b"]), st.integers(0, 3), st.integers(0, 2)),
        max_size=12,
    )
)
def test_names_of_any_manifest(made: list[tuple[list[bytes], str, int, int]]) -> None:
    """Whatever the manifest, names differ, none is another's directory, and none leads anywhere else."""
    entries = [
        SourceEntry(
            source(f"s{number}", b"/" + b"/".join(parts), node=node),
            tuple(Generation(generation, 1, "", first) for generation in range(count)),
        )
        for number, (parts, node, count, first) in enumerate(made)
    ]
    found = names_of(entries)
    assert len(found) == sum(max(1, count) for _, _, count, _ in made)
    names = list(found.values())
    assert len(set(names)) == len(names)
    directories = {name[:depth] for name in names for depth in range(1, len(name))}
    assert not directories & {*names, MANIFEST, GAPS}
    assert not {MANIFEST, GAPS} & set(names)
    for name in names:
        assert len(name) > 1
        damaged = damaged_name(name, names)
        assert damaged not in names
        assert damaged[-1].startswith(name[-1] + DAMAGED)
        for part in (*name, damaged[-1]):
            assert part not in (b"", b".", b"..")
            assert not {0, ord("/")} & set(part)
            assert len(part) <= 255


# -- files -------------------------------------------------------------------------------------


def test_files_come_out_as_they_were(tmp_path: Path) -> None:
    """Every generation of every source is there, byte for byte, under its node and path."""
    big = blake3(b"seed").digest(700_000)
    view = view_of(
        (source("s1", b"/data/\xff\n.out", rank=0), [[big], [b"second life"]]),
        (source("s2", b"/data/x.err", node="n2", rank=1), [[b"\0\r\n\xff"]]),
        (source("s3", b"/data/empty", rank=2), []),
    )
    copied = fetched(view, tmp_path / "new" / "out")
    assert text_of(tmp_path / "new" / "out") == {
        b"n1/data/\xff\n.out": big,
        b"n1/data/\xff\n.out.~1": b"second life",
        b"n2/data/x.err": b"\0\r\n\xff",
        b"n1/data/empty": b"",
    }
    assert {file.status for file in copied.files} == {"written"}
    assert copied.gaps == ()
    assert (copied.run, copied.complete) == ("c/123.0", True)
    assert (tmp_path / "new" / "out" / "manifest.json").read_bytes().startswith(b"{\n")
    assert (
        msgspec.json.decode((tmp_path / "new" / "out" / "manifest.json").read_bytes(), type=Manifest) == view.manifest
    )


def test_selection(tmp_path: Path) -> None:
    """Ranks, nodes and kinds select, together; a file without a rank is no rank's."""
    view = view_of(
        (source("s0", b"/0", rank=0), [[b"0"]]),
        (source("s5", b"/5", node="n2", rank=5), [[b"5"]]),
        (source("k", b"/k", node="n2", kind=Kind.KERNEL), [[b"k"]]),
    )

    def names(number: int, **wanted: object) -> set[bytes]:
        fetched(view, tmp_path / str(number), msgspec.convert(wanted, Selection))
        return set(text_of(tmp_path / str(number)))

    assert names(1, ranks=((0, 3),)) == {b"n1/0"}
    assert names(2, ranks=((0, 0), (4, 9))) == {b"n1/0", b"n2/5"}
    assert names(3, nodes=("n*2",)) == {b"n2/5", b"n2/k"}
    assert names(4, nodes=("n2",), kinds=("task",)) == {b"n2/5"}
    says = r"ranks 7-8 have no file of their own; 1 file is shared .*--node.*there are files of ranks 0,5\)"
    with pytest.raises(NotFoundError, match=says):
        names(5, ranks=((7, 8),))
    with pytest.raises(NotFoundError, match=r"no node n7\*, x \(there are files of: n1, n2\)"):
        names(6, nodes=("n7*", "x"))
    with pytest.raises(NotFoundError, match=r"none of its files match \(there are: rank 0; 2 nodes; task\)"):
        names(7, nodes=("n1",), kinds=("kernel",))


def test_a_rank_that_writes_to_shared_files_only(tmp_path: Path) -> None:
    """It is said that ranks share the files, and how to get at them."""
    view = view_of((source("s0", b"/0", rank=0), [[b"0"]]), *((source(n, b"/" + n.encode()), [[b"x"]]) for n in "ab"))
    says = r"rank 3 has no file of its own; 2 files are shared .*: use --node, or fetch without --rank.*of rank 0\)"
    with pytest.raises(NotFoundError, match=says):
        fetched(view, tmp_path, Selection(ranks=((3, 3),)))
    with pytest.raises(NotFoundError, match=r"rank 3 has .* \(no rank has a file of its own\)"):
        fetched(view_of((source("a", b"/a"), [[b"x"]])), tmp_path, Selection(ranks=((3, 3),)))


def test_ranks_without_files_are_told(tmp_path: Path) -> None:
    """Of the ranks that are asked for the ones without a file stand in the result, however many."""
    view = view_of(*((source(f"s{rank}", b"/%d" % rank, rank=rank), [[b"x"]]) for rank in (0, 4, 5, 9)))
    copied = fetched(view, tmp_path, Selection(ranks=((3, 10**9), (0, 0), (1, 1))))
    assert copied.ranks_without_files == ((3, 3), (6, 8), (10, 10**9), (1, 1))
    assert len(copied.files) == 4
    assert fetched(view, tmp_path).ranks_without_files == ()


SPANS = st.lists(
    st.integers(0, 30).flatmap(lambda first: st.tuples(st.just(first), st.integers(first, 30))), max_size=6
)


@given(SPANS, st.sets(st.integers(0, 30)))
def test_any_ranks(spans: list[tuple[int, int]], have: set[int]) -> None:
    """What is left of spans are exactly the ranks that no source has, and ranges tell exactly the numbers of spans."""
    sources = [source(f"s{rank}", b"/x", rank=rank) for rank in have]
    wanted = {rank for first, last in spans for rank in range(first, last + 1)}
    left = Selection(ranks=tuple(spans)).without(sources)
    assert {rank for first, last in left for rank in range(first, last + 1)} == wanted - have
    told = [word.partition("-") for word in wording.ranges(spans).split(",") if word]
    assert [n for first, _, last in told for n in range(int(first), int(last or first) + 1)] == sorted(wanted)


def test_words() -> None:
    """One file, two files; the first of very many names."""
    assert [wording.counted(count, "file") for count in (0, 1, 2, 12_345)] == [
        "0 files", "1 file", "2 files", "12,345 files",
    ]  # fmt: skip
    assert wording.names(["b", "a", "a"]) == "a, b"
    assert wording.names(f"n{number:02}" for number in range(20)).endswith("n15 and 4 more")


def test_a_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    """Files of two runs never get mixed, and nobody's own manifest.json is written over."""
    view = view_of((source("s1", b"/a"), [[b"text"]]))
    (tmp_path / "manifest.json").write_text('{"run": {"cluster": "c", "job_id": 7, "attempt": 0}}')
    with pytest.raises(TrainarchiveError, match=r"holds the files of another run, c/7\.0, not of c/123\.0 \(.*-o\)"):
        fetched(view, tmp_path)
    for text in ("", "[]", '{"name": "web app"}', '{"run": {"cluster": "../x", "job_id": 7, "attempt": 0}}'):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(TrainarchiveError, match=r"manifest\.json that no fetch wrote"):
            fetched(view, tmp_path)
        assert tree(tmp_path) == {b"manifest.json": text.encode()}
    (tmp_path / "manifest.json").unlink()
    fetched(view, tmp_path)
    assert [file.status for file in fetched(view, tmp_path).files] == ["skipped"]


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    """A second fetch reads no file again that is there whole, and mends those that are not."""
    view = view_of((source("s1", b"/a"), [[b"aaaa"]]), (source("s2", b"/b"), [[b"bbbb"]]))
    fetched(view, tmp_path)
    before = (tmp_path / "n1" / "a").stat().st_ino
    (tmp_path / "n1" / "b").write_bytes(b"BBBB")
    copied = fetched(view, tmp_path)
    assert [file.status for file in copied.files] == ["skipped", "written"]
    assert (tmp_path / "n1" / "a").stat().st_ino == before
    assert (tmp_path / "n1" / "b").read_bytes() == b"bbbb"


def test_gaps_are_left_out_and_told(tmp_path: Path) -> None:
    """Missing bytes leave no filling in the file; GAPS.txt and the result say where they were."""
    lost = Gap(0, 3, 10, "spool \x1b[31mfull\n")
    view = view_of((source("s1", b"/a\n", rank=3), [[b"abc", lost, b"def"]]), (source("s2", b"/b"), [[b"whole"]]))
    copied = fetched(view, tmp_path)
    assert text_of(tmp_path) == {b"n1/a\n": b"abcdef", b"n1/b": b"whole"}
    (gap,) = copied.gaps
    assert (gap.start, gap.end, gap.rank, gap.reason) == (3, 10, 3, lost.reason)
    told = (tmp_path / "GAPS.txt").read_text().splitlines()
    assert told[1:] == [r"n1/a\n: bytes 3-10 (7 bytes): spool \x1b[31mfull\n"]
    again = fetched(view, tmp_path)
    assert [file.status for file in again.files] == ["skipped", "skipped"]
    assert again.gaps == copied.gaps
    # GAPS.txt is about the whole run, the result about what was asked for.
    part = fetched(view, tmp_path, Selection(ranks=((9, 9), (3, 3))))
    assert part.gaps == copied.gaps
    assert (tmp_path / "GAPS.txt").exists()


def test_nodes_that_were_not_done(tmp_path: Path) -> None:
    """Nodes that the run's books closed without are told, unless what was asked for is there without them."""
    nodes = [NodeEntry("n1", "drained", ("t1",)), NodeEntry("n2", "missing")]
    view = view_of((source("s1", b"/a", rank=0), [[b"x"]]), nodes=nodes)
    assert fetched(view, tmp_path).missing_nodes == ("n2",)
    assert "node n2" in (tmp_path / "GAPS.txt").read_text()
    assert fetched(view, tmp_path, Selection(nodes=("n1",))).missing_nodes == ()
    assert fetched(view, tmp_path, Selection(ranks=((0, 0),))).missing_nodes == ()
    assert fetched(view, tmp_path, Selection(ranks=((0, 1),))).missing_nodes == ("n2",)


def test_what_nobody_saw_is_told(tmp_path: Path) -> None:
    """What may be missing stands in GAPS.txt, and in the result as far as it concerns what was asked for."""
    told = LaneReport(
        Job(1), notes=("late\x1b",), refusals=(Refusal("/x\n", opening.DENIED), Refusal("/l", opening.LINK))
    )
    nodes = [NodeEntry("n1", "drained", ("t1",), told), NodeEntry("n2", "drained", ("t1",), LaneReport(Job(1)))]
    view = view_of(
        (source("s1", b"/a", rank=0), [[b"x"]]), (source("s2", b"/b", node="n2", rank=1), [[b"x"]]), nodes=nodes
    )
    both = ("late\x1b", opening.DENIED)
    copied = fetched(view, tmp_path)
    assert tuple(each.reason for each in copied.unseen) == both
    assert not copied.complete
    assert (tmp_path / "GAPS.txt").read_text().splitlines()[1:] == [
        r"may be missing: node n1: late\x1b",
        r"may be missing: node n1: /x\n: not followed: permission denied",
    ]

    def reasons(**wanted: object) -> tuple[str, ...]:
        selection = msgspec.convert(wanted, Selection)
        return tuple(each.reason for each in fetched(view, tmp_path, selection).unseen)

    assert reasons(ranks=((0, 0),)) == reasons(ranks=((0, 1),)) == both
    assert reasons(ranks=((1, 1),)) == reasons(nodes=("n2",)) == ()
    assert reasons(ranks=((1, 2),)) == both, "rank 2 may be on any node"
    assert (tmp_path / "GAPS.txt").exists(), "it is about the whole run"


def test_a_run_of_which_nothing_was_followed(tmp_path: Path) -> None:
    """There is nothing to write, and GAPS.txt says so."""
    copied = fetched(view_of(nodes=[NodeEntry("n1", "drained", ("t1",))]), tmp_path)
    assert (copied.files, copied.complete) == ((), False)
    assert "no file of the run was followed" in (tmp_path / "GAPS.txt").read_text()


def test_a_damaged_file_is_kept_apart(tmp_path: Path) -> None:
    """A file that is not what the manifest says gets another name, and the good one of before stays."""
    store = MemoryStore()
    put_run(store, [(source("s1", b"/a"), [[b"good text"]]), (source("s2", b"/b"), [[b"fine"]])])
    (view,) = find(store, None, "123")
    fetched(view, tmp_path)
    assert view.manifest is not None
    first, second = view.manifest.sources
    lie = msgspec.structs.replace(first.generations[0], blake3=blake3(b"other").hexdigest())
    worse = msgspec.structs.replace(
        view.manifest, number=2, sources=(msgspec.structs.replace(first, generations=(lie,)), second)
    )
    store.put(keys.manifest_key(RUN, 2), manifest.encode(worse))
    (view,) = find(store, None, "123")
    copied = fetched(view, tmp_path)
    assert [(file.path, file.status) for file in copied.files] == [("n1/a.damaged", "damaged"), ("n1/b", "skipped")]
    assert len(copied.damaged) == 1
    assert text_of(tmp_path) == {b"n1/a": b"good text", b"n1/a.damaged": b"good text", b"n1/b": b"fine"}


def test_a_lost_frame_is_damage(tmp_path: Path) -> None:
    """Bytes that the archive should have and has not make the file a damaged one, with the others in it."""
    store = MemoryStore()
    put_run(store, [(source("s1", b"/a"), [[b"a" * 250_000]])])
    (info,) = store.list("runs/c/123.0/parts/")
    body = bytearray(store.get(info.key))
    at = segment.read_index(bytes(body), info.key).frames[1].at
    body[at + 8] ^= 0xFF
    store.put(info.key, bytes(body))
    (view,) = find(store, None, "123")
    (file,) = fetched(view, tmp_path).files
    assert (file.status, file.bytes) == ("damaged", 150_000)
    assert file.reason.startswith("bytes 100000-200000: ")


def test_a_path_that_cannot_be_read(tmp_path: Path) -> None:
    """A source whose path is no base64 gets a safe name and is told as damaged; all the others are fetched."""
    bad = msgspec.structs.replace(source("s2", b"/../b\n"), path_base64="!!not base64")
    view = view_of(
        (source("s1", b"/a"), [[b"first"]]), (bad, [[b"whole all the same"]]), (source("s3", b"/c"), [[b"third"]])
    )
    copied = fetched(view, tmp_path)
    assert text_of(tmp_path) == {b"n1/a": b"first", b"n1/__/b\n.damaged": b"whole all the same", b"n1/c": b"third"}
    (file,) = copied.damaged
    assert "path_base64" in file.reason
    assert [file.path for file in fetched(view, tmp_path).damaged] == [file.path], "and so it is the next time"


def test_objects_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    """What a run has in objects that nobody can read stands in GAPS.txt and in the result."""
    store = MemoryStore()
    put_run(store, [(source("n1-a", b"/a"), [[b"text"]])])
    key = keys.segment_key(Lane(RUN, "n1", "t1"), "e", "1-0", "2-0", "0" * 32)
    store.put(key, b"rubbish")
    (view,) = find(store, None, "123")
    copied = fetched(view, tmp_path)
    assert [what.partition(": ")[0] for what in copied.damaged_objects] == [key]
    assert key in (tmp_path / "GAPS.txt").read_text()
    assert text_of(tmp_path) == {b"n1/a": b"text"}


def test_the_manifest_can_be_shown_on_a_terminal(tmp_path: Path) -> None:
    """No control character, C1 ones and text direction marks neither, stands in manifest.json as it is."""
    path = "/a\x1b[2J\x9b31m\u202e\U000e0001\u00fc".encode()
    view = view_of((source("s1", path), [[b"x"]]))
    fetched(view, tmp_path)
    text = (tmp_path / "manifest.json").read_text(encoding="utf-8")
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "\u00fc" in text, "what prints stays as it is"
    assert msgspec.json.decode(text, type=Manifest) == view.manifest


# -- hostile surroundings ----------------------------------------------------------------------


def test_links_in_the_way_are_not_followed(tmp_path: Path) -> None:
    """A symbolic link where a directory or a file has to go leads no byte outside."""
    outside, out = tmp_path / "outside", tmp_path / "out"
    outside.mkdir()
    (outside / "victim").write_bytes(b"untouched")
    (out / "n1").mkdir(parents=True)
    (out / "n1" / "d").symlink_to(outside)
    view = view_of((source("s1", b"/d/x"), [[b"text"]]))
    with pytest.raises(TrainarchiveError, match=r"out/n1/d: .*symbolic link"):
        fetched(view, out)
    (out / "n1" / "d").unlink()
    (out / "n1" / "d").mkdir()
    (out / "n1" / "d" / "x").symlink_to(outside / "victim")
    fetched(view, out)
    assert (out / "n1" / "d" / "x").read_bytes() == b"text"
    assert not (out / "n1" / "d" / "x").is_symlink()
    assert tree(outside) == {b"victim": b"untouched"}


def test_a_fifo_in_the_way_does_not_block(tmp_path: Path) -> None:
    """A FIFO where a file has to go is replaced, not opened and waited for."""
    (tmp_path / "n1").mkdir()
    os.mkfifo(tmp_path / "n1" / "x")
    fetched(view_of((source("s1", b"/x"), [[b"text"]])), tmp_path)
    assert stat.S_ISREG((tmp_path / "n1" / "x").lstat().st_mode)


def test_a_directory_in_the_way_is_told(tmp_path: Path) -> None:
    """A directory where a file has to go, and a file where a directory has to, are one clear error each."""
    (tmp_path / "n1" / "x").mkdir(parents=True)
    with pytest.raises(TrainarchiveError, match=r"n1/x: cannot be written: Is a directory"):
        fetched(view_of((source("s1", b"/x"), [[b"text"]])), tmp_path)
    with pytest.raises(TrainarchiveError, match=r"cannot be written: (Not a directory|File exists)"):
        Folder(Path("/dev/null/x"))
    assert text_of(tmp_path) == {}, "and no temporary file stays"


def test_a_default_directory_is_no_link(tmp_path: Path) -> None:
    """A directory that the user did not name is not followed to where somebody else's link leads."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "job-1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TrainarchiveError, match="job-1"):
        Folder(tmp_path / "job-1", follow=False)
    with Folder(tmp_path / "job-1"):
        pass


def test_an_interrupt_leaves_whole_files_only(tmp_path: Path) -> None:
    """Ctrl-C in the middle of a file leaves the files before it, whole, and nothing of it."""
    view = view_of((source("s1", b"/a"), [[b"first"]]), (source("s2", b"/b"), [[b"x" * 500_000]]))
    seen = 0

    def interrupt(count: int) -> None:
        nonlocal seen
        seen += count
        if seen > 200_000:
            raise KeyboardInterrupt

    with Folder(tmp_path) as folder, pytest.raises(KeyboardInterrupt):
        fetch(view, folder, EVERYTHING, interrupt)
    assert tree(tmp_path) == {b"n1/a": b"first"}
