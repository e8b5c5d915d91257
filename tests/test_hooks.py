"""Slurm's hooks, run as slurmd and slurmstepd run them: whatever is wrong, exit 0, in time, and no half notices."""

import os
import random
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trainarchive.notice import decode, read_notice, waiting
from trainarchive.places import shipped
from trainarchive.private import sluid_of
from trainarchive.run import RunKey

LIMIT_S = 2.0
NOBODY = 65_534
AS_ROOT = os.geteuid() == 0
UID, GID = (4_242, 4_343) if AS_ROOT else (os.geteuid(), os.getegid())
SHELLS = sorted({os.path.realpath(found) for name in ("sh", "dash", "bash") if (found := shutil.which(name))})

SLURM_2205: Mapping[str, str] = {
    "SLURMD_NODENAME": "n1",
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SLURM_JOBID": "77",
    "SLURM_JOB_COMMENT": "third try",
    "SLURM_JOB_CPUS_PER_NODE": "4",
    "SLURM_JOB_GID": str(GID),
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NTASKS": "8",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_RESTART_COUNT": "1",
    "SLURM_JOB_STDIN": "/dev/null",
    "SLURM_JOB_UID": str(UID),
    "SLURM_JOB_USER": "ada",
    "SLURM_JOB_WORK_DIR": "/home/ada/run",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_UID": str(UID),
}
SLURM_2511: Mapping[str, str] = {
    **SLURM_2205,
    "SLURM_JOB_ACCOUNT": "vision",
    "SLURM_JOB_END_TIME": "1700003600",
    "SLURM_JOB_EXTRA": "",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_SLUID": "s1HB8K4QW0XT00",
    "SLURM_JOB_START_TIME": "1700000000",
    "SLURM_JOB_STDERR": "slurm-%j.out",
    "SLURM_JOB_STDOUT": "slurm-%j.out",
}
ENDED: Mapping[str, str] = {"SLURM_JOB_EXIT_CODE": "768", "SLURM_JOB_EXIT_CODE2": "3:0", "SLURM_JOB_DERIVED_EC": "253"}


class Site(msgspec.Struct, frozen=True):
    """A node with a spool of its own; ``uid`` is whom its hooks run as, where that is not us."""

    root: Path
    shell: str = SHELLS[0]
    uid: int | None = None

    @property
    def spool(self) -> Path:
        """The node's spool."""
        return self.root / "spool"

    def environ(self, more: Mapping[str, str | bytes]) -> dict[bytes, bytes]:
        """Return a hook's environment: Slurm's variables, no PATH, and no site file that this host may have."""
        ours = {"TRAINARCHIVE_SPOOL": str(self.spool), "TRAINARCHIVE_HOOKS_CONF": str(self.root / "hooks.conf")}
        return {os.fsencode(name): os.fsencode(value) for name, value in {**ours, **more}.items()}

    def start(self, script: str, more: Mapping[str, str | bytes], *, before: str = "") -> subprocess.Popen[bytes]:
        """Start a script's text, ``before`` first."""
        command = [self.shell, "-c", before + script]
        owner: dict[str, Any] = {} if self.uid is None else {"user": self.uid, "group": self.uid, "extra_groups": []}
        started: subprocess.Popen[bytes] = subprocess.Popen(
            command,
            env=self.environ(more),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            **owner,
        )
        return started

    def run(self, hook: str, more: Mapping[str, str | bytes] = SLURM_2205, *, before: str = "") -> bytes:
        """Run one hook; assert what is promised of every call, and return what it printed."""
        return self.run_text(text_of(hook), more, before=before, allowed_s=LIMIT_S)

    def run_text(
        self, script: str, more: Mapping[str, str | bytes], *, before: str = "", allowed_s: float = LIMIT_S
    ) -> bytes:
        """Run a script's text, as ``run`` does."""
        started = time.monotonic()
        with self.start(script, more, before=before) as process:
            printed, complaints = process.communicate(timeout=30)
        assert time.monotonic() - started < allowed_s
        assert process.returncode == 0
        assert complaints == b""
        assert_nobody_left(process.pid)
        return printed

    def notices(self) -> list[dict[str, bytes]]:
        """Return the records of all notices, oldest first; none may be torn, and nothing half-written stays."""
        paths = waiting(self.spool)
        assert [path.name for path in self.spool.glob("notices/.*")] == []
        return [decode(path.read_bytes()) for path in paths]

    def remade(self, mode: int) -> Path:
        """Make the spool anew."""
        shutil.rmtree(self.spool)
        self.spool.mkdir()
        self.spool.chmod(mode)
        return self.spool


