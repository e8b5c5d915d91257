"""The door when Redis is full, forbids, hangs, dies, or is not what was meant."""

import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from tests_stream import DRAINED, LANE, REPORT, SOURCE, append, frames, seal

from trainarchive.errors import DamagedError, SettingsError, TrainarchiveError, UnavailableError
from trainarchive.frame import Frame, Framer
from trainarchive.run import Lane, RunKey
from trainarchive.stream import NODE_COMMANDS, Answer, Append, Outcome, Stream

EACH_VERSION = pytest.mark.parametrize("version", ["6.2", "7"])
StartRedis = Callable[..., Any]


def fill(stream: Stream) -> int:
    """Append until Redis itself is out of memory; return the committed offset."""
    at = 0
    while (answer := append(stream, frames(at, 200_000, 50_000))).outcome is Outcome.OK:
        at = answer.committed
        assert at < 64 << 20
    assert (answer.outcome, answer.committed) == (Outcome.FULL, at)
    return at


@EACH_VERSION
def test_a_full_redis_is_emptied_by_sealing(start_redis: StartRedis, version: str) -> None:
    """Out of memory is FULL, with nothing half done; workers can still stop nodes, lock, claim and commit."""
    url = start_redis(version, "--maxmemory", "8mb").url
    stream = Stream(url, timeout_s=10, max_pending=1 << 30)
    epoch = stream.open(LANE, REPORT, []).epoch
    at = fill(stream)
    with redis.Redis.from_url(url, protocol=2) as admin:
        admin.config_set("maxmemory", "5mb")  # no small write fits either
    assert stream.memory_ratio() > 1
    assert append(stream, frames(at, 10)).outcome is Outcome.FULL
    assert sum(entry.frame.length for entry in stream.snapshot(LANE)) == at
    with pytest.raises(UnavailableError, match="memory is full"):
        stream.open(Lane(RunKey("hpc", 8), "n", "t"), REPORT, [SOURCE])
    stream.control(LANE, {"pressure": "1"})
    assert stream.lock("sweep", "a", 60)
    assert seal(stream) > 0
    status = stream.status(LANE)
    assert status is not None
    assert (status.entries, status.pending, status.sealed) == (0, 0, {("s1", 0): at})
    stream.control(LANE, {"pressure": "0"})
    assert append(stream, frames(at, 10)) == Answer(Outcome.OK, epoch, at + 10, at)
    stream.close()


def test_operation_tells_what_a_node_user_needs() -> None:
    """The document's command is the one that the next test tries."""
    text = (Path(__file__).parent.parent / "docs" / "operation.md").read_text()
    assert " ".join(f"+{name}" for name in NODE_COMMANDS) in text


@EACH_VERSION
def test_a_node_user_needs_only_what_is_listed(start_redis: StartRedis, version: str) -> None:
    """One ACL user a node: its own lanes with the listed commands, no other node's, and no deleting."""
    url = start_redis(version).url
    with redis.Redis.from_url(url, protocol=2) as admin:
        commands = [f"+{name}" for name in NODE_COMMANDS]
        rules = ["on", ">pa ss@/:", "resetkeys", "~ta:{*}:node-1.site:*", "-@all", *commands]
        admin.execute_command("ACL", "SETUSER", "node-1", *rules)
    node = Stream(url.replace("unix://", "unix://node-1:pa%20ss%40%2F%3A@"), timeout_s=5, max_pending=1 << 20)
    worker = Stream(url, timeout_s=5, max_pending=1 << 20)
    assert node.now()[0] > 0
    assert node.memory_ratio() == 0.0
    epoch = node.open(LANE, REPORT, [SOURCE]).epoch
    node.describe(LANE, [SOURCE])
    assert append(node, frames(0, 10)).outcome is Outcome.OK
    node.report(LANE, DRAINED)
    seal(worker)
    assert worker.archived(LANE, epoch, 60)
    assert node.open(LANE, REPORT, []).epoch == epoch
    assert append(node, frames(10, 10)).outcome is Outcome.OK
    for refused in (
        lambda: node.open(Lane(LANE.run, "node-2.site", "sABC"), REPORT, []),
        lambda: node.claim(LANE, max_bytes=1, lease_s=1),
        lambda: list(node.lanes()),
        lambda: node.lock("sweep", "a", 1),
    ):
        with pytest.raises(UnavailableError, match="ACL"):
            refused()
    node.close()
    worker.close()


@EACH_VERSION
def test_a_password_is_never_shown(start_redis: StartRedis, version: str) -> None:
    """No password, a wrong one, a needless one: said so, without the password."""
    url = start_redis(version, "--requirepass", "right").url
    for given, said in (("", "wants a password"), (":wrong@", "refuses the password"), ("u:wrong@", "refuses")):
        stream = Stream(url.replace("unix://", f"unix://{given}"), timeout_s=5, max_pending=1)
        with pytest.raises(UnavailableError, match=said) as caught:
            stream.status(LANE)
        assert "wrong" not in str(caught.value)
        assert "[log] url" in caught.value.hint
        assert caught.value.where.startswith("unix:///tmp/")
        stream.close()
    stream = Stream(url.replace("?db", "?password=right&db"), timeout_s=5, max_pending=1)
    assert stream.status(LANE) is None
    stream.close()


