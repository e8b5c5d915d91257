"""Around each task: queued once at a time, given up when it keeps killing its process, errors told in one line."""

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from celery_tasks.schedule import MIN_EXPIRY_S
from trainarchive import lease
from trainarchive.errors import TrainarchiveError, UnavailableError
from trainarchive.sealing import Hook
from trainarchive.settings import Settings
from trainarchive.stream import Stream

REMEMBER_S = 3600.0
"""How long a killed attempt counts."""

TRY_AGAIN_S = 10.0
"""A task that failed, for want of the store or for another reason told, is queued again after so long."""

BACK_OFF_MAX_S = 60.0

_log = logging.getLogger(__name__)


class Hint(msgspec.Struct, frozen=True):
    """What a message says: which task, for which lane or run, under which mark it was queued."""

    task: str
    subject: str
    marker: str


class BackOff:
    """Leaves a service that fails alone for a while, longer each time. One a process."""

    def __init__(self) -> None:
        self._wait_s = 0.0
        self._until = 0.0

    @property
    def over(self) -> bool:
        """Whether to try now."""
        return time.monotonic() >= self._until

    def failed(self) -> None:
        """Wait, and twice as long the next time."""
        self._wait_s = min(BACK_OFF_MAX_S, max(2.0, 2 * self._wait_s))
        self._until = time.monotonic() + self._wait_s

    def worked(self) -> None:
        """Begin anew."""
        self._wait_s = self._until = 0.0


def enqueue(task: Any, stream: Stream, subject: str, seconds: float) -> bool:
    """Send ``task`` for ``subject`` unless it is queued or underway; return whether it was sent.

    The mark ends by itself after ``seconds``: so long waits what a killed worker had, or what
    failed, before it is sent again.
    """
    marker = secrets.token_hex(8)
    if not stream.lock(_mark(task.name, subject), marker, seconds):
        return False
    try:
        task.apply_async((subject, marker), expires=max(MIN_EXPIRY_S, seconds))
    except Exception:
        stream.unlock(_mark(task.name, subject), marker)
        raise
    return True


def underway(hint: Hint, stream: Stream, settings: Settings, work: Callable[[Hook], object]) -> None:
    """Do the ``work`` of a hint; it gets a hook that keeps the mark of ``enqueue`` alive.

    A task whose process was killed (out of memory, by the time limit) comes back; after
    ``worker.max_attempts`` of that within an hour it is refused, with an error in the log. What
    raises is not tried again here: the mark soon runs out, and the sweep sends it anew. Success
    frees the mark at once.
    """
    mark, seconds = _mark(hint.task, hint.subject), settings.seal.lease_s
    with told(f"{hint.task} {hint.subject}"), _attempt(stream, hint, settings.worker.max_attempts) as allowed:
        if allowed:
            stream.lock(mark, hint.marker, seconds)
            try:
                work(lease.kept(stream, mark, hint.marker, seconds))
            except TrainarchiveError:
                stream.lock(mark, hint.marker, min(seconds, TRY_AGAIN_S))
                raise
            stream.unlock(mark, hint.marker)


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Log in one line the errors that are meant for people, and end the block."""
    try:
        yield
    except UnavailableError as error:
        _log.warning("%s: put off: %s", what, error)
    except TrainarchiveError as error:
        _log.error("%s: %s", what, error)


@contextlib.contextmanager
def _attempt(stream: Stream, hint: Hint, limit: int) -> Iterator[bool]:
    """Hold one of ``limit`` places; a killed process leaves its place taken, and so counts."""
    token = secrets.token_hex(8)
    places = (f"attempt/{hint.task}/{hint.subject}/{number}" for number in range(1, limit + 1))
    place = next((place for place in places if stream.lock(place, token, REMEMBER_S)), None)
    if place is None:
        _log.error("%s %s: given up: its process was killed %d times within an hour", hint.task, hint.subject, limit)
        yield False
        return
    try:
        yield True
    finally:
        with contextlib.suppress(UnavailableError):
            stream.unlock(place, token)


def _mark(task: str, subject: str) -> str:
    return f"queued/{task}/{subject}"
