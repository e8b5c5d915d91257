"""A kernel that refuses one call, for the tests of what reads and writes files."""

import os
from collections.abc import Sequence
from typing import Any, Self


class Refusing:
    """While it is entered, the ``at``-th call (from 1) of ``os``' functions ``names`` fails with ``errno``."""

    def __init__(self, names: Sequence[str], at: int, errno: int) -> None:
        """``reached`` then tells whether there were so many calls."""
        self._real: dict[str, Any] = {name: getattr(os, name) for name in names}
        self._at = at
        self._errno = errno
        self._calls = 0

    @property
    def reached(self) -> bool:
        """Whether the call that was to fail was made."""
        return self._calls >= self._at

    def __enter__(self) -> Self:
        """Stand before the functions."""
        for name, real in self._real.items():
            setattr(os, name, self._before(name, real))
        return self

    def __exit__(self, *_: object) -> None:
        """Leave all as it was."""
        for name, real in self._real.items():
            setattr(os, name, real)

    def _before(self, name: str, real: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            self._calls += 1
            if self._calls != self._at:
                return real(*arguments, **more)
            if name == "close":
                real(*arguments)  # the kernel closes, whatever it says
            raise OSError(self._errno, os.strerror(self._errno))

        return call
