"""The results of evaluations, from the rank that computes them to the report that tells them."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.jobs import NUM_LAYERS, shaped_plan, tiny_job
from helpers.linked_ranks import link_ranks
from helpers.noted_pulse import NotedPulse
from planaria.core.commit import vector_layout
from planaria.core.job import EvaluationConfig, JobConfig
from planaria.data.batches import HeldOut
from planaria.data.datasets import load_dataset
from planaria.engine.comm.host import HostComm
from planaria.engine.devices import PROCESSOR, Device, LateDevice
from planaria.engine.iteration.evaluation import Evaluator, load_evaluation
from planaria.engine.iteration.executor import RankContext
from planaria.engine.iteration.lateness import READING_S, ActionTimes, EpochLimits
from planaria.engine.prepare import load_model
from planaria.engine.stage import RankStage
from planaria.errors import PeerLostError
from planaria.transport.pulse import Pulse

SAMPLES = 5
JOB = replace(
    tiny_job("sequential", Path(), iterations=6),
    evaluation=EvaluationConfig(every=2, target="helpers.user_models:points", samples=SAMPLES),
)


def never() -> bool:
    """The answer of a job that nobody stops."""
    return False


@contextmanager
def evaluator_on(device: Device, job: JobConfig = JOB) -> Iterator[Callable[[], Evaluator]]:
    """Makes evaluators of the only rank of a plan, of one evaluation, each as in a new epoch."""
    plan = shaped_plan((1,), job.num_microbatches)
    with link_ranks(1) as (links,):
        model = load_model(job, cache_directory=Path(), profile=None, timekeeper=links.timekeeper)
        stage = RankStage(model, training=job.training, device=device)
        stage.hold(plan.held_by_rank[0], states={}, age=0)
        dataset = load_dataset(job.data, objective=model.objective, seed=0, cache_directory=Path())
        evaluation = load_evaluation(job, dataset, model=model, cache_directory=Path())
        assert evaluation is not None
        context = RankContext(
            stage=stage,
            links=links,
            layout=vector_layout(job, NUM_LAYERS),
            pulse=Pulse(),
            times=ActionTimes(job),
            resilience=job.resilience,
        )
        yield lambda: Evaluator(evaluation, plan, context=context, comm=HostComm(links, device))


def test_parts_that_the_user_has_put_into_eval_are_so_after_an_evaluation() -> None:
    """Their dropout was on from then on; what was in train mode is so again."""
    model = replace(JOB.model, target="helpers.user_models:frozen_in_eval")
    with evaluator_on(LateDevice(), replace(JOB, model=model)) as make:
        evaluator = make()
        evaluator.run(2, never)

    flags = {
        layer: {module.training for module in held.module.modules() if module is not held.module}
        for layer, held in evaluator._stage.layers.items()
    }
    assert flags == {layer: {layer not in (1, 2)} for layer in range(NUM_LAYERS)}


def test_a_microbatch_of_another_size_may_be_compiled_and_yet_has_a_limit() -> None:
    """After a loss the last one may come to a rank that has compiled for full ones alone."""
    pulse, compiled = NotedPulse(), replace(JOB, training=replace(JOB.training, compile=True))
    with evaluator_on(PROCESSOR) as make:
        evaluator = make()
        evaluator._limits = EpochLimits(ActionTimes(compiled), pulse)
        evaluator.run(2, never)

    *others, compiling = pulse.limits_s
    assert min(others) < 600.0 <= compiling < math.inf


def test_a_store_that_stands_still_makes_no_evaluation_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks that read held-out samples were killed, the last ones for the targets."""
    pulse, limits_s, load = NotedPulse(), list[float](), HeldOut._load

    def note_and_load(held_out: HeldOut, index: int) -> Any:
        if index not in held_out._loaded:
            limits_s.append(pulse.limit_s)
        return load(held_out, index)

    monkeypatch.setattr(HeldOut, "_load", note_and_load)
    with evaluator_on(PROCESSOR) as make:
        evaluator = make()
        evaluator._context = replace(evaluator._context, pulse=pulse)
        evaluator._limits = EpochLimits(ActionTimes(JOB), pulse)
        evaluator.run(2, never)
        hop, sums = evaluator._routes[0][0], np.zeros(3)
        with torch.no_grad():
            evaluator._compute(hop, torch.zeros(2, 8), 4, 0, sums)

    count = evaluator._evaluation.held_out.num_microbatches
    assert limits_s == [math.inf, *[READING_S] * count]
    assert sums[-1] == 1.0
    assert min(pulse.limits_s) < math.inf


