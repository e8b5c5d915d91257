"""Files stay open while the collector restarts: a tiny process of its own holds a copy of every fd.

``Holder.start`` connects to the process, or starts it first: this very file, run by ``python -I -S``
with only the standard library, detached, asleep until spoken to. It ends when told, or when no
collector was connected for ``idle_s``. A killed collector's successor asks for ``names`` and takes
its files back, the unlinked ones too. Whoever lets a file go must ``release`` it: what is held here
pins disk space and mounts. (Under systemd the collector's unit needs ``KillMode=process``, or this
process dies with it.)

One request and one answer a packet, on a unix socket in ``<state_dir>/holder`` (mode 0700), between
processes of one user::

    K<name>   with an fd: hold it under this name, in place of another     +
    T<name>                                                                + with a copy of the fd, or ?
    R<name>   close it                                                     +
    N<index>  names, in the order they came, from that index on            +<name>NUL<name>... ("+": no more)
    P                                                                      +<pid>
    S         end, and close everything                                    +

``?`` answers an unknown name, ``-<reason>`` everything that cannot be done.
"""

import fcntl
import os
import resource
import select
import socket
import struct
import sys
import time
from contextlib import suppress

if __name__ != "__main__":  # as the holder process this file runs alone, without any package
    from trainarchive.errors import NotFoundError, TrainarchiveError, UnavailableError

IDLE_S = 900.0
"""The process ends after so long without a collector: longer than any restart, shorter than an epilog's patience."""

MAX_FILES = 65_536
"""Most files held; the system's limit of open files, less a few, may be lower."""

MAX_NAME = 1024
"""Most bytes of a name."""

_FOLDER, _SOCKET, _LOCK = "holder", "socket", "lock"
_START_S = 10.0
_ANSWER_S = 5.0
_MAX_CLIENTS = 8
_SPARE_FDS = 32
_FD = struct.Struct("i")
_PACKET = 65_536
_PAGE = 32_768


class Holder:
    """A connection to the holder process of one state directory; for one thread.

    All methods raise UnavailableError where the process does not answer: then it is gone with
    what it held, and ``start`` makes another one.
    """

    def __init__(self, connection: socket.socket, where: str) -> None:
        """Use ``start``."""
        self._connection = connection
        self._where = where
        self.pid = int(self._ask(b"P")[0])

    @classmethod
    def start(
        cls, state_dir: str | os.PathLike[str], *, idle_s: float = IDLE_S, max_files: int = MAX_FILES
    ) -> "Holder":
        """Connect to the process of ``state_dir``, starting it where there is none (then with these limits).

        Raise TrainarchiveError where the directory is not this user's alone.
        """
        folder = os.path.join(os.path.abspath(state_dir), _FOLDER)  # noqa: PTH100, PTH118 - pathlib is 2 MB of memory
        fd = _own_directory(folder)
        try:
            deadline = time.monotonic() + _START_S
            while True:
                with suppress(FileNotFoundError, ConnectionError, UnavailableError):
                    return cls(_connect(fd), folder)
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        "the holder process does not start", where=folder, hint="its last words are in the log"
                    )
                _spawn(folder, idle_s, max_files)
        finally:
            os.close(fd)

    def keep(self, name: str, fd: int) -> None:
        """Hold a copy of ``fd`` under ``name``, in place of what was held so; UnavailableError when full."""
        self._ask(b"K" + _packed(name), fd)

    def take(self, name: str) -> int:
        """Return a copy of the fd, which the holder still holds; raise NotFoundError where there is none."""
        _, fds = self._ask(b"T" + _packed(name))
        if not fds:
            raise UnavailableError(f"no fd came for {name}", where=self._where)
        return fds[0]

    def release(self, name: str) -> None:
        """Let the holder close its copy; no error where there is none."""
        self._ask(b"R" + _packed(name))

    def names(self) -> list[str]:
        """Return the names of all that is held."""
        names: list[str] = []
        while page := self._ask(b"N%d" % len(names))[0]:
            names += (name.decode(errors="surrogateescape") for name in page.split(b"\0"))
        return names

    def disconnect(self) -> None:
        """Leave; the process holds on for ``idle_s``. Safe to call twice."""
        self._connection.close()

    def stop(self) -> None:
        """End the process, and with it all that it holds."""
        self._ask(b"S")
        with suppress(OSError):
            self._connection.recv(1)  # its end
        self.disconnect()

    def _ask(self, request: bytes, *fds: int) -> tuple[bytes, list[int]]:
        try:
            socket.send_fds(self._connection, [request], fds)
            answer, came = _receive(self._connection)
        except OSError as error:
            self.disconnect()  # a late answer must not be taken for the next one's
            raise UnavailableError(f"the holder process does not answer: {error}", where=self._where) from error
        if answer[:1] == b"+":
            return answer[1:], came
        if answer[:1] == b"?":
            raise NotFoundError(f"the holder process has no {request[1:].decode(errors='replace')}", where=self._where)
        reason = answer[1:].decode() or "it has ended"
        raise UnavailableError(f"the holder process refuses: {reason}", where=self._where)


def _packed(name: str) -> bytes:
    packed = name.encode(errors="surrogateescape")
    if not 0 < len(packed) <= MAX_NAME or b"\0" in packed:
        raise ValueError(f"not a name: {name!r}")
    return packed


def _own_directory(folder: str) -> int:
    """Open the directory, made if need be, that nobody else may enter."""
    try:
        os.makedirs(os.path.dirname(folder), exist_ok=True)  # noqa: PTH103, PTH120 - pathlib is 2 MB of memory
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)  # noqa: PTH102 - the same
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise TrainarchiveError(f"cannot be used: {error.strerror}", where=folder) from error
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(fd)
        raise TrainarchiveError(
            "others may enter the directory that passes open files on",
            where=folder,
            hint="it must belong to the collector's user and have mode 0700",
        )
    return fd


