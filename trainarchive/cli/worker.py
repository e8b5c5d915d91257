"""``trainarchive worker``: the embedded Redis where none is configured, and Celery with its schedule."""

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

import click

from trainarchive import settings as settings_module
from trainarchive.embedded import Embedded
from trainarchive.errors import TrainarchiveError, UnavailableError
from trainarchive.settings import Settings
from trainarchive.store import open_store

LEVELS = ("debug", "info", "warning", "error")
LOOK_EVERY_S = 1.0
WARM_S = 10.0
"""After SIGTERM running tasks may end for so long."""
COLD_S = 8.0
"""After SIGQUIT Celery puts running tasks back for so long; whatever still lives then is killed."""
RESTART_MAX_S = 30.0
READY_FD = "TA_WORKER_READY_FD"
PARENT = "TA_WORKER_PARENT"
"""Celery's side of it is in ``celery_tasks.processes``."""

_log = logging.getLogger(__name__)


@click.command("worker")
@click.option("--concurrency", type=click.IntRange(1, 1024), help="Worker processes; default: worker.concurrency.")
@click.option(
    "--queue", "queues", multiple=True, type=click.Choice(["seal", "finish", "bulk"]), help="Only these; default: all."
)
@click.option("--beat/--no-beat", default=True, show_default=True, help="Send the regular tasks; two do no harm.")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True)
@click.pass_obj
def command(obj: object, concurrency: int | None, queues: tuple[str, ...], beat: bool, log_level: str) -> None:
    """Seal what nodes send, and finish the runs that ended.

    Runs until SIGTERM or SIGINT; ends within about 20 s, with exit status 0, whatever the
    services do. Killed at any point it loses nothing: the next worker finds what was to be done.
    """
    logging.basicConfig(stream=sys.stderr, level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    home, config = getattr(obj, "home", None), getattr(obj, "config", None)
    settings = settings_module.load(os.environ, home=home, config=config)
    open_store(settings)  # an unusable URL is told now, not by every task
    stopped = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopped.set()

    # Before anything is started, so that no moment is left in which a signal would leave it behind.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    commands = _commands(concurrency or settings.worker.concurrency, queues, log_level, beat=beat)
    with _embedded(settings) as redis:
        _supervise([_Celery(each, _environment(settings, config)) for each in commands], redis, stopped)


def _commands(concurrency: int, queues: tuple[str, ...], log_level: str, *, beat: bool) -> list[list[str]]:
    """Return the arguments of each Celery that is started.

    Where all queues are served, half of the processes only seal: finishing runs may take many
    minutes, and what nodes send has to go on. (Celery cannot keep processes for a queue.)
    """
    shares = {"finish,bulk": max(1, concurrency // 2), "seal": max(1, concurrency - concurrency // 2)}
    if queues:
        shares = {",".join(queues): concurrency}
    common = [f"--loglevel={log_level}", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    found = [
        [
            *("--quiet", "worker", f"--queues={served}", f"--concurrency={share}"),
            f"--hostname=trainarchive-{os.getpid()}-{served.replace(',', '-')}@%h",
            *common,
        ]
        for served, share in shares.items()
    ]
    if beat:
        found[-1].append("--beat")
    return found


def _environment(settings: Settings, config: Path | None) -> dict[str, str]:
    """Return what makes Celery's processes load the same settings."""
    told = {"TRAINARCHIVE_HOME": str(settings.home)}
    if config is not None:
        told["TRAINARCHIVE_CONFIG"] = str(config.absolute())
    return {**os.environ, **told}


@contextlib.contextmanager
def _embedded(settings: Settings) -> Iterator[Embedded | None]:
    """Run the embedded Redis for the log or the broker that has no URL."""
    if settings.log.url and settings.broker.url:
        yield None
        return
    with Embedded(settings.home) as redis:
        yield redis


def _supervise(celeries: list["_Celery"], redis: Embedded | None, stopped: threading.Event) -> None:
    """Keep all Celeries and the embedded Redis alive until told to stop.

    Raise UnavailableError where one ends before it was ready even once: then its settings or
    its installation are broken, and trying again would only hide it.
    """
    ready = False
    try:
        while not stopped.is_set():
            for each in celeries:
                each.look_after()
            if not ready and all(each.ready for each in celeries):
                ready = True
                click.echo("trainarchive worker is ready")
            _look_after(redis)
            stopped.wait(LOOK_EVERY_S if ready else LOOK_EVERY_S / 20)
    finally:
        _end([each.child for each in celeries if each.child is not None])


def _look_after(redis: Embedded | None) -> None:
    if redis is None or redis.alive():
        return
    _log.error("the embedded Redis ended; it is started again")
    try:
        redis.restart()
    except TrainarchiveError as error:
        _log.error("%s", error)


class _Celery:
    """One Celery that is kept alive: started again, ever more slowly, when it ends by itself."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str]) -> None:
        self.child: _Child | None = None
        self.ready = False
        self._arguments = arguments
        self._environment = environment
        self._began = self._start_at = 0.0
        self._wait_s = 1.0

    def look_after(self) -> None:
        """Start it where it does not run; raise UnavailableError where it ended without ever being ready."""
        now = time.monotonic()
        if self.child is None:
            if now >= self._start_at:
                self._began = now
                self.child = _Child(self._arguments, self._environment)
            return
        self.ready = self.ready or self.child.is_ready()
        if self.child.status is None:
            return
        status, self.child = self.child.kill(), None
        if not self.ready:
            raise UnavailableError(f"Celery ended with status {status} before it was ready", hint="see its words above")
        self._wait_s = 1.0 if now - self._began > RESTART_MAX_S else min(2 * self._wait_s, RESTART_MAX_S)
        self._start_at = now + self._wait_s
        _log.error("Celery ended by itself with status %s; it is started again in %.0f s", status, self._wait_s)


class _Child:
    """Celery as a child process, in a session of its own: Ctrl-C in a terminal is for us, who then end it in order."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str]) -> None:
        self._ready, theirs = os.pipe()
        try:
            # -P: no module is taken from the current directory.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "celery_tasks", *arguments],
                env={**environment, READY_FD: str(theirs), PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=(theirs,),
                start_new_session=True,
            )
        finally:
            os.close(theirs)

    @property
    def status(self) -> int | None:
        """Exit status, None while it runs."""
        return self._process.poll()

    def is_ready(self) -> bool:
        """Say whether it takes tasks."""
        readable, _, _ = select.select([self._ready], [], [], 0)
        return bool(readable) and os.read(self._ready, 1) == b"1"

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        self._process.send_signal(number)

    def wait(self, seconds: float) -> None:
        """Wait for its end, for so long at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))

    def kill(self) -> int:
        """End it and all that belongs to it now, if it has not ended; return its status."""
        # Its pool processes die with it, by the kernel; those of a session that is empty need nothing.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        os.close(self._ready)
        return self._process.wait()


def _end(children: list[_Child]) -> None:
    """End all in bounded time: with a dead broker Celery's own warm shutdown hangs."""
    for number, seconds in ((signal.SIGTERM, WARM_S), (signal.SIGQUIT, COLD_S)):
        until = time.monotonic() + seconds
        for child in children:
            child.signal(number)
        for child in children:
            child.wait(until - time.monotonic())
    for child in children:
        if child.status is None:
            _log.warning("Celery does not end; it is killed, and its work left to the next worker")
        child.kill()
