"""The memory of this machine, and what of it is available for copies."""

from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

_GROUP: Final = Path("/sys/fs/cgroup")


def available_bytes(group: Path = _GROUP) -> int:
    """The bytes that this process can still get from the machine and from its control group."""
    available: int = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # No control group, or one without a limit.
        limit = int((group / "memory.max").read_text())
        taken = int((group / "memory.current").read_text())
        available = min(available, limit - taken + _reclaimable_bytes(group))
    return available


def total_bytes(group: Path = _GROUP) -> int:
    """The bytes of the machine's memory, or of its control group's if that has less."""
    total: int = psutil.virtual_memory().total
    with suppress(OSError, ValueError):
        total = min(total, int((group / "memory.max").read_text()))
    return total


def _reclaimable_bytes(group: Path) -> int:
    """The bytes of a group's page cache that were not used lately, which the kernel can reclaim."""
    lines = (group / "memory.stat").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