def text_of(hook: str) -> str:
    """Return a shipped hook's text."""
    return shipped(f"slurm/{hook}.d/50-trainarchive.sh").read_text()


def assert_nobody_left(session: int) -> None:
    """Wait, briefly, until no process of that session is there: killed ones need a moment to vanish."""
    deadline = time.monotonic() + 1
    while (left := _processes_of(session)) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert left == []


def _processes_of(session: int) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            line = path.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, its_session = line.rpartition(")")[2].split()[:4]
        if its_session == str(session) and state not in "ZX":  # dead ones wait for their parent only
            found.append(line)
    return found


@pytest.fixture
def open_tmp() -> Iterator[Path]:
    """A directory that every user can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(params=SHELLS)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    """A node with a good spool, once for each shell that may be a site's /bin/sh."""
    made = Site(tmp_path, request.param)
    made.spool.mkdir()
    made.spool.chmod(0o711)
    return made


@pytest.fixture
def one(tmp_path: Path) -> Site:
    """A node with a good spool and this host's sh."""
    made = Site(tmp_path, os.path.realpath(shutil.which("sh") or "/bin/sh"))
    made.spool.mkdir()
    made.spool.chmod(0o711)
    return made


@pytest.fixture
def unprivileged(open_tmp: Path) -> Site:
    """A node whose hooks do not run as root: the kernel holds them to modes and owners."""
    made = Site(open_tmp, os.path.realpath(shutil.which("sh") or "/bin/sh"), NOBODY if AS_ROOT else None)
    made.spool.mkdir()
    if AS_ROOT:
        os.chown(made.spool, NOBODY, NOBODY)
    made.spool.chmod(0o711)
    return made


BOTH = pytest.mark.parametrize("hook", ["prolog", "epilog"])


# -- what they leave -----------------------------------------------------------------------------


@pytest.mark.parametrize("slurm", [SLURM_2205, SLURM_2511])
def test_prolog_tells_of_the_job(site: Site, slurm: Mapping[str, str]) -> None:
    """Either Slurm's variables make a notice that the collector can read, and a private directory."""
    assert site.run("prolog", slurm) == b""
    (path,) = waiting(site.spool)
    assert re.fullmatch(r"prolog\.77\.1-\d+-\d+", path.name)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    read = read_notice(path)
    assert (read.event, read.run, read.node) == ("prolog", RunKey("lab", 77, 1), "n1")
    job = read.job
    assert (job.uid, job.gid, job.user, job.nodes, job.num_nodes) == (UID, GID, "ada", "n[1-2]", 2)
    assert (job.partition, job.work_dir, job.comment) == ("gpu", "/home/ada/run", "third try")
    assert abs(read.time - time.time()) < 60
    assert job.sluid == slurm.get("SLURM_JOB_SLUID", "")
    assert job.stdout == slurm.get("SLURM_JOB_STDOUT", "")
    private = site.spool / "jobs" / "77.1"
    assert job.private_dir == str(private)
    found = private.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o700, UID, GID)
    assert stat.S_IMODE((site.spool / "notices").stat().st_mode) & 0o777 == 0o700
    assert stat.S_IMODE((site.spool / "jobs").stat().st_mode) & 0o777 == 0o711


@pytest.mark.parametrize("slurm", [SLURM_2205, SLURM_2511])
def test_epilog_tells_of_the_end(site: Site, slurm: Mapping[str, str]) -> None:
    """With exit codes as people know them; it makes no private directory."""
    assert site.run("epilog", {**slurm, **ENDED}) == b""
    (path,) = waiting(site.spool)
    read = read_notice(path)
    assert (read.event, read.run) == ("epilog", RunKey("lab", 77, 1))
    assert (read.job.exit_code, read.job.derived_exit_code) == ("3:0", "0:125")
    assert list((site.spool / "jobs").iterdir()) == []


