"""Whatever users, workers, Redis and the kernel do, in any order: the same bytes once, or a gap that says so."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from tests_node import Node

from trainarchive import sealing
from trainarchive.collector import sending
from trainarchive.run import Gap
from trainarchive.segment import frames_of, read_index
from trainarchive.settings import Seal
from trainarchive.stream import Stream

NAMES = ("a.log", "b.log")
FEW_BYTES = strategies.integers(1, 2000)
MANY_BYTES = strategies.sampled_from([1, 100, 70_000, 600_000])
SHORT_LEASE = Seal(lease_s=0.001, segment_mib=1)


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


class NodeMachine(RuleBasedStateMachine):
    """One node, one run; a worker that dies; a Redis that forgets."""

    stream: Stream
    url: str

    @initialize()
    def begin(self) -> None:
        """Run the prolog."""
        self.home = tempfile.TemporaryDirectory(prefix="ta-")
        self.node = Node(Path(self.home.name), self.stream)
        with redis.Redis.from_url(self.url, protocol=2) as client:
            client.flushall()
        self.files: dict[str, Written] = {}
        self.all: list[Written] = []
        self.sources: dict[str, Written] = {}
        self.node.prolog()
        self.node.until(lambda: bool(self.node.collector.lanes.keepers))

    def settle(self) -> None:
        """Let the collector catch up, and learn which source is which file."""
        self.node.until(self.node.settled)
        by_inode = {os.fstat(one.fd).st_ino: one for one in self.all}
        for keeper in self.node.collector.lanes:
            for source_id, followed in keeper.followed.items():
                if followed.tail is not None:
                    self.sources[source_id] = by_inode[os.fstat(followed.tail.fileno()).st_ino]

    @rule(name=strategies.sampled_from(NAMES), size=FEW_BYTES)
    def write(self, name: str, size: int) -> None:
        """Append; make the file first where there is none."""
        if name not in self.files:
            self.files[name] = Written(self.node.private / name)
            self.all.append(self.files[name])
        self.files[name].append(size)

    @precondition(lambda self: self.files)
    @rule(data=strategies.data(), size=MANY_BYTES)
    def burst(self, data: strategies.DataObject, size: int) -> None:
        """Append much at once."""
        self._any(data).append(size)

    @precondition(lambda self: self.files)
    @rule(data=strategies.data())
    def unlink(self, data: strategies.DataObject) -> None:
        """Remove the name of a file that the collector has found."""
        file = self._any(data)
        self.settle()
        file.path.unlink()
        del self.files[file.path.name]

    @precondition(lambda self: self.files)
    @rule(data=strategies.data(), size=FEW_BYTES)
    def rotate(self, data: strategies.DataObject, size: int) -> None:
        """Rename a file and go on under its old name with a new one; the old still grows."""
        file = self._any(data)
        self.settle()
        name = file.path.name
        file.path = file.path.rename(file.path.with_name(f"{name}.{len(self.all)}.log"))
        del self.files[name]
        file.append(size)
        self.write(name, size)

    @precondition(lambda self: self.files)
    @rule(data=strategies.data(), size=MANY_BYTES)
    def truncate(self, data: strategies.DataObject, size: int) -> None:
        """Truncate a file that was read to its end, and write anew at once, perhaps more than before."""
        file = self._any(data)
        self.settle()
        file.truncate()
        file.append(size)

    @rule()
    def turn(self) -> None:
        """Let the collector do a little."""
        for _ in range(3):
            self.node.turn()

    @rule()
    def catch_up(self) -> None:
        """Let the collector do all it can."""
        self.settle()

    @rule(die_at=strategies.sampled_from(["", "claimed", "taken", "built", "stored"]))
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

    @rule()
    def redis_forgets(self) -> None:
        """Redis comes back empty: what was truncated before it was sealed had only been there."""
        with redis.Redis.from_url(self.url, protocol=2) as client:
            client.flushall()
        for file in self.all:
            file.may_lose.update(range(len(file.texts) - 1))

    @rule()
    def killed(self) -> None:
        """The collector is killed and started again. An ended generation's unsent frames were in its memory."""
        for file in self.all:
            file.may_lose.update(range(len(file.texts) - 1))
        self.node.restart()

    def _any(self, data: strategies.DataObject) -> Written:
        return self.files[data.draw(strategies.sampled_from(sorted(self.files)))]

    def teardown(self) -> None:
        """End the run, archive it, and compare."""
        if not hasattr(self, "node"):
            return
        try:
            self.settle()
            self.node.epilog()
            self.node.archive()
            self._compare()
        finally:
            self.node.end()
            for file in self.all:
                os.close(file.fd)
            self.home.cleanup()

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
        yield


def test_the_same_bytes_once(redis_url: str, stream: Stream) -> None:
    """Any order of writes, rotations, truncations, seals, deaths and losses."""
    attributes: dict[str, Any] = {"stream": stream, "url": redis_url}
    machine = type("Machine", (NodeMachine,), attributes)
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    with _impatient():
        run_state_machine_as_test(
            machine,
            settings=settings(max_examples=20, stateful_step_count=15, deadline=None, suppress_health_check=checks),
        )
