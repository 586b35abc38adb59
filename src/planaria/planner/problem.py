"""What a plan has to satisfy, and what each stage that the model could have would cost.

A stage is layers [u, v) on some of the devices of one node. `StageCosts` has its seconds, the bytes
on its links and the microbatches that its devices can keep in flight, as tables over u and v that
every search of this package reads.

Nodes may differ in speed and memory. A group is a number that stands for the devices of a stage,
how many they are and of which kind their node is: kind * (devices of a node + 1) + count. So where
nodes are all of one kind a group is its count.

Source: Oobleck (SOSP '23), section 4.1.2 (a stage lies in one node); Odyssey, equation 14 (memory).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from planaria.core.plan import LayerProfile, ModelProfile, NodeKind
from planaria.errors import ConfigError
from planaria.estimator.memory import stage_bytes
from planaria.schedule.buckets import ReductionOrder

Seconds = NDArray[np.float64]
# The layer behind each stage, and its group: one pair a stage.
Shape = tuple[tuple[int, int], ...]
Counts = tuple[int, ...]  # Nodes of each kind.
Group = TypeVar("Group", int, NDArray[np.int64])

UNLIMITED: Final = 1 << 40  # Microbatches in flight where memory sets no limit.


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a plan has to satisfy.

    Attributes:
        num_microbatches: of the whole job, in one iteration.
        failures_tolerated: f; a plan has f + 1 pipelines or more.
        is_deterministic: gradients are summed in float64.
        splits_backward: whether a plan may have the gradients of weights put off. Not with
            activation checkpointing, which would run the forward anew for each of the two parts.
        processors: that the ranks of all nodes share, as those of emulated nodes do; 0: each device
            is one. Plans are sought for devices that are one each; what is predicted of a plan, and
            which answer is taken, knows of it (estimator/sharing.py).
    """

    profile: ModelProfile
    devices_per_node: int
    num_microbatches: int
    failures_tolerated: int
    is_deterministic: bool = False
    splits_backward: bool = True
    reduction_order: ReductionOrder = ReductionOrder.COLOURED
    processors: int = 0

    def __post_init__(self) -> None:
        if self.devices_per_node < 1:
            raise ConfigError("cluster.devices_per_node", self.devices_per_node, "at least 1")
        if self.failures_tolerated < 0:
            raise ConfigError("resilience.failures_tolerated", self.failures_tolerated, "0 or more")

    @property
    def gradient_copies(self) -> int:
        """Gradients kept, in multiples of the parameters' bytes: float64 sums stand beside those
        in float32."""
        return 3 if self.is_deterministic else 1

    @property
    def reduce_bytes_factor(self) -> float:
        """Bytes that a reduction moves per byte of parameters, see `Reductions`."""
        return 1.5 if self.is_deterministic else 1.0


def batch_error(problem: Problem, nearest: int, *, why: str) -> ConfigError:
    """That the global batch will not do, and the nearest that would, in microbatches."""
    size = problem.profile.microbatch_size
    noun = "microbatch" if nearest == 1 else "microbatches"
    field = "training.global_batch_size"
    remedy = (
        f"{why}; {field} = {nearest * size} is the nearest that would do, "
        f"{nearest} {noun} of {size}"
    )
    return ConfigError(field, problem.num_microbatches * size, remedy)


@dataclass(frozen=True, slots=True, eq=False)
class StageCosts:
    """The costs of every stage; tables over [u, v] are of shape [L + 1, L + 1].

    Attributes:
        kinds: of nodes.
        counts: of devices that a stage may have, ascending.
        groups: every count of every kind, ascending.
        forward_s, backward_s: by group; of one microbatch, infinite where there is no such stage.
        seconds: their sums.
        most_in_flight: by group, the microbatches for which a stage has memory; 0 where for none,
            or where there is no such stage. A stage keeps as many as stages are left, itself
            included, and at most the job's: a template outlives plans, and after failures one
            pipeline may get them all.
        has_memory_limit: there may be stages that do not fit.
        transfer_s, latency_s: by whether the link lies between nodes; that an output, or its
            gradient, occupies the link behind layer v - 1 (shape [L + 1]), and until it arrives.
    """

    problem: Problem
    kinds: tuple[NodeKind, ...]
    counts: tuple[int, ...]
    groups: tuple[int, ...]
    forward_s: Mapping[int, Seconds]
    backward_s: Mapping[int, Seconds]
    seconds: Mapping[int, Seconds]
    most_in_flight: Mapping[int, NDArray[np.int64]]
    has_memory_limit: bool
    transfer_s: tuple[Seconds, Seconds]
    latency_s: tuple[float, float]

    @property
    def num_layers(self) -> int:
        return len(self.problem.profile.layers)

    @property
    def devices_per_node(self) -> int:
        return self.problem.devices_per_node

    def group(self, kind: int, count: int) -> int:
        """So many devices of a node of that kind."""
        return kind * (self.devices_per_node + 1) + count

    def kind_of(self, group: int) -> int:
        """The index of its node's kind."""
        return group // (self.devices_per_node + 1)

    def count_of(self, group: Group) -> Group:
        """Its devices; of each of many groups, too."""
        return group % (self.devices_per_node + 1)

    def round_trip_s(self, *, between_nodes: bool) -> Seconds:
        """Of an output and its gradient over the link behind layer v - 1, shape [L + 1]."""
        times: Seconds = 2 * (self.transfer_s[between_nodes] + self.latency_s[between_nodes])
        return times


