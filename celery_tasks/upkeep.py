"""The sweep, which finds all other work, and deleting what manifests have replaced."""

import secrets

from kombu.exceptions import OperationalError

from celery_tasks.app import app
from celery_tasks.attempts import enqueue, told
from celery_tasks.finish import finish
from celery_tasks.schedule import REAP, REAP_ALL, SWEEP
from celery_tasks.seal import seal
from trainarchive import reaping
from trainarchive.errors import UnavailableError
from trainarchive.run import RunKey

LOCK_S = 30.0
SHARE = 0.8
"""``reap_all`` stops at this share of the task limit."""


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
                _send_all()
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
        found = reaping.reap(app.store, RunKey.parse(run), app.settings.finish.keep_level0_s)
        if found.forgotten:
            enqueue(finish, app.stream, run, app.settings.seal.lease_s)


@app.task(name=REAP_ALL)
def reap_all() -> None:
    """Look through the whole store for what ``reap`` was never told of."""
    token = secrets.token_hex(8)
    limit = app.settings.worker.task_limit_s
    with told(REAP_ALL):
        if app.stream.lock("reap-all", token, limit):
            for run in reaping.reap_all(app.store, app.settings.finish.keep_level0_s, seconds=SHARE * limit):
                enqueue(finish, app.stream, str(run), app.settings.seal.lease_s)
