"""The sweep, which finds all other work, and deleting what manifests have replaced."""

import contextlib
import logging
import secrets
import time

from kombu.exceptions import OperationalError

from celery_tasks.app import app
from celery_tasks.attempts import enqueue, told
from celery_tasks.finish import finish
from celery_tasks.schedule import DAY_S, REAP, REAP_ALL, SWEEP
from celery_tasks.seal import seal
from trainarchive import lease, reaping
from trainarchive.errors import TrainarchiveError, UnavailableError
from trainarchive.run import RunKey

LOCK_S = 30.0
SHARE = 0.8
"""``reap_all`` stops at this share of the task limit."""

_log = logging.getLogger(__name__)


# Nothing is lost with one of these: the next comes in a moment. So no late acknowledgement.
@app.task(name=SWEEP, acks_late=False, reject_on_worker_lost=False)
def sweep() -> None:
    """Look at all lanes and send what should be done now. Of two at once, the second does nothing."""
    if not app.back_off.over:
        return
    token = secrets.token_hex(8)
    with told("sweep"):
        try:
            if app.stream.lock("sweep", token, LOCK_S):
                try:
                    _send_all()
                finally:
                    with contextlib.suppress(UnavailableError):
                        app.stream.unlock("sweep", token)
            app.back_off.worked()
        except OperationalError as error:
            app.back_off.failed()
            raise UnavailableError(f"the broker does not answer: {error}") from error
        except UnavailableError:
            app.back_off.failed()
            raise


def _send_all() -> None:
    plan = app.sweeper.plan()
    settings = app.settings
    for lane in plan.seals:
        enqueue(seal, app.stream, lane.name, settings.seal.lease_s)
    for run in plan.finishes:
        enqueue(finish, app.stream, str(run), settings.seal.lease_s)
    for run in plan.reaps:
        # Its mark is left to run out: once an hour is enough.
        enqueue(reap, app.stream, str(run), max(settings.finish.keep_level0_s, 60.0))


@app.task(name=REAP)
def reap(run: str, _marker: str) -> None:
    """Delete what the manifests of that run replaced long enough ago."""
    with told(f"{REAP} {run}"):
        _reap(RunKey.parse(run))


@app.task(name=REAP_ALL)
def reap_all() -> None:
    """Look through the whole store, once a day, for what ``reap`` was never told of."""
    token = secrets.token_hex(8)
    with told(REAP_ALL):
        if not app.stream.lock("reap-all", token, DAY_S):
            return
        try:
            _reap_some(time.monotonic() + SHARE * app.settings.worker.task_limit_s)
        except BaseException:
            # It was not done today.
            app.stream.unlock("reap-all", token)
            raise


def _reap_some(until: float) -> None:
    for run in reaping.candidates(app.store):
        if time.monotonic() >= until:
            return
        try:
            _reap(run)
        except UnavailableError:
            raise
        except TrainarchiveError as error:
            _log.error("%s %s: %s", REAP_ALL, run, error)


def _reap(run: RunKey) -> None:
    """Reap, unless the run is being finished now: then another time does."""
    with lease.alone(app.stream, run, app.settings.seal.lease_s) as keep:
        if keep is None:
            return
        found = reaping.reap(app.store, run, app.settings.finish.keep_level0_s, at=keep)
    if found.forgotten:
        enqueue(finish, app.stream, str(run), app.settings.seal.lease_s)
