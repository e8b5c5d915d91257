"""What Celery runs: ids in, one call into ``trainarchive``. Safe to run twice, at once, or never: the sweep finds it.

``celery -A celery_tasks worker -B`` starts a worker with its schedule, ``trainarchive worker``
the same with the embedded Redis and a bounded end.
"""

from celery_tasks.app import app as celery

__all__ = ["celery"]
