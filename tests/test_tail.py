"""Following one open file, against a model and against a racing writer."""

import errno
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests_kernel import Refusing

from trainarchive.errors import UnavailableError
from trainarchive.frame import MAX_OFFSET, MAX_RAW, Framer
from trainarchive.tail import BUFFER_SIZE, GUARD, HEAD, SETTLE_NS, Ended, Fingerprint, Saved, Tail

sizes = st.one_of(
    st.integers(0, 200),
    st.sampled_from([1, GUARD - 1, GUARD, GUARD + 1, HEAD - 1, HEAD, HEAD + 1]),
    st.integers(3000, 6000),
    st.just(MAX_RAW + 5000),
)


@contextmanager
def tail_of(path: Path, flags: int = os.O_RDONLY) -> Iterator[Tail]:
    """Open and close a tail."""
    tail = Tail(os.open(path, flags))
    try:
        yield tail
    finally:
        tail.close()


def drain(tail: Tail) -> dict[int, bytes]:
    """Read until caught up; return the bytes by generation, checking that each block goes on where the last ended."""
    got: dict[int, bytearray] = {}
    at = (tail.generation, tail.offset)
    while block := tail.read():
        if block.generation == at[0]:
            assert block.offset == at[1]
        assert 0 < len(block.data) <= MAX_RAW
        got.setdefault(block.generation, bytearray()).extend(block.data)
        at = (block.generation, block.offset + len(block.data))
    return {generation: bytes(data) for generation, data in got.items()}


