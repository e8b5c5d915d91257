"""What every object store promises. One suite (tests/store/test_contract.py) holds all to it."""

from collections.abc import Iterator
from typing import Protocol

import msgspec


class ObjectInfo(msgspec.Struct, frozen=True, order=True):
    """One stored object: its key, its size in bytes, and when it was written (Unix seconds, store's clock)."""

    key: str
    size: int
    modified: float


class Store(Protocol):
    """Whole objects under slash-separated keys. All methods may be called from many threads.

    - An object is visible whole or not at all, and never changes under a key that was put
      with ``put_if_absent``.
    - A successful return means durable: the bytes survive the crash of this process and of
      the machine that called.
    - After a success, ``get`` and ``list`` anywhere see it (read after write).
    - ``NotFoundError``: permanent for this key. ``UnavailableError``: the same call may be
      made again, for every method. Any other error: nobody should retry.
    """

    def put(self, key: str, body: bytes) -> None:
        """Write or replace. Safe to call twice."""
        ...

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """Write unless the key is taken; return whether the key now holds ``body``.

        Of many callers at once exactly one body is kept. True also when the key already held
        these very bytes, so a repeat after a lost answer is a success; False when it holds
        others.
        """
        ...

    def get(self, key: str) -> bytes:
        """Return the whole object, or raise NotFoundError."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes from ``start`` (fewer only at the object's end).

        A negative ``start`` counts from the end, as in HTTP's suffix ranges, and ``length``
        is then ignored.
        """
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object whose key begins with ``prefix``, in byte order of keys."""
        ...

    def children(self, prefix: str) -> Iterator[str]:
        """Yield, in order and once each, what follows ``prefix`` up to and with the next ``/``.

        ``prefix`` is empty or ends with ``/`` (or with a begun name). Keys without a further
        slash come whole. This is S3's delimiter listing; its cost follows the children, not the objects.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove; no error when there is none. Safe to call twice."""
        ...

    def presign(self, key: str, seconds: int) -> str:
        """Return a URL that reads this object for ``seconds``, without other credentials."""
        ...
