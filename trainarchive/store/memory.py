"""A store in this process' memory: the contract's plainest form, for tests."""

import threading
import time
from collections.abc import Iterator

from trainarchive.errors import NotFoundError, TrainarchiveError
from trainarchive.store.contract import ObjectInfo, check_key, check_prefix


class MemoryStore:
    """Keeps what ``contract.Store`` promises, except that nothing outlives the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, float]] = {}

    def put(self, key: str, body: bytes) -> None:
        """Write or replace."""
        check_key(key)
        with self._lock:
            self._refuse_nesting(key)
            self._objects[key] = (bytes(body), time.time())

    def put_if_absent(self, key: str, body: bytes) -> bool:
        """Write unless the key is taken; return whether the key now holds ``body``."""
        check_key(key)
        with self._lock:
            self._refuse_nesting(key)
            held, _ = self._objects.setdefault(key, (bytes(body), time.time()))
            return held == body

    def get(self, key: str) -> bytes:
        """Return the whole object, or raise NotFoundError."""
        check_key(key)
        try:
            return self._objects[key][0]
        except KeyError:
            raise NotFoundError("no such object", where=f"memory://{key}") from None

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes from ``start``; a negative ``start`` counts from the end."""
        body = self.get(key)
        return body[start:] if start < 0 else body[start : start + max(length, 0)]

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield every object whose key begins with ``prefix``, in byte order of keys."""
        check_prefix(prefix)
        with self._lock:
            found = [
                ObjectInfo(key, len(body), modified)
                for key, (body, modified) in self._objects.items()
                if key.startswith(prefix)
            ]
        yield from sorted(found)

    def children(self, prefix: str) -> Iterator[str]:
        """Yield, in order and once each, what follows ``prefix`` up to and with the next ``/``."""
        check_prefix(prefix)
        with self._lock:
            rests = [key.removeprefix(prefix).partition("/") for key in self._objects if key.startswith(prefix)]
        yield from sorted({name + slash for name, slash, _ in rests})

    def delete(self, key: str) -> None:
        """Remove; no error when there is none."""
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def presign(self, key: str, seconds: int) -> str:
        """Raise TrainarchiveError: nothing outside this process can read its memory."""
        check_key(key)
        raise TrainarchiveError(
            f"a store in memory has no URL that would be good for {seconds} s",
            where=f"memory://{key}",
            hint="read the object with get, or use a store with URLs such as S3",
        )

    def _refuse_nesting(self, key: str) -> None:
        """As strict as a file system, so that what passes tests here works on every store."""
        if any(other.startswith(key + "/") or key.startswith(other + "/") for other in self._objects):
            raise TrainarchiveError(
                "this key and another that continues it with / exclude each other",
                where=f"memory://{key}",
                hint="choose a key that is not the beginning of another, nor continues one",
            )
