"""The study of the adaptive policy's regret: its account of samples, by hand."""

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from helpers.losses import example_catalog, plan_of
from planaria.core.cluster import ClusterEvent, ClusterState, NodesChanged
from planaria.core.plan import Plan, Ticks, Transition
from planaria.policies.absorb import Absorb
from planaria.policies.adaptive import Adaptive
from planaria.policies.morph import Morph
from planaria.policies.policy import Prices
from planaria.policies.reinstantiate import Reinstantiate
from planaria.policies.unequal_nodes import UnequalNodes
from regret import Result, known_samples, page, result_line, summary, verdicts
from study.cases import Case, catalog_of, drawn_cases, happenings, iterations_between_saves
from study.job import Answers, Happening, Job

sys.path.pop()  # Or a script of benchmarks/ would be taken for a folder of tests/.

CASE = Case(
    model="gpt2",
    num_nodes=4,
    each=2,
    slower=1,
    gap_s=60.0,
    burst=2,
    repair_s=3600.0,
    save_every_s=300.0,
)


@pytest.fixture
def job() -> Job:
    """Two pipelines of two nodes that hold the model in one each; an iteration takes 10 s."""
    catalog = example_catalog(4, n0=1, f=1)
    answers = Answers(catalog, UnequalNodes(Reinstantiate(catalog)))
    return Job(
        answers=answers,
        batch=40,
        between_saves=400,
        improves=False,
        plan=plan_of(catalog, (2, 2)),
        iteration_s=10.0,
        alive={0, 1, 2, 3},
    )


@dataclass
class Asked:
    """A policy without an answer, and its questions."""

    questions: list[tuple[Plan, ClusterState, ClusterEvent, Prices]] = field(default_factory=list)

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        self.questions.append((plan, cluster, event, prices))
        return ()


def test_plans_that_differ_in_their_schedule_alone_are_two_questions() -> None:
    """To stay with them takes another time; the same plan of other nodes is no new question."""
    catalog, policy = example_catalog(4, n0=1, f=1), Asked()
    answers = Answers(catalog, policy)
    plan = plan_of(catalog, (2, 2))
    ticks = Ticks(forward=1, backward_input=1, backward_weight=1, arrival=0)
    schedules = (
        plan,
        replace(plan, splits_backward=True),
        replace(plan, in_flight={0: 2}),
        replace(plan, in_flight={0: 3}),
        replace(plan, ticks={0: ticks}),
    )
    for epoch in range(2):
        for schedule in schedules:
            asked = replace(schedule, epoch=epoch)
            answers.to(asked, range(4), NodesChanged((), ()))

    assert list(schedules) == [plan for plan, *_ in policy.questions]


