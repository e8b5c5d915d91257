"""What every object store promises. One suite (tests/store/test_contract.py) holds all to it."""

from collections.abc import Iterator
from typing import Protocol

import msgspec

from trainarchive.errors import TrainarchiveError

MAX_KEY = 1024
"""Most UTF-8 bytes of a key (S3's limit)."""

MAX_NAME = 255
"""Most UTF-8 bytes between two slashes of a key (file systems' limit)."""


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
    - Keys and prefixes are what ``check_key`` and ``check_prefix`` let through; every method
      refuses others with TrainarchiveError before it does anything.
    - No key may be another key plus ``/`` and more: ``a/b`` and ``a/b/c`` exclude each other. A
      store that cannot hold both (a file system) refuses the second with TrainarchiveError and
      keeps the first.
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
        """Yield every object whose key begins with ``prefix``, in byte order of keys.

        Objects put or deleted meanwhile may be in it or not; all others are, once each.
        """
        ...

    def children(self, prefix: str) -> Iterator[str]:
        """Yield, in order and once each, what follows ``prefix`` up to and with the next ``/``.

        ``prefix`` is empty or ends with ``/`` (or with a begun name). Keys without a further
        slash come whole. This is S3's delimiter listing; its cost follows the children, not the objects.
        After a crash or beside a ``delete`` a child may have no object left.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove; no error when there is none. Safe to call twice."""
        ...

    def presign(self, key: str, seconds: int) -> str:
        """Return a URL that reads this object for ``seconds``, without other credentials."""
        ...


def check_key(key: str) -> None:
    """Raise TrainarchiveError unless ``key`` can name an object in every store.

    1 to MAX_KEY bytes of UTF-8 without control characters; between slashes 1 to MAX_NAME bytes
    that do not begin with a dot.
    """
    _check(key, key.split("/"))


def check_prefix(prefix: str) -> None:
    """Raise TrainarchiveError unless some key could begin with ``prefix``; it may end within a name."""
    *names, begun = prefix.split("/")
    _check(prefix, [*names, begun] if begun else names)


def _check(text: str, names: list[str]) -> None:
    try:
        size = len(text.encode())
        sizes = [len(name.encode()) for name in names]
    except UnicodeEncodeError:
        raise _refused(text, "it is not Unicode text") from None
    if any(character < " " or character == "\x7f" for character in text):
        raise _refused(text, "it has control characters")
    if size > MAX_KEY:
        raise _refused(text, f"{size} bytes are more than {MAX_KEY}")
    for name, length in zip(names, sizes, strict=True):
        if not name:
            raise _refused(text, "a name between slashes is empty")
        if name.startswith("."):
            raise _refused(text, "a name between slashes begins with a dot")
        if length > MAX_NAME:
            raise _refused(text, f"a name of {length} bytes is longer than {MAX_NAME}")


def _refused(text: str, reason: str) -> TrainarchiveError:
    shown = repr(text if len(text) <= 100 else text[:100] + "...")
    return TrainarchiveError(f"not a key of an object store: {reason}", where=shown, hint="keys look like runs/c/1.0/x")
