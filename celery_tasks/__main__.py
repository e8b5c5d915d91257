"""``python -P -m celery_tasks worker ...``: Celery's command line for this application.

Unlike ``celery -A``, it never looks into the current directory for modules.
"""

import sys

from celery_tasks import processes
from celery_tasks.app import app

processes.die_with_parent()
app.worker_main(sys.argv[1:])
