"""A run's state from what its nodes' Epilogs were told."""

import itertools

import pytest

from trainarchive.run import Job
from trainarchive.states import FROM_EPILOG, Ending, ending


def job(exit_code: str = "", derived: str = "", ended: float = 0.0) -> Job:
    """Return what one node says."""
    return Job(1000, ended=ended, exit_code=exit_code, derived_exit_code=derived)


@pytest.mark.parametrize(
    ("exit_code", "derived", "state"),
    [
        ("0:0", "0:0", "COMPLETED"),
        ("0:0", "", "COMPLETED"),
        ("0:0", "5:0", "FAILED"),
        ("1:0", "0:0", "FAILED"),
        ("0:9", "", "FAILED"),
        ("", "", "UNKNOWN"),
        ("", "5:0", "UNKNOWN"),
    ],
)
def test_codes(exit_code: str, derived: str, state: str) -> None:
    """A failed step counts though the script exits 0; without any Epilog's word the state is unknown."""
    found = ending([job(exit_code, derived, 5.0)])
    assert (found.state, found.state_from) == (state, FROM_EPILOG)


def test_nobody() -> None:
    """A run without nodes has no ending."""
    assert ending([]) == Ending("UNKNOWN", FROM_EPILOG)


def test_the_latest_has_the_last_word() -> None:
    """In whatever order nodes are asked, the last Epilog counts, and one that has no code says nothing."""
    said = [job("1:0", "1:0", 10.0), job("0:0", "0:0", 20.0), job(ended=30.0)]
    for order in itertools.permutations(said):
        assert ending(order) == Ending("COMPLETED", FROM_EPILOG, "0:0", "0:0")
    tied = [job("0:0", "0:0", 10.0), job("1:0", "0:0", 10.0)]
    assert {ending(order).state for order in itertools.permutations(tied)} == {"FAILED"}
