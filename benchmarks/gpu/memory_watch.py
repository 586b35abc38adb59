"""Samples the memory in use on a GPU, in all and by process, while a job recovers from losses.

The figures of a GPU come from NVML, or else from nvidia-smi; without a GPU they are the resident
memory of the job's processes.
"""

import importlib
import re
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import psutil

_INTERVAL_S: Final = 0.2
_SMI_TIMEOUT_S: Final = 20.0
_RECOVERED: Final = re.compile(r"^training went on after", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sample:
    """The memory in use at one moment, in bytes.

    Attributes:
        num_recoveries: number of recoveries of the job so far.
        total_bytes: bytes in use on the whole device.
        by_pid: bytes by process.
    """

    num_recoveries: int
    total_bytes: int
    by_pid: dict[int, int]


Reader = Callable[[], tuple[int, dict[int, int]]]


class MemoryWatch:
    """Samples in a thread, from `with` to its end.

    Args:
        read: function that returns the bytes in use, in all and by process.
        log: output of the job, in which recoveries are counted.
    """

    def __init__(self, read: Reader, log: Path) -> None:
        self.samples: list[Sample] = []
        self._read = read
        self._log = log
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join(timeout=2 * _SMI_TIMEOUT_S)

    def _watch(self) -> None:
        while not self._is_over.wait(_INTERVAL_S):
            text = self._log.read_text(errors="replace") if self._log.exists() else ""
            total_bytes, by_pid = self._read()
            self.samples.append(Sample(len(_RECOVERED.findall(text)), total_bytes, by_pid))


def gpu_reader() -> Reader:
    """The reader of the first GPU's memory."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
    except Exception as error:  # It raises its own types where there is no library or driver.
        print(f"   no NVML ({error!r}): asking nvidia-smi", flush=True)
        return _smi_bytes

    def read() -> tuple[int, dict[int, int]]:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        used = {process.pid: int(process.usedGpuMemory or 0) for process in processes}
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).used), used

    return read


def _smi_bytes() -> tuple[int, dict[int, int]]:
    total = _smi_rows("--query-gpu=memory.used")
    rows = [row.split(",") for row in _smi_rows("--query-compute-apps=pid,used_memory")]
    mebi = 1 << 20
    by_pid = {int(pid): int(used) * mebi for pid, used in rows if used.strip().isdigit()}
    return (int(total[0]) * mebi if total else 0), by_pid


def _smi_rows(query: str) -> list[str]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=False
    )
    return result.stdout.splitlines()


def resident_bytes() -> tuple[int, dict[int, int]]:
    """The resident memory of this process's descendants, in all and by process."""
    by_pid = {}
    for process in psutil.Process().children(recursive=True):
        try:
            by_pid[process.pid] = int(process.memory_info().rss)
        except psutil.NoSuchProcess:
            continue
    return sum(by_pid.values()), by_pid


@dataclass(frozen=True, slots=True)
class Growth:
    """Peaks of the memory in use, in bytes, early and late in a job.

    Attributes:
        total: peaks on the whole device.
        rank: peaks of one process that lives from the beginning to the end; zeros if the device
            does not say what a process uses.
    """

    total: tuple[int, int]
    rank: tuple[int, int]

    def is_flat(self, *, slack_bytes: int, share: float) -> bool:
        """Whether no late peak exceeds the early one by more than `slack_bytes` and a share."""
        pairs = (self.total, self.rank)
        return all(late <= early * (1 + share) + slack_bytes for early, late in pairs)


def growth(samples: Sequence[Sample], *, pid: int, settled: int, num_recoveries: int) -> Growth:
    """The peaks between the recoveries that follow `settled` and in the same number of last ones.

    Args:
        pid: process whose memory is compared.
        settled: number of recoveries after which every buffer has been as large as it gets.
        num_recoveries: number of recoveries of the whole job.

    Raises:
        ValueError: there are no samples early or late.
    """
    span = max(1, (num_recoveries - settled) // 3)
    early = [s for s in samples if settled <= s.num_recoveries < settled + span]
    late = [s for s in samples if num_recoveries - span <= s.num_recoveries < num_recoveries]
    if not early or not late:
        raise ValueError(f"{len(samples)} samples, of which {len(early)} early, {len(late)} late")
    return Growth(
        total=(_peak(s.total_bytes for s in early), _peak(s.total_bytes for s in late)),
        rank=(
            _peak(s.by_pid.get(pid, 0) for s in early),
            _peak(s.by_pid.get(pid, 0) for s in late),
        ),
    )


def _peak(values: Iterable[int]) -> int:
    return max(values, default=0)
