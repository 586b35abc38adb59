"""A Unix socket of the launcher, over which the user sends requests to a running job.

The socket is in a directory that only the user can write to, is named after the job and the
process, and is removed with the launcher. A job takes the first of several directories that can be
used. A client looks in all of them, because a shell, a scheduler and an ssh session set different
environment variables. If none can be used, the job takes no requests but trains all the same.
"""

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from planaria.errors import ConfigError
from planaria.nodes.head.requests import (
    REQUEST_BYTES_MAX,
    Answer,
    Request,
    RequestReply,
    answer_requests,
)
from planaria.nodes.head.user_files import plain_name, state_directory

# Sockets of other launchers that one looks at as it begins, since killed ones leave theirs.
_LOOKED_AT_MAX: Final = 100
_LOOK_S: Final = 0.02


@contextlib.asynccontextmanager
async def serve_requests(
    job: str, answer: Answer, *, note: Callable[[str], None]
) -> AsyncIterator[None]:
    """Serves requests while the body of the `with` runs.

    Args:
        job: name of the job.
        note: shows the user why no requests can be served, and what would help.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer_requests(reader, writer, answer)

    with contextlib.ExitStack() as stack:
        try:
            # Even with "/proc/self/fd/N/" before it, the name fits into a socket path (107 bytes).
            listener = _listener(f"{plain_name(job)}-{os.getpid()}.sock", stack)
            server = await asyncio.start_unix_server(serve, sock=listener, limit=REQUEST_BYTES_MAX)
            stack.callback(server.close)
        except OSError as error:
            note(
                f"planaria status, drain and events cannot reach this job, which trains on: "
                f"{error}; set XDG_RUNTIME_DIR to a directory of yours that nobody else can enter"
            )
        yield


def _listener(name: str, stack: contextlib.ExitStack) -> socket.socket:
    """A socket of that name in the first directory that can be used; `stack` removes it.

    Raises:
        OSError: no directory can be used.
    """
    reasons = []
    directories = socket_directories()
    for path in directories:
        try:
            # In the user's home, which comes last, parent directories may be missing too.
            path.mkdir(mode=0o700, parents=path == directories[-1], exist_ok=True)
            with contextlib.ExitStack() as opened:
                descriptor = opened.enter_context(_own_directory(path))
                os.fchmod(descriptor, 0o700)
                for other in _socket_names(descriptor)[:_LOOKED_AT_MAX]:
                    _is_served(descriptor, other, _LOOK_S)
                listener = opened.enter_context(socket.socket(socket.AF_UNIX))
                # It has its name once it listens, or it would be taken for a killed launcher's.
                silent = f"{os.getpid()}.new"
                for left in (name, silent):  # By a killed launcher that had the same pid.
                    _unlink(left, descriptor)
                opened.callback(_unlink, silent, descriptor)
                listener.bind(_path(descriptor, silent))
                listener.listen()
                os.rename(silent, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
                opened.callback(_unlink, name, descriptor)
                stack.enter_context(opened.pop_all())
                return listener
        except (OSError, ValueError) as error:  # ValueError: the locale cannot encode a name.
            reasons.append(f"{path}: {getattr(error, 'strerror', None) or error}")
    raise OSError(f"there is no usable directory for its socket ({'; '.join(reasons)})")


def ask(request: Request, *, job: str, timeout_s: float) -> RequestReply:
    """Sends a request to a running job; returns its answer.

    Args:
        job: name of the job, or the name, "-" and the pid where several jobs have that name; "":
            the only job that runs.

    Raises:
        ConfigError: no such job runs here, several do, the job does not answer in time, or
            it is one of another version.
    """
    option = "--job" if job else ""
    with contextlib.ExitStack() as stack:
        running, refusals = _running_sockets(job, stack)
        if not running:
            here = (
                "no such job of yours runs on this machine" if job else "no job of yours runs here"
            )
            raise ConfigError(option, job, here + "".join(f"; {text}" for text in refusals))
        if len(running) > 1:
            jobs = Counter(_job_of(name) for _, name in running)
            known = {
                _job_of(name) if jobs[_job_of(name)] == 1 else _stem(name) for _, name in running
            }
            names = ", ".join(sorted(known))
            remedy = f"{len(running)} jobs run here: say with --job which of {names}"
            raise ConfigError(option, job, remedy)
        try:
            with _connection(*running[0], timeout_s) as sock:
                sock.sendall(msgspec.json.encode(request) + b"\n")
                data = sock.makefile("rb").readline()
        except TimeoutError as error:
            remedy = f"the job has not answered for {timeout_s:.0f} s"
            raise ConfigError(option, job, remedy) from error
        except OSError:
            data = b""
    if not data.endswith(b"\n"):
        return RequestReply(is_done=False, text="the job has ended")
    try:
        return msgspec.json.decode(data, type=RequestReply)
    except (RecursionError, ValueError) as error:
        remedy = f"the job has another version of planaria: {error}"
        raise ConfigError(option, job, remedy) from error


def _running_sockets(
    job: str, stack: contextlib.ExitStack
) -> tuple[list[tuple[int, str]], list[str]]:
    """The sockets of running jobs, and why some directories were not searched.

    A socket is given as the descriptor of its directory and its name.
    """
    running, refusals, searched = [], [], set()
    for path in socket_directories():
        try:
            descriptor = stack.enter_context(_own_directory(path))
        except PermissionError as error:
            refusals.append(f"{path} cannot be read: {error.strerror}")
            continue
        except OSError:
            continue
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) in searched:
            continue
        searched.add((status.st_dev, status.st_ino))
        running += [
            (descriptor, name)
            for name in _socket_names(descriptor)
            if (not job or job == _stem(name) or plain_name(job) == _job_of(name))
            and _is_served(descriptor, name, 1.0)
        ]
    return running, refusals


def _job_of(name: str) -> str:
    """The job's name, in the form of `plain_name`, from the name of a socket."""
    return _stem(name).rpartition("-")[0]


