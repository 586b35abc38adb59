"""Nodes die under resilience.policy = "reroute"; the others go around them, with the same bits."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.chaos import (
    FAMILY,
    baseline_digests,
    chaos_job,
    check_survived,
    long_but_the_first,
    only_recovery,
    recoveries,
    run_under_faults,
    sample_cases,
    sized_plan,
)
from helpers.jobs import digests
from planaria.core.inject import ITERATION_STEPS, RECOVERY_STEPS
from planaria.core.plan import Ticks
from planaria.job.training_job import Job, TrainingResult
from planaria.nodes.forkserver import ForkServer
from planaria.planner.reroute.orders import best_order
from planaria.schedule.action import Kind

pytestmark = pytest.mark.faults

ITERATIONS = 10
LONG = 48  # Iterations in which a node comes before the end, also on a quick machine.

Run = Callable[..., TrainingResult]

SINGLE = [(f"kill:{node}@{iteration}",) for node in range(6) for iteration in range(8)] + [
    (f"kill:{node}@3.{step}",) for node in range(6) for step in ITERATION_STEPS[1:]
]
# Of three pipelines of two, two losses leave a holder of each layer.
AT_ONCE = [(f"kill:{a},{b}@3",) for a, b in itertools.combinations(range(6), 2)]
TWICE = [
    (f"kill:1@3.{first}", f"kill:{second}@3.{step}")
    for first in ("backward", "commit")
    for second in (2, 5)
    for step in RECOVERY_STEPS
]


@pytest.fixture
def reroute(server: ForkServer, tmp_path: Path) -> Run:
    """Runs a job on three pipelines of two nodes with faults, to the bits of the baseline run."""

    def run(*specs: str, iterations: int = ITERATIONS) -> TrainingResult:
        config = chaos_job(
            FAMILY, tmp_path / "run", server, f=2, policy="reroute", iterations=iterations
        )
        result = run_under_faults(config, server, *specs, sizes=(2, 2, 2))
        check_survived(result, specs, baseline_digests(server, iterations))
        return result

    return run


@pytest.mark.parametrize("specs", sample_cases(SINGLE, 1))
def test_a_kill_at_any_time_is_gone_around(specs: tuple[str, ...], reroute: Run) -> None:
    """Nothing need be sent: peers hold what the lost node held. A node that moves to its place gets
    its layers, but for iteration 0, which all begin from the seed."""
    result = reroute(*specs)

    event = only_recovery(result)
    assert event.policy == "reroute"
    assert event.candidates[0]["answer"] == "reroute"
    moves = event.answer != "reroute" and event.iteration > 0
    assert (event.transfer_bytes > 0) == moves
    assert len(result.report.final.nodes) == 5


@pytest.mark.long
@pytest.mark.parametrize("specs", AT_ONCE, ids=" ".join)
def test_two_kills_at_once_are_gone_around(specs: tuple[str, ...], reroute: Run) -> None:
    """In one pipeline or in two, in one stage or in two."""
    result = reroute(*specs)

    event = only_recovery(result)
    assert event.policy == "reroute"
    assert len(result.report.final.nodes) == 4


@pytest.mark.parametrize("specs", sample_cases(TWICE, 1))
def test_a_kill_in_a_recovery_is_gone_around(specs: tuple[str, ...], reroute: Run) -> None:
    """The recovery starts over from the plan that it was about to begin."""
    result = reroute(*specs)

    assert {event.policy for event in recoveries(result)} == {"reroute"}
    assert len(result.report.final.nodes) == 4


@pytest.mark.parametrize("family", long_but_the_first(("sequential", "gpt2", "llama")))
def test_split_backwards_have_the_bits_of_whole_ones(
    family: str, server: ForkServer, tmp_path: Path
) -> None:
    """The same job twice; only the second puts gradients of weights off."""
    found = []
    for splits in (False, True):
        config = chaos_job(family, tmp_path / f"run-{splits}", server)
        plan = replace(sized_plan(config, (2, 2, 2)), splits_backward=splits)
        result = Job(config).run(server=server, plan=plan, trace=True)
        assert result.error is None
        found.append(digests(result))
        actions = {span.action.kind for one in result.measured_timelines() for span in one.spans}
        assert (Kind.BACKWARD_WEIGHT in actions) == splits

    assert found[0] == found[1]


@pytest.mark.long
def test_an_order_that_was_looked_for_has_the_bits_of_any_other(
    server: ForkServer, tmp_path: Path
) -> None:
    """Each of a hundred random changes counts as better, so what is left is far from the rule."""
    configs = [chaos_job(FAMILY, tmp_path / name, server) for name in ("rule", "other")]
    plan = sized_plan(configs[0], (2, 2, 2))
    plan = replace(plan, ticks=dict.fromkeys(plan.ranks, Ticks(100, 100, 100, 10)))
    times_s = itertools.count(0, -1)
    other = best_order([plan], num_runs=100, iteration_s=lambda _: float(next(times_s)))
    assert other.routes != plan.routes
    assert other.in_flight
    assert other.ticks != plan.ticks

    found = []
    plans = (plan, replace(other, splits_backward=True))
    for config, one in zip(configs, plans, strict=True):
        result = Job(config).run(server=server, plan=one)
        assert result.error is None
        found.append(digests(result))

    assert found[0] == found[1]


@pytest.mark.long
def test_the_next_loss_strikes_a_rerouted_plan_and_a_node_joins_it(reroute: Run) -> None:
    """Who joins takes an empty place, at a commit, and nothing is done again for it."""
    result = reroute("kill:0@2", "kill:3@4", "join:1@5", iterations=LONG)

    first, second, join = recoveries(result)
    assert {first.policy, second.policy, join.policy} == {"reroute"}
    assert join.answer == "reroute-normalised"
    assert join.redone_samples == 0
    assert len(result.report.final.nodes) == 5
