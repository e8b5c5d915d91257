"""The collector on real files, with a real Redis and a worker's own functions."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from tests_node import Node

from trainarchive.collector.saved import Phase
from trainarchive.stream import Stream


@pytest.fixture
def make_node(tmp_path: Path, stream: Stream) -> Iterator[Callable[..., Node]]:
    """Give a function that makes the test's node."""
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
    assert not node.private.exists()
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
    node.until(lambda: bool(next(iter(node.collector.lanes)).followed))
    node.epilog()
    node.archive()
    ((archived, gaps),) = node.archived()[os.fsencode(path)].values()
    assert archived[:mib] == text[:mib]
    assert archived[-mib:] == text[-mib:]
    (gap,) = gaps
    assert "ceiling" in gap.reason
    assert archived == text[: gap.start] + bytes(gap.end - gap.start) + text[gap.end :]


def test_without_redis_memory_stays_bounded(tmp_path: Path) -> None:
    """With nobody listening, frames go to the spool, then reading stops; later all of it is sent."""
    dead = Stream(f"unix://{tmp_path}/nobody.sock?db=0", timeout_s=0.2, max_pending=1)
    node = Node(tmp_path, dead, memory_mib=1, spool_mib=2, back_off_max_s=0.05)
    try:
        node.prolog()
        node.until(lambda: bool(node.collector.lanes.keepers))
        (node.private / "x.log").write_bytes(os.urandom(6 * 1024 * 1024))
        started = time.monotonic()
        node.until(lambda: time.monotonic() > started + 2.5)
        assert node.collector.held.memory <= 4 * 1024 * 1024
        assert node.collector.held.spooled <= 5 * 1024 * 1024
    finally:
        node.end()
