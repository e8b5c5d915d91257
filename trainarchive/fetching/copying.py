"""Copying a run's files out of the archive: checked against its digests, with every gap told.

Where bytes are missing the file holds what is there, in order, without filling: a stretch of NUL
bytes would look like output. Which bytes are missing stands in ``GAPS.txt`` and in the report.
"""

from collections.abc import Callable, Sequence

import msgspec

from trainarchive.errors import DamagedError
from trainarchive.fetching.books import MissingBytes, check_whose, write_books
from trainarchive.fetching.choosing import Selection, Span, select, unseen_of
from trainarchive.fetching.folder import Draft, Folder
from trainarchive.fetching.naming import Name, damaged_name, names_of, shown
from trainarchive.manifest import Generation, Manifest
from trainarchive.reading import DAMAGED, RunView, Unseen, unseen
from trainarchive.run import Gap, Source

Advance = Callable[[int], None]
"""Called with the number of bytes that were just dealt with."""


class FetchedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file. ``status``: written, skipped (it was there already), or damaged (``reason`` says how).

    ``path`` is below the output directory; ``original`` is on the node. ``bytes`` and ``blake3``
    are of the file as it is now.
    """

    path: str
    original: str
    source: str
    generation: int
    node: str
    rank: int | None
    kind: str
    bytes: int
    blake3: str
    status: str
    reason: str = ""


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """What one fetch of one run did. ``missing_nodes`` may have written what nobody knows of.

    ``complete``: of the whole run, every node was done and saw all that it looked for.

    ``damaged_objects`` are those of the store that cannot be read, each with what is wrong;
    ``unanswered``, where it is not empty, tells why the newest bytes of the run are not known.
    ``unseen`` may mean that output is missing which nobody archived; ``ranks_without_files``, as
    (first, last), were asked for and have none of their own.
    """

    run: str
    state: str
    running: bool
    complete: bool
    directory: str
    files: tuple[FetchedFile, ...]
    gaps: tuple[MissingBytes, ...]
    missing_nodes: tuple[str, ...]
    unseen: tuple[Unseen, ...]
    ranks_without_files: tuple[Span, ...]
    damaged_objects: tuple[str, ...]
    unanswered: str
    notes: tuple[str, ...]

    @property
    def damaged(self) -> tuple[FetchedFile, ...]:
        """Files that are not what the manifest says."""
        return tuple(file for file in self.files if file.status == "damaged")


def fetch(view: RunView, folder: Folder, selection: Selection, progress: Advance = lambda _: None) -> Copied:
    """Write the run's files that ``selection`` wants into ``folder``, and ``manifest.json`` and ``GAPS.txt``.

    A file that is there whole is left as it is. One that turns out to be damaged is kept under
    another name and told in the result; the others are fetched all the same. Raises
    NotFoundError where nothing matches, UnavailableError where the store does not answer, and
    TrainarchiveError where ``folder`` cannot be written or holds another run's ``manifest.json``;
    files that are whole by then stay.
    """
    chosen = select(view, selection)
    check_whose(folder, view.key)
    names = names_of(view.sources)
    files: list[FetchedFile] = []
    gaps: list[MissingBytes] = []
    for entry in chosen:
        for made in entry.generations or (Generation(0, 0, ""),):
            copy = _Copy(view, folder, names, entry.source, made)
            files.append(copy.run(progress))
            gaps += copy.gaps
    lost = _missing_nodes(view)
    table = view.table()
    write_books(folder, table, _all_gaps(table, names, gaps), lost, view.damaged, unseen(view.nodes))
    missed = selection.without(entry.source for entry in view.sources)
    anywhere = bool(missed) or not selection.ranks
    return Copied(
        run=str(view.key),
        state=view.state,
        running=view.running,
        complete=table.complete and bool(view.sources) and not unseen(view.nodes),
        directory=str(folder.path),
        files=tuple(files),
        gaps=tuple(gaps),
        missing_nodes=tuple(node for node in lost if anywhere and selection.has_node(node)),
        unseen=unseen_of(view, selection, chosen),
        ranks_without_files=missed,
        damaged_objects=view.damaged,
        unanswered=view.unanswered,
        notes=view.notes,
    )


class _Copy:
    """One generation of one source on its way into a file."""

    def __init__(
        self, view: RunView, folder: Folder, names: dict[tuple[str, int], Name], source: Source, made: Generation
    ) -> None:
        self.gaps: list[MissingBytes] = []
        self._view = view
        self._folder = folder
        self._names = names
        self._name = names[source.id, made.number]
        self._source = source
        self._made = made

    def run(self, progress: Advance) -> FetchedFile:
        """Copy, or leave what is there; return what there is then."""
        made = self._made
        size = made.size - sum(gap.end - gap.start for gap in made.gaps)
        if made.blake3 and self._folder.holds(self._name, size, made.blake3):
            self.gaps = [self._missing(gap) for gap in made.gaps]
            progress(made.size)
            return self._file(self._name, size, made.blake3, "skipped")
        with self._folder.writing(self._name) as draft:
            self._write(draft, progress)
            reason = self._verdict(draft)
            if reason:
                draft.name = damaged_name(self._name, self._names.values())
        return self._file(draft.name, draft.size, draft.digest, "damaged" if reason else "written", reason)

    def _write(self, draft: Draft, progress: Advance) -> None:
        if not self._made.size:
            return
        for item in self._view.chunks(self._source.id, self._made.number):
            if isinstance(item, Gap):
                self.gaps.append(self._missing(item))
                progress(item.end - item.start)
            else:
                draft.write(item)
                progress(len(item))

    def _verdict(self, draft: Draft) -> str:
        """Say what is wrong with the text or its name, nothing if it is what the manifest says."""
        for gap in self.gaps:
            if gap.reason.startswith(DAMAGED):
                return f"bytes {gap.start}-{gap.end}: {gap.reason.removeprefix(DAMAGED)}"
        if self._made.blake3 and draft.digest != self._made.blake3:
            return "the text does not have the digest in the manifest"
        try:
            self._source.path_bytes  # noqa: B018 (whether it can be read is the question)
        except DamagedError as error:
            return f"it is not known how it was called: {error.what}"
        return ""

    def _file(self, name: Name, size: int, digest: str, status: str, reason: str = "") -> FetchedFile:
        source = self._source
        return FetchedFile(
            path=shown(name),
            original=source.path,
            source=source.id,
            generation=self._made.number,
            node=source.node,
            rank=source.rank,
            kind=source.kind.value,
            bytes=size,
            blake3=digest,
            status=status,
            reason=reason,
        )

    def _missing(self, gap: Gap) -> MissingBytes:
        return _missing(self._name, self._source, gap)


def _missing(name: Name, source: Source, gap: Gap) -> MissingBytes:
    return MissingBytes(
        path=shown(name),
        source=source.id,
        generation=gap.generation,
        node=source.node,
        rank=source.rank,
        start=gap.start,
        end=gap.end,
        reason=gap.reason,
    )


def _missing_nodes(view: RunView) -> list[str]:
    """Return the nodes that were not done when the books were closed."""
    return [] if view.running else [entry.node for entry in view.nodes if entry.state != "drained"]


def _all_gaps(table: Manifest, names: dict[tuple[str, int], Name], found: Sequence[MissingBytes]) -> list[MissingBytes]:
    """Return the gaps of the whole run, with what was found on the way: GAPS.txt outlives one selection."""
    known = {(gap.source, gap.generation, gap.start) for gap in found}
    listed = [
        _missing(names[entry.source.id, made.number], entry.source, gap)
        for entry in table.sources
        for made in entry.generations
        for gap in made.gaps
        if (entry.source.id, made.number, gap.start) not in known
    ]
    return sorted([*found, *listed], key=lambda gap: (gap.path, gap.start))
