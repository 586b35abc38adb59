"""What a plan has to satisfy, and the costs of every possible stage of the model.

A stage is layers [u, v) on some devices of one node. `StageCosts` holds the seconds of each stage,
the seconds of the transfer to the next stage, and the number of microbatches that its devices can
keep in flight. These are tables over u and v; every search of this package reads them.

Nodes may differ in speed and memory. A group is a number that encodes how many devices a stage has
and of which kind their node is: kind * (devices per node + 1) + count. Where all nodes are of one
kind, a group equals its count.

Source: Oobleck (SOSP '23), section 4.1.2 (a stage lies in one node); Odyssey, equation 14 (memory).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from planaria.core.plan import LayerProfile, ModelProfile, NodeKind
from planaria.errors import FeasibleValue, InfeasibleError, Limit
from planaria.estimator.peak_memory import stage_bytes
from planaria.planner.recomputation import least_kept_profile
from planaria.schedule.buckets import ReductionOrder

Seconds = NDArray[np.float64]
# One pair per stage: its end layer (exclusive) and its group.
Shape = tuple[tuple[int, int], ...]
Counts = tuple[int, ...]  # Number of nodes of each kind.
Group = TypeVar("Group", int, NDArray[np.int64])

UNLIMITED: Final = 1 << 40  # Microbatches in flight where memory sets no limit.


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a plan has to satisfy.

    Attributes:
        num_microbatches: microbatches of the whole job in one iteration.
        failures_tolerated: f; a plan has f + 1 pipelines or more.
        is_deterministic: whether gradients are summed in float64.
        splits_backward: whether a plan may put off the gradients of weights. False with activation
            checkpointing, which would repeat the forward for each of the two parts of a backward,
            and with compiled layers, of which each part would run the whole backward.
        chooses_recomputation: whether a plan chooses for each layer how much its backward computes
            again, where a stage does not fit otherwise.
        processors: number of processors that the ranks of all nodes share, as those of emulated
            nodes do; 0: every device is a processor of its own. The search for plans assumes 0;
            predictions for a plan, and the choice between answers to a failure, take the shared
            processors into account (estimator/sharing.py).
    """

    profile: ModelProfile
    devices_per_node: int
    num_microbatches: int
    failures_tolerated: int
    is_deterministic: bool = False
    splits_backward: bool = True
    chooses_recomputation: bool = False
    reduction_order: ReductionOrder = ReductionOrder.COLOURED
    processors: int = 0

    def __post_init__(self) -> None:
        if self.devices_per_node < 1:
            raise InfeasibleError(Limit.DEVICES_PER_NODE, self.devices_per_node, "at least 1")
        if self.failures_tolerated < 0:
            raise InfeasibleError(Limit.FAILURES, self.failures_tolerated, "0 or more")

    @property
    def gradient_copies(self) -> int:
        """Bytes of gradients kept per byte of parameters; 3 where float64 sums are kept besides the
        float32 gradients."""
        return 3 if self.is_deterministic else 1

    @property
    def reduce_bytes_factor(self) -> float:
        """Bytes that a reduction moves per byte of parameters; see `Reductions`."""
        return 1.5 if self.is_deterministic else 1.0


def batch_error(problem: Problem, nearest: int, *, why: str) -> InfeasibleError:
    """The error that refuses the number of microbatches.

    Args:
        nearest: nearest number of microbatches that would work.
        why: reason why the present number does not work.
    """
    remedy = FeasibleValue(Limit.MICROBATCHES, nearest)
    return InfeasibleError(Limit.MICROBATCHES, problem.num_microbatches, why, remedy)


