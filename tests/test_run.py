"""The words: text forms that go both ways, names that stay in their place, paths that keep every byte."""

import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainarchive.errors import DamagedError, TrainarchiveError
from trainarchive.run import (
    Gap,
    Job,
    Kind,
    Lane,
    LaneReport,
    Refusal,
    RunKey,
    Source,
    is_safe_name,
    is_source_of,
    path_fields,
    source_id,
)

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,30}", fullmatch=True)
TOKENS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9.-]{0,30}", fullmatch=True)
NUMBERS = st.integers(0, 10**18 - 1)
RUNS = st.builds(RunKey, NAMES, NUMBERS, NUMBERS, NUMBERS)
LANES = st.builds(Lane, RUNS, NAMES, TOKENS)

HOSTILE = [
    "", ".", "..", "../x", "a/b", "/a", ".a", "-a", "_a", "a b", "a\n", "a\0", "a~1", "a*", "a{b", "é", "٣", "a\udcff",
    "a" * 254,
]  # fmt: skip


@given(RUNS)
def test_run_keys_go_both_ways(run: RunKey) -> None:
    """``parse`` reads what ``str`` writes."""
    assert RunKey.parse(str(run)) == run


@given(LANES)
def test_lane_names_go_both_ways(lane: Lane) -> None:
    """``parse`` reads ``name``, and the name has four parts."""
    assert Lane.parse(lane.name) == lane
    assert lane.name.count("/") == 3


@given(LANES, LANES)
def test_other_lanes_have_other_names(one: Lane, other: Lane) -> None:
    """No two lanes share a name."""
    assert (one == other) == (one.name == other.name)


@given(st.one_of(st.text(), st.from_regex(r"\w{0,3}/?\d{0,3}\.?\d{0,3}~?\d{0,3}")))
def test_any_text_is_a_run_key_or_an_error(text: str) -> None:
    """What is read is written back the same: there is one spelling of each key."""
    try:
        run = RunKey.parse(text)
    except TrainarchiveError:
        return
    assert str(run) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "c", "c/", "c/1", "c/.0", "c/1.", "c/1.0~", "c/1.0~0", "c/01.0", "c/1.00", "c/1.0~01", "c/-1.0", "c/1.-1",
        "c/1.0\n", "\nc/1.0", " c/1.0", "c//1.0", "c/1.0/", "c/1.0.0", "c/٣.0", "c/1e3.0", "../1.0", "../../1.0",
        "c/" + "9" * 5000 + ".0", "c/1." + "9" * 19,
    ],
)  # fmt: skip
def test_no_run_keys(text: str) -> None:
    """Other spellings, other digits and numbers without end are refused, by one error."""
    with pytest.raises(TrainarchiveError, match="not a run key"):
        RunKey.parse(text)


@pytest.mark.parametrize(
    "text", ["", "c/1.0", "c/1.0/t", "c/1.0/t/n/x", "c/1.0//n", "c/1.0/t/", "c/1.0/t/..", "a/b/c/d"]
)
def test_no_lanes(text: str) -> None:
    """A name with too few or too many parts, or bad ones, is refused."""
    with pytest.raises(TrainarchiveError):
        Lane.parse(text)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_get_nowhere(name: str) -> None:
    """Neither cluster nor node nor token can hold what leads elsewhere in keys, paths or Redis."""
    assert not is_safe_name(name)
    with pytest.raises(TrainarchiveError):
        RunKey(name, 1)
    with pytest.raises(TrainarchiveError):
        Lane(RunKey("c", 1), name, "t")
    with pytest.raises(TrainarchiveError):
        Lane(RunKey("c", 1), "n", name)


def test_hostile_names_get_nowhere_by_json() -> None:
    """Names that arrive encoded are held to the same."""
    with pytest.raises(TrainarchiveError):
        msgspec.json.decode(b'{"cluster": "../x", "job_id": 1}', type=RunKey)


@pytest.mark.parametrize("numbers", [(-1, 0, 0), (1, -1, 0), (1, 0, -1)])
def test_numbers_below_zero(numbers: tuple[int, int, int]) -> None:
    """A key that could not be read back cannot be made."""
    with pytest.raises(TrainarchiveError, match="not below 0"):
        RunKey("c", *numbers)


