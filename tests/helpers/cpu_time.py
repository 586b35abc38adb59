"""How long a function computes, for tests that bound it."""

import gc
from collections.abc import Callable
from time import process_time
from typing import Final, TypeVar

_RUNS_MAX: Final = 5
Answer = TypeVar("Answer")


def quickest(act: Callable[[], Answer], *, limit_s: float = 0.0) -> tuple[Answer, float]:
    """The answer of a function, and the least processor time that a run of it took, in seconds.

    A machine that does other things too has slow moments; five runs do not all fall into them.

    Args:
        limit_s: the function is not run again once a run took less.
    """
    least_s = float("inf")
    for _ in range(_RUNS_MAX):
        gc.collect()  # Else a run may have to collect what the tests before it have left.
        start_s = process_time()
        answer = act()
        least_s = min(least_s, process_time() - start_s)
        if least_s < limit_s:
            break
    return answer, least_s