def test_only_the_user_id_that_slurm_always_gives(one: Site) -> None:
    """SLURM_UID, SLURM_JOBID and SLURM_NODELIST stand in; without a restart count it is the first run."""
    names = ("SLURMD_NODENAME", "SLURM_CLUSTER_NAME", "SLURM_JOBID", "SLURM_UID", "SLURM_NODELIST")
    one.run("prolog", {name: SLURM_2205[name] for name in names})
    (path,) = waiting(one.spool)
    read = read_notice(path)
    assert (read.run, read.job.uid, read.job.nodes) == (RunKey("lab", 77, 0), UID, "n[1-2]")
    assert (one.spool / "jobs" / "77.0").stat().st_uid == UID


@BOTH
def test_hostile_values_arrive_as_they_are(site: Site, hook: str) -> None:
    """Newlines, quotes, substitutions, formats, bytes that are not UTF-8, 100 KB: bytes in, bytes out, nothing run."""
    hostile = b"a\n'\"`touch /tmp/x`$(touch /tmp/x)\\n%s%n\\0\xff\xfe\x01;=*" + b"x" * 100_000
    names = ("COMMENT", "WORK_DIR", "PARTITION", "STDOUT", "USER", "NODELIST")
    site.run(hook, {**SLURM_2205, **{f"SLURM_JOB_{name}": hostile for name in names}})
    (records,) = site.notices()
    assert [records[f"SLURM_JOB_{name}"] for name in names] == [hostile] * len(names)


@BOTH
def test_called_twice_both_are_kept(site: Site, hook: str) -> None:
    """Slurm may run a hook again; the directory that the job already fills stays as it is."""
    site.run(hook)
    kept = site.spool / "jobs" / "77.1" / "nccl.n1.5.log"
    if hook == "prolog":
        kept.write_bytes(b"x")
    site.run(hook)
    assert len(site.notices()) == 2
    assert [path.name for path in (site.spool / "jobs").glob("*")] == (["77.1"] if hook == "prolog" else [])
    assert hook == "epilog" or kept.read_bytes() == b"x"


@pytest.mark.skipif(not AS_ROOT, reason="only root's hooks give directories away")
@pytest.mark.parametrize("owner", [0, 999])
def test_a_directory_of_another_is_put_aside(one: Site, owner: int) -> None:
    """Job ids come back, and a killed Prolog leaves root's: the job gets an empty one of its own."""
    old = one.spool / "jobs" / "77.1"
    old.mkdir(parents=True)
    old.parent.chmod(0o711)
    (old / "secret").write_bytes(b"x")
    os.chown(old, owner, owner)
    one.run("prolog")
    assert (old.stat().st_uid, list(old.iterdir())) == (UID, [])
    (aside,) = (path for path in old.parent.iterdir() if path != old)
    assert (aside.stat().st_uid, (aside / "secret").read_bytes()) == (owner, b"x")


def test_two_runs_of_one_key_never_share_a_directory(site: Site) -> None:
    """The same user, job id and restart count, but another SLUID: the earlier run's files are moved aside."""
    first, second = ({**SLURM_2511, "SLURM_JOB_SLUID": sluid} for sluid in ("sAAA", "sBBB"))
    place = site.spool / "jobs" / "77.1"
    for number in range(3):  # Slurm may call it twice for one run
        site.run("prolog", first)
        (place / f"{number}.log").write_bytes(b"first")
        assert sluid_of(place) == "sAAA"
    site.run("prolog", second)
    assert (list(place.iterdir()), sluid_of(place)) == ([], "sBBB")
    (aside,) = place.parent.glob("77.1~*")
    assert sorted(path.name for path in aside.iterdir()) == ["0.log", "1.log", "2.log"]
    aside.rename(place.with_name("kept"))
    site.run("prolog", SLURM_2205)  # unknown whose: only the user counts
    assert list(place.parent.glob("77.1~*")) == []