def test_whole_iterations_count_and_each_tenth_is_saved(job: Job) -> None:
    """At 255 s there are 25 iterations of 40 samples, and the newest save has 20."""
    job.go_on(255.0)

    assert job.samples == 1000
    assert job.unsaved == 200


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
    """Both first places are gone: from the 20th iteration, in place, with the two that are left."""
    job.answer(Happening(255.0, (0, 2), is_loss=True))

    assert job.samples == 800
    prices = job.answers.prices
    assert job.plan is not None
    load_s = job.answers.load_s(job.plan)
    assert load_s >= prices.links["inter_node"].seconds(sum(prices.layer_bytes) // 2)
    assert job.begins_s == pytest.approx(255.0 + prices.regroup_s + load_s)


def test_an_answer_is_the_same_whatever_the_nodes_are_called() -> None:
    """What is remembered for one plan serves all that look like it."""
    catalog = example_catalog(4, n0=1, f=1)
    plan = plan_of(catalog, (2, 2))
    other = plan_of(catalog, (2, 2), (7, 5, 3, 1))
    results = []
    for one, lost in ((plan, 1), (other, 5)):
        alive = [node for node in one.nodes if node != lost]
        job = Job(
            answers=Answers(catalog, Adaptive((UnequalNodes(Reinstantiate(catalog)),))),
            batch=40,
            between_saves=400,
            improves=True,
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


@pytest.mark.parametrize("improves", [False, True])
def test_a_first_plan_that_was_not_searched_for_gives_way(job: Job, *, improves: bool) -> None:
    """Four pipelines of one are the fastest; until their layers have moved two of two train."""
    job.improves = improves
    job.improve()

    assert bool(job.following) is improves
    job.go_on(1000.0)
    assert job.plan is not None
    assert len(job.plan.pipelines) == (4 if improves else 2)


def test_a_morphing_job_goes_back_to_its_save_at_every_loss() -> None:
    """Though all layers live: of 25 iterations at 255 s the newest save has 20."""
    catalog = example_catalog(4, n0=1, f=1)
    job = Job(
        answers=Answers(catalog, Morph(catalog)),
        batch=40,
        between_saves=400,
        improves=False,
        plan=plan_of(catalog, (2, 2)),
        iteration_s=10.0,
        alive={0, 1, 2, 3},
    )
    job.answer(Happening(255.0, (1,), is_loss=True))

    assert job.samples == 800
    assert job.plan is not None
    assert job.begins_s > 255.0


def test_an_absorbing_job_keeps_shadows_and_moves_nothing() -> None:
    """A neighbour computes what it kept in step, so the downtime is no more than regrouping."""
    catalog = example_catalog(4, n0=2, f=1)
    answers = Answers(catalog, Absorb(catalog, UnequalNodes(Reinstantiate(catalog))))
    start = answers.start(4)
    assert start is not None
    job = Job(
        answers=answers,
        batch=40,
        between_saves=400,
        improves=False,
        plan=start.plan,
        iteration_s=10.0,
        alive={0, 1, 2, 3},
    )
    job.answer(Happening(255.0, (1,), is_loss=True))

    assert start.plan.shadows
    assert job.samples == 1000
    assert job.begins_s == 255.0 + answers.prices.regroup_s


def test_saves_are_as_far_apart_as_the_case_says_at_the_start() -> None:
    """In iterations, which is how a job is told."""
    catalog = catalog_of(CASE)
    (start,) = {
        priced.iteration_s
        for policy in (Reinstantiate(catalog), Morph(catalog))
        if (priced := Answers(catalog, policy).start(CASE.num_nodes))
    }

    assert iterations_between_saves(CASE) == round(CASE.save_every_s / start)
    assert iterations_between_saves(replace(CASE, save_every_s=start / 3)) == 1


def test_every_run_has_all_its_failures() -> None:
    """A node fails every minute and is away for an hour: those of the last node are waited out."""
    for seed in range(20):
        what = happenings(CASE, seed, num_failures=20)
        alive = set(range(CASE.num_nodes))
        for one in what:
            alive = alive.difference(one.nodes) if one.is_loss else alive.union(one.nodes)
            assert alive

        assert sum(one.is_loss for one in what) == 20, seed
        assert all(one.nodes for one in what), seed
        assert [one.at_s for one in what] == sorted(one.at_s for one in what), seed


def test_no_case_of_a_study_comes_twice() -> None:
    """Seeds may draw one twice; the samples of a file are found by what a case says."""
    cases = drawn_cases(200, most_nodes=7)

    assert len({str(case) for case in cases}) == 200


@pytest.mark.parametrize(
    ("adaptive", "is_met"),
    [((101.0, 101.0, 101.0), True), ((110.0, 100.0, 96.0), False), ((99.0, 99.0, 99.0), False)],
)
def test_the_interval_may_not_reach_below_zero(adaptive: tuple[float, ...], is_met: bool) -> None:
    """In the middle the mean is 2% more, with an interval from -6%; no case loses over 5%."""
    results = [
        Result(CASE, {"adaptive": (samples, samples), "reroute": (100.0, 100.0)})
        for samples in adaptive
    ]

    assert summary(results)[1] is is_met


def test_cases_in_which_jobs_are_alive_are_told_apart() -> None:
    """Where nobody trains more than some iterations between 20 failures, chance decides."""
    dead = Result(CASE, {"adaptive": (10.0,), "reroute": (20.0,)})
    alive = [Result(CASE, {"adaptive": (a,), "reroute": (20_000.0,)}) for a in (20_400.0, 20_000.0)]

    assert "In the 2 cases with 10,000 samples or more it is +1.00%" in summary([dead, *alive])[0]
    assert "or more" not in summary(alive)[0]


@pytest.mark.parametrize(("tolerated", "is_met"), [(1, True), (0, False)])
def test_morph_counts_only_where_layers_need_one_holder(tolerated: int, is_met: bool) -> None:
    """It has twice as many samples; where two holders are asked for, that is told and no more."""
    samples = {"adaptive": (100.0,), "reroute": (99.0,), "morph": (200.0,)}
    other = dict.fromkeys(samples, (100.0,))
    cases = [replace(CASE, failures_tolerated=f) for f in (tolerated, 1 - tolerated)]
    results = [Result(cases[0], samples)] * 2 + [Result(cases[1], other)] * 2
    texts, found = verdicts(results)
    written = page(results, texts)

    assert found is is_met
    assert ("| 50.00% | morph |" in written) is not is_met
    assert written.count("| morph | 2 | 2 | +100.00% |") == 1


def test_a_job_fails_the_same_whatever_it_tolerates() -> None:
    """So samples of both can be compared."""
    cases = [replace(CASE, failures_tolerated=f) for f in (0, 1)]
    first, second = (happenings(case, 7, num_failures=20) for case in cases)

    assert first == second


def test_a_policy_that_a_case_has_no_memory_for_is_told_of_others() -> None:
    """Absorb ran in one of two cases, and is the best one there."""
    results = [
        Result(CASE, {"adaptive": (90.0,), "reroute": (80.0,), "absorb": (99.0,)}),
        Result(CASE, {"adaptive": (90.0,), "reroute": (81.0,)}),
    ]

    written = page(results, ("Met.",))

    assert "| absorb | 1 | 1 | +10.00% |" in written
    assert "| reroute | 2 | 1 | -10.56% |" in written
    assert "| morph | 0 | 0 |  |" in written


def test_samples_of_a_study_that_was_stopped_are_not_run_again(tmp_path: Path) -> None:
    """But those of fewer seeds are, and those of runs that had no version yet."""
    path = tmp_path / "samples.jsonl"
    assert known_samples(path, num_seeds=2) == {}
    one = Result(CASE, {"adaptive": [1.0, 2.0], "reroute": [3.0, 4.0]})
    fewer = Result(replace(CASE, num_nodes=5), {"adaptive": [1.0], "reroute": [3.0]})
    old = {"case": "old", "samples": one.samples}
    path.write_text(result_line(one) + result_line(fewer) + json.dumps(old) + "\n")

    assert known_samples(path, num_seeds=2) == {str(CASE): one.samples}
