"""What goes beside the files: ``manifest.json``, and ``GAPS.txt`` where something is missing."""

from collections.abc import Sequence

import msgspec

from trainarchive.errors import TrainarchiveError
from trainarchive.fetching.folder import Folder
from trainarchive.fetching.naming import GAPS, MANIFEST
from trainarchive.manifest import Manifest
from trainarchive.reading import Unseen
from trainarchive.run import RunKey


class MissingBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes ``start`` to ``end`` of a file that are not in it, and why."""

    path: str
    source: str
    generation: int
    node: str
    rank: int | None
    start: int
    end: int
    reason: str


def check_whose(folder: Folder, run: RunKey) -> None:
    """Raise TrainarchiveError where the folder's ``manifest.json`` is not of ``run``: its files may not get mixed."""
    text = folder.read(MANIFEST)
    if text is None:
        return
    where, hint = str(folder.path), "choose another directory with -o"
    try:
        there = msgspec.json.decode(text, type=_Whose).run
    except (msgspec.DecodeError, TrainarchiveError):
        raise TrainarchiveError("holds a manifest.json that no fetch wrote", where=where, hint=hint) from None
    if there != run:
        raise TrainarchiveError(f"holds the files of another run, {there}, not of {run}", where=where, hint=hint)


def write_books(  # noqa: PLR0913, PLR0917 (every way in which something may be missing)
    folder: Folder,
    table: Manifest,
    gaps: Sequence[MissingBytes],
    lost: Sequence[str],
    damaged: Sequence[str],
    unseen: Sequence[Unseen],
) -> None:
    """Write the run's table of contents, and what is missing: bytes, nodes, unreadable objects, what none could see."""
    with folder.writing(MANIFEST) as draft:
        draft.write(json_text(table).encode() + b"\n")
    told = [
        *(f"object {what}: nobody knows what was in it" for what in damaged),
        *(f"node {node}: not done when the run was closed, its last output is not known" for node in lost),
        *(f"{gap.path}: bytes {gap.start}-{gap.end} ({gap.end - gap.start} bytes): {gap.reason}" for gap in gaps),
        *(f"may be missing: {each}" for each in unseen),
        *(() if table.sources else ("no file of the run was followed",)),
    ]
    if not told:
        folder.remove(GAPS)
        return
    with folder.writing(GAPS) as draft:
        draft.write(
            b"What the run wrote, or may have written, and the archive does not have."
            b" Files hold what is there, without filling.\n"
        )
        for line in told:
            draft.write(ascii(line)[1:-1].encode() + b"\n")


class _Whose(msgspec.Struct):
    """The part of a ``manifest.json`` that says which run's it is."""

    run: RunKey


def json_text(value: object) -> str:
    r"""Return ``value`` as indented JSON in which every character that does not print is an escape (``\u009b``).

    So the text can be shown on a terminal, and reads back as the very same characters.
    """
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    return "".join(char if char.isprintable() or char == "\n" else _escape(char) for char in text)


def _escape(char: str) -> str:
    code = ord(char)
    if code > 0xFFFF:
        code -= 0x10000
        return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
    return f"\\u{code:04x}"
