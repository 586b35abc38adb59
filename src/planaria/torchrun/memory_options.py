"""What a MemoryCheckpointer is given, and where it is if it is not told."""

import contextlib
import os
import socket
from pathlib import Path
from typing import Final

from planaria.errors import ConfigError

# Of 16 KiB a piece: some 30 MB/s over a link of this machine alone, a tenth of that at 4 KiB.
BUFFER_BYTES_MIN: Final = 64 << 10


def check_least(*, copies: int, buffer_bytes: int, profile_iterations: int, idle_s: float) -> None:
    """Refuses numbers that are too small, or no whole ones where only those will do.

    Raises:
        ConfigError: naming the first of them.
    """
    for field, value, least, why in (
        ("copies", copies, 1, "the node's own"),
        ("buffer_bytes", buffer_bytes, BUFFER_BYTES_MIN, "or copies are slow to go"),
        ("profile_iterations", profile_iterations, 0, "to send copies at once"),
    ):
        if not isinstance(value, int) or value < least:
            raise ConfigError(field, value, f"a whole number, at least {least}, {why}")
    if not idle_s > 0:
        raise ConfigError("idle_s", idle_s, "above 0, or copies are gone with the ranks")


def own_host() -> str:
    """The address by which other nodes reach this one."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((master, 9))
            host: str = sock.getsockname()[0]
            return host
    except OSError:
        return "127.0.0.1"


def runtime_directory() -> Path:
    """Where a user's keepers have their sockets, each in a directory of its own; made for the user
    alone, as a launcher has its socket there, too."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "planaria" if base else Path(f"/tmp/planaria-{os.getuid()}")
    with contextlib.suppress(OSError):  # Whoever then uses it says what is wrong.
        path.mkdir(mode=0o700, exist_ok=True)
    return path
