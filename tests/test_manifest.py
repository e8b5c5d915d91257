"""Manifests, their listing, and the small words they are made of: states, node lists, generations."""

import contextlib
import itertools

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from trainarchive import generations, hosts, keys, manifest, states
from trainarchive.errors import DamagedError, TrainarchiveError
from trainarchive.manifest import Generation, Manifest, NodeEntry, Part, SourceEntry, Span
from trainarchive.run import Gap, Job, Kind, Lane, LaneReport, RunKey, Source
from trainarchive.store.memory import MemoryStore

RUN = RunKey("c", 7)


def book(number: int = 1, run: RunKey = RUN, **other: object) -> Manifest:
    """Return a manifest with something of everything."""
    source = Source("n1-a", "n1", Kind.TASK, "/out/\\xff", path_base64="L291dC//", rank=3)
    generation = Generation(0, 10, "ab" * 32, 5, 6, (Gap(0, 2, 4, "lost"),))
    made = Manifest(
        number=number,
        run=run,
        written=1.5,
        complete=True,
        state="COMPLETED",
        state_from="epilog",
        aliases=("111_2",),
        nodes=(NodeEntry("n1", "drained", ("s1",), LaneReport(Job(1000))),),
        sources=(SourceEntry(source, (generation,)),),
        parts=(Part("live/x", 0, 9, "cd" * 32, (Span("n1-a", 0, 0, 10),)),),
    )
    return msgspec.structs.replace(made, **other)


def put(store: MemoryStore, made: Manifest) -> None:
    """Write it where it belongs."""
    assert store.put_if_absent(keys.manifest_key(made.run, made.number), manifest.encode(made))


def test_round_trip() -> None:
    """What is written is read back, and the same manifest is the same bytes."""
    assert manifest.decode(manifest.encode(book()), "x") == book()
    assert manifest.encode(book()) == manifest.encode(book())


@given(st.binary(max_size=200))
def test_rubbish(body: bytes) -> None:
    """Any bytes that are no manifest are one clear error that names the object."""
    with pytest.raises(DamagedError, match="key-of-it"):
        manifest.decode(body, "key-of-it")


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_damage(at: int, value: int) -> None:
    """One changed byte is found."""
    body = bytearray(manifest.encode(book()))
    at %= len(body)
    if body[at] == value:
        return
    body[at] = value
    with contextlib.suppress(DamagedError):
        # The only bits without meaning are zstd's own unused ones.
        assert manifest.decode(bytes(body), "x") == book()


def test_another_version() -> None:
    """A manifest of a later version says what to do, instead of being half understood."""
    text = msgspec.json.encode({**msgspec.to_builtins(book()), "version": 2, "nodes": "changed"})
    with pytest.raises(DamagedError, match="update trainarchive"):
        manifest.decode(zstandard.compress(text), "x")


def test_a_bomb() -> None:
    """A header that claims terabytes is refused before anything is allocated."""
    body = bytes.fromhex("28b52ffde0") + (2**42).to_bytes(8, "little") + b"\x01\x00\x00"
    with pytest.raises(DamagedError, match="claims"):
        manifest.decode(body, "x")


def test_newest() -> None:
    """The highest number is the truth, also past the ninth."""
    store = MemoryStore()
    assert manifest.newest(store, RUN) is None
    for number in range(1, 12):
        put(store, book(number))
    found = manifest.newest(store, RUN)
    assert found is not None
    assert found.number == 11


def test_listing() -> None:
    """Runs are listed by cluster and by job, with attempts and generations, and not confused with like names."""
    store = MemoryStore()
    every = [
        RunKey("c", 7),
        RunKey("c", 7, 0, 1),
        RunKey("c", 7, 1),
        RunKey("c", 7, 10),
        RunKey("c", 71),
        RunKey("d", 7),
    ]
    for run in every:
        put(store, book(run=run))
    store.put("runs/c/strange/manifest/x", b"")
    assert manifest.clusters(store) == ["c", "d"]
    assert list(manifest.runs(store, "c")) == every[:5]
    assert list(manifest.runs(store, "c", 7)) == every[:4]
    assert manifest.generations(store, RUN) == every[:2]
    assert manifest.generations(store, RunKey("c", 7, 1)) == [RunKey("c", 7, 1)]
    assert list(manifest.runs(store, "none")) == []


def test_aliases() -> None:
    """A marker leads to its runs; a foreign object among them is passed over."""
    store = MemoryStore()
    for run in (RunKey("c", 12, 1), RunKey("c", 12)):
        store.put(keys.alias_key("c", "111_2", run), b"")
    store.put(keys.alias_prefix("c", "111_2") + "rubbish", b"")
    assert manifest.aliased(store, "c", "111_2") == [RunKey("c", 12), RunKey("c", 12, 1)]
    assert manifest.aliased(store, "c", "111_3") == []


