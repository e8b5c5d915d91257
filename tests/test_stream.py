"""The door, against real servers."""

import pytest

from trainarchive.stream import Stream


@pytest.mark.parametrize("redis_url", ["6.2", "7"], indirect=True)
def test_now(stream: Stream) -> None:
    """The clock of Redis is read with its round trip."""
    at, took = stream.now()
    assert at > 1.6e9
    assert 0 < took < 10
