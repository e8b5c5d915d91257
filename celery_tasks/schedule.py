"""Which task goes into which queue, and when beat sends what."""

from typing import Any

from trainarchive.settings import Settings

SWEEP = "celery_tasks.sweep"
SEAL = "celery_tasks.seal"
FINISH = "celery_tasks.finish"
REAP = "celery_tasks.reap"
REAP_ALL = "celery_tasks.reap_all"

ROUTES = {
    SWEEP: {"queue": "seal"},
    SEAL: {"queue": "seal"},
    FINISH: {"queue": "finish"},
    REAP: {"queue": "bulk"},
    REAP_ALL: {"queue": "bulk"},
}

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
MIN_EXPIRY_S = 60.0
"""Messages that waited longer are thrown away; not shorter, since hosts' clocks may differ."""


def entries(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return beat's schedule. Two beats do no harm: each task takes a lock."""
    every = settings.worker.sweep_every_s
    return {
        "sweep": {"task": SWEEP, "schedule": every, "options": {"expires": max(MIN_EXPIRY_S, 5 * every)}},
        # Beat forgets when it sent what: one that is started anew each day must come to this too. Once a day is done.
        "reap-all": {"task": REAP_ALL, "schedule": HOUR_S, "options": {"expires": HOUR_S}},
    }