def stage_costs(problem: Problem, kinds: Sequence[NodeKind] = (NodeKind(),)) -> StageCosts:
    """The tables of a problem, on nodes of these kinds. O(L^2) for every count of every kind."""
    layers = problem.profile.layers
    counts = tuple(
        sorted({c for layer in layers for c in layer.forward_s if c <= problem.devices_per_node})
    )
    profile_bytes = problem.profile.device_memory_bytes
    limits_bytes = [kind.device_memory_bytes or profile_bytes for kind in kinds]
    forward_s, backward_s, most_in_flight = {}, {}, {}
    for count in counts:
        once_s = _sums([_of(layer.forward_s, count) for layer in layers])
        back_s = _sums([_backward_s(layer, count) for layer in layers])
        for index, kind in enumerate(kinds):
            group = index * (problem.devices_per_node + 1) + count
            forward_s[group], backward_s[group] = once_s / kind.speed, back_s / kind.speed
            most = _most_in_flight(problem, count, limits_bytes[index])
            most_in_flight[group] = np.where(np.isfinite(once_s), most, 0)
    links = [problem.profile.links[kind] for kind in ("intra_node", "inter_node")]
    output_bytes = np.array([0, *(layer.output_bytes for layer in layers)])
    return StageCosts(
        problem=problem,
        kinds=tuple(kinds),
        counts=counts,
        groups=tuple(sorted(forward_s)),
        forward_s=forward_s,
        backward_s=backward_s,
        seconds={group: forward_s[group] + backward_s[group] for group in forward_s},
        most_in_flight=most_in_flight,
        has_memory_limit=any(limits_bytes),
        transfer_s=(
            output_bytes / links[0].bandwidth_bytes_per_s,
            output_bytes / links[1].bandwidth_bytes_per_s,
        ),
        latency_s=(links[0].latency_s, links[1].latency_s),
    )


def _of(seconds: Mapping[int, float], count: int) -> float:
    return seconds.get(count, float("inf"))


def _backward_s(layer: LayerProfile, count: int) -> float:
    return layer.backward_s(count) if count in layer.forward_s else float("inf")


def _sums(values: Sequence[float]) -> Seconds:
    """[u, v] -> sum(values[u:v]), infinite where u >= v."""
    size = len(values) + 1
    table = np.full((size, size), np.inf)
    for first in range(size - 1):
        # Not differences of one running sum: equal stages must get equal seconds.
        table[first, first + 1 :] = np.cumsum(values[first:])
    return table


def _most_in_flight(problem: Problem, count: int, limit_bytes: int) -> NDArray[np.int64]:
    num_layers = len(problem.profile.layers)
    if limit_bytes == 0:
        return np.full((num_layers + 1, num_layers + 1), UNLIMITED)

    def held_bytes(num_in_flight: int) -> NDArray[np.int64]:
        return stage_bytes(
            problem.profile,
            num_devices=count,
            num_in_flight=num_in_flight,
            gradient_copies=problem.gradient_copies,
        )

    fixed_bytes = held_bytes(0)
    each_bytes = held_bytes(1) - fixed_bytes
    free_bytes = limit_bytes - fixed_bytes
    most = np.where(each_bytes > 0, free_bytes // np.maximum(each_bytes, 1), UNLIMITED)
    return np.where(free_bytes >= 0, most, 0)
