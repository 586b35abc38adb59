"""Test hosts: "machines" on this machine, each with an address, a name and files of its own.

Root gets namespaces (network, mount, process, name) on a bridge. Others get processes at addresses
of the loopback interface, with the same interface but for cuts and rates, see `needs_namespaces`.

    with Hosts(3) as hosts:
        server = hosts[0].start("planaria", "train", ...)
        port = server.wait_for_line(r"port (\\d+)")[1]
        hosts[1].kill()

A host sees the files of this machine, except the directory for temporary files, /dev/shm and
/run/user, which are empty and its own. In the first one it sees its `directory`, the repository and
what `Hosts` is told to share, at the same paths as this process. Everything ends with the
`Hosts`, or with the process that made it, however that ends.
"""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from helpers.command import wait_for
from helpers.host_networks import TIMEOUT_S, Network, best_network, kill_all

_ROOT: Final = Path(__file__).resolve().parents[2]
_INIT: Final = Path(__file__).with_name("host_init.py")
_PREFIX: Final = "planaria-hosts-"
_PACKET_BYTES_MAX: Final = 1 << 16
# A job must not learn from the environment of the tests what another job or a scheduler put there.
# And each host imports torch, which takes twice as long where Python may not keep bytecode.
_LEFT_OUT: Final = (
    *("PET_", "PLANARIA_", "PYTEST_", "SLURM_", "TORCHELASTIC_", "XDG_"),
    "PYTHONDONTWRITEBYTECODE",
)

# A process that waits in the kernel stops when it leaves it. It may do so for ever: a parent that
# has called vfork waits for its child, which may have been stopped first.
_STANDING: Final = {psutil.STATUS_STOPPED, psutil.STATUS_DISK_SLEEP}
_GOING: Final = {psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING, psutil.STATUS_DISK_SLEEP}


