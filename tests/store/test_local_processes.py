"""The local store among processes: many at once, and ones that are killed."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from trainarchive.store.local import LocalStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Give the directory of a store that is not there yet."""
    return tmp_path / "home" / "store"


def _run(program: str, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


CONTEND = """
    import sys
    from trainarchive.store.local import LocalStore
    store, me = LocalStore(sys.argv[1]), sys.argv[2]
    print("ready", flush=True)
    sys.stdin.readline()
    print("".join("01"[store.put_if_absent(f"k/{n}/o", me.encode() * 5000)] for n in range(100)))
"""


def test_one_of_many_processes_wins(root: Path) -> None:
    """Of processes that put other bytes under the same keys, exactly one is told True for each."""
    workers = [_run(CONTEND, root, name) for name in "pqrs"]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    answers = [worker.communicate(timeout=60)[0].strip() for worker in workers]
    store = LocalStore(root)
    for number, won in enumerate(zip(*answers, strict=True)):
        assert sorted(won) == ["0", "0", "0", "1"]
        assert store.get(f"k/{number}/o") == b"pqrs"[won.index("1") :][:1] * 5000
    assert any("0" in answer and "1" in answer for answer in answers), "they never met"


KILLED_AT_EVERY_LINE = """
    import json, os, shutil, signal, sys
    from trainarchive.store.local import LocalStore
    from trainarchive.errors import NotFoundError

    root, old, new = sys.argv[1], b"old" * 999, b"new" * 1234
    act = {
        "put": lambda store: store.put("a/b/c", new),
        "put_if_absent": lambda store: store.put_if_absent("a/b/new", new),
        "delete": lambda store: store.delete("a/b/c"),
    }[sys.argv[2]]

    def kill_at(line):
        seen = 0
        def trace(frame, event, argument):
            nonlocal seen
            seen += event == "line"
            if seen == line:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace
        sys.settrace(trace)

    outcomes = []
    LocalStore(root + "-made").put("a/b/c", old)
    for line in range(1, 10_000):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(root + "-made", root)
        child = os.fork()
        if child == 0:
            store = LocalStore(root)
            kill_at(line)
            act(store)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        store = LocalStore(root)
        names = {info.key: store.get(info.key) == new and "new" or store.get(info.key) == old and "old" or "torn"
                 for info in store.list("")}
        act(store)
        after = {info.key: info.size for info in store.list("")}
        outcomes.append([status, names, after])
        if status == 0:
            break
    print(json.dumps(outcomes))
"""


@pytest.mark.parametrize(
    ("call", "before", "after", "repeated"),
    [
        ("put", {"a/b/c": "old"}, {"a/b/c": "new"}, {"a/b/c": 3702}),
        ("put_if_absent", {"a/b/c": "old"}, {"a/b/c": "old", "a/b/new": "new"}, {"a/b/c": 2997, "a/b/new": 3702}),
        ("delete", {"a/b/c": "old"}, {}, {}),
    ],
)
def test_killed_at_every_line(
    tmp_path: Path, call: str, before: dict[str, str], after: dict[str, str], repeated: dict[str, int]
) -> None:
    """A process killed anywhere in a call leaves all as before or as after it, and the next call succeeds."""
    memory = Path("/dev/shm")  # a kill leaves there what it leaves on a disk, without the wait for fsync
    with (
        tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as place,
        _run(KILLED_AT_EVERY_LINE, f"{place}/store", call) as driver,
    ):
        printed, _ = driver.communicate(timeout=100)
    outcomes = json.loads(printed)
    assert len(outcomes) > 15
    assert [status for status, _, _ in outcomes] == [signal.SIGKILL] * (len(outcomes) - 1) + [0]
    states = [names for _, names, _ in outcomes]
    turn = states.index(after)
    assert turn > 0
    assert states == [before] * turn + [after] * (len(states) - turn)
    assert all(left == repeated for _, _, left in outcomes)


WRITE_ON = """
    import hashlib, itertools, os, sys
    from trainarchive.store.local import LocalStore
    store = LocalStore(sys.argv[1])
    print("ready", flush=True)
    for turn in itertools.count():
        text = os.urandom(64) * (1 + turn % 7 * 4000)
        body = hashlib.sha256(text).digest() + text
        store.put(f"put/{turn % 5}/o", body)
        store.put_if_absent(f"absent/{os.getpid()}/{turn % 50}", body)
        store.delete(f"absent/{os.getpid()}/{(turn + 25) % 50}")
"""


def test_killed_at_random(root: Path) -> None:
    """Whatever moment a writer is killed at, every object that is there is whole."""
    chance = random.Random(7)  # noqa: S311 - moments, no secrets
    seen = 0
    for _ in range(8):
        with _run(WRITE_ON, root) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(chance.uniform(0.0, 0.08))
            writer.kill()
        assert writer.returncode == -signal.SIGKILL
        store = LocalStore(root)
        for info in store.list(""):
            body = store.get(info.key)
            assert len(body) == info.size
            assert _is_whole(body)
            seen += 1
    assert seen > 20


def _is_whole(body: bytes) -> bool:
    return hashlib.sha256(body[32:]).digest() == body[:32]
