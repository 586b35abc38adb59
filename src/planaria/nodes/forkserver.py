"""One process per job that imports the heavy modules once and forks nodes from itself.

Forking a process that has torch imported takes milliseconds and shares its memory; starting one
takes seconds. The server is single-threaded, so a fork is safe, and it imports nothing of the
user's main script (multiprocessing's forkserver runs that script again in every child). It ends
when the launcher's end of its socket closes.

A request is a JSON packet over a Unix socket pair, with file descriptors attached: which function
("module:function") to call with which payload in the child. The payload travels in memory,
never in argv, for it holds the job's token. Exits of children are reported on the same socket.
"""

import ctypes
import importlib
import json
import logging
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Sequence

logger = logging.getLogger(__name__)

_PACKET_BYTES_MAX = 1 << 16
_PR_SET_PDEATHSIG = 1

# A pool of threads would exist in the server alone: its forks inherit the pool's locks, held by
# nobody, and hang now and then. numpy's BLAS starts one on import.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class ForkServer:
    """A running fork server, seen from the process that started it.

    Args:
        preload: modules to import before the first fork; one that is missing is skipped, and
            fails where it is used.
        path: directories to put in front of sys.path (where the user's modules lie).
    """

    def __init__(self, preload: Sequence[str], *, path: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"from planaria.nodes.forkserver import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | _ONE_THREAD,
        )
        theirs.close()
        self._socket = ours
        self._exits: deque[tuple[int, int]] = deque()
        self._send({"preload": list(preload), "path": [*path, *sys.path]}, ())

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Readable when `exits` has news."""
        return self._socket.fileno()

    def spawn(self, target: str, payload: bytes, fds: Sequence[int] = ()) -> int:
        """Forks a child that calls `target(payload, *fds)`; returns its pid.

        The child's copies of `fds` are its own to close. It outlives the server.
        """
        return self._spawn({"target": target}, payload, fds)

    def _spawn(self, request: dict[str, object], payload: bytes, fds: Sequence[int]) -> int:
        with tempfile.TemporaryFile() as carrier:  # A payload may exceed a socket's buffer.
            carrier.write(payload)
            carrier.flush()
            carrier.seek(0)
            self._send(request, (carrier.fileno(), *fds))
        while True:
            reply = self._reply()
            if "pid" in reply:
                return int(reply["pid"])
            self._note(reply)

    def call(self, target: str, payload: bytes) -> bytes:
        """What `target(payload, fd)` writes to fd, run in a child that is waited for.

        Raises:
            RuntimeError: the child left without a word.
        """
        read_fd, write_fd = os.pipe()
        with os.fdopen(read_fd, "rb") as reader:
            self._spawn({"target": target, "dies_with_server": True}, payload, (write_fd,))
            os.close(write_fd)
            result = reader.read()
        if not result:
            raise RuntimeError(f"{target} left without a result; its error stands above")
        return result

    def exits(self) -> list[tuple[int, int]]:
        """Children that ended since the last call: (pid, exit status, negative for a signal)."""
        while select.select([self._socket], [], [], 0)[0]:
            self._note(self._reply())
        exits = list(self._exits)
        self._exits.clear()
        return exits

    def close(self) -> None:
        """Ends the server; children go on."""
        self._socket.close()
        self._process.wait(timeout=10.0)

    def _note(self, reply: dict[str, int]) -> None:
        self._exits.append((reply["exited"], reply["status"]))

    def _send(self, request: dict[str, object], fds: Sequence[int]) -> None:
        socket.send_fds(self._socket, [json.dumps(request).encode()], list(fds))

    def _reply(self) -> dict[str, int]:
        """The server's next packet; blocks until it comes."""
        try:
            data = self._socket.recv(_PACKET_BYTES_MAX)
        except ConnectionResetError:
            data = b""
        if not data:
            raise RuntimeError("the fork server died; its error stands above")
        reply: dict[str, int] = json.loads(data)
        return reply


def serve(fd: int) -> None:
    """The server's main function: imports, then forks on request until the socket closes."""
    sock = socket.socket(fileno=fd)
    child_fd, wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_fd)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(sock, selectors.EVENT_READ)
    selector.register(child_fd, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj == child_fd:
                os.read(child_fd, 4096)
                _reap(sock)
            elif not _serve_request(sock):
                return


def _reap(sock: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        reply = {"exited": pid, "status": os.waitstatus_to_exitcode(status)}
        sock.sendall(json.dumps(reply).encode())


def _serve_request(sock: socket.socket) -> bool:
    """Serves one request; False when the launcher is gone."""
    try:
        data, fds, _, _ = socket.recv_fds(sock, _PACKET_BYTES_MAX, 64)
    except ConnectionResetError:
        return False
    if not data:
        return False
    request = json.loads(data)
    if "preload" in request:
        sys.path[:] = request["path"]
        for name in request["preload"]:
            _preload(name)
        num_threads = len(os.listdir("/proc/self/task"))
        if num_threads > 1:
            logger.warning("a preloaded module started %d threads: forks may hang", num_threads - 1)
        return True
    pid = os.fork()
    if pid == 0:
        sock.close()
        if request.get("dies_with_server"):
            die_with_parent()
        _become(request["target"], fds)
    for descriptor in fds:
        os.close(descriptor)
    sock.sendall(json.dumps({"pid": pid}).encode())
    return True


def _preload(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module itself may be missing, a module that it needs may not.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent dies (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _become(target: str, fds: list[int]) -> None:
    """Runs the target in the forked child and leaves with its status; never returns."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with os.fdopen(fds[0], "rb") as carrier:
            payload = carrier.read()
        module, _, function = target.partition(":")
        getattr(importlib.import_module(module), function)(payload, *fds[1:])
        status = 0
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
