"""The command line: verbs loaded when used, one line and a status for every failure, output that steers no terminal."""

import errno
import json
import os
import pty
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import click
import msgspec
import pytest
from blake3 import blake3
from click.testing import CliRunner, Result

from trainarchive import __version__, cli, keys, manifest, segment
from trainarchive.cli import EPILOG, VERBS, output, show
from trainarchive.errors import TrainarchiveError
from trainarchive.frame import Framer, gap_frame
from trainarchive.manifest import Generation, Manifest, NodeEntry, Part, SourceEntry, Span
from trainarchive.run import Gap, Job, Lane, LaneReport, Refusal, RunKey, Source, path_fields
from trainarchive.segment import Entry
from trainarchive.store.local import LocalStore
from trainarchive.stream import Append, Stream

EVIL = b"/logs/\x1b[2J\x1b]0;owned\x07[red]bold[/red]\n\xc2\x9b31m\xe2\x80\xae.out"
PATHS = {"s0": b"/logs/rank 0.out", "s1": EVIL}

REFUSED = (Refusal("/etc/sha\x1b[2Jdow", "not a \x1b[31mregular file"),)
"""A reason that no collector gives: it may mean anything."""

Run = Callable[..., Result]


def put_run(  # noqa: PLR0913 (what tests say of a run)
    home: Path,
    job: int = 123,
    *,
    texts: Mapping[str, bytes] | None = None,
    gap: bool = False,
    cluster: str = "c",
    refusals: Sequence[Refusal] = (),
    notes: Sequence[str] = (),
) -> None:
    """Store a finished run in the embedded form's store below ``home``."""
    store = LocalStore(str(home / "store"))
    framer = Framer()
    run = RunKey(cluster, job)
    frames: list[Entry] = []
    sources: list[SourceEntry] = []
    texts = {"s0": b"zero\n", "s1": b"one\n"} if texts is None else texts
    for rank, (name, text) in enumerate(texts.items()):
        source = msgspec.convert(
            {
                "id": name,
                "node": "n1",
                "kind": "task",
                "rank": rank,
                **path_fields(PATHS.get(name, b"/logs/" + name.encode())),
            },
            Source,
        )
        frames += [
            Entry(name, 0, framer.frame(at, text[at : at + 250_000], 1, 1)) for at in range(0, len(text), 250_000)
        ]
        lost = (Gap(0, len(text), len(text) + 10, "spool full"),) if gap else ()
        frames += [Entry(name, 0, gap_frame(each.start, each.end, 1, 1, each.reason)) for each in lost]
        size = len(text) + 10 * len(lost)
        sources.append(SourceEntry(source, (Generation(0, size, blake3(text).hexdigest(), 1, 1, lost),)))
    body, digest = segment.build({}, {entry.source.id: entry.source for entry in sources}, frames)
    key = keys.part_key(run, digest)
    store.put(key, body)
    spans = tuple(Span(entry.source.id, 0, 0, entry.generations[0].size) for entry in sources)
    report = LaneReport(
        Job(1000, "ada", started=1_700_000_000.0),
        skew_s=0.5,
        skew_error_s=0.001,
        refusals=(Refusal("/li\x1b[2Jnk", "symbolic link"), *refusals),
        notes=tuple(notes),
    )
    book = Manifest(
        number=1,
        run=run,
        written=1_700_000_100.0,
        complete=True,
        state="FAILED",
        state_from="epilog",
        exit_code="1:0",
        started=1_700_000_000.0,
        ended=1_700_000_090.0,
        nodes=(NodeEntry("n1", "drained", ("t1",), report),),
        sources=tuple(sources),
        parts=(Part(key, 1, len(body), digest, spans),),
    )
    store.put(keys.manifest_key(run, 1), manifest.encode(book))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a home with an archive and no Redis, in an environment without settings, in a directory of its own."""
    for name in list(os.environ):
        if name.startswith("TRAINARCHIVE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("TRAINARCHIVE_HOME", str(tmp_path / "home"))
    (tmp_path / "user").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield tmp_path / "home"
    for number, handler in signals.items():
        signal.signal(number, handler)


def run(*words: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(cli.cli, list(words))


def process(*words: str, **more: object) -> "subprocess.CompletedProcess[str]":
    """Run the command as a process of its own."""
    command = [sys.executable, "-m", "trainarchive", *words]
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command,
        check=False,
        text=True,
        timeout=60,
        **{"capture_output": True, **more},  # type: ignore[call-overload] # run's many forms
    )
    return done


# -- the group ---------------------------------------------------------------------------------


def test_help_lists_every_verb_and_status() -> None:
    """``--help`` shows each verb with its line, and what every exit status means."""
    shown = run("--help")
    assert shown.exit_code == 0
    for name, (_, line) in VERBS.items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", shown.stdout, re.MULTILINE)
    for status in ("0", "1", "2", "3", "4", "5", "6", "130"):
        assert re.search(rf"^ +{status} +\w", EPILOG, re.MULTILINE)
        assert re.search(rf"^ +{status} +\w", shown.stdout, re.MULTILINE)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_has_help(verb: str) -> None:
    """Every verb loads and explains itself."""
    shown = run(verb, "--help")
    assert shown.exit_code == 0
    assert f"trainarchive {verb}" in shown.stdout


def test_version() -> None:
    """``--version`` tells the package's version."""
    assert run("--version").stdout == f"trainarchive {__version__}\n"


