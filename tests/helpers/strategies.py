"""Hypothesis strategies that tests share: profiles, problems, and plans for them."""

from collections.abc import Iterable

from hypothesis import strategies as st

from planaria.core.plan import LayerProfile, Link, ModelProfile, PipelineTemplate, Plan
from planaria.planner.plans import best_plan
from planaria.planner.problem import Problem
from planaria.planner.templates import pipeline_templates

MEBIBYTE = 1 << 20


def layer_profile(
    name: str,
    forward_s: float,
    *,
    device_counts: tuple[int, ...] = (1,),
    parameter_bytes: int = 4 * MEBIBYTE,
    activation_bytes: int = MEBIBYTE,
    output_bytes: int = 0,
) -> LayerProfile:
    """A layer whose backward takes twice its forward, and that d devices speed up d^0.8 times."""
    by_count = {count: forward_s / count**0.8 for count in device_counts}
    return LayerProfile(
        name=name,
        forward_s=by_count,
        backward_input_s=by_count,
        backward_weight_s=by_count,
        parameter_bytes=parameter_bytes,
        optimizer_bytes=2 * parameter_bytes,
        activation_bytes=activation_bytes,
        output_bytes=output_bytes,
    )


def model_profile(
    layers: tuple[LayerProfile, ...], *, device_memory_bytes: int = 0, microbatch_size: int = 2
) -> ModelProfile:
    """A profile of these layers; between nodes links are ten times slower than within."""
    return ModelProfile(
        model="layers",
        microbatch_size=microbatch_size,
        dtype="float32",
        device="cpu",
        device_memory_bytes=device_memory_bytes,
        layers=layers,
        links={"intra_node": Link(1e-5, 1e10), "inter_node": Link(1e-4, 1e9)},
    )


def timed_profile(layer_s: Iterable[float]) -> ModelProfile:
    """A profile of layers that take these seconds for forward and backward."""
    return model_profile(
        tuple(layer_profile(f"layer {i}", seconds / 3) for i, seconds in enumerate(layer_s))
    )


def equal_problem(
    *,
    num_layers: int = 6,
    device_memory_bytes: int = 0,
    num_microbatches: int = 16,
    failures_tolerated: int = 1,
) -> Problem:
    """Equal layers of 10 ms forward on nodes of one device: 17 MiB each, 16 of them parameters'."""
    layers = tuple(layer_profile(f"layer {i}", 0.01) for i in range(num_layers))
    return Problem(
        profile=model_profile(layers, device_memory_bytes=device_memory_bytes),
        devices_per_node=1,
        num_microbatches=num_microbatches,
        failures_tolerated=failures_tolerated,
    )


@st.composite
def profiles(
    draw: st.DrawFn, *, max_layers: int = 6, device_counts: tuple[int, ...] = (1,)
) -> ModelProfile:
    """Unequal layers, some equal; device memory from too little for one layer to unlimited."""
    layers = tuple(
        layer_profile(
            f"layer {i}",
            draw(st.sampled_from((0.004, 0.01, 0.013, 0.03))),
            device_counts=device_counts,
            parameter_bytes=draw(st.integers(0, 8)) * MEBIBYTE,
            activation_bytes=draw(st.integers(0, 4)) * MEBIBYTE,
            output_bytes=draw(st.sampled_from((0, MEBIBYTE, 16 * MEBIBYTE))),
        )
        for i in range(draw(st.integers(1, max_layers)))
    )
    memory_bytes = draw(st.sampled_from((0, 0, 40, 80, 160))) * MEBIBYTE
    return model_profile(layers, device_memory_bytes=memory_bytes)


@st.composite
def problems(draw: st.DrawFn, *, max_layers: int = 6, max_devices_per_node: int = 1) -> Problem:
    """Any profile with a few devices a node, microbatches and failures to tolerate."""
    devices_per_node = draw(st.integers(1, max_devices_per_node))
    counts = draw(st.sampled_from(((1,), (1, 2)) if devices_per_node > 1 else ((1,),)))
    return Problem(
        profile=draw(profiles(max_layers=max_layers, device_counts=counts)),
        devices_per_node=devices_per_node,
        num_microbatches=draw(st.integers(1, 12)),
        failures_tolerated=draw(st.integers(0, 2)),
        is_deterministic=draw(st.booleans()),
    )


@st.composite
def planned_problems(
    draw: st.DrawFn, *, max_nodes: int = 7
) -> tuple[Problem, dict[int, PipelineTemplate], Plan]:
    """A problem that can be solved, its templates and the best plan on any nodes."""
    num_nodes = draw(st.integers(1, max_nodes))
    num_layers = draw(st.integers(1, 8))
    problem = equal_problem(
        num_layers=num_layers,
        failures_tolerated=draw(st.integers(0, num_nodes - 1)),
        num_microbatches=draw(st.integers(num_nodes, 20)),
    )
    nodes = draw(st.lists(st.integers(0, 30), min_size=num_nodes, max_size=num_nodes, unique=True))
    templates = pipeline_templates(problem, num_nodes)
    return problem, templates, best_plan(problem, nodes, templates, epoch=draw(st.integers(0, 9)))
