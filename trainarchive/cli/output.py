"""What verbs print: JSON for programs, tables and lines for people. Nothing printed can steer a terminal.

Names in an archive come from whoever wrote the files. Every character that does not print
(control characters, escapes, text direction marks) is shown as an escape, in JSON too.
"""

import re
import sys
from collections.abc import Sequence
from datetime import datetime

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainarchive.fetching.books import json_text

WIDE = 10_000
"""Columns where the output is no terminal: nothing is cut or folded for a program."""

_PLAIN = re.compile(r"[ -~]*")


def printable(text: str) -> str:
    r"""Return ``text`` with every character that does not print as an escape (``\n``, ``\x1b``, ``\u202e``)."""
    if _PLAIN.fullmatch(text):
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def print_json(value: object) -> None:
    """Print one JSON document."""
    click.echo(json_text(value))


def say(line: str) -> None:
    """Print one line for people to standard error."""
    click.echo(f"trainarchive: {printable(line)}", err=True)


def heading(pairs: Sequence[tuple[str, str]]) -> None:
    """Print names and values below each other; empty values are left out."""
    shown = [(name, value) for name, value in pairs if value]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        click.echo(f"{name:<{width}}  {printable(value)}")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; a column whose title begins with ``>`` is set to the right. Cells may fold, and are never cut."""
    made = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        made.add_column(
            Text(column.removeprefix(">")), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    console = _console()
    with console.capture() as captured:
        console.print(made)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def size(count: int | None) -> str:
    """Return a number of bytes as people read it: ``17 B``, ``1.5 MiB``."""
    if count is None:
        return "?"
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def moment(seconds: float) -> str:
    """Return a Unix time in the local zone, to the second, with the zone; a dash for 0 and for what is no time."""
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds") if seconds > 0 else "-"
    except (OverflowError, ValueError, OSError):
        return "-"


def _console() -> Console:
    terminal = sys.stdout.isatty()
    return Console(
        width=None if terminal else WIDE, force_terminal=terminal, markup=False, emoji=False, highlight=False
    )


def _escape(char: str) -> str:
    return char.encode("unicode_escape", errors="backslashreplace").decode()
