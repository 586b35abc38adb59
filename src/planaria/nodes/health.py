"""Whether this machine is fit for a node: memory, disk, devices, what Amazon EC2 says of it, and a
check of the user's own.

A machine is examined before it gets a node, and after a worker or a node on it has failed. One that
is unfit takes no node; a node that it runs leaves the job in peace. Errors that an application
causes (of NVIDIA's Xids 13, 31, 43, 45 and 68) say nothing of the machine.

Everything here may block for ever, on a disk or a driver that hangs. So it is called in a thread or
a process that can be left behind, and devices are examined by a process of their own, which asks
NVIDIA's management library (nvidia-ml-py, optional) and prints what is wrong as a JSON text:

    python -m planaria.nodes.health

Source: NVIDIA, "XID Errors" and "NVIDIA GPU Memory Error Management"; the list of applications' own
is that of NVIDIA's device plugin for Kubernetes.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from planaria.checkpoint.memory.room import available_bytes
from planaria.core.job import JobConfig
from planaria.nodes.child_answers import program_result
from planaria.nodes.daemon_threads import answer_of_thread
from planaria.nodes.examination import device_models
from planaria.nodes.notices import ec2_problem

logger = logging.getLogger(__name__)

EXAMINATION_S: Final = 90.0  # Whoever asks waits no longer; a machine that takes longer is unfit.
_COMMAND_S: Final = 40.0
_DEVICES_S: Final = 30.0
_AVAILABLE_BYTES_MIN: Final = 256 << 20
_TRIAL_BYTES: Final = 1 << 20
_TEXT_CHARACTERS_MAX: Final = 300
_KERNEL_LOG: Final = Path("/dev/kmsg")
_RECORD_BYTES: Final = 1 << 14
# Severity, number and microseconds since boot, before the text of a record.
_XID: Final = re.compile(r"^\d+,\d+,(\d+),[^;]*;NVRM: Xid \(([^)]*)\): (\d+),?(.*)$", re.MULTILINE)
_ANSWERS: Final = (3, 4)  # NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION.
# Double-bit error; rows not remapped; NVLink; fallen off the bus; uncontained error; GSP; channel.
_XIDS_OF_MACHINES: Final = frozenset((48, 64, 74, 79, 95, 119, 120, 140))
_RECENT_S: Final = 600.0  # Errors in the log count for so long, also if the agent is started anew.


def health_problem(job: JobConfig, *, has_node: bool = False, notice: str = "") -> str:
    """Why this machine is unfit for a node of a job, and what to do; "": it is fit.

    Args:
        has_node: whether a node runs here; what it has taken, of memory or disk, is its own.
        notice: source of notices of this machine; "": that of the job.
    """
    job = replace(job, cluster=replace(job.cluster, notice=notice or job.cluster.notice))
    try:
        for find in _checks(job, has_node=has_node):
            if problem := find():
                return problem
    except Exception:  # A fault of planaria, which must not end the node that runs here.
        logger.exception("this machine could not be examined")
    return ""


async def health_problem_in_time(job: JobConfig, notice: str) -> str:
    """The same for a machine without a node, in at most EXAMINATION_S, by a thread."""
    try:
        async with asyncio.timeout(EXAMINATION_S):
            return await answer_of_thread(
                partial(health_problem, job, notice=notice), name="health"
            )
    except TimeoutError:
        return f"it was examined for {EXAMINATION_S:g} s, and something there hangs"
    except OSError as error:
        return str(error)


def _checks(job: JobConfig, *, has_node: bool) -> Iterator[Callable[[], str]]:
    if not has_node:
        yield _memory_problem
        yield partial(_disk_problem, Path(tempfile.gettempdir()))
    if job.cluster.device in ("auto", "cuda") and device_models():
        since_s = time.monotonic() - _RECENT_S
        yield partial(_kernel_problem, _KERNEL_LOG, since_s=since_s)
        yield _device_problem
    if job.cluster.notice == "ec2":
        yield ec2_problem
    if job.cluster.health_check:
        yield partial(_command_problem, job.cluster.health_check)


def _memory_problem() -> str:
    available = available_bytes()
    if available >= _AVAILABLE_BYTES_MIN:
        return ""
    return f"it has {available >> 20} MiB of memory left; end what else runs there"


def _disk_problem(directory: Path) -> str:
    """Why nothing can be written to a directory."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(_TRIAL_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"its directory {directory} cannot be written: {error.strerror or error}"
    return ""


