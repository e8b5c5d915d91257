"""What a run's nodes say that may mean output which nobody archived: their notes, and files that could not be read."""

from collections.abc import Iterable

import msgspec

from trainarchive import opening
from trainarchive.manifest import NodeEntry
from trainarchive.run import Refusal

NOT_TEXT = "not text"

HARMLESS = frozenset({
    opening.LINK, opening.NOT_REGULAR, opening.KERNEL, opening.GONE, opening.NOT_WRITTEN, NOT_TEXT,
})  # fmt: skip
"""Why a file is not followed that is no output of the job's own. Every other reason may mean that output is missing."""


class Unseen(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that may mean missing output: of the file ``path``, or, where that is empty, of all of the node."""

    node: str
    reason: str
    path: str = ""

    def __str__(self) -> str:
        """Return it as one line for people, with the characters as they came."""
        file = f"{self.path}: not followed: " if self.path else ""
        return f"node {self.node}: {file}{self.reason}"


def unseen(nodes: Iterable[NodeEntry]) -> tuple[Unseen, ...]:
    """Return what may mean missing output, node by node; nothing where every node saw all that it looked for."""
    found: list[Unseen] = []
    for entry in nodes:
        if entry.report is not None:
            found += [Unseen(entry.node, note) for note in entry.report.notes]
            found += [Unseen(entry.node, each.reason, each.path) for each in entry.report.refusals if _may_cost(each)]
    return tuple(found)


def passed_over(nodes: Iterable[NodeEntry]) -> list[tuple[str, Refusal]]:
    """Return the files, each with its node, that are not followed since they are no output, as links and devices."""
    return [
        (entry.node, refusal)
        for entry in nodes
        if entry.report is not None
        for refusal in entry.report.refusals
        if not _may_cost(refusal)
    ]


def _may_cost(refusal: Refusal) -> bool:
    return refusal.reason not in HARMLESS
