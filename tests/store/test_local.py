"""The local store: durable and whole among processes that are killed, and clear about what a file system refuses."""

import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainarchive.errors import NotFoundError, TrainarchiveError, UnavailableError
from trainarchive.store.local import LocalStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Give the directory of a store that is not there yet."""
    return tmp_path / "home" / "store"


@pytest.fixture
def store(root: Path) -> LocalStore:
    """Give a store in ``root``."""
    return LocalStore(root)


def _run(program: str, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def _temporaries(root: Path) -> list[Path]:
    return sorted((root / ".tmp").iterdir())


@contextmanager
def _without_root() -> Iterator[None]:
    """Have the rights of nobody for a while, where the test runs as root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_key_is_a_path_that_only_the_owner_reads(store: LocalStore, root: Path) -> None:
    """Objects are plain files below the root, 0600, in directories 0700, whatever the umask allows."""
    before = os.umask(0)
    try:
        store.put("a/b", b"one")
        store.put_if_absent("a/c", b"two")
    finally:
        os.umask(before)
    assert (root / "a/b").read_bytes() == b"one"
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (root, root / "a", root / "a/b", root / "a/c")}
    assert modes == {root: 0o700, root / "a": 0o700, root / "a/b": 0o600, root / "a/c": 0o600}
    assert stat.S_IMODE(root.parent.stat().st_mode) == 0o700


def test_reads_make_nothing(store: LocalStore, root: Path) -> None:
    """Only a put makes the root; an error tells that it is not there."""
    assert list(store.list("a/")) == []
    assert list(store.children("")) == []
    store.delete("a/b")
    with pytest.raises(NotFoundError, match="not mounted, or nothing stored yet"):
        store.get("a/b")
    assert not root.parent.exists()


def test_an_object_put_twice_leaves_no_temporary(store: LocalStore, root: Path) -> None:
    """Winners, losers and repeats clean up after themselves."""
    store.put("a", b"one")
    store.put("a", b"two")
    store.put_if_absent("b", b"one")
    store.put_if_absent("b", b"two")
    assert _temporaries(root) == []
    assert (root / "b").stat().st_nlink == 1


def test_what_killed_writers_left_is_hidden_and_swept(root: Path) -> None:
    """Temporaries are never listed; those of more than a day are removed at a later put, younger ones stay."""
    LocalStore(root).put("a", b"")
    old, young = root / ".tmp/1-old", root / ".tmp/2-young"
    old.write_bytes(b"")
    young.write_bytes(b"")
    os.utime(old, (time.time() - 90_000,) * 2)
    store = LocalStore(root)
    assert [info.key for info in store.list("")] == ["a"]
    assert list(store.children("")) == ["a"]
    store.put("b", b"")
    assert _temporaries(root) == [young]


def test_what_is_no_object_is_passed_over(store: LocalStore, root: Path, tmp_path: Path) -> None:
    """Links, FIFOs, sockets and impossible names are not listed; reading them neither waits nor leads out."""
    (tmp_path / "secret").write_bytes(b"secret")
    store.put("a/b", b"")
    (root / "a/link").symlink_to(tmp_path / "secret")
    (root / "a/loop").symlink_to(root)
    os.mkfifo(root / "a/fifo")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(root / "a/sock"))
    (root / "a/new\nline").write_bytes(b"")
    (root / "a/.hidden").write_bytes(b"")
    Path(os.fsdecode(os.fsencode(root) + b"/a/\xff")).write_bytes(b"")
    assert [info.key for info in store.list("")] == ["a/b"]
    assert list(store.children("a/")) == ["b"]
    for key in ("a/link", "a/fifo", "a/sock"):
        with pytest.raises(TrainarchiveError, match="cannot be objects"):
            store.get(key)
        with pytest.raises(TrainarchiveError, match="cannot be objects"):
            store.put_if_absent(key, b"")


def test_put_replaces_a_link_and_not_its_target(store: LocalStore, root: Path, tmp_path: Path) -> None:
    """Nothing is ever written through a symbolic link at the object's own name."""
    target = tmp_path / "target"
    target.write_bytes(b"kept")
    store.put("a/b", b"")
    (root / "a/link").symlink_to(target)
    store.put("a/link", b"object")
    assert target.read_bytes() == b"kept"
    assert store.get("a/link") == b"object"


def test_empty_directories_of_a_crash_are_in_nobodys_way(store: LocalStore, root: Path) -> None:
    """A delete that was killed before it removed the directories does not take their names for ever."""
    (root / "a/b/c").mkdir(parents=True)
    (root / "d/e").mkdir(parents=True)
    store.put("a/b", b"x")
    assert store.put_if_absent("d", b"y")
    assert [info.key for info in store.list("")] == ["a/b", "d"]


def test_a_repeated_delete_removes_what_a_crash_left(store: LocalStore, root: Path) -> None:
    """Deleting again finishes a delete that was killed half-way; the root itself stays."""
    (root / "a/b/c").mkdir(parents=True)
    store.delete("a/b/c/gone")
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("where", ["root", "parent"])
def test_a_file_in_place_of_the_root(root: Path, where: str) -> None:
    """Every method says what stands where the store should be, and does not ask to be called again."""
    root.parent.parent.mkdir(exist_ok=True)
    if where == "root":
        root.parent.mkdir()
        root.write_bytes(b"")
        store = LocalStore(root)
    else:
        root.parent.write_bytes(b"")
        store = LocalStore(root)
    calls: list[Callable[[], object]] = [lambda: store.put("a", b""), lambda: store.put_if_absent("a", b"")]
    if where == "root":
        calls += [
            lambda: store.get("a"), lambda: list(store.list("")), lambda: list(store.children("")),
            lambda: store.delete("a"),
        ]  # fmt: skip
    for call in calls:
        with pytest.raises(TrainarchiveError, match=r"not a directory .*\[store\] url") as caught:
            call()
        assert not caught.value.retry
        assert not isinstance(caught.value, NotFoundError)


