"""Trying again, once for all stores: nobody else loops over a store's errors."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import stamina

from trainarchive.errors import TrainarchiveError
from trainarchive.store.contract import ObjectInfo, Store

T = TypeVar("T")


class RetryingStore:
    """Wraps a store; a call that fails with an error of ``retry = True`` is made again, after a pause.

    Pauses double from ``first_pause_s`` up to ``longest_pause_s``, each with up to ``jitter_s`` of
    chance on top, so that many workers do not come back at once. After ``attempts`` calls, or once
    ``timeout_s`` seconds are over, the last error goes to the caller as it is. Every method of a
    store may be called twice, so no call is excepted. A listing that breaks off goes on after the
    last key that it gave, and the count starts anew.
    """

    def __init__(  # noqa: PLR0913 - three of them only shorten the pauses, for tests
        self,
        store: Store,
        *,
        attempts: int,
        timeout_s: float,
        first_pause_s: float = 0.1,
        longest_pause_s: float = 5.0,
        jitter_s: float = 1.0,
    ) -> None:
        self._store = store
        self._call = stamina.RetryingCaller(
            attempts=max(attempts, 1) if timeout_s > 0 else 1,
            timeout=timeout_s if timeout_s > 0 else None,
            wait_initial=first_pause_s,
            wait_max=longest_pause_s,
            wait_jitter=jitter_s,
        ).on(_may_be_retried)

    def put(self, key: str, body: bytes) -> None:
        """Write or replace."""
        self._call(self._store.put, key, body)

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """Write unless the key is taken; return whether the key now holds ``body``."""
        return self._call(self._store.put_if_absent, key, body)

    def get(self, key: str) -> bytes:
        """Return the whole object, or raise NotFoundError."""
        return self._call(self._store.get, key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes from ``start``; a negative ``start`` counts from the end."""
        return self._call(self._store.get_range, key, start, length)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object whose key begins with ``prefix``, in byte order of keys."""
        return self._resumed(lambda: self._store.list(prefix), lambda info: info.key)

    def children(self, prefix: str) -> Iterator[str]:
        """Yield, in order and once each, what follows ``prefix`` up to and with the next ``/``."""
        return self._resumed(lambda: self._store.children(prefix), lambda child: child)

    def delete(self, key: str) -> None:
        """Remove; no error when there is none."""
        self._call(self._store.delete, key)

    def presign(self, key: str, seconds: int) -> str:
        """Return a URL that reads this object for ``seconds``, without other credentials."""
        return self._call(self._store.presign, key, seconds)

    def _resumed(self, start: Callable[[], Iterator[T]], name: Callable[[T], str]) -> Iterator[T]:
        last: str | None = None
        while True:
            begun = self._call(_next_after, start, name, last)
            if begun is None:
                return
            item, rest = begun
            try:
                while item is not None:
                    last = name(item)
                    yield item
                    item = next(rest, None)
            except TrainarchiveError as error:
                if not error.retry:
                    raise
            else:
                return


def _next_after(
    start: Callable[[], Iterator[T]], name: Callable[[T], str], last: str | None
) -> tuple[T | None, Iterator[T]] | None:
    """Start a listing and pass over what came before: the first new item, and the iterator of the rest."""
    items = start()
    for item in items:
        if last is None or name(item) > last:
            return item, items
    return None


def _may_be_retried(error: Exception) -> bool:
    return isinstance(error, TrainarchiveError) and error.retry
