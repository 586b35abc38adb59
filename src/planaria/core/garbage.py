"""Spans in which no garbage is collected.

Plans of thousands of nodes are some hundred thousand objects that live on. Where they are made
while everybody waits, a collection in between finds nothing and takes longer than all the rest.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Garbage is collected after it, not within; what is in cycles stays until then."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
