"""Host lists: what Slurm writes, and what a hostile node might."""

import time

import pytest

from trainarchive import hosts
from trainarchive.errors import TrainarchiveError


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("n1", ("n1",)),
        ("n[1-3],m7", ("n1", "n2", "n3", "m7")),
        ("n[08-10]", ("n08", "n09", "n10")),
        ("rack[1-2]n[1,3]", ("rack1n1", "rack1n3", "rack2n1", "rack2n3")),
        ("n[3,1],n[1-2]", ("n3", "n1", "n2")),
        ("a.site-b", ("a.site-b",)),
        ("n1,,n2", ("n1", "n2")),
        ("", ()),
    ],
)
def test_expand(expression: str, names: tuple[str, ...]) -> None:
    """Each node comes once, in the expression's own order, with its zeros."""
    assert hosts.expand(expression) == names


def test_the_largest_cluster() -> None:
    """As many nodes as Slurm can hold are none too many, and one more is."""
    assert len(hosts.expand(f"n[1-{hosts.MAX_NODES}]")) == hosts.MAX_NODES
    with pytest.raises(TrainarchiveError, match="more than"):
        hosts.expand(f"n[1-{hosts.MAX_NODES + 1}]")
    with pytest.raises(TrainarchiveError, match="more than"):
        hosts.expand(f"n[1-{hosts.MAX_NODES}],m1")


@pytest.mark.parametrize(
    "expression",
    [
        "n[1-9999999]",
        "n[1-60000],m[1-60000]",
        "n[1-300]x[1-300]",
        "n[1-2][1-2][1-2][1-2][1-2]",
        "n[" + "1" * 19 + "]",
        "x" * 256 + "[1-60000]",
        "n[1-",
        "n]",
        "../n1",
        "n1/n2",
        "n1\n",
        "n" * (1024 * 1024 + 1),
    ],
)
def test_what_is_none(expression: str) -> None:
    """What would fill memory, or could not name nodes, is refused at once, in one short error."""
    began = time.monotonic()
    with pytest.raises(TrainarchiveError, match="not a usable host list") as error:
        hosts.expand(expression)
    assert time.monotonic() - began < 2
    assert len(str(error.value)) < 400
