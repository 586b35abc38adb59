"""Jobs that go back to their newest save, under simulated faults."""

from dataclasses import replace

import pytest

from planaria.simulator import simulation
from planaria.simulator.scenario import SCENARIOS
from planaria.simulator.simulation import run, run_text


@pytest.mark.parametrize("number", [12, pytest.param(30, marks=pytest.mark.long)])
def test_jobs_that_go_back_keep_every_promise(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No sample is lost or used twice in what remains, and no two ranks have two ages."""
    saving = tuple(replace(one, persist_every=one.persist_every or 2) for one in SCENARIOS)
    monkeypatch.setattr(simulation, "SCENARIOS", (*SCENARIOS, *saving))

    num_saves = 0
    for seed in range(number):
        one = run(seed, policies=("morph",))
        assert not one.violations, run_text(one)
        num_saves += any(what == "goes back" and facts[0] for _, what, facts in one.log)
    assert num_saves > number // 10
