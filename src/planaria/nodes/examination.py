"""Examines this machine for what a job needs: versions, memory, clock, limits, devices and ports.

It reads what the kernel says, and changes nothing. It neither imports torch nor waits for anything,
so a machine can examine itself while it runs a node.
"""

import contextlib
import ctypes
import os
import platform
import resource
import shutil
import socket
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Final

from planaria.checkpoint.memory.room import available_bytes, total_bytes
from planaria.core.checkups import CheckResult
from planaria.core.machine_messages import MachineExamined, MachineFacts
from planaria.transport.sockets import listening_socket

_OPEN_FILES_MIN: Final = 4096  # A job of a thousand nodes with two devices each needs as many.
_PROCESSES_MIN: Final = 1024
_SHARED_BYTES_MIN: Final = 1 << 30
_AVAILABLE_BYTES_MIN: Final = 1 << 30
_PORTS_MIN: Final = 4096
_SLOW_CLOCKS: Final = frozenset(("acpi_pm", "hpet", "jiffies"))
_TIME_ERROR: Final = 5  # The state of adjtimex for a clock that nobody synchronises.


def versions_of_this_machine() -> dict[str, str]:
    """The versions, by name, that machines of one job should have in common."""
    names = ("torch", "planaria")
    return {"python": platform.python_version(), **{name: _version(name) for name in names}}


def facts_of_this_machine(host: str, domain: str) -> MachineFacts:
    """The facts on this machine that its head needs; the driver of its devices may take long."""
    return MachineFacts(
        name=_name(),
        host=host,
        domain=domain,
        processors=len(os.sched_getaffinity(0)),
        memory_bytes=total_bytes(),
        processor=_processor_model(),
        devices=tuple(device_models()),
        versions=versions_of_this_machine(),
    )


def checks_of_this_machine(host: str = "") -> tuple[CheckResult, ...]:
    """What this machine is like, and what should be changed.

    Args:
        host: address at which others reach this machine; "": any.
    """
    devices = device_models()
    return (
        _python(),
        _torch(devices),
        CheckResult(subject="planaria", value=_version("planaria") or "not installed"),
        _processors(),
        _memory(),
        _clock(),
        _clock_source(),
        _open_files(),
        _processes(),
        _locked_memory(),
        _shared_memory(),
        CheckResult(subject="devices", value=_counts_text(devices) or "none"),
        _ports(host),
    )


def failed_examination(error: Exception, number: int, *, received_s: float) -> MachineExamined:
    """The answer of a machine that could not examine itself."""
    remedy = "its agent could not examine the machine; the agent's log has the whole error"
    check = CheckResult(subject="examination", value=repr(error), remedy=remedy)
    return MachineExamined(
        checks=(check,), received_s=received_s, sent_s=time.time(), number=number
    )


def _name() -> str:
    """The name of this machine.

    Slurm knows its machines by names of their own, which need not be the hosts'. In Kubernetes the
    host name is that of the pod's index, which another machine may have next.
    """
    names = map(os.environ.get, ("SLURMD_NODENAME", "PLANARIA_KUBERNETES_NODE"))
    return next(filter(None, names), socket.gethostname())


# -- versions, processors, memory and devices -----------------------------------------------------


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _python() -> CheckResult:
    value = f"{platform.python_version()}, {platform.system()} {platform.release()}"
    remedy = "" if sys.platform == "linux" else "planaria runs on Linux alone"
    return CheckResult(subject="Python", value=value, remedy=remedy, is_fatal=bool(remedy))


def _torch(devices: list[str]) -> CheckResult:
    version, remedy = _version("torch"), ""
    if not version:
        remedy = "a machine that trains needs it: pip install torch"
    elif devices and version.endswith("+cpu"):
        remedy = "this build cannot use the devices: install one for them from pytorch.org"
    return CheckResult(
        subject="torch", value=version or "not installed", remedy=remedy, is_fatal=not version
    )


def _processor_model() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _processors() -> CheckResult:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count()
    return CheckResult(
        subject="processors", value=f"{usable} of {there} usable: {_processor_model()}"
    )


def _memory() -> CheckResult:
    available, total = available_bytes(), total_bytes()
    remedy = "" if available >= _AVAILABLE_BYTES_MIN else "end what else runs here"
    value = f"{_size_text(available)} of {_size_text(total)} available"
    return CheckResult(subject="memory", value=value, remedy=remedy)


def device_models(root: Path = Path("/")) -> list[str]:
    """The model of each device, as drivers name it."""
    models = []
    for path in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        with contextlib.suppress(OSError):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            texts = (line.partition(":")[2].strip() for line in lines if line.startswith("Model"))
            models.append(next(texts, "NVIDIA"))
    # A container may hide what the driver says, but not the devices that it is given.
    return models or ["NVIDIA" for _ in root.glob("dev/nvidia[0-9]*")]


