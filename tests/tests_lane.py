"""A pretend collector for the tests of what workers do with a run: one lane of it, and how its books are read."""

from pathlib import Path
from typing import Any

import blake3
import msgspec
import redis

from trainarchive import shelf
from trainarchive.frame import Framer, gap_frame
from trainarchive.manifest import Generation, Manifest
from trainarchive.run import Job, Kind, Lane, LaneReport, RunKey, Source
from trainarchive.segment import frames_of
from trainarchive.settings import Finish, Seal, Settings
from trainarchive.store.memory import MemoryStore
from trainarchive.stream import Append, Outcome, State, Stream

RUN = RunKey("c", 7)
JOB = Job(1000, "ann", nodes="n[1-2]", num_nodes=2, started=1000.0)
ENDED = msgspec.structs.replace(JOB, ended=1100.0, exit_code="0:0", derived_exit_code="0:0")
CONFIG = Settings(home=Path("/nowhere"), seal=Seal(lease_s=30.0))
AT_ONCE = msgspec.structs.replace(CONFIG, finish=Finish(deadline_s=0.0))
UNMERGED = msgspec.structs.replace(CONFIG, seal=Seal(lease_s=30.0, merge_below_mib=0))


class KilledError(Exception):
    """Stands for a worker that dies here."""


class Node:
    """A pretend collector: one lane with one source."""

    def __init__(
        self,
        stream: Stream,
        node: str,
        token: str = "s1",  # noqa: S107 - a lane's token is no secret
        *,
        run: RunKey = RUN,
        job: Job = JOB,
        **source: Any,
    ) -> None:
        self.stream = stream
        self.lane = Lane(run, node, token)
        self.source = Source(f"{node}-a", node, Kind.TASK, f"/out/{node}.log", **source)
        self.offset = 0
        self.job = job
        stream.open(self.lane, LaneReport(self.job), [self.source])

    def write(self, text: bytes, *, generation: int = 0, at: int | None = None) -> None:
        """Send some text."""
        frame = Framer().frame(self.offset if at is None else at, text, 5000 + self.offset, 1)
        (answer,) = self.stream.append([Append(self.lane, self.source.id, generation, [frame])])
        assert answer.outcome is Outcome.OK
        self.offset = frame.end

    def lose(self, size: int, reason: str) -> None:
        """Send a gap."""
        frame = gap_frame(self.offset, self.offset + size, 1, 1, reason)
        self.stream.append([Append(self.lane, self.source.id, 0, [frame])])
        self.offset += size

    def done(self, job: Job = ENDED) -> None:
        """Say that all was sent."""
        self.stream.report(self.lane, LaneReport(job, drained=True, drained_at=1101.0))

    @property
    def state(self) -> State:
        """The lane's state."""
        found = self.stream.status(self.lane)
        assert found is not None
        return found.state


def text_of(store: MemoryStore, book: Manifest, source: str, generation: int = 0) -> bytes:
    """Read a generation's text by nothing but the manifest and its parts."""
    pieces: dict[int, bytes] = {}
    for part in book.parts:
        body = store.get(part.key)
        assert (len(body), blake3.blake3(body).hexdigest()) == (part.size, part.blake3)
        spans = [
            (span.start, span.end) for span in part.spans if (span.source, span.generation) == (source, generation)
        ]
        for entry in frames_of(body, shelf.index_of(body, part.key)):
            if (entry.source, entry.generation) == (source, generation) and not entry.frame.gap:
                text = entry.frame.text()
                for start, end in spans:
                    low, high = max(start, entry.frame.offset), min(end, entry.frame.end)
                    if low < high:
                        pieces[low] = max(
                            pieces.get(low, b""), text[low - entry.frame.offset : high - entry.frame.offset], key=len
                        )
    joined = b""
    for start in sorted(pieces):
        joined += pieces[start]
    return joined


def generation_of(book: Manifest, source: str, number: int = 0) -> Generation:
    """Return one generation's entry."""
    (entry,) = [entry for entry in book.sources if entry.source.id == source]
    return next(each for each in entry.generations if each.number == number)


def digest(text: bytes) -> str:
    """Return the text's BLAKE3."""
    return blake3.blake3(text).hexdigest()


def alone(job: Job = ENDED) -> Job:
    """Return the job as one of a single node."""
    return msgspec.structs.replace(job, nodes="n1", num_nodes=1)


def forget(redis_url: str) -> None:
    """Have Redis lose its memory."""
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        client.flushall()


def age(store: MemoryStore, seconds: float) -> None:
    """Make all objects so much older."""
    for key, (body, modified) in list(store._objects.items()):
        store._objects[key] = (body, modified - seconds)