def _stem(name: str) -> str:
    """The job's name in that form, "-" and the pid of its launcher, from the name of a socket."""
    return name.removesuffix(".sock")


def _socket_names(directory: int) -> list[str]:
    return [name for name in sorted(os.listdir(directory)) if name.endswith(".sock")]


def _is_served(directory: int, name: str, timeout_s: float) -> bool:
    """Whether a launcher listens on a socket; removes one that a killed launcher has left."""
    try:
        _connection(directory, name, timeout_s).close()
    except ConnectionRefusedError:
        _unlink(name, directory)
        return False
    except OSError:
        return False
    return True


def _connection(directory: int, name: str, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(timeout_s)
    try:
        sock.connect(_path(directory, name))
    except OSError:
        sock.close()
        raise
    return sock


def _path(directory: int, name: str) -> str:
    """A path of the socket that is short, however long the path of the directory is."""
    return f"/proc/self/fd/{directory}/{name}"


def _unlink(name: str, directory: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory)


def socket_directories() -> tuple[Path, ...]:
    """The directories in which the sockets may be, the preferred one first."""
    environment = os.environ
    # Machines may share a temporary or a home directory, but a socket is reachable on one machine
    # only, and looks on others as if a killed launcher had left it.
    uid, machine = os.getuid(), plain_name(socket.gethostname())
    runtime = (environment.get("XDG_RUNTIME_DIR", ""), f"/run/user/{uid}")
    temporary = (environment.get("TMPDIR", ""), "/tmp")
    state = state_directory()
    paths = (
        *(Path(base, "planaria") for base in runtime),
        *(Path(base, f"planaria-{uid}-{machine}") for base in temporary),
        *([state / f"desk-{machine}"] if state else []),
    )
    return tuple(dict.fromkeys(path for path in paths if path.is_absolute()))


@contextlib.contextmanager
def _own_directory(path: Path) -> Iterator[int]:
    """A descriptor of a directory that only this user can write to.

    Raises:
        PermissionError: somebody else can write to it.
        OSError: it is not a directory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to somebody else")
        if stat.S_IMODE(status.st_mode) & 0o022:
            raise PermissionError(errno.EPERM, "others can write to it")
        yield descriptor
    finally:
        os.close(descriptor)
