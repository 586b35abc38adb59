"""Pipeline templates: for how many nodes, and how each cuts the model into stages.

Node specification (4.1.1): templates of n0, n0 + 1, .. N - f * n0 nodes, where n0 is the smallest
number of nodes that can hold the model. f pipelines of n0 nodes and one of all the others use any
number of nodes from (f + 1) * n0 to N, so no node ever idles.

Stage partition (4.1.2), in three steps:
1. Bottlenecks: the time of the slowest stage, at its smallest, for every number of stages and of
   devices, by a dynamic program from the last stage to the first. Seen from the end, stage i of S
   has S - i stages left, which fixes how many microbatches it keeps in flight and so its memory;
   hence one table serves every number of stages and every number of nodes.
2. Partitions: for each number of stages those that reach its bottleneck.
3. Ranking: of all these the one with the lowest exact 1F1B makespan.

Source: Oobleck (SOSP '23), section 4.1; Odyssey, equation 14 (memory).
Differs: the paper minimises T1 + T2 + T3 at N_b = 4S by divide and conquer, which has no optimal
substructure, and leaves out transfers. Here the bottleneck is exact and the makespan simulated at
the microbatches that the pipeline would get. Memory allows for all microbatches of the job, as a
template outlives plans: after failures one pipeline may get them all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planaria.core.plan import ModelProfile, PipelineTemplate, Stage
from planaria.errors import ConfigError
from planaria.estimator.makespan import makespans_of_each, stage_seconds
from planaria.estimator.memory import stage_bytes

# Seconds or bytes; [u, v] for a stage of layers [u, v), infinite where there cannot be one.
Costs = NDArray[np.float64]

_Devices = TypeVar("_Devices", int, NDArray[np.int64])

# With 50 layers, equal or random, on up to 23 nodes, a beam four times as wide finds templates that
# are at most 0.2% faster on average, in twice the time.
BEAM_WIDTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a plan has to satisfy.

    Attributes:
        num_microbatches: of the whole job, in one iteration.
        failures_tolerated: f; a plan has f + 1 pipelines or more.
        gradient_copies: gradients kept, in multiples of the parameters' bytes: 1 in fast mode,
            3 in deterministic mode (float64 sums beside the float32 gradients).
    """

    profile: ModelProfile
    devices_per_node: int
    num_microbatches: int
    failures_tolerated: int
    gradient_copies: int = 1

    def __post_init__(self) -> None:
        if self.devices_per_node < 1:
            raise ConfigError("cluster.devices_per_node", self.devices_per_node, "at least 1")
        if self.failures_tolerated < 0:
            raise ConfigError("resilience.failures_tolerated", self.failures_tolerated, "0 or more")
        if self.num_microbatches < 1:
            samples = self.num_microbatches * self.profile.microbatch_size
            remedy = f"at least one microbatch, {self.profile.microbatch_size} samples"
            raise ConfigError("training.global_batch_size", samples, remedy)


def smallest_num_nodes(problem: Problem) -> int:
    """n0: the fewest nodes of which a pipeline can hold the model.

    Raises:
        ConfigError: no number of nodes can.
    """
    num_layers = len(problem.profile.layers)
    max_nodes = 1
    while True:
        bottlenecks = _bottlenecks(problem, max_nodes, cost=_stage_seconds_that_fit(problem))
        for num_nodes in range(1, max_nodes + 1):
            if _feasible_nums_stages(problem, bottlenecks, num_nodes):
                return num_nodes
        if max_nodes >= num_layers:
            raise _no_partition_error(problem)
        max_nodes = min(2 * max_nodes, num_layers)


def template_sizes(problem: Problem, num_nodes: int) -> tuple[int, ...]:
    """n0 .. N - f * n0: the sizes of templates that keep all of at most N nodes at work.

    Args:
        num_nodes: N, of the cluster.

    Raises:
        ConfigError: N nodes are too few for f + 1 pipelines; it says which f, N or memory would do.
    """
    n0 = smallest_num_nodes(problem)
    if num_nodes < (problem.failures_tolerated + 1) * n0:
        raise _too_few_nodes_error(problem, num_nodes, n0)
    return tuple(range(n0, num_nodes - problem.failures_tolerated * n0 + 1))


