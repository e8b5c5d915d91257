"""How other threads, and signal handlers, wake the loop."""

import math
import os
import select


class Waking:
    """An eventfd: unlike an Event it has no lock that a signal handler could find taken by its own thread."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def wake(self) -> None:
        """End the wait, or the next one."""
        if self._fd >= 0:
            os.eventfd_write(self._fd, 1)

    def wait(self, seconds: float) -> None:
        """Return when woken, or after ``seconds``."""
        if self._poll.poll(max(0, math.ceil(seconds * 1000))):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Later calls of ``wake`` do nothing."""
        fd, self._fd = self._fd, -1
        os.close(fd)
