"""Odyssey's numbers come back where the paper says enough, and are named where it does not."""

import pytest

from helpers.published import rows_of
from planaria.papers.experiments import EXPERIMENTS
from planaria.papers.odyssey.faults import EquationPlan, Form, failures_of, odyssey, ratio, recycle
from planaria.papers.rows import PublishedRow
from planaria.systems.odyssey import Duration as Known

PIPELINES = ("before", "after")


def rows(name: str) -> dict[tuple[object, ...], PublishedRow]:
    """The rows of an experiment by their keys."""
    return {tuple(row.keys.values()): row for row in rows_of(name)}


def test_what_the_paper_prints_is_held_against_ours() -> None:
    """All the numbers of section V, whether they come back or not."""
    printed = {
        row.published
        for name in EXPERIMENTS
        if name.startswith("odyssey")
        for row in rows(name).values()
    }

    assert printed >= {96.22, 89.00, 74.38, 99.17, 8.02, 26.79, 32.35, 35.35, 1.229, 1.355}
    assert printed >= {11.44, 15.44, 5.52, 11.0, 9.5, 20.0, 1.5}


def test_the_numbers_of_the_text_agree_with_each_other() -> None:
    """99.17% of what 24 devices can give, and 26.79% of a recovery."""
    layouts, transfers = rows("odyssey-figure-6"), rows("odyssey-figure-10")

    assert layouts["32 to 24", "of the most that 24 devices can give"].has_come_back
    assert transfers[16, "recovery saved, percent"].has_come_back


def test_what_is_saved_of_a_transfer_at_16_layers_does_not_count_as_back() -> None:
    """32.35% as printed, and 33.33% here; but with 4 and 8 layers, where the paper sees no
    significant gain, as much and more is saved here."""
    table = rows("odyssey-figure-10")
    of_layers = {n: table[n, "busiest link's time saved, percent"] for n in (4, 8, 16)}

    assert of_layers[16].published == 32.35
    assert of_layers[16].ours == pytest.approx(33.33, abs=0.01)
    assert all((of_layers[n].ours or 0.0) >= 33.3 for n in (4, 8))
    assert not of_layers[16].has_come_back
    for num_blocks in (4, 8):
        assert "does not yield significant performance improvements" in of_layers[num_blocks].note


def test_nothing_is_gained_over_oobleck_unless_its_transitions_take_minutes() -> None:
    """1.00 with equal transitions, and 1.229 holds at more than five minutes."""
    table = rows("odyssey-figure-8")

    equal = table["Oobleck", "4, 8", 15.0, "Oobleck 15 s", "times"]
    assert equal.published == 1.229
    assert equal.ours == pytest.approx(1.0, abs=0.02)
    holds = table["Oobleck", "4, 8", 15.0, "Oobleck, where 1.229 holds", "seconds"]
    assert holds.ours == pytest.approx(320.0, abs=15.0)


def test_equation_13_overstates_what_rerouting_costs() -> None:
    """1.355 lies among the ratios with the largest of the stages, and below all with their sum, for
    transitions of up to three minutes; with two stages there is little to gain by either."""
    over = {
        key: row.ours
        for key, row in rows("odyssey-figure-8").items()
        if key[0] == "ReCycle" and row.published == 1.355 and key[2] in (15.0, 60.0, 180.0)
    }
    of_two = [ours for key, ours in over.items() if key[1] == "2, 16" and ours]
    over = {key: ours for key, ours in over.items() if key[1] != "2, 16"}
    sums = [ours for key, ours in over.items() if "sum" in str(key[3]) and ours]
    largest = [ours for key, ours in over.items() if "largest" in str(key[3]) and ours]

    assert max(of_two) < 1.25
    assert min(sums) > 1.5
    assert min(largest) < 1.355 < max(largest)


def test_a_stage_without_nodes_cannot_be_rerouted() -> None:
    """Equation 13 would divide by zero: pipelines are formed anew."""
    plan = EquationPlan((2, 2), (0, 1, 2, 3), 1.0, frozenset({0, 2}))

    assert plan.num_lost == (2, 0)
    assert plan.rerouted_iteration(Form.LARGEST) == float("inf")
    best, iteration, transition_s = recycle(7.0, Form.LARGEST)(plan, 100.0)
    assert best.nodes == (1, 3)
    assert iteration == best.iteration
    assert transition_s == 7.0


def test_as_many_pipelines_are_formed_as_fit() -> None:
    """With three of 32 nodes missing neither 16 pipelines of two fit nor 15; it was one of 29."""
    plan = EquationPlan((2,) * 16, tuple(range(32)), 80.0, frozenset({1, 4, 9}))

    assert len(plan.best_plan().depths) == 14


def test_rerouting_costs_the_sum_or_the_largest_share() -> None:
    """Two stages that lost one of two nodes each: N_m F / (N_dp - F) is 32 microbatches."""
    plan = EquationPlan((2, 2), (0, 1, 2, 3), 0.0, frozenset({0, 3}))

    assert plan.rerouted_iteration(Form.LARGEST) == 32 * 16
    assert plan.rerouted_iteration(Form.SUM) == 2 * 32 * 16


def test_a_node_fails_once_and_the_same_under_each_system() -> None:
    """Otherwise systems would be compared on other failures."""
    failures = failures_of(3)

    assert failures == failures_of(3)
    assert len({node for _, node in failures}) == len(failures)
    same = ratio(
        (4, 8),
        form=Form.LARGEST,
        duration=Known.MEAN,
        transition_s=60.0,
        other=odyssey(60.0, Form.LARGEST),
    )
    assert same == pytest.approx(1.0)


def test_both_ways_to_count_memory_agree_before_a_loss() -> None:
    """Stages of eight equal blocks each, with as many microbatches in flight as stages are left."""
    table = rows("odyssey-figure-12")
    estimates = {pipeline: table[pipeline, "planaria's estimate"].ours for pipeline in PIPELINES}

    assert estimates["before"] == pytest.approx(table["before, 2 stages", "equation 14"].ours)
    assert estimates["after"] == estimates["before"]
