"""Sealing one lane."""

from celery_tasks.app import app
from celery_tasks.attempts import Hint, underway
from celery_tasks.schedule import SEAL
from trainarchive import sealing
from trainarchive.run import Lane


@app.task(name=SEAL)
def seal(lane: str, marker: str) -> None:
    """Seal what waits in the lane of that name."""
    underway(
        Hint(SEAL, lane, marker), app.stream, app.settings,
        lambda at: sealing.catch_up(app.stream, app.store, Lane.parse(lane), app.settings.seal, at=at),
    )  # fmt: skip
