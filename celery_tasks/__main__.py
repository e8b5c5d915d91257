"""``python -P -m celery_tasks worker ...``: Celery's command line for this application.

Unlike ``celery -A``, it never looks into the current directory for modules.
"""

import sys
import warnings

from celery.exceptions import SecurityWarning

from celery_tasks import processes
from celery_tasks.app import app

processes.die_with_parent()
# Celery warns about root because of pickle, which is not accepted here. Root is nevertheless not needed.
warnings.simplefilter("ignore", SecurityWarning)
app.worker_main(sys.argv[1:])