class Follow(RuleBasedStateMachine):
    """The model: the file's content, and for each generation what the log must hold."""

    @initialize()
    def begin(self) -> None:
        """Make an empty file with a writer and a tail."""
        self.directory = Path(tempfile.mkdtemp(prefix="tail"))
        self.path = self.directory / "log"
        self.writer = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        self.tail = Tail(os.dup(self.writer))
        self.random = random.Random(7)  # noqa: S311 - made-up log text
        self.content = bytearray()
        self.generation = self.offset = self.start = self.seen = self.sure = 0
        self.log: dict[int, bytearray] = {0: bytearray()}
        self.text = bytearray()  # all that was read of this generation, also what the log lost
        self.ended: list[Ended] = []
        self.states: list[Saved] = [self.tail.saved()]

    def teardown(self) -> None:
        """Close and remove everything."""
        if hasattr(self, "directory"):
            self.tail.close()
            os.close(self.writer)
            shutil.rmtree(self.directory)

    # -- the job ---------------------------------------------------------------------------

    def fresh(self, size: int, dull: bool) -> bytes:
        """Return text of that size: like no other, or like everything."""
        return b"." * size if dull else self.random.randbytes(size)

    @rule(size=sizes, dull=st.booleans())
    def append(self, size: int, dull: bool) -> None:
        """Write at the end."""
        data = self.fresh(size, dull)
        os.pwrite(self.writer, data, len(self.content))
        self.content += data

    @rule(size=sizes)
    def truncate(self, size: int) -> None:
        """Cut to a length, or lengthen by a hole."""
        os.ftruncate(self.writer, size)
        self.content = self.content[:size].ljust(size, b"\0")

    @rule(
        by=st.one_of(st.just(0), st.integers(-300, 300), st.integers(-6000, 6000)),
        keep=st.one_of(st.just(0), sizes),
        dull=st.booleans(),
        in_place=st.booleans(),
    )
    def rewrite(self, by: int, keep: int, dull: bool, in_place: bool) -> None:
        """Write everything anew at once: shorter, longer or as long, perhaps with the same first bytes."""
        size = max(0, len(self.content) + by)
        kept = bytes(self.content[: min(keep, size)])
        data = kept + self.fresh(size - len(kept), dull)
        if not in_place:
            os.ftruncate(self.writer, 0)
        os.pwrite(self.writer, data, 0)
        os.ftruncate(self.writer, size)
        self.content = bytearray(data)

    @rule()
    def rename(self) -> None:
        """Give the file another name."""
        if self.path.exists():
            self.path = self.path.rename(self.path.with_name(self.path.name + "1"))

    @rule()
    def unlink(self) -> None:
        """Take its name away."""
        self.path.unlink(missing_ok=True)
        self.poll()
        assert self.tail.unlinked

    # -- the collector ---------------------------------------------------------------------

    def end(self, reason: str, known: int, offset: int | None = None) -> None:
        """Begin the next generation in the model."""
        read = self.offset if offset is None else offset
        self.ended.append(Ended(self.generation, read, max(known, read), reason))
        self.generation += 1
        self.offset = self.start = self.seen = self.sure = 0
        self.log[self.generation] = bytearray()
        self.text = bytearray()

    def look(self) -> None:
        """One fstat in the model."""
        if len(self.content) < max(self.seen, self.offset):
            self.end("truncated", self.seen)
        self.seen = len(self.content)

    def same(self, read_to: int, start: int) -> bool:
        """Say whether start and guard are what this generation had: all that can be known."""
        guard = slice(max(0, read_to - GUARD), read_to)
        return self.content[:start] == self.text[:start] and self.content[guard] == self.text[guard]

    def step(self) -> bool:
        """Read one block in both, compare, and do what the log would do; False when caught up."""
        self.look()
        if not self.same(self.offset, self.start):
            self.end("rewritten", self.sure)
        self.sure = self.seen = len(self.content)
        block = self.tail.read()
        if block is None:
            assert self.offset == len(self.content)
            return False
        assert (block.generation, block.offset) == (self.generation, self.offset)
        end = self.offset + len(block.data)
        assert block.data == self.content[self.offset : end]
        assert end == min(len(self.content), self.offset + MAX_RAW)
        log = self.log[self.generation]
        assert block.offset <= len(log)
        log += block.data[len(log) - block.offset :]
        self.text[self.offset : end] = block.data
        self.offset = end
        self.start = max(self.start, min(HEAD, end))
        return True

    def settle(self) -> None:
        """Compare what is left, and save the state where it must be saved."""
        assert (self.tail.generation, self.tail.offset) == (self.generation, self.offset)
        assert self.tail.ended == self.ended
        assert self.tail.pending() == self.seen - self.offset
        assert self.tail.fingerprint.length == self.start
        newest = self.states[-1]
        if (newest.generation, newest.fingerprint) != (self.tail.generation, self.tail.fingerprint):
            self.states = [self.tail.saved(0)]

    @rule()
    def poll(self) -> None:
        """Look without reading."""
        self.look()
        self.tail.poll()
        self.settle()

    @rule()
    def read_one(self) -> None:
        """Read one block."""
        self.step()
        self.settle()

    @rule()
    def read_all(self) -> None:
        """Read until caught up; the log then has what the file has, unless a rewrite could not be noticed."""
        while self.step():
            pass
        self.settle()

    @rule(part=st.floats(0, 1))
    def seek_back(self, part: float) -> None:
        """Go back, as when the log lost its memory."""
        to = int(self.offset * part)
        generation = self.generation
        self.look()
        if generation == self.generation and not self.same(self.offset, self.start):
            self.end("rewritten", self.sure)
        if generation != self.generation:
            last = self.ended.pop()
            self.ended.append(Ended(last.generation, to, last.known_size, last.reason))
        else:
            self.offset = to
            del self.log[self.generation][to:]
            self.text[max(0, to - GUARD) : to] = self.content[max(0, to - GUARD) : to]
        assert self.tail.seek(to) == (generation == self.generation)
        self.settle()

    @rule(part=st.floats(0, 1))
    def save(self, part: float) -> None:
        """Save a state; what is sealed lags behind what is read."""
        self.states.append(self.tail.saved(int(self.offset * part)))

    @precondition(lambda self: self.states)
    @rule(data=st.data(), log_lives=st.booleans())
    def crash(self, data: st.DataObject, log_lives: bool) -> None:
        """Lose the tail and resume from any state that the rule about saving allows."""
        saved = data.draw(st.sampled_from(self.states))
        log = self.log[self.generation]
        committed = len(log) if log_lives else 0
        self.tail.close()
        self.tail = Tail.resume(os.dup(self.writer), saved)
        known = saved.known_size
        self.ended.clear()
        if len(self.content) < known:
            self.end("truncated", known, saved.offset)
        elif not (self.same(0, self.start) and self.content[: saved.read_to].endswith(saved.guard)):
            self.end("rewritten", known, saved.offset)
        else:
            self.offset, self.sure = saved.offset, known
            self.text[: saved.offset] = self.content[: saved.offset]
            log[: saved.offset] = self.text[: saved.offset]  # what is sealed is never lost
            del log[max(saved.offset, committed) :]
            if committed > saved.offset:
                self.seek_forward(committed)
        self.seen = len(self.content)
        self.tail.poll()
        self.settle()
        self.states = [self.tail.saved()]

    def seek_forward(self, committed: int) -> None:
        """Go to where the log stands, which may be further than the saved state knows."""
        there = len(self.content) >= committed
        assert self.tail.seek(committed) == there
        if there:
            self.offset = committed
            self.text[:committed] = self.content[:committed]  # unproven, as the module says of such a rewrite
        else:
            self.end("truncated", committed, committed)


