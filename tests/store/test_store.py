"""``open_store``: which URL leads to which store."""

import os
from pathlib import Path

import pytest

from trainarchive.errors import SettingsError
from trainarchive.settings import Settings
from trainarchive.settings import Store as StoreSettings
from trainarchive.store import absent, open_store


def test_the_url_of_a_directory(tmp_path: Path) -> None:
    """A directory's URL leads to it, whatever characters its name has."""
    home = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a b%#?\xff\xc3\xbc"))
    open_store(Settings(home=home)).put("k", b"x")
    assert (home / "store/k").read_bytes() == b"x"


def test_a_store_in_memory_is_new_each_time(tmp_path: Path) -> None:
    """``memory://`` needs no place at all."""
    settings = Settings(home=tmp_path, store=StoreSettings(url="memory://"))
    store = open_store(settings)
    store.put("k", b"x")
    assert store.get("k") == b"x"
    assert list(open_store(settings).list("")) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("/srv/archive", "no URL of a kind"), ("srv", "no URL of a kind"), ("ftp://host/x", "no URL of a kind"),
        ("file://srv/archive", "three slashes"), ("file:archive", "no URL of a kind"), ("file://", "three slashes"),
        ("file:///a?b", "%3F"), ("file:///a#b", "%3F"), ("file:///a%00b", "NUL"), ("file://[x/", "no URL"),
    ],
)  # fmt: skip
def test_urls_of_no_store(tmp_path: Path, url: str, what: str) -> None:
    """A URL that cannot be used is a settings error that says what is known, and does not repeat passwords."""
    with pytest.raises(SettingsError, match=what) as caught:
        open_store(Settings(home=tmp_path, store=StoreSettings(url=url)))
    assert "file://" in caught.value.hint
    assert caught.value.what.startswith("[store] url: ")


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """``absent`` names a local store's directory until that is made; other stores have none."""
    settings = Settings(home=tmp_path / "new home")
    assert absent(settings) == tmp_path / "new home" / "store"
    open_store(settings).put("k", b"x")
    assert absent(settings) is None
    assert absent(Settings(home=tmp_path / "no", store=StoreSettings(url="memory://"))) is None


@pytest.mark.parametrize("below", ["", "/archive", "/a/b/c"])
def test_a_file_in_the_directorys_place(tmp_path: Path, below: str) -> None:
    """A worker hears of it at its start, not from every task."""
    (tmp_path / "passwd").touch()
    with pytest.raises(SettingsError, match=r"/passwd: not a directory, and \[store\] url leads there \(.*--home"):
        open_store(Settings(home=tmp_path, store=StoreSettings(url=f"file://{tmp_path}/passwd{below}")))


def test_passwords_in_urls_are_not_shown(tmp_path: Path) -> None:
    """An error about a URL with credentials does not repeat them."""
    with pytest.raises(SettingsError) as caught:
        open_store(Settings(home=tmp_path, store=StoreSettings(url="swift://user:hunter2@host/x")))
    assert "hunter2" not in str(caught.value)
