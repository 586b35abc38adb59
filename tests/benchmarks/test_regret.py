"""The study of the adaptive policy's regret: its cases, and what is said of their results."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from planaria.simulator.failures.occurrences import OccurrenceKind
from regret import (
    POLICIES,
    Result,
    known_samples,
    page,
    result,
    result_line,
    summary,
    verdicts,
)
from regret_cases import (
    Case,
    drawn_cases,
    drawn_occurrences,
    iterations_between_saves,
    setting_of,
)

sys.path.pop()  # Or a script of benchmarks/ would be taken for a folder of tests/.

LOST = OccurrenceKind.LOST
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


def test_saves_are_as_far_apart_as_the_case_says_at_the_start() -> None:
    """In iterations, which is how a job is told."""
    setting = setting_of(CASE, "morph")
    assert setting is not None
    start_s = setting.failure_free_s

    assert iterations_between_saves(CASE) == round(CASE.save_every_s / start_s)
    assert iterations_between_saves(replace(CASE, save_every_s=start_s / 3)) == 1


@pytest.mark.long
def test_every_policy_trains_through_the_same_failures() -> None:
    """Each has the samples of its iterations; morph goes back at every loss and has fewer."""
    found = result(replace(CASE, gap_s=1800.0), num_seeds=1, num_failures=3)

    assert set(found.samples) == set(POLICIES)
    assert all(samples > 0 for (samples,) in found.samples.values())
    assert sum(found.samples["morph"]) < sum(found.samples["reinstantiate"])


def test_a_policy_without_the_memory_has_no_samples() -> None:
    """Absorb needs twice as much; GPT-3 6.7b has no room for that on four nodes."""
    case = replace(CASE, model="gpt3-6.7b")

    assert setting_of(case, "absorb") is None
    assert setting_of(case, "adaptive") is not None


def test_every_run_has_all_its_failures() -> None:
    """A node fails every minute and is away for an hour: those of the last node are waited out."""
    for seed in range(20):
        what = drawn_occurrences(CASE, seed, num_failures=20)
        alive = set(range(CASE.num_nodes))
        for one in what:
            alive = alive.difference(one.nodes) if one.kind is LOST else alive.union(one.nodes)
            assert alive

        assert sum(one.kind is LOST for one in what) == 20, seed
        assert all(one.nodes for one in what), seed
        assert [one.at_s for one in what] == sorted(one.at_s for one in what), seed


def test_no_case_of_a_study_comes_twice() -> None:
    """Seeds may draw one twice; the samples of a file are found by what a case says."""
    cases = drawn_cases(40, most_nodes=7)

    assert len({str(case) for case in cases}) == 40


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
    first, second = (drawn_occurrences(case, 7, num_failures=20) for case in cases)

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
