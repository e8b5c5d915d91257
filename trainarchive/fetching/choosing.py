"""Which of a run's files are wanted, and what there is instead where none is."""

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import msgspec

from trainarchive.errors import NotFoundError
from trainarchive.fetching import wording
from trainarchive.manifest import SourceEntry
from trainarchive.reading import RunView, Unseen, unseen
from trainarchive.run import Source

Span = tuple[int, int]
"""Ranks, first and last."""


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which files: all that match each of what is given. ``ranks``: (first, last); ``nodes``: globs."""

    ranks: tuple[Span, ...] = ()
    nodes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()

    def has(self, source: Source) -> bool:
        """Say whether ``source`` is wanted. A file that ranks share has no rank, and is not where ranks are given."""
        return (
            self.has_node(source.node)
            and self.has_rank(source.rank)
            and (not self.kinds or source.kind.value in self.kinds)
        )

    def has_node(self, node: str) -> bool:
        """Say whether files of ``node`` are wanted."""
        return not self.nodes or any(fnmatchcase(node, pattern) for pattern in self.nodes)

    def has_rank(self, rank: int | None) -> bool:
        """Say whether files of ``rank`` are wanted."""
        return not self.ranks or (rank is not None and any(first <= rank <= last for first, last in self.ranks))

    def without(self, sources: Iterable[Source]) -> tuple[Span, ...]:
        """Return the ranks that are wanted, if ranks are, and have no file of their own among ``sources``."""
        have = sorted({source.rank for source in sources if source.rank is not None})
        return tuple(left for span in self.ranks for left in _left(span, have))


def select(view: RunView, selection: Selection) -> list[SourceEntry]:
    """Return the sources that are wanted, node by node; raise NotFoundError where the run has none of them."""
    chosen = [entry for entry in view.sources if selection.has(entry.source)]
    if view.sources and not chosen:
        what, hint = _why_none(view, selection, [entry.source for entry in view.sources])
        raise NotFoundError(what, where=str(view.key), hint=hint)
    return sorted(chosen, key=lambda entry: (entry.source.node, entry.source.id))


def unseen_of(view: RunView, selection: Selection, chosen: Sequence[SourceEntry]) -> tuple[Unseen, ...]:
    """Return what may mean that something is missing which ``selection`` wants.

    What a node could not see may be a wanted rank's as long as the rank writes on that node, or
    nobody knows where it writes.
    """
    found = [each for each in unseen(view.nodes) if selection.has_node(each.node)]
    if not selection.ranks or selection.without(entry.source for entry in view.sources):
        return tuple(found)
    theirs = {entry.source.node for entry in chosen}
    return tuple(each for each in found if each.node in theirs)


def _left(span: Span, have: Iterable[int]) -> Iterator[Span]:
    first, last = span
    for rank in have:
        if first <= rank <= last:
            if first < rank:
                yield first, rank - 1
            first = rank + 1
    if first <= last:
        yield first, last


def _why_none(view: RunView, selection: Selection, sources: Sequence[Source]) -> tuple[str, str]:
    """Return what of the selection no file has, and what there is."""
    there = {source.node for source in sources}
    if not any(map(selection.has_node, there)):
        known = [entry.node for entry in view.nodes if selection.has_node(entry.node)]
        what = f"no file of {wording.names(known)}" if known else f"no node {wording.names(selection.nodes)}"
        return what, f"there are files of: {wording.names(there)}"
    on_nodes = [source for source in sources if selection.has_node(source.node)]
    if selection.ranks and not any(selection.has_rank(source.rank) for source in on_nodes):
        return _no_rank(selection, on_nodes)
    kinds = wording.names(source.kind.value for source in on_nodes)
    return "none of its files match", f"there are: {_ranks_of(on_nodes)}{wording.counted(len(there), 'node')}; {kinds}"


def _no_rank(selection: Selection, sources: Sequence[Source]) -> tuple[str, str]:
    spans = wording.ranges(selection.ranks)
    what = f"rank {spans} has no file of its own" if spans.isdecimal() else f"ranks {spans} have no file of their own"
    shared = sum(source.rank is None for source in sources)
    if shared:
        are = f"{wording.counted(shared, 'file')} {'is' if shared == 1 else 'are'}"
        what += f"; {are} shared by several ranks or of no rank: use --node, or fetch without --rank"
    ranks = _ranks_of(sources).removesuffix("; ")
    return what, f"there are files of {ranks}" if ranks else "no rank has a file of its own"


def _ranks_of(sources: Iterable[Source]) -> str:
    ranks = sorted({source.rank for source in sources if source.rank is not None})
    if not ranks:
        return ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {wording.ranges((rank, rank) for rank in ranks)}; "
