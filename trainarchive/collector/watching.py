"""watchdog's part: wake the loop when a notice arrives or a run's own directory changes.

Only creations and moves are asked for: with modifications a busy directory costs over
half a core (watchdog 7.1, 64,000 small writes a second). Growth of open files is not watchdog's
business here at all.
"""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from watchdog.events import (
    DirCreatedEvent,
    FileCreatedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer

log = logging.getLogger("trainarchive.collector")

WANTED: list[type[FileSystemEvent]] = [FileCreatedEvent, FileMovedEvent, DirCreatedEvent]


class Watching(FileSystemEventHandler):
    """Remembers which runs' directories had events, and whether ``notices/`` had any."""

    def __init__(self, spool: Path, wake: Callable[[], None]) -> None:
        """Two watches, so that a flood of directories in ``jobs/`` cannot blind the one on ``notices/``."""
        self._notices = spool / "notices"
        self._jobs = spool / "jobs"
        self._wake = wake
        self._lock = threading.Lock()
        self._kicked: set[str] = set()
        self._noticed = False
        self._observer = Observer()

    def start(self) -> None:
        """Begin to watch. Where the kernel gives no watch, the loop's own look every few seconds serves."""
        for path, deep in ((self._notices, False), (self._jobs, True)):
            try:
                self._observer.schedule(self, os.fspath(path), recursive=deep, event_filter=WANTED)
            except OSError as error:
                log.warning("no watch on %s (%s): looking every few seconds instead", path, error)
        self._observer.start()

    def stop(self) -> None:
        """End the watches' threads."""
        self._observer.stop()
        self._observer.join(timeout=2.0)

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Called in watchdog's threads."""
        path = Path(os.fsdecode(event.dest_path or event.src_path))
        with self._lock:
            if path.parent == self._notices:
                self._noticed = True
            elif self._jobs in path.parents:
                self._kicked.add(path.relative_to(self._jobs).parts[0])
        self._wake()

    def collect(self) -> tuple[bool, set[str]]:
        """Return, once, whether a notice came, and the names below ``jobs/`` that had events."""
        with self._lock:
            noticed, kicked = self._noticed, self._kicked
            self._noticed, self._kicked = False, set()
        return noticed, kicked