TestFollow = Follow.TestCase
TestFollow.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


def test_requeue_to_the_same_inode_gives_a_new_generation_and_names_what_was_lost(tmp_path: Path) -> None:
    """Slurm truncates and writes again, longer at once; the unread end of the first attempt is a gap."""
    path = tmp_path / "slurm-1.out"
    path.write_bytes(b"attempt 0\n" * 10)
    with tail_of(path) as tail:
        assert drain(tail) == {0: b"attempt 0\n" * 10}
        with path.open("ab") as job:
            job.write(b"last words")
        assert tail.poll()
        assert tail.pending() == 10
        path.write_bytes(b"attempt 1\n")
        assert drain(tail) == {1: b"attempt 1\n"}
        path.write_bytes(b"attempt 2\n" * 50)
        assert drain(tail) == {2: b"attempt 2\n" * 50}
        assert tail.ended == [Ended(0, 100, 110, "truncated"), Ended(1, 10, 10, "rewritten")]


def test_empty_one_byte_and_sparse_files(tmp_path: Path) -> None:
    """Nothing gives None, a byte gives a byte, and a hole reads as zeros."""
    path = tmp_path / "log"
    path.touch()
    with tail_of(path) as tail:
        assert tail.read() is None
        path.write_bytes(b"x")
        assert drain(tail) == {0: b"x"}
        os.truncate(path, 3 * MAX_RAW)
        assert drain(tail) == {0: bytes(3 * MAX_RAW - 1)}
        assert tail.pending() == 0


def test_renamed_and_unlinked_files_are_read_to_their_end(tmp_path: Path) -> None:
    """Names mean nothing once the fd is held."""
    path = tmp_path / "log"
    with path.open("wb", buffering=0) as job, tail_of(path) as tail:
        job.write(b"one ")
        moved = path.rename(tmp_path / "log.1")
        assert drain(tail) == {0: b"one "}
        moved.unlink()
        job.write(b"two")
        assert drain(tail) == {0: b"two"}
        assert tail.unlinked


def test_tails_may_share_one_buffer(tmp_path: Path) -> None:
    """A thousand tails need one buffer; what a tail remembers is its own."""
    buffer = bytearray(BUFFER_SIZE)
    paths = [tmp_path / str(number) for number in range(3)]
    for path in paths:
        path.write_bytes(path.name.encode() * 1000)
    tails = [Tail(os.open(path, os.O_RDONLY), buffer=buffer) for path in paths]
    for round_number in range(3):
        for path, tail in zip(paths, tails, strict=True):
            block = tail.read()
            assert block is not None
            assert block.generation == 0
            assert bytes(block.data) == path.name.encode() * 1000
            assert block.offset == 1000 * round_number
            with path.open("ab") as job:
                job.write(path.name.encode() * 1000)
    for tail in tails:
        tail.close()
        tail.close()


def test_a_rewrite_within_one_clock_tick_is_noticed(tmp_path: Path) -> None:
    """Where size and ctime did not move although the content did, young files are compared by content."""
    path = tmp_path / "log"
    path.write_bytes(b"a" * 100)
    with tail_of(path) as tail:
        drain(tail)
        path.write_bytes(b"b" * 100)
        tail._changed_ns = path.stat().st_ctime_ns  # as a clock of 4 ms would have it
        assert drain(tail) == {1: b"b" * 100}


def test_an_old_quiet_file_costs_one_look(tmp_path: Path) -> None:
    """Once settled, an idle poll has nothing to do."""
    path = tmp_path / "log"
    path.write_bytes(b"a" * 100)
    with tail_of(path) as tail:
        drain(tail)
        deadline = time.monotonic() + 10
        while tail.poll():
            assert tail.read() is None
            assert time.monotonic() < deadline
        assert time.monotonic_ns() - tail._seen_ns > SETTLE_NS


