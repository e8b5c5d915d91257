"""Errors that reach people: one printable line, parts that stay apart, exit statuses that differ."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainarchive import errors
from trainarchive.errors import TrainarchiveError, UnavailableError

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TrainarchiveError)]


@pytest.mark.parametrize(
    ("where", "hint", "shown"),
    [("", "", "gone"), ("a/b", "", "a/b: gone"), ("", "look", "gone (look)"), ("a/b", "look", "a/b: gone (look)")],
)
def test_the_line(where: str, hint: str, shown: str) -> None:
    """The line has where, what and hint, and leaves out what is empty."""
    assert str(TrainarchiveError("gone", where=where, hint=hint)) == shown


@given(st.text(), st.text(), st.text())
def test_any_text_is_one_printable_line(what: str, where: str, hint: str) -> None:
    """Nothing that a user can name breaks the line, steers a terminal, or cannot be printed."""
    line = str(TrainarchiveError(what, where=where, hint=hint))
    assert line.isprintable()
    line.encode()


def test_hostile_names_are_escaped() -> None:
    """Escape sequences, bytes that are not UTF-8, and direction marks are shown, not obeyed."""
    line = str(TrainarchiveError("refused", where="a\n\x1b[2Jb\udcff\u202ec é"))
    assert line == "a \\x1b[2Jb\\udcff\\u202ec é: refused"


def test_the_parts_stay_as_they_are() -> None:
    """What a program reads is not escaped."""
    error = TrainarchiveError("a\nb", where="\x1b", hint="\udcff")
    assert (error.what, error.where, error.hint) == ("a\nb", "\x1b", "\udcff")


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_travel_between_processes(kind: type[TrainarchiveError]) -> None:
    """Pickled and copied errors keep class and parts."""
    error = kind("what", where="where", hint="hint")
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301 - made in this line
        assert type(twin) is kind
        assert (twin.what, twin.where, twin.hint, str(twin)) == ("what", "where", "hint", str(error))


def test_exit_statuses_are_told_apart() -> None:
    """Each kind of failure that a script may ask for has a status of its own, and none is success."""
    found = {kind.__name__: kind.exit_status for kind in CLASSES}
    assert found == {
        "TrainarchiveError": 1, "SettingsError": 2, "NotFoundError": 3, "IncompleteError": 4,
        "UnavailableError": 5, "DamagedError": 6, "RefusedError": 1,
    }  # fmt: skip


def test_only_unavailable_may_be_retried() -> None:
    """No other class promises that waiting helps."""
    assert [kind for kind in CLASSES if kind.retry] == [UnavailableError]
