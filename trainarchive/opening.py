"""Opening a job's files without being fooled: only regular files, never through a last symbolic link.

Users choose the names and may change what stands behind them at any moment. So a file is first
pinned (O_PATH, which neither waits nor has effects: a FIFO's writer does not wake, a watchdog
device does not start), then looked at, and only then opened through that pin. Every refusal is a
``RefusedError`` whose ``what`` is one of the constants below.

The functions act with this process's own rights, and hold no state, so that they can run
unchanged in a child that has taken on the job's identity. Until that child is built, root opens
only root's own files: whoever runs as root and asks for another uid is refused.
"""

import ctypes
import errno
import functools
import os
import re
import stat
import string
from typing import NoReturn

from trainarchive.errors import RefusedError, UnavailableError

NOT_REGULAR = "not a regular file"
KERNEL = "kernel file system"
LINK = "symbolic link"
DENIED = "permission denied"
GONE = "gone"
NOT_WRITTEN = "not open for writing"
OTHERS_PROCESS = "another user's process"
NOT_ABSOLUTE = "not an absolute path"
TOO_LONG = "name too long"
FAILED = "cannot be opened"
OTHER_USER = "opening as another user is not built yet"

_PIN = os.O_PATH | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_PID_DIRECTORY = _PIN | os.O_DIRECTORY

_REASONS = {
    errno.ELOOP: LINK,
    errno.EACCES: DENIED,
    errno.EPERM: DENIED,
    errno.ENOENT: GONE,
    errno.ENOTDIR: GONE,
    errno.ESRCH: GONE,
    errno.ENAMETOOLONG: TOO_LONG,
}
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.EINTR, errno.EAGAIN)

# From linux/magic.h: files there are regular by name only; reading may wait, take away, or tell secrets.
_KERNEL_FILE_SYSTEMS = frozenset(
    {
        0x9FA0,  # proc
        0x62656572,  # sysfs
        0x64626720,  # debugfs
        0x74726163,  # tracefs
        0x73636673,  # securityfs
        0xF97CFF8C,  # selinuxfs
        0x62656570,  # configfs
        0xCAFE4A11,  # bpf
        0x27E0EB,  # cgroup
        0x63677270,  # cgroup2
        0x6165676C,  # pstore
        0xDE5E81E4,  # efivarfs
        0x6E736673,  # nsfs
    }
)

_SAMPLE = 4096
_TEXT_SHARE = 0.9
_PLAIN = string.printable.encode() + b"\b\a\x1b"  # progress bars and colours are text
_LATIN = _PLAIN + bytes(range(0xA0, 0x100))


def open_path(path: bytes, uid: int) -> int:
    """Open the regular file at an absolute ``path`` for reading, for the job of user ``uid``; return the fd.

    Links on the way are followed, as the kernel allows; the last element must not be one. Raise
    RefusedError, or UnavailableError where the same call may succeed later.
    """
    where = path.decode(errors="backslashreplace")
    _refuse_other_user(uid, where)
    if not path.startswith(b"/") or b"\0" in path:
        raise RefusedError(NOT_ABSOLUTE, where=where)
    pin = -1
    try:
        pin = os.open(path, _PIN | os.O_NOFOLLOW)
        return _open_pinned(pin, where)
    except OSError as error:
        _refuse(error, where)
    finally:
        _close(pin)


def open_fd_of(pid: int, fd: int, start_time: int, uid: int) -> int:
    """Open for reading the regular file that process ``pid`` of user ``uid`` has open for writing as ``fd``.

    ``start_time`` is field 22 of ``/proc/PID/stat`` (clock ticks since boot): pids come back. The
    file may have no name any more, or one in another mount namespace. Raise RefusedError, or
    UnavailableError where the same call may succeed later.
    """
    where = f"/proc/{pid}/fd/{fd}"
    _refuse_other_user(uid, where)
    process = pin = -1
    try:
        process = os.open(f"/proc/{pid:d}", _PID_DIRECTORY)  # of this process; never of a later one with its pid
        _check_process(process, start_time, uid, where)
        shown = _fdinfo(process, f"fdinfo/{fd:d}")
        flags, place = shown
        if flags & os.O_PATH or flags & os.O_ACCMODE not in (os.O_WRONLY, os.O_RDWR):
            raise RefusedError(NOT_WRITTEN, where=where)
        pin = os.open(f"fd/{fd:d}", _PIN, dir_fd=process)
        # The process may have put another file (one it could not write) under the number meanwhile.
        _, pinned_place = _fdinfo(None, f"/proc/self/fdinfo/{pin}")
        if pinned_place != place or _fdinfo(process, f"fdinfo/{fd:d}") != shown:
            raise RefusedError(GONE, where=where)
        _check_process(process, start_time, uid, where)
        return _open_pinned(pin, where)
    except OSError as error:
        _refuse(error, where)
    finally:
        _close(pin)
        _close(process)


