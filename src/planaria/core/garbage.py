"""A context in which no garbage is collected.

Plans for thousands of nodes are some hundred thousand objects that stay alive. Where such plans are
made while all ranks wait, a garbage collection finds nothing and takes longer than all the rest.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Turns the garbage collector off within the context; cycles are freed after it at the
    earliest."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
