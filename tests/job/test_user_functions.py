"""Modules of the user, which each process of a job imports itself."""

import random
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from planaria.user_functions import user_function

MODULE = """
import random
import numpy as np
import torch

DRAWN = random.random(), np.random.rand(), torch.rand(1).item()

def drawn():
    return DRAWN
"""


def _states() -> str:
    return repr((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))


def _import(name: str, num_draws: int, results: "SimpleQueue[Any]") -> None:
    np.random.rand(num_draws)  # Python's generator differs in each forked process as it is.
    torch.rand(num_draws)
    drawn = user_function(f"{name}:drawn", field="model.target")()
    later = random.random(), np.random.rand(), torch.rand(1).item()
    user_function(f"{name}:drawn", field="data.target")
    results.put((drawn, later, random.random()))


def test_what_a_module_draws_while_it_is_imported_is_the_same_in_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks had other samples under one number, or other buffers of one layer. A seed that a module
    sets holds on: a metric may draw from it."""
    for name in ("draws", "draws_too"):
        (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    context = get_context("fork")
    results = []
    for name, num_draws in (("draws", 1), ("draws", 2), ("draws_too", 1)):
        queue: SimpleQueue[Any] = context.SimpleQueue()
        child = context.Process(target=_import, args=(name, num_draws, queue))
        child.start()
        child.join()
        assert child.exitcode == 0
        results.append(queue.get())

    first, second, (other, *_) = results
    assert first == second
    assert set(first[0]).isdisjoint(other)
    assert first[2] not in (first[0][0], first[1][0])  # A module is imported once.


def test_a_module_that_fails_to_import_leaves_the_generators_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "draws_and_fails.py").write_text(MODULE + "\nraise ValueError('its own')\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = _states()

    with pytest.raises(ValueError, match="its own"):
        user_function("draws_and_fails:drawn", field="model.target")

    assert before == _states()
