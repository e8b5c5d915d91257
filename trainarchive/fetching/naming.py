"""Names of fetched files: ``<node>/<path as it was on the node>``, whatever a hostile manifest says.

- Generation ``N`` of a file, from 1, ends in ``.~N``: generation 0 is the file as it first was.
- Where two sources had one path (a rotated file), or a name is also a directory's, the later one
  ends in ``.~s<source id>``.
- A path that cannot be read (its base64 is none) is the one that is meant for people.
- ``..`` becomes ``__``, NUL becomes ``_``, names of more than 180 bytes end in a hash of the whole.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence

from trainarchive.errors import DamagedError
from trainarchive.manifest import SourceEntry

Name = tuple[bytes, ...]
"""Components below the output directory; the last is the file's."""

MANIFEST: Name = (b"manifest.json",)
GAPS: Name = (b"GAPS.txt",)
DAMAGED = b".damaged"

MAX_COMPONENT = 180
"""Bytes; with all that is added to it a name stays below the 255 of file systems."""

MAX_DEPTH = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


def names_of(entries: Iterable[SourceEntry]) -> dict[tuple[str, int], Name]:
    """Return the name of each generation of all of a run's sources; every name is another one.

    The same run gives the same names, whichever of its files are fetched. A source without
    generations is an empty file, generation 0.
    """
    ordered = sorted(entries, key=_age)
    plain = {entry.source.id: _plain(entry) for entry in ordered}
    directories = {name[:depth] for name in plain.values() for depth in range(1, len(name))}
    taken: set[Name] = {MANIFEST, GAPS, *directories}
    result: dict[tuple[str, int], Name] = {}
    for entry in ordered:
        source = entry.source.id
        for number in [made.number for made in entry.generations] or [0]:
            name = next(name for name in _choices(plain[source], source, number) if name not in taken)
            taken.add(name)
            result[source, number] = name
    return result


def damaged_name(name: Name, taken: Iterable[Name]) -> Name:
    """Return the name under which a file is kept that is not what it should be."""
    others = set(taken)
    found = (*name[:-1], name[-1] + DAMAGED)
    while found in others:
        found = (*found[:-1], found[-1] + b"~")
    return found


def _age(entry: SourceEntry) -> tuple[int, str]:
    return (entry.generations[0].first_ns if entry.generations else 0, entry.source.id)


def _choices(plain: Name, source: str, number: int) -> Iterable[Name]:
    *folder, last = plain
    tail = b".~%d" % number if number else b""
    yield (*folder, last + tail)
    other = last + b".~s" + _UNSAFE.sub("_", source)[:24].encode() + tail
    yield (*folder, other)
    count = 2
    while True:
        yield (*folder, other + b".~%d~" % count)
        count += 1


def _plain(entry: SourceEntry) -> Name:
    try:
        path = entry.source.path_bytes
    except DamagedError:
        path = entry.source.path.encode(errors="replace")
    parts = [part for part in path.split(b"/") if part not in (b"", b".")] or [b"unnamed"]
    if len(parts) > MAX_DEPTH:
        parts = [*parts[: MAX_DEPTH // 2], _hash(path), *parts[-MAX_DEPTH // 2 :]]
    return tuple(_component(part) for part in [_node(entry.source.node), *parts])


def _node(name: str) -> bytes:
    node = name.encode(errors="replace").replace(b"/", b"_") or b"unnamed"
    return node + b"~" if (node,) in (MANIFEST, GAPS) else node


def _component(part: bytes) -> bytes:
    if part in (b".", b".."):
        return b"_" * len(part)
    part = part.replace(b"\0", b"_")
    if len(part) > MAX_COMPONENT:
        part = part[: MAX_COMPONENT - 17] + b"~" + _hash(part)
    return part


def _hash(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=8).hexdigest().encode()


def shown(name: Sequence[bytes]) -> str:
    r"""Return a name as text, for JSON and for people: bytes that are not UTF-8 stand as ``\xNN``."""
    return b"/".join(name).decode(errors="backslashreplace")
