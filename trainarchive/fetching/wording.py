"""How numbers and lists of names are told to people."""

from collections.abc import Iterable

MOST_NAMES = 16


def counted(count: int, noun: str) -> str:
    """Return ``1 file``, ``2 files``, ``12,000 files``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def ranges(spans: Iterable[tuple[int, int]]) -> str:
    """Return spans (first, last), in any order and overlapping or not, as ``0-3,7``."""
    joined: list[list[int]] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1] + 1:
            joined[-1][1] = max(last, joined[-1][1])
        else:
            joined.append([first, last])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in joined)


def names(texts: Iterable[str]) -> str:
    """Return texts in order with commas between, the first few of very many."""
    ordered = sorted(set(texts))
    more = len(ordered) - MOST_NAMES
    return ", ".join(ordered[:MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")
