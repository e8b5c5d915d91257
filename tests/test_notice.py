"""Notices: a whole one is read to the last byte, anything else is refused with its reason."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainarchive import notice
from trainarchive.errors import TrainarchiveError
from trainarchive.notice import decode, encode, read_notice, waiting
from trainarchive.run import RunKey

PROLOG: Mapping[str, bytes] = {
    "TRAINARCHIVE_EVENT": b"prolog",
    "TRAINARCHIVE_DIR": b"/var/spool/trainarchive/jobs/77.1",
    "SLURM_JOB_ID": b"77",
    "SLURM_JOB_RESTART_COUNT": b"1",
    "SLURM_CLUSTER_NAME": b"lab",
    "SLURMD_NODENAME": b"n1",
    "SLURM_JOB_UID": b"1000",
    "SLURM_JOB_USER": b"ada",
    "SLURM_JOB_GID": b"100",
    "SLURM_JOB_NODELIST": b"n[1-4]",
    "SLURM_JOB_NUM_NODES": b"4",
    "SLURM_JOB_PARTITION": b"gpu",
    "SLURM_JOB_WORK_DIR": b"/home/ada/run",
}
EPILOG: Mapping[str, bytes] = {
    **PROLOG,
    "TRAINARCHIVE_EVENT": b"epilog",
    "SLURM_JOB_EXIT_CODE": b"139",
    "SLURM_JOB_EXIT_CODE2": b"0:11",
    "SLURM_JOB_DERIVED_EC": b"253",
}
records = st.dictionaries(
    st.from_regex(r"[A-Z_][A-Z0-9_]{0,12}", fullmatch=True), st.binary(max_size=40).map(lambda v: v.replace(b"\0", b""))
).filter(lambda values: values.get("TRAINARCHIVE_END") != b"1")


def _leave(spool: Path, data: bytes, name: str = "prolog.77.1-5-6", mtime: float = 1_700_000_000.25) -> Path:
    path = spool / "notices" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (mtime, mtime))
    return path


def _changed(**changes: bytes) -> bytes:
    return encode({**PROLOG, **changes})


@given(records)
@example({"SLURM_JOB_COMMENT": b"TRAINARCHIVE_END=1", "SLURM_JOB_USER": b"a=b\n'\"$(id)\xff"})
def test_any_values_come_back(values: dict[str, bytes]) -> None:
    """What the format holds, it gives back."""
    assert decode(encode(values)) == values


@given(records, st.data())
@example({"SLURM_JOB_COMMENT": b"TRAINARCHIVE_END=1", "SLURM_JOB_USER": b""}, None)
def test_any_truncation_is_refused(values: dict[str, bytes], data: st.DataObject | None) -> None:
    """However little is missing from the end, nobody takes the rest for a notice."""
    whole = encode(values)
    sizes = range(len(whole)) if data is None else [data.draw(st.integers(0, len(whole) - 1))]
    for size in sizes:
        with pytest.raises(TrainarchiveError, match="torn"):
            decode(whole[:size])


@pytest.mark.parametrize(
    "data",
    [
        b"A=1\0\0TRAINARCHIVE_END=1\0",
        b"A\0TRAINARCHIVE_END=1\0",
        b"a=1\0TRAINARCHIVE_END=1\0",
        b"A=1\0A=2\0TRAINARCHIVE_END=1\0",
        b"TRAINARCHIVE_END=1\0A=1\0TRAINARCHIVE_END=1\0",
    ],
)
def test_what_no_hook_writes_is_refused(data: bytes) -> None:
    """Nameless, odd and doubled records: somebody else wrote that."""
    with pytest.raises(TrainarchiveError, match="not a notice"):
        decode(data)


@pytest.mark.parametrize("values", [{"A": b"\0"}, {"a": b""}, {"A=B": b""}, {"TRAINARCHIVE_END": b"1"}, {"A\n": b""}])
def test_what_the_format_cannot_hold_is_not_written(values: dict[str, bytes]) -> None:
    """Better no notice than one that reads as another."""
    with pytest.raises(ValueError, match="no record"):
        encode(values)


def test_a_prolog_is_read(tmp_path: Path) -> None:
    """All that the run needs to begin; 22.05 has no SLUID, so the time tells it from its namesakes."""
    path = _leave(tmp_path, encode(PROLOG))
    read = read_notice(path)
    assert (read.event, read.run, read.node, read.path) == ("prolog", RunKey("lab", 77, 1), "n1", path)
    assert (read.token, read.time) == ("t1700000000", 1_700_000_000.25)
    assert read.lane.name == "lab/77.1/t1700000000/n1"
    job = read.job
    assert (job.uid, job.user, job.gid, job.nodes, job.num_nodes) == (1000, "ada", 100, "n[1-4]", 4)
    assert (job.partition, job.work_dir, job.private_dir) == (
        "gpu",
        "/home/ada/run",
        PROLOG["TRAINARCHIVE_DIR"].decode(),
    )
    assert (job.started, job.ended, job.exit_code) == (1_700_000_000.25, 0.0, "")


def test_an_epilog_is_read(tmp_path: Path) -> None:
    """Slurm's hooks show wait statuses; people and sacct read code:signal (253: killed for memory)."""
    job = read_notice(_leave(tmp_path, encode(EPILOG))).job
    assert (job.started, job.ended, job.exit_code, job.derived_exit_code) == (0.0, 1_700_000_000.25, "0:11", "0:125")
    no_code2 = {name: value for name, value in EPILOG.items() if name != "SLURM_JOB_EXIT_CODE2"}
    read = read_notice(_leave(tmp_path, encode({**no_code2, "SLURM_JOB_EXIT_CODE": b"768"})))
    assert read.job.exit_code == "3:0"


