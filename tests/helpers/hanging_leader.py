"""A coordinator whose disk neither keeps nor refuses any record once a file is there, which HANGING
names."""

import os
import threading
from typing import Any

from planaria.nodes.head import leader

_sync = os.fdatasync


def main(payload: bytes, *fds: Any) -> None:
    """Is called in the coordinator's process, as the real main function would be."""
    os.fdatasync = _sync_or_hang  # type: ignore[assignment]
    leader.main(payload, *fds)


def _sync_or_hang(fd: int) -> None:
    if os.path.exists(os.environ["HANGING"]):
        threading.Event().wait()
    _sync(fd)
