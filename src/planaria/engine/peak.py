"""How much memory this process has used at most (Linux)."""

import logging
import resource
from pathlib import Path
from typing import Final

import psutil

logger = logging.getLogger(__name__)

_PROCESS: Final = Path("/proc/self")


class Peak:
    """The most memory that is resident from one `reset` to the next.

    Where the kernel does not let that be measured (gVisor, a /proc that is read-only), it is what
    is resident at the two moments, which may be less; that is told once. So it is from the first
    time on that it cannot be read: a statistic ends no iteration.

    Args:
        process: what the kernel tells of this process.
    """

    def __init__(self, process: Path = _PROCESS) -> None:
        self._process = process
        self._can_reset = True
        self._first_bytes = 0

    def reset(self) -> None:
        """Starts the measurement anew."""
        if self._can_reset:
            try:
                (self._process / "clear_refs").write_text("5", encoding="ascii")
                self._kernel_bytes()
                return
            except (OSError, LookupError) as error:
                self._give_up(error)
        self._first_bytes = _resident_bytes()

    def num_bytes(self) -> int:
        """The most since `reset`."""
        if self._can_reset:
            try:
                return self._kernel_bytes()
            except (OSError, LookupError) as error:
                self._give_up(error)
        return max(self._first_bytes, _resident_bytes())

    def _give_up(self, error: Exception) -> None:
        self._can_reset = False
        what = "peaks of memory are what is resident between iterations"
        logger.warning("%s: the kernel does not measure them: %r", what, error)

    def _kernel_bytes(self) -> int:
        """What the kernel has measured.

        Raises:
            LookupError: it measures nothing.
        """
        for line in (self._process / "status").read_text(errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise LookupError("status has no VmHWM")


def _resident_bytes() -> int:
    """What is resident now, or, where no more files can be opened, was at most."""
    try:
        return int(psutil.Process().memory_info().rss)
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
