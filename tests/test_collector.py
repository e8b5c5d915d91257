"""The collector on real files, with a real Redis and a worker's own functions."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from tests_node import Node

from trainarchive.collector import sending
from trainarchive.collector.saved import Phase
from trainarchive.holder import Holder
from trainarchive.stream import Stream

NOBODY = Stream("unix:///nobody/listens.sock?db=0", timeout_s=0.1, max_pending=1)


@pytest.fixture
def make_node(tmp_path: Path, stream: Stream, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    """Give a function that makes the test's node."""
    monkeypatch.setattr(sending, "STATUS_S", 0.02)
    made: list[Node] = []

    def make(**limits: object) -> Node:
        made.append(Node(tmp_path, stream, **limits))
        return made[-1]

    yield make
    for node in made:
        node.end()


def test_a_job_is_followed_and_archived(make_node: Callable[..., Node]) -> None:
    """Two files, one with a hostile name, come out of the store byte for byte, and the node forgets the run."""
    node = make_node()
    node.prolog()
    node.until(lambda: bool(node.collector.lanes.keepers))
    hostile = node.private / os.fsdecode(b"a \n\xff b.log")
    (node.private / "r0.log").write_bytes(b"one\ntwo\n")
    hostile.write_bytes(b"\x00\r\n" * 70_000)
    node.until(node.settled)
    with hostile.open("ab") as file:
        file.write(b"late")
    node.epilog()
    node.until(lambda: not list(node.collector.lanes) or node.collector.lanes.keepers[node.lane].phase is Phase.DRAINED)
    node.archive()
    archived = node.archived()
    assert archived[os.fsencode(node.private / "r0.log")] == {0: (b"one\ntwo\n", [])}
    assert archived[os.fsencode(hostile)] == {0: (b"\x00\r\n" * 70_000 + b"late", [])}
    node.until(lambda: not node.private.exists())
    assert list(node.settings.spool.joinpath("open").iterdir()) == []


def test_unlinked_right_after_the_last_write(make_node: Callable[..., Node]) -> None:
    """The file is held open from its discovery on, so its last bytes need no name."""
    node = make_node()
    node.prolog()
    node.until(lambda: bool(node.collector.lanes.keepers))
    path = node.private / "gone.log"
    with path.open("wb", buffering=0) as file:
        file.write(b"first\n")
        node.until(node.settled)
        file.write(b"last words\n")
        path.unlink()
    node.epilog()
    node.archive()
    assert node.archived()[os.fsencode(path)] == {0: (b"first\nlast words\n", [])}


def test_redis_comes_back_empty(make_node: Callable[..., Node], redis_url: str) -> None:
    """What was sent and not sealed is sent again, though its file is unlinked by then."""
    node = make_node()
    node.prolog()
    node.until(lambda: bool(node.collector.lanes.keepers))
    path = node.private / "x.log"
    path.write_bytes(b"a" * 300_000)
    node.until(node.settled)
    node.seal()
    with path.open("ab") as file:
        file.write(b"b" * 300_000)
    node.until(node.settled)
    path.unlink()
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        client.flushall()
    node.epilog()
    node.archive()
    assert node.archived()[os.fsencode(path)] == {0: (b"a" * 300_000 + b"b" * 300_000, [])}


def test_redis_comes_back_empty_after_the_files_were_let_go(make_node: Callable[..., Node], redis_url: str) -> None:
    """After Epilog the spool has what is not sealed."""
    node = make_node()
    node.prolog()
    node.until(lambda: bool(node.collector.lanes.keepers))
    path = node.private / "x.log"
    path.write_bytes(os.urandom(500_000))
    text = path.read_bytes()
    node.until(node.settled)
    node.epilog()
    node.until(lambda: node.collector.lanes.keepers[node.lane].phase is Phase.DRAINED)
    path.unlink()
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        client.flushall()
    node.restart()
    node.archive()
    assert node.archived()[os.fsencode(path)] == {0: (text, [])}


def test_killed_and_started_again(make_node: Callable[..., Node]) -> None:
    """Another life goes on with the same files, renamed and unlinked ones too."""
    node = make_node()
    node.prolog()
    node.until(lambda: bool(node.collector.lanes.keepers))
    renamed, unlinked = node.private / "a.log", node.private / "b.log"
    renamed.write_bytes(b"1")
    unlinked.write_bytes(b"2")
    node.until(node.settled)
    with renamed.open("ab") as one, unlinked.open("ab") as two:
        one.write(b"-more")
        two.write(b"-more")
    renamed.rename(node.private / "a.log.1")
    unlinked.unlink()
    node.restart()
    node.until(node.settled)
    node.epilog()
    node.archive()
    archived = node.archived()
    assert archived[os.fsencode(renamed)] == {0: (b"1-more", [])}
    assert archived[os.fsencode(unlinked)] == {0: (b"2-more", [])}
    assert len(archived) == 2


