"""One connection pool to the log Redis: scripts, and errors that say what to do."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError
from redis.retry import Retry

from trainarchive.errors import DamagedError, SettingsError, UnavailableError

Argument: TypeAlias = str | bytes | int
Keys: TypeAlias = tuple[str, ...]

SCRIPTS = (
    "append", "archived", "claim", "commit", "control", "describe", "lock", "open", "report", "status", "unlock",
)  # fmt: skip

_ALLOW = "docs/operation.md lists what a node's ACL user needs"
_ADVICE = (
    ("used memory > 'maxmemory'", "its memory is full", "give it more memory, or more workers: sealing frees it"),
    ("loading the dataset", "it is loading its data", "wait"),
    ("read only replica", "it is a replica", "[log] url must name the primary"),
    ("Link with MASTER is down", "it is a replica without its primary", "[log] url must name the primary"),
    ("MISCONF", "it cannot save to its disk", "free disk space where Redis runs"),
    ("no permissions", "its ACL does not allow this", _ALLOW),
    ("executing the script can't", "its ACL does not allow this", _ALLOW),
    ("invalid username-password", "it refuses the password", "check user and password in [log] url"),
    ("Authentication required", "it wants a password", "put user and password into [log] url"),
    ("without any password configured", "it has no password, but one was given", "take it out of [log] url"),
    ("ot enough good replicas", "it has too few replicas for its min-replicas-to-write", "mend them"),
    ("is busy running a script", "another's script keeps it busy", "wait, or SCRIPT KILL"),
    ("CLUSTERDOWN", "the Redis Cluster is down", "wait, or mend it"),
    ("MOVED", "it is one node of a Redis Cluster", "[log] url must name a single Redis or a proxy"),
    ("max number of clients", "it has too many clients", "raise its maxclients"),
)
"""A piece of what Redis says, what that means, what to do. Scripts put words around it, redis-py takes codes off it."""

_OF_ONE_KEY = (
    ("wrong kind of value", "a key has a type that is not ours"),
    ("user_script", "a script failed over what is in its keys"),
)
"""As above, and not in there: the fault of what stands in the keys of one call. Others go on."""


class Script(msgspec.Struct, frozen=True):
    """A Lua script and the digest that EVALSHA knows it by."""

    text: str
    digest: str


def shown(url: str) -> str:
    """Return the URL without user, password and parameters."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def load_scripts() -> dict[str, Script]:
    """Read all scripts of the package."""
    folder = resources.files("trainarchive") / "lua"
    found = {}
    for name in SCRIPTS:
        text = (folder / f"{name}.lua").read_text(encoding="utf-8")
        found[name] = Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
    return found


class Connection:
    """Runs scripts and commands; every failure is an error with ``where`` and a hint.

    UnavailableError: Redis serves nobody, or not us. DamagedError: it cannot do this with what
    somebody else wrote into these keys; with other keys it can.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        """Connect at the first call only. ``timeout_s`` bounds connecting and each answer."""
        self.where = shown(url)
        self.timeout_s = timeout_s
        self._scripts = load_scripts()
        try:
            # One try: whoever calls decides when to call again. RESP2: 6.2 and proxies know it.
            self.client: Any = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
                decode_responses=False,
            )
        except (ValueError, TypeError) as error:
            raise SettingsError(
                f"not a Redis URL: {error}", where=self.where, hint="redis://, rediss:// or unix://"
            ) from error

    @contextmanager
    def errors(self, key: str = "") -> Iterator[None]:
        """Turn what redis-py raises into what people can use; ``key`` is one of those it is about."""
        try:
            yield
        except (RedisError, OSError) as error:
            raise self.meaning(error, key) from error

    def meaning(self, error: Exception, key: str = "") -> UnavailableError | DamagedError:
        """Say what an error of Redis means."""
        said = str(error) or type(error).__name__
        for piece, what, hint in _ADVICE:
            if piece in said:
                return UnavailableError(f"the log Redis cannot serve: {what}: {said}", where=self.where, hint=hint)
        for piece, what in _OF_ONE_KEY:
            if piece in said:
                hint = "somebody else writes into this Redis"
                return DamagedError(
                    f"the log Redis cannot use this: {what}: {said}", where=key or self.where, hint=hint
                )
        if isinstance(error, redis.exceptions.ResponseError):
            return UnavailableError(f"the log Redis refuses: {said}", where=self.where)
        return UnavailableError(
            f"the log Redis does not answer: {said}", where=self.where, hint="is it running, and is [log] url right?"
        )

    def command(self, *words: Argument) -> Any:
        """Run one command."""
        with self.errors():
            return self.client.execute_command(*words)

    def script(self, name: str, keys: Keys, arguments: Sequence[Argument]) -> Any:
        """Run one script, by its digest where Redis has it."""
        script = self._scripts[name]
        with self.errors(keys[0]):
            try:
                return self.client.execute_command("EVALSHA", script.digest, len(keys), *keys, *arguments)
            except NoScriptError:
                return self.client.execute_command("EVAL", script.text, len(keys), *keys, *arguments)

    def script_many(self, name: str, calls: Sequence[tuple[Keys, Sequence[Argument]]]) -> list[Any]:
        """Run one script many times in one round trip, in order; where Redis refused a call stands the error."""
        answers = self._pipeline(name, calls, first="EVALSHA")
        unknown = [at for at, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            # The first of them brings the text along, and Redis keeps it.
            again = self._pipeline(name, [calls[at] for at in unknown], first="EVAL")
            for at, answer in zip(unknown, again, strict=True):
                answers[at] = answer
        return [
            self.meaning(answer, keys[0]) if isinstance(answer, RedisError) else answer
            for answer, (keys, _) in zip(answers, calls, strict=True)
        ]

    def _pipeline(self, name: str, calls: Sequence[tuple[Keys, Sequence[Argument]]], first: str) -> list[Any]:
        script = self._scripts[name]
        with self.errors(), self.client.pipeline(transaction=False) as pipeline:
            for at, (keys, arguments) in enumerate(calls):
                by_text = at == 0 and first == "EVAL"
                how = ("EVAL", script.text) if by_text else ("EVALSHA", script.digest)
                pipeline.execute_command(*how, len(keys), *keys, *arguments)
            return list(pipeline.execute(raise_on_error=False))

    def clock(self) -> tuple[float, float]:
        """Return Redis' TIME (Unix s) and the round trip (s), the quicker of two: the first may have to connect."""
        return min((self._one_clock(), self._one_clock()), key=lambda pair: pair[1])

    def _one_clock(self) -> tuple[float, float]:
        before = time.perf_counter()
        with self.errors():
            seconds, microseconds = self.client.time()
        return float(seconds) + float(microseconds) / 1e6, time.perf_counter() - before

    def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        self.client.close()