@EACH_VERSION
def test_a_replica_is_refused(start_redis: StartRedis, version: str) -> None:
    """A replica answers READONLY; the hint says which Redis to name."""
    stream = Stream(start_redis(version, "--replicaof", "127.0.0.1", "1").url, timeout_s=5, max_pending=1)
    with pytest.raises(UnavailableError, match="replica"):
        stream.open(LANE, REPORT, [])
    stream.close()


@EACH_VERSION
def test_a_redis_that_hangs_or_dies_is_unavailable(start_redis: StartRedis, version: str) -> None:
    """A call ends within its time limit; what was sent before a lost answer may be sent again."""
    server = start_redis(version)
    stream = Stream(server.url, timeout_s=0.3, max_pending=1 << 20)
    stream.open(LANE, REPORT, [])
    sent = frames(0, 10, 10)
    server.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(UnavailableError, match="does not answer"):
        append(stream, sent)
    assert time.monotonic() - started < 5
    server.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 10
    while stream.status(LANE) is None:
        assert time.monotonic() < deadline
    assert append(stream, sent).committed == 20
    assert sum(entry.frame.length for entry in stream.snapshot(LANE)) == 20
    server.process.kill()
    server.process.wait()
    for call in (
        lambda: append(stream, sent), lambda: list(stream.lanes()), stream.now, stream.memory_ratio,
        lambda: stream.about(LANE), lambda: stream.follow(LANE, "0", block_s=1), lambda: stream.snapshot(LANE),
    ):  # fmt: skip
        with pytest.raises(UnavailableError, match="does not answer"):
            call()
    stream.close()


@pytest.mark.parametrize("url", ["http://h", "", "redis://h/x?socket_timeout=x", "redis://u:secret@h:port"])
def test_a_bad_url_is_a_settings_error(url: str) -> None:
    """What is no Redis URL is said at once, without its password."""
    with pytest.raises(SettingsError, match="Redis URL") as caught:
        Stream(url, timeout_s=1, max_pending=1)
    assert "secret" not in str(caught.value)


def test_many_tiny_frames_go_in_several_calls(start_redis: StartRedis) -> None:
    """Redis 6.2 drops whoever sends over 2**20 arguments in one command: 300,000 frames are more."""
    stream = Stream(start_redis("6.2").url, timeout_s=10, max_pending=1 << 30)
    stream.open(LANE, REPORT, [])
    data = Framer().frame(0, b"step 000001 loss 1\n", 1, 2).data
    assert len(data) <= 34
    sent = [Frame(at * 19, 19, 1, 2, data) for at in range(300_000)]
    (answer,) = stream.append([Append(LANE, "s1", 0, sent)])
    assert (answer.outcome, answer.committed) == (Outcome.OK, 300_000 * 19)
    status = stream.status(LANE)
    assert status is not None
    assert status.entries == 300_000
    stream.close()


IN_A_SCRIPT = "-ERR Error running script (call to f_1): @user_script:9: "


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("-LOADING Redis is loading the dataset in memory", UnavailableError),
        ("-BUSY Redis is busy running a script. You can only call SCRIPT KILL", UnavailableError),
        ("-MISCONF Errors writing to the AOF file: No space left on device", UnavailableError),
        (IN_A_SCRIPT + "-READONLY You can't write against a read only replica.", UnavailableError),
        ("-NOREPLICAS Not enough good replicas to write.", UnavailableError),
        ("-ERR something new", UnavailableError),
        (IN_A_SCRIPT + "WRONGTYPE Operation against a key holding the wrong kind of value", DamagedError),
        (
            "-WRONGTYPE Operation against a key holding the wrong kind of value script: f_1, on @user_script:9.",
            DamagedError,
        ),
        ("-ERR user_script:9: attempt to compare nil with number script: f_1, on @user_script:9.", DamagedError),
    ],
)
def test_what_is_everybodys_trouble_and_what_one_lanes(
    tmp_path: Path, said: str, kind: type[TrainarchiveError]
) -> None:
    """An answer about the server is never taken for one about a lane: then every lane would count as broken."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        stream = Stream(f"unix://{tmp_path}/s", timeout_s=5, max_pending=1)

        def serve() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as sent:
                while line := sent.readline():
                    if b"EVALSHA" in line:
                        connection.sendall(said.encode() + b"\r\n")
                    elif line.strip().upper() in (b"CLIENT", b"SELECT", b"HELLO"):
                        connection.sendall(b"+OK\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(kind):
            stream.status(LANE)
        stream.close()
        thread.join()
