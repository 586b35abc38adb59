"""The memory of this machine, and what of it is available for copies.

A process may get less than the machine has: its control group has a limit, or one of the groups in
which that one lies. A container sees its own group as the topmost one. Slurm and systemd limit
groups further down, and the topmost one of a machine has no limit.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import psutil

_ROOT: Final = Path("/")


class _Names(NamedTuple):
    """Names in the files of a control group, which differ between the versions of control groups.

    Attributes:
        limit, taken: files of the limit and of what is taken, subgroups included.
        reclaimable: line of `memory.stat` for page cache that was not used lately, likewise.
    """

    limit: str
    taken: str
    reclaimable: str


_NAMES_V1: Final = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_NAMES_V2: Final = _Names("memory.max", "memory.current", "inactive_file")


def available_bytes(root: Path = _ROOT) -> int:
    """The bytes that this process can still get from the machine and from its control groups."""
    available: int = psutil.virtual_memory().available
    for group, names in _groups(root):
        with suppress(OSError, ValueError):  # It has no limit.
            limit = int((group / names.limit).read_text())
            taken = int((group / names.taken).read_text())
            available = min(available, limit - taken + _reclaimable_bytes(group, names))
    return available


def total_bytes(root: Path = _ROOT) -> int:
    """The bytes of the machine's memory, or of its control groups' if one of them has less."""
    total: int = psutil.virtual_memory().total
    for group, names in _groups(root):
        with suppress(OSError, ValueError):
            total = min(total, int((group / names.limit).read_text()))
    return total


def _groups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """The control groups for memory in which this process is; some may not exist."""
    lines: list[str] = []
    with suppress(OSError):  # The kernel has no control groups.
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top, names = root / "sys/fs/cgroup", _NAMES_V2
        if controllers:
            top, names = top / "memory", _NAMES_V1
        if controllers and "memory" not in controllers.split(","):
            continue
        # In a container the path may be the one on the machine. Then only the topmost one exists.
        group = top / path.lstrip("/")
        for each in (group, *group.parents):
            if each.is_relative_to(top):
                yield each, names


def _reclaimable_bytes(group: Path, names: _Names) -> int:
    """The bytes of a group's page cache that were not used lately, which the kernel can reclaim."""
    lines = (group / "memory.stat").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(f"{names.reclaimable} "))
