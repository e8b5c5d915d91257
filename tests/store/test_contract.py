"""Every store keeps every promise of ``trainarchive.store.contract``. A new store joins by one line in OPENERS."""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ClassVar
from urllib.request import urlopen

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from trainarchive.errors import NotFoundError, TrainarchiveError
from trainarchive.store.contract import MAX_KEY, MAX_NAME, ObjectInfo, Store
from trainarchive.store.local import LocalStore
from trainarchive.store.memory import MemoryStore
from trainarchive.store.retrying import RetryingStore

Fresh = Callable[[], Store]
"""Makes a new, empty store at every call."""


@contextmanager
def _memory(_: Path) -> Iterator[Fresh]:
    yield MemoryStore


@contextmanager
def _local(directory: Path) -> Iterator[Fresh]:
    # In memory where there is such a place: thousands of fsyncs wait long on a busy disk, and test_local has a disk.
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else directory
    with tempfile.TemporaryDirectory(prefix="trainarchive-", dir=place) as made:
        yield lambda: LocalStore(tempfile.mkdtemp(dir=made) + "/store")


@contextmanager
def _retrying(_: Path) -> Iterator[Fresh]:
    yield lambda: RetryingStore(MemoryStore(), attempts=3, timeout_s=10)


OPENERS: dict[str, Callable[[Path], AbstractContextManager[Fresh]]] = {
    "memory": _memory,
    "local": _local,
    "retrying": _retrying,
}


@pytest.fixture(params=OPENERS)
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fresh]:
    """Give the maker of empty stores of one kind after the other."""
    with OPENERS[request.param](tmp_path) as make:
        yield make


@pytest.fixture
def store(fresh: Fresh) -> Store:
    """Give one empty store."""
    return fresh()


REFUSED_KEYS = [
    "", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", ".tmp/x", "a/.hidden",
    "a\0b", "a\nb", "a\x7fb", "a\udcffb", "x" * (MAX_NAME + 1), "é" * 128, "/".join(["x" * 100] * 11),
]  # fmt: skip

REFUSED_PREFIXES = ["/", "//", "a//", "..", "../", "a/../", ".tmp/", "a/.", "a\0", "\udcff", "x" * (MAX_NAME + 1)]


def _keys(store: Store, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


def test_what_was_put_is_got(store: Store) -> None:
    """Any bytes come back as they went in, and a second put replaces the first."""
    for body in (b"", b"one", bytes(range(256)) * 40_000):
        store.put("a/b", body)
        assert store.get("a/b") == body


def test_put_if_absent_keeps_the_first(store: Store) -> None:
    """The first body stays; the same bytes again are a success, others are not."""
    assert store.put_if_absent("a/b", b"one")
    assert store.put_if_absent("a/b", b"one")
    assert not store.put_if_absent("a/b", b"two")
    assert not store.put_if_absent("a/b", b"")
    assert store.get("a/b") == b"one"


def test_put_if_absent_yields_to_put(store: Store) -> None:
    """A key that was put is taken, and a deleted one is free."""
    store.put("a", b"one")
    assert not store.put_if_absent("a", b"two")
    store.delete("a")
    assert store.put_if_absent("a", b"two")
    assert store.get("a") == b"two"


def test_missing_objects_are_not_found(store: Store) -> None:
    """Reads of a key that is not there raise NotFoundError, also where it is only the beginning of others."""
    for key in ("a", "d", "d/f/g"):
        store.put("d/f", b"x")
        with pytest.raises(NotFoundError):
            store.get(key)
        with pytest.raises(NotFoundError):
            store.get_range(key, 0, 1)
        with pytest.raises(NotFoundError):
            store.get_range(key, -1, 1)


def test_an_empty_store_answers(store: Store) -> None:
    """Before the first put nothing is there, and nothing fails."""
    assert _keys(store) == _keys(store, "a/b") == []
    assert list(store.children("")) == list(store.children("a/")) == []
    store.delete("a/b")
    with pytest.raises(NotFoundError):
        store.get("a/b")


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [
        (0, 10, b"0123456789"), (0, 3, b"012"), (3, 4, b"3456"), (8, 10, b"89"), (9, 1, b"9"),
        (10, 1, b""), (11, 5, b""), (2**62, 2**62, b""), (0, 2**62, b"0123456789"), (4, 0, b""),
        (-3, 3, b"789"), (-3, 1, b"789"), (-3, 0, b"789"), (-10, 10, b"0123456789"), (-99, 99, b"0123456789"),
    ],
)  # fmt: skip
def test_ranges(store: Store, start: int, length: int, expected: bytes) -> None:
    """A range is cut at the object's end, is empty behind it, and counts from the end when negative."""
    store.put("a", b"0123456789")
    assert store.get_range("a", start, length) == expected


