"""``trainarchive ls``: the runs there are."""

import click
import msgspec

from trainarchive.cli import output
from trainarchive.cli.archive import open_archive
from trainarchive.reading import Summary
from trainarchive.reading.view import DAMAGED

COLUMNS = ("RUN", "STATE", "USER", "STARTED", "ENDED", ">NODES", ">RANKS", ">FILES", ">SIZE", ">MISSING")


@click.command("ls")
@click.option("--cluster", default="", metavar="NAME", help="Only this cluster.")
@click.option(
    "--limit", type=click.IntRange(1, 100_000), default=50, show_default=True, metavar="N", help="Most runs to list."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def command(obj: object, *, cluster: str, limit: int, as_json: bool) -> None:
    """List runs, newest first: running ones and archived ones.

    MISSING counts the bytes that are known to have been written and are not in the archive; a
    question mark there: a node could not see everything, so more may be missing (show tells what). A
    state with a plus sign: not every node of the run was done when its books were closed. DAMAGED:
    the run's books cannot be read.
    """
    with open_archive(obj) as archive:
        listing = archive.recent(cluster, limit)
    if as_json:
        runs = [msgspec.to_builtins(summary) | {"run": str(summary.run)} for summary in listing.runs]
        output.print_json({"runs": runs, "more": listing.more, "notes": listing.notes})
        return
    for note in listing.notes:
        output.say(note)
    if not listing.runs:
        click.echo("no runs")
        return
    output.table(COLUMNS, [_row(summary) for summary in listing.runs])
    if listing.more:
        output.say(f"there are more: --limit is {limit}")


def _row(summary: Summary) -> tuple[str, ...]:
    return (
        str(summary.run),
        summary.state + ("" if summary.complete or summary.running or summary.state == DAMAGED else "+"),
        summary.user,
        output.moment(summary.started),
        output.moment(summary.ended),
        str(summary.nodes),
        str(summary.ranks),
        str(summary.sources),
        output.size(summary.size),
        _missing(summary),
    )


def _missing(summary: Summary) -> str:
    unknown = summary.unseen or (summary.sources == 0 and not summary.running)
    return " ".join([*([output.size(summary.missing)] if summary.missing else ()), *("?" if unknown else ())])