def test_a_mark_of_an_earlier_run_says_nothing_of_a_later_directory(one: Site) -> None:
    """The directory was deleted, its mark stayed: the next run's mark is its own, also where it has no SLUID."""
    one.run("prolog", {**SLURM_2511, "SLURM_JOB_SLUID": "sAAA"})
    place = one.spool / "jobs" / "77.1"
    for more, mark in ((SLURM_2205, ""), ({**SLURM_2511, "SLURM_JOB_SLUID": "sBBB"}, "sBBB"), (SLURM_2205, "")):
        place.rmdir()
        one.run("prolog", more)
        assert sluid_of(place) == mark
    place.rmdir()
    one.run("prolog", {**SLURM_2511, "SLURM_JOB_SLUID": "s\n../x $(id)"})
    assert sluid_of(place) == ""


# -- what must not matter ------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "job_id", ["", "../x", "77 78", "77;id", "77\n78", "*", "0", "-77", "077", "9" * 11, "$(id)", b"7\xff", "/etc/x"]
)
def test_an_odd_job_id_leaves_nothing(one: Site, hook: str, job_id: str | bytes) -> None:
    """What names no job could name a file elsewhere."""
    one.run(hook, {**SLURM_2205, "SLURM_JOB_ID": job_id, "SLURM_JOBID": ""})
    assert list(one.root.rglob("*")) == [one.spool]


def test_odd_numbers_do_no_harm(one: Site) -> None:
    """Restart counts and ids that are none become no part of names and commands."""
    one.run("prolog", {**SLURM_2205, "SLURM_JOB_RESTART_COUNT": "../1", "SLURM_JOB_GID": "1:2", "SLURM_JOB_UID": "0x"})
    assert {path.name for path in one.spool.rglob("*") if path.is_dir()} == {"notices", "jobs"}
    (records,) = one.notices()
    assert records["SLURM_JOB_RESTART_COUNT"] == b"0"


@BOTH
def test_an_empty_environment(site: Site, hook: str) -> None:
    """Not even a job id."""
    assert site.run(hook, {}) == b""
    assert list(site.spool.iterdir()) == []


@BOTH
def test_a_misleading_environment(site: Site, hook: str) -> None:
    """TMPDIR gone, a PATH without commands, variables that change how shells work."""
    odd = {
        "TMPDIR": "/nonexistent",
        "PATH": "/nonexistent",
        "CDPATH": "/etc",
        "IFS": "/7",
        "POSIXLY_CORRECT": "1",
        "ENV": "/x",
    }
    site.run(hook, {**SLURM_2205, **odd})
    assert len(site.notices()) == 1


@BOTH
def test_closed_descriptors(one: Site, hook: str) -> None:
    """No stdin, stdout or stderr at all."""
    one.run(hook, before="exec <&- >&- 2>&-\n")
    assert len(one.notices()) == 1


def _missing(site: Site) -> None:
    site.spool.rmdir()


def _file(site: Site) -> None:
    site.spool.rmdir()
    site.spool.write_bytes(b"")


def _symlink(site: Site) -> None:
    site.spool.rename(site.root / "real")
    site.spool.symlink_to(site.root / "real")


def _dangling(site: Site) -> None:
    site.spool.rmdir()
    site.spool.symlink_to(site.root / "real")


def _world(site: Site) -> None:
    site.remade(0o777)


def _sticky(site: Site) -> None:
    site.remade(0o1777)


def _group(site: Site) -> None:
    site.remade(0o775)


def _linked_notices(site: Site) -> None:
    (site.root / "real").mkdir()
    (site.spool / "notices").symlink_to(site.root / "real")


def _marked_linked_notices(site: Site) -> None:
    for made in (site.root / "real", site.spool / "jobs"):
        made.mkdir()
        made.chmod(0o1700)
    (site.spool / "notices").symlink_to(site.root / "real")
    site.spool.chmod(0o1711)


def _open_notices(site: Site) -> None:
    (site.spool / "notices").mkdir()
    (site.spool / "notices").chmod(0o733)


def _fifo(site: Site) -> None:
    os.mkfifo(site.spool / "notices")


def _opened_later(site: Site) -> None:
    site.run("prolog")
    shutil.rmtree(site.spool / "jobs" / "77.1")
    for path in waiting(site.spool):
        path.unlink()
    site.spool.chmod(0o777)


