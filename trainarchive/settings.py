"""Every setting: typed, frozen, with its default and unit. Read once, at a process's start.

``config/trainarchive.toml`` shows them all with their meaning; a test keeps the two equal.
Units stand in the names: ``_s`` seconds, ``_ms`` milliseconds, ``_mib`` MiB of 2**20 bytes.
"""

from pathlib import Path

import msgspec


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[node]``: where a compute node keeps its things."""

    name: str = ""
    spool: str = ""
    state: str = ""


class Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[log]``: the log Redis, between collectors and workers."""

    url: str = ""
    timeout_s: float = 5.0
    max_pending_mib: int = 64
    stop_at_memory_ratio: float = 0.6
    archived_lane_ttl_s: int = 86_400


class Broker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[broker]``: Celery's Redis. Collectors never touch it."""

    url: str = ""


class Store(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[store]``: where archives go."""

    url: str = ""
    attempts: int = 5
    retry_timeout_s: float = 60.0


class Collector(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[collector]``: how files are followed and sent."""

    poll_min_ms: int = 20
    poll_max_ms: int = 1000
    busy_wait_ms: int = 50
    discovery_s: float = 2.0
    batch_mib: int = 8
    memory_mib: int = 16
    spool_mib: int = 4096
    close_within_s: float = 10.0
    source_ceiling_mib: int = 2048
    run_ceiling_mib: int = 20_480
    back_off_max_s: float = 10.0
    state_every_s: float = 1.0
    settle_s: float = 0.5


class Sources(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[sources]``: which files are followed beyond what processes have as stdout and stderr."""

    patterns: tuple[str, ...] = ()
    names: tuple[str, ...] = ("*.log", "*.out", "*.err", "*.txt", "*.jsonl")
    max_files_per_run: int = 10_000


class Seal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[seal]``: when streamed frames become objects."""

    segment_mib: int = 8
    min_age_s: float = 60.0
    max_age_s: float = 600.0
    lease_s: float = 120.0
    merge_below_mib: int = 1


class Finish(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[finish]``: when a run is closed."""

    deadline_s: float = 600.0
    keep_level0_s: float = 3600.0


class Worker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[worker]``: Celery."""

    concurrency: int = 2
    sweep_every_s: float = 2.0
    task_limit_s: int = 600
    visibility_timeout_s: int = 900
    max_attempts: int = 5


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All sections, and ``home``: the directory in which the embedded form keeps everything."""

    home: Path
    cluster: str = ""
    node: Node = Node()
    log: Log = Log()
    broker: Broker = Broker()
    store: Store = Store()
    collector: Collector = Collector()
    sources: Sources = Sources()
    seal: Seal = Seal()
    finish: Finish = Finish()
    worker: Worker = Worker()

    @property
    def spool(self) -> Path:
        """Directory that only the owner (root) may write: notices and the jobs' private directories."""
        return Path(self.node.spool) if self.node.spool else self.home / "spool"

    @property
    def state(self) -> Path:
        """Directory of the collector's state and spilled frames."""
        return Path(self.node.state) if self.node.state else self.home / "state"

    @property
    def store_url(self) -> str:
        """URL of the store; the embedded form's is a directory."""
        return self.store.url or (self.home / "store").as_uri()
