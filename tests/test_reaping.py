"""Deleting what manifests have replaced, and nothing that anybody may still read or list."""

import pytest
from tests_lane import CONFIG, RUN, KilledError, Node, age, alone, digest, generation_of, text_of

from trainarchive import keys, reaping, sealing
from trainarchive.finishing import finish
from trainarchive.manifest import Manifest
from trainarchive.run import LaneReport, RunKey
from trainarchive.store.memory import MemoryStore
from trainarchive.stream import Stream


def finished(stream: Stream, store: MemoryStore, node: Node) -> Manifest:
    """End the node and write the manifest."""
    node.done(alone())
    (book,) = finish(stream, store, RUN, CONFIG)
    return book


def healed(node: Node, text: bytes) -> None:
    """Have the node come back with more."""
    node.stream.open(node.lane, LaneReport(node.job), [node.source])
    node.write(text)


def test_replaced_segments(stream: Stream) -> None:
    """They are deleted an hour after the manifest, not before; what is listed stays."""
    store = MemoryStore()
    node = Node(stream, "n1")
    for piece in (b"abc", b"def"):
        node.write(piece)
        sealing.seal(stream, store, node.lane, CONFIG.seal)
    assert reaping.reap(store, RUN, 0.0) == reaping.Reaped()
    book = finished(stream, store, node)
    stray = keys.part_key(RUN, "f" * 64)
    store.put(stray, b"a part of a worker that was killed")
    assert reaping.reap(store, RUN, 3600.0).deleted == ()
    assert reaping.reap(store, RUN, 3600.0, now=book.written + 3599).deleted == ()
    steps: list[str] = []
    gone = reaping.reap(store, RUN, 3600.0, now=book.written + 3700, at=steps.append).deleted
    assert set(gone) == {*book.replaces, stray}
    assert len(steps) == len(gone)
    assert reaping.reap(store, RUN, 3600.0, now=book.written + 3700).deleted == ()
    assert text_of(store, book, "n1-a") == b"abcdef"
    assert list(store.list("live/")) == []
    # Late bytes after that still find all that is there.
    healed(node, b"ghi")
    later = finished(stream, store, node)
    assert text_of(store, later, "n1-a") == b"abcdefghi"
    assert generation_of(later, "n1-a").blake3 == digest(b"abcdefghi")


def test_a_replaced_part_stays_as_long(stream: Stream) -> None:
    """An old part that a new manifest replaces has readers too: the manifest's age counts, not the part's."""
    store = MemoryStore()
    node = Node(stream, "n1")
    node.write(b"abc")
    sealing.seal(stream, store, node.lane, CONFIG.seal)
    node.write(b"def")
    (old,) = finished(stream, store, node).parts
    age(store, 7200.0)
    healed(node, b"ghi")
    book = finished(stream, store, node)
    assert old.key in book.replaces
    assert old.key not in reaping.reap(store, RUN, 3600.0, now=book.written + 10).deleted
    assert old.key in reaping.reap(store, RUN, 3600.0, now=book.written + 3700).deleted


def test_a_killed_workers_part_is_young_again(stream: Stream) -> None:
    """The part that a killed worker left, hours ago, is not deleted under the worker that lists it now."""
    store = MemoryStore()
    node = Node(stream, "n1")
    node.write(b"abc")
    finished(stream, store, node)
    healed(node, b"def")
    node.done(alone())

    def die(at: str) -> None:
        if at == "merged":
            raise KilledError

    with pytest.raises(KilledError):
        finish(stream, store, RUN, CONFIG, at=die)
    age(store, 7200.0)
    deleted: list[str] = []

    def reap(at: str) -> None:
        if at == "merged":
            deleted.extend(reaping.reap(store, RUN, 3600.0).deleted)

    (book,) = finish(stream, store, RUN, CONFIG, at=reap)
    assert deleted == []
    assert text_of(store, book, "n1-a") == b"abcdef"


def test_candidates() -> None:
    """Every run with segments is looked at once, whatever else lies in the store."""
    store = MemoryStore()
    runs = {RunKey("c", 7), RunKey("c", 7, 1), RunKey("d", 1)}
    for run in runs:
        store.put(f"{keys.live_prefix(run)}s1/n1/x.seg", b"")
    store.put("live/ bad/7.0/x", b"")
    store.put("live/c/rubbish/x", b"")
    store.put("live/file", b"")
    found = reaping.candidates(store)
    assert len(found) == len(runs)
    assert set(found) == runs
