"""What the engine takes of a processor: that it can be measured, whatever the numbers are here."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from beside import costs

sys.path.pop()  # Or a script of benchmarks/ would be taken for a folder of tests/.


def test_an_action_and_a_hop_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody noticed for days that the engine asked for more than the measured ranks had."""
    for name, number in {"_NUM_RUNS": 2, "_MANY": 48, "_NUM_HOPS": 20}.items():
        monkeypatch.setattr(costs, name, number)

    dispatch_us, hop_us = costs.costs_us()

    assert abs(dispatch_us) < 10_000.0  # The layers are taken off, and may have been slower alone.
    assert 0.0 < hop_us < 10_000.0
