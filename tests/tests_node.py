"""A node for the collector's tests: one collector in this process, and a worker's own functions."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from trainarchive import notice, sealing
from trainarchive.collector import Collector
from trainarchive.holder import Holder
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
        self.collector.start()
        self.private = self.settings.spool / "jobs" / f"{JOB}.0"

    def prolog(self, **more: bytes) -> None:
        """Do what Prolog does; ``more`` replaces or adds values."""
        self.private.mkdir(exist_ok=True)
        self._notice("prolog", {"TRAINARCHIVE_DIR": os.fsencode(self.private)} | more)

    def epilog(self, **more: bytes) -> None:
        """Do what Epilog does."""
        self._notice("epilog", {"SLURM_JOB_EXIT_CODE2": b"0:0"} | more)

    def all_taken(self) -> bool:
        """No notice waits."""
        return not notice.waiting(self.settings.spool)

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

    def turn(self) -> None:
        """Turn the loop once."""
        self.collector.look_at = 0.0
        self.collector.tick(time.monotonic())

    def until(self, done: Callable[[], bool]) -> None:
        """Turn the loop until ``done``."""
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            assert time.monotonic() < deadline, "the collector did not get there"
            self.turn()

    @property
    def lane(self) -> Lane:
        """The one lane."""
        (lane,) = self.collector.lanes.keepers
        return lane

    def settled(self) -> bool:
        """Every file is read to its end, and all of it is in Redis, as Redis itself says."""
        keepers = list(self.collector.lanes)
        wanted = {path.stat().st_ino for path in self.private.iterdir()} if self.private.exists() else set()
        for keeper in keepers:
            status = self.stream.status(keeper.lane)
            if status is None or status.epoch != keeper.epoch:
                return False
            for followed in keeper.files:
                if followed.tail is not None:
                    wanted.discard(os.fstat(followed.tail.fileno()).st_ino)
                    if followed.tail.poll() or followed.tail.ended:
                        return False
                if any(status.committed.get(flow.key, 0) < flow.position for flow in followed.flows):
                    return False
        return bool(keepers) and not wanted

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
        self.abandon()
        self.collector = Collector(self.settings, self.stream)
        self.collector.start()

    def abandon(self) -> None:
        """Do what the kernel does to a killed collector: its threads and files go, nothing is written."""
        self.collector._watching.stop()
        self.collector.uplink.close()
        self.collector._holding.disconnect()
        self.collector._lock.close()
        self.collector._waking.close()
        for keeper in self.collector.lanes:
            for followed in keeper.files:
                if followed.tail is not None:
                    followed.tail.close()
                for flow in followed.flows:
                    if flow.spool is not None:
                        flow.spool.close()

    def end(self) -> None:
        """Leave no process behind."""
        self.abandon()
        Holder.start(self.settings.state).stop()

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
