"""What connects test hosts: a bridge between namespaces, or the loopback interface.

The bridge lies in a network namespace of its own, which has no name. So two test runs never meet,
and the kernel removes everything with the last process of the namespaces, however a run ends.

A cut loses packets silently: nothing is refused and nothing is closed. The kernels that run tests
often have neither netem nor packet filters. So a host is cut off at its port of the bridge, and
from a single other host by a permanent neighbour entry with a hardware address that nobody has.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final, Protocol

import psutil
import pytest

from helpers.command import wait_for

_UNSHARE: Final = (
    *("unshare", "--net", "--mount", "--pid", "--uts", "--ipc"),
    *("--fork", "--kill-child", "--mount-proc"),
)
_NOBODY: Final = "02:00:00:ff:ff:ff"
_BURST_BYTES: Final = 1 << 16
_QUEUE: Final = "100ms"
TIMEOUT_S: Final = 60.0


class Network(Protocol):
    """How hosts are kept apart from one another, and connected.

    A host is named by its index. Its `pid` is that of its first process. What cuts is refused by a
    network that cannot cut.
    """

    def address(self, host: int) -> str:
        """The address of a host."""

    def command(self, init: tuple[str, ...], name: str, visible: tuple[Path, ...]) -> list[str]:
        """The command that starts a host's first process.

        Args:
            init: the command of that process.
            visible: directories that look the same inside and outside.
        """

    def environment(self, directory: Path) -> dict[str, str]:
        """What makes a host's temporary directory its own, where namespaces do not."""

    def plug(self, host: int, pid: int) -> None:
        """Connects a host that has started."""

    def unplug(self, host: int) -> None:
        """Forgets the connection of a host that has ended."""

    def members(self, pid: int) -> list[psutil.Process]:
        """The processes of the host, the first one included."""

    def kill(self, pid: int) -> None:
        """Kills all processes of the host, as much at once as can be."""

    def set_port(self, host: int, state: str) -> None:
        """Lets packets of the host through both ways ("up"), or loses them ("down")."""

    def lose(self, pid: int, target: int) -> None:
        """Loses all packets from the host with this pid to another."""

    def find(self, pid: int, target: int) -> None:
        """Ends `lose`."""

    def set_rate(self, host: int, pid: int, bytes_per_s: int) -> None:
        """Limits what the host may send, and what it may receive."""

    def clear_rate(self, host: int, pid: int) -> None:
        """Ends `set_rate`."""

    def restore(self, host: int, pid: int) -> None:
        """Ends all that has been done to a host's packets."""

    def close(self) -> None:
        """Ends the network, when all hosts have ended."""


class Bridge:
    """Hosts in namespaces of their own on a bridge: 10.77.0.0/16."""

    def __init__(self) -> None:
        self._ports: dict[int, str] = {}
        self._num_ports = 0
        self._holder = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )  # It ends with the test run, which closes its input.
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.write(b"\n")
        self._holder.stdin.flush()
        assert self._holder.stdout.readline()
        self._ip("link add bridge type bridge", "link set bridge up")

    def address(self, host: int) -> str:
        return f"10.77.{host // 200}.{host % 200 + 10}"

    def command(self, init: tuple[str, ...], name: str, visible: tuple[Path, ...]) -> list[str]:
        covered = Path(tempfile.gettempdir())
        hidden = [str(path) for path in visible if path.is_relative_to(covered)]
        return [*_UNSHARE, *init, name, str(covered), *hidden]

    def environment(self, directory: Path) -> dict[str, str]:
        del directory
        return {}

    def plug(self, host: int, pid: int) -> None:
        self._num_ports += 1
        self._ports[host] = port = f"port{self._num_ports}"
        hardware = f"02:00:00:00:{host // 200:02x}:{host % 200 + 10:02x}"
        self._ip(
            f"link add {port} type veth peer name eth0 address {hardware} netns {pid}",
            f"link set {port} master bridge up",
        )
        _run(
            pid,
            "ip",
            f"address add {self.address(host)}/16 dev eth0",
            "link set eth0 up",
            "link set lo up",
        )

    def unplug(self, host: int) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):  # The kernel was faster.
            self._ip(f"link delete {self._ports.pop(host)}")

    def members(self, pid: int) -> list[psutil.Process]:
        namespace = os.readlink(f"/proc/{pid}/ns/pid")
        return list(_members(namespace))

    def kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # The kernel kills its whole namespace.

    def set_port(self, host: int, state: str) -> None:
        self._ip(f"link set {self._ports[host]} {state}")

    def lose(self, pid: int, target: int) -> None:
        _run(
            pid,
            "ip",
            f"neigh replace {self.address(target)} lladdr {_NOBODY} dev eth0 nud permanent",
        )

    def find(self, pid: int, target: int) -> None:
        _run(pid, "ip", f"neigh delete {self.address(target)} dev eth0")

    def set_rate(self, host: int, pid: int, bytes_per_s: int) -> None:
        limit = f"tbf rate {8 * bytes_per_s}bit burst {_BURST_BYTES} latency {_QUEUE}"
        for holder_pid, device in self._ends(host, pid):
            _run(holder_pid, "tc", f"qdisc replace dev {device} root {limit}")

    def clear_rate(self, host: int, pid: int) -> None:
        for holder_pid, device in self._ends(host, pid):
            _run(holder_pid, "tc", f"qdisc delete dev {device} root")

    def restore(self, host: int, pid: int) -> None:
        self.set_port(host, "up")
        _run(pid, "ip", "neigh flush dev eth0 nud permanent")
        with contextlib.suppress(subprocess.CalledProcessError):  # There was no rate.
            self.clear_rate(host, pid)

    def _ends(self, host: int, pid: int) -> tuple[tuple[int, str], ...]:
        """Both ends of the host's cable: a process in the namespace, and the device there."""
        return (pid, "eth0"), (self._holder.pid, self._ports[host])

    def close(self) -> None:
        self._holder.communicate(timeout=TIMEOUT_S)

    def _ip(self, *lines: str) -> None:
        _run(self._holder.pid, "ip", *lines)


