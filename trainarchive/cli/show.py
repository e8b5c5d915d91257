"""``trainarchive show``: what is known of a job."""

import click

from trainarchive.cli import output
from trainarchive.cli.archive import Job, job_options, open_archive
from trainarchive.fetching.wording import counted
from trainarchive.manifest import Generation, Manifest, NodeEntry, SourceEntry
from trainarchive.reading import RunView, passed_over, unseen
from trainarchive.run import Source

FILES = ("NODE", ">TASK", ">RANK", "KIND", ">GEN", ">SIZE", ">MISSING", "PATH")


@click.command("show")
@job_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_obj
def command(obj: object, *, job: Job, as_json: bool) -> None:
    """Show a job's state, nodes and files, what is missing, and what may be.

    JOBID as for fetch. Characters of file names that do not print are shown as escapes.
    """
    with open_archive(obj) as archive:
        views = archive.find(job)
    if as_json:
        documents = [_document(view) for view in views]
        output.print_json(documents[0] if len(documents) == 1 else {"runs": documents})
        return
    for number, view in enumerate(views):
        if number:
            click.echo()
        _show(view)


def _document(view: RunView) -> dict[str, object]:
    table = view.table()
    return {
        "run": str(view.key),
        "running": view.running,
        "notes": view.notes,
        "unseen": unseen(table.nodes),
        "text_bytes": _text(table),
        "stored_bytes": sum(part.size for part in table.parts),
        "manifest": table,
    }


def _show(view: RunView) -> None:
    table = view.table()
    for note in view.notes:
        output.say(f"{view.key}: {note}")
    output.heading(_about(view, table))
    _nodes(table.nodes)
    _files(table.sources)
    _gaps(table.sources)
    _list("may be missing, since not everything could be seen", [str(each) for each in unseen(table.nodes)])
    _list(
        "not followed, since it is no output of the job's",
        [f"node {node}: {refusal.path}: {refusal.reason}" for node, refusal in passed_over(table.nodes)],
    )


def _about(view: RunView, table: Manifest) -> list[tuple[str, str]]:
    jobs = [entry.report.job for entry in table.nodes if entry.report is not None]
    stored = sum(part.size for part in table.parts)
    text = _text(table)
    ratio = f", {text / stored:.1f} : 1" if text >= stored > 0 else ""  # of a tiny run the index is the larger part
    return [
        ("run", str(view.key)),
        ("also called", ", ".join(table.aliases)),
        ("state", f"{table.state} (from {table.state_from})" + (", still running" if view.running else "")),
        ("complete", "" if view.running else _completeness(table)),
        ("exit code", table.exit_code),
        ("derived exit code", table.derived_exit_code),
        ("user", next((f"{job.user} ({job.uid})" for job in jobs if job.user), str(jobs[0].uid) if jobs else "")),
        ("started", output.moment(table.started)),
        ("ended", output.moment(table.ended)),
        ("took", f"{table.ended - table.started:.0f} s" if table.ended > table.started > 0 else ""),
        ("text", f"{output.size(text)} in {counted(len(table.sources), 'file')}"),
        ("parts", f"{counted(len(table.parts), 'object')}, {output.size(stored)}{ratio}" if table.parts else ""),
        ("manifest", f"number {table.number} of {output.moment(table.written)}" if table.number else "none yet"),
    ]


def _completeness(table: Manifest) -> str:
    """Say what of the run is not here, so that nobody takes what is for the whole."""
    missing = sum(_missing(made) for entry in table.sources for made in entry.generations)
    count = len(unseen(table.nodes))
    told = [
        *(() if table.complete else ("not every node was done",)),
        *([f"{output.size(missing)} missing"] if missing else ()),
        *([f"{counted(count, 'thing')} may mean that more is missing, see below"] if count else ()),
        *(() if table.sources else ("no file of it was followed",)),
    ]
    return f"no: {'; '.join(told)}" if told else "yes"


def _nodes(nodes: tuple[NodeEntry, ...]) -> None:
    if not nodes:
        return
    click.echo()
    output.table(("NODE", "STATE", ">CLOCK"), [(entry.node, entry.state, _skew(entry)) for entry in nodes])


def _skew(entry: NodeEntry) -> str:
    report = entry.report
    if report is None or not report.skew_error_s:
        return ""  # it was never measured
    error = 1000 * report.skew_error_s
    digits = 1 if error >= 0.1 else 2
    return f"{1000 * report.skew_s:+.{digits}f} ms ± {error:.{digits}f}"


def _files(sources: tuple[SourceEntry, ...]) -> None:
    rows = [
        (
            source.node,
            "" if source.task is None else str(source.task),
            _rank(source),
            source.kind.value,
            str(made.number),
            output.size(made.size - _missing(made)),
            output.size(_missing(made)) if made.gaps else "",
            source.path,
        )
        for source, made in _by_place(sources)
    ]
    if rows:
        click.echo()
        output.table(FILES, rows)


def _by_place(sources: tuple[SourceEntry, ...]) -> list[tuple[Source, Generation]]:
    pairs = [(entry.source, made) for entry in sources for made in entry.generations or (Generation(0, 0, ""),)]
    return sorted(
        pairs,
        key=lambda pair: (pair[0].node, -1 if pair[0].rank is None else pair[0].rank, pair[0].path, pair[1].number),
    )


def _rank(source: Source) -> str:
    if source.rank is not None:
        return str(source.rank)
    return "mixed" if source.mixed else ""


def _gaps(sources: tuple[SourceEntry, ...]) -> None:
    _list(
        "missing",
        [
            f"{source.node}: {source.path}: generation {gap.generation}, bytes {gap.start}-{gap.end}: {gap.reason}"
            for source, made in _by_place(sources)
            for gap in made.gaps
        ],
    )


def _list(title: str, lines: list[str]) -> None:
    if not lines:
        return
    click.echo(f"\n{title}")
    for line in lines:
        click.echo(f"  {output.printable(line)}")


def _missing(made: Generation) -> int:
    return sum(gap.end - gap.start for gap in made.gaps)


def _text(table: Manifest) -> int:
    return sum(made.size - _missing(made) for entry in table.sources for made in entry.generations)
