"""The workers as they really run: processes, an embedded Redis, a local store."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import blake3
import msgspec
import pytest
import redis
from celery import Celery

from celery_tasks import attempts, logs, schedule, upkeep
from celery_tasks.app import ArchiveApp, app
from trainarchive import embedded, finishing, keys, lease, manifest, sealing
from trainarchive import settings as settings_module
from trainarchive.cli.worker import _commands
from trainarchive.errors import TrainarchiveError, UnavailableError
from trainarchive.frame import Framer
from trainarchive.manifest import Manifest
from trainarchive.run import Job, Kind, Lane, LaneReport, RunKey, Source
from trainarchive.settings import Finish, Seal, Settings
from trainarchive.store import open_store
from trainarchive.store.contract import Store
from trainarchive.store.memory import MemoryStore
from trainarchive.stream import Append, Outcome, State, Stream
from trainarchive.sweeping import Sweeper

RUN = RunKey("c", 7)
LANE = Lane(RUN, "n1", "s1")
SOURCE = Source("n1-a", "n1", Kind.TASK, "/out/0.log", rank=0)
QUICK = {
    "TRAINARCHIVE_SEAL_LEASE_S": "2",
    "TRAINARCHIVE_SEAL_MIN_AGE_S": "0.1",
    "TRAINARCHIVE_SEAL_MAX_AGE_S": "0.3",
    "TRAINARCHIVE_WORKER_SWEEP_EVERY_S": "0.2",
    "TRAINARCHIVE_WORKER_CONCURRENCY": "1",
}
BOUND_S = 60.0


def wait_for(condition: Callable[[], Any], what: str, seconds: float = BOUND_S) -> Any:
    """Return the condition's first true value."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


class Worker:
    """A real ``trainarchive worker``."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainarchive", "worker"],
                env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=log.parent,
            )  # fmt: skip

    def wait_until_ready(self) -> None:
        """Read its one line."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "trainarchive worker is ready\n", self.log.read_text()

    def family(self) -> list[int]:
        """Return the pids of all Celery processes that this worker started."""
        mark = f"--hostname=trainarchive-{self.process.pid}-".encode()
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                try:
                    if mark in (folder / "cmdline").read_bytes():
                        found.append(int(folder.name))
                except OSError:
                    continue
        return found

    def kill(self) -> None:
        """Kill it as the kernel would."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stop(self) -> int:
        """End it in order; return its exit status."""
        self.process.terminate()
        status = self.process.wait(BOUND_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


StartWorker = Callable[..., Worker]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Give an environment with a home of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRAINARCHIVE_")}
    return {**clean, **QUICK, "TRAINARCHIVE_HOME": str(tmp_path / "home")}


@pytest.fixture
def settings(environment: dict[str, str]) -> Settings:
    """Give the settings that the worker will have."""
    return settings_module.load(environment)


@pytest.fixture
def start_worker(environment: dict[str, str], settings: Settings, tmp_path: Path) -> Iterator[StartWorker]:
    """Give a function that starts a worker; whatever still runs at the end is ended."""
    with ExitStack() as stack:

        def start(**more: str) -> Worker:
            worker = Worker({**environment, **more}, tmp_path / "log")
            stack.callback(worker.process.wait)
            stack.callback(worker.process.kill)
            return worker

        yield start
    # A killed worker leaves its Redis to the next one; the last one's is ended here.
    with embedded.Embedded(settings.home) if settings.home.exists() else ExitStack():
        pass


def door(settings: Settings) -> Stream:
    """Open the log Redis as a node does."""
    url, _ = embedded.resolve_urls(settings)
    return Stream(url, timeout_s=5.0, max_pending=64 * 2**20)


def send(stream: Stream, pieces: list[bytes], offset: int) -> int:
    """Send text as a node does; return the offset after it."""
    framer = Framer()
    for piece in pieces:
        (answer,) = stream.append([Append(LANE, SOURCE.id, 0, [framer.frame(offset, piece, 1, 1)])])
        assert answer.outcome is Outcome.OK
        offset += len(piece)
    return offset


def drained(stream: Stream) -> None:
    """Say that the node is done."""
    job = Job(1000, nodes="n1", ended=2.0, exit_code="0:0", derived_exit_code="0:0")
    stream.report(LANE, LaneReport(job, drained=True))


def written(store: Store) -> Manifest | None:
    """Return the run's newest manifest."""
    return manifest.newest(store, RUN)