def test_over_the_ceiling_head_and_tail_are_kept(make_node: Callable[..., Node]) -> None:
    """A file over the ceiling keeps its beginning and its end, and the gap says why."""
    node = make_node(source_ceiling_mib=2)
    node.prolog()
    node.until(lambda: bool(node.collector.lanes.keepers))
    path = node.private / "big.log"
    mib = 1024 * 1024
    text = os.urandom(5 * mib)
    path.write_bytes(text)
    node.until(lambda: bool(next(iter(node.collector.lanes)).files.followed))
    node.epilog()
    node.archive()
    ((archived, gaps),) = node.archived()[os.fsencode(path)].values()
    assert archived[:mib] == text[:mib]
    assert archived[-mib:] == text[-mib:]
    (gap,) = gaps
    assert "ceiling" in gap.reason
    assert archived == text[: gap.start] + bytes(gap.end - gap.start) + text[gap.end :]


def test_without_redis_memory_stays_bounded(make_node: Callable[..., Node]) -> None:
    """With nobody listening, frames go to the spool, then reading stops; later all of it is sent."""
    mib = 1024 * 1024
    node = make_node(memory_mib=1, spool_mib=2, back_off_max_s=0.05)
    door, node.collector.uplink._stream = node.collector.uplink._stream, NOBODY
    node.prolog()
    node.until(lambda: bool(node.collector.lanes.keepers))
    path = node.private / "x.log"
    text = os.urandom(6 * mib)
    path.write_bytes(text)
    held = node.collector.held
    node.until(lambda: held.spooled >= 2 * mib)
    for _ in range(50):
        node.turn()
    assert held.memory <= 4 * mib
    assert held.spooled <= 5 * mib
    node.collector.uplink._stream = door
    node.until(node.settled)
    node.epilog()
    node.archive()
    assert node.archived()[os.fsencode(path)] == {0: (text, [])}


def test_prolog_and_epilog_may_run_twice(make_node: Callable[..., Node]) -> None:
    """Slurm repeats hooks after a restart of its daemons: one run stays one lane."""
    node = make_node()
    node.prolog()
    node.prolog()
    node.until(node.all_taken)
    assert len(node.collector.lanes.keepers) == 1
    (node.private / "x.log").write_bytes(b"once")
    node.until(node.settled)
    node.epilog()
    node.epilog()
    node.until(node.all_taken)
    node.archive()
    assert node.archived()[os.fsencode(node.private / "x.log")] == {0: (b"once", [])}
    assert list((node.settings.spool / "open").iterdir()) == []


def test_an_epilog_without_prolog_closes_nothing(make_node: Callable[..., Node]) -> None:
    """The collector may be installed while jobs run."""
    node = make_node()
    node.epilog()
    node.until(node.all_taken)
    assert not node.collector.lanes.keepers
    assert list((node.settings.spool / "open").iterdir()) == []


def test_a_requeued_job_closes_the_attempt_whose_epilog_never_came(make_node: Callable[..., Node]) -> None:
    """The node crashed in between: its first attempt must not stay open for ever."""
    node = make_node()
    node.prolog()
    node.until(node.all_taken)
    node.prolog(SLURM_JOB_RESTART_COUNT=b"1")
    node.until(node.all_taken)
    phases = {keeper.lane.run.attempt: keeper.phase for keeper in node.collector.lanes}
    assert phases[0] is not Phase.FOLLOWING
    assert phases[1] is Phase.FOLLOWING
    (first,) = [keeper for keeper in node.collector.lanes if keeper.lane.run.attempt == 0]
    assert any("epilog never came" in note for note in first.report.notes)


def test_the_epilog_of_a_requeued_run_closes_it_under_its_own_attempt(make_node: Callable[..., Node]) -> None:
    """In Epilog the restart count is already one higher."""
    node = make_node()
    node.prolog()
    node.until(node.all_taken)
    node.epilog(SLURM_JOB_RESTART_COUNT=b"1")
    node.until(node.all_taken)
    assert node.lane.run.attempt == 0
    assert node.collector.lanes.keepers[node.lane].phase is not Phase.FOLLOWING


def test_a_job_may_opt_out(make_node: Callable[..., Node]) -> None:
    """With the comment that the site allows, nothing is followed."""
    node = make_node()
    node.prolog(SLURM_JOB_COMMENT=b"notrainarchive")
    node.until(node.all_taken)
    assert not node.collector.lanes.keepers


def test_a_torn_notice_is_set_aside(make_node: Callable[..., Node]) -> None:
    """Trash in the spool harms nothing and stays for people to look at."""
    node = make_node()
    torn = node.settings.spool / "notices" / "prolog.9.1"
    torn.write_bytes(b"SLURM_JOB_ID=9\0")
    node.prolog()
    node.until(node.all_taken)
    assert len(node.collector.lanes.keepers) == 1
    assert (torn.parent / "bad" / torn.name).exists()


