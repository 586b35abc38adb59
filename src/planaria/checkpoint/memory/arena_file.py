"""The file in memory that an arena is made in; its owner needs no more of arenas (arena.py)."""

import os
from typing import Final

TABLE_BYTES: Final = 1 << 18


def arena_fd() -> int:
    """The descriptor of a new, empty file in memory for the copies that a rank keeps."""
    fd = os.memfd_create("planaria-copies")
    os.ftruncate(fd, TABLE_BYTES)
    return fd