def test_ranges_of_nothing(store: Store) -> None:
    """An empty object has only empty ranges."""
    store.put("a", b"")
    assert [store.get_range("a", start, 5) for start in (0, 5, -5)] == [b"", b"", b""]


def test_list_tells_size_and_time(store: Store) -> None:
    """A listing has each object's size and the time of its last put."""
    before = time.time()
    store.put("a", b"12345")
    [info] = store.list("")
    assert info == ObjectInfo("a", 5, info.modified)
    # Whole seconds in some stores; and a file system's clock may stand a tick behind.
    assert before - 2 <= info.modified <= time.time() + 2


def test_list_is_in_byte_order_of_whole_keys(store: Store) -> None:
    """A slash sorts as the byte that it is, among the other bytes of the keys."""
    keys = ["a-", "a.b", "a/b", "a/b-", "a0", "a/b.c/d", "aé", "a/é/x", "b", "a/c", "A", "a/b0", "a!", "😀/x", "￿/x"]
    for key in keys:
        store.put(key, key.encode())
    assert _keys(store) == sorted(keys, key=str.encode)
    assert [info.size for info in store.list("")] == [len(key) for key in sorted(map(str.encode, keys))]


def test_a_prefix_may_end_within_a_name(store: Store) -> None:
    """``list`` compares keys as text: whether a slash ends the prefix makes no difference in kind."""
    for key in ("ab/c/d", "ab/cc", "ab/d", "abc", "b"):
        store.put(key, b"")
    assert _keys(store, "ab") == ["ab/c/d", "ab/cc", "ab/d", "abc"]
    assert _keys(store, "ab/") == ["ab/c/d", "ab/cc", "ab/d"]
    assert _keys(store, "ab/c") == ["ab/c/d", "ab/cc"]
    assert _keys(store, "ab/c/") == ["ab/c/d"]
    assert _keys(store, "ab/cc") == ["ab/cc"]
    assert _keys(store, "ab/cc/") == []
    assert _keys(store, "zz/y") == []


def test_children_stop_at_the_next_slash(store: Store) -> None:
    """``children`` gives each next name once, in order, with its slash where keys go on."""
    for key in ("a/b/c", "a/b/d", "a/bb", "a/b-/x", "a/c", "d"):
        store.put(key, b"")
    assert list(store.children("")) == ["a/", "d"]
    assert list(store.children("a/")) == ["b-/", "b/", "bb", "c"]
    assert list(store.children("a/b")) == ["-/", "/", "b"]
    assert list(store.children("a/bb")) == [""]
    assert list(store.children("a/c/")) == []
    assert list(store.children("x/")) == []


def test_delete_may_be_repeated(store: Store) -> None:
    """A deleted object is gone, its neighbours are not, and deleting again is no error."""
    store.put("a/b", b"")
    store.put("a/c", b"")
    store.delete("a/b")
    store.delete("a/b")
    store.delete("a")
    store.delete("a/c/d")
    assert _keys(store) == ["a/c"]


def test_empty_places_leave_no_trace(store: Store) -> None:
    """After the last object below a name is deleted, the name is free for an object, and is no child."""
    store.put("a/b/c/d", b"")
    store.delete("a/b/c/d")
    assert list(store.children("")) == []
    store.put("a/b", b"x")
    assert _keys(store) == ["a/b"]


