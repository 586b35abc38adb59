"""Which cases of a parametrized test run every time."""

from collections.abc import Iterable
from typing import Any

import pytest


def every_nth(n: int, cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """One of n cases for every run, the first among them; the others are long."""
    return [
        pytest.param(*case, marks=pytest.mark.long if index % n else ())
        for index, case in enumerate(cases)
    ]