def modules_of(*words: str) -> set[str]:
    """Return the top-level modules, and those of this project, that a command line has loaded at its end."""
    script = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        "from trainarchive.cli import main\n"
        f"sys.argv = ['trainarchive', *{words!r}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True, timeout=60)
    return {name if name.startswith("trainarchive") else name.partition(".")[0] for name in done.stderr.split()}


def test_the_collector_loads_nothing_heavy() -> None:
    """The verb that runs on every compute node loads no boto3, celery or rich, and no reader."""
    loaded = modules_of("collector", "--help")
    assert "trainarchive.cli.collector" in loaded
    assert not loaded & {
        "boto3",
        "botocore",
        "celery",
        "kombu",
        "rich",
        "stamina",
        "trainarchive.reading",
        "trainarchive.cli.fetch",
    }


def test_help_loads_no_verb() -> None:
    """The list of verbs costs the import of none of them."""
    assert not {name for name in modules_of("--help") if name.startswith("trainarchive.cli.")}


def test_a_missing_verb_breaks_no_other(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb whose module is not installed is not listed, and the others work."""
    put_run(home)
    monkeypatch.setitem(VERBS, "later", ("trainarchive.cli.later", "Not there."))
    assert "later" not in run("--help").stdout
    assert run("later").exit_code == 2
    assert run("ls").exit_code == 0


@pytest.mark.parametrize(
    "words",
    [
        ("nonsense",),
        ("fetch",),
        ("fetch", "123", "--rank", "7-3"),
        ("fetch", "123", "--rank", "x"),
        ("fetch", "123", "--kind", "x"),
        ("fetch", "123", "--attempt", "1", "--all-attempts"),
        ("fetch", "abc"),
        ("show", "123.1"),
        ("ls", "--limit", "0"),
        ("--config", "/nonexistent.toml", "ls"),
    ],
)
@pytest.mark.usefixtures("home")
def test_wrong_usage(words: Sequence[str]) -> None:
    """Wrong words and settings end with status 2, and with --json as an error in JSON."""
    plain = run(*words)
    assert (plain.exit_code, plain.stdout) == (2, "")
    assert re.fullmatch(r"trainarchive: .* \(.*\)\n", plain.stderr), "one line, with what to do next"
    told = run(*words, "--json")
    assert (told.exit_code, told.stderr) == (2, "")
    error = json.loads(told.stdout)["error"]
    assert error["what"]
    assert error["hint"] in plain.stderr


@pytest.mark.usefixtures("home")
def test_usage_errors_name_the_verb() -> None:
    """Where, what, and where to read more."""
    shown = run("fetch", "1", "--kind", "x").stderr
    assert shown.startswith("trainarchive: fetch: Invalid value for '--kind': 'x' is not one of")
    assert shown.endswith("(see trainarchive fetch --help)\n")
    shown = run("fetch", "123", "--attempt", "1", "--all-attempts").stderr
    assert shown == (
        "trainarchive: fetch: --attempt and --all-attempts exclude each other (see trainarchive fetch --help)\n"
    )
    assert run("nonsense").stderr.startswith("trainarchive: No such command 'nonsense' (see trainarchive --help)")
    assert "Usage:" in run().output, "without any word it is help"


def test_an_archive_that_is_not_there(home: Path, tmp_path: Path) -> None:
    """A wrong home is no archive without runs: every reader names the directory, in JSON too."""
    says = f"trainarchive: {home}/store: no archive here yet (is --home, TRAINARCHIVE_HOME or [store] url right?)\n"
    for words in (("ls",), ("ls", "--cluster", "c"), ("show", "1"), ("fetch", "1"), ("fetch", "c/1")):
        shown = run(*words)
        assert (shown.exit_code, shown.stdout, shown.stderr) == (3, "", says)
        assert json.loads(run(*words, "--json").stdout)["error"]["where"] == f"{home}/store"
    assert not home.exists()
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize("verb", ["ls", "worker", "collector"])
@pytest.mark.usefixtures("home")
def test_a_home_that_cannot_be_used(verb: str, tmp_path: Path) -> None:
    """A home below a file, and one that this user may not enter, are one clear line with the path, and no defect."""
    (tmp_path / "file").touch()
    homes = [tmp_path / "file" / "home"]
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0)
        homes += [tmp_path / "closed", tmp_path / "closed" / "home"]
    for place in homes:
        done = process("--home", str(place), verb)
        assert re.fullmatch(r"trainarchive: .*/(file|closed)\S*: .*--home.*TRAINARCHIVE_HOME.*\n", done.stderr)
        assert ("Permission denied" in done.stderr) == (place.parts[-2] == "closed" or place.name == "closed")
        assert done.returncode in (1, 2)


@pytest.mark.usefixtures("home")
def test_what_the_system_refuses_is_no_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that may not be used is told with what to do; an error without a path stays a defect."""

    @click.command()
    @click.argument("path")
    def refused(path: str) -> None:
        raise PermissionError(errno.EACCES, "x", *([path] if path else []))

    monkeypatch.setattr("trainarchive.cli.ls.command", refused)
    shown = run("ls", "/there\n")
    assert shown.exit_code == 1
    assert shown.stderr == (
        "trainarchive: /there : Permission denied (choose another with --home or TRAINARCHIVE_HOME)\n"
    )
    assert "internal error" in run("ls", "").stderr


def test_an_error_is_one_line_or_one_document(home: Path) -> None:
    """An unknown job is one line on standard error, or one JSON document on standard output."""
    put_run(home)
    plain = run("show", "999")
    assert plain.exit_code == 3
    assert plain.stdout == ""
    assert re.fullmatch(r"trainarchive: no job 999 .*trainarchive ls.*\n", plain.stderr)
    told = run("show", "999", "--json")
    assert told.exit_code == 3
    assert told.stderr == ""
    assert set(json.loads(told.stdout)["error"]) == {"what", "where", "hint"}


@pytest.mark.usefixtures("home")
def test_an_error_steers_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hostile text in an error is shown, not obeyed."""

    @click.command()
    def fails() -> None:
        raise TrainarchiveError("bad\x1b[2J\x9b", where="a\nb")

    monkeypatch.setattr("trainarchive.cli.ls.command", fails)
    shown = run("ls")
    assert (shown.exit_code, shown.stderr) == (1, "trainarchive: a b: bad\\x1b[2J\\x9b\n")


@pytest.mark.usefixtures("home")
def test_a_defect_is_one_line_and_a_private_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that nobody foresaw is one line; the traceback is in a temporary file of the user's alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    @click.command()
    def breaks() -> None:
        raise ZeroDivisionError("on\x1b purpose")

    monkeypatch.setattr("trainarchive.cli.ls.command", breaks)
    shown = run("ls")
    assert shown.exit_code == 1
    found = re.fullmatch(
        r"trainarchive: internal error: ZeroDivisionError: on\\x1b purpose \(this is a defect; details in (.*)\)\n",
        shown.stderr,
    )
    assert found is not None
    kept = Path(found[1])
    assert kept.parent == tmp_path
    assert kept.stat().st_mode & 0o777 == 0o600
    assert "ZeroDivisionError" in kept.read_text()


@pytest.mark.usefixtures("home")
def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends with 130 and without a traceback."""

    @click.command()
    def waits() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainarchive.cli.ls.command", waits)
    shown = run("ls")
    assert (shown.exit_code, shown.stderr.strip()) == (130, "trainarchive: interrupted")


def test_a_reader_that_went_away(home: Path) -> None:
    """Output into a closed pipe ends quietly."""
    put_run(home)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = process("ls", "--json", capture_output=False, stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert done.stderr == ""
    assert done.returncode == 1


def test_output_on_a_full_disk(home: Path) -> None:
    """Output that cannot be written is an error and no success."""
    put_run(home)
    with Path("/dev/full").open("wb") as full:
        done = process("show", "123", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == "trainarchive: output cannot be written: No space left on device\n"


def test_a_terminal_without_the_characters(home: Path) -> None:
    """A locale that cannot write a file's name gets escapes, not a failure."""
    put_run(home, texts={"→": b"x"})
    done = process("show", "123", env={**os.environ, "PYTHONIOENCODING": "latin-1"}, encoding="latin-1")
    assert done.returncode == 0
    assert r"/logs/\u2192" in done.stdout


# -- ls and show -------------------------------------------------------------------------------


def test_ls(home: Path) -> None:
    """``ls`` lists runs with state, times and sizes, without a note where nothing is unfinished and no worker runs."""
    (home / "store").mkdir(parents=True)
    assert run("ls").stdout == "no runs\n"
    put_run(home, 123, gap=True)
    put_run(home, 124, cluster="d")
    shown = run("ls")
    assert shown.exit_code == 0
    assert shown.stderr == ""
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert rows[0] == ["RUN", "STATE", "USER", "STARTED", "ENDED", "NODES", "RANKS", "FILES", "SIZE", "MISSING"]
    assert {row[0]: (row[1], row[2], row[7:]) for row in rows[1:]} == {
        "c/123.0": ("FAILED", "ada", ["1", "2", "2", "9", "B", "20", "B"]),
        "d/124.0": ("FAILED", "ada", ["1", "2", "2", "9", "B"]),
    }
    told = json.loads(run("ls", "--json", "--cluster", "d").stdout)
    assert [(each["run"], each["size"], each["missing"]) for each in told["runs"]] == [("d/124.0", 9, 0)]
    assert run("ls", "--cluster", "e").stderr == "trainarchive: no cluster e (there are: c, d)\n"
    short = run("ls", "--limit", "1")
    assert len(short.stdout.splitlines()) == 2
    assert "--limit" in short.stderr


def put_segment(home: Path, job: int, body: bytes | None = None) -> str:
    """Store a level-0 segment of a run that has no manifest, or ``body`` in its place, and return its key."""
    lane = Lane(RunKey("c", job), "n1", "t1")
    source = msgspec.convert({"id": "n1-a", "node": "n1", "kind": "task", "path": "/a", "rank": 0}, Source)
    made, digest = segment.build(
        {lane.name: LaneReport(Job(1000))}, {source.id: source}, [Entry("n1-a", 0, Framer().frame(0, b"so far", 1, 1))]
    )
    key = keys.segment_key(lane, "e", "1-0" if body is None else "2-0", "3-0", digest)
    LocalStore(str(home / "store")).put(key, made if body is None else body)
    return key


def test_without_a_worker(home: Path) -> None:
    """Where the worker ended, in order or not, archived runs need no Redis and bring no note; others bring one."""
    put_run(home)
    (home / "redis").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(home / "redis" / "redis.sock"))
    for words in (("ls",), ("show", "123"), ("fetch", "123")):
        shown = run(*words)
        assert (shown.exit_code, shown.stderr) == (0, "")
    put_segment(home, 124)
    for words in (("ls",), ("show", "124")):
        assert "no worker is running" in run(*words).stderr
    assert run("fetch", "123").stderr == ""


@pytest.mark.parametrize("url", ["", "unix:///nonexistent/redis.sock"])
def test_fetch_of_an_unfinished_run_without_redis(home: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """What is sealed of a run without books is fetched, and that there may be more is one line and status 5."""
    put_run(home)
    put_segment(home, 124)
    monkeypatch.setenv("TRAINARCHIVE_LOG_URL", url)
    done = run("fetch", "124")
    assert done.exit_code == 5
    assert re.search(r"c/124.0: not archived yet: .*job-124.* may be missing: .*fetch again", done.stderr)
    assert len(done.stderr.splitlines()) == 2, "and that it runs"
    assert Path("job-124/n1/a").read_bytes() == b"so far"
    told = run("fetch", "124", "--json")
    assert told.exit_code == 5
    assert json.loads(told.stdout)["unanswered"]
    assert run("fetch", "123").exit_code == 0
    assert run("fetch", "999").exit_code == (5 if url else 3)


def test_fetch_of_segments_that_cannot_be_read(home: Path) -> None:
    """Each segment that nobody can read is named, and the status is 6."""
    put_segment(home, 124)
    bad = put_segment(home, 124, b"rubbish")
    done = run("fetch", "124")
    assert done.exit_code == 6
    assert f"c/124.0: {bad}: " in done.stderr
    assert "1 of its objects cannot be read" in done.stderr
    assert Path("job-124/n1/a").read_bytes() == b"so far"
    assert bad in run("show", "124").stderr


def test_a_manifest_that_cannot_be_read(home: Path) -> None:
    """A manifest that is rubbish takes no other run out of ``ls``; its own run is fetched as far as it goes, with 6."""
    put_run(home, 123)
    put_run(home, 124)
    bad = keys.manifest_key(RunKey("c", 124), 1)
    LocalStore(str(home / "store")).put(bad, b"rubbish")
    shown = run("ls")
    assert shown.exit_code == 0
    assert {line.split()[0]: line.split()[1] for line in shown.stdout.splitlines()[1:]} == {
        "c/123.0": "FAILED",
        "c/124.0": "DAMAGED",
    }
    assert shown.stderr.startswith(f"trainarchive: {bad}: ")
    done = run("fetch", "124")
    assert done.exit_code == 6
    assert bad in done.stderr
    assert bad in run("show", "124").stderr


def test_clock() -> None:
    """The clock's offset is shown with its error where that was measured, small ones to a hundredth."""

    def shown(skew_s: float, error_s: float) -> str:
        return show._skew(NodeEntry("n1", "open", ("t1",), LaneReport(Job(1), skew_s=skew_s, skew_error_s=error_s)))

    assert shown(0.5, 0.001) == "+500.0 ms ± 1.0"
    assert shown(0.0001, 0.00005) == "+0.10 ms ± 0.05"
    assert shown(0.0, 0.0002) == "+0.0 ms ± 0.2"
    assert shown(0.0, 0.0) == ""


def test_show(home: Path) -> None:
    """``show`` tells state, layout, what is missing, what was refused and the clock's skew."""
    put_run(home, gap=True, refusals=REFUSED, notes=("a note\x07",))
    shown = run("show", "123").stdout
    for text in (
        "c/123.0",
        "FAILED (from epilog)",
        "exit code",
        "1:0",
        "90 s",
        "ada (1000)",
        "1 object,",
        "9 B in 2 files",
        "no: 20 B missing; 2 things may mean that more is missing, see below",
        r"node n1: /li\x1b[2Jnk: symbolic link",
        r"node n1: a note\x07",
        "+500.0 ms ± 1.0",
        "/logs/rank 0.out",
        "bytes 5-15: spool full",
        r"node n1: /etc/sha\x1b[2Jdow: not followed: not a \x1b[31mregular file",
    ):
        assert text in shown
    told = json.loads(run("show", "123", "--json").stdout)
    assert (told["run"], told["running"], told["text_bytes"]) == ("c/123.0", False, 9)
    assert told["manifest"]["exit_code"] == "1:0"
    assert [each["reason"] for each in told["unseen"]] == ["a note\x07", REFUSED[0].reason]
    put_run(home, 124)
    assert re.search(r"^complete +yes$", run("show", "124").stdout, re.MULTILINE)


def test_a_run_that_not_everybody_saw_looks_so(home: Path) -> None:
    """What a node could not see ends a fetch with status 4 and stands in every list, escaped, first few first."""
    notes = [f"note {number}\x1b[2J" for number in range(4)]
    put_run(home, refusals=REFUSED, notes=notes)
    put_run(home, 124)
    listed = {line.split()[0]: line.split()[-1] for line in run("ls").stdout.splitlines()}
    assert (listed["c/123.0"], listed["c/124.0"]) == ("?", "B")
    counted = {each["run"]: each["unseen"] for each in json.loads(run("ls", "--json").stdout)["runs"]}
    assert counted == {"c/123.0": 5, "c/124.0": 0}
    done = run("fetch", "123")
    assert done.exit_code == 4
    assert done.stderr.splitlines() == [
        *(rf"trainarchive: c/123.0: may be missing: node n1: note {number}\x1b[2J" for number in range(3)),
        "trainarchive: c/123.0: and 2 more, see job-123/GAPS.txt",
        "trainarchive: c/123.0: 5 things may mean that more is missing (see job-123/GAPS.txt)",
    ]
    assert len(Path("job-123/GAPS.txt").read_text().splitlines()) == 6
    told = run("fetch", "123", "--json")
    assert (told.exit_code, told.stderr) == (4, "")
    document = json.loads(told.stdout)
    assert [each["reason"] for each in document["unseen"]] == [*notes, REFUSED[0].reason]
    assert document["error"]["what"].startswith("5 things")
    assert run("fetch", "124").exit_code == 0


def test_a_run_without_a_file_looks_so(home: Path) -> None:
    """Where nothing at all was followed, that is said, and is no success."""
    put_run(home, texts={})
    assert run("ls").stdout.splitlines()[1].endswith("?")
    assert "no: no file of it was followed" in run("show", "123").stdout
    done = run("fetch", "123")
    assert done.exit_code == 4
    assert done.stderr == "trainarchive: c/123.0: no file of it was followed (see job-123/GAPS.txt)\n"
    assert Path("job-123/GAPS.txt").exists()


def on_terminal(*words: str) -> bytes:
    """Run the command with a terminal as output and return all that it wrote there."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "trainarchive", *words]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "300"}
    running = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    written = b""
    while True:
        try:
            block = os.read(controller, 65536)
        except OSError as error:
            assert error.errno == errno.EIO  # noqa: PT017 (what a terminal says at its end)
            break
        if not block:
            break
        written += block
    os.close(controller)
    assert running.wait(30) in (0, 4)
    return written


@pytest.mark.parametrize("words", [("show", "123"), ("ls",), ("fetch", "123")])
def test_hostile_names_steer_no_terminal(home: Path, words: Sequence[str]) -> None:
    """Escapes, bells, line ends, direction marks and markup in a file's name stay text, on a terminal and off it."""
    put_run(home, gap=True, refusals=REFUSED, notes=("a note\x07",))
    written = on_terminal(*words)
    for bad in (b"\x1b[2J", b"\x1b]0", b"\x07", b"\xc2\x9b", b"\xe2\x80\xae", b"\x1b[31mregular"):
        assert bad not in written
    for more in ((), ("--json",)):
        told = run(*words, *more)
        assert all(char.isprintable() or char == "\n" for char in told.stdout + told.stderr)
    if words[0] == "show":
        assert rb"[red]bold[/red]\n\x9b31m\u202e.out" in written.replace(b"\r\n", b"")


def test_json_keeps_the_name(home: Path) -> None:
    """Escaped or not, JSON gives back the very characters."""
    put_run(home)
    told = json.loads(run("show", "123", "--json").stdout)
    assert told["manifest"]["sources"][1]["source"]["path"].encode() == EVIL


# -- fetch -------------------------------------------------------------------------------------


def test_fetch(home: Path) -> None:
    """``fetch`` writes the files below ./job-<id>, and a second one finds them there."""
    put_run(home)
    first = run("fetch", "123")
    assert (first.exit_code, first.stdout, first.stderr) == (0, "c/123.0: 2 files, 9 bytes, written to job-123\n", "")
    assert Path("job-123/n1/logs/rank 0.out").read_bytes() == b"zero\n"
    assert (Path("job-123/n1") / os.fsdecode(EVIL[1:])).read_bytes() == b"one\n"
    assert not Path("job-123/GAPS.txt").exists()
    assert "0 files, 0 bytes, written to job-123; 2 files there already" in run("fetch", "123").stdout
    told = json.loads(run("fetch", "123", "--rank", "0", "-o", "x", "--json").stdout)
    assert (told["run"], told["running"], told["gaps"]) == ("c/123.0", False, [])
    (file,) = told["files"]
    assert (file["path"], file["rank"], file["bytes"], file["status"]) == ("n1/logs/rank 0.out", 0, 5, "written")
    assert file["blake3"] == blake3(b"zero\n").hexdigest()
    assert run("fetch", "123", "--rank", "5").exit_code == 3
    part = run("fetch", "123", "--rank", "1,5-7", "-o", "y")
    assert (part.exit_code, part.stdout) == (0, "c/123.0: 1 file, 4 bytes, written to y\n")
    assert part.stderr == "trainarchive: c/123.0: without a file of their own: ranks 5-7\n"
    put_run(home, 124)
    other = run("fetch", "124", "-o", "y")
    assert other.exit_code == 1
    assert re.fullmatch(r"trainarchive: y: holds the files of another run, c/123\.0, .*\n", other.stderr)


def test_fetch_with_gaps(home: Path) -> None:
    """A fetch that brings less than the job wrote says so and ends with status 4, in JSON too."""
    put_run(home, gap=True)
    plain = run("fetch", "123")
    assert plain.exit_code == 4
    assert plain.stderr == "trainarchive: c/123.0: missing: 20 bytes in 2 gaps (see job-123/GAPS.txt)\n"
    assert Path("job-123/n1/logs/rank 0.out").read_bytes() == b"zero\n"
    told = run("fetch", "123", "--json")
    assert told.exit_code == 4
    document = json.loads(told.stdout)
    assert (len(document["files"]), len(document["gaps"])) == (2, 2)
    assert document["error"]["what"] == "missing: 20 bytes in 2 gaps"


def test_fetch_of_damaged_bytes(home: Path) -> None:
    """Damage ends with status 6, names the file, and costs no other file."""
    put_run(home)
    (part,) = (home / "store").glob("runs/c/123.0/parts/*")
    body = bytearray(part.read_bytes())
    body[8] ^= 0xFF
    part.chmod(0o600)
    part.write_bytes(body)
    done = run("fetch", "123")
    assert done.exit_code == 6
    assert "n1/logs/rank 0.out.damaged" in done.stderr
    assert (Path("job-123/n1") / os.fsdecode(EVIL[1:])).read_bytes() == b"one\n"


def test_fetch_of_several_attempts(home: Path) -> None:
    """Of several attempts each gets a directory of its own."""
    put_run(home)
    store = LocalStore(str(home / "store"))
    book = manifest.newest(store, RunKey("c", 123))
    assert book is not None
    second = msgspec.structs.replace(book, run=RunKey("c", 123, 1))
    store.put(keys.manifest_key(second.run, 1), manifest.encode(second))
    assert run("fetch", "123", "--all-attempts").exit_code == 0
    assert sorted(path.name for path in Path().iterdir()) == ["job-123.0", "job-123.1"]
    told = json.loads(run("fetch", "123", "--all-attempts", "-o", "both", "--json").stdout)
    assert [each["directory"] for each in told["runs"]] == ["both/job-123.0", "both/job-123.1"]


def test_fetch_of_a_running_job(home: Path, stream: Stream, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a running job what there is so far is fetched, which is a success and said on standard error."""
    monkeypatch.setenv("TRAINARCHIVE_LOG_URL", redis_url)
    lane = Lane(RunKey("c", 77), "n1", "t1")
    source = msgspec.convert({"id": "n1-s", "node": "n1", "kind": "task", "path": "/a", "rank": 0}, Source)
    stream.open(lane, LaneReport(Job(1000, "ada", started=1.0)), [source])
    stream.append([Append(lane, "n1-s", 0, [Framer().frame(0, b"so far", 1, 1)])])
    done = run("fetch", "77")
    assert done.exit_code == 0
    assert "still running: 6 bytes so far" in done.stderr
    assert Path("job-77/n1/a").read_bytes() == b"so far"
    assert "RUNNING" in run("ls").stdout
    assert "still running" in run("show", "77").stdout
    assert home.name in os.environ["TRAINARCHIVE_HOME"]


def temporary(top: Path) -> list[Path]:
    """Return the temporary files below ``top``."""
    return list(top.rglob(".trainarchive-*"))


def test_fetch_onto_a_full_disk(home: Path) -> None:
    """Where a file cannot be written whole it is one clear line, and no half file stays."""
    put_run(home, texts={"s0": b"small", "s2": blake3(b"big").digest(3_000_000)})

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    done = process("fetch", "123", preexec_fn=limit)
    assert done.returncode == 1
    assert re.fullmatch(r"trainarchive: job-123/n1/logs/s2: cannot be written: File too large \(.*\)\n", done.stderr)
    assert Path("job-123/n1/logs/rank 0.out").read_bytes() == b"small"
    assert sorted(path.name for path in Path("job-123").rglob("*") if path.is_file()) == ["rank 0.out"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_whole_files(home: Path, number: signal.Signals, status: int) -> None:
    """A fetch that is told to end leaves whole files and no temporary ones."""
    text = b"line\n" * 100
    put_run(home, texts={f"f{rank}": text for rank in range(5000)})
    command = [sys.executable, "-m", "trainarchive", "fetch", "123"]
    logs = Path("job-123/n1/logs")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            deadline = time.monotonic() + 30
            while not (logs.exists() and any(logs.glob("f*"))):
                assert running.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.001)
            running.send_signal(number)
            assert running.wait(30) == status
        finally:
            running.kill()
    files = list(logs.iterdir())
    assert 0 < len(files) < 5000
    assert all(file.read_bytes() == text for file in files)
    assert temporary(Path()) == []


# -- output ------------------------------------------------------------------------------------


def test_small_words() -> None:
    """Sizes, times and number ranges read as people write them."""
    assert [output.size(count) for count in (None, 0, 1023, 1024, 1_572_864, 2**40)] == [
        "?", "0 B", "1023 B", "1.0 KiB", "1.5 MiB", "1.0 TiB",
    ]  # fmt: skip
    assert output.moment(0.0) == output.moment(1e300) == output.moment(float("nan")) == "-"
    assert re.fullmatch(r"2023-11-1\d \d\d:\d\d:20[+-]\d\d:\d\d", output.moment(1_700_000_000.0)), "with its zone"
    assert output.printable("a\\b é\n\x1b\u202e\ud800") == "a\\b é\\n\\x1b\\u202e\\ud800"