def test_an_error_of_the_kernel_is_unavailable_and_moves_nothing(tmp_path: Path) -> None:
    """A file that does not read may be tried again; reading is refused here because the fd only writes."""
    path = tmp_path / "log"
    path.write_bytes(b"a" * 100)
    with tail_of(path, os.O_WRONLY) as tail:
        for _ in range(2):
            with pytest.raises(UnavailableError, match="Bad file descriptor"):
                tail.read()
        assert (tail.generation, tail.offset, tail.ended) == (0, 0, [])
        with pytest.raises(UnavailableError):
            tail.seek(50)
        saved = tail.saved()
    fd = os.open(path, os.O_WRONLY)
    with pytest.raises(UnavailableError):
        Tail.resume(fd, Saved(saved.identity, saved.fingerprint, 0, 70, 70, b"a" * GUARD, 100))
    os.close(fd)
    with pytest.raises(UnavailableError):
        tail.poll()


def life_of(path: Path) -> None:
    """Read a file, find it rewritten, go back, and resume."""
    path.write_bytes(b"a" * 5000)
    tail = Tail(os.open(path, os.O_RDONLY))
    try:
        assert tail.read() is not None
        path.write_bytes(b"b" * 100)
        while tail.read():
            pass
        assert tail.seek(50)
        resumed = Tail.resume(tail.fileno(), tail.saved())
        assert resumed.offset == 50
        assert resumed.seek(80)
    finally:
        tail.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_an_error_at_any_call_is_unavailable(tmp_path: Path, number: int) -> None:
    """Whichever call the kernel refuses, only an UnavailableError comes out."""
    for at in range(1, 100):
        told: UnavailableError | None = None
        kernel = Refusing(("fstat", "pread", "preadv"), at, number)
        with kernel:
            try:
                life_of(tmp_path / "log")
            except UnavailableError as error:
                told = error
        if not kernel.reached:
            break
        assert told is not None
        assert os.strerror(number) in told.what
    assert at > 12


def test_the_state_and_the_identity_ask_nobody(tmp_path: Path) -> None:
    """A file server that is gone must not keep the state from being saved."""
    path = tmp_path / "log"
    path.write_bytes(b"a" * 100)
    tail = Tail(os.open(path, os.O_RDONLY))
    drain(tail)
    before = tail.saved()
    tail.close()  # from now on the kernel answers EBADF
    assert tail.saved() == before
    assert tail.identity == before.identity


