"""The reader: from a job's name to its bytes, on one path for running and archived runs.

=========== ==============================================================
reference   how people name jobs
objects     segments: indexes and ranged reads, in a fixed memory
pieces      pieces of one file, from anywhere, as one run of bytes
live        what is in the log Redis and in level-0 segments
ledger      the books of a run that has none yet
view        one run: its table of contents and its bytes
select      from a name to runs
recent      the runs there are
unseen      what may be missing that nobody archived
=========== ==============================================================
"""

from trainarchive.reading.pieces import DAMAGED
from trainarchive.reading.recent import Listing, Summary, recent
from trainarchive.reading.reference import BadReferenceError
from trainarchive.reading.select import Wanted, find
from trainarchive.reading.unseen import Unseen, passed_over, unseen
from trainarchive.reading.view import RunView

__all__ = [
    "DAMAGED",
    "BadReferenceError",
    "Listing",
    "RunView",
    "Summary",
    "Unseen",
    "Wanted",
    "find",
    "passed_over",
    "recent",
    "unseen",
]
