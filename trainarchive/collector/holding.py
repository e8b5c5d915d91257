"""The holder, as far as the daemon may depend on it: when it is gone, following goes on without it."""

import logging
from collections.abc import Mapping
from pathlib import Path

from trainarchive.errors import TrainarchiveError
from trainarchive.holder import Holder

log = logging.getLogger("trainarchive.collector")


class Holding:
    """Keeps copies of open files with the holder; never raises for ``keep`` and ``release``."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._holder: Holder | None = None
        self._told = False

    def connect(self) -> bool:
        """Start a holder, or find the one that runs; True where there was none connected and now one is."""
        if self._holder is not None:
            return False
        try:
            self._holder = Holder.start(self._state)
        except (TrainarchiveError, OSError) as error:
            self._lost(error)
            return False
        self._told = False
        return True

    def reconcile(self, files: Mapping[str, int]) -> None:
        """Have the holder keep exactly ``files`` (name → fd): what it has beyond them pins disks and mounts."""
        for name in self.names() - files.keys():
            self.release(name)
        for name in files.keys() - self.names():
            self.keep(name, files[name])

    def names(self) -> frozenset[str]:
        """Return the names of the files that an earlier life of the collector left."""
        if self._holder is None:
            return frozenset()
        try:
            return frozenset(self._holder.names())
        except TrainarchiveError as error:
            self._lost(error)
            return frozenset()

    def take(self, name: str) -> int:
        """Return a copy of a held file's fd; raise TrainarchiveError where it cannot be had."""
        if self._holder is None:
            raise TrainarchiveError("no holder process", where=str(self._state))
        return self._holder.take(name)

    def keep(self, name: str, fd: int) -> None:
        """Have a copy of this file kept open beyond this process's life."""
        if self._holder is not None:
            try:
                self._holder.keep(name, fd)
            except TrainarchiveError as error:
                self._lost(error)

    def release(self, name: str) -> None:
        """Have the copy closed."""
        if self._holder is not None:
            try:
                self._holder.release(name)
            except TrainarchiveError as error:
                self._lost(error)

    def disconnect(self, *, end: bool = False) -> None:
        """Leave the files with the holder; or ``end`` it, where it has none."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        try:
            if end:
                holder.stop()
            else:
                holder.disconnect()
        except TrainarchiveError as error:
            log.warning("%s", error)

    def _lost(self, error: Exception) -> None:
        """A holder that does not answer holds nothing that could be had back: go on without, try again later."""
        if not self._told:
            log.warning("no holder (%s): files would not stay open over a restart of the collector", error)
            self._told = True
        self.disconnect()
