"""Which nodes are seen to be slow: in noise, beside stalls, and where the profile is wrong."""

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from helpers.jobs import NUM_LAYERS, shaped_plan
from helpers.strategies import timed_profile
from planaria.coordinator.learning.slowness import (
    BACK_FACTOR,
    COMPUTING_S_MIN,
    SLOW_FACTOR,
    WINDOW,
    believed_slowness,
    slowness_by_node,
)
from planaria.core.plan import Plan, RecomputationCost

SEED = 20_261_121
NUM_RUNS = 60
NUM_ITERATIONS = 60
SHAPES = ((1, 1), (2, 2), (2, 2, 2), (3, 3), (4, 3), (3, 2, 1), (1,) * 6)
NOISE = 0.08  # Standard deviation of the logarithm, of every rank in every iteration.


class Cluster:
    """Ranks that compute in noise.

    Args:
        wrong: how far off the profile is at most, layer by layer.
    """

    def __init__(self, rng: random.Random, *, wrong: float = 1.0) -> None:
        self.rng = rng
        self.plan = shaped_plan(rng.choice(SHAPES), 12)
        self.profile = timed_profile(rng.uniform(0.01, 0.1) for _ in range(NUM_LAYERS))
        self.true_s = tuple(s * rng.uniform(1.0, wrong) for s in self.profile.layer_s)
        self.slowness = dict.fromkeys(self.plan.nodes, 1.0)
        self.windows: dict[int, tuple[float, ...]] = {}
        self.believed = dict(self.slowness)

    def computing_s(self) -> dict[int, float]:
        """By rank; everything takes half as long again as on the machine of the profile."""
        seconds = dict.fromkeys(self.plan.ranks, 0.0)
        for route in self.plan.routes:
            for hop in route:
                seconds[hop.rank] += sum(self.true_s[hop.first_layer : hop.end_layer])
        noise = {rank: self.rng.lognormvariate(0.0, NOISE) for rank in seconds}
        return {r: 1.5 * self.slowness[r] * noise[r] * s for r, s in seconds.items()}

    def train(self, num_iterations: int, *, stalls: float = 0.0) -> None:
        """Iterations, after each of which it is believed what is seen."""
        for _ in range(num_iterations):
            seconds = self.computing_s()
            if self.rng.random() < stalls:
                seconds[self.rng.choice(self.plan.ranks)] += self.rng.uniform(0.0, 100.0)
            speeds = {n: 1.0 / slowness for n, slowness in self.believed.items()}
            found = slowness_by_node(self.plan, seconds, profile=self.profile, speeds=speeds)
            for node, ratio in found.items():
                self.windows[node] = (*self.windows.get(node, ()), ratio)[-WINDOW:]
                self.believed[node] = believed_slowness(self.believed[node], self.windows[node])


@pytest.mark.parametrize("run", range(NUM_RUNS))
def test_noise_and_stalls_and_a_wrong_profile_make_nobody_slow(run: int) -> None:
    """Layers that take up to twice what the profile says, and a long stall now and then."""
    cluster = Cluster(random.Random(f"{SEED} {run}"), wrong=1.0 if run % 2 else 2.0)
    if len({len(pipeline.nodes) for pipeline in cluster.plan.pipelines}) > 1:
        cluster.true_s = cluster.profile.layer_s  # Nobody holds the same layers as another.
    cluster.train(NUM_ITERATIONS, stalls=0.1)

    assert set(cluster.believed.values()) == {1.0}, f"seed {SEED}, run {run}"


@pytest.mark.parametrize("run", range(NUM_RUNS))
def test_a_slow_node_is_seen_with_its_speed_and_alone_and_seen_to_be_fast_again(run: int) -> None:
    """Within two windows, for one of its iterations may be an exception."""
    rng = random.Random(f"{SEED} {run}")
    cluster = Cluster(rng)
    slow, factor = rng.choice(cluster.plan.nodes), rng.uniform(1.7, 4.0)
    cluster.train(10)
    cluster.slowness[slow] = factor
    cluster.train(2 * WINDOW)
    seen = cluster.believed.pop(slow)

    assert set(cluster.believed.values()) <= {1.0}, f"seed {SEED}, run {run}"
    assert seen == pytest.approx(factor, rel=0.15), f"seed {SEED}, run {run}"
    cluster.believed[slow] = seen
    cluster.slowness[slow] = 1.0
    cluster.train(2 * WINDOW)
    assert cluster.believed[slow] == 1.0, f"seed {SEED}, run {run}"


