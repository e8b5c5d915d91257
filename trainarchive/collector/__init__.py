"""The collector: one daemon a node that finds every file a run writes and streams it off the node.

::

    watching ─► lanes (notices) ─► keeper (one lane: discovery, files, end)
                                     └► followed (one file) ─► flow (one generation: queue, spool)
    daemon (the loop) ─► sending (what goes up, what answers mean) ─► uplink (one exchange at a time)
"""

from trainarchive.collector.daemon import Collector

__all__ = ["Collector"]
