"""What fetch, ls and show begin with: the archive that the settings name, and the options that name a job."""

import functools
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import click
import msgspec

from trainarchive import embedded
from trainarchive import settings as settings_module
from trainarchive.errors import NotFoundError, UnavailableError
from trainarchive.reading import Listing, RunView, Wanted, find, recent
from trainarchive.settings import Settings
from trainarchive.store import absent, open_store
from trainarchive.store.contract import Store
from trainarchive.stream import Stream

MIB = 1024 * 1024


class Archive(msgspec.Struct, frozen=True):
    """Settings, the store, and the log Redis, which is None where there is none: no worker keeps one in this home."""

    settings: Settings
    store: Store
    stream: Stream | None

    def find(self, job: "Job") -> list[RunView]:
        """Return a job's runs as ``reading.find`` does, this cluster's where several have such a job."""
        wanted = msgspec.structs.replace(job.wanted, home=self.settings.cluster)
        try:
            return find(self.store, self.stream, job.name, wanted)
        except NotFoundError:
            self.check()
            raise

    def recent(self, cluster: str, limit: int) -> Listing:
        """Return the runs there are as ``reading.recent`` does; raise NotFoundError where no archive is."""
        try:
            listing = recent(self.store, self.stream, cluster=cluster, limit=limit)
        except NotFoundError:
            self.check()
            raise
        if not listing.runs:
            self.check()
        return listing

    def check(self) -> None:
        """Raise NotFoundError where the store is a directory that is not there."""
        place = absent(self.settings)
        if place is not None:
            hint = "is --home, TRAINARCHIVE_HOME or [store] url right?"
            raise NotFoundError("no archive here yet", where=str(place), hint=hint)


class Job(msgspec.Struct, frozen=True):
    """A job as the command line names it."""

    name: str
    wanted: Wanted


@contextmanager
def open_archive(obj: object) -> Iterator[Archive]:
    """Give what settings and the options before the verb (``obj``) name; nothing is asked of anything yet."""
    settings = settings_module.load(os.environ, home=getattr(obj, "home", None), config=getattr(obj, "config", None))
    store = open_store(settings)
    url = _log_url(settings)
    if url is None:
        yield Archive(settings, store, None)
        return
    stream = Stream(url, timeout_s=settings.log.timeout_s, max_pending=settings.log.max_pending_mib * MIB)
    try:
        yield Archive(settings, store, stream)
    finally:
        stream.close()


def _log_url(settings: Settings) -> str | None:
    """Return the log Redis' URL: the one that is configured, or that of the home, if there is one just now."""
    if settings.log.url:
        return settings.log.url
    try:
        url, _ = embedded.urls(settings.home)
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(unquote(urlsplit(url).path))
    except (UnavailableError, OSError):
        return None
    return url


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument and the options that say which runs of which job are meant: ``job``, a ``Job``."""

    @functools.wraps(command)
    def with_job(*args: Any, name: str, cluster: str, attempt: int | None, all_attempts: bool, **others: Any) -> Any:
        if attempt is not None and all_attempts:
            both = "--attempt and --all-attempts exclude each other"
            raise click.UsageError(both, click.get_current_context())
        job = Job(name, Wanted(cluster=cluster, attempt=attempt, all_attempts=all_attempts))
        return command(*args, job=job, **others)

    decorated: Callable[..., Any] = with_job
    for option in (
        click.option("--all-attempts", is_flag=True, help="Every attempt of the job, not only the newest."),
        click.option("--attempt", type=click.IntRange(0), metavar="N", help="This attempt (Slurm's restart count)."),
        click.option("--cluster", default="", metavar="NAME", help="Look in this cluster only."),
        click.argument("name", metavar="JOBID"),
    ):
        decorated = option(decorated)
    return decorated
