"""What goes beside the files: ``manifest.json``, and ``GAPS.txt`` where something is missing."""

from collections.abc import Sequence

import msgspec

from trainarchive.fetching.folder import Folder
from trainarchive.fetching.naming import GAPS, MANIFEST
from trainarchive.manifest import Manifest


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


def write_books(
    folder: Folder, table: Manifest, gaps: Sequence[MissingBytes], lost: Sequence[str], damaged: Sequence[str]
) -> None:
    """Write the run's table of contents, and what is missing: bytes, nodes, objects that cannot be read."""
    with folder.writing(MANIFEST) as draft:
        draft.write(json_text(table).encode() + b"\n")
    told = [
        *(f"object {what}: nobody knows what was in it" for what in damaged),
        *(f"node {node}: not done when the run was closed, its last output is not known" for node in lost),
        *(f"{gap.path}: bytes {gap.start}-{gap.end} ({gap.end - gap.start} bytes): {gap.reason}" for gap in gaps),
    ]
    if not told:
        folder.remove(GAPS)
        return
    with folder.writing(GAPS) as draft:
        draft.write(b"What the run wrote and the archive does not have. Files hold what is there, without filling.\n")
        for line in told:
            draft.write(ascii(line)[1:-1].encode() + b"\n")


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
