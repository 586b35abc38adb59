"""A coordinator on whose disk a manifest takes long: longer than anybody may be silent."""

import os
import time
from pathlib import Path
from typing import Final

from planaria.nodes.head import leader

LINK_S: Final = 1.5

_link = os.link


def main(payload: bytes, listener_fd: int, launcher_fd: int, lifeline_fd: int) -> None:
    """Is called in the coordinator's process, as the real main function would be."""
    os.link = _slowly  # type: ignore[assignment]
    leader.main(payload, listener_fd, launcher_fd, lifeline_fd)


def _slowly(source: Path, target: Path) -> None:
    time.sleep(LINK_S)
    _link(source, target)
