"""Object names: one place each, in stream order, and nothing that a node says leads elsewhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainarchive import keys
from trainarchive.errors import TrainarchiveError
from trainarchive.run import Lane, RunKey
from trainarchive.store.contract import check_key, check_prefix

DIGEST = "0123456789abcdef" * 4
RUN = RunKey("c", 12, 3, 4)
LANE = Lane(RunKey("c", 12, 3), "n1", "t99")

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", fullmatch=True)
TOKENS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9.-]{0,63}", fullmatch=True)
NUMBERS = st.integers(0, 2**32)
RUNS = st.builds(RunKey, NAMES, NUMBERS, NUMBERS, NUMBERS)
LANES = st.builds(Lane, RUNS, NAMES, TOKENS)
EPOCHS = st.from_regex(r"[A-Za-z0-9]{1,64}", fullmatch=True)
STREAM_IDS = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))


def _id(pair: tuple[int, int]) -> str:
    return f"{pair[0]}-{pair[1]}"


@given(LANES, EPOCHS, STREAM_IDS, STREAM_IDS)
def test_a_segments_key_tells_its_lane(lane: Lane, epoch: str, first: tuple[int, int], last: tuple[int, int]) -> None:
    """The lane is read back from the key, which every store takes and which the lane's prefix finds."""
    key = keys.segment_key(lane, epoch, _id(first), _id(last), DIGEST)
    check_key(key)
    assert keys.lane_of_segment(key) == lane
    assert keys.is_level0(key)
    assert (keys.epoch_of(key), keys.digest_in(key)) == (epoch, DIGEST[:16])
    assert key.startswith(keys.lane_prefix(lane))
    assert keys.lane_prefix(lane).startswith(keys.live_prefix(lane.run)) == (lane.run.generation == 0)


@given(EPOCHS, st.lists(STREAM_IDS, min_size=2, max_size=2, unique=True))
def test_segments_sort_in_stream_order(epoch: str, ids: list[tuple[int, int]]) -> None:
    """Within an epoch the keys' order is that of the ids, for every id that Redis can make."""
    made = {pair: keys.segment_key(LANE, epoch, _id(pair), _id(pair), DIGEST) for pair in ids}
    assert sorted(made.values(), key=str.encode) == [made[pair] for pair in sorted(ids)]


@given(st.lists(st.integers(1, 99_999_999), min_size=2, unique=True))
def test_manifests_sort_by_number(numbers: list[int]) -> None:
    """The newest manifest is the last of its prefix."""
    assert sorted(keys.manifest_key(RUN, number) for number in numbers) == [
        keys.manifest_key(RUN, number) for number in sorted(numbers)
    ]


@given(RUNS)
def test_a_runs_things_lie_below_it(run: RunKey) -> None:
    """Manifests and parts of a run, and of no other, begin with its prefix."""
    for key in (keys.manifest_key(run, 1), keys.part_key(run, DIGEST)):
        check_key(key)
        assert key.startswith(keys.run_prefix(run))
    check_prefix(keys.manifest_prefix(run))
    assert keys.digest_in(keys.part_key(run, DIGEST)) == DIGEST[:32]
    assert not keys.is_level0(keys.part_key(run, DIGEST))
    assert keys.manifest_key(run, 1).startswith(keys.manifest_prefix(run))
    assert keys.run_prefix(run) == f"{keys.RUNS}{run}/"


@given(RUNS, RUNS)
def test_prefixes_do_not_meet(one: RunKey, other: RunKey) -> None:
    """No run's prefix begins another's: job 1 does not find job 12, nor attempt 1 attempt 12."""
    if one != other:
        assert not keys.run_prefix(other).startswith(keys.run_prefix(one))


def test_the_layout() -> None:
    """The names that the module's docstring promises."""
    assert keys.segment_key(LANE, "e1", "1732994242000-7", "1732994243000-0", DIGEST) == (
        "live/c/12.3/t99/n1/e1-00000001732994242000.00000000000000000007"
        "-00000001732994243000.00000000000000000000-0123456789abcdef.seg"
    )
    assert keys.manifest_key(RUN, 7) == "runs/c/12.3~4/manifest/00000007.json.zst"
    assert keys.part_key(RUN, DIGEST) == "runs/c/12.3~4/parts/0123456789abcdef0123456789abcdef.seg"
    assert keys.alias_key("c", "111_2", RUN) == "alias/c/111_2/12.3~4"
    assert keys.alias_key("c", "200+1", RunKey("c", 5)) == "alias/c/200+1/5.0"
    assert keys.alias_prefix("c", "111_") == "alias/c/111_/"


@pytest.mark.parametrize(
    "alias", ["", "1", "..", "../1_2", "1_2/..", "1_2\n", "a_b", "_2", "1__2", "1+2+3", "٣_1", "1_*"]
)
def test_no_aliases(alias: str) -> None:
    """What a user types in place of a job id reaches no other place in the store."""
    with pytest.raises(TrainarchiveError, match="not an array task"):
        keys.alias_prefix("c", alias)


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "/", "a\n", ".a"])
def test_hostile_clusters(name: str) -> None:
    """A cluster's name that leads elsewhere is refused."""
    with pytest.raises(TrainarchiveError):
        keys.alias_prefix(name, "1_2")
    with pytest.raises(TrainarchiveError):
        keys.live_prefix(RunKey(name, 1))


@pytest.mark.parametrize("epoch", ["", "..", "a/b", "../../x", "a-b", "a\n", "a.b", "é", "e" * 65])
def test_hostile_epochs(epoch: str) -> None:
    """A node writes its own epoch into Redis: one that leads elsewhere makes no key."""
    with pytest.raises(TrainarchiveError, match="not an epoch"):
        keys.segment_key(LANE, epoch, "1-0", "2-0", DIGEST)


@pytest.mark.parametrize(
    "stream_id", ["", "-", "1-", "-1", "1-2-3", "+1-0", "1_0-0", " 1-0", "1-0\n", "٣-0", "9" * 21, "x"]
)
def test_hostile_stream_ids(stream_id: str) -> None:
    """What is no stream id makes no key."""
    for first, last in ((stream_id, "2-0"), ("1-0", stream_id)):
        with pytest.raises(TrainarchiveError, match="not a stream id"):
            keys.segment_key(LANE, "e", first, last, DIGEST)


@pytest.mark.parametrize("digest", ["", "x" * 64, "a" * 31, "../" + "a" * 40, "A" * 64, "a" * 64 + "\n"])
def test_no_digests(digest: str) -> None:
    """What is no digest makes no key."""
    with pytest.raises(TrainarchiveError, match="not a digest"):
        keys.segment_key(LANE, "e", "1-0", "2-0", digest)
    with pytest.raises(TrainarchiveError, match="not a digest"):
        keys.part_key(RUN, digest)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "c/12.3/t99/n1/x.seg",
        "live/c/12.3/t99/n1/x",
        "live/c/12.3/t99/x.seg",
        "live/c/../t99/n1/x.seg",
        "runs/x.seg",
    ],
)
def test_other_keys_have_no_lane(key: str) -> None:
    """A key that is no level-0 segment's is refused."""
    with pytest.raises(TrainarchiveError):
        keys.lane_of_segment(key)
