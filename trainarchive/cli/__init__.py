"""The command line: one verb a module, loaded only when it is used.

The collector is started here too and must stay small, so nothing but click is imported before
the verb is known.
"""

import contextlib
import errno
import importlib
import importlib.util
import io
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from click.exceptions import NoArgsIsHelpError

from trainarchive import __version__
from trainarchive.errors import ANOTHER_HOME, TrainarchiveError

VERBS = {
    "collector": ("trainarchive.cli.collector", "Follow this node's jobs and stream their output (a daemon)."),
    "worker": ("trainarchive.cli.worker", "Seal streams into the archive and finish runs (a daemon)."),
    "fetch": ("trainarchive.cli.fetch", "Write a job's files into a directory."),
    "ls": ("trainarchive.cli.ls", "List runs, newest first."),
    "show": ("trainarchive.cli.show", "Show what is known of a job and of its files."),
    "demo": ("trainarchive.cli.demo", "Show it all at work on this machine, without Slurm."),
}
"""Name to (module, one line of help). Each module has the verb as ``command``."""

EPILOG = """\b
Exit statuses:
  0    done
  1    an error (also: a defect, which says so)
  2    wrong usage or settings
  3    no such job or archive, or none of the job's files match
  4    delivered, but less than the job wrote, or perhaps less: GAPS.txt says what is missing
  5    Redis or the store does not answer; trying again may help
  6    bytes in the archive are damaged
  130  interrupted

With --json an error is {"error": {"what", "where", "hint"}} on standard output."""

INTERRUPTED = 130

ORDINARY = frozenset({
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG,
    errno.ENOSPC, errno.EDQUOT,
})  # fmt: skip
"""What the system may refuse about a path that the user chose: no defect of ours."""


class Globals(msgspec.Struct, frozen=True):
    """The options before the verb: every verb gets them as its ``obj``."""

    home: Path | None = None
    config: Path | None = None


class Verbs(click.Group):
    """Loads a verb's module when the verb is used, and ends every failure with one line and a status."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """Return the verbs that are installed."""
        return [name for name, (module, _) in VERBS.items() if importlib.util.find_spec(module) is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the verb's module; None where there is no such verb."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(VERBS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs' lines without importing any of them."""
        with formatter.section("Verbs"):
            formatter.write_dl([(name, VERBS[name][1]) for name in self.list_commands(ctx)])

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run, and exit the process with the status that the epilog of ``--help`` tells."""
        given = args[0] if args else extra.pop("args", None)
        words = list(sys.argv[1:] if given is None else given)
        extra = {**extra, "prog_name": "trainarchive", "standalone_mode": False}
        sys.exit(_status(lambda: super(Verbs, self).main(words, **extra), words))


@click.group(cls=Verbs, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trainarchive", message="%(prog)s %(version)s")
@click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False, readable=False),  # whether it can be read shows when it is
    help="Directory of the embedded form: its store, Redis and settings.",
)
@click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False, readable=False), help="Settings file to read."
)
@click.pass_context
def cli(ctx: click.Context, home: Path | None, config: Path | None) -> None:
    """Every rank's output of every Slurm training job: off the node, archived, findable."""
    ctx.obj = Globals(home, config)


def main() -> None:
    """Be the ``trainarchive`` command."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that has not the characters of a file name is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    cli.main()


def _status(run: Callable[[], Any], words: Sequence[str]) -> int:
    """Run a verb; tell what went wrong, if anything did, and return the exit status."""
    as_json = "--json" in words[: words.index("--")] if "--" in words else "--json" in words
    try:
        status = _ran(run, as_json=as_json)
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()  # the reader of the output has seen enough; click ends with 1 here too
        return 1
    except OSError as error:
        _discard_output()
        _say(f"trainarchive: output cannot be written: {error.strerror}")
        return 1
    return status


def _ran(run: Callable[[], Any], *, as_json: bool) -> int:
    try:
        result = run()
    except TrainarchiveError as error:
        _tell(error, as_json=as_json)
        return error.exit_status
    except click.ClickException as error:
        if isinstance(error, NoArgsIsHelpError):
            error.show()
        else:
            _tell(_of_click(error), as_json=as_json)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _say("trainarchive: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:  # whatever it is: one line for people, and the traceback is kept
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            raise  # standard output is a file on a full disk
        ordinary = isinstance(error, OSError) and error.errno in ORDINARY and error.filename is not None
        _tell(_of_system(error) if isinstance(error, OSError) and ordinary else _defect(error), as_json=as_json)
        return 1
    # Without standalone mode click returns the status of ctx.exit(), else what the verb returned.
    return result if isinstance(result, int) else 0


def _of_click(error: click.ClickException) -> TrainarchiveError:
    """Return wrong words as one of our errors: where is the verb."""
    called = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "trainarchive"
    what = " ".join(error.format_message().split()).removesuffix(".")
    return TrainarchiveError(what, where=called.removeprefix("trainarchive").strip(), hint=f"see {called} --help")


def _of_system(error: OSError) -> TrainarchiveError:
    """Return what the system says of a path as one of our errors."""
    where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename)
    full = error.errno in {errno.ENOSPC, errno.EDQUOT}
    hint = "free some space there" if full else ANOTHER_HOME
    return TrainarchiveError(os.strerror(error.errno or 0), where=where, hint=hint)


def _defect(error: Exception) -> TrainarchiveError:
    """Keep the traceback; return one line about what nobody foresaw."""
    what = f"internal error: {type(error).__name__}: {error}"
    return TrainarchiveError(what, hint=f"this is a defect; details in {_keep_traceback(error)}")


def _tell(error: TrainarchiveError, *, as_json: bool) -> None:
    if as_json:
        body = {"error": {"what": error.what, "where": error.where, "hint": error.hint}}
        click.echo(json.dumps(body))  # ASCII only, so no terminal can be steered by it
    else:
        _say(f"trainarchive: {error}")


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        click.echo(line, err=True)


def _keep_traceback(error: BaseException) -> str:
    """Write the traceback to a temporary file that only this user can read; return its path."""
    text = "".join(traceback.format_exception(error))
    try:
        descriptor, path = tempfile.mkstemp(".txt", "trainarchive-error-")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        return "no file: none could be written"
    return path


def _discard_output() -> None:
    """Let the interpreter's own flush at exit go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
