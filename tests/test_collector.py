"""The collector on real files, with a real Redis and a worker's own functions."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import redis

from trainarchive import notice, sealing
from trainarchive.collector import Collector
from trainarchive.collector.saved import Phase
from trainarchive.run import Gap, Lane
from trainarchive.segment import frames_of, read_index
from trainarchive.settings import Collector as Limits
from trainarchive.settings import Seal, Settings
from trainarchive.store.memory import MemoryStore
from trainarchive.stream import State, Stream

JOB = 7
DEADLINE_S = 15.0


class Node:
    """A node with one collector in this process, and one job with its own directory."""

    def __init__(self, home: Path, stream: Stream, **limits: object) -> None:
        """``limits`` replace the collector's settings."""
        defaults = Limits(poll_min_ms=1, poll_max_ms=5, busy_wait_ms=1, discovery_s=0.05, state_every_s=0.0)
        self.settings = Settings(home=home, collector=msgspec.structs.replace(defaults, **limits))
        self.stream = stream
        self.store = MemoryStore()
        self.collector = Collector(self.settings, stream)
        self.private = self.settings.spool / "jobs" / f"{JOB}.0"

    def prolog(self) -> None:
        """Do what Prolog does."""
        self.private.mkdir()
        self._notice("prolog", {"TRAINARCHIVE_DIR": os.fsencode(self.private)})

    def epilog(self) -> None:
        """Do what Epilog does."""
        self._notice("epilog", {"SLURM_JOB_EXIT_CODE2": b"0:0"})

    def _notice(self, event: str, more: dict[str, bytes]) -> None:
        values = {
            "TRAINARCHIVE_EVENT": event.encode(),
            "SLURM_CLUSTER_NAME": b"c",
            "SLURMD_NODENAME": b"n1",
            "SLURM_JOB_ID": str(JOB).encode(),
            "SLURM_JOB_UID": str(os.getuid()).encode(),
            "SLURM_JOB_GID": str(os.getgid()).encode(),
        }
        path = self.settings.spool / "notices" / f"{event}.{JOB}.{time.monotonic_ns()}"
        path.write_bytes(notice.encode(values | more))

    def until(self, done: Callable[[], bool]) -> None:
        """Turn the loop until ``done``."""
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < deadline, "the collector did not get there"
            self.collector.look_at = 0.0
            self.collector.tick(time.monotonic())

    @property
    def lane(self) -> Lane:
        """The one lane."""
        (lane,) = self.collector.lanes.keepers
        return lane

    def settled(self) -> bool:
        """Every file is read to its end, and all of it is in Redis."""
        keepers = list(self.collector.lanes)
        wanted = {path.stat().st_ino for path in self.private.iterdir()} if self.private.exists() else set()
        for keeper in keepers:
            for followed in keeper.followed.values():
                if followed.tail is not None:
                    wanted.discard(os.fstat(followed.tail.fileno()).st_ino)
                    followed.tail.poll()
                    if followed.tail.pending() or followed.tail.ended:
                        return False
                if any(flow.waiting for flow in followed.flows):
                    return False
        return bool(keepers) and not wanted and all(keeper.known for keeper in keepers)

    def seal(self) -> None:
        """Be the worker: seal all that waits."""
        for lane in list(self.stream.lanes()):
            while sealing.seal(self.stream, self.store, lane, Seal()) is not None:
                pass

    def archive(self) -> None:
        """Be the worker to the end: the node forgets the lane."""
        lane = self.lane
        self.until(lambda: self._drained(lane))
        self.seal()
        self.until(lambda: self.collector.lanes.keepers[lane].safe)
        status = self.stream.status(lane)
        assert status is not None
        assert self.stream.archived(lane, status.epoch, 60)
        self.until(lambda: not self.collector.lanes.keepers)

    def _drained(self, lane: Lane) -> bool:
        status = self.stream.status(lane)
        return status is not None and status.state is State.DRAINED

    def restart(self) -> None:
        """Begin another life after an end without a word."""
        self.collector.abandon()
        self.collector = Collector(self.settings, self.stream)
        self.collector.resume()

    def archived(self) -> dict[bytes, dict[int, tuple[bytes, list[Gap]]]]:
        """Return what the store has: path → generation → (bytes, NUL where nothing is; gaps)."""
        found: dict[bytes, dict[int, tuple[bytearray, list[Gap]]]] = {}
        for info in self.store.list("live/"):
            body = self.store.get(info.key)
            index = read_index(body, info.key)
            for entry in frames_of(body, index):
                path = index.sources[entry.source].path_bytes
                text, gaps = found.setdefault(path, {}).setdefault(entry.generation, (bytearray(), []))
                frame = entry.frame
                if frame.gap:
                    gaps.append(Gap(entry.generation, frame.offset, frame.end, frame.gap))
                    continue
                if len(text) < frame.end:
                    text.extend(bytes(frame.end - len(text)))
                text[frame.offset : frame.end] = frame.text()
        return {path: {n: (bytes(text), gaps) for n, (text, gaps) in each.items()} for path, each in found.items()}


@pytest.fixture
def make_node(tmp_path: Path, stream: Stream) -> Iterator[Callable[..., Node]]:
    """Give a function that makes the test's node."""
    made: list[Node] = []

    def make(**limits: object) -> Node:
        made.append(Node(tmp_path, stream, **limits))
        return made[-1]

    yield make
    for node in made:
        node.collector.stop_holder()
        node.collector.abandon()


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
    node.until(lambda: bool(list(node.collector.lanes)[0].followed))
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
        node.collector.stop_holder()
        node.collector.abandon()
