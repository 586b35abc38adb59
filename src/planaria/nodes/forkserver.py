"""One process per job that imports the heavy modules once and forks nodes from itself.

Forking a process that has torch imported takes milliseconds and shares its memory; starting one
takes seconds. The server is single-threaded, so a fork is safe, and it does not import the user's
main script (multiprocessing's forkserver runs that script again in every child). It ends when the
process that started it ends, by whatever signal, also while it imports.

A request is a JSON packet over a Unix socket pair, with file descriptors attached. It names the
function ("module:function") that the child is to call with a payload. The payload is passed in
memory, never in argv, because it contains the job's token. The server reports exits of children on
the same socket. A caller that must not block asks for a child and takes the answer later.

A server that was killed can be renewed. Its children live on; the kernel tells when they end
(pidfds), but not with which status. A child runs nothing before its caller has taken the answer.
So no unknown child stays behind if the server is killed during a request, or if the caller has no
descriptor left for the child.
"""

import contextlib
import ctypes
import errno
import faulthandler
import fcntl
import gc
import importlib
import io
import json
import logging
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final, NoReturn

from planaria.errors import InsufficientError
from planaria.nodes.output import ForwardedOutput, flush_own

logger = logging.getLogger(__name__)

UNKNOWN: Final = 256  # The exit status of a process whose parent, the server, is gone.

_PACKET_BYTES_MAX = 1 << 16
# Signals that tell a process to leave: SIGINT, and LEAVE_SIGNALS of head/process_events.py, which
# imports this module.
_LAUNCHER_SIGNALS: Final = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU),
)
_PR_SET_PDEATHSIG = 1
_END_TIMEOUT_S = 10.0
_FORK_TIMEOUT_S = 30.0  # A fork takes milliseconds; a server that does not answer is killed.
_OUTPUT_TIMEOUT_S = 1.0

# numpy's BLAS starts a pool of threads on import. A forked child has the pool's locks but not its
# threads, and would hang now and then.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# The user's module may ask torch for a GPU when it is imported. Without this torch asks CUDA, which
# no forked child can use then: torch finds no GPU there, and the job would run without one.
_ASK_THE_DRIVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@dataclass(frozen=True, slots=True)
class _ForkRequest:
    """A child that was asked for.

    Attributes:
        start_fd: write end of a pipe; the child runs nothing before it has read a byte from it.
        pid: pid of the child; 0: it is not forked yet.
        error: errno of the error because of which there is no child; 0: there was none.
    """

    start_fd: int
    pid: int = 0
    error: int = 0