def test_states() -> None:
    """The latest Epilog that knows exit codes has the last word."""
    assert states.ending([]).state == "UNKNOWN"
    assert states.ending([Job(1)]).state == "UNKNOWN"
    good = Job(1, ended=5.0, exit_code="0:0", derived_exit_code="0:0")
    bad = Job(1, ended=4.0, exit_code="1:0", derived_exit_code="0:0")
    assert states.ending([good, bad, Job(1)]) == states.Ending("COMPLETED", "epilog", "0:0", "0:0")
    assert states.ending([msgspec.structs.replace(bad, ended=6.0), good]).state == "FAILED"


def test_host_lists() -> None:
    """Slurm's expressions expand in order, each node once."""
    assert hosts.expand("") == ()
    assert hosts.expand("n1") == ("n1",)
    assert hosts.expand("n[1-3,07-08],gpu-a[1-2]x[1-2],n2") == (
        "n1", "n2", "n3", "n07", "n08", "gpu-a1x1", "gpu-a1x2", "gpu-a2x1", "gpu-a2x2",
    )  # fmt: skip


@pytest.mark.parametrize(
    "expression",
    [
        "n[1-99999999]",
        "n[1-60000],m[1-60000]",
        ",".join(f"{letter}[0-9][0-9][0-9][0-9]" for letter in itertools.islice("abcdefghijklmnop", 16)),
        "n[0-9][0-9][0-9][0-9][0-9][0-9]",
        "n[" + "0" * 5000 + "-9]",
        "x" * 5000 + "[1-60000]",
        "n[" + ",".join(["1-60000"] * 1000) + "]",
        "[1-2]" * 100_000,
        "n[3-1]",
        "n[1",
        "n]",
        "n[[1]]",
        "a b",
        "../../etc",
        "n\n1",
        "9" * 400_000,
    ],
)
def test_hostile_host_lists(expression: str) -> None:
    """What is broken, or would expand without bounds, is refused, quickly and in one line."""
    with pytest.raises(TrainarchiveError) as caught:
        hosts.expand(expression)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def lane(token: str, node: str = "n1") -> Lane:
    """Return a lane of the one run key."""
    return Lane(RUN, node, token)


def report(started: float, ended: float = 0.0) -> LaneReport:
    """Return the report of a job's node."""
    return LaneReport(Job(1, started=started, ended=ended))


def test_generations_by_sluid() -> None:
    """Every SLUID is a run, in the order of their starts."""
    lanes = {lane("sB"): report(100.0), lane("sA"): report(200.0), lane("sB", "n2"): report(101.0)}
    found = generations.assign(lanes, {})
    assert found == {0: [lane("sB"), lane("sB", "n2")], 1: [lane("sA")]}


def test_generations_by_time() -> None:
    """Time tokens of one run differ by node; the next job with that key begins after this one's end."""
    lanes = {
        lane("t100"): report(100.0, 500.0),
        lane("t130", "n2"): report(130.0, 505.0),
        lane("t540", "n3"): report(540.0),
        lane("t900"): None,
    }
    found = generations.assign(dict(list(lanes.items())[:2]), {})
    assert found == {0: [lane("t100"), lane("t130", "n2")]}
    # Nobody knows when t540 ends, so t900 is counted with it.
    assert generations.assign(lanes, {})[0] == [lane("t100"), lane("t130", "n2"), lane("t540", "n3"), lane("t900")]
    ended = {**lanes, lane("t540", "n3"): report(540.0, 550.0)}
    assert generations.assign(ended, {})[1] == [lane("t900")]


def test_known_generations_stay() -> None:
    """What a manifest lists stays there; new lanes join it or begin the next one by its end."""
    nodes = (NodeEntry("n1", "drained", ("t100",)), NodeEntry("n2", "drained", ("t130",)))
    known = {0: book(nodes=nodes, ended=500.0)}
    lanes = {lane("t130", "n2"): None, lane("t400", "n3"): None, lane("t600"): None}
    assert generations.assign(lanes, known) == {0: [lane("t130", "n2"), lane("t400", "n3")], 1: [lane("t600")]}


@given(st.permutations([lane("t1"), lane("t2", "n2"), lane("sX"), lane("t900"), lane("sY", "n4")]))
def test_the_order_does_not_matter(order: list[Lane]) -> None:
    """Whoever asks gets the same generations."""
    reports = {lane("t1"): report(1.0, 5.0), lane("t2", "n2"): report(2.0, 5.0), lane("sX"): report(3.0)}
    usual = generations.assign({each: reports.get(each) for each in sorted(order)}, {})
    assert generations.assign({each: reports.get(each) for each in order}, {}) == usual
