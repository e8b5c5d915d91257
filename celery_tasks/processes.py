"""What binds the worker's processes together: an end with the parent, and the word that all is ready."""

import contextlib
import ctypes
import os
import signal
import sys

READY_FD = "TA_WORKER_READY_FD"
"""Environment variable: number of the open file to which a byte is written when the worker takes tasks."""

PARENT = "TA_WORKER_PARENT"
"""Environment variable: process id of the worker that starts a Celery."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends: no orphans go on working.

    A parent that named itself in PARENT and has ended before this call ends us, too.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = os.environ.pop(PARENT, "")
    if parent and parent != str(os.getppid()):
        sys.exit("the worker that started this process has ended")


def tell_ready() -> None:
    """Say that the worker takes tasks now, where somebody asked for it."""
    number = os.environ.get(READY_FD, "")
    if number.isdecimal():
        with contextlib.suppress(OSError):
            os.write(int(number), b"1")
