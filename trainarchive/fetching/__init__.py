"""Fetching: a run's files, written below a directory of the user's as they were on their nodes.

======== ==============================================================
choosing which files of the run are wanted
wording  how numbers and names are told
naming   which file of the run gets which name
folder   writing below a directory, and never outside it
copying  the files themselves, checked, with what is missing told
books    what goes beside them: manifest.json, GAPS.txt
======== ==============================================================
"""

from trainarchive.fetching.books import MissingBytes
from trainarchive.fetching.choosing import Selection, select
from trainarchive.fetching.copying import Advance, Copied, FetchedFile, fetch
from trainarchive.fetching.folder import Folder

__all__ = ["Advance", "Copied", "FetchedFile", "Folder", "MissingBytes", "Selection", "fetch", "select"]
