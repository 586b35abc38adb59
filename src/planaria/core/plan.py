"""The vocabulary of planning: profiles, stages, templates, pipelines, routes and plans.

A `PipelineTemplate` cuts the model into stages for a number of nodes (Oobleck, section 3.1). A
`Pipeline` is a template bound to nodes. A `Route` is the path of one microbatch: a sequence of hops
that together cover each layer of the model exactly once. In a plan without detours, each microbatch
takes the route along the stages of its own pipeline.

Ranks: the rank of device d of node n is n * devices_per_node + d. It is the same in every epoch, so
a rank names one device for the whole life of a job.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Final, Literal, NamedTuple

import msgspec

# How much of a layer its backward computes again: nothing; what is large and cheap to compute; all.
Recomputation = Literal["none", "selective", "full"]

NUM_CHUNKS: Final = 64  # A layer's state is cut into so many, so that several holders can send it.


@dataclass(frozen=True, slots=True)
class Link:
    """The cost of one kind of link: sending takes latency_s + bytes / bandwidth_bytes_per_s."""

    latency_s: float
    bandwidth_bytes_per_s: float

    def seconds(self, num_bytes: int) -> float:
        """The time from sending num_bytes over an idle link until all of them have arrived."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


def link_between_pipelines(links: Mapping[str, Link]) -> Link:
    """The link between nodes of different pipelines, by kind of link as in `ModelProfile`.

    Most pipelines lie within one failure domain, so it is that between domains where there is one.
    """
    return links.get("inter_domain", links["inter_node"])


@dataclass(frozen=True, slots=True)
class RecomputationCost:
    """What one layer costs for one microbatch if its backward computes activations again.

    Attributes:
        activation_bytes: size of what the layer still keeps from the forward to the backward.
        additional_s: seconds that the backward takes in addition, by number of devices; they
            include what the forward takes in addition.
    """

    activation_bytes: int
    additional_s: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """What one layer costs for one microbatch.

    Attributes:
        forward_s: seconds of the forward, by number of devices; the keys are the device counts that
            the layer supports.
        backward_input_s: seconds of the backward for the gradient of the input alone, same keys.
        backward_weight_s: additional seconds for the gradients of the weights, same keys.
        parameter_bytes: size of the layer's parameters that are trained; only these are reduced,
            moved, copied and saved.
        optimizer_bytes: size of the optimizer state of these parameters.
        activation_bytes: size of what the layer keeps from the forward to the backward.
        output_bytes: size of what the layer sends to the next layer.
        update_s: seconds that the layer takes once per iteration, such as its optimizer step; same
            keys, or empty if nobody has measured it.
        recomputed: costs if activations are computed again, by "selective" or "full"; modes that
            nobody has measured, or that the layer cannot have, are left out.
        backward_bytes: size of what the backward computes again before it needs it.
        frozen_bytes: size of the parameters that are not trained.
        working_bytes: size of the copies of trained parameters with which the layer computes, where
            the optimizer steps others (bfloat16).
    """

    name: str
    forward_s: Mapping[int, float]
    backward_input_s: Mapping[int, float]
    backward_weight_s: Mapping[int, float]
    parameter_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    output_bytes: int
    update_s: Mapping[int, float] = field(default_factory=dict)
    recomputed: Mapping[str, RecomputationCost] = field(default_factory=dict)
    backward_bytes: int = 0
    frozen_bytes: int = 0
    working_bytes: int = 0

    def recomputing(self, mode: Recomputation) -> "LayerProfile":
        """The profile of the layer if its backward computes that much again; the same profile if
        the mode is "none" or has no costs."""
        cost = self.recomputed.get(mode)
        if cost is None:
            return self
        input_s = {n: s + cost.additional_s[n] for n, s in self.backward_input_s.items()}
        return replace(
            self,
            backward_input_s=input_s,
            activation_bytes=cost.activation_bytes,
            backward_bytes=max(0, self.activation_bytes - cost.activation_bytes),
            recomputed={},
        )

    def backward_s(self, num_devices: int) -> float:
        """Seconds of the whole backward: gradients of the input and of the weights."""
        return self.backward_input_s[num_devices] + self.backward_weight_s[num_devices]