def _counts_text(models: list[str]) -> str:
    return ", ".join(f"{models.count(model)} x {model}" for model in dict.fromkeys(models))


# -- the clock ------------------------------------------------------------------------------------


class _Timex(ctypes.Structure):
    """The beginning of struct timex, and more room than its end needs."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("end", ctypes.c_byte * 256),
    )


def _adjtimex() -> tuple[int, float]:
    """The state of the kernel's clock, and the largest error in seconds that it claims; (-1, 0.0)
    if the kernel does not say."""
    times = _Timex()
    try:
        state = int(ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(times)))
    except AttributeError:
        return -1, 0.0
    return state, times.maxerror / 1e6


def _clock() -> CheckResult:
    state, error_s = _adjtimex()
    remedy = ""
    if state < 0:
        value = "the kernel does not say whether it is synchronised"
    elif state == _TIME_ERROR:
        value = "not synchronised"
        remedy = (
            "run a time service (chronyd, or systemd-timesyncd), so that times in logs can be "
            "compared and certificates are valid; leases and plans do not depend on it"
        )
    else:
        value = f"synchronised, to within {1000 * error_s:.0f} ms"
    return CheckResult(subject="clock", value=value, remedy=remedy)


def _clock_source(root: Path = Path("/")) -> CheckResult:
    path = root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
    name = _first_line(path) or "unknown"
    remedy = ""
    if name in _SLOW_CLOCKS:
        remedy = "each look at the clock is slow: choose tsc or kvm-clock at the machine's boot"
    return CheckResult(subject="clock source", value=name, remedy=remedy)


# -- limits ---------------------------------------------------------------------------------------


def _limit_text(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _open_files() -> CheckResult:
    """The hard limit counts: a job raises its soft limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = ""
    if hard != resource.RLIM_INFINITY and hard < _OPEN_FILES_MIN:
        remedy = f"raise the hard limit to {_OPEN_FILES_MIN} (limits.conf, or LimitNOFILE)"
    return CheckResult(subject="open files", value=_limit_text(hard), remedy=remedy)


def _processes(root: Path = Path("/")) -> CheckResult:
    """The limit on processes and threads, of the user or of the control group."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    group = _first_line(root / "sys/fs/cgroup/pids.max")
    if group.isdigit():
        is_lower = limit == resource.RLIM_INFINITY or int(group) < limit
        limit = int(group) if is_lower else limit
    remedy = ""
    if limit != resource.RLIM_INFINITY and limit < _PROCESSES_MIN:
        remedy = f"raise it to {_PROCESSES_MIN} (ulimit -u, or pids.max of the container)"
    return CheckResult(subject="processes", value=_limit_text(limit), remedy=remedy)


def _locked_memory(root: Path = Path("/")) -> CheckResult:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_fabric = (root / "dev/infiniband").exists()
    remedy = ""
    if has_fabric and limit != resource.RLIM_INFINITY:
        remedy = "InfiniBand needs it unlimited (ulimit -l unlimited, or LimitMEMLOCK)"
    value = "unlimited" if limit == resource.RLIM_INFINITY else _size_text(limit)
    return CheckResult(subject="locked memory", value=value, remedy=remedy)


def _shared_memory(path: Path = Path("/dev/shm")) -> CheckResult:
    try:
        num_bytes = shutil.disk_usage(path).total
    except OSError:
        num_bytes = 0
    remedy = ""
    if num_bytes < _SHARED_BYTES_MIN:
        remedy = (
            "data loaders with processes and NCCL need it: mount a larger tmpfs there (docker run "
            "--shm-size=8g)"
        )
    value = _size_text(num_bytes) if num_bytes else f"there is no {path}"
    return CheckResult(subject="shared memory", value=value, remedy=remedy)


# -- ports ----------------------------------------------------------------------------------------


def _ports(host: str, root: Path = Path("/")) -> CheckResult:
    words = _first_line(root / "proc/sys/net/ipv4/ip_local_port_range").split()
    first, last = (int(word) for word in words) if len(words) == 2 else (0, 0)
    try:
        listening_socket(host).close()
    except OSError as error:
        remedy = "allow this user to listen at ports, and free some"
        value = f"none can be opened: {error.strerror or error}"
        return CheckResult(subject="ports", value=value, remedy=remedy, is_fatal=True)
    remedy = ""
    if words and last - first + 1 < _PORTS_MIN:
        remedy = f"widen net.ipv4.ip_local_port_range to {_PORTS_MIN} ports"
    value = f"can be opened; free ones are from {first} to {last}" if words else "can be opened"
    return CheckResult(subject="ports", value=value, remedy=remedy)


def _first_line(path: Path) -> str:
    """The first line of a file; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").partition("\n")[0].strip()
    except OSError:
        return ""


def _size_text(num_bytes: int) -> str:
    mib = num_bytes / 2**20
    return f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"
