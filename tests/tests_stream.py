"""What the tests of the door share: a lane, and how frames get into it and out."""

import os

from trainarchive.frame import Frame, Framer
from trainarchive.run import Job, Kind, Lane, LaneReport, RunKey, Source
from trainarchive.stream import Answer, Append, Stream

LANE = Lane(RunKey("hpc", 7, 1), "node-1.site", "sABC")
REPORT = LaneReport(Job(uid=1000, user="ada"))
DRAINED = LaneReport(Job(uid=1000, user="ada"), drained=True)
SOURCE = Source("s1", "node-1.site", Kind.TASK, "/home/ada/out.log", rank=3)


def frames(start: int, *sizes: int) -> list[Frame]:
    """Make frames of random bytes that follow each other from ``start``."""
    framer, made = Framer(), []
    for size in sizes:
        made.append(framer.frame(start, os.urandom(size), 1_700_000_000_000_000_001, 5))
        start += size
    return made


def append(stream: Stream, parts: list[Frame], floor: int = 0, *, lane: Lane = LANE, source: str = "s1") -> Answer:
    """Send one source's frames."""
    (answer,) = stream.append([Append(lane, source, 0, parts, floor)])
    return answer


def seal(stream: Stream, lane: Lane = LANE) -> int:
    """Do what a worker does with all that waits; return the number of entries."""
    count = 0
    while (claim := stream.claim(lane, max_bytes=1 << 20, lease_s=60)) is not None:
        entries = stream.take(claim)
        assert stream.commit(claim, {(entry.source, entry.generation): entry.frame.end for entry in entries})
        count += len(entries)
    return count
