"""The results of evaluations, from the rank that computes them to the report that tells them."""

from dataclasses import replace
from pathlib import Path

from helpers.jobs import NUM_LAYERS, shaped_plan, tiny_job
from helpers.linked_ranks import link_ranks
from planaria.core.commit import vector_layout
from planaria.core.job import EvaluationConfig
from planaria.data.datasets import load_dataset
from planaria.engine.comm.host import HostComm
from planaria.engine.devices import LateDevice
from planaria.engine.iteration.evaluation import Evaluator, load_evaluation
from planaria.engine.iteration.executor import RankContext
from planaria.engine.prepare import load_model
from planaria.engine.stage import RankStage
from planaria.transport.pulse import Pulse

SAMPLES = 5
JOB = replace(
    tiny_job("sequential", Path(), iterations=6),
    evaluation=EvaluationConfig(every=2, target="helpers.user_models:points", samples=SAMPLES),
)


def test_a_result_outlasts_the_epoch_in_which_it_was_found() -> None:
    """The epoch may end between an evaluation and the report of the iteration after it, in which
    all ranks have the gradients already, so that it is not done again."""
    plan, device = shaped_plan((1,), JOB.num_microbatches), LateDevice()
    with link_ranks(1) as (links,):
        model = load_model(JOB, cache_directory=Path(), profile=None, timekeeper=links.timekeeper)
        stage = RankStage(model, training=JOB.training, device=device)
        stage.hold(plan.held_by_rank[0], states={}, age=0)
        dataset = load_dataset(JOB.data, objective=model.objective, seed=0, cache_directory=Path())
        evaluation = load_evaluation(JOB, dataset, model=model, cache_directory=Path())
        assert evaluation is not None
        context = RankContext(
            stage=stage,
            links=links,
            layout=vector_layout(JOB, NUM_LAYERS),
            pulse=Pulse(),
            lease_s=3.0,
            resilience=JOB.resilience,
        )
        for age in (2, 4):  # Each in an epoch of its own.
            Evaluator(evaluation, plan, context=context, comm=HostComm(links, device)).run(age)

    assert not evaluation.take_results(0)
    (result,) = evaluation.take_results(2)
    assert (result.iteration, result.num_samples) == (2, SAMPLES)
    assert [later.iteration for later in evaluation.take_results(3)] == [4]
    assert not evaluation.take_results(5)
