"""Sets of pipelines that promise much with split backwards."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from helpers.strategies import layer_profile, model_profile
from planaria.core.plan import one_device_profile
from planaria.job.planning import read_profile
from planaria.planner.layout.depths import Ranges, numbers_possible
from planaria.planner.layout.instantiate import NUMBERS_APART
from planaria.planner.layout.search import LayoutSearches, SearchResults
from planaria.planner.layout.split_sets import SplitSets
from planaria.planner.problem import Problem
from planaria.planner.templates import pipeline_templates

SEED = 20_261_130


@cache
def gpt2() -> Problem:
    """128 microbatches of GPT-2 on nodes of one device."""
    profile = one_device_profile(read_profile(Path("gpt2")))
    return Problem(profile=profile, devices_per_node=1, num_microbatches=128, failures_tolerated=1)


@pytest.mark.parametrize("num_nodes", [29, 31])
def test_nodes_that_share_no_microbatches_evenly_form_deeper_pipelines(num_nodes: int) -> None:
    """As many pipelines as nodes wait for those that get one microbatch more, and no spread near
    that has pipelines deep enough."""
    problem = gpt2()
    templates = pipeline_templates(problem, 32)
    present = [templates[1]] * num_nodes
    seconds = []
    for known in ({}, templates):
        searched = LayoutSearches(Ranges(), SearchResults(problem, known))
        for _ in searched.steps(num_nodes, present):
            pass
        seconds.append(searched.front(num_nodes, present)[0].iteration_s)

    assert seconds[1] < 0.93 * seconds[0]


def test_every_set_uses_all_nodes_and_each_number_of_pipelines_has_one() -> None:
    """The numbers are those that nodes, layers and microbatches allow; the order is that of the
    bounds, and what was asked before changes nothing."""
    rng = random.Random(SEED)
    for index in range(15):
        layers = tuple(
            layer_profile(f"layer {i}", rng.choice((0.01, 0.02, 0.05)))
            for i in range(rng.randint(3, 8))
        )
        problem = Problem(
            profile=model_profile(layers),
            devices_per_node=1,
            num_microbatches=rng.randint(2, 16),
            failures_tolerated=rng.randint(0, 2),
        )
        templates = pipeline_templates(problem, 12)
        sets = SplitSets(problem, templates)
        for num_nodes in rng.sample(range(1, 13), 4):
            case = f"seed {SEED}, case {index}, {num_nodes} nodes"
            spreads = sets.spreads(num_nodes)
            possible = numbers_possible(problem, num_nodes)
            assert all(sum(depths) == num_nodes for depths in spreads), case
            assert all(len(depths) in possible for depths in spreads), case
            apart = [len(depths) for depths in spreads if len(depths) <= NUMBERS_APART]
            assert len(apart) == len(set(apart)), case
            assert spreads == SplitSets(problem, templates).spreads(num_nodes), case


def test_a_job_with_whole_backwards_has_none() -> None:
    """Its searches stay within the ranges."""
    problem = gpt2()
    templates = pipeline_templates(problem, 8)

    assert SearchResults(problem, templates).spreads(7)
    assert not SearchResults(replace(problem, splits_backward=False), templates).spreads(7)