@pytest.mark.parametrize(("first", "second"), [("a/b", "a/b/c"), ("a/b/c", "a/b"), ("a", "a/b/c/d"), ("a/b/c/d", "a")])
def test_keys_within_keys_harm_nobody(store: Store, first: str, second: str) -> None:
    """A key that continues another with a slash is refused or kept beside it; the first stays whole."""
    store.put(first, b"first")
    for put in (store.put, store.put_if_absent):
        refused = None
        try:
            put(second, b"second")
        except TrainarchiveError as error:
            refused = error
        assert store.get(first) == b"first"
        if refused is None:
            assert store.get(second) == b"second"
        else:
            assert not refused.retry
            assert _keys(store) == [first]


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_bad_keys_are_refused(store: Store, key: str) -> None:
    """No method takes a key that some store could not hold, or that could lead elsewhere."""
    calls: list[Callable[[], object]] = [
        lambda: store.put(key, b""),
        lambda: store.put_if_absent(key, b""),
        lambda: store.get(key),
        lambda: store.get_range(key, 0, 1),
        lambda: store.delete(key),
        lambda: store.presign(key, 1),
    ]
    for call in calls:
        with pytest.raises(TrainarchiveError, match="not a key"):
            call()


@pytest.mark.parametrize("prefix", REFUSED_PREFIXES)
def test_bad_prefixes_are_refused(store: Store, prefix: str) -> None:
    """No listing takes a prefix with which no key can begin."""
    with pytest.raises(TrainarchiveError, match="not a key"):
        list(store.list(prefix))
    with pytest.raises(TrainarchiveError, match="not a key"):
        list(store.children(prefix))


