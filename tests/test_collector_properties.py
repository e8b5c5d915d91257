"""Whatever users, workers, Redis and the kernel do, in any order: the same bytes once, or a gap that says so."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, given, settings, strategies
from tests_node import Node

from trainarchive import sealing
from trainarchive.collector import daemon, sending
from trainarchive.run import Gap
from trainarchive.segment import frames_of, read_index
from trainarchive.settings import Seal
from trainarchive.stream import Stream

NAMES = ("a.log", "b.log")
DEATHS = ("", "", "claimed", "taken", "built", "stored")
SIZES = strategies.sampled_from([1, 100, 5000, 70_000, 600_000])
OFTEN = ("write", "write", "write", "turns", "seal", "catch_up")
NOW_AND_THEN = ("unlink", "rotate", "truncate", "redis_goes", "redis_comes", "redis_full", "redis_forgets", "killed")
STEP = strategies.tuples(strategies.sampled_from(OFTEN + NOW_AND_THEN), SIZES, strategies.integers(0, 11))
Step = tuple[str, int, int]
"""An action, a number of bytes, and which file or death."""
SHORT_LEASE = Seal(lease_s=0.001, segment_mib=1)


NOBODY = Stream("unix:///nobody/listens.sock?db=0", timeout_s=0.1, max_pending=1)


class Written:
    """One file as its writers know it: the texts of its generations, and whether one may be lost in part."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_EXCL)
        self.texts = [b""]
        self.may_lose: set[int] = set()

    def append(self, size: int) -> None:
        """Write ``size`` bytes that nothing else wrote."""
        data = os.urandom(size)
        os.write(self.fd, data)
        self.texts[-1] += data

    def truncate(self) -> None:
        """Begin again in the same inode."""
        os.ftruncate(self.fd, 0)
        self.texts.append(b"")