@BOTH
@pytest.mark.parametrize(
    "spoil",
    [
        _missing,
        _file,
        _symlink,
        _dangling,
        _world,
        _sticky,
        _group,
        _linked_notices,
        _marked_linked_notices,
        _open_notices,
        _fifo,
        _opened_later,
    ],
)
def test_a_spool_that_others_could_have_made_is_refused(site: Site, hook: str, spoil: Callable[[Site], None]) -> None:
    """Silently, and nothing is left in it or where it leads."""
    spoil(site)
    site.run(hook)
    files = [path for path in site.root.rglob("*") if path.is_file() and path != site.spool]
    assert files == []
    assert list(site.root.glob("*/jobs/*")) == []


@BOTH
def test_another_users_spool_is_refused(one: Site, unprivileged: Site, hook: str) -> None:
    """Even where it could be written to."""
    if AS_ROOT:
        os.chown(one.spool, 999, 999)
        one.run(hook)
        assert list(one.spool.iterdir()) == []
        for path in (one.spool, one.spool / "notices", one.spool / "jobs"):
            path.mkdir(exist_ok=True)
            os.chown(path, 999, 999)
            path.chmod(0o1711)  # as if it had been looked at, and found good
        one.run(hook)
        assert waiting(one.spool) == []
    unprivileged.run(hook, {**SLURM_2205, "TRAINARCHIVE_SPOOL": "/tmp"})
    assert list(Path("/tmp").glob("notices/prolog.77.1-*")) == []


@BOTH
def test_a_relative_spool_is_refused(one: Site, hook: str) -> None:
    """It would depend on where slurmd was started."""
    one.run(hook, {**SLURM_2205, "TRAINARCHIVE_SPOOL": "spool"}, before=f"cd {one.root}\n")
    assert list(one.spool.iterdir()) == []


@BOTH
def test_a_read_only_spool(unprivileged: Site, hook: str) -> None:
    """Nothing can be written: nothing is, at the first call and later."""
    unprivileged.spool.chmod(0o555)
    unprivileged.run(hook)
    assert list(unprivileged.spool.iterdir()) == []
    unprivileged.spool.chmod(0o755)
    unprivileged.run(hook)
    assert len(unprivileged.notices()) == 1
    (unprivileged.spool / "notices").chmod(0o1500)
    unprivileged.run(hook, {**SLURM_2205, "SLURM_JOB_ID": "78"})
    assert len(unprivileged.notices()) == 1


@BOTH
@pytest.mark.parametrize("blocks", [0, 1])
def test_a_file_size_limit_leaves_nothing_half_written(site: Site, hook: str, blocks: int) -> None:
    """Writing stops in the middle, as on a full disk: the half-written file goes."""
    site.run(hook, {**SLURM_2205, "SLURM_JOB_COMMENT": "x" * 3000}, before=f"ulimit -f {blocks}\n")
    assert site.notices() == []
    site.run(hook)
    assert len(site.notices()) == 1


@BOTH
def test_a_full_disk_leaves_nothing_half_written(site: Site, hook: str) -> None:
    """A file system of four pages; as root in a namespace of its own, else by the limit above."""
    full = "mount -t tmpfs -o size=16k,mode=711 none $TRAINARCHIVE_SPOOL || exit 99\n"
    look = "\nls -A $TRAINARCHIVE_SPOOL/notices; rm -rf $TRAINARCHIVE_SPOOL/notices/*\n"
    hooked = f"({{ {text_of(hook)}\n}}) || exit 98"
    shell = Site(site.root, site.shell)
    unshare = shutil.which("unshare") or "/usr/bin/unshare"
    probe = [unshare, "-m", "sh", "-c", f"mount -t tmpfs none {site.root}"]
    can_mount = subprocess.run(probe, check=False, capture_output=True)
    if can_mount.returncode:
        site.run(hook, {**SLURM_2205, "SLURM_JOB_COMMENT": "x" * 60_000}, before="ulimit -f 32\n")
        assert site.notices() == []
        return
    script = f"PATH=/usr/bin:/bin\n{full}{hooked}{look}exit 0\n"
    (site.root / "script").write_text(script)
    inside = f"exec {unshare} -m {site.shell} {site.root / 'script'}"
    printed = shell.run_text(inside, {**SLURM_2205, "SLURM_JOB_COMMENT": "x" * 60_000})
    assert printed == b""
    assert shell.run_text(inside, SLURM_2205).startswith(f"{hook}.77.1-".encode())


