"""Deleting what a manifest has replaced, an hour later: until then readers may still be at it."""

import random
import time

import msgspec

from trainarchive import keys, manifest
from trainarchive.manifest import Manifest
from trainarchive.run import RunKey
from trainarchive.sealing import Hook, no_hook
from trainarchive.store.contract import Store

FORGOTTEN_S = 86_400.0
"""Segments that no manifest lists are taken for forgotten, not for a running job's, after a day without another."""


class Reaped(msgspec.Struct, frozen=True):
    """``deleted``: keys that are gone now. ``forgotten``: there are segments that no manifest tells of."""

    deleted: tuple[str, ...] = ()
    forgotten: bool = False


def reap(store: Store, run: RunKey, older_than_s: float, *, now: float | None = None, at: Hook = no_hook) -> Reaped:
    """Delete what the newest manifests of all generations of ``run`` replaced that long ago.

    Parts that no manifest lists, left by a worker that was killed before it wrote one, go too: so
    call it only where nobody finishes the run meanwhile (``lease.alone``). Safe to call at any
    time and twice. ``now``: Unix s; ``at`` is called before each deletion.
    """
    moment = time.time() if now is None else now
    level0 = {info.key: info.modified for info in store.list(keys.live_prefix(run))}
    told: set[str] = set()
    gone: list[str] = []
    for each in manifest.generations(store, run):
        newest = manifest.newest(store, each)
        if newest is not None:
            told.update(part.key for part in newest.parts)
            told.update(newest.replaces)
            gone += _deletable(store, newest, set(level0), moment - older_than_s)
    for key in gone:
        at("delete")
        store.delete(key)
    untold = [modified for key, modified in level0.items() if key not in told]
    return Reaped(tuple(gone), bool(untold) and max(untold) < moment - FORGOTTEN_S)


def candidates(store: Store) -> list[RunKey]:
    """Return every run that has level-0 segments, in no order: what one look does not reach, another will."""
    runs = [
        run
        for cluster in store.children(keys.LIVE)
        for run in manifest.parsed_runs(
            cluster.rstrip("/"), store.children(keys.live_cluster_prefix(cluster.rstrip("/")))
        )
    ]
    random.shuffle(runs)
    return runs


def _deletable(store: Store, newest: Manifest, level0: set[str], before: float) -> list[str]:
    listed = {part.key for part in newest.parts}
    parts = {info.key: info.modified for info in store.list(keys.parts_prefix(newest.run))}
    replaced = (set(newest.replaces) - listed) & (level0 | parts.keys()) if newest.written <= before else set()
    stray = {key for key, modified in parts.items() if key not in listed | replaced and modified <= before}
    # A replaced part stays as long as what replaced it is young, whatever its own age.
    stray -= set(newest.replaces)
    return sorted(replaced | stray)