def test_what_2511_adds(tmp_path: Path) -> None:
    """The SLUID is the token, whatever the clock says; the start is told even where no prolog was."""
    more = {"SLURM_JOB_SLUID": b"s1HB8K4QW0XT00", "SLURM_JOB_START_TIME": b"1699999000"}
    read = read_notice(_leave(tmp_path, encode({**EPILOG, **more})))
    assert (read.token, read.job.sluid, read.job.started) == ("s1HB8K4QW0XT00", "s1HB8K4QW0XT00", 1_699_999_000.0)


@pytest.mark.parametrize(
    ("changes", "token"),
    [({"SLURM_JOB_SLUID": b""}, "t5"), ({"SLURM_JOB_SLUID": b"../x"}, "t5"), ({"SLURM_JOB_SLUID": b"s1\n"}, "t5")],
)
def test_an_odd_sluid_is_not_a_token(tmp_path: Path, changes: dict[str, bytes], token: str) -> None:
    """Tokens become parts of keys."""
    assert read_notice(_leave(tmp_path, _changed(**changes), mtime=5.9)).token == token


@pytest.mark.parametrize("mtime", [-5.5, 0.0, 5e9])
def test_an_odd_clock(tmp_path: Path, mtime: float) -> None:
    """A node that thinks it is 1969 or 2128 still has its logs archived."""
    read = read_notice(_leave(tmp_path, encode(PROLOG), mtime=mtime))
    assert (read.time, read.token) == (mtime, f"t{max(int(mtime), 0)}")


