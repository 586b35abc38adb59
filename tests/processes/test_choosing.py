"""Nodes die under resilience.policy = "adaptive": whichever answer is taken, with the same bits."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.chaos import (
    FAMILY,
    baseline_digests,
    chaos_job,
    check_survived,
    only_recovery,
    recoveries,
    run_under_faults,
)
from helpers.jobs import digests
from planaria.core.inject import parse_injection
from planaria.core.job import JobConfig
from planaria.core.plan import Plan
from planaria.job.config import load_job
from planaria.job.planning import read_profile
from planaria.job.training_job import Job, SilentDisplay, TrainingResult
from planaria.nodes.forkserver import ForkServer
from planaria.policies.unequal_nodes import STAY
from planaria.profiles.profile_json import encode_profile

pytestmark = pytest.mark.faults

ITERATIONS = 16
PACED = Path(__file__).parents[2] / "examples" / "paced.toml"
POLICIES = {"reinstantiate", "reroute", "repartition"}

LOSSES_AND_JOINS = (
    *("kill:1@2", "join:1@3", "kill:4@5.backward", "join:1@7", "kill:0@8.reduce"),
    *("kill:3@10.optimizer", "join:1@11", "kill:6@13.forward"),
)

Run = Callable[..., TrainingResult]


@pytest.fixture
def calm(server: ForkServer) -> tuple[str, str]:
    """The digests of the job without failures."""
    return baseline_digests(server, ITERATIONS)


@pytest.fixture
def adaptive(server: ForkServer, tmp_path: Path, calm: tuple[str, str]) -> Run:
    """Runs a job on three pipelines of two nodes with faults, to the bits of the baseline run."""

    def run(
        *specs: str, f: int = 2, sizes: tuple[int, ...] = (2, 2, 2), failures_ahead: int = 1
    ) -> TrainingResult:
        config = chaos_job(
            FAMILY, tmp_path / "run", server, f=f, policy="adaptive", iterations=ITERATIONS
        )
        config = replace(
            config, resilience=replace(config.resilience, failures_ahead=failures_ahead)
        )
        result = run_under_faults(config, server, *specs, sizes=sizes)
        check_survived(result, specs, calm)
        return result

    return run


def test_the_best_of_all_answers_is_taken(adaptive: Run) -> None:
    """Losses one after the other; each event tells all that could have been done. Nobody looks
    ahead, so that all policies are asked after the loss."""
    result = adaptive("kill:1@3", "kill:4@6.backward", failures_ahead=0)

    found = recoveries(result)
    assert len(found) == 2
    for event in found:
        scores = {str(c["answer"]): float(str(c["score"])) for c in event.candidates}
        assert {c["policy"] for c in event.candidates} == POLICIES
        assert scores[event.answer] == max(scores.values())
    assert len(result.report.final.nodes) == 4


@pytest.mark.long
def test_five_nodes_die_and_three_come(adaptive: Run) -> None:
    """Six nodes at first, never more; those that come are 6, 7 and 8."""
    result = adaptive(*LOSSES_AND_JOINS, f=1, sizes=())

    assert result.report.final.nodes == (2, 5, 7, 8)


@pytest.mark.long
def test_a_quick_answer_is_followed_by_a_better_one_at_commits(
    server: ForkServer, tmp_path: Path
) -> None:
    """A layer's state takes 0.3 s to move, an iteration 0.4 s, and the job fails every nine
    seconds: the loss is rerouted, and layers move while training goes on. Nothing but the loss is
    done again."""
    profile = read_profile(PACED.with_name("paced-profile.json"))
    layers = tuple(replace(layer, optimizer_bytes=3 * 10**9) for layer in profile.layers)
    path = tmp_path / "large-state.json"
    path.write_bytes(encode_profile(replace(profile, layers=layers)))
    large = (
        f'model.profile="{path}"',
        "training.global_batch_size=36",
        "cluster.nodes=6",
        f"cluster.device_memory_bytes={23 * 10**9}",  # For 7 of 12 layers.
        "checkpoint.persist_every=1",
    )
    often = ("resilience.failure_rate=400.0", "resilience.failures_ahead=0")
    calm = Job(_paced(tmp_path / "calm", *large, iterations=20, time_scale=0.01)).run(server=server)

    result = Job(_paced(tmp_path / "run", *large, *often, iterations=20)).run(
        injections=(parse_injection("kill:1@2"),), server=server
    )

    assert result.error is None
    assert digests(result) == digests(calm)
    lost = only_recovery(result)
    print(*lost.candidates, lost.inputs, sep="\n")  # If it fails, this says why.
    assert (lost.policy, lost.transfer_bytes) == ("reroute", 0)
    assert lost.answer.endswith(", then repartition")
    (reformed,) = (event for event in result.report.events if event.kind == "reformed")
    assert reformed.policy == "repartition"
    assert reformed.transfer_bytes > 0
    assert reformed.redone_samples == 0
    assert len(result.report.final.nodes) == 5


@pytest.mark.long
def test_the_search_betters_what_a_loss_was_answered_with_in_a_hurry(
    server: ForkServer, tmp_path: Path
) -> None:
    """A node is lost at once, before anything was looked for. With split backwards and other
    pipelines an iteration takes 15% less, which the search finds some time later."""
    lost = parse_injection("kill:8@0.forward")

    found = Job(_paced(tmp_path, iterations=2000)).run(
        injections=(lost,), server=server, display=_StopsOnceBettered()
    )

    assert found.error is None
    loss = only_recovery(found)
    assert "repartition" not in {candidate["policy"] for candidate in loss.candidates}
    (better,) = (event for event in found.report.events if event.kind == "reformed")
    assert (better.policy, better.redone_samples) == ("repartition", 0)
    iteration_s = {c["answer"]: float(str(c["iteration_s"])) for c in better.candidates}
    assert iteration_s[better.answer] < 0.95 * iteration_s[STAY]
    iterations = len(found.report.iterations)
    calm = Job(_paced(tmp_path, iterations=iterations, time_scale=0.01)).run(server=server)
    assert digests(found) == digests(calm)


def _paced(directory: Path, *overrides: str, iterations: int, time_scale: float = 0.1) -> JobConfig:
    return load_job(
        PACED,
        overrides=[
            "cluster.nodes=9",
            "training.global_batch_size=12",
            f"training.iterations={iterations}",
            f"model.time_scale={time_scale}",
            f'checkpoint.directory="{directory / str(iterations)}"',
            *overrides,
        ],
    )


class _StopsOnceBettered(SilentDisplay):
    """Interrupts the job when it goes on with a plan that answers no loss; epoch 1 does."""

    def show_next_plan(self, plan: Plan) -> None:
        if plan.epoch > 1:
            os.kill(os.getpid(), signal.SIGINT)