def test_runs_sort_by_number() -> None:
    """Order is that of numbers, not of digits."""
    runs = [RunKey("c", 9, 0), RunKey("c", 10, 0), RunKey("c", 10, 0, 1), RunKey("c", 10, 1)]
    assert sorted([runs[2], runs[0], runs[3], runs[1]]) == runs


@given(st.binary(min_size=1, max_size=40))
def test_paths_keep_every_byte(path: bytes) -> None:
    """Any path survives JSON, as bytes or as the text that Python makes of it."""
    for given_as in (path, os.fsdecode(path)):
        source = msgspec.structs.replace(Source("s1", "n1", Kind.TASK, ""), **path_fields(given_as))
        twin = msgspec.json.decode(msgspec.json.encode(source), type=Source)
        assert twin == source
        assert twin.path_bytes == path


def test_a_path_that_is_not_utf8_is_shown() -> None:
    r"""People see ``\xNN``; a path that spells this out itself is not mistaken for it."""
    assert path_fields(b"/a\xff\n") == {"path": "/a\\xff\n", "path_base64": "L2H/Cg=="}
    assert path_fields(b"/a\\xff") == {"path": "/a\\xff"}
    assert path_fields("/ü") == {"path": "/ü"}


@pytest.mark.parametrize("text", ["x", "!!!!", "L2H/Cg=", "L2H\n/Cg=="])
def test_a_damaged_path(text: str) -> None:
    """What is not base64 is damage, not a defect of the reader."""
    with pytest.raises(DamagedError, match="s1"):
        _ = Source("s1", "n1", Kind.TASK, "shown", path_base64=text).path_bytes


RECORDS = st.one_of(
    st.builds(Job, st.integers(0, 2**32), user=st.text(max_size=9), ended=st.floats(0, 9e9)),
    st.builds(Source, st.text(max_size=9), NAMES, st.sampled_from(Kind), st.text(max_size=9), rank=st.none() | NUMBERS),
    st.builds(Gap, NUMBERS, NUMBERS, NUMBERS, st.text(max_size=9)),
    st.builds(Refusal, st.text(max_size=9), st.text(max_size=9)),
    st.builds(
        LaneReport,
        st.builds(Job, st.integers(0, 2**32)),
        refusals=st.lists(st.builds(Refusal, st.text(max_size=9), st.just("r")), max_size=3).map(tuple),
        drained=st.booleans(),
        notes=st.lists(st.text(max_size=9), max_size=3).map(tuple),
    ),
    LANES,
)  # fmt: skip


@given(RECORDS)
def test_records_survive_json(record: msgspec.Struct) -> None:
    """Every record comes back equal from JSON."""
    assert msgspec.json.decode(msgspec.json.encode(record), type=type(record)) == record


def test_records_are_frozen() -> None:
    """What travels does not change on the way."""
    with pytest.raises(AttributeError):
        RunKey("c", 1).job_id = 2  # type: ignore[misc]


@given(st.sampled_from(["n1", "n1-a", "a1", "n", "node.site-2"]), st.from_regex(r"[A-Za-z0-9]{1,64}", fullmatch=True))
def test_a_source_is_one_nodes(node: str, name: str) -> None:
    """Of every id there is one node that may send text under it, whatever the nodes are called."""
    made = source_id(node, name)
    others = {"n1", "n1-a", "a1", "n", "node.site-2", f"{node}-{name}", node[:-1], "", made} - {node}
    assert is_source_of(node, made)
    assert not any(is_source_of(other, made) for other in others)


@pytest.mark.parametrize(
    "source",
    ["", "n1", "n1-", "n1-\n", "n1-a\n", "n1-a b", "n1-\x00", "n1-é", "n1-" + "a" * 65, "n1-a:1", "n1--a", "-a"],
)
def test_no_sources_of_a_node(source: str) -> None:
    """What is not the node's name and some letters and digits is no source of it."""
    assert not is_source_of("n1", source)
