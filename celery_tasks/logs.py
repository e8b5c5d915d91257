"""Log lines of the worker: to stderr, one line each."""

import logging
import sys

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_CHATTY = ("celery", "kombu", "amqp", "redis", "botocore", "boto3", "urllib3")


class OneLine(logging.Formatter):
    """Puts an error's last words on the message's line; the whole traceback only where debugging is on."""

    def __init__(self, *, tracebacks: bool) -> None:
        super().__init__(FORMAT)
        self._tracebacks = tracebacks

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, whatever the message holds."""
        if self._tracebacks:
            return super().format(record)
        # A copy: other handlers may want the traceback.
        plain = logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None, "stack_info": None})
        plain.msg, plain.args = self._message(record), ()
        return " ".join(super().format(plain).split())

    @staticmethod
    def _message(record: logging.LogRecord) -> str:
        message = record.getMessage().partition("Traceback (most recent call last)")[0]
        error = record.exc_info[1] if record.exc_info else None
        # Celery's own wrapper of an error holds a traceback as its text, and the message the error.
        if error is None or str(error) in message or "Traceback (most recent call last)" in str(error):
            return message
        return f"{message}: {type(error).__name__}: {error}"


def to_stderr(level: int) -> None:
    """Set up this process' logging. Libraries speak from WARNING on, unless ``level`` is DEBUG."""
    debugging = level <= logging.DEBUG
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(tracebacks=debugging))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(level if debugging else max(level, logging.WARNING))