def test_hostile_values_are_only_text(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 become text that JSON can hold; nothing else is touched."""
    path = _leave(
        tmp_path, _changed(SLURM_JOB_COMMENT=b"\xff\n'\"$(id)=\xc3\xa9", SLURM_JOB_WORK_DIR=b"/h/\xed\xa0\x80")
    )
    job = read_notice(path).job
    assert (job.comment, job.work_dir) == ("\\xff\n'\"$(id)=é", "/h/\\xed\\xa0\\x80")
    assert msgspec.json.decode(msgspec.json.encode(job), type=type(job)) == job


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"SLURM_JOB_ID": b""}, "job id is ''"),
        ({"SLURM_JOB_ID": b"../x"}, "job id is '../x'"),
        ({"SLURM_JOB_ID": b"77\n"}, "job id is"),
        ({"SLURM_JOB_ID": b"0"}, "job id is '0'"),
        ({"SLURM_JOB_ID": b"-7"}, "job id is '-7'"),
        ({"SLURM_JOB_ID": b"\xd9\xa7"}, "job id is"),
        ({"SLURM_JOB_ID": b"9" * 11}, "job id is"),
        ({"SLURM_JOB_UID": b""}, "user id is ''"),
        ({"SLURM_JOB_UID": b"root"}, "user id is 'root'"),
        ({"SLURM_JOB_UID": b"4294967295"}, "user id is"),
        ({"SLURM_CLUSTER_NAME": b""}, "not a cluster's name"),
        ({"SLURM_CLUSTER_NAME": b"a/b"}, "not a cluster's name"),
        ({"SLURMD_NODENAME": b".."}, "characters that keys cannot hold"),
        ({"TRAINARCHIVE_EVENT": b"resume"}, "'resume', which is neither"),
    ],
)
def test_a_notice_that_names_no_run_is_refused(tmp_path: Path, changes: dict[str, bytes], says: str) -> None:
    """Above all, a missing user id is never taken for root's."""
    path = _leave(tmp_path, _changed(**changes))
    with pytest.raises(TrainarchiveError, match=says) as caught:
        read_notice(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("count", [b"", b"x", b"-1", b"1.5", b"9" * 11])
def test_an_odd_restart_count_is_the_first_run(tmp_path: Path, count: bytes) -> None:
    """Slurm leaves it out for a first run."""
    assert read_notice(_leave(tmp_path, _changed(SLURM_JOB_RESTART_COUNT=count))).run.attempt == 0


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """Links, FIFOs, sockets and directories are refused, and none of them holds the reader up."""
    real = _leave(tmp_path, encode(PROLOG))
    notices = real.parent
    (notices / "link").symlink_to(real)
    os.mkfifo(notices / "fifo")
    (notices / "directory").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(notices / "socket"))
        for name in ("link", "fifo", "directory", "socket", "absent"):
            with pytest.raises(TrainarchiveError, match=name):
                read_notice(notices / name)


def test_torn_and_oversize_files_are_refused(tmp_path: Path) -> None:
    """The limit is exact: one byte more is too much."""
    for data in (b"", encode(PROLOG)[:-1], encode(PROLOG) + b"x"):
        with pytest.raises(TrainarchiveError, match="torn"):
            read_notice(_leave(tmp_path, data))
    room = notice.MAX_SIZE - len(_changed(SLURM_JOB_COMMENT=b""))
    assert len(read_notice(_leave(tmp_path, _changed(SLURM_JOB_COMMENT=b"x" * room))).job.comment) == room
    with pytest.raises(TrainarchiveError, match="larger than 1048576 bytes"):
        read_notice(_leave(tmp_path, _changed(SLURM_JOB_COMMENT=b"x" * (room + 1))))


def test_another_users_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only who runs the collector can have written a notice."""
    path = _leave(tmp_path, encode(PROLOG))
    if os.geteuid() == 0:
        os.chown(path, 12_345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(TrainarchiveError, match="the notice belongs to uid"):
        read_notice(path)


def test_waiting_is_in_order_of_time(tmp_path: Path) -> None:
    """Oldest first, names where times are equal; neither half-written nor set aside."""
    assert waiting(tmp_path) == []
    for name, mtime in (("c", 3.0), ("b", 1.0), ("a", 1.0), (".tmp-d", 0.0), ("z", 2.0)):
        _leave(tmp_path, b"x", name, mtime)
    (tmp_path / "notices" / "link").symlink_to("nowhere")
    moved = notice.set_aside(tmp_path / "notices" / "z")
    assert [path.name for path in waiting(tmp_path)] == ["a", "b", "c", "link"]
    assert moved == tmp_path / "notices" / "bad" / "z"


def test_a_spool_that_is_none_is_an_error(tmp_path: Path) -> None:
    """A file in the directory's place is told, not taken for an empty spool."""
    (tmp_path / "notices").write_bytes(b"")
    with pytest.raises(TrainarchiveError, match="the spool cannot be read: Not a directory"):
        waiting(tmp_path)


def test_set_aside_keeps_all(tmp_path: Path) -> None:
    """Two bad notices of one name are both there afterwards; one that is gone is no error."""
    for content in (b"1", b"2", b"3"):
        notice.set_aside(_leave(tmp_path, content, "x"))
    bad = tmp_path / "notices" / "bad"
    assert sorted(path.read_bytes() for path in bad.iterdir()) == [b"1", b"2", b"3"]
    assert notice.set_aside(tmp_path / "notices" / "x") is None


def test_sweep_removes_what_killed_hooks_left(tmp_path: Path) -> None:
    """Only old, half-written files go."""
    for name, mtime in ((".tmp-old", 5.0), (".tmp-new", 50.0), ("prolog.1.0-1-1", 5.0)):
        _leave(tmp_path, b"x", name, mtime)
    notice.sweep(tmp_path, before=10.0)
    assert {path.name for path in (tmp_path / "notices").iterdir()} == {".tmp-new", "prolog.1.0-1-1"}