def test_a_loss_or_metric_that_changes_what_it_gets_changes_no_result() -> None:
    """It may hide what is no target, for instance, which would be counted as one from then on."""

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        targets[targets == -100] = 0
        return output.zero_().sum() + targets.sum()

    def first(output: Tensor, targets: Tensor) -> Tensor:
        value = output.sum() + targets.sum()
        targets.zero_()
        output.zero_()
        return value

    with evaluator_on(PROCESSOR) as make:
        evaluator = make()
        evaluation = replace(evaluator._evaluation, metrics={"a": first, "b": first})
        output, targets = torch.ones(2, 5), torch.tensor([[3, -100], [-100, 4]])
        evaluation.held_out._loaded[0] = torch.zeros(2, 8), targets
        evaluator._stage.model._loss = loss
        with torch.no_grad():
            sums = evaluation.sums(output, evaluator._stage, age=2, index=0)

    assert sums == [7.0, 2.0, -183.0, -183.0]


def test_a_result_outlasts_the_epoch_in_which_it_was_found() -> None:
    """The epoch may end between an evaluation and the report of the iteration after it, in which
    all ranks have the gradients already, so that it is not done again."""
    with evaluator_on(LateDevice()) as make:
        for age in (2, 4):
            evaluator = make()
            evaluator.run(age, never)
    evaluation = evaluator._evaluation

    assert not evaluation.take_results(0)
    (result,) = evaluation.take_results(2)
    assert (result.iteration, result.num_samples) == (2, SAMPLES)
    assert not evaluation.take_results(3)  # Of the other one, all may have gone back meanwhile.
    assert [later.iteration for later in evaluation.take_results(4)] == [4]
    assert not evaluation.take_results(5)


@pytest.mark.parametrize("patience", [0, 1])
def test_who_is_asked_to_stop_leaves_microbatches_out_unless_results_end_training(
    patience: int,
) -> None:
    """There is no result then, and the next evaluation is whole again."""
    config = replace(JOB.evaluation, patience=patience)
    answers = iter([False, True, True, *[False] * SAMPLES])
    with evaluator_on(LateDevice(), replace(JOB, evaluation=config)) as make:
        evaluator = make()
        evaluator.run(2, lambda: next(answers))
        evaluator.run(4, never)

    first, second = evaluator._evaluation.take_results(4)
    assert (first.iteration, second.iteration) == (2, 4)
    assert first.num_samples == (SAMPLES if patience else 0)
    assert second.num_samples == SAMPLES


def test_a_loss_that_was_computed_while_a_peer_was_lost_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An abort of NCCL lets a receive end as if all were well, and the loss is of anything."""
    with evaluator_on(LateDevice()) as make:
        evaluator, write_sums = make(), Evaluator._write_sums
        comm = evaluator._comm
        assert isinstance(comm, HostComm)

        def lose_a_peer(*arguments: Any) -> None:
            write_sums(*arguments)
            if arguments[3] == evaluator._evaluation.held_out.num_microbatches - 1:
                comm._error = PeerLostError(1, "its connection closed")

        monkeypatch.setattr(Evaluator, "_write_sums", lose_a_peer)
        with pytest.raises(PeerLostError):
            evaluator.run(2, never)

    assert not evaluator._evaluation.untold