def pipeline_template(
    problem: Problem, num_nodes: int, *, num_pipelines: int = 1
) -> PipelineTemplate | None:
    """The fastest stage partition of one pipeline, None where none fits or uses all devices.

    Args:
        num_nodes: of the pipeline.
        num_pipelines: such pipelines that share the job's microbatches.
    """
    search = _Search(problem, max_nodes=num_nodes)
    return search.fastest(num_nodes, num_pipelines=num_pipelines)


def pipeline_templates(problem: Problem, num_nodes: int) -> dict[int, PipelineTemplate]:
    """By number of nodes, the templates for a cluster; sizes that cannot be are left out.

    Each is the fastest at the microbatches that it gets where the whole cluster is made of it.

    Args:
        num_nodes: N, of the cluster.

    Raises:
        ConfigError: as `template_sizes`.
    """
    sizes = template_sizes(problem, num_nodes)
    search = _Search(problem, max_nodes=sizes[-1])
    templates = {size: search.fastest(size, num_pipelines=num_nodes // size) for size in sizes}
    return {size: template for size, template in templates.items() if template is not None}


@dataclass(frozen=True, slots=True)
class _Prefix:
    """The first stages of a partition.

    Attributes:
        bound_s: no partition that begins so has a lower makespan.
        before_s: of a microbatch on its way to the next stage, and of its gradient back from there.
    """

    bound_s: float
    stages: tuple[Stage, ...]
    before_s: float
    next_layer: int
    devices_left: int


class _Search:
    """The partitions of one problem into pipelines of up to max_nodes nodes."""

    def __init__(self, problem: Problem, *, max_nodes: int) -> None:
        self._problem = problem
        self._cost = _stage_seconds_that_fit(problem)
        self._bottlenecks = _bottlenecks(problem, max_nodes, cost=self._cost)
        self._device_counts = _device_counts(problem)
        layers, links = problem.profile.layers, problem.profile.links
        self._round_trip_s = {
            kind: [2 * links[kind].seconds(layer.output_bytes) for layer in layers]
            for kind in ("intra_node", "inter_node")
        }

    def fastest(self, num_nodes: int, *, num_pipelines: int) -> PipelineTemplate | None:
        """Of the partitions with the best bottleneck for their number of stages the fastest."""
        num_devices = num_nodes * self._problem.devices_per_node
        num_microbatches = -(-self._problem.num_microbatches // num_pipelines)
        nums_stages = _feasible_nums_stages(self._problem, self._bottlenecks, num_nodes)
        # The most promising number of stages first, so that its makespan rules out others.
        nums_stages.sort(key=lambda s: (self._bottlenecks[s][0, num_devices], s))
        best: tuple[float, PipelineTemplate] | None = None
        for num_stages in nums_stages:
            prefixes = self._balanced(
                num_devices,
                num_stages,
                num_microbatches=num_microbatches,
                limit_s=np.inf if best is None else best[0],
            )
            if not prefixes:
                continue
            templates = [PipelineTemplate(prefix.stages, num_nodes) for prefix in prefixes]
            seconds = [stage_seconds(self._problem.profile, template) for template in templates]
            makespans_s = map(float, makespans_of_each(seconds, num_microbatches))
            fastest = min(zip(makespans_s, templates, strict=True))
            best = fastest if best is None else min(best, fastest)
        return None if best is None else best[1]

    def _balanced(
        self, num_devices: int, num_stages: int, *, num_microbatches: int, limit_s: float
    ) -> list[_Prefix]:
        """Partitions that reach the bottleneck and may take less than limit_s.

        All of them, or BEAM_WIDTH of the most promising where there are more.
        """
        bottleneck_s = float(self._bottlenecks[num_stages][0, num_devices])
        prefixes = [_Prefix(num_microbatches * bottleneck_s, (), 0.0, 0, num_devices)]
        for stages_left in range(num_stages, 0, -1):
            longer = [
                after
                for prefix in prefixes
                for after in self._extended(
                    prefix,
                    stages_left=stages_left,
                    bottleneck_s=bottleneck_s,
                    num_microbatches=num_microbatches,
                )
                if after.bound_s < limit_s
            ]
            longer.sort(key=lambda prefix: (prefix.bound_s, prefix.stages))
            prefixes = longer[:BEAM_WIDTH]
        return prefixes

    def _extended(
        self, prefix: _Prefix, *, stages_left: int, bottleneck_s: float, num_microbatches: int
    ) -> Iterator[_Prefix]:
        """The prefix with each next stage after which the bottleneck can still be reached."""
        per_node = self._problem.devices_per_node
        for num_devices in self._device_counts:
            if num_devices > _left_in_node(prefix.devices_left, per_node):
                break
            devices_left = prefix.devices_left - num_devices
            stage_s = self._cost(num_devices, stages_left)[prefix.next_layer]
            tail_s = self._bottlenecks[stages_left - 1][:, devices_left]
            link = "intra_node" if devices_left % per_node else "inter_node"
            for end_layer in np.flatnonzero(np.maximum(stage_s, tail_s) <= bottleneck_s).tolist():
                seconds = float(stage_s[end_layer])
                round_trip_s = self._round_trip_s[link][end_layer - 1] if devices_left else 0.0
                before_s = prefix.before_s + seconds + round_trip_s
                here_s = prefix.before_s + num_microbatches * seconds
                after_s = before_s + num_microbatches * float(tail_s[end_layer])
                yield _Prefix(
                    bound_s=max(prefix.bound_s, here_s, after_s),
                    stages=(*prefix.stages, Stage(prefix.next_layer, end_layer, num_devices)),
                    before_s=before_s,
                    next_layer=end_layer,
                    devices_left=devices_left,
                )


def _bottlenecks(
    problem: Problem, max_nodes: int, *, cost: Callable[[int, int], Costs]
) -> list[Costs]:
    """The cost of the dearest stage, at its smallest, for every tail of a pipeline.

    O(layers^2 * devices * stages * devices_per_node) in numpy.

    Args:
        cost: of each stage, by its devices and by the stages from it to the end, itself included.

    Returns:
        by number of stages r an array of shape [L + 1, devices + 1]; entry [u, d] is that of layers
        [u, L) in r stages on the last d devices of the pipeline, infinite where there is none.
    """
    num_layers = len(problem.profile.layers)
    num_devices = max_nodes * problem.devices_per_node
    nothing = np.full((num_layers + 1, num_devices + 1), np.inf)
    nothing[num_layers, 0] = 0.0
    bottlenecks = [nothing]
    for stages_left in range(1, min(num_layers, num_devices) + 1):
        best = np.full_like(nothing, np.inf)
        most_devices = min(num_devices, stages_left * problem.devices_per_node)
        devices_left = np.arange(stages_left, most_devices + 1)
        left_in_node = _left_in_node(devices_left, problem.devices_per_node)
        for count in _device_counts(problem):
            columns = devices_left[left_in_node >= count]
            rest = bottlenecks[-1][:, columns - count]
            stage = cost(count, stages_left)
            dearest = np.maximum(stage[:, :, None], rest[None, :, :]).min(axis=1)
            best[:, columns] = np.minimum(best[:, columns], dearest)
        bottlenecks.append(best)
    return bottlenecks


def _stage_seconds_that_fit(problem: Problem) -> Callable[[int, int], Costs]:
    """Seconds of every stage, infinite where it has no layers or does not fit in memory."""
    seconds = {count: _stage_seconds(problem, count) for count in _device_counts(problem)}
    limit_bytes = problem.profile.device_memory_bytes
    if limit_bytes == 0:
        return lambda num_devices, _: seconds[num_devices]
    tables: dict[tuple[int, int], Costs] = {}

    def cost(num_devices: int, stages_left: int) -> Costs:
        key = (num_devices, min(stages_left, problem.num_microbatches))
        if key not in tables:
            held_bytes = _stage_bytes(problem, num_devices, stages_left)
            tables[key] = np.where(held_bytes <= limit_bytes, seconds[num_devices], np.inf)
        return tables[key]

    return cost


def _stage_bytes(problem: Problem, num_devices: int, stages_left: int) -> Costs:
    """Bytes of every stage on each of its devices, infinite where it has no layers."""
    held_bytes = stage_bytes(
        problem.profile,
        num_devices=num_devices,
        num_in_flight=min(stages_left, problem.num_microbatches),
        gradient_copies=problem.gradient_copies,
    )
    return np.where(np.isfinite(_stage_seconds(problem, num_devices)), held_bytes, np.inf)


def _stage_seconds(problem: Problem, num_devices: int) -> Costs:
    """Forward and backward of one microbatch, infinite where a layer has no such device count."""
    layer_s = [
        layer.forward_s[num_devices] + layer.backward_s(num_devices)
        if num_devices in layer.forward_s
        else np.inf
        for layer in problem.profile.layers
    ]
    table = np.full((len(layer_s) + 1, len(layer_s) + 1), np.inf)
    for first_layer in range(len(layer_s)):
        # Not differences of one running sum: equal stages must get equal seconds.
        table[first_layer, first_layer + 1 :] = np.cumsum(layer_s[first_layer:])
    return table


def _feasible_nums_stages(problem: Problem, bottlenecks: list[Costs], num_nodes: int) -> list[int]:
    num_devices = num_nodes * problem.devices_per_node
    most_stages = min(num_devices, len(bottlenecks) - 1)
    return [
        num_stages
        for num_stages in range(num_nodes, most_stages + 1)
        if np.isfinite(bottlenecks[num_stages][0, num_devices])
    ]


def _device_counts(problem: Problem) -> list[int]:
    counts = {count for layer in problem.profile.layers for count in layer.forward_s}
    return sorted(count for count in counts if count <= problem.devices_per_node)


def _left_in_node(devices_left: _Devices, devices_per_node: int) -> _Devices:
    """Devices of the next stage's node that are still free: nodes end where the pipeline does."""
    return (devices_left - 1) % devices_per_node + 1


def _no_partition_error(problem: Problem) -> ConfigError:
    num_layers = len(problem.profile.layers)
    needed = _smallest_memory_bytes(problem, num_layers)
    if needed is None:
        remedy = f"the {num_layers} layers cannot use that many devices of a node; use fewer"
        return ConfigError("cluster.devices_per_node", problem.devices_per_node, remedy)
    limit_bytes = problem.profile.device_memory_bytes
    remedy = f"no number of nodes can hold the model; {needed} bytes or more would do"
    return ConfigError("cluster.device_memory_bytes", limit_bytes, remedy)


def _too_few_nodes_error(problem: Problem, num_nodes: int, n0: int) -> ConfigError:
    num_pipelines = problem.failures_tolerated + 1
    ways = [f"cluster.nodes = {num_pipelines * n0} or more"]
    if num_nodes >= n0:
        ways.append(f"resilience.failures_tolerated = {num_nodes // n0 - 1}")
    needed = _smallest_memory_bytes(problem, num_nodes // num_pipelines)
    if needed is not None:
        ways.append(f"cluster.device_memory_bytes = {needed} or more")
    remedy = (
        f"{num_pipelines} pipelines of {n0} nodes or more are needed to tolerate "
        f"{problem.failures_tolerated} failures; would do: {', '.join(ways)}"
    )
    return ConfigError("cluster.nodes", num_nodes, remedy)


def _smallest_memory_bytes(problem: Problem, max_nodes: int) -> int | None:
    """The device memory with which a pipeline of at most max_nodes nodes holds the model."""

    def cost(num_devices: int, stages_left: int) -> Costs:
        return _stage_bytes(problem, num_devices, stages_left)

    bottlenecks = _bottlenecks(problem, max_nodes, cost=cost)
    per_node = problem.devices_per_node
    needed = [
        int(bottlenecks[num_stages][0, num_nodes * per_node])
        for num_nodes in range(1, max_nodes + 1)
        for num_stages in _feasible_nums_stages(problem, bottlenecks, num_nodes)
    ]
    return min(needed, default=None)