def test_from_stream_to_manifest(start_worker: StartWorker, settings: Settings) -> None:
    """A job's text goes from the stream into the store while it runs, and the manifest follows its end."""
    worker = start_worker()
    worker.wait_until_ready()
    stream, store = door(settings), open_store(settings)
    stream.open(LANE, LaneReport(Job(1000, nodes="n1")), [SOURCE])
    send(stream, [b"hello\n", b"world\n"], 0)
    wait_for(lambda: list(store.list(keys.live_prefix(RUN))), "a segment while the job runs")
    send(stream, [b"end\n"], 12)
    drained(stream)
    book = wait_for(lambda: written(store), "the manifest")
    assert book.complete
    (entry,) = book.sources
    assert entry.generations[0].blake3 == blake3.blake3(b"hello\nworld\nend\n").hexdigest()
    found = wait_for(lambda: (seen := stream.status(LANE)) and seen.state is State.ARCHIVED, "the lane let go")
    assert found
    # Its Redis is killed: it comes back, and another run is archived.
    with redis.Redis.from_url(embedded.resolve_urls(settings)[0], protocol=2) as client:
        os.kill(int(client.info("server")["process_id"]), signal.SIGKILL)
    wait_for(embedded.Embedded(settings.home).alive, "Redis alive again")
    other = Lane(RunKey("c", 8), "n1", "s2")
    job = Job(1000, nodes="n1", ended=2.0, exit_code="1:0")
    stream.open(other, LaneReport(job, drained=True), [])
    later = wait_for(lambda: manifest.newest(store, other.run), "the other run's manifest")
    assert (later.state, later.complete) == ("FAILED", True)
    began = time.monotonic()
    worker.process.send_signal(signal.SIGINT)
    assert worker.stop() == 0
    assert time.monotonic() - began < 15
    assert worker.family() == []
    told = worker.log.read_text()
    assert "Traceback" not in told
    assert not embedded.Embedded(settings.home).alive()
    stream.close()


def test_kill_9_and_recovery(start_worker: StartWorker, settings: Settings) -> None:
    """A worker killed in the middle of sealing leaves no process, and the next worker's sweep completes its work."""
    first = start_worker()
    first.wait_until_ready()
    stream, store = door(settings), open_store(settings)
    stream.open(LANE, LaneReport(Job(1000, nodes="n1")), [SOURCE])
    pieces = [os.urandom(200_000) for _ in range(60)]
    offset = send(stream, pieces[:50], 0)
    wait_for(lambda: list(store.list(keys.live_prefix(RUN))), "a first segment")
    family = first.family()
    assert len(family) >= 2
    first.kill()
    wait_for(lambda: first.family() == [], "the killed worker's processes gone", 10)
    send(stream, pieces[50:], offset)
    drained(stream)
    second = start_worker()
    second.wait_until_ready()
    book = wait_for(lambda: written(store), "the manifest")
    (entry,) = book.sources
    assert entry.generations[0].blake3 == blake3.blake3(b"".join(pieces)).hexdigest()
    assert entry.generations[0].gaps == ()
    assert second.stop() == 0
    stream.close()


def test_beat_dies(start_worker: StartWorker, settings: Settings) -> None:
    """Where all that a worker forked is killed, beat too, the worker goes on sweeping and sealing by itself."""
    worker = start_worker()
    worker.wait_until_ready()
    parents = {pid for pid in worker.family() if parent_of(pid) == worker.process.pid}
    children = [pid for pid in worker.family() if parent_of(pid) in parents]
    assert (len(parents), len(children)) == (2, 3)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "beat ended by itself" in worker.log.read_text(), "beat missed", 40)
    stream, store = door(settings), open_store(settings)
    stream.open(LANE, LaneReport(Job(1000, nodes="n1")), [SOURCE])
    send(stream, [b"hello\n"], 0)
    wait_for(lambda: list(store.list(keys.live_prefix(RUN))), "a segment", 60)
    assert {pid for pid in worker.family() if parent_of(pid) == worker.process.pid} == parents
    worker.kill()
    stream.close()


