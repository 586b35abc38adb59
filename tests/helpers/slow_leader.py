"""A coordinator on whose disk a manifest takes long: longer than anybody may be silent."""

import os
import time
from functools import partial
from pathlib import Path
from typing import Final

from planaria.nodes.head import leader

SLOW_S: Final = 4.5
SLOWER_S: Final = 10.0

_link = os.link


def main(payload: bytes, listener_fd: int, launcher_fd: int, lifeline_fd: int) -> None:
    """Is called in the coordinator's process, as the real main function would be."""
    os.link = partial(_link_late, SLOW_S)
    leader.main(payload, listener_fd, launcher_fd, lifeline_fd)


def slower_main(payload: bytes, listener_fd: int, launcher_fd: int, lifeline_fd: int) -> None:
    """The same on a slower disk."""
    os.link = partial(_link_late, SLOWER_S)
    leader.main(payload, listener_fd, launcher_fd, lifeline_fd)


def _link_late(link_s: float, source: Path, target: Path) -> None:
    time.sleep(link_s)
    _link(source, target)
