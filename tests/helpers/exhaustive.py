"""Every partition of a small problem, and what each costs, by the letter of the definitions."""

import random
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

from planaria.core.plan import LayerProfile, Link, ModelProfile, PipelineTemplate, Stage
from planaria.estimator.makespan import makespans_of_each, stage_seconds, stage_table
from planaria.estimator.peak_memory import peak_bytes
from planaria.planner.problem import Problem, Shape

MICROBATCHES = (2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512)


def small_problem(rng: random.Random) -> tuple[Problem, int]:
    """At most 9 layers and 8 devices, and the number of nodes; times are sums of few digits.

    Layers are equal, uneven, or some of them much slower; devices speed them up well or badly, some
    counts are not supported; transfers take from nothing to a third of a stage's time; memory is
    unlimited or from too little to plenty.
    """
    num_layers, per_node = rng.randint(2, 9), rng.choice((1, 2, 3, 4, 6, 8))
    num_nodes = rng.randint(1, max(1, 8 // per_node))
    counts = range(1, per_node + 1) if rng.random() < 0.5 else (1, 2, 4, 8)
    spread, efficiency = rng.choice((0, 0.3, 1, 3)), rng.uniform(0.6, 1.0)
    layers = []
    for index in range(num_layers):
        factor = 3 if rng.random() < 0.15 else 1
        forward_s = factor * (1 + spread * rng.random())
        backward_s = forward_s * rng.uniform(1.5, 2.5)
        speed_up = {c: c**efficiency for c in counts if c <= per_node}
        num_bytes = rng.randint(1, 10)
        layers.append(
            LayerProfile(
                name=f"layer {index}",
                forward_s={c: _round(forward_s / s) for c, s in speed_up.items()},
                backward_input_s={c: _round(backward_s / s) for c, s in speed_up.items()},
                backward_weight_s=dict.fromkeys(speed_up, 0.0),
                parameter_bytes=10 * num_bytes,
                optimizer_bytes=20 * num_bytes,
                activation_bytes=rng.randint(1, 20),
                output_bytes=rng.randint(1, 10),
            )
        )
    stage_s = 4 * (1 + spread / 2) * num_layers / min(num_nodes * per_node, num_layers)
    share = rng.choice((0, 0.01, 0.05, 0.1, 0.3))
    bandwidth = 10 / (share * stage_s) if share else 1e12
    total_bytes = sum(4 * layer.parameter_bytes for layer in layers)
    tight = int(total_bytes / (num_nodes * per_node) * rng.uniform(1.2, 6) + 60)
    profile = ModelProfile(
        model="small",
        microbatch_size=1,
        dtype="float32",
        device="cpu",
        device_memory_bytes=rng.choice((0, tight)),
        layers=tuple(layers),
        links={
            "intra_node": Link(0.0, bandwidth * rng.choice((1, 5, 20))),
            "inter_node": Link(share * stage_s * rng.choice((0, 0.3)), bandwidth),
        },
    )
    problem = Problem(
        profile=profile,
        devices_per_node=per_node,
        num_microbatches=rng.choice(MICROBATCHES),
        failures_tolerated=0,
    )
    return problem, num_nodes


def _round(seconds: float) -> float:
    """A multiple of 2^-10: sums of these are exact, in whatever order."""
    return round(seconds * 1024) / 1024


def all_shapes(problem: Problem, num_nodes: int) -> list[Shape]:
    """Every partition that fits into memory."""
    layers, per_node = problem.profile.layers, problem.devices_per_node

    def suffixes(first: int, devices_left: int) -> Iterator[Shape]:
        if devices_left == 0:
            if first == len(layers):
                yield ()
            return
        for count in range(1, (devices_left - 1) % per_node + 2):
            for end in range(first + 1, len(layers) + 1):
                if count not in layers[end - 1].forward_s:
                    break
                for suffix in suffixes(end, devices_left - count):
                    yield ((end, count), *suffix)

    fits = _memory_check(problem)
    return [shape for shape in suffixes(0, num_nodes * per_node) if fits(shape)]


def _memory_check(problem: Problem) -> Callable[[Shape], bool]:
    @cache
    def holds(first: int, end: int, count: int, in_flight: int) -> bool:
        layers = problem.profile.layers[first:end]
        kept = sum(
            x.parameter_bytes * (1 + problem.gradient_copies) + x.optimizer_bytes for x in layers
        )
        activations = in_flight * sum(layer.activation_bytes for layer in layers)
        return -(-kept // count) + activations <= problem.profile.device_memory_bytes

    def fits(shape: Shape) -> bool:
        firsts = (0, *(end for end, _ in shape))
        return problem.profile.device_memory_bytes == 0 or all(
            holds(firsts[i], end, count, min(problem.num_microbatches, len(shape) - i))
            for i, (end, count) in enumerate(shape)
        )

    return fits


def stage_times_s(problem: Problem, shape: Shape) -> list[float]:
    """Forward and backward of a microbatch in each stage."""
    times, first = [], 0
    for end, count in shape:
        layers = problem.profile.layers[first:end]
        times.append(sum(x.forward_s[count] + x.backward_s(count) for x in layers))
        first = end
    return times


def bound_s(problem: Problem, shape: Shape, num_microbatches: int) -> float:
    """The largest of: the way down to a stage and up again, and its work on all microbatches."""
    bound = way_s = 0.0
    device = 0
    for seconds, (end, count) in zip(stage_times_s(problem, shape), shape, strict=True):
        device += count
        bound = max(bound, way_s + num_microbatches * seconds)
        kind = "intra_node" if device % problem.devices_per_node else "inter_node"
        way_s += seconds
        way_s += 2 * problem.profile.links[kind].seconds(
            problem.profile.layers[end - 1].output_bytes
        )
    return bound


def paper_objective_s(problem: Problem, shape: Shape) -> float:
    """T1 + T2 + T3 at N_b = 4S; Oobleck, equations 1 - 4 and the text around them."""
    times = stage_times_s(problem, shape)
    num_stages = len(times)
    slowest = max(i for i in range(num_stages) if times[i] == max(times))
    t1 = sum(times)
    t2 = (4 * num_stages - num_stages + slowest - 1) * times[slowest]
    t3 = sum(times[slowest:])
    return t1 + t2 + t3


def makespans_s(problem: Problem, shapes: list[Shape], num_nodes: int) -> NDArray[np.float64]:
    """The simulated times of partitions."""
    seconds = [stage_seconds(problem.profile, template_of(shape, num_nodes)) for shape in shapes]
    return makespans_of_each(stage_table(seconds), problem.num_microbatches)


def template_of(shape: Shape, num_nodes: int) -> PipelineTemplate:
    firsts = (0, *(end for end, _ in shape))
    stages = tuple(Stage(firsts[i], end, count) for i, (end, count) in enumerate(shape))
    return PipelineTemplate(stages, num_nodes)


def fits(problem: Problem, template: PipelineTemplate) -> bool:
    """Whether each stage fits into its node's devices."""
    peaks = peak_bytes(
        problem.profile,
        template,
        num_microbatches=problem.num_microbatches,
        gradient_copies=problem.gradient_copies,
    )
    limits = [
        kind.device_memory_bytes or problem.profile.device_memory_bytes
        for kind in template.stage_kinds()
    ]
    return all(limit == 0 or peak <= limit for peak, limit in zip(peaks, limits, strict=True))