def parent_of(pid: int) -> int:
    """Return a process' parent, 0 where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@pytest.mark.slow
def test_a_dead_broker(start_worker: StartWorker, start_redis: Any) -> None:
    """With the broker gone a worker still ends within its bound, with status 0 and no traceback."""
    server = start_redis()
    path = server.url.removeprefix("unix://").partition("?")[0]
    worker = start_worker(
        TRAINARCHIVE_LOG_URL=server.url, TRAINARCHIVE_BROKER_URL=f"redis+socket://{path}?virtual_host=1"
    )
    worker.wait_until_ready()
    server.process.kill()
    wait_for(lambda: "broker" in worker.log.read_text().lower(), "word of the broker in the log")
    began = time.monotonic()
    assert worker.stop() == 0
    assert time.monotonic() - began < 25
    assert worker.family() == []
    assert "Traceback" not in worker.log.read_text()


POISON = """
import os, signal, sys
from celery_tasks.app import app
from celery_tasks.attempts import Hint, underway

def die(_):
    with open(sys.argv[1], "a") as file:
        file.write("x")
    os.kill(os.getpid(), signal.SIGKILL)

@app.task(name="poison")
def poison(subject, marker):
    underway(Hint("poison", subject, marker), app.stream, app.settings, die)

if sys.argv[2] == "send":
    poison.apply_async(("lane", "marker"), queue="bulk")
else:
    app.worker_main(["--quiet", "worker", "--concurrency=1", "--loglevel=info", "--without-gossip", "--without-mingle"])
"""


@pytest.mark.slow
def test_a_poisoned_task(environment: dict[str, str], start_redis: Any, tmp_path: Path) -> None:
    """A task whose process is killed comes back at once, and is given up after so many times."""
    server = start_redis()
    path = server.url.removeprefix("unix://").partition("?")[0]
    urls = {"TRAINARCHIVE_LOG_URL": server.url, "TRAINARCHIVE_BROKER_URL": f"redis+socket://{path}?virtual_host=1"}
    count, log = tmp_path / "count", tmp_path / "log"
    script = tmp_path / "poison.py"
    script.write_text(POISON)
    command, limits = (
        [sys.executable, str(script), str(count)],
        {"TRAINARCHIVE_WORKER_MAX_ATTEMPTS": "1"},
    )  # Celery takes 5 s to see each death
    told = {**environment, **urls, **limits}
    subprocess.run([*command, "send"], env=told, check=True)
    with log.open("wb") as errors:
        worker = subprocess.Popen([*command, "work"], env=told, stdout=errors, stderr=errors)
    try:
        wait_for(lambda: b"given up" in log.read_bytes(), "the task given up")
    finally:
        worker.terminate()
        worker.wait(BOUND_S)
    assert count.read_text() == "x"
    assert "Traceback" not in log.read_text()
    with redis.Redis(unix_socket_path=path, db=1, protocol=2) as client:
        assert (client.llen("bulk"), client.hlen("unacked")) == (0, 0)


def test_unusable_settings(start_worker: StartWorker) -> None:
    """A wrong store URL ends the worker at once, with one line and the status for settings."""
    worker = start_worker(TRAINARCHIVE_STORE_URL="gopher://x")
    assert worker.process.wait(BOUND_S) == 2
    assert worker.process.stdout is not None
    assert worker.process.stdout.read() == ""
    worker.process.stdout.close()
    assert "TRAINARCHIVE_STORE_URL" in worker.log.read_text()
    assert "Traceback" not in worker.log.read_text()


def test_plain_celery(environment: dict[str, str], tmp_path: Path) -> None:
    """``celery -A celery_tasks`` finds the application without any configuration."""
    done = subprocess.run(
        [Path(sys.executable).parent / "celery", "-A", "celery_tasks", "report"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "celery.beat:Scheduler" in done.stdout


def test_configuration(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """What keeps tasks safe is set: JSON alone, late acknowledgement with redelivery, and times in the right order."""
    for name, value in environment.items():
        if name.startswith("TRAINARCHIVE_"):
            monkeypatch.setenv(name, value)
    made = ArchiveApp(set_as_current=False).configuration()
    assert made["accept_content"] == ["json"]
    assert made["task_acks_late"]
    assert made["task_reject_on_worker_lost"]
    assert made["task_ignore_result"]
    assert not made["task_remote_tracebacks"]
    visible = made["broker_transport_options"]["visibility_timeout"]
    assert made["task_soft_time_limit"] < made["task_time_limit"] < visible
    assert {queue.name for queue in made["task_queues"]} == {"seal", "finish", "bulk"}
    assert {entry["task"] for entry in made["beat_schedule"].values()} <= set(schedule.ROUTES)
    # Beat counts from its own start: what comes once in so long never comes from one that lives shorter.
    assert max(entry["schedule"] for entry in made["beat_schedule"].values()) <= 3600


@pytest.mark.parametrize(
    ("concurrency", "queues", "expected"),
    [
        (1, (), {"finish,bulk": 1, "seal": 1}),
        (2, (), {"finish,bulk": 1, "seal": 1}),
        (5, (), {"finish,bulk": 2, "seal": 3}),
        (4, ("bulk", "seal"), {"bulk,seal": 4}),
    ],
)
def test_processes_that_only_seal(concurrency: int, queues: tuple[str, ...], expected: dict[str, int]) -> None:
    """However many runs are being finished, some processes are left that seal; one Celery has beat."""
    commands = _commands(concurrency, queues, "info", beat=True)
    words = [dict(word.partition("=")[::2] for word in command) for command in commands]
    assert {each["--queues"]: int(each["--concurrency"]) for each in words} == expected
    assert len({each["--hostname"] for each in words}) == len(words)
    assert ["--beat" in each for each in words].count(True) == 1
    assert not any("--beat" in each for each in _commands(concurrency, queues, "info", beat=False))


@pytest.fixture
def worker_parts(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """Give the tasks, run in this process, a Redis and a store of the test's own."""
    store = MemoryStore()
    settings = Settings(home=Path("/nowhere"), finish=Finish(keep_level0_s=0.0), seal=Seal(lease_s=30.0))
    for name, part in {
        "stream": stream, "store": store, "settings": settings, "back_off": attempts.BackOff(),
        "sweeper": Sweeper(stream, settings),
    }.items():  # fmt: skip
        monkeypatch.setitem(app.__dict__, name, part)
    return store