class Story:
    """One node, one run; workers that die; a Redis that goes, is full, or forgets; a collector that is killed."""

    def __init__(self, home: Path, stream: Stream, url: str) -> None:
        self.node = Node(home, stream, memory_mib=1, spool_mib=2, back_off_max_s=0.02)
        self.stream = stream
        self.url = url
        self.up = True
        self.files: dict[str, Written] = {}
        self.all: list[Written] = []
        self.sources: dict[str, Written] = {}
        self.node.prolog()
        self.node.until(lambda: bool(self.node.collector.lanes.keepers))

    def act(self, step: Step) -> None:
        """Do one thing; what needs a file or a Redis that answers is left out where there is none."""
        action, size, pick = step
        names = sorted(self.files)
        file = self.files[names[pick % len(names)]] if names else None
        if action == "write":
            self.write(NAMES[pick % len(NAMES)], size)
        elif action == "seal":
            self.seal(DEATHS[pick % len(DEATHS)])
        elif action in ("turns", "redis_goes", "redis_comes", "redis_full", "redis_forgets", "killed"):
            getattr(self, action)()
        elif self.up and action == "catch_up":
            self.settle()
        elif self.up and file is not None and action in ("unlink", "rotate", "truncate"):
            getattr(self, action)(file, size)

    def settle(self) -> None:
        """Let the collector catch up, and learn which source is which file."""
        for lane in list(self.stream.lanes()):
            self.stream.control(lane, {"pressure": "0"})
        self.node.until(self.node.settled)
        by_inode = {os.fstat(one.fd).st_ino: one for one in self.all}
        for keeper in self.node.collector.lanes:
            for source_id, followed in keeper.files.followed.items():
                if followed.tail is not None:
                    self.sources[source_id] = by_inode[os.fstat(followed.tail.fileno()).st_ino]

    def write(self, name: str, size: int) -> None:
        """Append; make the file first where there is none."""
        if name not in self.files:
            self.files[name] = Written(self.node.private / name)
            self.all.append(self.files[name])
        self.files[name].append(size)

    def unlink(self, file: Written, _size: int) -> None:
        """Remove the name of a file that the collector has found."""
        self.settle()
        file.path.unlink()
        del self.files[file.path.name]

    def rotate(self, file: Written, size: int) -> None:
        """Rename a file and go on under its old name with a new one; the old still grows."""
        self.settle()
        name = file.path.name
        file.path = file.path.rename(file.path.with_name(f"{name}.{len(self.all)}.log"))
        del self.files[name]
        file.append(size)
        self.write(name, size)

    def truncate(self, file: Written, size: int) -> None:
        """Truncate a file that was read to its end, and write anew at once, perhaps more than before."""
        self.settle()
        file.truncate()
        file.append(size)

    def redis_goes(self) -> None:
        """Redis does not answer: frames go to memory, then to the spool, then they wait in their files."""
        self.up = False
        self.node.collector.uplink._stream = NOBODY
        self.turns()

    def redis_comes(self) -> None:
        """Redis answers again."""
        self.up = True
        self.node.collector.uplink._stream = self.stream

    def redis_full(self) -> None:
        """Workers tell the lane that there is no room."""
        for lane in list(self.stream.lanes()):
            self.stream.control(lane, {"pressure": "1"})
        self.turns()

    def turns(self) -> None:
        """Let the collector do more than a little."""
        deadline = time.monotonic() + 0.1
        while time.monotonic() < deadline:
            self.node.turn()

    def seal(self, die_at: str) -> None:
        """A worker seals, and may die between any two steps."""

        def at(step: str) -> None:
            if step == die_at:
                raise WorkerDiedError

        for lane in list(self.stream.lanes()):
            try:
                sealing.seal(self.stream, self.node.store, lane, SHORT_LEASE, at=at)
            except WorkerDiedError:
                continue

    def redis_forgets(self) -> None:
        """Redis comes back empty: what was truncated before it was sealed had only been there."""
        with redis.Redis.from_url(self.url, protocol=2) as client:
            client.flushall()
        for file in self.all:
            file.may_lose.update(range(len(file.texts) - 1))

    def killed(self) -> None:
        """The collector is killed and started again. An ended generation's unsent frames were in its memory."""
        for file in self.all:
            file.may_lose.update(range(len(file.texts) - 1))
        self.node.restart()
        if not self.up:
            self.node.collector.uplink._stream = NOBODY

    def end(self, *, redis_is_down: bool) -> None:
        """End the run, archive it, and compare."""
        self.redis_comes()
        self.settle()
        if redis_is_down:
            self.seal("")
            for number, name in enumerate(sorted(self.files)):
                self.files[name].append(1000 + 200_000 * number)
            self.redis_goes()
        else:
            for file in self.files.values():
                file.truncate()
                file.append(1 + len(file.texts[-2]) % 7)
        self.node.epilog()
        self.node.until(lambda: not any(keeper.files.open_files() for keeper in self.node.collector.lanes))
        if redis_is_down:
            for file in self.files.values():
                file.path.unlink()
                os.ftruncate(file.fd, 0)
        self.redis_comes()
        self.node.archive()
        self._compare()

    def clean(self) -> None:
        """Leave nothing behind."""
        self.node.end()
        for file in self.all:
            os.close(file.fd)

    def _compare(self) -> None:
        archived = self._archived()
        assert {id(file) for file in self.sources.values()} == {id(file) for file in self.all}
        for source_id, file in self.sources.items():
            # An empty generation leaves nothing that could be seen.
            wanted = {number: text for number, text in enumerate(file.texts) if text}
            have = archived.get(source_id, {})
            assert set(have) <= set(wanted)
            for number, text in wanted.items():
                bytes_there, gaps = have.get(number, (b"", []))
                lost = sum(gap.end - gap.start for gap in gaps)
                if number not in file.may_lose:
                    assert not gaps
                    assert bytes_there == text
                else:
                    assert len(bytes_there) + lost >= len(text) or not bytes_there
                    for start, end in _present(len(bytes_there), gaps):
                        assert bytes_there[start:end] == text[start:end]

    def _archived(self) -> dict[str, dict[int, tuple[bytes, list[Gap]]]]:
        found: dict[str, dict[int, tuple[bytearray, list[Gap]]]] = {}
        for info in self.node.store.list("live/"):
            body = self.node.store.get(info.key)
            for entry in frames_of(body, read_index(body, info.key)):
                text, gaps = found.setdefault(entry.source, {}).setdefault(entry.generation, (bytearray(), []))
                frame = entry.frame
                if frame.gap:
                    gaps.append(Gap(entry.generation, frame.offset, frame.end, frame.gap))
                else:
                    text.extend(bytes(max(0, frame.end - len(text))))
                    text[frame.offset : frame.end] = frame.text()
        return {source: {n: (bytes(text), gaps) for n, (text, gaps) in each.items()} for source, each in found.items()}


class WorkerDiedError(Exception):
    """The worker's end, where the test wants it."""


def _present(size: int, gaps: list[Gap]) -> Iterator[tuple[int, int]]:
    at = 0
    for gap in sorted(gaps, key=lambda one: one.start):
        if gap.start > at:
            yield at, min(gap.start, size)
        at = max(at, gap.end)
    if at < size:
        yield at, size


@contextmanager
def _impatient() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sending, "STATUS_S", 0.02)
        patch.setattr(sending, "QUIET_STATUS_S", 0.05)
        patch.setattr(sending, "FULL_WAIT_S", 0.01)
        patch.setattr(daemon, "SILENT_S", 0.02)
        yield


@pytest.mark.timeout(300)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=strategies.lists(STEP, min_size=5, max_size=25), redis_is_down=strategies.booleans())
def test_the_same_bytes_once(steps: list[Step], redis_is_down: bool, redis_url: str, stream: Stream) -> None:
    """Any order of writes, rotations, truncations, seals, deaths and losses."""
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        client.flushall()
    with _impatient(), tempfile.TemporaryDirectory(prefix="ta-") as home:
        story = Story(Path(home), stream, redis_url)
        try:
            for step in steps:
                story.act(step)
            story.end(redis_is_down=redis_is_down)
        finally:
            story.clean()
