"""URLs in settings: what is wrong with one, without repeating it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainarchive import urls


@given(st.sampled_from(sorted(urls.SCHEMES)), st.text() | st.from_regex(r"(redis|unix|file|memory)://[\w/:@%?#\[\]]*"))
def test_any_text_as_a_url(section: str, text: str) -> None:
    """Never an exception; what passes has a scheme that is known, and a file:// URL names a directory."""
    what = urls.problem(section, text)
    if not what:
        assert text.partition("://")[0] in urls.SCHEMES[section]
    if not what and text.startswith("file:"):
        assert urls.directory(text).startswith("/")


@pytest.mark.parametrize(
    ("section", "url"),
    [
        ("log", "redis://:sec/ret@h"),
        ("log", "rediss://u:sec#ret@h"),
        ("store", "s3://sec:ret@h"),
        ("broker", "sec@ret"),
    ],
)
def test_a_url_is_never_repeated(section: str, url: str) -> None:
    """It may hold a password, also where that was not written as it should be."""
    what = urls.problem(section, url)
    assert "sec" not in what
    assert "ret" not in what
