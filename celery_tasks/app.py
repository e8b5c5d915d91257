"""The Celery application: its settings, and what its processes share. Nothing connects before it is used."""

import logging
import os
from functools import cached_property
from typing import Any

from celery import Celery
from celery.signals import beat_embedded_init, setup_logging, worker_process_init, worker_ready
from kombu import Exchange, Queue

from celery_tasks import logs, processes, schedule
from celery_tasks.attempts import BackOff
from celery_tasks.beat import BeatKeeper
from trainarchive import embedded
from trainarchive import settings as settings_module
from trainarchive.settings import Settings
from trainarchive.store import open_store
from trainarchive.store.contract import Store
from trainarchive.stream import Stream
from trainarchive.sweeping import Sweeper

MIB = 1024 * 1024
SOFT_SHUTDOWN_S = 5.0
"""After SIGQUIT running tasks get this long; then they are put back into their queues."""

BROKER_TIMEOUT_S = 10.0

QUEUES = ("seal", "finish", "bulk")
"""Apart, so that a long finish or a reindex never delays a seal where each has its own workers (``-Q``)."""


class ArchiveApp(Celery):
    """Celery, with what the tasks need: made at first use, once a process (a pool's child makes its own)."""

    @cached_property
    def settings(self) -> Settings:
        """The settings, read once."""
        return settings_module.load(os.environ)

    @cached_property
    def stream(self) -> Stream:
        """The log Redis."""
        log = self.settings.log
        url, _ = embedded.resolve_urls(self.settings)
        return Stream(url, timeout_s=log.timeout_s, max_pending=log.max_pending_mib * MIB)

    @cached_property
    def store(self) -> Store:
        """The object store."""
        return open_store(self.settings)

    @cached_property
    def sweeper(self) -> Sweeper:
        """What looks for work."""
        return Sweeper(self.stream, self.settings)

    @cached_property
    def back_off(self) -> BackOff:
        """When to sweep again after the log Redis or the broker failed."""
        return BackOff()

    def configuration(self) -> dict[str, Any]:
        """Return Celery's own settings; asked for when the first of them is needed."""
        worker = self.settings.worker
        _, broker = embedded.resolve_urls(self.settings)
        return {
            "broker_url": broker,
            "broker_connection_retry_on_startup": True,
            "broker_connection_max_retries": None,
            "broker_connection_timeout": BROKER_TIMEOUT_S,
            # Redis redelivers what is not acknowledged in this time, also what still runs: so it is longer than
            # any task may take.
            "broker_transport_options": {
                "visibility_timeout": worker.visibility_timeout_s,
                "socket_timeout": BROKER_TIMEOUT_S,
                "socket_connect_timeout": BROKER_TIMEOUT_S,
            },
            "accept_content": ["json"],
            "task_serializer": "json",
            "result_serializer": "json",
            "task_ignore_result": True,
            "task_remote_tracebacks": False,
            # Late acknowledgement alone does not run a task again whose process was killed.
            "task_acks_late": True,
            "task_reject_on_worker_lost": True,
            "task_time_limit": worker.task_limit_s,
            "task_soft_time_limit": max(1, worker.task_limit_s - 15),
            "task_queues": [Queue(name, Exchange(name), routing_key=name) for name in QUEUES],
            "task_default_queue": "bulk",
            "task_create_missing_queues": False,
            "task_routes": schedule.ROUTES,
            "worker_concurrency": worker.concurrency,
            "worker_prefetch_multiplier": 1,
            "worker_soft_shutdown_timeout": SOFT_SHUTDOWN_S,
            "worker_cancel_long_running_tasks_on_connection_loss": True,
            "worker_redirect_stdouts": False,
            "beat_schedule": schedule.entries(self.settings),
            # In memory: a schedule file of another version or time must not decide what runs.
            "beat_scheduler": "celery.beat:Scheduler",
        }


app = ArchiveApp("trainarchive", include=["celery_tasks.seal", "celery_tasks.finish", "celery_tasks.upkeep"])
app.add_defaults(app.configuration)
app.steps["worker"].add(BeatKeeper)


@setup_logging.connect
def _log(loglevel: int = logging.INFO, **_: object) -> None:
    logs.to_stderr(loglevel)


@worker_process_init.connect
@beat_embedded_init.connect
def _end_with_parent(**_: object) -> None:
    processes.die_with_parent()


@worker_ready.connect
def _tell_ready(**_: object) -> None:
    processes.tell_ready()
