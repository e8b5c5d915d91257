"""Object stores: one contract, many places to keep bytes."""

import os
from pathlib import Path
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from trainarchive.errors import SettingsError
from trainarchive.settings import Settings
from trainarchive.store.contract import Store
from trainarchive.store.local import LocalStore
from trainarchive.store.memory import MemoryStore
from trainarchive.store.retrying import RetryingStore


def open_store(settings: Settings) -> Store:
    """Return the store that ``settings.store_url`` names, with retries; raise SettingsError for an unusable URL.

    ``file:///srv/archive`` is a local directory, made at the first put; ``memory://`` is new and
    empty at every call, for tests.
    """
    return RetryingStore(
        _plain_store(settings.store_url),
        attempts=settings.store.attempts,
        timeout_s=settings.store.retry_timeout_s,
    )


def _plain_store(url: str) -> Store:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise _unusable(f"not a URL: {error}") from error
    match parts.scheme:
        case "file":
            return LocalStore(_directory(parts))
        case "memory":
            return MemoryStore()
        case "":
            raise _unusable("it has no scheme")
        case scheme:
            raise _unusable(f"no store is known for {scheme}://")


def _directory(parts: SplitResult) -> str:
    path = os.fsdecode(unquote_to_bytes(parts.path))
    if parts.netloc not in {"", "localhost"} or not path.startswith("/"):
        raise _unusable("a file:// URL needs three slashes and an absolute path")
    if parts.query or parts.fragment:
        raise _unusable("? and # in the path of a file:// URL are written %3F and %23")
    if "\0" in path:
        raise _unusable("NUL cannot be in a path")
    there = next(place for place in (Path(path), *Path(path).parents) if os.path.lexists(place))
    if not there.is_dir():
        raise _unusable("something that is no directory stands in its way")
    return path


def _unusable(what: str) -> SettingsError:
    # The URL itself is not shown: it may hold a password.
    return SettingsError(what, where="store.url", hint="known are file:///absolute/directory and, for tests, memory://")