@dataclass(frozen=True, slots=True)
class TiedParameters:
    """One parameter that several layers use (tied embeddings).

    Attributes:
        layers: the layers that use it, in order of first use.
    """

    layers: tuple[int, ...]
    parameter_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """The costs of a model's layers and of the cluster's links, measured or modelled.

    Attributes:
        links: costs by kind of link: "intra_node", "inter_node", and where measured
            "inter_domain", between nodes of different failure domains, and "device_to_host".
        device_memory_bytes: memory that one device may use; 0: unlimited.
    """

    model: str
    microbatch_size: int
    dtype: str
    device: str
    device_memory_bytes: int
    layers: tuple[LayerProfile, ...]
    links: Mapping[str, Link]
    tied: tuple[TiedParameters, ...] = ()
    version: int = 1

    @property
    def layer_s(self) -> tuple[float, ...]:
        """The seconds of forward and backward of each layer for a microbatch, on one device."""
        return tuple(layer.forward_s[1] + layer.backward_s(1) for layer in self.layers)


@dataclass(frozen=True, slots=True, order=True)
class NodeKind:
    """How a node differs from the nodes that the profile was measured on.

    Attributes:
        speed: relative speed of the node's devices; they take 1 / speed times the profile's
            seconds.
        device_memory_bytes: memory that each of its devices may use; 0: as the profile says.
    """

    speed: float = 1.0
    device_memory_bytes: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Stage:
    """Layers [first_layer, end_layer) on num_devices devices of one node.

    Attributes:
        recomputation: recomputation of each layer, where the planner has chosen it; empty: as the
            job says for all layers.
    """

    first_layer: int
    end_layer: int
    num_devices: int
    recomputation: tuple[Recomputation, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.recomputation) in (0, self.end_layer - self.first_layer)


