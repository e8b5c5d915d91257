"""The retrying store: what is tried again, how often, and how a listing goes on."""

import time
from collections.abc import Callable, Iterator

import pytest

from trainarchive.errors import DamagedError, NotFoundError, TrainarchiveError, UnavailableError
from trainarchive.store.contract import ObjectInfo
from trainarchive.store.memory import MemoryStore
from trainarchive.store.retrying import RetryingStore


class Flaky(MemoryStore):
    """A store that works, but raises ``errors`` first, one a call, and breaks off listings before ``breaks``."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[TrainarchiveError] = []
        self.breaks: list[str] = []
        self.calls = 0

    def _maybe(self) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)

    def put(self, key: str, body: bytes) -> None:
        """Do as MemoryStore, or fail after it: the answer is lost."""
        super().put(key, body)
        self._maybe()

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """Do as MemoryStore, or fail after it: the answer is lost."""
        done = super().put_if_absent(key, body)
        self._maybe()
        return done

    def get(self, key: str) -> bytes:
        """Fail or do as MemoryStore."""
        self._maybe()
        return super().get(key)

    def delete(self, key: str) -> None:
        """Do as MemoryStore, or fail after it."""
        super().delete(key)
        self._maybe()

    def presign(self, key: str, seconds: int) -> str:
        """Fail or give a URL."""
        self._maybe()
        return f"made://{key}?{seconds}"

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Fail at the first item, or break off."""
        self._maybe()
        for info in super().list(prefix):
            if self.breaks and info.key == self.breaks[0]:
                del self.breaks[0]
                raise UnavailableError("broke off")
            yield info

    def children(self, prefix: str) -> Iterator[str]:
        """Fail at the first item, or break off."""
        self._maybe()
        for child in super().children(prefix):
            if self.breaks and child == self.breaks[0]:
                del self.breaks[0]
                raise UnavailableError("broke off")
            yield child


@pytest.fixture
def flaky() -> Flaky:
    """Give a store that fails on demand."""
    return Flaky()


def _retrying(store: Flaky, *, attempts: int = 4, timeout_s: float = 10.0, pause_s: float = 0.001) -> RetryingStore:
    return RetryingStore(
        store, attempts=attempts, timeout_s=timeout_s, first_pause_s=pause_s, longest_pause_s=pause_s * 4, jitter_s=0
    )


