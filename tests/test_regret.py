"""The study of the adaptive policy's regret: its account of samples, by hand."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from planaria.policies.adaptive import Adaptive
from planaria.policies.reinstantiate import Reinstantiate
from planaria.policies.unequal import Unequal
from policies.losses import every, plan_of
from regret import known_samples
from study.job import Answers, Happening, Job


@pytest.fixture
def job() -> Job:
    """Two pipelines of two nodes that hold the model in one each; an iteration takes 10 s."""
    book = every(4, n0=1, f=1)
    answers = Answers(book, Unequal(Reinstantiate(book)))
    return Job(
        answers=answers,
        batch=40,
        save_every_s=100.0,
        is_adaptive=False,
        plan=plan_of(book, (2, 2)),
        iteration_s=10.0,
        alive={0, 1, 2, 3},
    )


def test_whole_iterations_count_and_saves_come_by_time(job: Job) -> None:
    """At 255 s there are 25 iterations of 40 samples; the save at 200 s has 20."""
    job.go_on(255.0)

    assert job.samples == 1000
    assert job.saved == 800


def test_a_save_that_was_due_while_nobody_trained_is_made_afterwards(job: Job) -> None:
    """Due at 200 s, down from 195 to 215 s: with what there was, and the next 100 s later."""
    job.go_on(195.0)
    job.begins_s = 215.0
    job.go_on(260.0)
    assert job.saved == 760

    job.go_on(330.0)

    assert (job.saved, job.samples) == (760 + 400, 760 + 440)


def test_a_loss_costs_the_iteration_in_flight_and_the_downtime(job: Job) -> None:
    """Nothing of it counts; then three nodes go on, slower, for as long as the transition says."""
    job.answer(Happening(255.0, (1,), is_loss=True))

    assert job.samples == 1000
    assert job.begins_s > 255.0
    assert job.plan is not None
    assert job.plan.nodes == (0, 2, 3)


def test_a_node_that_is_back_joins_once_its_layers_have_moved(job: Job) -> None:
    """Three nodes train on while layers come in waves, an iteration each; then four are faster."""
    job.answer(Happening(255.0, (1,), is_loss=True))
    alone_s = job.iteration_s
    begins_s = job.begins_s
    job.answer(Happening(begins_s + 2.5 * alone_s, (1,), is_loss=False))

    assert job.following is not None
    at_s, plan, iteration_s = job.following
    num_iterations = (at_s - job.begins_s) / alone_s
    assert num_iterations == pytest.approx(round(num_iterations))
    assert num_iterations >= 1.0  # The one in flight.
    assert set(plan.nodes) == {0, 1, 2, 3}
    assert iteration_s < alone_s
    job.go_on(at_s)
    assert job.samples == 1000 + 40 * (2 + round(num_iterations))
    assert job.iteration_s == iteration_s


def test_the_last_copy_takes_along_what_is_not_saved(job: Job) -> None:
    """Both first places are gone: from the save at 200 s, with the two that are left."""
    job.answer(Happening(255.0, (0, 2), is_loss=True))

    assert job.samples == 800
    assert job.begins_s == 255.0 + 60.0


def test_an_answer_is_the_same_whatever_the_nodes_are_called() -> None:
    """What is remembered for one plan serves all that look like it."""
    book = every(4, n0=1, f=1)
    plan = plan_of(book, (2, 2))
    other = plan_of(book, (2, 2), (7, 5, 3, 1))
    results = []
    for one, lost in ((plan, 1), (other, 5)):
        alive = [node for node in one.nodes if node != lost]
        job = Job(
            answers=Answers(book, Adaptive((Unequal(Reinstantiate(book)),))),
            batch=40,
            save_every_s=100.0,
            is_adaptive=True,
            plan=one,
            iteration_s=10.0,
            alive={*alive, lost},
        )
        job.answer(Happening(255.0, (lost,), is_loss=True))
        results.append(job)

    assert results[0].iteration_s == results[1].iteration_s
    assert results[0].begins_s == results[1].begins_s
    assert results[1].plan is not None
    assert results[1].plan.nodes == (1, 3, 7)


def test_samples_of_a_study_that_was_stopped_are_not_run_again(tmp_path: Path) -> None:
    """But those of fewer seeds are."""
    path = tmp_path / "samples.jsonl"
    assert known_samples(path, num_seeds=2) == {}
    lines = [
        {"case": "one", "samples": {"adaptive": [1.0, 2.0], "reroute": [3.0, 4.0]}},
        {"case": "other", "samples": {"adaptive": [1.0], "reroute": [3.0]}},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert known_samples(path, num_seeds=2) == {"one": lines[0]["samples"]}