class ForkServer:
    """A running fork server, for the process that started it.

    Args:
        preload: modules to import before the first fork; a missing one is skipped, and raises
            where it is used.
        path: directories of the user's modules, to be put in front of sys.path.
        output: callback, called in a thread of its own with each line that the server or its
            children print; None: they print to this process's own output. They never wait for
            either.
    """

    def __init__(
        self,
        preload: Sequence[str],
        *,
        path: Sequence[str] = (),
        output: Callable[[str], None] | None = None,
    ) -> None:
        self._preload = list(preload)
        self._path = [*path, *sys.path]
        self._on_line = output
        self._environment = _ASK_THE_DRIVER | os.environ | _ONE_THREAD
        self._exits: list[tuple[int, int]] = []
        self._numbers = count()  # Numbers of requests.
        self._requests: dict[int, _ForkRequest] = {}
        self._children: dict[int, int] = {}  # The children's pidfds, by pid.
        self._outputs: list[ForwardedOutput] = []
        self._epoll = select.epoll()
        self._start()

    def _start(self) -> None:
        with contextlib.ExitStack() as failing:
            own_socket, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            failing.callback(own_socket.close)
            with server_socket:
                server_pipe_fd, own_pipe_fd = os.pipe()
                failing.callback(os.close, own_pipe_fd)
                try:
                    process, output = self._start_process((server_socket.fileno(), server_pipe_fd))
                finally:
                    os.close(server_pipe_fd)
            failing.callback(process.wait, timeout=_END_TIMEOUT_S)
            failing.callback(process.kill)
            self._epoll.register(own_socket, select.EPOLLIN)
            failing.pop_all()
        self._process, self._socket, self._lifeline_fd = process, own_socket, own_pipe_fd
        self._outputs.append(output)
        self._loss, self._is_ready = "", False
        with contextlib.suppress(InsufficientError):  # The next request raises it again.
            self._send({"preload": self._preload, "path": self._path}, ())

    def _start_process(
        self, descriptors: tuple[int, int]
    ) -> tuple[subprocess.Popen[bytes], ForwardedOutput]:
        """Starts a server process with these descriptors; returns it and what it prints."""
        output = ForwardedOutput(self._on_line)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve{descriptors}"],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=output.stdout_fd,
                stderr=output.stderr_fd,
                start_new_session=True,
                env=self._environment,
            )
        except BaseException:
            output.drop()
            raise
        try:
            output.begin()
        except BaseException:
            process.kill()
            process.wait(timeout=_END_TIMEOUT_S)
            raise
        return process, output

    def renew(self) -> None:
        """Starts a server in place of one that is gone; it imports all modules again.

        Raises:
            InsufficientError: this machine has no process, memory or descriptor for it now.
        """
        assert self._loss
        try:
            self._start()
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started.
            reason = getattr(error, "strerror", None) or error
            raise InsufficientError(f"no other one can be started ({reason})") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether the server has imported all modules, as far as `exits` knows."""
        return self._is_ready and not self._loss

    @property
    def loss(self) -> str:
        """How the server has ended, as far as `exits` knows; "": it runs."""
        return self._loss

    def fileno(self) -> int:
        """A descriptor that is readable when `exits` has news; it stays the same after `renew`."""
        return self._epoll.fileno()

    def wait_ready(self) -> None:
        """Blocks until the server has imported all modules.

        Raises:
            InsufficientError: the server is gone.
        """
        while not self.is_ready:
            self._on_reply(self._wait_reply())

    def spawn(self, target: str, payload: bytes, fds: Sequence[int] = ()) -> int:
        """Forks a child that calls `target(payload, *fds)`; returns its pid.

        The child has to close its copies of `fds`. It outlives the server.

        Raises:
            InsufficientError: the server is gone.
            OSError: this machine has no process, memory or descriptor for the child now.
        """
        return self._spawn({"target": target}, payload, fds)

    def ask(self, target: str, payload: bytes, fds: Sequence[int] = ()) -> int:
        """Asks for a child like `spawn`, but does not wait; returns the number of the request.

        Each request must end with `answer` returning a pid or raising, or with `forget`.

        Raises:
            InsufficientError, OSError: see `spawn`.
        """
        return self._ask({"target": target}, payload, fds)

    def answer(self, number: int) -> int | None:
        """Lets the child of a request run, and returns its pid.

        None as long as `exits` has not heard of the child.

        Raises:
            InsufficientError, OSError: see `spawn`.
        """
        request = self._requests.get(number)
        if request is None:
            raise InsufficientError(self._loss or "the fork server that was asked is gone")
        if request.error:
            self.forget(number)
            raise OSError(request.error, os.strerror(request.error))
        if not request.pid:
            return None
        del self._requests[number]
        with contextlib.suppress(BrokenPipeError):  # The child was killed already.
            os.write(request.start_fd, b"!")
        os.close(request.start_fd)
        return request.pid

    def forget(self, number: int) -> None:
        """Makes the child of a request exit without running anything, unless it was answered."""
        request = self._requests.pop(number, None)
        if request is None:
            return
        os.close(request.start_fd)
        if request.pid in self._children:
            os.close(self._children.pop(request.pid))

    def _ask(self, request: dict[str, object], payload: bytes, fds: Sequence[int]) -> int:
        with contextlib.ExitStack() as cleanup, contextlib.ExitStack() as failing:
            carrier_fd = os.memfd_create("payload")  # A payload may exceed a socket's buffer.
            cleanup.callback(os.close, carrier_fd)
            wait_fd, start_fd = os.pipe()
            cleanup.callback(os.close, wait_fd)
            failing.callback(os.close, start_fd)
            with os.fdopen(carrier_fd, "wb", closefd=False) as carrier:
                carrier.write(payload)
            os.lseek(carrier_fd, 0, os.SEEK_SET)
            number = next(self._numbers)
            self._send({**request, "number": number}, (carrier_fd, wait_fd, *fds))
            failing.pop_all()
        self._requests[number] = _ForkRequest(start_fd)
        return number

    def _spawn(self, request: dict[str, object], payload: bytes, fds: Sequence[int]) -> int:
        number = self._ask(request, payload, fds)
        try:
            while (pid := self.answer(number)) is None:
                self._on_reply(
                    self._wait_reply(timeout_s=_FORK_TIMEOUT_S if self._is_ready else None)
                )
            return pid
        finally:
            self.forget(number)

    def call(self, target: str, payload: bytes) -> bytes:
        """Runs `target(payload, fd)` in a child, and returns what it writes to fd until it ends.

        Processes that the child leaves behind, such as a pool of the user's, are killed.

        Raises:
            InsufficientError: the server or the child has ended without a result.
        """
        with os.fdopen(os.memfd_create("result"), "rb") as file:  # They would hold a pipe open.
            pid = self._spawn({"target": target, "is_call": True}, payload, (file.fileno(),))
            try:
                status = self._wait_exit(pid)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            file.seek(0)
            result = file.read()
        if not result:
            raise InsufficientError(f"the process that ran {target} {exit_text(status)}")
        return result

    def exits(self) -> list[tuple[int, int]]:
        """Children that ended since the last call, as (pid, exit status).

        A negative status is a signal. Children of a server that is gone have the status `UNKNOWN`.
        """
        while events := self._epoll.poll(0):
            ended = {fd for fd, _ in events}
            for pid in [pid for pid, pidfd in self._children.items() if pidfd in ended]:
                self._on_reply({"exited": pid, "status": UNKNOWN})
            if self._socket.fileno() in ended:
                with contextlib.suppress(InsufficientError):
                    self._on_reply(self._wait_reply(timeout_s=_FORK_TIMEOUT_S))
        exits, self._exits = self._exits, []
        return exits

    def kill(self) -> None:
        """Kills a server that does not answer; it counts as lost from now on."""
        self._process.kill()
        if not self._loss:
            self._mark_lost("stood still and was killed")

    def close(self) -> None:
        """Kills the server and releases everything; children that were spawned go on."""
        self._process.kill()
        try:
            self._process.wait(timeout=_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # It may be in a read of a dead disk, which cannot end.
            logger.warning("the fork server is still there after it was killed")
        for number in tuple(self._requests):
            self.forget(number)
        if not self._loss:
            self._socket.close()
            os.close(self._lifeline_fd)
        self._epoll.close()
        for pidfd in self._children.values():
            os.close(pidfd)
        for output in self._outputs:
            output.close(timeout_s=_OUTPUT_TIMEOUT_S)

    def _wait_exit(self, pid: int) -> int:
        """The exit status of a child that has ended or is about to."""
        while pid not in (statuses := dict(self._exits)):
            self._on_reply(self._wait_reply())
        self._exits.remove((pid, statuses[pid]))
        return statuses[pid]

    def _on_reply(self, reply: dict[str, int]) -> None:
        if "ready" in reply:
            self._is_ready = True
        elif "number" in reply:
            self._on_answer(reply["number"], reply)
        elif reply["exited"] in self._children:
            os.close(self._children.pop(reply["exited"]))
            self._exits.append((reply["exited"], reply["status"]))

    def _on_answer(self, number: int, reply: dict[str, int]) -> None:
        request, pidfd = self._requests.get(number), reply.get("pidfd", -1)
        if request is None:  # The request was forgotten, so the child runs nothing.
            if pidfd >= 0:
                os.close(pidfd)
        elif pidfd >= 0:
            self._children[reply["pid"]] = pidfd
            self._requests[number] = replace(request, pid=reply["pid"])
        else:  # The server could not fork it, or this process had no descriptor for its pidfd.
            self._requests[number] = replace(request, error=reply.get("error", errno.EMFILE))

    def _send(self, request: dict[str, object], fds: Sequence[int]) -> None:
        if self._loss:
            raise self._loss_error()
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], list(fds))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._loss_error() from error

    def _wait_reply(self, *, timeout_s: float | None = None) -> dict[str, int]:
        """The server's next packet; kills a server that does not send one in time."""
        if self._loss:
            raise self._loss_error()
        self._socket.settimeout(timeout_s)
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, _PACKET_BYTES_MAX, 1)
        except TimeoutError:
            self.kill()
            raise self._loss_error() from None
        except ConnectionResetError:
            data, fds = b"", []
        finally:
            if not self._loss:
                self._socket.settimeout(None)
        if not data:
            raise self._loss_error()
        reply: dict[str, int] = json.loads(data)
        return reply | {"pidfd": fds[0]} if fds else reply

    def _loss_error(self) -> InsufficientError:
        """The error for requests to a server that is gone; marks the server as lost."""
        if not self._loss:
            try:
                how = exit_text(self._process.wait(timeout=_END_TIMEOUT_S))
            except subprocess.TimeoutExpired:
                self._process.kill()
                how = "has closed its connection and was killed"
            self._mark_lost(how)
        return InsufficientError(f"{self._loss}; it forks no process any more")

    def _mark_lost(self, how: str) -> None:
        self._loss = f"the fork server {how}"
        self._epoll.unregister(self._socket)
        self._socket.close()
        os.close(self._lifeline_fd)
        for number in tuple(self._requests):
            self.forget(number)
        for pidfd in self._children.values():
            with contextlib.suppress(FileExistsError):  # A child of an earlier server.
                self._epoll.register(pidfd, select.EPOLLIN)


