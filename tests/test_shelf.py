"""A run's objects as they lie in the store."""

import pytest
from blake3 import blake3

from trainarchive import keys, segment, shelf
from trainarchive.errors import DamagedError, NotFoundError
from trainarchive.frame import Framer
from trainarchive.run import Job, Kind, Lane, LaneReport, RunKey, Source
from trainarchive.segment import Entry
from trainarchive.shelf import Shelved
from trainarchive.store.memory import MemoryStore

RUN = RunKey("c", 7)
LANE = Lane(RUN, "n1", "s1")
SOURCE = Source("n1-a", "n1", Kind.TASK, "/out/a.log")


def put(store: MemoryStore, epoch: str, number: int, modified: float, lane: Lane = LANE) -> str:
    """Store an object with a segment's key, as old as told; return its key."""
    key = keys.segment_key(lane, epoch, f"{number}-0", f"{number}-1", "a" * 32)
    store._objects[key] = (b"", modified)
    return key


def test_in_the_order_of_their_making() -> None:
    """Within an epoch the stream's order counts, and epochs come in the order of their oldest objects."""
    store = MemoryStore()
    second = [put(store, "aa", 1, 30.0), put(store, "aa", 2, 20.0)]
    first = [put(store, "zz", 5, 10.0), put(store, "zz", 9, 99.0)]
    other = put(store, "mm", 1, 1.0, Lane(RUN, "n0", "s1"))
    store.put("live/c/7.0/s1/n1/notes.txt", b"somebody's")
    store.put("live/c/7.0/x.seg", b"somebody's")
    put(store, "aa", 1, 0.0, Lane(RunKey("c", 70), "n1", "s1"))
    assert [each.key for each in shelf.level0(store, RUN)] == [other, *first, *second]


def test_indexes_of_large_and_small() -> None:
    """An index that is longer than the first guess is read in a second range; a wrong object is an error."""
    store = MemoryStore()
    lanes = {LANE.name: LaneReport(Job(1))}
    for text in (blake3(b"x").digest(9), blake3(b"y").digest(1_000)):
        entries = [Entry(SOURCE.id, 0, Framer().frame(at, text, at, at)) for at in range(0, 300 * len(text), len(text))]
        body, digest = segment.build(lanes, {SOURCE.id: SOURCE}, entries)
        key = keys.segment_key(LANE, "e", "1-0", "2-0", digest)
        store.put(key, body)
        found = shelf.read_index(store, Shelved(key, len(body)))
        assert found == shelf.index_of(body, key)
        assert len(found.frames) == 300
        assert shelf.body_of(store, Shelved(key, len(body))) == (body, digest)


def test_what_is_no_segment() -> None:
    """A wrong object is an error, also an empty one, and in a list stands where its index would."""
    store, key = MemoryStore(), "live/c/7.0/s1/n1/x.seg"
    with pytest.raises(NotFoundError):
        shelf.read_index(store, Shelved(key, 10))
    store.put(key, b"rubbish")
    with pytest.raises(DamagedError):
        shelf.read_index(store, Shelved(key, 7))
    store.put(key, b"")
    ((number, shelved, error),) = shelf.indexes(store, [Shelved(key, 0)])
    assert (number, shelved.key, type(error)) == (0, key, DamagedError)
