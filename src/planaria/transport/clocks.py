"""The name of the monotonic clock that a process reads.

Monotonic clocks of two machines tell nothing about each other, and a machine's begins anew when it
boots. A time namespace has a clock of its own.
"""

import socket
from pathlib import Path
from typing import Final

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE: Final = Path("/proc/self/ns/time")


def clock_name() -> str:
    """The name of `time.monotonic`; two processes whose clocks have one name read the same one."""
    try:
        boot = _BOOT.read_text().strip()
    except OSError:
        boot = socket.gethostname()
    try:
        return f"{boot} {_NAMESPACE.readlink()}"
    except OSError:  # Linux before 5.6 has no time namespaces.
        return boot