def replaced(stream: Stream, store: MemoryStore, run: RunKey = RUN) -> None:
    """Have a finished run, of which there are segments to delete."""
    lane = msgspec.structs.replace(LANE, run=run)
    stream.open(lane, LaneReport(Job(1000, nodes="n1")), [SOURCE])
    for at in range(2):
        stream.append([Append(lane, SOURCE.id, 0, [Framer().frame(at, b"x", 1, 1)])])
        sealing.drain(stream, store, lane, Seal())
    stream.report(lane, LaneReport(Job(1000, nodes="n1", ended=2.0), drained=True))
    assert finishing.finish(stream, store, run, Settings(home=Path("/nowhere")))
    assert len(list(store.list(keys.live_prefix(run)))) == 2


def test_no_reaping_while_a_run_is_finished(stream: Stream, worker_parts: MemoryStore) -> None:
    """What a finish may be about to list is not deleted under it; the next time it is."""
    replaced(stream, worker_parts)
    with lease.alone(stream, RUN, 30.0):
        upkeep.reap(str(RUN), "marker")
        upkeep.reap_all()
    assert len(list(worker_parts.list("live/"))) == 2
    upkeep.reap(str(RUN), "marker")
    assert list(worker_parts.list("live/")) == []


def test_the_whole_store_once_a_day(
    stream: Stream, worker_parts: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Asked for every hour, it is looked through once a day, past what cannot be read; what failed is not done."""
    dead = Stream("unix:///nowhere/redis.sock", timeout_s=1.0, max_pending=1)
    other, third = RunKey("c", 8), RunKey("c", 9)
    replaced(stream, worker_parts)
    replaced(stream, worker_parts, other)
    worker_parts.put(keys.manifest_key(RUN, 9), b"rubbish")
    monkeypatch.setitem(app.__dict__, "stream", dead)
    upkeep.reap_all()
    monkeypatch.setitem(app.__dict__, "stream", stream)

    class Away(MemoryStore):
        """A store that does not answer."""

        def children(self, prefix: str) -> Iterator[str]:
            raise UnavailableError("away", where=prefix)

    monkeypatch.setitem(app.__dict__, "store", Away())
    upkeep.reap_all()
    monkeypatch.setitem(app.__dict__, "store", worker_parts)
    upkeep.reap_all()
    assert list(worker_parts.list(keys.live_prefix(other))) == []
    assert len(list(worker_parts.list(keys.live_prefix(RUN)))) == 2
    assert "not a manifest" in caplog.text
    replaced(stream, worker_parts, third)
    upkeep.reap_all()
    assert len(list(worker_parts.list(keys.live_prefix(third)))) == 2
    dead.close()


def test_a_sweep_that_fails_frees_its_lock(
    stream: Stream, worker_parts: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next sweep, of whatever worker, need not wait for it."""
    dead = Stream("unix:///nowhere/redis.sock", timeout_s=1.0, max_pending=1)
    monkeypatch.setitem(app.__dict__, "sweeper", Sweeper(dead, app.settings))
    upkeep.sweep()
    assert stream.lock("sweep", "another", 1.0)
    assert not app.back_off.over
    assert list(worker_parts.list("")) == []
    dead.close()


def test_queued_once(stream: Stream, start_redis: Any) -> None:
    """While a lane's task is queued or underway no second one is sent; success frees it, failure waits."""
    server = start_redis()
    path = server.url.removeprefix("unix://").partition("?")[0]
    own = Celery(broker=f"redis+socket://{path}?virtual_host=1", set_as_current=False)

    @own.task(name="some")
    def task(subject: str, marker: str) -> None:
        """Never runs here: there is no worker."""

    settings = Settings(home=Path("/nowhere"))
    assert attempts.enqueue(task, stream, "lane", 30.0)
    assert not attempts.enqueue(task, stream, "lane", 30.0)
    assert attempts.enqueue(task, stream, "other", 30.0)
    with redis.Redis(unix_socket_path=path, db=1, protocol=2) as client:
        messages = [msgspec.json.decode(message) for message in client.lrange("celery", 0, -1)]
    assert len(messages) == 2
    assert messages[0]["content-type"] == "application/json"

    def fail(_: object) -> None:
        raise UnavailableError("down")

    hint = attempts.Hint("some", "fresh", "m")
    attempts.underway(hint, stream, settings, fail)
    assert not attempts.enqueue(task, stream, "fresh", 30.0)
    attempts.underway(hint, stream, settings, lambda at: at("step"))
    assert attempts.enqueue(task, stream, "fresh", 30.0)
    own.close()


def test_places_are_given_back(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    """Attempts that end, well or not, do not count; errors for people are one line without a traceback."""
    settings = Settings(home=Path("/nowhere"))
    ran = []

    def fail(_: object) -> None:
        ran.append(1)
        raise TrainarchiveError("broken", where="here", hint="mend it")

    for _ in range(8):
        attempts.underway(attempts.Hint("t", "s", "m"), stream, settings, fail)
    assert len(ran) == 8
    assert {record.getMessage() for record in caplog.records} == {"t s: here: broken (mend it)"}
    assert not any(record.exc_info for record in caplog.records)
    with pytest.raises(ZeroDivisionError):
        attempts.underway(attempts.Hint("t", "s", "m"), stream, settings, lambda _: 1 // 0)


def test_killed_attempts_count(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    """Places that killed processes left taken are counted, for this lane alone; at the limit it is refused."""
    settings = Settings(home=Path("/nowhere"), worker=settings_module.Worker(max_attempts=3))
    ran: list[str] = []
    for number in range(1, 4):
        attempts.underway(attempts.Hint("t", "s", "m"), stream, settings, lambda _: ran.append("s"))
        stream.lock(f"attempt/t/s/{number}", "a killed process", 60.0)
    attempts.underway(attempts.Hint("t", "s", "m"), stream, settings, lambda _: ran.append("too often"))
    attempts.underway(attempts.Hint("t", "other", "m"), stream, settings, lambda _: ran.append("other"))
    assert ran == ["s", "s", "s", "other"]
    assert "given up" in caplog.text


def test_back_off() -> None:
    """A failing service is left alone, longer each time, and at once no more when it works."""
    back_off = attempts.BackOff()
    seen = [back_off.over]
    back_off.failed()
    seen.append(back_off.over)
    for _ in range(10):
        back_off.failed()
    assert back_off._wait_s == attempts.BACK_OFF_MAX_S
    back_off.worked()
    seen.append(back_off.over)
    assert seen == [True, False, True]


def test_log_lines() -> None:
    """Whatever is logged is one line, and the traceback comes only when debugging."""
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "bad\nthing %s", ("a\nb",), None)
    assert "\n" not in logs.OneLine(tracebacks=False).format(record)
    try:
        _ = 1 // 0
    except ZeroDivisionError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "it failed", (), sys.exc_info())
    line = logs.OneLine(tracebacks=False).format(record)
    assert line.endswith("it failed: ZeroDivisionError: integer division or modulo by zero")
    assert "Traceback" in logs.OneLine(tracebacks=True).format(record)
