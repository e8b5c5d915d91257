"""Object stores: one contract, many places to keep bytes."""

import os
import stat
from pathlib import Path

from trainarchive import urls
from trainarchive.errors import SettingsError
from trainarchive.settings import Settings
from trainarchive.store.contract import Store
from trainarchive.store.local import LocalStore
from trainarchive.store.memory import MemoryStore
from trainarchive.store.retrying import RetryingStore

ANOTHER_PLACE = "choose another with --home, TRAINARCHIVE_HOME or [store] url"


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


def absent(settings: Settings) -> Path | None:
    """Return the store's directory where that is not there (yet), else None."""
    if not settings.store_url.startswith("file:"):
        return None
    path = Path(urls.directory(settings.store_url))
    try:
        path.stat()
    except FileNotFoundError:
        return path
    return None


def _plain_store(url: str) -> Store:
    what = urls.problem("store", url)
    if what:
        raise SettingsError(f"[store] url: {what}", hint=urls.known("store"))
    return LocalStore(_directory(url)) if url.startswith("file:") else MemoryStore()


def _directory(url: str) -> str:
    path = urls.directory(url)
    there = next(place for place in (Path(path), *Path(path).parents) if os.path.lexists(place))
    try:
        is_directory = stat.S_ISDIR(there.stat().st_mode)
    except FileNotFoundError:
        is_directory = False  # a link to nothing
    except OSError as error:
        raise SettingsError(os.strerror(error.errno or 0), where=str(there), hint=ANOTHER_PLACE) from error
    if not is_directory:
        raise SettingsError("not a directory, and [store] url leads there", where=str(there), hint=ANOTHER_PLACE)
    return path
