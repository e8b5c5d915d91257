"""trainarchive: every rank's output of every Slurm training job, off the node and findable.

The modules, in import order (a module imports only from its own row and the rows above):

=============================================  ========================================================
errors urls settings run frame places          the words: what travels between the parts
notice private processes sources opening tail  a compute node's parts
spool holder
stream embedded                                the door: the log Redis lives here only
collector                                      the daemon of a compute node
keys segment store                             the shelf: object names, segments, object stores
hosts states manifest coverage shelf contents  the books: what workers do with a run
generations nodes sealing lease finishing
sweeping reaping
reading fetching                               the reader: live and archived, one path
cli demo                                       faces
=============================================  ========================================================
"""

__version__ = "0.1.0"