def test_a_file_larger_than_offsets_can_be_is_read_as_far_as_they_go() -> None:
    """What lies beyond MAX_OFFSET counts as not there: no block, size or end is beyond it, and a flag tells."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # tmpfs: other file systems end at some TiB
        path = Path(folder) / "log"
        path.write_bytes(b"hello\n")
        with tail_of(path) as tail:
            assert drain(tail) == {0: b"hello\n"}
            os.truncate(path, 2**60)
            assert tail.poll()
            assert (tail.too_large, tail.pending()) == (True, MAX_OFFSET - 6)
            assert tail.seek(MAX_OFFSET - 10)
            block = tail.read()
            assert block is not None
            assert (block.offset, len(block.data)) == (MAX_OFFSET - 10, 10)
            assert Framer().frame(block.offset, block.data, block.wall_ns, block.mono_ns).end == MAX_OFFSET
            assert tail.read() is None
            saved = tail.saved()
            assert saved.known_size == MAX_OFFSET
            resumed = Tail.resume(os.dup(tail.fileno()), saved)
            assert (resumed.generation, resumed.read()) == (0, None)
            resumed.close()
            os.truncate(path, 0)
            path.write_bytes(b"again\n")
            assert drain(tail) == {1: b"again\n"}
            assert tail.ended == [Ended(0, MAX_OFFSET, MAX_OFFSET, "truncated")]
            assert not tail.too_large


def test_resume_with_another_file_begins_a_generation(tmp_path: Path) -> None:
    """An inode that is not the saved one is never continued, whatever it holds."""
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        path.write_bytes(b"the same" * 100)
    with tail_of(one) as tail:
        drain(tail)
        saved = tail.saved(300)
        assert saved.identity.birth_ns >= 0
    resumed = Tail.resume(os.open(two, os.O_RDONLY), saved)
    assert resumed.ended == [Ended(0, 300, 800, "replaced")]
    assert drain(resumed) == {1: b"the same" * 100}
    resumed.close()


def test_a_file_shorter_than_what_was_committed_is_not_continued(tmp_path: Path) -> None:
    """The saved state may lag behind the log; a forward seek tells what it cannot know."""
    path = tmp_path / "log"
    path.write_bytes(b"x" * 10_000)
    with tail_of(path) as tail:
        drain(tail)
        saved = tail.saved()
    resumed = Tail.resume(os.open(path, os.O_RDONLY), saved)
    assert resumed.generation == 0
    assert not resumed.seek(12_000)
    assert resumed.ended == [Ended(0, 12_000, 12_000, "truncated")]
    assert drain(resumed) == {1: b"x" * 10_000}
    resumed.close()


def test_seek_refuses_a_negative_offset_and_skips_forward(tmp_path: Path) -> None:
    """Forward within the file is allowed: others know that the bytes between were delivered."""
    path = tmp_path / "log"
    path.write_bytes(bytes(range(250)) * 4)
    with tail_of(path) as tail:
        with pytest.raises(ValueError, match="-1"):
            tail.seek(-1)
        assert tail.seek(900)
        assert drain(tail) == {0: (bytes(range(250)) * 4)[900:]}


def test_no_byte_comes_under_a_wrong_generation_while_a_job_rewrites(tmp_path: Path) -> None:
    """A writer truncates and writes again as fast as it can; each generation holds one writing's bytes only."""
    path = tmp_path / "log"
    path.touch()
    stop = threading.Event()

    def job() -> None:
        fd = os.open(path, os.O_WRONLY)
        letter = 0
        while not stop.is_set():
            letter = (letter + 1) % 26
            os.ftruncate(fd, 0)
            for piece in range(letter % 5 + 1):
                os.pwrite(fd, bytes([65 + letter]) * 3000, piece * 3000)
        os.close(fd)

    writer = threading.Thread(target=job)
    writer.start()
    letters: dict[int, set[int]] = {}
    try:
        with tail_of(path) as tail:
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                block = tail.read()
                if block is not None:
                    letters.setdefault(block.generation, set()).update(bytes(block.data))
    finally:
        stop.set()
        writer.join()
    assert len(letters) > 20
    assert {len(found) for found in letters.values()} == {1}


@pytest.mark.parametrize("moment", ["before preadv", "after preadv", "before pread", "after pread"])
@pytest.mark.parametrize("size", [50, 99, 100, 101, 250, 9000])
@pytest.mark.parametrize("read_before", [0, 100])
def test_a_rewrite_at_any_moment_of_a_read_is_not_mixed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, size: int, read_before: int
) -> None:
    """The job's rewrite is put between the reader's own system calls: what is delivered is all old or all new."""
    path = tmp_path / "log"
    path.write_bytes(b"a" * read_before)
    with tail_of(path) as tail:
        got = drain(tail)
        path.write_bytes(b"a" * 200)
        when, name = moment.split()
        real = getattr(os, name)

        def call(*arguments: object) -> object:
            monkeypatch.setattr(os, name, real)
            if when == "before":
                path.write_bytes(b"b" * size)
            answer = real(*arguments)
            if when == "after":
                path.write_bytes(b"b" * size)
            return answer

        monkeypatch.setattr(os, name, call)
        block = tail.read()
        monkeypatch.setattr(os, name, real)
        if block is not None:
            got[block.generation] = got.get(block.generation, b"") + bytes(block.data)
            now = got[block.generation][:HEAD]
            assert tail.fingerprint.length == len(now)
            assert tail.fingerprint == _start_of(tmp_path / "copy", now)
        for generation, data in drain(tail).items():
            got[generation] = got.get(generation, b"") + data
    assert [set(data) for data in got.values() if data] in ([{97}, {98}], [{98}])
    assert max(got) == len(tail.ended) <= 1
    assert got[max(got)] == b"b" * size


def _start_of(path: Path, data: bytes) -> Fingerprint:
    """Return what a tail makes of these first bytes."""
    path.write_bytes(data)
    with tail_of(path) as tail:
        drain(tail)
        return tail.fingerprint
