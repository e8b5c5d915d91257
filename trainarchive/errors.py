"""Errors that reach people: what is wrong, where, and what to do next, in one line."""

from typing import ClassVar

ANOTHER_HOME = "choose another with --home or TRAINARCHIVE_HOME"
"""What to do about a home that this user may not use."""


class TrainarchiveError(Exception):
    """Base of every error that a user or an admin may see.

    ``exit_status`` is what a command ends with; ``retry`` says whether the same call may
    succeed later without anybody changing anything.
    """

    exit_status: ClassVar[int] = 1
    retry: ClassVar[bool] = False

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        """Keep the three parts apart, so that ``--json`` can show them apart."""
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        """Return ``where: what (hint)``, always one line and safe to print.

        Names of files come from hostile users: what could steer a terminal, or is no text, is escaped.
        """
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.hint:
            text += f" ({self.hint})"
        line = " ".join(text.split())
        if line.isprintable():
            return line
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


class SettingsError(TrainarchiveError):
    """A configuration file or an override that cannot be used."""

    exit_status = 2


class NotFoundError(TrainarchiveError):
    """No such run, source or object."""

    exit_status = 3


class IncompleteError(TrainarchiveError):
    """Something was delivered, but less than the job wrote; the message says what is missing."""

    exit_status = 4


class UnavailableError(TrainarchiveError):
    """A service (Redis, the store) does not answer or refuses for now."""

    exit_status = 5
    retry = True


class DamagedError(TrainarchiveError):
    """Bytes that do not match their digest or their format."""

    exit_status = 6


class RefusedError(TrainarchiveError):
    """A file that must not be followed, with the reason; kept in the manifest."""
