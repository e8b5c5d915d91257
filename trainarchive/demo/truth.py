"""What the ranks say they wrote, held against what was fetched."""

import hashlib
from pathlib import Path

import msgspec

_CHUNK = 1024 * 1024


class Written(msgspec.Struct, frozen=True):
    """One file as its writer knows it."""

    path: str
    size: int
    sha256: str
    node: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """``problems`` is empty when every file is there, byte for byte."""

    files: int
    bytes: int
    problems: tuple[str, ...]


def told(directory: Path) -> list[Written]:
    """Read the files ``<node>.<anything>`` that the ranks left in ``directory``."""
    found = []
    for path in sorted(directory.iterdir()):
        for line in path.read_bytes().splitlines():
            one = msgspec.json.decode(line, type=Written)
            found.append(msgspec.structs.replace(one, node=path.name.partition(".")[0]))
    return found


def digest_of(path: Path, node: str = "") -> Written:
    """Return what a file holds now."""
    sha256, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            sha256.update(chunk)
            size += len(chunk)
    return Written(str(path), size, sha256.hexdigest(), node)


def compare(written: list[Written], fetched: Path) -> Verdict:
    """Compare with ``<fetched>/<node>/<the file's path>``."""
    problems = []
    total = 0
    for one in written:
        path = fetched / one.node / one.path.lstrip("/")
        if not path.is_file():
            problems.append(f"not fetched: {one.node}:{one.path}")
            continue
        got = digest_of(path)
        total += got.size
        if (got.size, got.sha256) != (one.size, one.sha256):
            problems.append(f"{one.node}:{one.path}: wrote {one.size} bytes, fetched {got.size}, or other ones")
    return Verdict(len(written), total, tuple(problems))
