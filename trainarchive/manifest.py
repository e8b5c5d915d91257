"""The books: what a run wrote, where its bytes are, and what is missing. Immutable and numbered.

Manifest ``n`` is an object written by put-if-absent; the highest number is the truth. A reader
needs it and the parts that it lists, nothing else.
"""

import msgspec

from trainarchive.run import Gap, LaneReport, RunKey, Source


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