def test_no_right_to_write() -> None:
    """A directory in which this process may only look is one clear error that nobody retries."""
    with tempfile.TemporaryDirectory() as made:
        root = Path(made) / "theirs"
        store = LocalStore(root)
        store.put("a/b", b"x")
        closed = [Path(made), root, root / ".tmp", root / "a"]
        for path in closed:
            path.chmod(0o555)
        calls: list[Callable[[], object]] = [
            lambda: store.put("c", b""), lambda: store.put_if_absent("c", b""), lambda: store.delete("a/b"),
        ]  # fmt: skip
        with _without_root():
            assert [info.key for info in store.list("")] == ["a/b"]
            for call in calls:
                with pytest.raises(TrainarchiveError, match=r"Permission denied \(let this user") as caught:
                    call()
                assert not caught.value.retry
        for path in closed:
            path.chmod(0o700)
        assert store.get("a/b") == b"x"


FULL_DISK = """
    import errno, sys
    from pathlib import Path
    from trainarchive.errors import UnavailableError
    from trainarchive.store.local import LocalStore
    root = Path(sys.argv[1]) / "store"
    store = LocalStore(root)
    store.put("a/kept", b"x" * 1000)
    for put in (store.put, store.put_if_absent):
        for key in ("a/kept", "b/new"):
            try:
                put(key, b"y" * 2_000_000)
            except UnavailableError as error:
                assert "free space there" in error.hint, error
                assert error.__cause__.errno == errno.ENOSPC
            else:
                raise AssertionError("not full")
    assert store.get("a/kept") == b"x" * 1000
    assert [info.key for info in store.list("")] == ["a/kept"]
    assert list((root / ".tmp").iterdir()) == []
    store.put("a/kept", b"z")
    print("done")
"""


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """On a really full file system the old object stays, no rest stays, and the error may be retried."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("no unshare here")
    script = 'mount -t tmpfs -o size=512k none "$1" && exec "$2" -c "$3" "$1"'
    ended = subprocess.run(
        [unshare, "-rm", "sh", "-c", script, "sh", tmp_path, sys.executable, textwrap.dedent(FULL_DISK)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    if "done" not in ended.stdout and "Traceback" not in ended.stderr:
        pytest.skip(f"no own file systems here: {ended.stderr.strip()}")
    assert ended.stdout == "done\n", ended.stderr


TOO_LARGE = """
    import resource, signal, sys
    from trainarchive.errors import TrainarchiveError
    from trainarchive.store.local import LocalStore
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    store = LocalStore(sys.argv[1])
    store.put("a", b"kept")
    try:
        store.put("a", b"x" * 100_001)
    except TrainarchiveError as error:
        assert not error.retry
        print(error)
"""


def test_a_write_that_breaks_off_leaves_nothing(root: Path) -> None:
    """A write that the system stops half-way leaves the old object and no temporary."""
    with _run(TOO_LARGE, root) as writer:
        printed, _ = writer.communicate(timeout=30)
    assert "ulimit -f" in printed
    assert LocalStore(root).get("a") == b"kept"
    assert _temporaries(root) == []


def test_bytes_are_on_disk_before_their_name(root: Path) -> None:
    """The order of system calls: write, fsync, rename or link, fsync of every directory up to the root."""
    program = """
        import os, sys
        from trainarchive.store.local import LocalStore
        store = LocalStore(sys.argv[1])
        store.put("warm", b"")
        names, calls = {}, []
        def wrap(name, show):
            real = getattr(os, name)
            def wrapped(*arguments, **more):
                answer = real(*arguments, **more)
                calls.append(show(arguments, answer))
                return answer
            setattr(os, name, wrapped)
        def opened(arguments, answer):
            names[answer] = os.path.relpath(arguments[0], sys.argv[1])
            return None
        def short(name):
            return "T" if name.startswith(".tmp/") else name
        wrap("open", opened)
        wrap("write", lambda arguments, _: "write " + short(names[arguments[0]]))
        wrap("fsync", lambda arguments, _: "fsync " + short(names[arguments[0]]))
        wrap("replace", lambda *_: "move")
        wrap("link", lambda *_: "move")
        for put in (store.put, store.put_if_absent):
            store.delete("a/b/c")
            calls.clear()
            put("a/b/c", b"x")
            print(*filter(None, calls), sep=", ")
    """
    with _run(program, root) as writer:
        printed, _ = writer.communicate(timeout=30)
    assert printed.splitlines() == ["write T, fsync T, move, fsync a/b, fsync a, fsync ."] * 2


def test_memory_of_a_listing_follows_the_directory(store: LocalStore, root: Path) -> None:
    """A listing reads a directory when it comes to it, not the whole tree before its first key."""
    for first in "abc":
        store.put(f"{first}/x", b"")
    listing = store.list("")
    assert next(listing).key == "a/x"
    (root / "c/late").write_bytes(b"12")
    assert [info.key for info in listing] == ["b/x", "c/late", "c/x"]


def test_a_passing_error_may_be_retried(store: LocalStore, root: Path) -> None:
    """What may go away by itself, here too many open files, is UnavailableError."""
    store.put("a", b"x")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(UnavailableError, match="Too many open files"):
            store.get("a")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert root.exists()
    assert store.get("a") == b"x"