def _kernel_problem(path: Path, *, since_s: float) -> str:
    """The newest error of a GPU that its driver has written to the kernel's log.

    Args:
        since_s: moment of the monotonic clock before which errors do not count.
    """
    data = b""
    # Only the administrator may read the log of some kernels.
    with contextlib.suppress(OSError), open(path, "rb", buffering=0, opener=_open_log) as file:
        while record := file.read(_RECORD_BYTES):
            data += record + b"\n"
    for match in reversed(list(_XID.finditer(data.decode(errors="replace")))):
        at_us, device, number, text = match.groups()
        if int(at_us) >= 1e6 * since_s and int(number) in _XIDS_OF_MACHINES:
            return (
                f"its driver reports Xid {number} of the GPU at {device}:{text.rstrip()}; reset "
                "that GPU, or start the machine anew"
            )
    return ""


def _open_log(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _device_problem() -> str:
    """What NVIDIA's library says against the devices; "" if that is not installed."""
    words = (sys.executable, "-m", "planaria.nodes.health")
    try:
        _, output, errors = program_result(words, timeout_s=_DEVICES_S)
    except TimeoutError:
        return f"its GPUs do not answer within {_DEVICES_S:g} s; start the machine anew"
    except OSError as error:
        return f"no process can be started there: {error.strerror or error}"
    with contextlib.suppress(ValueError):
        return str(json.loads(output))
    return f"its GPUs could not be examined: {errors.strip()[-_TEXT_CHARACTERS_MAX:]}"


def _command_problem(command: str) -> str:
    """What the user's own check says."""
    try:
        status, output, errors = program_result(("/bin/sh", "-c", command), timeout_s=_COMMAND_S)
    except TimeoutError:
        return f"cluster.health_check has not ended within {_COMMAND_S:g} s"
    except OSError as error:
        return f"no process can be started there: {error.strerror or error}"
    if not status:
        return ""
    text = (output.strip() or errors.strip())[-_TEXT_CHARACTERS_MAX:]
    return text or f"cluster.health_check ended with {status}"


# -- the process that examines devices -----------------------------------------------------------


def device_problem(library: ModuleType) -> str:
    """What is wrong with the devices that the job may use; "": nothing.

    Args:
        library: the module pynvml.
    """
    library.nvmlInit()
    for index in _visible(library.nvmlDeviceGetCount()):
        for problem in _problems(library, index):
            return f"GPU {index} {problem}"
    return ""


def _visible(num_devices: int) -> list[int]:
    """The devices that CUDA shows to this process, as far as they are named by numbers."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    words = [word.strip() for word in named.split(",")]
    if named and all(word.isdecimal() for word in words):
        return [int(word) for word in words if int(word) < num_devices]
    return list(range(num_devices))


def _problems(library: ModuleType, index: int) -> Iterator[str]:
    device = None
    try:
        device = library.nvmlDeviceGetHandleByIndex(index)
        library.nvmlDeviceGetMemoryInfo(device)  # The handle of a lost device is known still.
    except library.NVMLError as error:
        # Parts of a device (MIG), and devices that share the machine's memory, refuse to tell it.
        if getattr(error, "value", 0) not in _ANSWERS:
            yield f"does not answer ({error}); start the machine anew"
            return
        if device is None:  # It is counted, but a control group keeps it from this user.
            return
    if num_errors := _num_uncorrected(library, device):
        yield f"has had {num_errors} uncorrected memory errors since its last reset; reset it"
    try:
        _, _, is_pending, has_failed = library.nvmlDeviceGetRemappedRows(device)
    except (library.NVMLError, AttributeError):  # It remaps no rows, or the library is old.
        return
    if has_failed:
        yield "has memory rows that can be replaced no more; replace it"
    if is_pending:
        yield "has memory rows that are replaced once it is reset; reset it"


def _num_uncorrected(library: ModuleType, device: Any) -> int:
    """The number of uncorrected errors since the last reset; 0 without error correction."""
    try:
        return int(
            library.nvmlDeviceGetTotalEccErrors(
                device, library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC
            )
        )
    except library.NVMLError:
        return 0


def _library_problem() -> str:
    """See device_problem; "" without the library, or without a device of NVIDIA's."""
    try:
        import pynvml
    except ImportError:
        return ""
    try:
        return device_problem(pynvml)
    except pynvml.NVMLError_LibraryNotFound:
        return ""
    except pynvml.NVMLError as error:
        return f"its GPUs cannot be examined ({error}); look at the driver"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_library_problem()))