def exit_text(status: int) -> str:
    """An exit status in words; a negative one is a signal."""
    if status == UNKNOWN:
        return "has ended"
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def serve(fd: int, lifeline_fd: int) -> None:
    """The server's main function: imports, then forks on request until the socket closes."""
    end_with(lifeline_fd)
    faulthandler.register(signal.SIGRTMIN, file=2, all_threads=True)  # For a job that hangs.
    # By default Python writes 8 KiB at once into a pipe, so that output would be shown late, and
    # would be lost if the process is killed.
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    leave_removed_directory()
    os.set_inheritable(fd, False)
    sock = socket.socket(fileno=fd)
    child_fd, wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_fd)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # A scheduler may send these signals to all processes of a job. Only the launcher handles them;
    # the server and its children ignore them.
    for number in _LAUNCHER_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
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


def leave_removed_directory() -> None:
    """Changes to / if the working directory was removed.

    Libraries that load others (MKL, torch) fail in a removed directory.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")


def end_with(lifeline_fd: int) -> None:
    """Makes the kernel end this process when the other end of a pipe closes (Linux).

    A process that forks must not have a thread to watch the pipe, and a signal handler in Python
    would not run during an import. SIGIO's default action ends the process whatever it is doing.
    """
    os.set_inheritable(lifeline_fd, False)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC)
    closed = select.poll()
    closed.register(lifeline_fd, 0)
    if closed.poll(0):  # It closed before O_ASYNC was set.
        os._exit(1)


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
        gc.disable()  # Collections are a sixth of the time that torch and transformers import.
        for name in request["preload"]:
            num_before = len(os.listdir("/proc/self/task"))
            _preload(name)
            num_begun = len(os.listdir("/proc/self/task")) - num_before
            if num_begun > 0:
                logger.warning("%s started %d threads: forks may hang", name, num_begun)
        # With torch imported, a full collection visits 200,000 objects (0.1 s) and writes to the
        # memory pages that forked children share.
        gc.collect()
        gc.freeze()
        gc.enable()
        sock.sendall(json.dumps({"ready": 1}).encode())
        return True
    reply, pidfds = {"number": request["number"]}, []
    server_pid = os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            _become(request, sock, fds, server_pid=server_pid)
        if request.get("is_call"):
            os.setpgid(pid, pid)  # The child runs nothing before; the caller kills its group.
        pidfds.append(os.pidfd_open(pid))  # The child is not reaped yet, so the pid is still its.
        reply["pid"] = pid
    except OSError as error:  # There are too many processes, or too little memory for another one.
        reply["error"] = error.errno
    for descriptor in fds:
        os.close(descriptor)
    socket.send_fds(sock, [json.dumps(reply).encode()], pidfds)
    for pidfd in pidfds:
        os.close(pidfd)
    return True


def _preload(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module itself (or its package) may be missing; a module that it imports may not.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise


def die_with_parent(parent_pid: int) -> None:
    """Makes the kernel kill this process when its parent dies (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # The parent died before the call of prctl.
        os._exit(1)


def close_others(open_fds: set[int]) -> None:
    """Closes all descriptors that a forked process has inherited, except those in `open_fds`.

    An inherited connection that stays open would hide from its other end that the parent is gone.
    """
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in open_fds:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _become(
    request: dict[str, Any], sock: socket.socket, fds: list[int], *, server_pid: int
) -> NoReturn:
    """Runs the target in the forked child once the caller has taken the answer; then exits.

    Exits without running it if the caller has forgotten the request.
    """
    status = 1
    try:
        sock.close()
        if request.get("is_call"):
            die_with_parent(server_pid)
            # Processes that the user's code starts inherit the handling of SIGTERM, and must end
            # by it: a pool of multiprocessing would wait for them for ever.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        carrier_fd, wait_fd, *others = fds
        if not os.read(wait_fd, 1):
            os._exit(0)
        os.close(wait_fd)
        leave_removed_directory()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with os.fdopen(carrier_fd, "rb") as carrier:
            payload = carrier.read()
        module, _, function = request["target"].partition(":")
        getattr(importlib.import_module(module), function)(payload, *others)
        status = 0
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        flush_own()
        os._exit(status)
