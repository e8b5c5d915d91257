"""The locks that keep workers from doing the same work."""

import time

import pytest
from conftest import StartRedis

from trainarchive import lease
from trainarchive.errors import UnavailableError
from trainarchive.run import RunKey
from trainarchive.stream import Stream

RUN = RunKey("c", 7)


def test_one_at_a_time(stream: Stream) -> None:
    """Of two workers at one run the second gets nothing; when the first is done, however, it is free."""
    with lease.alone(stream, RUN, 30.0) as keep:
        assert keep is not None
        with lease.alone(stream, RUN, 30.0) as other, lease.alone(stream, RunKey("c", 8), 30.0) as elsewhere:
            assert other is None
            assert elsewhere is not None
    with pytest.raises(ZeroDivisionError), lease.alone(stream, RUN, 30.0):
        _ = 1 // 0
    with lease.alone(stream, RUN, 30.0) as again:
        assert again is not None


def test_kept_alive(stream: Stream) -> None:
    """As long as the hook is called, the lock does not run out, however long that takes."""
    with lease.alone(stream, RUN, 0.2) as keep:
        assert keep is not None
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            keep("working")
            assert not stream.lock(f"finish/{RUN}", "another", 0.2)
            time.sleep(0.01)


def test_a_redis_that_is_away_for_a_moment(start_redis: StartRedis, caplog: pytest.LogCaptureFixture) -> None:
    """It costs a line in the log and not the work."""
    server = start_redis()
    door = Stream(server.url, timeout_s=5.0, max_pending=1)
    with lease.alone(door, RUN, 0.001) as keep:
        assert keep is not None
        server.process.kill()
        server.process.wait()
        time.sleep(0.001)
        keep("working")
    assert "is not renewed" in caplog.text
    with pytest.raises(UnavailableError), lease.alone(door, RUN, 1.0):
        pass
    door.close()