def _connect(folder: int) -> socket.socket:
    """Connect through the directory's fd, since a socket's path may have only 107 bytes."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_ANSWER_S)
        connection.connect(f"/proc/self/fd/{folder}/{_SOCKET}")
        _check_peer(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _spawn(folder: str, idle_s: float, max_files: int) -> None:
    """Run the process, and return when it listens, or has found that another one does."""
    command = [sys.executable, "-I", "-S", os.path.abspath(__file__), folder, str(idle_s), str(max_files)]  # noqa: PTH100 - the same
    silence = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1)]
    child = os.posix_spawn(sys.executable, command, os.environ, file_actions=silence)
    with suppress(ChildProcessError):  # where this process lets the kernel take its dead children
        os.waitpid(child, 0)
    time.sleep(0.01)  # where another one is just starting or ending, it is asked again soon


def _check_peer(connection: socket.socket) -> None:
    """Raise ConnectionError where another user's process is at the other end."""
    _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise ConnectionError(f"a process of uid {uid} is at the other end")


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive one packet and the fd that came with it, if one did; more are closed by the kernel.

    ``socket.recv_fds`` leaves its flags out before Python 3.12, and so every fd open over an exec.
    """
    packet, attached, _, _ = connection.recvmsg(_PACKET, socket.CMSG_LEN(_FD.size), socket.MSG_CMSG_CLOEXEC)
    return packet, [_FD.unpack(data)[0] for _, kind, data in attached if kind == socket.SCM_RIGHTS]


class _Process:
    """The holder process's loop."""

    def __init__(self, listener: socket.socket, idle_s: float, max_files: int) -> None:
        self._listener = listener
        self._idle_s = idle_s
        self._max_files = max_files
        self._held: dict[bytes, int] = {}
        self._clients: dict[int, socket.socket] = {}
        self._ended = False
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def run(self) -> None:
        """Serve until told to end, or until nobody has been connected for long enough."""
        while not self._ended:
            events = self._poll.poll(None if self._clients else self._idle_s * 1000)
            if not events and not self._clients:
                return
            for fd, _ in events:
                if fd == self._listener.fileno():
                    self._accept()
                else:
                    self._serve(self._clients[fd])

    def _accept(self) -> None:
        with suppress(OSError):
            client, _ = self._listener.accept()  # closed again where it is not kept
            _check_peer(client)
            if len(self._clients) >= _MAX_CLIENTS:
                return
            client.settimeout(_ANSWER_S)  # one that does not take its answer is dropped
            self._clients[client.fileno()] = client
            self._poll.register(client, select.POLLIN)

    def _serve(self, client: socket.socket) -> None:
        try:
            request, came = _receive(client)
            if request:
                answer, fds = self._answer(request, came)
                socket.send_fds(client, [answer], fds)
        except OSError:
            request = b""
        if not request:
            self._poll.unregister(client)
            del self._clients[client.fileno()]
            client.close()

    def _answer(self, request: bytes, came: list[int]) -> tuple[bytes, list[int]]:
        verb, name = request[:1], request[1:]
        fds: list[int] = []
        answer = b"+"
        if verb == b"K":
            answer = self._keep(name, came)
        elif verb == b"T" and name in self._held:
            fds = [self._held[name]]
        elif verb == b"T":
            answer = b"?"
        elif verb == b"R":
            _close_all([self._held.pop(name)] if name in self._held else [])
        elif verb == b"N" and name.isdigit():
            answer += self._page(int(name))
        elif verb == b"P":
            answer += b"%d" % os.getpid()
        elif verb == b"S":
            self._ended = True
        else:
            answer = b"-not understood"
        _close_all(came)
        return answer, fds

    def _keep(self, name: bytes, came: list[int]) -> bytes:
        if not came or not 0 < len(name) <= MAX_NAME:
            return b"-no fd came, or no name"
        if name in self._held:
            os.close(self._held.pop(name))
        elif len(self._held) >= self._max_files:
            return b"-it holds %d files, and no more" % self._max_files
        self._held[name] = came.pop(0)
        return b"+"

    def _page(self, index: int) -> bytes:
        page: list[bytes] = []
        size = 0
        for name in list(self._held)[index:]:
            size += len(name) + 1
            if size > _PAGE:
                break
            page.append(name)
        return b"\0".join(page)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        with suppress(OSError):  # NFS tells here of writes that failed; these were not ours
            os.close(fd)


def _listen(folder: str) -> tuple[socket.socket, int] | None:
    """Return the listening socket and the directory's fd, None where another process has the lock."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # kept until the process ends
    except BlockingIOError:
        return None
    with suppress(FileNotFoundError):
        os.unlink(_SOCKET, dir_fd=fd)  # of a process that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"/proc/self/fd/{fd}/{_SOCKET}")
    listener.listen(_MAX_CLIENTS)
    return listener, fd


def _detach() -> None:
    """Leave the parent, its terminal and its directory; the parent's wait ends here."""
    if os.fork():
        os._exit(0)
    os.chdir("/")
    os.dup2(0, 2)


def _main(folder: str, idle_s: float, max_files: int) -> None:
    os.umask(0o077)
    os.setsid()
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)  # noqa: PTH208 - pathlib is 2 MB of memory
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    listening = _listen(folder)
    if listening is None:
        return
    listener, fd = listening
    _detach()
    _Process(listener, idle_s, min(max_files, most - _SPARE_FDS)).run()
    with suppress(FileNotFoundError):
        os.unlink(_SOCKET, dir_fd=fd)


if __name__ == "__main__":
    _main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
