"""Finishing one run."""

from celery_tasks.app import app
from celery_tasks.attempts import Hint, underway
from celery_tasks.schedule import FINISH
from trainarchive import finishing
from trainarchive.run import RunKey


@app.task(name=FINISH)
def finish(run: str, marker: str) -> None:
    """Write the manifests that are due of the run of that key."""
    underway(
        Hint(FINISH, run, marker), app.stream, app.settings,
        lambda at: finishing.finish(app.stream, app.store, RunKey.parse(run), app.settings, at=at),
    )  # fmt: skip