@pytest.mark.parametrize(
    "key", ["x" * MAX_NAME, "/".join(["x" * 63] * 16), "a/" * (MAX_KEY // 2 - 1) + "b", "a b/ü+~%'\"\\"]
)
def test_long_and_odd_keys_are_kept(store: Store, key: str) -> None:
    """Keys up to the limits, deep ones, and ones with special characters work like others."""
    store.put(key, b"x")
    assert store.put_if_absent(key, b"x")
    assert store.get(key) == b"x"
    assert _keys(store) == [key]
    assert _keys(store, key) == [key]
    store.delete(key)
    assert _keys(store) == []


def test_a_listing_survives_changes(store: Store) -> None:
    """Objects that go or come while a listing runs break nothing; all the others are in it once."""
    keys = [f"{first}/{second}" for first in "abcd" for second in "wxyz"]
    for key in keys:
        store.put(key, b"")
    listing = store.list("")
    seen = [next(listing).key]
    for key in ("a/x", "b/w", "b/x", "b/y", "b/z", "d/z"):
        store.delete(key)
    store.put("c/new", b"")
    seen += [info.key for info in listing]
    assert seen == sorted(set(seen))
    assert set(keys) - {"a/x", "b/w", "b/x", "b/y", "b/z", "d/z"} <= set(seen) <= {*keys, "c/new"}


def test_one_of_many_wins(store: Store) -> None:
    """Of threads that put other bytes at once, one is told True, and its bytes are there; each time."""
    threads = 8
    start = threading.Barrier(threads)

    def contend(number: int) -> list[bool]:
        won = []
        for turn in range(20):
            start.wait(10)
            won.append(store.put_if_absent(f"turn/{turn:02d}", b"%d" % number * 1000))
        return won

    with ThreadPoolExecutor(threads) as pool:
        answers = list(zip(*pool.map(contend, range(threads)), strict=True))
    for turn, won in enumerate(answers):
        assert sum(won) == 1
        assert store.get(f"turn/{turn:02d}") == b"%d" % won.index(True) * 1000


def test_many_with_the_same_bytes_all_win(store: Store) -> None:
    """Threads that put the same bytes at once are all told True."""
    with ThreadPoolExecutor(8) as pool:
        for turn in range(10):
            assert all(pool.map(lambda _, key=f"a/{turn}": store.put_if_absent(key, b"same"), range(8)))


def test_readers_see_whole_objects(store: Store) -> None:
    """While an object is replaced again and again, every read gives one of its bodies, whole."""
    bodies = [bytes([number]) * (50_000 + number) for number in range(5)]
    store.put("a/b", bodies[0])
    done = threading.Event()

    def replace() -> None:
        for turn in range(60):
            store.put("a/b", bodies[turn % len(bodies)])
        done.set()

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(replace)
        while not done.is_set() and not writer.done():
            assert store.get("a/b") in bodies
            assert len(store.get_range("a/b", -60_000, 0)) in {len(body) for body in bodies}
            assert _keys(store, "a/") == ["a/b"]
        writer.result()


def test_puts_and_deletes_of_neighbours_do_not_meet(store: Store) -> None:
    """A put succeeds whatever deletes do to the place where its object goes."""
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            store.put("a/b/c/gone", b"")
            store.delete("a/b/c/gone")

    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(come_and_go) for _ in range(2)]
        try:
            for turn in range(100):
                body = b"%d" % turn
                assert store.put_if_absent("a/b/c/kept", body)
                assert store.get("a/b/c/kept") == body
                store.delete("a/b/c/kept")
                store.put("a/b/kept", body)
                assert store.get("a/b/kept") == body
                store.delete("a/b/kept")
        finally:
            done.set()
        for other in others:
            other.result()


def test_a_presigned_url_reads_or_the_error_says_what_to_do(store: Store) -> None:
    """A store with a server gives a URL that needs nothing else; one without says so, and what to do."""
    store.put("a/b c", b"body")
    refused = None
    try:
        url = store.presign("a/b c", 60)
    except TrainarchiveError as error:
        refused = error
    else:
        with urlopen(url, timeout=10) as answer:  # noqa: S310 - the URL is the store's own
            assert answer.read() == b"body"
    if refused is not None:
        assert "no URL" in refused.what
        assert (bool(refused.hint), refused.retry) == (True, False)


NAMES = st.sampled_from(["a", "a-", "a.", "a0", "b", "é", " ", "a" * 40])
KEYS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
PREFIXES = st.one_of(KEYS, KEYS.map(lambda key: key + "/"), KEYS.map(lambda key: key[:-1])).filter(
    lambda prefix: "//" not in prefix and not prefix.startswith("/")
)
BODIES = st.binary(max_size=8)


class _Compared(RuleBasedStateMachine):
    """A store beside a dict: whatever is done to both, both look the same."""

    known = Bundle("known")
    fresh: ClassVar[Fresh]

    def __init__(self) -> None:
        super().__init__()
        self.store = type(self).fresh()
        self.model: dict[str, bytes] = {}

    def _excluded(self, key: str) -> bool:
        return any(key.startswith(other + "/") or other.startswith(key + "/") for other in self.model)

    @rule(target=known, key=KEYS)
    def name(self, key: str) -> str:
        """Keep keys, so that rules meet on them."""
        return key

    @rule(key=known, body=BODIES)
    def put(self, key: str, body: bytes) -> None:
        """Put, where the contract does not leave the answer open."""
        if not self._excluded(key):
            self.store.put(key, body)
            self.model[key] = body

    @rule(key=known, body=BODIES)
    def put_if_absent(self, key: str, body: bytes) -> None:
        """Answer what the dict says."""
        if not self._excluded(key):
            assert self.store.put_if_absent(key, body) == (self.model.setdefault(key, body) == body)

    @rule(key=known)
    def delete(self, key: str) -> None:
        """Delete, whether it is there or not."""
        self.store.delete(key)
        self.model.pop(key, None)

    @rule(key=known, start=st.integers(-10, 10), length=st.integers(0, 10))
    def read(self, key: str, start: int, length: int) -> None:
        """Read whole and in part; what is missing is missing."""
        if key in self.model:
            body = self.model[key]
            assert self.store.get(key) == body
            expected = body[start:] if start < 0 else body[start : start + length]
            assert self.store.get_range(key, start, length) == expected
        else:
            with pytest.raises(NotFoundError):
                self.store.get(key)

    @rule(prefix=PREFIXES)
    def look(self, prefix: str) -> None:
        """List with every kind of prefix."""
        expected = sorted(key for key in self.model if key.startswith(prefix))
        assert _keys(self.store, prefix) == expected
        rests = (key.removeprefix(prefix).partition("/") for key in expected)
        assert list(self.store.children(prefix)) == sorted({name + slash for name, slash, _ in rests})

    @invariant()
    def same(self) -> None:
        """All keys and sizes agree."""
        listed = [(info.key, info.size) for info in self.store.list("")]
        assert listed == [(key, len(body)) for key, body in sorted(self.model.items())]


def test_behaves_like_a_dict(fresh: Fresh) -> None:
    """Any sequence of calls leaves the store as it leaves a dict."""
    run_state_machine_as_test(
        type("Compared", (_Compared,), {"fresh": staticmethod(fresh)}),
        settings=settings(
            max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