class Process:
    """A process of a host.

    Attributes:
        command: words of its command line.
        pid: its pid, as this process sees it.
        name: short text for messages: its host and its program.
    """

    def __init__(self, host: "Host", command: Sequence[str], *, pidfd: int, paths: "_Paths"):
        self.command = tuple(command)
        self.pid = _pid(pidfd)
        self.name = f"{Path(command[0]).name} on {host.name}"
        self._host = host
        self._pidfd = pidfd
        self._paths = paths
        self.status: int | None = None

    @property
    def returncode(self) -> int | None:
        """The exit status, a negative one for a signal; None while it runs."""
        self._host.receive()
        return self.status

    @property
    def output(self) -> str:
        """What it has printed so far, errors among it."""
        return self._paths.read()

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """The exit status, once it has ended; AssertionError if it does not in time."""
        what = f"{self.name} ends"
        self._wait_for(lambda: self.returncode is not None, what=what, timeout_s=timeout_s)
        assert self.status is not None
        return self.status

    def wait_for_line(
        self, pattern: str, timeout_s: float = TIMEOUT_S, *, start: int = 0
    ) -> re.Match[str]:
        """The first match in what it prints.

        AssertionError if it ends, or the time is over, without one.

        Args:
            pattern: regular expression, in which ^ and $ stand for the ends of a line.
            start: length of the output before which matches do not count.
        """
        matches: list[re.Match[str]] = []

        def is_there() -> bool:
            has_ended = self.returncode is not None  # Before reading, or the last line is missed.
            match = re.search(pattern, self.output[start:], re.MULTILINE)
            assert match or not has_ended, f"{self.name} has ended with {self.status}:{self._told}"
            matches.extend([match] if match else [])
            return bool(match)

        self._wait_for(is_there, what=f"{self.name} prints {pattern!r}", timeout_s=timeout_s)
        return matches[0]

    def signal(self, number: int) -> None:
        """Sends it a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def stop(self, timeout_s: float = TIMEOUT_S) -> int:
        """Asks it to end by SIGTERM; returns the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self) -> int:
        """Kills it, and none of its children; returns the exit status."""
        self.signal(signal.SIGKILL)
        return self.wait()

    def close(self) -> None:
        """Forgets a process that has ended."""
        os.close(self._pidfd)

    def _wait_for(self, condition: Callable[[], bool], *, what: str, timeout_s: float) -> None:
        try:
            wait_for(condition, what=what, timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; it has printed:{self._told}") from None

    @property
    def _told(self) -> str:
        return f"\n{self.output}"


class _Paths:
    """Files that take what a process prints; both may be the same."""

    def __init__(self, output: Path, errors: Path) -> None:
        self.output = output
        self.errors = errors

    def read(self) -> str:
        return self.output.read_text(errors="replace")


class Host:
    """One host; `Hosts` makes it.

    Attributes:
        index: its index in `Hosts`.
        name: its host name, in namespaces.
        address: its address, which other hosts reach it by.
        directory: its disk, at this path inside and outside. It outlives a loss of power.
    """

    def __init__(
        self, index: int, *, network: Network, root: Path, shared: tuple[Path, ...]
    ) -> None:
        self.index = index
        self.name = f"host-{index}"
        self.address = network.address(index)
        self.directory = root / self.name
        self.directory.mkdir()
        self._logs = root / "logs"
        self._network = network
        self._visible = (_ROOT, Path(sys.prefix), Path(sys.base_prefix), self.directory, *shared)
        self._lock = threading.RLock()
        self._processes: dict[int, Process] = {}  # Those that run, by their pid inside.
        self._ended: list[Process] = []
        self._num_started = 0
        self.is_up = False

    def boot(self) -> None:
        """Starts the host, for the first time or after it has lost power."""
        assert not self.is_up
        own_socket, init_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own_socket.settimeout(TIMEOUT_S)
        fd = init_socket.fileno()
        init = (sys.executable, "-IS", str(_INIT), str(fd))
        with init_socket, (self._logs / f"{self.name}.init").open("ab") as errors:
            self._starter = subprocess.Popen(
                self._network.command(init, self.name, self._visible),
                pass_fds=(fd,),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
            )
        self._socket = own_socket
        self.is_up = True
        _, fds = self._receive_packet()
        self._init_pid = _pid(fds[0])
        os.close(fds[0])
        self._network.plug(self.index, self._init_pid)

    def start(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Process:
        """Starts a process, in a session of its own.

        Args:
            env: variables that it has beside those of this process.
            cwd: its working directory; None: the host's directory.
        """
        path = self._log_path(command)
        return self._start(command, env or {}, cwd, _Paths(path, path))

    def run(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> str:
        """Runs a process; returns its standard output. AssertionError if it fails."""
        path = self._log_path(command)
        paths = _Paths(path, path.with_suffix(".err"))
        process = self._start(command, env or {}, cwd, paths)
        status = process.wait(timeout_s)
        output = paths.read()
        assert status == 0, f"{process.name} ended with {status}: {paths.errors.read_text()}"
        return output

    def processes(self) -> list[psutil.Process]:
        """All its processes that are alive, without the one that starts the others."""
        members = self._network.members(self._init_pid) if self.is_up else []
        return [process for process in members if process.pid != self._init_pid]

    def kill_processes(self) -> None:
        """Kills every process; the host goes on, without any."""
        kill_all(self.processes)

    def kill(self) -> None:
        """Power is lost: the network is gone first, then every process at once.

        So other hosts hear nothing. On the loopback interface they hear that connections close.
        """
        assert self.is_up
        with contextlib.suppress(NotImplementedError):
            self.cut()
        self._end()

    def hang(self) -> None:
        """Stops every process."""
        self._signal_all(signal.SIGSTOP, _STANDING)

    def go_on(self) -> None:
        """Ends `hang`."""
        self._signal_all(signal.SIGCONT, _GOING)

    def cut(self) -> None:
        """Loses silently whatever is sent from the host or to it."""
        self._network.set_port(self.index, "down")

    def heal(self) -> None:
        """Ends `cut`."""
        self._network.set_port(self.index, "up")

    def lose_packets_to(self, other: "Host") -> None:
        """Loses silently what this host sends to another, but not what that one sends."""
        self._network.lose(self._init_pid, other.index)

    def find_again(self, other: "Host") -> None:
        """Ends `lose_packets_to`."""
        self._network.find(self._init_pid, other.index)

    def set_rate(self, bytes_per_s: int) -> None:
        """Limits what the host may send, and what it may receive, in a second."""
        self._network.set_rate(self.index, self._init_pid, bytes_per_s)

    def clear_rate(self) -> None:
        """Ends `set_rate`."""
        self._network.clear_rate(self.index, self._init_pid)

    def restore(self) -> None:
        """Makes the host as after `boot`: without processes, and reached by all; its disk stays."""
        if self.is_up:
            self.kill_processes()
        self.mend()

    def mend(self) -> None:
        """Ends all that was done to the host; the processes that it still has go on."""
        if self.is_up:
            self.go_on()
            self._network.restore(self.index, self._init_pid)
        else:
            self.boot()

    def receive(self) -> None:
        """Takes the news of processes that have ended."""
        with self._lock:
            while self.is_up and self._has_news():
                packet, _ = self._receive_packet()
                self._on_end(packet)

    def close(self) -> None:
        """Ends all processes, if they have not ended."""
        if self.is_up:
            self._end()
        for process in self._ended:
            process.close()

    def _start(
        self, command: Sequence[str], env: Mapping[str, str], cwd: Path | None, paths: _Paths
    ) -> Process:
        assert self.is_up, f"{self.name} has no power"
        environment = {**self._environment(), **env}
        program = shutil.which(command[0], path=environment.get("PATH"))
        assert program, f"there is no program {command[0]}"
        request = {
            "command": [program, *command[1:]],
            "environment": environment,
            "directory": str(cwd or self.directory),
        }
        with (
            self._lock,
            paths.output.open("ab") as output,
            paths.errors.open("ab") as errors,
        ):
            fds = [output.fileno(), errors.fileno()]
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            while True:
                packet, pidfds = self._receive_packet()
                if "pid" in packet:
                    break
                self._on_end(packet)
            process = Process(self, command, pidfd=pidfds[0], paths=paths)
            self._processes[packet["pid"]] = process
        return process

    def _environment(self) -> dict[str, str]:
        """That of this process, without what belongs to a user's session or to another job."""
        kept = {key: text for key, text in os.environ.items() if not key.startswith(_LEFT_OUT)}
        path = [str(_ROOT / "src"), str(_ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        return {
            **kept,
            **self._network.environment(self.directory),
            "HOME": str(self.directory),
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": ":".join(filter(None, path)),
            "PYTHONUNBUFFERED": "1",
        }

    def _log_path(self, command: Sequence[str]) -> Path:
        with self._lock:
            self._num_started += 1
            return self._logs / f"{self.name}-{self._num_started}-{Path(command[0]).name}.out"

    def _has_news(self) -> bool:
        is_readable = bool(select.select([self._socket], [], [], 0)[0])
        try:
            return is_readable and bool(self._socket.recv(1, socket.MSG_PEEK))
        except ConnectionResetError:  # The host has ended.
            return False

    def _receive_packet(self) -> tuple[dict[str, int], list[int]]:
        data, fds, _, _ = socket.recv_fds(self._socket, _PACKET_BYTES_MAX, 1)
        assert data, f"{self.name} has ended: {(self._logs / f'{self.name}.init').read_text()}"
        return json.loads(data), list(fds)

    def _on_end(self, packet: Mapping[str, int]) -> None:
        process = self._processes.pop(packet["ended"])
        process.status = packet["status"]
        self._ended.append(process)

    def _end(self) -> None:
        with self._lock:
            self._network.kill(self._init_pid)
            self._starter.wait(timeout=TIMEOUT_S)
            self.receive()
            self._network.unplug(self.index)
            self._socket.close()
            self.is_up = False
            for pid in tuple(self._processes):
                self._on_end({"ended": pid, "status": -signal.SIGKILL})

    def _signal_all(self, number: int, statuses: Container[str]) -> None:
        """Sends a signal to every process, until all have got it and have one of the statuses.

        Those that processes start meanwhile are among them.
        """
        signalled: set[psutil.Process] = set()

        def is_done() -> bool:
            members = self._network.members(self._init_pid)
            others = [
                process
                for process in members
                if process not in signalled or _status(process) not in statuses
            ]
            for process in others:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
                signalled.add(process)
            return not others

        wait_for(is_done, what=f"signal {number} reaches all of {self.name}", timeout_s=TIMEOUT_S)


class Hosts:
    """A number of hosts, connected with one another; a context manager, which ends them.

    Args:
        num: number of hosts.
        shared: directories that all hosts see, at these paths, as on a shared file system.
        network: what makes the network that connects them.
    """

    def __init__(
        self,
        num: int,
        *,
        shared: Sequence[Path] = (),
        network: Callable[[], Network] = best_network,
    ) -> None:
        _remove_stale_directories()
        self._root = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        (self._root / "logs").mkdir()
        self._stack = contextlib.ExitStack()
        self._stack.callback(shutil.rmtree, self._root, ignore_errors=True)
        with self._stack:
            self._network = network()
            self._stack.callback(self._network.close)
            self._hosts: list[Host] = []
            for index in range(num):
                host = Host(index, network=self._network, root=self._root, shared=tuple(shared))
                self._stack.callback(host.close)
                host.boot()
                self._hosts.append(host)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def cut_one_way(self, source: Host, target: Host) -> None:
        """Loses silently what the source sends to the target, but not the other way."""
        source.lose_packets_to(target)

    def heal_one_way(self, source: Host, target: Host) -> None:
        """Ends `cut_one_way`."""
        source.find_again(target)

    def cut_between(self, group_a: Sequence[Host], group_b: Sequence[Host]) -> None:
        """Loses silently what hosts of one group send to hosts of the other, both ways."""
        for source, target in _pairs(group_a, group_b):
            self.cut_one_way(source, target)

    def heal_between(self, group_a: Sequence[Host], group_b: Sequence[Host]) -> None:
        """Ends `cut_between`."""
        for source, target in _pairs(group_a, group_b):
            self.heal_one_way(source, target)


def _pairs(group_a: Sequence[Host], group_b: Sequence[Host]) -> Iterator[tuple[Host, Host]]:
    for a in group_a:
        for b in group_b:
            yield a, b
            yield b, a


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def _pid(pidfd: int) -> int:
    """The pid of a process, as this process sees it."""
    text = Path(f"/proc/self/fdinfo/{pidfd}").read_text()
    return int(text.split("Pid:")[1].split()[0])


def _remove_stale_directories() -> None:
    """Removes the directories of runs that were killed; the kernel has ended all else of them."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)
