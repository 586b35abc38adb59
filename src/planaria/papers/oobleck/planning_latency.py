"""Oobleck's Table 3: seconds to plan one pipeline template.

The model has equal layers; a stage may have any number of a node's devices that is a power of two.
Times are measured where the command runs; those of the paper are of another machine, and of code
that spends them in a recursion over all splits.
"""

import random
import time
from collections.abc import Iterable, Mapping
from typing import Final

from planaria.core.plan import LayerProfile, Link, ModelProfile
from planaria.papers.rows import How, PublishedRow
from planaria.planner.partition.paper import paper_partition
from planaria.planner.problem import Problem, stage_costs
from planaria.planner.templates import pipeline_template

LAYERS: Final = (24, 32, 64, 96)
# Oobleck (SOSP '23), Table 3: seconds by nodes and devices of a node, for LAYERS.
TABLE_3_S: Final[Mapping[tuple[int, int], tuple[float, ...]]] = {
    (8, 1): (0.28, 0.71, 9.65, 68.50),
    (8, 4): (0.41, 1.15, 11.58, 74.56),
    (8, 8): (0.54, 1.50, 20.98, 109.76),
    (16, 1): (3.37, 7.45, 66.35, 540.36),
    (16, 4): (4.56, 10.41, 108.10, 649.67),
    (16, 8): (4.90, 11.78, 176.04, 1213.63),
    (24, 1): (11.35, 30.11, 262.47, 1477.54),
    (24, 4): (14.78, 45.80, 472.53, 2153.84),
    (24, 8): (15.59, 49.25, 520.08, 3297.92),
}
_NOTE: Final = "measured where the command runs; the paper's machine is another"
_SEED: Final = 20_261_121


def table_3() -> tuple[PublishedRow, ...]:
    """All 36 latencies, with the paper's objective and with planaria's own."""
    return latency_rows(TABLE_3_S)


def latency_rows(cells: Iterable[tuple[int, int]]) -> tuple[PublishedRow, ...]:
    """The rows of some pairs of a number of nodes and of devices per node."""
    rows = []
    for num_nodes, num_devices in cells:
        published = zip(LAYERS, TABLE_3_S[num_nodes, num_devices], strict=True)
        for num_layers, published_s in published:
            problem = planning_problem(num_layers, num_nodes, num_devices, spread=0.0)
            start_s = time.perf_counter()
            paper_partition(stage_costs(problem), num_nodes)
            middle_s = time.perf_counter()
            pipeline_template(problem, num_nodes)
            end_s = time.perf_counter()
            for planner, printed_s, seconds in (
                ("paper's objective", published_s, middle_s - start_s),
                ("simulated 1F1B", None, end_s - middle_s),
            ):
                keys = {"nodes": num_nodes, "devices per node": num_devices, "layers": num_layers}
                rows.append(
                    PublishedRow({**keys, "planner": planner}, printed_s, seconds, How.NODES, _NOTE)
                )
    return tuple(rows)


def planning_problem(
    num_layers: int, num_nodes: int, devices_per_node: int, *, spread: float
) -> Problem:
    """A job with enough microbatches for all devices."""
    return Problem(
        profile=random_profile(num_layers, devices_per_node, spread=spread),
        devices_per_node=devices_per_node,
        num_microbatches=4 * num_nodes * devices_per_node,
        failures_tolerated=0,
    )


def random_profile(
    num_layers: int, devices_per_node: int, *, spread: float, seed: int = _SEED
) -> ModelProfile:
    """A profile with layers of 10 ms times 1 to 1 + spread; d devices are d^0.9 times as fast."""
    rng = random.Random(seed)
    counts = [count for count in (1, 2, 4, 8) if count <= devices_per_node]
    layers = []
    for index in range(num_layers):
        forward_s = 0.01 * (1 + spread * rng.random())
        by_count = {count: forward_s / count**0.9 for count in counts}
        layers.append(
            LayerProfile(
                name=f"layer {index}",
                forward_s=by_count,
                backward_input_s=by_count,
                backward_weight_s=by_count,
                parameter_bytes=400_000_000,
                optimizer_bytes=800_000_000,
                activation_bytes=100_000_000,
                output_bytes=10_000_000,
            )
        )
    return ModelProfile(
        model=f"{num_layers} layers",
        microbatch_size=1,
        dtype="bfloat16",
        device="none",
        device_memory_bytes=0,
        layers=tuple(layers),
        links={"intra_node": Link(1e-5, 2e11), "inter_node": Link(2e-5, 1e10)},
    )
