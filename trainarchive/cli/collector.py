"""``trainarchive collector``: a node's daemon. Imports nothing heavy: it runs on every compute node."""

import logging
import os
import resource
import signal
import sys
from types import FrameType

import click

from trainarchive import embedded
from trainarchive import settings as settings_module
from trainarchive.cli import Globals
from trainarchive.collector import Collector
from trainarchive.errors import SettingsError
from trainarchive.stream import Stream

MIB = 1024 * 1024


@click.command("collector")
@click.pass_obj
def command(where: Globals) -> None:
    """Follow every run's output on this node and stream it off the node.

    Runs until SIGTERM or SIGINT. Nothing is lost by a stop, graceful or not: a later start goes
    on where this one was. Several can run on one machine, each with its own [node] spool and
    state.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    settings = settings_module.load(os.environ, home=where.home, config=where.config)
    url, _ = embedded.resolve_urls(settings)
    stream = Stream(url, timeout_s=settings.log.timeout_s, max_pending=settings.log.max_pending_mib * MIB)
    try:
        collector = Collector(settings, stream)
    except OSError as error:
        hint = "choose another with --home or TRAINARCHIVE_HOME, or with [node] spool and state"
        raise SettingsError(str(error.strerror), where=str(error.filename), hint=hint) from error

    def stop(_signal: int, _frame: FrameType | None) -> None:
        collector.stop()

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one open file a source, and a node may have thousands
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    collector.run()
