"""The first process of a test host: it starts the host's other processes and tells how they end.

It is started as `host_init.py SOCKET_FD`, or, in namespaces of its own, as `host_init.py SOCKET_FD
NAME COVERED [VISIBLE ...]`: the host is called NAME, an empty file system lies over the directory
COVERED, and the directories VISIBLE show through it.

It says `{"pid": ..}` when the host is ready. A request is a JSON packet of a command, an
environment and a directory, with two descriptors for what the command prints. The answer is the
process's pid, followed at some time by its exit status. With a pid comes a pidfd, because the pid
means nothing outside the namespace. When the other end of the socket closes, by whatever end of the
tests, all processes of the host are killed.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

_PACKET_BYTES_MAX = 1 << 20
_PR_SET_CHILD_SUBREAPER = 36
_MS_BIND = 4096
_LIBC = ctypes.CDLL(None, use_errno=True)


def main(socket_fd: str, *furniture: str) -> None:
    """Serves requests until the other end of the socket is closed."""
    if furniture:
        _furnish(*furniture)
    # Whoever loses its parent becomes a child of this process, which then still finds it.
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_fd, signal_fd = os.pipe()
    os.set_blocking(signal_fd, False)
    signal.set_wakeup_fd(signal_fd)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with socket.socket(fileno=int(socket_fd)) as sock:
        sock.set_inheritable(False)
        _tell_pid(sock, os.getpid())
        poll = select.poll()
        poll.register(wake_fd, select.POLLIN)
        poll.register(sock, select.POLLIN)
        pids: set[int] = set()
        is_open = True
        while is_open:
            ready = {fd for fd, _ in poll.poll()}
            if wake_fd in ready:
                os.read(wake_fd, 4096)
                _reap(sock, pids)
            if sock.fileno() in ready:
                is_open = _serve_request(sock, pids)
    _kill_children()


def _furnish(name: str, covered: str, *visible: str) -> None:
    """Gives the host a name, and file systems of its own for what machines do not share."""
    socket.sethostname(name)
    fds = {path: os.open(path, os.O_PATH) for path in visible}
    for directory in (covered, "/dev/shm", "/run/user"):
        if os.path.isdir(directory):
            _mount("tmpfs", directory, "tmpfs", 0)
    for path, fd in fds.items():
        os.makedirs(path, exist_ok=True)
        _mount(f"/proc/self/fd/{fd}", path, "", _MS_BIND)
        os.close(fd)


def _mount(source: str, target: str, kind: str, flags: int) -> None:
    if _LIBC.mount(source.encode(), target.encode(), kind.encode(), flags, None):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), f"{source} at {target}")


def _tell_pid(sock: socket.socket, pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    socket.send_fds(sock, [json.dumps({"pid": pid}).encode()], [pidfd])
    os.close(pidfd)


def _reap(sock: socket.socket, pids: set[int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in pids:
            pids.remove(pid)
            code = os.waitstatus_to_exitcode(status)
            sock.sendall(json.dumps({"ended": pid, "status": code}).encode())


def _serve_request(sock: socket.socket, pids: set[int]) -> bool:
    """Starts the process that is asked for; False when nobody asks any more."""
    data, fds, _, _ = socket.recv_fds(sock, _PACKET_BYTES_MAX, 2)
    if not data:
        return False
    request = json.loads(data)
    pid = os.fork()
    if pid == 0:
        _become(request, fds)
    pids.add(pid)
    _tell_pid(sock, pid)
    for fd in fds:
        os.close(fd)
    return True


def _become(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Executes the command, in a session of its own as after a login."""
    try:
        os.setsid()
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        os.chdir(request["directory"])
        command = request["command"]
        os.execvpe(command[0], command, request["environment"])
    except OSError as error:
        os.write(2, f"{error}\n".encode())
    finally:
        os._exit(127)


def _kill_children() -> None:
    """Kills children until there are none, and with each its own, which become children here."""
    while pids := _children():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def _children() -> list[int]:
    children = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stat:
                parent = stat.read().rpartition(")")[2].split()[1]
        except OSError:  # It has ended meanwhile.
            continue
        if int(parent) == os.getpid():
            children.append(int(name))
    return children


if __name__ == "__main__":
    main(*sys.argv[1:])