def looks_like_text(fd: int) -> bool:
    """Say whether the first 4 KiB have no NUL and are nearly all text, as UTF-8 or Latin; empty is text."""
    try:
        sample = os.pread(fd, _SAMPLE, 0)
    except OSError as error:
        raise UnavailableError(f"the file does not read: {os.strerror(error.errno or 0)}", where=f"fd {fd}") from error
    if b"\0" in sample:
        return False
    try:
        sample.decode()
        strange = len(sample.translate(None, _PLAIN + bytes(range(0x80, 0x100))))
    except UnicodeDecodeError as error:
        cut_at_the_end = error.reason == "unexpected end of data" and len(sample) == _SAMPLE
        high = bytes(range(0x80, 0x100)) if cut_at_the_end else b""
        strange = len(sample.translate(None, _LATIN + high))
    return strange <= len(sample) * (1 - _TEXT_SHARE)


def _refuse_other_user(uid: int, where: str) -> None:
    if os.geteuid() == 0 and uid != 0:
        raise RefusedError(OTHER_USER, where=where)


def _open_pinned(pin: int, where: str) -> int:
    """Open the very file that is pinned, if it is a regular one of a real file system."""
    mode = os.fstat(pin).st_mode
    if stat.S_ISLNK(mode):
        raise RefusedError(LINK, where=where)
    if not stat.S_ISREG(mode):
        raise RefusedError(NOT_REGULAR, where=where)
    if _file_system(pin) in _KERNEL_FILE_SYSTEMS:
        raise RefusedError(KERNEL, where=where)
    return os.open(f"/proc/self/fd/{pin}", _READ)


def _check_process(process: int, start_time: int, uid: int, where: str) -> None:
    """Make sure that it is the process meant, and wholly its user's: a set-uid program is not."""
    if _start_time(process) != start_time:
        raise RefusedError(GONE, where=where)
    uids = re.search(rb"^Uid:\t(\d+)\t(\d+)\t(\d+)\t(\d+)$", _text_of(process, "status"), re.MULTILINE)
    if uids is None or set(map(int, uids.groups())) != {uid}:
        raise RefusedError(OTHERS_PROCESS, where=where)


def _start_time(process: int) -> int:
    # The program's name stands in parentheses, and may itself hold parentheses and spaces.
    return int(_text_of(process, "stat").rpartition(b")")[2].split()[19])


def _fdinfo(process: int | None, name: str) -> tuple[int, tuple[bytes | None, bytes | None]]:
    """Return an fd's flags, and its mount and inode, which old kernels (before 5.14) show in part."""
    fields = dict(line.split(b":\t", 1) for line in _text_of(process, name).splitlines() if b":\t" in line)
    return int(fields.get(b"flags", b"0"), 8), (fields.get(b"mnt_id"), fields.get(b"ino"))


def _text_of(process: int | None, name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=process)
    try:
        return os.read(fd, 65_536)
    finally:
        os.close(fd)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _refuse(error: OSError, where: str) -> NoReturn:
    if error.errno in _PASSING:
        raise UnavailableError(f"not opened now: {os.strerror(error.errno)}", where=where) from error
    raise RefusedError(_REASONS.get(error.errno or 0, FAILED), where=where) from error


@functools.cache
def _fstatfs() -> "ctypes._NamedFuncPointer":
    return ctypes.CDLL(None, use_errno=True).fstatfs


def _file_system(fd: int) -> int:
    """Return the type (linux/magic.h) of the file system that an open file is on."""
    answer = (ctypes.c_long * 64)()  # struct statfs is 15 longs or so; its first is the type
    if _fstatfs()(fd, answer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return answer[0] & 0xFFFFFFFF