def test_no_more_processes(unprivileged: Site) -> None:
    """Where fork fails nothing can be done, and the node is still not drained."""
    if AS_ROOT:
        unprivileged = msgspec.structs.replace(unprivileged, uid=54_321)
        os.chown(unprivileged.spool, 54_321, 54_321)
    bash = shutil.which("bash")
    assert bash
    for hook in ("prolog", "epilog", "taskprolog"):
        script = f'ulimit -u 1; exec {unprivileged.shell} -c "$HOOK"'
        limited = msgspec.structs.replace(unprivileged, shell=bash)
        assert limited.run_text(script, {**SLURM_2205, "HOOK": text_of(hook)}) == b""
    assert waiting(unprivileged.spool) == []


@BOTH
def test_killed_half_way_a_notice_is_whole_or_absent(one: Site, hook: str) -> None:
    """SIGKILL at any moment, to all of it or to its first shell: never a torn notice."""
    chance = random.Random(7)  # noqa: S311 - moments, not secrets
    one.run(hook)
    script = text_of(hook)
    seen = set()
    for number in range(60):
        more = {**SLURM_2205, "SLURM_JOB_ID": str(1000 + number)}
        with one.start(script, more) as process:
            time.sleep(chance.uniform(0, 0.012))
            if number % 4:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        assert_nobody_left_within(process.pid, LIMIT_S)
        seen.add(process.returncode)
    for path in waiting(one.spool):
        decode(path.read_bytes())
    for path in one.spool.glob("notices/.tmp-*"):
        path.unlink()
    before = len(one.notices())
    one.run(hook)
    assert len(one.notices()) == before + 1
    assert before > 1
    assert -signal.SIGKILL in seen


def assert_nobody_left_within(session: int, seconds: float) -> None:
    """Wait until no process of that session is there."""
    deadline = time.monotonic() + seconds
    while _processes_of(session) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert_nobody_left(session)


# -- time ----------------------------------------------------------------------------------------


def _hanging(site: Site, hook: str, command: str) -> str:
    """Return the hook's text with a search path on which ``command`` says that it began, and never ends."""
    bin_ = site.root / "bin"
    bin_.mkdir()
    (bin_ / command).write_text(f"#!/bin/sh\n: >{site.root}/begun\nexec sleep 1000\n")
    (bin_ / command).chmod(0o755)
    return _replaced(text_of(hook), "PATH=/usr/bin", f"PATH={bin_}:/usr/bin")


def _replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


@BOTH
def test_the_time_limit(one: Site, hook: str) -> None:
    """A rename that never comes back, as on a dead mount: exit 0 within 2 s, but not much sooner."""
    started = time.monotonic()
    one.run_text(_hanging(one, hook, "mv"), SLURM_2205)
    assert time.monotonic() - started > 1.4
    assert waiting(one.spool) == []


@BOTH
@pytest.mark.parametrize("command", ["mv", "stat", "mkdir", "chmod"])
def test_what_hangs_is_ended(site: Site, hook: str, command: str) -> None:
    """Whatever it is that hangs, and however deep, nobody is left; the limit is cut short here."""
    last = text_of(hook).splitlines()[-1]
    assert last.startswith("limited ")
    started = time.monotonic()
    site.run_text(_replaced(_hanging(site, hook, command), f"\n{last}\n", "\nlimited 0.2\n"), SLURM_2205)
    assert time.monotonic() - started > 0.2
    assert (site.root / "begun").exists()
    assert waiting(site.spool) == []


