"""The books: what a run wrote, where its bytes are, and what is missing. Immutable and numbered.

Manifest ``n`` is an object written by put-if-absent; the highest number is the truth. A reader
needs it and the parts that it lists, nothing else.
"""

from collections.abc import Iterable, Iterator

import msgspec
import zstandard

from trainarchive import keys
from trainarchive.errors import DamagedError, TrainarchiveError
from trainarchive.run import Gap, LaneReport, RunKey, Source
from trainarchive.store.contract import Store

VERSION = 1
MAX_TEXT = 1024 * 1024 * 1024
"""Most bytes of JSON in one manifest: a bound for what a damaged object may make a reader allocate."""


class Generation(msgspec.Struct, frozen=True, omit_defaults=True):
    """One generation of a source: bytes 0 to ``size``, less the gaps.

    ``blake3`` is the hex digest of the text, of all bytes that are there in order (gaps leave
    nothing). Times: when the node read the first and last of it, ns since 1970, node's clock.
    """

    number: int
    size: int
    blake3: str
    first_ns: int = 0
    last_ns: int = 0
    gaps: tuple[Gap, ...] = ()


class SourceEntry(msgspec.Struct, frozen=True):
    """A source and its generations, oldest first."""

    source: Source
    generations: tuple[Generation, ...]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Bytes ``start`` to ``end`` of a source's generation are in a part."""

    source: str
    generation: int
    start: int
    end: int


class Part(msgspec.Struct, frozen=True):
    """An object that holds text of the run. ``size`` in bytes of the object, ``blake3`` of its body (hex)."""

    key: str
    level: int
    size: int
    blake3: str
    spans: tuple[Span, ...]


class NodeEntry(msgspec.Struct, frozen=True):
    """A node of the run: ``state`` is drained, open (the node was not done) or missing (never heard of)."""

    node: str
    state: str
    tokens: tuple[str, ...] = ()
    report: LaneReport | None = None


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A run's table of contents.

    ``complete``: every node of the run was drained. ``state`` is Slurm's word where it is known,
    and ``state_from`` says from whom. ``replaces`` lists level-0 keys that the parts here stand
    in for, to be deleted later. Times: Unix seconds.
    """

    version: int = 1
    number: int
    run: RunKey
    written: float
    complete: bool
    state: str
    state_from: str
    exit_code: str = ""
    derived_exit_code: str = ""
    started: float = 0.0
    ended: float = 0.0
    aliases: tuple[str, ...] = ()
    nodes: tuple[NodeEntry, ...]
    sources: tuple[SourceEntry, ...]
    parts: tuple[Part, ...]
    replaces: tuple[str, ...] = ()


def encode(manifest: Manifest) -> bytes:
    """Return the object's body: zstd-compressed JSON. The same manifest gives the same bytes."""
    text = msgspec.json.encode(manifest, order="deterministic")
    return zstandard.ZstdCompressor(level=9, write_checksum=True, write_content_size=True).compress(text)


def decode(body: bytes, where: str) -> Manifest:
    """Read a body back; ``where`` names it in the DamagedError for one that cannot be read."""
    try:
        claimed = zstandard.frame_content_size(body)
        if not 0 <= claimed <= MAX_TEXT:
            raise DamagedError(f"not a manifest: it claims {claimed} bytes", where=where)
        text = zstandard.ZstdDecompressor().decompress(body)
        version = msgspec.json.decode(text, type=_Versioned).version
        if version != VERSION:
            raise DamagedError(f"format version {version}", where=where, hint="update trainarchive")
        return msgspec.json.decode(text, type=Manifest)
    except (zstandard.ZstdError, msgspec.DecodeError, TrainarchiveError, MemoryError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(f"not a manifest: {error}", where=where) from error


def newest(store: Store, run: RunKey) -> Manifest | None:
    """Return the manifest with the highest number of this generation, None where there is none."""
    last = ""
    for info in store.list(keys.manifest_prefix(run)):
        last = max(last, info.key)
    return decode(store.get(last), last) if last else None


def generations(store: Store, run: RunKey) -> list[RunKey]:
    """Return the generations of ``run``'s cluster, job and attempt that the store knows, oldest first."""
    same = (run.cluster, run.job_id, run.attempt)
    listed = runs(store, run.cluster, run.job_id)
    return [each for each in listed if (each.cluster, each.job_id, each.attempt) == same]


def clusters(store: Store) -> list[str]:
    """Return the names of all clusters that have runs in the store."""
    return [child.rstrip("/") for child in store.children(keys.RUNS)]


def runs(store: Store, cluster: str, job_id: int | None = None) -> Iterator[RunKey]:
    """Yield the cluster's runs, or one job's, in the order of RunKey; objects with other names are passed over.

    The cost follows the runs, not their objects.
    """
    if job_id is None:
        children = store.children(keys.cluster_prefix(cluster))
    else:
        children = (f"{job_id}.{child}" for child in store.children(keys.job_prefix(cluster, job_id)))
    yield from sorted(parsed_runs(cluster, children))


def aliased(store: Store, cluster: str, alias: str) -> list[RunKey]:
    """Return the runs that ``111_2`` or ``200+1`` leads to, in the order of RunKey."""
    prefix = keys.alias_prefix(cluster, alias)
    found = (_parsed(f"{cluster}/{info.key.removeprefix(prefix)}") for info in store.list(prefix))
    return sorted(run for run in found if run is not None)


def parsed_runs(cluster: str, children: Iterable[str]) -> Iterator[RunKey]:
    """Yield the run keys among ``<job>.<attempt>[~generation]/`` names; others are passed over."""
    for child in children:
        run = _parsed(f"{cluster}/{child[:-1]}") if child.endswith("/") else None
        if run is not None:
            yield run


class _Versioned(msgspec.Struct):
    version: int = VERSION


def _parsed(text: str) -> RunKey | None:
    try:
        return RunKey.parse(text)
    except TrainarchiveError:
        return None
