"""File name patterns: Slurm's for the batch script's output, NCCL's, and the site's own.

Users choose what is put into them (directories, job names). A value stands for itself: it adds no
directory, leads out of none, and none of its characters matches anything else.
"""

import fnmatch
import functools
import glob
import os
import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

Part: TypeAlias = bytes | re.Pattern[bytes]
"""One component of a path: a name, or what names must match as a whole."""

_SLURM_SYMBOL = re.compile(r"%(\d*)(.)", re.DOTALL)
_NCCL_SYMBOL = re.compile(r"%([hp%])")
_PLACEHOLDER = re.compile(r"\{(workdir|user|job_id|node)\}")
_MAX_PADDING = 10
_MAX_NCCL_NAME = 2 * 255
"""Characters: no file has a longer name than 255 bytes, and a symbol is two characters for at least one."""
_NO_NAME = re.compile(b"(?!)")
_NO_NAMES = ("", ".", "..")


def absolute(path: str, work_dir: str) -> bytes | None:
    """Return the path without ``.``, ``..`` and double slashes, from ``work_dir`` on; None where it is none."""
    if not path.startswith("/"):
        path = f"{work_dir}/{path}" if path and work_dir.startswith("/") else ""
    if not path or "\0" in path:
        return None
    try:
        return b"/" + os.fsencode(os.path.normpath(path)).lstrip(b"/")
    except UnicodeEncodeError:
        return None


def slurm_path(pattern: str, work_dir: str, values: Mapping[str, str | int | None]) -> bytes | None:
    """Return the file that Slurm makes of a batch job's pattern; None where that cannot be known.

    ``values``: what stands for each letter after ``%``; a number is padded with zeros to the
    width between the two, at most ten. A backslash anywhere switches all symbols off.
    """
    if "\\" in pattern:
        return absolute(re.sub(r"\\(.?)", r"\1", pattern, flags=re.DOTALL), work_dir)
    parts = []
    for part in pattern.split("/"):
        name = _slurm_name(part, values)
        if name is None or (name != part and name in _NO_NAMES):
            return None
        parts.append(name)
    return absolute("/".join(parts), work_dir)


def _slurm_name(part: str, values: Mapping[str, str | int | None]) -> str | None:
    pieces: list[str] = []
    end = 0
    for symbol in _SLURM_SYMBOL.finditer(part):
        value = "%" if symbol[2] == "%" else values.get(symbol[2])
        if isinstance(value, int):
            width = symbol[1].lstrip("0")
            value = str(value).zfill(int(width) if len(width) == 1 else _MAX_PADDING if width else 0)
        if value is None or "/" in value:
            return None
        pieces += (part[end : symbol.start()], value)
        end = symbol.end()
    return "".join((*pieces, part[end:]))


def nccl_path(pattern: str, host: str, pid: int) -> str:
    """Return what NCCL makes of NCCL_DEBUG_FILE in one process."""
    values = {"h": host, "p": str(pid), "%": "%"}
    return _NCCL_SYMBOL.sub(lambda symbol: values[symbol[1]], pattern)


@functools.lru_cache(maxsize=1024)
def nccl_name(pattern: str) -> re.Pattern[bytes]:
    """Return what the last component of NCCL_DEBUG_FILE makes of itself in any process of any host.

    Only the last: the kernel tells a path without symbolic links, and a container has its own pids.
    One process has one host and one pid: however often a user repeats a symbol, a name is tried
    with at most 64 lengths of the one and 10 of the other.
    """
    name = pattern.rpartition("/")[2]
    if len(name) > _MAX_NCCL_NAME:
        return _NO_NAME
    values = {"h": "(?P<h>.{1,64})", "p": r"(?P<p>\d{1,10})", "%": "%"}  # 64: Linux' HOST_NAME_MAX
    regex = ""
    for odd, piece in enumerate(_NCCL_SYMBOL.split(name)):
        regex += values[piece] if odd % 2 else re.escape(piece)
        if odd % 2 and piece != "%":
            values[piece] = f"(?P={piece})"
    return re.compile(os.fsencode(regex), re.DOTALL)


def site_parts(pattern: str, values: Mapping[str, str]) -> tuple[Part, ...] | None:
    """Return the components of a site's pattern; None where it cannot be used.

    ``values``: workdir, user, job_id, node. ``{workdir}`` may stand only at the beginning.
    """
    parts: list[Part] = []
    if pattern.startswith("{workdir}/"):
        base = absolute(values["workdir"], "")
        if base is None:
            return None
        parts += (name for name in base.split(b"/") if name)
        pattern = pattern.removeprefix("{workdir}")
    if not pattern.startswith("/") or "\0" in pattern:
        return None
    for text in pattern.split("/"):
        if text:
            part = _site_part(text, values)
            if part is None:
                return None
            parts.append(part)
    return tuple(parts)


def _site_part(text: str, values: Mapping[str, str]) -> Part | None:
    used = [values[name] for name in _PLACEHOLDER.findall(text)]
    plain = _filled(text, values, str)
    if any(not value or "/" in value or "\0" in value for value in used) or (used and plain in _NO_NAMES):
        return None
    try:
        if not glob.has_magic(_PLACEHOLDER.sub("", text)):
            return os.fsencode(plain)
        return re.compile(os.fsencode(fnmatch.translate(_filled(text, values, glob.escape))))
    except (UnicodeEncodeError, re.error):
        return None


def _filled(text: str, values: Mapping[str, str], change: Callable[[str], str]) -> str:
    return _PLACEHOLDER.sub(lambda found: change(values[found[1]]), text)