def equal_work(plan: Plan, **slowness: float) -> Mapping[int, float]:
    """Seconds of ranks whose layers take 0.1 s a microbatch each."""
    seconds = dict.fromkeys(plan.ranks, 0.0)
    for route in plan.routes:
        for hop in route:
            factor = slowness.get(f"rank{hop.rank}", 1.0)
            seconds[hop.rank] += 0.1 * factor * (hop.end_layer - hop.first_layer)
    return seconds


PROFILE = timed_profile((0.1,) * NUM_LAYERS)


@pytest.mark.parametrize("sizes", SHAPES)
def test_a_node_that_takes_twice_as_long_for_its_work_has_a_slowness_of_two(
    sizes: tuple[int, ...],
) -> None:
    """Whatever the shape: work is layers times microbatches. Whoever shares layers with it, and
    with nobody else, may look fast; nobody looks slow."""
    plan = shaped_plan(sizes, 12)
    seconds = equal_work(plan, rank1=2.0)
    found = slowness_by_node(plan, seconds, profile=PROFILE, speeds={})

    assert found.pop(1) == pytest.approx(2.0)
    assert all(value <= 1.0 + 1e-9 for value in found.values())


def test_a_second_slow_node_is_seen_beside_the_first_that_is_known() -> None:
    """They hold the same layers, and nobody else does."""
    plan = shaped_plan((2, 2), 12)
    seconds = equal_work(plan, rank1=2.0, rank3=3.0)
    found = slowness_by_node(plan, seconds, profile=PROFILE, speeds={1: 0.5})

    assert found[3] == pytest.approx(3.0)


def test_a_node_that_computes_activations_again_is_not_slow() -> None:
    """Its work has what it computes again, by the profile."""
    plan = shaped_plan((3,), 12)
    (pipeline,) = plan.pipelines
    first, *others = pipeline.template.stages
    again = replace(first, recomputation=tuple("full" for _ in range(first.end_layer)))
    template = replace(pipeline.template, stages=(again, *others))
    plan = replace(plan, pipelines=(replace(pipeline, template=template),))
    costs = {"full": RecomputationCost(activation_bytes=0, additional_s={1: 0.05})}
    layers = tuple(replace(layer, recomputed=costs) for layer in PROFILE.layers)
    seconds = equal_work(plan, rank0=1.5)
    found = slowness_by_node(plan, seconds, profile=replace(PROFILE, layers=layers), speeds={})

    assert found == pytest.approx({0: 1.0, 1: 1.0, 2: 1.0})


def test_iterations_that_are_too_short_tell_nothing() -> None:
    """Time slices of a busy machine would."""
    plan = shaped_plan((1, 1), 12)
    short_s = dict.fromkeys(plan.ranks, 0.9 * COMPUTING_S_MIN)

    assert slowness_by_node(plan, short_s, profile=PROFILE, speeds={}) == {}
    assert slowness_by_node(plan, {}, profile=PROFILE, speeds={}) == {}


def test_what_is_believed_lasts_until_a_whole_window_says_otherwise() -> None:
    """One iteration in between keeps it as it was; steps are of 4%."""
    beyond, usual = (SLOW_FACTOR + 0.1,) * WINDOW, (1.0,) * WINDOW
    assert believed_slowness(1.0, beyond[1:]) == 1.0
    assert believed_slowness(1.0, (1.0, *beyond[1:])) == 1.0
    assert believed_slowness(1.0, beyond) == pytest.approx(SLOW_FACTOR + 0.1, rel=0.03)
    assert believed_slowness(1.0, (2.03, 1.98, 2.0, 2.01, 2.02)) == 2.0
    assert believed_slowness(2.0, (*usual[1:], 2.0)) == 2.0
    assert believed_slowness(2.0, usual) == 1.0
    assert believed_slowness(2.0, (2.0 * SLOW_FACTOR - 0.01,) * WINDOW) == 2.0
    assert believed_slowness(SLOW_FACTOR, (SLOW_FACTOR / BACK_FACTOR + 0.01,) * WINDOW) > 1.0
    assert believed_slowness(1.0, (0.2,) * WINDOW) == 1.0
