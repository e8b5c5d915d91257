"""A run's objects as they lie in the store: listed, and their tables of contents read."""

import logging
from collections.abc import Iterable, Iterator

import blake3
import msgspec

from trainarchive import keys, segment
from trainarchive.errors import DamagedError, TrainarchiveError
from trainarchive.run import Lane, RunKey
from trainarchive.store.contract import ObjectInfo, Store

_log = logging.getLogger(__name__)


class Shelved(msgspec.Struct, frozen=True):
    """One object. ``lane`` is None for a part, which holds many lanes."""

    key: str
    size: int
    lane: Lane | None = None


def level0(store: Store, run: RunKey) -> list[Shelved]:
    """Return the level-0 segments under a run's key, in the order in which each lane made them.

    Within an epoch keys sort in stream order. Epochs have random names: the one with the oldest
    object comes first.
    """
    found = [(info, lane) for info in store.list(keys.live_prefix(run)) if (lane := _lane_of(info)) is not None]
    begun: dict[tuple[Lane, str], float] = {}
    for info, lane in found:
        epoch = keys.epoch_of(info.key)
        begun[lane, epoch] = min(begun.get((lane, epoch), info.modified), info.modified)
    found.sort(key=lambda pair: (pair[1], begun[pair[1], keys.epoch_of(pair[0].key)], pair[0].key))
    return [Shelved(info.key, info.size, lane) for info, lane in found]


def read_index(store: Store, shelved: Shelved) -> segment.Index:
    """Read a segment's index by ranges from its end; raise DamagedError, NotFoundError."""
    return segment.read_index(read_end(store, shelved.key, shelved.size), shelved.key)


def read_end(store: Store, key: str, size: int = segment.TAIL_GUESS) -> bytes:
    """Return a segment's last bytes with all of its index; a small segment's whole body.

    ``size`` is the object's, where it is known. Raises DamagedError, NotFoundError.
    """
    guess = min(size, segment.TAIL_GUESS)
    tail = store.get_range(key, -guess, guess) if guess else b""
    needed, _ = segment.index_span(tail, key)
    return tail if needed <= len(tail) else store.get_range(key, -needed, needed)


def index_of(body: bytes, key: str) -> segment.Index:
    """Read the index of a segment that is in memory."""
    needed, _ = segment.index_span(body[-segment.FOOTER_SIZE :], key)
    return segment.read_index(body[-needed:], key)


def indexes(store: Store, objects: Iterable[Shelved]) -> Iterator[tuple[int, Shelved, segment.Index | DamagedError]]:
    """Yield each object's number and index, one at a time; a damaged one's error in its place."""
    for number, shelved in enumerate(objects):
        try:
            yield number, shelved, read_index(store, shelved)
        except DamagedError as error:
            _log.error("left out of the manifest: %s", error)
            yield number, shelved, error


def body_of(store: Store, shelved: Shelved) -> tuple[bytes, str]:
    """Return an object's bytes and their BLAKE3 (hex); a body that is not what its key says is logged."""
    body = store.get(shelved.key)
    digest = blake3.blake3(body).hexdigest()
    if not digest.startswith(keys.digest_in(shelved.key)):
        _log.error("%s: its bytes do not have the digest in its key", shelved.key)
    return body, digest


def _lane_of(info: ObjectInfo) -> Lane | None:
    if not info.key.endswith(".seg"):
        return None
    try:
        return keys.lane_of_segment(info.key)
    except TrainarchiveError:
        _log.warning("%s: not a segment's name; left alone", ascii(info.key))
        return None
