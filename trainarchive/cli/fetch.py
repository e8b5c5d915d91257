"""``trainarchive fetch``: a job's files, in a directory."""

import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from trainarchive.cli import output
from trainarchive.cli.archive import Job, job_options, open_archive
from trainarchive.errors import DamagedError, IncompleteError, NotFoundError, TrainarchiveError, UnavailableError
from trainarchive.fetching import Advance, Copied, Folder, Selection, fetch, select
from trainarchive.fetching.wording import counted, ranges
from trainarchive.reading import RunView
from trainarchive.run import Kind

SHOWN = 3
"""What may be missing without anybody knowing is told on standard error up to so many; GAPS.txt has all."""

_RANKS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


class Ranks(click.ParamType[tuple[tuple[int, int], ...]]):
    """``0,3-7`` as (first, last) pairs."""

    name = "ranks"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[int, int], ...]:
        """Read the text."""
        spans = []
        for word in str(value).split(","):
            found = _RANKS.fullmatch(word.strip())
            first = int(found[1]) if found else 0
            last = int(found[2] or first) if found else -1
            if last < first:
                self.fail(f"{word!r} is no rank and no range of ranks like 3-7", param, ctx)
            spans.append((first, last))
        return tuple(spans)


@click.command("fetch")
@job_options
@click.option("--rank", "ranks", type=Ranks(), metavar="0,3-7", help="Files of these global ranks only.")
@click.option("--node", "nodes", multiple=True, metavar="GLOB", help="Files of matching nodes only; repeatable.")
@click.option(
    "--kind", "kinds", multiple=True, type=click.Choice([kind.value for kind in Kind]), help="Only these; repeatable."
)
@click.option(
    "-o",
    "--output",
    "out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory to write into.  [default: ./job-<id>]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document about what was done.")
@click.pass_context
def command(  # noqa: PLR0913 (one for each option)
    ctx: click.Context,
    *,
    job: Job,
    ranks: tuple[tuple[int, int], ...] | None,
    nodes: tuple[str, ...],
    kinds: tuple[str, ...],
    out: Path | None,
    as_json: bool,
) -> None:
    """Write a job's files into a directory, each as <node>/<its path on the node>.

    JOBID is 123, 111_2 (an array's task), 200+1 (a het job's component) or cluster/123.0; a plain
    id that is an array's or a het job's brings all its tasks or components.

    A file that was emptied and written again is there once for each time: name, name.~1, ...
    Every file is checked against its digest; those that are there already, as they were written, are
    left alone, and one that was changed by hand is replaced. Of a running job you get what there is
    so far.

    Beside the files it writes manifest.json, the run's table of contents, and, where something is
    missing, GAPS.txt. A directory that holds another run is refused.

    Where bytes are missing, the file holds the others, in order, with nothing in their place;
    GAPS.txt says what is missing and why, and what may be missing since a node could not see
    everything; the exit status is 4. Of a job that is not archived yet, while the log Redis does
    not answer, you get what is sealed, and status 5.
    """
    selection = Selection(ranks=ranks or (), nodes=nodes, kinds=kinds)
    _end_in_order()
    with open_archive(ctx.obj) as archive:
        views = _matching(archive.find(job), selection)
        copies = [_fetch(view, place, selection, out is None) for view, place in _places(views, job.name, out)]
    error = _verdict(copies)
    if as_json:
        documents = [msgspec.to_builtins(copied) for copied in copies]
        document = documents[0] if len(documents) == 1 else {"runs": documents}
        if error is not None:
            document["error"] = {"what": error.what, "where": error.where, "hint": error.hint}
        output.print_json(document)
        ctx.exit(error.exit_status if error is not None else 0)
    for copied in copies:
        _tell(copied)
    if error is not None:
        raise error


def _matching(views: Sequence[RunView], selection: Selection) -> list[RunView]:
    """Return the runs that have files that are wanted; raise NotFoundError where none has."""
    found, refused = [], []
    for view in views:
        try:
            select(view, selection)
        except NotFoundError as error:
            refused.append(error)
        else:
            found.append(view)
    if not found:
        raise refused[0]
    return found


def _places(views: Sequence[RunView], named: str, out: Path | None) -> Iterator[tuple[RunView, Path]]:
    """Yield each run with its directory: ``out`` itself for one run, one below it for each of several."""
    if len(views) == 1:
        name = named.strip().rpartition("/")[2].partition(".")[0]
        yield views[0], out or Path(f"job-{name}")
        return
    ids = [view.key.job_id for view in views]
    for view in views:
        several = ids.count(view.key.job_id) > 1
        name = f"job-{view.key.job_id}" + (f".{view.key.attempt}" if several else "")
        yield view, (out or Path()) / name


