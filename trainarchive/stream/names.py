"""Names in the log Redis: a lane's keys, and the fields of its ``offsets``. Built and taken apart only here."""

import re
from collections.abc import Mapping
from typing import Self

import msgspec

from trainarchive.errors import DamagedError, TrainarchiveError
from trainarchive.frame import MAX_OFFSET
from trainarchive.run import Lane

EVERY_LANE = "ta:{*}:*:meta"
"""What SCAN is asked for; ``lane_of`` then reads each name strictly."""

_META = re.compile(r"ta:\{(?P<run>[^{}:]+)/(?P<token>[^/{}:]+)\}:(?P<node>[^{}:]+):meta")
_SEALED = ":s"


class LaneKeys(msgspec.Struct, frozen=True):
    """The six keys of one lane, all in one Cluster slot."""

    meta: str
    frames: str
    offsets: str
    sources: str
    claim: str
    ctl: str

    @classmethod
    def of(cls, lane: Lane) -> Self:
        """Name them; the lane's own check keeps braces and colons out."""
        prefix = f"ta:{{{lane.run}/{lane.token}}}:{lane.node}:"
        return cls(*(prefix + name for name in cls.__struct_fields__))


def lane_of(key: bytes) -> Lane | None:
    """Return the lane of a ``meta`` key, None for a key that no lane can have."""
    try:
        found = _META.fullmatch(key.decode("ascii"))
        if found is None:
            return None
        lane = Lane.parse(f"{found['run']}/{found['token']}/{found['node']}")
    except (UnicodeDecodeError, TrainarchiveError):
        return None
    return lane if LaneKeys.of(lane).meta.encode() == key else None


def lock_key(name: str) -> str:
    """Name the key of a lock between workers."""
    return f"ta:lock:{name}"


def offset_field(source: str, generation: int) -> str:
    """Name the field of a committed offset; the sealed one's has ``:s`` after it."""
    return f"{source}:{generation}"


def read_offset(value: bytes) -> int:
    """Return an offset that a script wrote; raise ValueError for what none writes."""
    offset = int(value)
    if not 0 <= offset <= MAX_OFFSET:
        raise ValueError(f"{offset} is no offset")
    return offset


def read_offsets(
    pairs: Mapping[bytes, bytes], where: str
) -> tuple[dict[tuple[str, int], int], dict[tuple[str, int], int]]:
    """Return committed and sealed offsets by (source, generation); raise DamagedError for other fields."""
    committed: dict[tuple[str, int], int] = {}
    sealed: dict[tuple[str, int], int] = {}
    try:
        for field, value in pairs.items():
            name = field.decode()
            target = sealed if name.endswith(_SEALED) else committed
            source, _, generation = name.removesuffix(_SEALED).rpartition(":")
            target[source, int(generation)] = read_offset(value)
    except ValueError as error:
        raise DamagedError(f"its offsets cannot be read: {error}", where=where) from error
    return committed, sealed
