"""Beat inside a worker (``-B``), started again when it ended: without it nothing sweeps, and the worker is deaf."""

import logging
from typing import Any

from celery import bootsteps
from celery.worker import components, state

LOOK_EVERY_S = 2.0

_log = logging.getLogger(__name__)


class BeatKeeper(bootsteps.StartStopStep):
    """Celery starts beat as a process of its own and never looks at it again: killed for memory, it stays away."""

    requires = (components.Timer, components.Beat)

    def start(self, worker: Any) -> None:
        """Look from now on."""
        worker.timer.call_repeatedly(LOOK_EVERY_S, self._look, (worker,))

    def stop(self, worker: Any) -> None:
        """Do nothing: the timer ends with the worker."""

    @staticmethod
    def _look(worker: Any) -> None:
        ending: Any = (state.should_stop, state.should_terminate)  # exit codes, of which 0 is one; None while it works
        if any(end is not None for end in ending):
            return  # whoever ends the worker ends beat, too
        for step in worker.steps:
            if isinstance(step, components.Beat) and not step.obj.is_alive():
                _log.error("beat ended by itself; it is started again")
                step.obj = step.create(worker)
                step.obj.start()