CALLS: dict[str, Callable[[RetryingStore], object]] = {
    "put": lambda store: store.put("a", b"x"),
    "put_if_absent": lambda store: store.put_if_absent("a", b"x"),
    "get": lambda store: store.get("a"),
    "get_range": lambda store: store.get_range("a", -1, 1),
    "list": lambda store: list(store.list("")),
    "children": lambda store: list(store.children("")),
    "delete": lambda store: store.delete("b"),
    "presign": lambda store: store.presign("a", 7),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_tried_again(flaky: Flaky, name: str) -> None:
    """Each method gives, after passing errors, what it gives without them."""
    flaky.put("a", b"x")
    calm = CALLS[name](_retrying(flaky))
    flaky.calls, flaky.errors = 0, [UnavailableError("busy")] * 3
    assert CALLS[name](_retrying(flaky)) == calm
    assert flaky.calls == 4


@pytest.mark.parametrize("name", CALLS)
def test_the_last_error_comes_out(flaky: Flaky, name: str) -> None:
    """After so many attempts the caller gets the store's own error."""
    flaky.put("a", b"x")
    flaky.calls, flaky.errors = 0, [UnavailableError(f"busy {number}") for number in range(9)]
    with pytest.raises(UnavailableError, match="busy 3"):
        CALLS[name](_retrying(flaky))
    assert flaky.calls == 4


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", [NotFoundError, DamagedError, TrainarchiveError])
def test_lasting_errors_are_not_tried_again(flaky: Flaky, name: str, kind: type[TrainarchiveError]) -> None:
    """An error whose class has no ``retry`` comes out at once."""
    flaky.put("a", b"x")
    flaky.calls, flaky.errors = 0, [kind("no")]
    with pytest.raises(kind, match="no"):
        CALLS[name](_retrying(flaky))
    assert flaky.calls == 1


def test_other_exceptions_are_not_tried_again(flaky: Flaky) -> None:
    """A defect is no outage."""
    with pytest.raises(AttributeError):
        _retrying(flaky).get(3)  # type: ignore[arg-type]
    assert flaky.calls == 1


def test_a_lost_answer_to_put_if_absent_is_a_success(flaky: Flaky) -> None:
    """The object was written, the answer was lost: the repeat finds the same bytes and says True."""
    flaky.errors = [UnavailableError("reset by peer")]
    assert _retrying(flaky).put_if_absent("a", b"mine")
    flaky.errors = [UnavailableError("reset by peer")]
    assert not _retrying(flaky).put_if_absent("a", b"others")


def test_a_listing_goes_on_where_it_broke_off(flaky: Flaky) -> None:
    """Every key comes once and in order, however often the listing breaks."""
    keys = [f"{number:02d}" for number in range(40)]
    for key in keys:
        flaky.put(key, b"")
    flaky.breaks = ["00", "00", "07", "08", "08", "39", "39", "39"]
    assert [info.key for info in _retrying(flaky, attempts=4).list("")] == keys
    flaky.breaks = ["07", "08", "39"]
    assert list(_retrying(flaky, attempts=2).children("")) == keys
    assert flaky.breaks == []


def test_a_listing_that_gets_nowhere_ends(flaky: Flaky) -> None:
    """Attempts without a new key are counted; then the error comes out, after the keys that were there."""
    for key in "abc":
        flaky.put(key, b"")
    flaky.breaks = ["b"] * 9
    listing = _retrying(flaky, attempts=3).list("")
    assert next(listing).key == "a"
    with pytest.raises(UnavailableError, match="broke off"):
        next(listing)
    assert len(flaky.breaks) == 9 - 4, "one that broke off, three attempts"


def test_a_key_deleted_where_a_listing_broke_off(flaky: Flaky) -> None:
    """The listing goes on behind the last key even if that is gone by then."""
    for key in "abcd":
        flaky.put(key, b"")
    flaky.breaks = ["c"]
    listing = _retrying(flaky).list("")
    assert [next(listing).key, next(listing).key] == ["a", "b"]
    flaky.delete("b")
    assert [info.key for info in listing] == ["c", "d"]


def test_the_time_limit_ends_it_before_the_attempts(flaky: Flaky) -> None:
    """Once the time is over no further attempt begins."""
    flaky.errors = [UnavailableError("busy")] * 10_000
    begun = time.monotonic()
    with pytest.raises(UnavailableError):
        _retrying(flaky, attempts=10_000, timeout_s=0.1, pause_s=0.01).get("a")
    assert 0.1 <= time.monotonic() - begun < 5
    assert 2 <= flaky.calls <= 20


def test_pauses_grow(flaky: Flaky) -> None:
    """The pauses double up to the longest: 10, 20, 40, 40 ms here."""
    flaky.put("a", b"x")
    flaky.errors = [UnavailableError("busy")] * 4
    begun = time.monotonic()
    _retrying(flaky, attempts=5, pause_s=0.01).get("a")
    assert time.monotonic() - begun >= 0.11


@pytest.mark.parametrize(("attempts", "timeout_s"), [(1, 10.0), (0, 10.0), (-1, 10.0), (5, 0.0)])
def test_no_attempts_or_no_time_means_one_call(flaky: Flaky, attempts: int, timeout_s: float) -> None:
    """Settings of 0 switch trying again off, not the store."""
    flaky.errors = [UnavailableError("busy")]
    store = _retrying(flaky, attempts=attempts, timeout_s=timeout_s)
    with pytest.raises(UnavailableError):
        store.get("a")
    assert flaky.calls == 1
    store.put("a", b"x")
    assert store.get("a") == b"x"