@dataclass(frozen=True, slots=True, eq=False)
class StageCosts:
    """The costs of every stage. Tables [u, v] have shape [L + 1, L + 1], for layers [u, v).

    Attributes:
        kinds: node kinds.
        counts: numbers of devices that a stage may have, ascending.
        groups: the groups of every count of every kind, ascending.
        forward_s, backward_s: seconds of one microbatch, a table [u, v] for each group; infinite
            where there is no such stage.
        seconds: sum of forward_s and backward_s.
        most_in_flight: number of microbatches for which a stage has memory, if need be with
            activations that are computed again, a table [u, v] for each
            group; 0 where even one does not fit, or where there is no such stage. A stage keeps as
            many microbatches as there are stages from it to the last, itself included, and at most
            all of the job's. All, because a template outlives plans: after failures one pipeline
            may get them all.
        has_memory_limit: whether there may be stages that do not fit.
        transfer_s: seconds for which an output, or its gradient, occupies the link behind layer
            v - 1, shape [L + 1]; first for a link within a node, then for one between nodes.
        latency_s: seconds that a message needs beyond its transfer; ordered like transfer_s.
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
        """The group of `count` devices of a node of this kind."""
        return kind * (self.devices_per_node + 1) + count

    def kind_of(self, group: int) -> int:
        """Index of the kind of a group's node."""
        return group // (self.devices_per_node + 1)

    def count_of(self, group: Group) -> Group:
        """Number of devices of a group, or of each group in an array."""
        return group % (self.devices_per_node + 1)

    def round_trip_s(self, *, between_nodes: bool) -> Seconds:
        """Seconds to send an output over the link behind layer v - 1 and its gradient back, shape
        [L + 1]."""
        times: Seconds = 2 * (self.transfer_s[between_nodes] + self.latency_s[between_nodes])
        return times


def stage_costs(problem: Problem, kinds: Sequence[NodeKind] = (NodeKind(),)) -> StageCosts:
    """The tables of a problem on nodes of these kinds. O(L^2) for each group."""
    layers = problem.profile.layers
    counts = tuple(
        sorted({c for layer in layers for c in layer.forward_s if c <= problem.devices_per_node})
    )
    profile_bytes = problem.profile.device_memory_bytes
    limits_bytes = [kind.device_memory_bytes or profile_bytes for kind in kinds]
    forward_s, backward_s, most_in_flight = {}, {}, {}
    for count in counts:
        one_forward_s = _range_sums(
            [_seconds_or_infinite(layer.forward_s, count) for layer in layers]
        )
        one_backward_s = _range_sums([_backward_s(layer, count) for layer in layers])
        for index, kind in enumerate(kinds):
            group = index * (problem.devices_per_node + 1) + count
            forward_s[group] = one_forward_s / kind.speed
            backward_s[group] = one_backward_s / kind.speed
            max_in_flight = _most_in_flight(problem, count, limits_bytes[index])
            most_in_flight[group] = np.where(np.isfinite(one_forward_s), max_in_flight, 0)
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


def _seconds_or_infinite(seconds: Mapping[int, float], count: int) -> float:
    return seconds.get(count, float("inf"))


def _backward_s(layer: LayerProfile, count: int) -> float:
    return layer.backward_s(count) if count in layer.forward_s else float("inf")


def _range_sums(values: Sequence[float]) -> Seconds:
    """Table [u, v] of sum(values[u:v]); infinite where u >= v."""
    size = len(values) + 1
    table = np.full((size, size), np.inf)
    for first in range(size - 1):
        # Differences of one running sum would give equal stages unequal seconds, by rounding.
        table[first, first + 1 :] = np.cumsum(values[first:])
    return table


def _most_in_flight(problem: Problem, count: int, limit_bytes: int) -> NDArray[np.int64]:
    num_layers = len(problem.profile.layers)
    if limit_bytes == 0:
        return np.full((num_layers + 1, num_layers + 1), UNLIMITED)
    max_in_flight = _most_that_fit(problem, problem.profile, count, limit_bytes)
    if problem.chooses_recomputation:
        least = least_kept_profile(problem.profile)
        max_in_flight = np.maximum(
            max_in_flight, _most_that_fit(problem, least, count, limit_bytes)
        )
    return max_in_flight


def _most_that_fit(
    problem: Problem, profile: ModelProfile, count: int, limit_bytes: int
) -> NDArray[np.int64]:
    def held_bytes(num_in_flight: int) -> NDArray[np.int64]:
        return stage_bytes(
            profile,
            num_devices=count,
            num_in_flight=num_in_flight,
            gradient_copies=problem.gradient_copies,
        )

    fixed_bytes = held_bytes(0)
    each_bytes = held_bytes(1) - fixed_bytes
    free_bytes = limit_bytes - fixed_bytes
    max_in_flight = np.where(each_bytes > 0, free_bytes // np.maximum(each_bytes, 1), UNLIMITED)
    return np.where(free_bytes >= 0, max_in_flight, 0)
