"""Slurm's host list expressions, with a bound on what one may expand to."""

import re
from collections.abc import Iterator

import hostlist

from trainarchive.errors import TrainarchiveError
from trainarchive.run import is_safe_name

MAX_NODES = 65_536
"""Slurm itself holds no more nodes in one cluster."""

_MAX_TEXT = 1024 * 1024
_MAX_BRACKETS = 4
_RANGE = re.compile(r"(\d+)-(\d+)")
# A long digit run or name would be repeated for each node: that is how a short text fills memory.
_LONG = re.compile(r"\d{19}|[^\[\],]{256}")


def expand(expression: str) -> tuple[str, ...]:
    """Return the node names of ``n[1-3],m7`` in order, each once; raise TrainarchiveError for what is none."""
    if len(expression) > _MAX_TEXT or _LONG.search(expression):
        raise _unusable(expression, "a name or number in it is too long")
    if sum(max(int(high) - int(low), 0) + 1 for low, high in _RANGE.findall(expression)) > MAX_NODES:
        raise _unusable(expression, f"more than {MAX_NODES} nodes")
    nodes: dict[str, None] = {}
    for item in _items(expression):
        if item.count("[") > _MAX_BRACKETS:
            raise _unusable(expression, f"more than {_MAX_BRACKETS} brackets in one item")
        try:
            nodes.update(dict.fromkeys(hostlist.expand_hostlist(item)))
        except hostlist.BadHostlist as error:
            raise _unusable(expression, str(error)) from error
        if len(nodes) > MAX_NODES:
            raise _unusable(expression, f"more than {MAX_NODES} nodes")
    if not all(is_safe_name(node) for node in nodes):
        raise _unusable(expression, "a name in it cannot be a node's")
    return tuple(nodes)


def _items(expression: str) -> Iterator[str]:
    """Split at the commas outside brackets, so that one item at a time is expanded and counted."""
    start = depth = 0
    for at, sign in enumerate(expression):
        depth += (sign == "[") - (sign == "]")
        if sign == "," and depth == 0:
            yield expression[start:at]
            start = at + 1
    yield expression[start:]


def _unusable(expression: str, why: str) -> TrainarchiveError:
    return TrainarchiveError(f"not a usable host list: {why}", where=ascii(expression[:80]))
