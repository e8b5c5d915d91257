"""Every setting: typed, frozen, with its default, unit and range. Read once, at a process's start.

``config/trainarchive.toml`` shows them all with their meaning; a test keeps the two equal.
Units stand in the names: ``_s`` seconds, ``_ms`` milliseconds, ``_mib`` MiB of 2**20 bytes.
The types below are the one truth on what may be set: ``load`` asks them.
"""

import difflib
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_origin

import msgspec
import platformdirs

from trainarchive import urls
from trainarchive.errors import ANOTHER_HOME, SettingsError

CONFIG_NAME = "trainarchive.toml"
SITE_CONFIG = Path("/etc/trainarchive") / CONFIG_NAME
"""Where a site's file stands; ``$TRAINARCHIVE_HOME/trainarchive.toml`` comes before it."""

NOT_SETTINGS = frozenset(
    f"TRAINARCHIVE_{name}" for name in ("HOME", "CONFIG", "DIR", "SPOOL", "HOOKS_CONF", "EPILOG_WAIT_S")
)
"""Variables of this project that name no setting: where to look, and the hooks' own."""

Seconds = Annotated[float, msgspec.Meta(gt=0, le=366 * 86_400)]
SecondsOrNone = Annotated[float, msgspec.Meta(ge=0, le=366 * 86_400)]
WholeSeconds = Annotated[int, msgspec.Meta(ge=1, le=366 * 86_400)]
Milliseconds = Annotated[int, msgspec.Meta(ge=1, le=60_000)]
Mebibytes = Annotated[int, msgspec.Meta(ge=1, le=2**33)]  # 2**33 MiB: offsets stay below 2**53
MebibytesOrNone = Annotated[int, msgspec.Meta(ge=0, le=2**33)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Ratio = Annotated[float, msgspec.Meta(gt=0, le=1)]
Name = Annotated[str, msgspec.Meta(pattern=r"^(?:[A-Za-z0-9][A-Za-z0-9._-]{0,252})?\Z")]  # run.is_safe_name, or empty
Directory = Annotated[str, msgspec.Meta(pattern=r"^(?:/.*)?\Z")]  # absolute, or empty


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[node]``: where a compute node keeps its things."""

    spool: Directory = ""
    state: Directory = ""


class Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[log]``: the log Redis, between collectors and workers."""

    url: str = ""
    timeout_s: Seconds = 5.0
    max_pending_mib: Mebibytes = 64
    stop_at_memory_ratio: Ratio = 0.6
    archived_lane_ttl_s: WholeSeconds = 86_400


class Broker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[broker]``: Celery's Redis. Collectors never touch it."""

    url: str = ""


class Store(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[store]``: where archives go."""

    url: str = ""
    attempts: Count = 5
    retry_timeout_s: Seconds = 60.0


class Collector(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[collector]``: how files are followed and sent."""

    poll_min_ms: Milliseconds = 20
    poll_max_ms: Milliseconds = 1000
    busy_wait_ms: Milliseconds = 50
    discovery_s: Seconds = 2.0
    batch_mib: Mebibytes = 8
    memory_mib: Mebibytes = 16
    spool_mib: MebibytesOrNone = 4096
    close_within_s: Seconds = 10.0
    source_ceiling_mib: Mebibytes = 2048
    run_ceiling_mib: Mebibytes = 20_480
    back_off_max_s: Seconds = 10.0
    state_every_s: Seconds = 1.0
    opt_out_comment: str = "notrainarchive"


class Sources(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[sources]``: which files are followed beyond what processes have as stdout and stderr."""

    patterns: tuple[str, ...] = ()
    names: tuple[str, ...] = ("*.log", "*.out", "*.err", "*.txt", "*.jsonl")
    max_files_per_run: Count = 10_000


class Seal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[seal]``: when streamed frames become objects."""

    segment_mib: Mebibytes = 8
    min_age_s: SecondsOrNone = 60.0
    max_age_s: SecondsOrNone = 600.0
    lease_s: Seconds = 120.0
    merge_below_mib: MebibytesOrNone = 1


class Finish(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[finish]``: when a run is closed."""

    deadline_s: SecondsOrNone = 600.0
    silence_s: SecondsOrNone = 86_400.0
    keep_level0_s: SecondsOrNone = 3600.0


class Worker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[worker]``: Celery."""

    concurrency: Count = 2
    sweep_every_s: Seconds = 2.0
    task_limit_s: WholeSeconds = 600
    visibility_timeout_s: WholeSeconds = 900
    max_attempts: Count = 5


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All sections, and ``home``: the directory in which the embedded form keeps everything."""

    home: Path
    cluster: Name = ""
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


AT_LEAST = (
    ("collector", "poll_max_ms", "poll_min_ms"),
    ("collector", "run_ceiling_mib", "source_ceiling_mib"),
    ("seal", "max_age_s", "min_age_s"),
    ("finish", "silence_s", "deadline_s"),
    ("worker", "visibility_timeout_s", "task_limit_s"),
)
"""A section and two of its keys: the first may not be smaller than the second."""


_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
PLACEHOLDERS = ("workdir", "user", "job_id", "node")
"""What may stand in braces in ``[sources] patterns``."""


class _Given(msgspec.Struct, frozen=True):
    """A value that somebody set: ``where`` is the file or the variable."""

    section: str
    key: str
    value: Any
    where: str


def load(environ: Mapping[str, str], *, home: Path | None = None, config: Path | None = None) -> Settings:
    """Read the config file and the environment over the defaults; what comes later wins.

    ``home`` comes before TRAINARCHIVE_HOME, ``config`` before TRAINARCHIVE_CONFIG; a file that one
    of these names must exist. Else it is ``trainarchive.toml`` in home, else in /etc/trainarchive,
    else none. Variables are TRAINARCHIVE_<SECTION>_<KEY>, their lists by commas. Raises
    SettingsError for what cannot be used, with its place and what is expected; values stay out of
    it, since URLs hold passwords.
    """
    home = (home or _path(environ, "TRAINARCHIVE_HOME") or platformdirs.user_data_path("trainarchive")).absolute()
    file = config or _path(environ, "TRAINARCHIVE_CONFIG") or _first_file(home / CONFIG_NAME, SITE_CONFIG)
    given = {(one.section, one.key): one for one in (*_from_file(file), *_from_environment(environ))}
    _check_order(given)
    _check_urls(given)
    _check_patterns(given)
    top: dict[str, Any] = {"home": home}
    for section, keys in _schema().items():
        values = {key: given[section, key].value for key in keys if (section, key) in given}
        if section:
            top[section] = _section_type(section)(**values)
        else:
            top |= values
    return Settings(**top)


def _schema() -> dict[str, dict[str, Any]]:
    """Return the type of every key by section; the keys outside of sections are under ``""``."""
    schema: dict[str, dict[str, Any]] = {"": {}}
    for field in msgspec.structs.fields(Settings):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            schema[field.name] = {inner.name: inner.type for inner in msgspec.structs.fields(field.type)}
        elif field.name != "home":  # where the file is sought cannot stand in it
            schema[""][field.name] = field.type
    return schema


def _section_type(section: str) -> Any:
    return next(field.type for field in msgspec.structs.fields(Settings) if field.name == section)


def _path(environ: Mapping[str, str], name: str) -> Path | None:
    return Path(environ[name]) if environ.get(name) else None


def _first_file(*paths: Path) -> Path | None:
    """Return the first that is there. What is there but is no file was meant, and must not be passed over."""
    for path in paths:
        if not _is_there(path):
            continue
        try:
            is_file = stat.S_ISREG(path.stat().st_mode)
        except OSError:
            is_file = False
        if not is_file:
            raise SettingsError("not a file, or a link that leads to none", where=str(path))
        return path
    return None


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        other = "name another file with --config" if path == SITE_CONFIG else ANOTHER_HOME
        raise SettingsError(os.strerror(error.errno or 0), where=str(path), hint=other) from error
    return True


def _from_file(file: Path | None) -> Iterator[_Given]:
    if file is None:
        return
    where, schema = str(file), _schema()
    for name, value in _parsed(file).items():
        if name in schema[""]:
            yield _given(("", name, schema[""][name]), value, where)
        elif name in schema and isinstance(value, dict):
            for key, inner in value.items():
                if key not in schema[name]:
                    raise _unknown(f"unknown key {key!r} in [{name}]", key, schema[name], where)
                yield _given((name, key, schema[name][key]), inner, where)
        elif name in schema:
            raise SettingsError(f"{name} is a section", where=where, hint=f"write [{name}] and its keys below it")
        else:
            raise _unknown(f"unknown section or key {name!r}", name, [*schema[""], *filter(None, schema)], where)


def _parsed(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        what, hint = f"the config file cannot be read: {error.strerror}", "is --config or TRAINARCHIVE_CONFIG right?"
        raise SettingsError(what, where=str(file), hint=hint) from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"not UTF-8 at byte {error.start}", where=str(file)) from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingsError(f"not TOML: {error}", where=str(file)) from error


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Given]:
    names = {
        "_".join(filter(None, ("TRAINARCHIVE", section.upper(), key.upper()))): (section, key, kind)
        for section, keys in _schema().items()
        for key, kind in keys.items()
    }
    for name in sorted(environ):
        if not name.startswith("TRAINARCHIVE_") or name in NOT_SETTINGS:
            continue
        if name not in names:
            raise _unknown("no such setting", name, [*names, *NOT_SETTINGS], name)
        value: str | list[str] = environ[name]
        if get_origin(names[name][2]) is tuple:
            value = [item.strip() for item in environ[name].split(",") if item.strip()]
        yield _given(names[name], value, name, strict=False)


def _given(setting: tuple[str, str, Any], value: Any, where: str, *, strict: bool = True) -> _Given:
    """Convert one value as its setting's (section, key, type) says; not ``strict``: from text."""
    section, key, kind = setting
    place = f"[{section}] {key}" if section else key
    try:
        str(value).encode()
        return _Given(section, key, msgspec.convert(value, kind, strict=strict), where)
    except UnicodeEncodeError as error:
        raise SettingsError(f"{place}: not UTF-8", where=where) from error
    except msgspec.ValidationError as error:
        expected = str(error).replace("`", "")
        if not strict:
            expected = expected.partition(", got")[0]  # text is all that a variable can be
        raise SettingsError(f"{place}: {expected[0].lower()}{expected[1:]}", where=where) from error


def _check_order(given: Mapping[tuple[str, str], _Given]) -> None:
    for section, larger, smaller in AT_LEAST:
        set_here = [given[section, key] for key in (larger, smaller) if (section, key) in given]
        values = _section_type(section)(**{one.key: one.value for one in set_here})
        if getattr(values, larger) < getattr(values, smaller):
            where = ", ".join(dict.fromkeys(one.where for one in set_here))
            raise SettingsError(f"[{section}] {larger} is smaller than {smaller}", where=where)


def _check_urls(given: Mapping[tuple[str, str], _Given]) -> None:
    for section in urls.SCHEMES:
        one = given.get((section, "url"))
        what = urls.problem(section, one.value) if one is not None and one.value else ""
        if one is not None and what:
            raise SettingsError(f"[{section}] url: {what}", where=one.where, hint=urls.known(section))


def _check_patterns(given: Mapping[tuple[str, str], _Given]) -> None:
    one = given.get(("sources", "patterns"))
    for pattern in one.value if one is not None else ():
        what, hint = _wrong_pattern(pattern)
        if one is not None and what:
            raise SettingsError(f"[sources] patterns: {pattern!r}: {what}", where=one.where, hint=hint)


def _wrong_pattern(pattern: str) -> tuple[str, str]:
    """Say what is wrong with a site's pattern, and what would be right; empty where nothing is."""
    known = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    for name in _PLACEHOLDER.findall(pattern):
        if name not in PLACEHOLDERS:
            return f"unknown placeholder {{{name}}}", f"known: {known}"
    if set("{}") & set(_PLACEHOLDER.sub("", pattern)):
        return "a brace without its other half", f"known: {known}"
    if not pattern.startswith(("/", "{workdir}/")):
        return "a relative path", "begin it with / or {workdir}/"
    if "{workdir}" in pattern[1:]:
        return "{workdir} may stand only at the beginning", "it is an absolute path"
    return ("NUL cannot be in a path", "") if "\0" in pattern else ("", "")


def _unknown(what: str, name: str, known: Iterable[str], where: str) -> SettingsError:
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    return SettingsError(what, where=where, hint=f"do you mean {near[0]}?" if near else f"known: {', '.join(known)}")