def _fetch(view: RunView, place: Path, selection: Selection, is_default: bool) -> Copied:
    # In a shared directory somebody else may have made a link of the name that nobody chose.
    with Folder(place, follow=not is_default) as folder, _progress(view, selection) as advance:
        copied = fetch(view, folder, selection, advance)
    for note in copied.notes:
        if not copied.unanswered or copied.unanswered not in note:  # the error says it
            output.say(f"{copied.run}: {note}")
    if copied.running:
        total = sum(file.bytes for file in copied.files)
        output.say(f"{copied.run} is still running: {counted(total, 'byte')} so far")
    return copied


@contextmanager
def _progress(view: RunView, selection: Selection) -> Iterator[Advance]:
    """Show a bar on standard error, if that is a terminal."""
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    total = sum(made.size for entry in select(view, selection) for made in entry.generations)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(f"job {view.key.job_id}.{view.key.attempt}", total=total)
        yield lambda count: shown.advance(task, count)


def _verdict(copies: Sequence[Copied]) -> TrainarchiveError | None:
    """Return the worst that is to be told of all runs, None if all is well."""
    for look in (_damage, _silence, _incompleteness):
        for copied in copies:
            error = look(copied)
            if error is not None:
                return error
    return None


def _damage(copied: Copied) -> DamagedError | None:
    if copied.damaged:
        first = copied.damaged[0]
        return DamagedError(
            f"damaged: {len(copied.damaged)} of {counted(len(copied.files), 'file')}; {first.path}: {first.reason}",
            where=copied.run,
            hint=f"kept as *.damaged in {copied.directory}",
        )
    if copied.damaged_objects:
        count = len(copied.damaged_objects)
        return DamagedError(
            f"{count} of its objects cannot be read, and what was in {'it' if count == 1 else 'them'} is not here",
            where=copied.run,
            hint=f"see {_gaps_file(copied)}",
        )
    return None


def _silence(copied: Copied) -> UnavailableError | None:
    if not copied.unanswered:
        return None
    return UnavailableError(
        f"not archived yet: what is sealed was written to {copied.directory}, "
        f"its newest bytes may be missing: {copied.unanswered}",
        where=copied.run,
        hint="fetch again later",
    )


def _incompleteness(copied: Copied) -> IncompleteError | None:
    told = []
    if copied.gaps:
        missing = sum(gap.end - gap.start for gap in copied.gaps)
        told.append(f"missing: {counted(missing, 'byte')} in {counted(len(copied.gaps), 'gap')}")
    if copied.missing_nodes:
        told.append(f"not done when the run was closed: {counted(len(copied.missing_nodes), 'node')}")
    if copied.unseen:
        told.append(f"{counted(len(copied.unseen), 'thing')} may mean that more is missing")
    if not copied.files:
        told.append("no file of it was followed")
    if not told:
        return None
    return IncompleteError("; ".join(told), where=copied.run, hint=f"see {_gaps_file(copied)}")


def _gaps_file(copied: Copied) -> str:
    return os.path.join(copied.directory, "GAPS.txt")  # noqa: PTH118 (a text for people)


def _tell(copied: Copied) -> None:
    """Print the outcome of one run."""
    written = [file for file in copied.files if file.status == "written"]
    skipped = [file for file in copied.files if file.status == "skipped"]
    size = sum(file.bytes for file in written)
    told = [f"{counted(len(written), 'file')}, {counted(size, 'byte')}, written to {copied.directory}"]
    if skipped:
        told.append(f"{counted(len(skipped), 'file')} there already")
    click.echo(output.printable(f"{copied.run}: {'; '.join(told)}"))
    if copied.ranks_without_files:
        output.say(f"{copied.run}: without a file of their own: ranks {ranges(copied.ranks_without_files)}")
    for each in copied.unseen[:SHOWN]:
        output.say(f"{copied.run}: may be missing: {each}")
    if len(copied.unseen) > SHOWN:
        output.say(f"{copied.run}: and {len(copied.unseen) - SHOWN:,} more, see {_gaps_file(copied)}")


def _end_in_order() -> None:
    """Let a signal that asks to end unwind like Ctrl-C, so that no half file is left."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