class Loopback:
    """Hosts that are processes on the loopback interface, at 127.0.0.2 and so on."""

    def address(self, host: int) -> str:
        return f"127.0.{host // 200}.{host % 200 + 2}"

    def command(self, init: tuple[str, ...], name: str, visible: tuple[Path, ...]) -> list[str]:
        del name, visible
        return list(init)

    def environment(self, directory: Path) -> dict[str, str]:
        temporary = directory / "tmp"
        temporary.mkdir(exist_ok=True)
        return {"TMPDIR": str(temporary)}

    def plug(self, host: int, pid: int) -> None:
        """Does nothing: the interface is there."""

    def unplug(self, host: int) -> None:
        """Does nothing, see `plug`."""

    def members(self, pid: int) -> list[psutil.Process]:
        first = psutil.Process(pid)
        return [first, *(child for child in first.children(recursive=True) if is_alive(child))]

    def kill(self, pid: int) -> None:
        kill_all(lambda: self.members(pid)[1:])
        os.kill(pid, signal.SIGKILL)

    def set_port(self, host: int, state: str) -> None:
        raise NotImplementedError(f"{NEEDS}: port of {host} {state}")

    def lose(self, pid: int, target: int) -> None:
        raise NotImplementedError(f"{NEEDS}: {pid} to {target}")

    def find(self, pid: int, target: int) -> None:
        raise NotImplementedError(f"{NEEDS}: {pid} to {target}")

    def set_rate(self, host: int, pid: int, bytes_per_s: int) -> None:
        raise NotImplementedError(f"{NEEDS}: {host}, {pid}: {bytes_per_s} bytes/s")

    def clear_rate(self, host: int, pid: int) -> None:
        raise NotImplementedError(f"{NEEDS}: {host}, {pid}")

    def restore(self, host: int, pid: int) -> None:
        """Does nothing, see `plug`."""

    def close(self) -> None:
        """Does nothing, see `plug`."""


def kill_all(processes: Callable[[], Sequence[psutil.Process]]) -> None:
    """Kills what the function returns until it returns nothing."""

    def have_ended() -> bool:
        rest = processes()
        for process in rest:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return not rest

    wait_for(have_ended, what="all processes of the host have ended", timeout_s=TIMEOUT_S)


NEEDS: Final = "only hosts in namespaces can be cut off or slowed down"


@cache
def obstacle() -> str:
    """Why this user cannot have hosts in namespaces; "": it can."""
    if os.geteuid():
        return "the user is not root"
    if sys.platform != "linux":
        return "this is not Linux"
    try:
        for words in (["ip", "link", "add", "bridge", "type", "bridge"], ["tc", "qdisc"]):
            subprocess.run([*_UNSHARE, *words], check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"there is no program {error.filename}"
    except subprocess.CalledProcessError as error:
        return f"namespaces are refused: {error.stderr.strip()}"
    return ""


needs_namespaces = pytest.mark.skipif(
    bool(obstacle()), reason=f"needs hosts in namespaces, but {obstacle()}"
)


def best_network() -> Network:
    """A bridge where this user may have one."""
    return Loopback() if obstacle() else Bridge()


def _run(pid: int, program: str, *lines: str) -> None:
    """Runs `ip` or `tc` with these lines in the network namespace of a process."""
    subprocess.run(
        ["nsenter", f"--net=/proc/{pid}/ns/net", program, "-batch", "-"],
        input="\n".join(lines),
        check=True,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def _members(namespace: str) -> Iterator[psutil.Process]:
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.readlink(f"/proc/{pid}/ns/pid") == namespace:
                process = psutil.Process(pid)
                if is_alive(process):
                    yield process


def is_alive(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that has ended may wait for its parent."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