def test_a_lost_state_file_loses_nothing(make_node: Callable[..., Node]) -> None:
    """Files are read again from their beginning, under a generation that no earlier life used."""
    node = make_node()
    node.prolog()
    node.until(node.all_taken)
    path = node.private / "x.log"
    path.write_bytes(b"all of it")
    node.until(node.settled)
    for state in node.settings.state.glob("lanes/*/state.json"):
        state.write_bytes(b"torn{")
    node.restart()
    node.until(node.settled)
    node.epilog()
    node.archive()
    assert {text for text, gaps in node.archived()[os.fsencode(path)].values() if not gaps} == {b"all of it"}


def test_without_a_holder_following_goes_on(make_node: Callable[..., Node]) -> None:
    """The holder may be killed; another one is started and gets the files."""
    node = make_node()
    node.prolog()
    node.until(node.all_taken)
    path = node.private / "x.log"
    path.write_bytes(b"one")
    node.until(node.settled)
    Holder.start(node.settings.state).stop()
    (node.private / "y.log").write_bytes(b"two")
    node.until(node.settled)
    path.unlink()
    node.restart()
    node.epilog()
    node.archive()
    assert node.archived()[os.fsencode(path)] == {0: (b"one", [])}


def test_a_file_cut_off_while_reading_waits_is_told(make_node: Callable[..., Node]) -> None:
    """With no room for more, files are still looked at: what is cut off unread must show as a gap."""
    node = make_node(memory_mib=1, spool_mib=0, back_off_max_s=0.02)
    node.prolog()
    node.until(node.all_taken)
    big, cut = node.private / "big.log", node.private / "cut.log"
    cut.write_bytes(b"begin\n")
    node.until(node.settled)
    door, node.collector.uplink._stream = node.collector.uplink._stream, NOBODY
    big.write_bytes(os.urandom(3 * 1024 * 1024))
    node.until(lambda: node.collector.held.full)
    with cut.open("ab") as file:
        file.write(b"x" * 50_000)
    (followed,) = (one for one in node.collector.lanes.keepers[node.lane].files if one.source.path.endswith("cut.log"))
    node.until(lambda: followed.tail is not None and followed.tail.pending() == 50_000)
    os.truncate(cut, 0)
    node.until(lambda: len(followed.flows) == 2)
    node.collector.uplink._stream = door
    node.epilog()
    node.archive()
    text, gaps = node.archived()[os.fsencode(cut)][0]
    assert text[:6] == b"begin\n"
    assert [(gap.start, gap.end) for gap in gaps] == [(6, 50_006)]


def test_a_file_rewritten_just_before_epilog(make_node: Callable[..., Node]) -> None:
    """Its last content is a generation of its own, whole, whatever its length."""
    node = make_node()
    node.prolog()
    node.until(node.all_taken)
    paths = [node.private / f"{size}.txt" for size in (50, 100, 150)]
    for path in paths:
        path.write_bytes(b"a" * 100)
    node.until(node.settled)
    for path in paths:
        path.write_bytes(b"b" * int(path.stem))
    node.epilog()
    node.archive()
    for path in paths:
        generations = node.archived()[os.fsencode(path)]
        assert generations == {0: (b"a" * 100, []), 1: (b"b" * int(path.stem), [])}


def test_a_second_epilog_waits_for_the_same_bytes(make_node: Callable[..., Node]) -> None:
    """It is told that the node's bytes are safe when they are, not before."""
    node = make_node()
    node.prolog()
    node.until(node.all_taken)
    (node.private / "x.log").write_bytes(b"x")
    node.until(node.settled)
    node.epilog()
    node.until(node.all_taken)
    node.epilog()
    node.until(node.all_taken)
    assert list((node.settings.spool / "safe").iterdir()) == []
    node.archive()
    assert len(list((node.settings.spool / "safe").glob("epilog.*"))) == 2


def test_a_lane_that_redis_cannot_use_leaves_room_for_others(make_node: Callable[..., Node], redis_url: str) -> None:
    """Trash in one lane's keys: its frames go to disk, the other run's go up."""
    node = make_node(memory_mib=1)
    node.prolog()
    node.until(node.all_taken)
    (node.private / "x.log").write_bytes(b"x")
    node.until(node.settled)
    broken = node.lane
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        (key,) = client.keys("*:offsets")
        client.delete(key)
        client.set(key, "trash")
    (node.private / "x.log").write_bytes(os.urandom(3 * 1024 * 1024))
    other = node.settings.spool / "jobs" / "8.0"
    other.mkdir()
    node.prolog(SLURM_JOB_ID=b"8", TRAINARCHIVE_DIR=os.fsencode(other))
    node.until(node.all_taken)
    (other / "y.log").write_bytes(b"goes up")
    (lane,) = (lane for lane in node.collector.lanes.keepers if lane != broken)

    def is_up() -> bool:
        status = node.stream.status(lane)
        return status is not None and list(status.committed.values()) == [7]

    node.until(is_up)
