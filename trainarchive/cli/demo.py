"""``trainarchive demo``: the main job on this machine, on embedded parts."""

import os
import shutil
import sys
import time
from pathlib import Path

import click

from trainarchive import settings as settings_module
from trainarchive.cli import Globals
from trainarchive.demo.story import Story
from trainarchive.errors import TrainarchiveError

OWN = ".trainarchive-demo"
"""Marks a directory that the demo made, and so may make anew."""


@click.command("demo")
@click.option(
    "--home",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for everything, made anew if an earlier demo made it.  [default: trainarchive-demo]",
)
@click.pass_obj
def command(where: Globals, directory: Path | None) -> None:
    """Show the main job: two pretend nodes, hooks, collectors, a worker, a wiped node, fetch.

    Takes under two minutes. What it leaves can be looked at with ls, show and fetch.
    """
    directory = directory or where.home or Path("trainarchive-demo")
    home = directory.absolute()
    _make(home)
    # Only the demo's own settings count: a site's variables must not send the demo to a real store.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRAINARCHIVE_")}
    os.environ.clear()
    os.environ.update(environment)
    settings = settings_module.load(environment, home=home)
    start = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"[{time.monotonic() - start:5.1f} s] {text}")

    verdict = Story(settings, say).tell()
    for problem in verdict.problems:
        say(f"PROBLEM {problem}")
    say(f"try by hand: {_own_name()} --home {directory} ls (or: show 102, fetch 101 --rank 5)")
    if verdict.problems:
        raise TrainarchiveError(
            f"{len(verdict.problems)} of {verdict.files} files are not as they were written", where=os.fspath(home)
        )
    click.echo(f"demo: {verdict.files} files, {verdict.bytes:,} bytes fetched after both nodes were wiped: identical")


def _own_name() -> str:
    """Return how this command was called, as it can be typed again from here."""
    called = Path(sys.argv[0]).absolute()
    if called.name != "trainarchive":
        return f"{Path(sys.executable).name} -m trainarchive"
    return os.fspath(called.relative_to(Path.cwd())) if called.is_relative_to(Path.cwd()) else "trainarchive"


def _make(home: Path) -> None:
    hint = "give another --home"
    try:
        if home.exists():
            if not (home / OWN).exists() and any(home.iterdir()):
                raise TrainarchiveError("the demo did not make what is in there", where=os.fspath(home), hint=hint)
            shutil.rmtree(home)
        home.mkdir(parents=True)
        (home / OWN).touch()
    except OSError as error:
        raise TrainarchiveError(f"cannot be used: {error.strerror}", where=os.fspath(home), hint=hint) from error