@BOTH
def test_slurmds_time_out(site: Site, hook: str) -> None:
    """SIGTERM in the middle: exit 0 at once, nobody left."""
    with site.start(_hanging(site, hook, "mv"), SLURM_2205) as process:
        deadline = time.monotonic() + 5
        while not (site.root / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        process.terminate()
        ended = time.monotonic()
        process.communicate(timeout=10)
    assert time.monotonic() - ended < 1
    assert process.returncode == 0
    assert_nobody_left(process.pid)


def test_epilog_waits_for_the_answer(site: Site) -> None:
    """The collector's answer ends the wait."""
    asked = {**SLURM_2205, "TRAINARCHIVE_EPILOG_WAIT_S": "20"}
    (site.spool / "safe").mkdir(mode=0o700)
    answered: list[float] = []

    def collector() -> None:
        deadline = time.monotonic() + 10
        while not (found := waiting(site.spool)) and time.monotonic() < deadline:
            time.sleep(0.01)
        answered.append(time.monotonic())
        name = found[0].name
        found[0].unlink()
        (site.spool / "safe" / name).touch()

    thread = threading.Thread(target=collector)
    thread.start()
    site.run_text(text_of("epilog"), asked, allowed_s=10)
    thread.join()
    assert time.monotonic() - answered[0] < 1


def test_epilog_waits_no_longer_than_asked(site: Site) -> None:
    """No answer comes: the job's node is free after the asked second."""
    started = time.monotonic()
    site.run("epilog", {**SLURM_2205, "TRAINARCHIVE_EPILOG_WAIT_S": "1"})
    assert time.monotonic() - started > 0.9
    assert len(site.notices()) == 1


@pytest.mark.parametrize("asked", ["", "0", "-1", "abc", "08", "99999", "1.5", "$(sleep 5)"])
def test_epilog_waits_only_for_a_number_of_seconds(one: Site, asked: str) -> None:
    """Anything else is no wait at all."""
    started = time.monotonic()
    one.run("epilog", {**SLURM_2205, "TRAINARCHIVE_EPILOG_WAIT_S": asked})
    assert time.monotonic() - started < 0.9
    assert len(one.notices()) == 1


# -- the site's file -----------------------------------------------------------------------------


@BOTH
def test_the_sites_file_names_the_spool(site: Site, hook: str) -> None:
    """It is read, never run; its last line may lack the newline."""
    conf = site.root / "hooks.conf"
    conf.write_text(f"# ours\n\n$(touch {site.root}/run)\ntouch {site.root}/run\nTRAINARCHIVE_SPOOL={site.spool}")
    site.run(hook, {**SLURM_2205, "TRAINARCHIVE_SPOOL": ""})
    assert len(site.notices()) == 1
    assert not (site.root / "run").exists()
    site.run(hook, {**SLURM_2205, "TRAINARCHIVE_SPOOL": str(site.root / "elsewhere")})
    assert len(site.notices()) == 1


@pytest.mark.skipif(not AS_ROOT, reason="only root can give a file away")
@BOTH
def test_another_users_site_file_is_ignored(one: Site, hook: str) -> None:
    """A file that root does not own says nothing to root's hooks."""
    conf = one.root / "hooks.conf"
    conf.write_text(f"TRAINARCHIVE_SPOOL={one.root}/elsewhere\nTRAINARCHIVE_EPILOG_WAIT_S=9\n")
    os.chown(conf, 999, 999)
    (one.root / "elsewhere").mkdir(mode=0o711)
    one.run(hook, {**SLURM_2205, "TRAINARCHIVE_SPOOL": ""})
    assert list((one.root / "elsewhere").iterdir()) == []


def test_a_fifo_for_a_site_file(site: Site) -> None:
    """Nobody writes into it: no hook waits for that."""
    os.mkfifo(site.root / "hooks.conf")
    for hook in ("prolog", "epilog", "taskprolog"):
        site.run(hook)
    assert len(site.notices()) == 2


# -- TaskProlog ----------------------------------------------------------------------------------

TASK: Mapping[str, str] = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1", "PATH": "/usr/bin:/bin"}


def _exports(printed: bytes) -> dict[str, str]:
    lines = printed.decode().splitlines()
    assert all(re.fullmatch(r"export [A-Z_]+=.+", line) for line in lines)
    return dict(line.removeprefix("export ").split("=", 1) for line in lines)


def test_taskprolog_exports(site: Site) -> None:
    """Where Prolog made the directory, the task learns of it, NCCL and PyTorch write into it."""
    site.run("prolog")
    private = f"{site.spool}/jobs/77.1"
    assert _exports(site.run("taskprolog", TASK)) == {
        "TRAINARCHIVE_DIR": private,
        "NCCL_DEBUG_FILE": f"{private}/nccl.%h.%p.log",
        "TORCH_FR_DUMP_TEMP_FILE": f"{private}/nccl_trace_rank_",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{private}/nccl_trace_rank_",
    }


@pytest.mark.parametrize(
    ("name", "withheld"),
    [
        ("TRAINARCHIVE_DIR", {"TRAINARCHIVE_DIR"}),
        ("NCCL_DEBUG_FILE", {"NCCL_DEBUG_FILE"}),
        ("TORCH_FR_DUMP_TEMP_FILE", {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}),
    ],
)
@pytest.mark.parametrize("value", ["/mine", ""])
def test_taskprolog_leaves_what_the_user_set(one: Site, name: str, withheld: set[str], value: str) -> None:
    """Set to nothing is set, too; the flight recorder's two names are one choice."""
    one.run("prolog")
    all_names = set(_exports(one.run("taskprolog", TASK)))
    assert all_names - set(_exports(one.run("taskprolog", {**TASK, name: value}))) == withheld


@pytest.mark.parametrize("job_id", ["78", "", "../jobs/77", "77\n"])
def test_taskprolog_without_a_directory(one: Site, job_id: str) -> None:
    """No Prolog ran here for this job: nothing is exported that points nowhere."""
    one.run("prolog")
    assert one.run("taskprolog", {**TASK, "SLURM_JOB_ID": job_id}) == b""


def test_taskprolog_never_prints_a_second_command(one: Site, tmp_path: Path) -> None:
    """Slurm obeys every line: a path with a newline is not offered."""
    spool = tmp_path / "x\nexport LD_PRELOAD=evil"
    (spool / "jobs" / "77.1").mkdir(parents=True)
    assert one.run("taskprolog", {**TASK, "TRAINARCHIVE_SPOOL": str(spool)}) == b""


def test_taskprolog_sets_stdout_only_for_the_site(site: Site) -> None:
    """Files per rank by default are the site's decision; the user's own comes first."""
    assert site.run("taskprolog", TASK) == b""
    (site.root / "hooks.conf").write_text("SLURM_STDOUTMODE=slurm-%j.%t.out\n")
    assert site.run("taskprolog", TASK) == b"export SLURM_STDOUTMODE=slurm-%j.%t.out\n"
    assert site.run("taskprolog", {**TASK, "SLURM_STDOUTMODE": "mine"}) == b""


@pytest.mark.parametrize("more", [{}, {"SLURM_RESTART_COUNT": "x"}])
def test_taskprolog_of_a_first_run(one: Site, more: dict[str, str]) -> None:
    """Slurm tells tasks no restart count then."""
    one.run("prolog", {**SLURM_2205, "SLURM_JOB_RESTART_COUNT": "0"})
    exports = _exports(one.run("taskprolog", {"SLURM_JOB_ID": "77", **more}))
    assert exports["TRAINARCHIVE_DIR"] == f"{one.spool}/jobs/77.0"


# -- the scripts themselves ----------------------------------------------------------------------


def test_prolog_and_epilog_share_their_middle() -> None:
    """Each is one file that needs no other, so what both do stands in both, and the same."""
    parts = [re.split(r"(?m)^# --- (?:the same|end of the same).*\n", text_of(hook)) for hook in ("prolog", "epilog")]
    assert [len(part) for part in parts] == [3, 3]
    assert parts[0][1] == parts[1][1]


@pytest.mark.parametrize("hook", ["prolog", "epilog", "taskprolog"])
def test_hooks_call_neither_slurm_nor_the_network(hook: str) -> None:
    """The commands that a hook runs are few, and known."""
    code = re.sub(r"(?m)(?:^|\s)#.*$", "", text_of(hook))
    assert not re.search(r"\b(scontrol|sacct|squeue|srun|sbatch|sacctmgr|curl|wget|nc|ssh|python|redis)\b", code)
    assert os.access(shipped(f"slurm/{hook}.d/50-trainarchive.sh"), os.X_OK)