@dataclass(frozen=True, slots=True, order=True)
class PipelineTemplate:
    """How a pipeline of num_nodes nodes cuts the model (Oobleck, section 3.1).

    Attributes:
        kinds: kind of each node of the pipeline, in order; empty: all nodes are as the profile
            says.
    """

    stages: tuple[Stage, ...]
    num_nodes: int
    kinds: tuple[NodeKind, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.kinds) in (0, self.num_nodes)

    @property
    def devices_per_node(self) -> int:
        return sum([stage.num_devices for stage in self.stages]) // self.num_nodes

    @property
    def node_kinds(self) -> tuple[NodeKind, ...]:
        """The kind of each node, in order; never empty."""
        return self.kinds or (NodeKind(),) * self.num_nodes

    def stage_kinds(self) -> tuple[NodeKind, ...]:
        """The kind of the node that each stage is on, by stage."""
        devices = accumulate((stage.num_devices for stage in self.stages[:-1]), initial=0)
        return tuple(self.node_kinds[device // self.devices_per_node] for device in devices)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A template bound to nodes; the stages take the devices of the nodes in order."""

    template: PipelineTemplate
    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.nodes) == self.template.num_nodes
        assert len(set(self.nodes)) == len(self.nodes)

    def stage_ranks(self, stage_index: int) -> tuple[int, ...]:
        """The ranks of one stage; the first one is the rank that hops through this stage name."""
        return self.ranks_by_stage()[stage_index]

    def ranks_by_stage(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage, by stage; see `stage_ranks`."""
        per_node = self.template.devices_per_node
        if per_node == 1 and len(self.template.stages) == len(self.nodes):  # So it is faster.
            return tuple([(node,) for node in self.nodes])
        ranks = [node * per_node + device for node in self.nodes for device in range(per_node)]
        ends = accumulate(stage.num_devices for stage in self.template.stages)
        return tuple(
            tuple(ranks[end - stage.num_devices : end])
            for stage, end in zip(self.template.stages, ends, strict=True)
        )

    def route(self) -> "Route":
        """The route of a microbatch along this pipeline's own stages."""
        return tuple(
            Hop(ranks[0], stage.first_layer, stage.end_layer)
            for stage, ranks in zip(self.template.stages, self.ranks_by_stage(), strict=True)
        )


class Hop(msgspec.Struct, frozen=True, order=True):
    """One part of a route: `rank` computes layers [first_layer, end_layer) of the microbatch."""

    rank: int
    first_layer: int
    end_layer: int


Route = tuple[Hop, ...]


class Ticks(NamedTuple):
    """What a stage takes in the virtual time of a schedule (schedule/routed.py), in any unit.

    Attributes:
        forward: ticks of the forward of all layers of the stage.
        backward_input, backward_weight: ticks of the two parts of the backward of all these layers.
        arrival: ticks until the stage's input has arrived from the rank before; the gradient that
            goes back takes as long.
    """

    forward: int
    backward_input: int
    backward_weight: int
    arrival: int


@dataclass(frozen=True)
class Plan:
    """Who computes what: pipelines, and the route of every microbatch of an iteration.

    Attributes:
        epoch: number that rises with each membership record; what belongs to an older epoch is
            refused.
        routes: one route per microbatch of the job, indexed by microbatch.
        silent: layers that a rank holds silently, by rank: it takes part in their reductions and
            steps them as their holders do, but does not compute them, because a later plan will
            give them to it (docs/protocol.md, "Joins").
        gone: nodes of the pipelines that are lost, ascending. Their positions in the pipelines stay
            empty, and routes go around them.
        in_flight: upper bound on the microbatches that a rank keeps in flight, by rank; a rank
            without an entry has the bound of the schedule (schedule/routed.py).
        splits_backward: whether backwards are split, so that gradients of weights can be computed
            later, in pipeline bubbles.
        ticks: virtual time of the stage of each rank, by rank; empty: all stages of a pipeline
            count as equal.
        shadows: layers that a rank holds in addition to its own, by rank. It reduces and steps them
            as their holders do, and computes their forwards ahead of time, so that it can compute
            them when the node that computes them is lost.
    """

    epoch: int
    pipelines: tuple[Pipeline, ...]
    routes: tuple[Route, ...]
    silent: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    gone: tuple[int, ...] = ()
    in_flight: Mapping[int, int] = field(default_factory=dict)
    splits_backward: bool = False
    ticks: Mapping[int, Ticks] = field(default_factory=dict)
    shadows: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """The nodes of all pipelines without those that are gone, ascending."""
        return tuple(
            sorted(
                node
                for pipeline in self.pipelines
                for node in pipeline.nodes
                if node not in self.gone
            )
        )

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that compute, ascending."""
        return tuple(sorted(self.layers_by_rank))

    @cached_property
    def all_ranks(self) -> tuple[int, ...]:
        """The ranks that take part in a commit, ascending: they compute or hold layers silently."""
        return tuple(sorted({*self.layers_by_rank, *self.silent}))

    @cached_property
    def different_routes(self) -> tuple[Route, ...]:
        """Each route once, in the order of their first microbatches."""
        # Hashing a route takes long, and most of them are the same few objects.
        by_id = {id(route): route for route in self.routes}
        return tuple(dict.fromkeys(by_id.values()))

    @property
    def num_layers(self) -> int:
        return self.pipelines[0].template.stages[-1].end_layer

    @cached_property
    def devices_per_node(self) -> int:
        return self.pipelines[0].template.devices_per_node

    @cached_property
    def layers_by_rank(self) -> Mapping[int, range]:
        """The layers that each rank computes, by rank; the rank holds their parameters."""
        empty = {
            node * pipeline.template.devices_per_node + device
            for pipeline in self.pipelines[:1]  # All pipelines have the same number.
            for node in self.gone
            for device in range(pipeline.template.devices_per_node)
        }
        return {
            rank: range(stage.first_layer, stage.end_layer)
            for pipeline in self.pipelines
            for stage, ranks in zip(
                pipeline.template.stages, pipeline.ranks_by_stage(), strict=True
            )
            for rank in ranks
            if rank not in empty
        }

    @cached_property
    def recomputation_by_rank(self) -> Mapping[int, Mapping[int, Recomputation]]:
        """How much of each layer a rank computes again, by rank and layer, for the ranks whose
        stage says it."""
        return {
            rank: dict(enumerate(stage.recomputation, start=stage.first_layer))
            for pipeline in self.pipelines
            for stage, ranks in zip(
                pipeline.template.stages, pipeline.ranks_by_stage(), strict=True
            )
            for rank in ranks
            if stage.recomputation
        }

    @property
    def kinds_by_node(self) -> Mapping[int, NodeKind]:
        """The kind that the plan assumes of each node of its pipelines, by node."""
        return {
            node: kind
            for pipeline in self.pipelines
            for node, kind in zip(pipeline.nodes, pipeline.template.node_kinds, strict=True)
        }

    @cached_property
    def slow_nodes(self) -> Mapping[int, float]:
        """The speed of each node whose speed is not 1, by node."""
        return {
            node: kind.speed
            for pipeline in self.pipelines
            for node, kind in zip(pipeline.nodes, pipeline.template.kinds, strict=False)
            if kind.speed != 1.0 and node not in self.gone
        }

    @cached_property
    def held_by_rank(self) -> Mapping[int, frozenset[int]]:
        """All layers that each rank holds, by rank: to compute them, as shadows, or silently."""
        held: dict[int, frozenset[int]] = {}
        sets: dict[range, frozenset[int]] = {}  # Most ranks hold the same few sets of layers.
        for rank in self.all_ranks:
            layers = self.layers_by_rank.get(rank, range(0))
            if rank in self.shadows or rank in self.silent:
                more = (*self.shadows.get(rank, ()), *self.silent.get(rank, ()))
                held[rank] = frozenset((*layers, *more))
                continue
            if layers not in sets:
                sets[layers] = frozenset(layers)
            held[rank] = sets[layers]
        return held

    @cached_property
    def holder_sets(self) -> frozenset[frozenset[int]]:
        """The different sets of nodes that hold a layer. O(layers * nodes).

        If all nodes of a set are lost, the last copy of some layer is lost.
        """
        per_node = self.devices_per_node
        nodes_with: dict[frozenset[int], set[int]] = {}
        for rank, layers in self.held_by_rank.items():
            nodes_with.setdefault(layers, set()).add(rank // per_node)
        holders: dict[int, set[int]] = {}
        for layers, nodes in nodes_with.items():
            for layer in layers:
                holders.setdefault(layer, set()).update(nodes)
        return frozenset(map(frozenset, holders.values()))

    def holders(self, layer: int) -> tuple[int, ...]:
        """The ranks that hold the layer to compute it, ascending; the first is its owner."""
        return tuple(sorted(r for r, layers in self.layers_by_rank.items() if layer in layers))


class Transfer(msgspec.Struct, frozen=True, order=True):
    """Chunks of the state of one layer (parameters and optimizer state) that one rank sends
    another.

    Attributes:
        num_bytes: size of these chunks as the profile predicts it.
        first_chunk, end_chunk: range [first_chunk, end_chunk) of chunks. The bytes of all tensors
            of the state, one after the other, are cut into NUM_CHUNKS chunks of equal size.
    """

    layer: int
    source: int
    target: int
    num_bytes: int
    first_chunk: int = 0
    end_chunk: int = NUM_CHUNKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One possible change from a plan to the next one, with its price.

    Attributes:
        rounds: transfers in rounds, which follow one another; those of one round run at the same
            time.
        downtime_s: predicted seconds from the decision to the first forward of the next plan.
        iteration_s: predicted seconds of an iteration of the next plan.
        redone_samples: number of samples that the job has already computed and computes again.
        policy: name of the policy that proposes the transition.
        answer: name of the method that the policy would use, such as "borrow" or "global".
        then: transition that the job may make later, at commits, while it trains by `after`; None:
            no other plan follows. Its downtime_s is the time during which layers move.
        goes_back: whether all ranks drop what they hold and go on from the newest save.
        keeps_plan: whether all ranks keep their work, so that nothing moves; other transitions are
            compared with this one.
        is_foreseen: whether it was looked up among answers that had been found ahead of need.
    """

    before: Plan
    after: Plan
    rounds: tuple[tuple[Transfer, ...], ...]
    downtime_s: float
    iteration_s: float
    redone_samples: int
    policy: str
    answer: str
    then: "Transition | None" = None
    goes_back: bool = False
    keeps_plan: bool = False
    is_foreseen: bool = False

    def __post_init__(self) -> None:
        assert self.after.epoch > self.before.epoch
        # The global batch never changes, however few ranks are left to compute it.
        assert len(self.after.routes) == len(self.before.routes)


def plain_plan(epoch: int, pipelines: tuple[Pipeline, ...], microbatches: tuple[int, ...]) -> Plan:
    """The plan in which pipeline p takes the next microbatches[p] microbatches along its own
    stages.

    Which samples a microbatch consists of does not depend on the plan (docs/protocol.md, rule C1).
    """
    assert len(pipelines) == len(microbatches)
    routes = tuple(
        route
        for pipeline, count in zip(pipelines, microbatches, strict=True)
        for route in (pipeline.route(),) * count
    )
    return Plan(epoch, pipelines, routes)


def stage_layers(profile: ModelProfile, stage: Stage) -> tuple[LayerProfile, ...]:
    """The profiles of the layers of a stage, with the costs of what it computes again."""
    layers = profile.layers[stage.first_layer : stage.end_layer]
    if not stage.recomputation:
        return layers
    pairs = zip(layers, stage.recomputation, strict=True)
    return tuple(layer.recomputing(mode) for layer, mode in pairs)


def profile_on(profile: ModelProfile, plan: Plan, rank: int) -> ModelProfile:
    """The profile with the costs of what a rank computes again under a plan."""
    modes = plan.recomputation_by_rank.get(rank)
    if not modes:
        return profile
    layers = list(profile.layers)
    for layer, mode in modes.items():
        layers[layer] = layers[layer].recomputing(mode)
    return replace(profile, layers=tuple(layers))


def recomputing_profile(profile: ModelProfile, mode: Recomputation) -> ModelProfile:
    """The profile if the backward of every layer computes that much again."""
    return replace(profile, layers=tuple(layer.recomputing(mode) for layer in profile.layers))


def scaled_layer(layer: LayerProfile, factor: float) -> LayerProfile:
    """The layer with the seconds of its forward and backward multiplied by a factor."""

    def times_factor(seconds: Mapping[int, float]) -> dict[int, float]:
        return {count: value * factor for count, value in seconds.items()}

    return replace(
        layer,
        forward_s=times_factor(layer.forward_s),
        backward_input_s=times_factor(layer.backward_input_s),
        backward_weight_s=times_factor(layer.backward_weight_s),
        recomputed={
            mode: replace(cost, additional_s=times_factor(cost.additional_s))
            for mode, cost in layer.recomputed.items()
        },
    )


def scaled_profile(profile: ModelProfile, time_scale: float) -> ModelProfile:
    """The profile with all seconds multiplied by time_scale: those of layers and those of links."""
    layers = tuple(
        replace(
            scaled_layer(layer, time_scale),
            update_s={count: value * time_scale for count, value in layer.update_s.items()},
        )
        for layer in profile.layers
    )
    links = {
        kind: Link(link.latency_s * time_scale, link.bandwidth_bytes_per_s / time_scale)
        for kind, link in profile.links.items()
    }
    return replace(profile, layers=layers, links=links)


def one_device_profile(profile: ModelProfile) -> ModelProfile:
    """The profile with the costs for one device per layer only."""
    layers = tuple(
        replace(
            layer,
            forward_s={1: layer.forward_s[1]},
            backward_input_s={1: layer.backward_input_s[1]},
            backward_weight_s={1: layer.backward_weight_s[1]},
            update_s={1: layer.update_s[1]} if layer.update_s else {},
            recomputed={
                mode: replace(cost, additional_s={1: cost.additional_s[1]})
                for mode, cost in layer.recomputed.items()
            },
        )
        for layer in profile.layers
    )
    return replace(profile, layers=layers)
