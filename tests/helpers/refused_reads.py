"""A disk that lists what it has and refuses to give some of it, as one with bad blocks does."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch


@contextmanager
def refused_reads(place: Path) -> Iterator[None]:
    """Nothing at a path, or below it, is read meanwhile."""
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.is_relative_to(place):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read_bytes(path)

    with patch.object(Path, "read_bytes", refuse):
        yield
