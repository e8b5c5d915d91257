"""``trainarchive worker``: the embedded Redis where none is configured, and Celery with its schedule."""

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from types import FrameType

import click

from trainarchive import settings as settings_module
from trainarchive.embedded import Embedded
from trainarchive.errors import TrainarchiveError, UnavailableError
from trainarchive.settings import Settings

LEVELS = ("debug", "info", "warning", "error")
LOOK_EVERY_S = 1.0
WARM_S = 10.0
"""After SIGTERM running tasks may end for so long."""
COLD_S = 8.0
"""After SIGQUIT Celery puts running tasks back; whatever still lives then is killed."""
RESTART_MAX_S = 30.0
READY_FD = "TA_WORKER_READY_FD"

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
    arguments = ["worker", f"--concurrency={concurrency or settings.worker.concurrency}", f"--loglevel={log_level}"]
    arguments += ["--without-gossip", "--without-mingle", "--without-heartbeat", f"--hostname=trainarchive-{os.getpid()}@%h"]
    arguments += [f"--queues={','.join(queues)}"] if queues else []
    arguments += ["--beat"] if beat else []
    with _embedded(settings) as redis:
        _Supervisor(arguments, settings_module.environment(settings), redis).run()


@contextlib.contextmanager
def _embedded(settings: Settings) -> Iterator[Embedded | None]:
    """Run the embedded Redis for the log or the broker that has no URL."""
    if settings.log.url and settings.broker.url:
        yield None
        return
    with Embedded(settings.home) as redis:
        yield redis


class _Supervisor:
    """One Celery as a child process, kept alive; and the embedded Redis, kept alive too."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str], redis: Embedded | None) -> None:
        self._arguments = arguments
        self._environment = environment
        self._redis = redis
        self._stopping = False

    def run(self) -> None:
        """Return when told to stop and all is ended; raise UnavailableError where Celery cannot even start."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        wait_s = 1.0
        was_ready = False
        while not self._stopping:
            began = time.monotonic()
            with _Child(self._arguments, self._environment) as child:
                while not self._stopping and child.alive():
                    if not was_ready and child.is_ready(LOOK_EVERY_S / 4):
                        was_ready = True
                        click.echo("trainarchive worker is ready")
                        sys.stdout.flush()
                    self._look_after_redis()
                    self._pause(LOOK_EVERY_S if was_ready else 0.0)
            if self._stopping:
                return
            if not was_ready:
                raise UnavailableError("Celery ended before it was ready", hint="its own words are above")
            wait_s = 1.0 if time.monotonic() - began > RESTART_MAX_S else min(2 * wait_s, RESTART_MAX_S)
            _log.error("Celery ended by itself (status %s); started again in %.0f s", child.status, wait_s)
            self._pause(wait_s)
