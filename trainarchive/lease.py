"""Locks that keep two workers from doing the same work. What is true does not depend on them."""

import contextlib
import logging
import secrets
import time
from collections.abc import Iterator

from trainarchive.errors import UnavailableError
from trainarchive.run import RunKey
from trainarchive.sealing import Hook
from trainarchive.stream import Stream

RENEWALS = 8
"""A lock is renewed when this part of its time is over, so that several renewals may fail before it runs out."""

_log = logging.getLogger(__name__)


def kept(stream: Stream, name: str, token: str, seconds: float) -> Hook:
    """Return a hook that keeps a lock alive, called as often as one likes.

    A Redis that does not answer now is no reason to throw away long work: the next call tries again.
    """
    renewed = time.monotonic()

    def keep(_: str) -> None:
        nonlocal renewed
        now = time.monotonic()
        if now - renewed < seconds / RENEWALS:
            return
        renewed = now
        try:
            stream.lock(name, token, seconds)
        except UnavailableError as error:
            _log.warning("%s: its lock is not renewed: %s", name, error)

    return keep


@contextlib.contextmanager
def alone(stream: Stream, run: RunKey, seconds: float) -> Iterator[Hook | None]:
    """Hold the lock on a run's books: only one worker writes or deletes there. None where another holds it.

    The hook keeps it, as long as it is called more often than every ``seconds``.
    """
    name, token = f"finish/{run}", secrets.token_hex(8)
    if not stream.lock(name, token, seconds):
        yield None
        return
    try:
        yield kept(stream, name, token, seconds)
    finally:
        with contextlib.suppress(UnavailableError):
            stream.unlock(name, token)
