"""The vocabulary of planning: profiles, stages, templates, pipelines, routes and plans.

A `PipelineTemplate` cuts the model into stages for a number of nodes (Oobleck, section 3.1). A
`Pipeline` is a template bound to nodes. A `Route` is the path of one microbatch: hops that
together cover the model exactly once. A plain pipeline is the route along its own stages.

Ranks: the rank of device d of node n is n * devices_per_node + d. It is the same in every
epoch, so a rank means one device for the life of a job.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple

NUM_CHUNKS: Final = 64  # Of a layer's state, which several holders may send.


@dataclass(frozen=True, slots=True)
class Link:
    """The cost of one kind of link: latency_s + bytes / bandwidth_bytes_per_s."""

    latency_s: float
    bandwidth_bytes_per_s: float

    def seconds(self, num_bytes: int) -> float:
        """The time in which num_bytes arrive, sent over an idle link."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """What one layer costs for one microbatch.

    Attributes:
        forward_s: seconds by number of devices; its keys are the counts that the layer supports.
        backward_input_s: seconds of the gradient of the input alone, same keys.
        backward_weight_s: seconds that the gradient of the weights adds, same keys.
        parameter_bytes: of the layer's parameters.
        optimizer_bytes: of their optimizer state.
        activation_bytes: kept from forward to backward.
        output_bytes: sent to the next layer.
        update_s: seconds that an iteration takes for it beside microbatches, as its optimizer step;
            same keys, or empty if nobody has measured it.
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

    def backward_s(self, num_devices: int) -> float:
        """Seconds of the whole backward: input and weight."""
        return self.backward_input_s[num_devices] + self.backward_weight_s[num_devices]


@dataclass(frozen=True, slots=True)
class TiedParameters:
    """One parameter that several layers use (tied embeddings), `layers` in order of first use."""

    layers: tuple[int, ...]
    parameter_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A model's layers and the links of the cluster, as measured or as modelled.

    Attributes:
        links: by kind: "intra_node", "inter_node", and where measured "device_to_host".
        device_memory_bytes: what a device may hold; 0 if unlimited.
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


@dataclass(frozen=True, slots=True, order=True)
class NodeKind:
    """What sets a node apart from those that the profile was measured on.

    Attributes:
        speed: its devices take 1 / speed times the profile's seconds.
        device_memory_bytes: what each of them may hold; 0 if as the profile says.
    """

    speed: float = 1.0
    device_memory_bytes: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Stage:
    """Layers [first_layer, end_layer) on num_devices devices of one node."""

    first_layer: int
    end_layer: int
    num_devices: int


@dataclass(frozen=True, slots=True, order=True)
class PipelineTemplate:
    """How a pipeline of num_nodes nodes cuts the model (Oobleck, section 3.1).

    Attributes:
        kinds: of its nodes, in order; empty if all are as the profile says.
    """

    stages: tuple[Stage, ...]
    num_nodes: int
    kinds: tuple[NodeKind, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.kinds) in (0, self.num_nodes)

    @property
    def devices_per_node(self) -> int:
        return sum(stage.num_devices for stage in self.stages) // self.num_nodes

    @property
    def node_kinds(self) -> tuple[NodeKind, ...]:
        """Of its nodes, in order."""
        return self.kinds or (NodeKind(),) * self.num_nodes

    def stage_kinds(self) -> tuple[NodeKind, ...]:
        """By stage, that of its node."""
        devices = accumulate((stage.num_devices for stage in self.stages[:-1]), initial=0)
        return tuple(self.node_kinds[device // self.devices_per_node] for device in devices)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A template bound to nodes; stages take the nodes' devices in order."""

    template: PipelineTemplate
    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.nodes) == self.template.num_nodes
        assert len(set(self.nodes)) == len(self.nodes)

    def stage_ranks(self, stage_index: int) -> tuple[int, ...]:
        """The ranks of one stage, the one that its hops name first."""
        return self.ranks_by_stage()[stage_index]

    def ranks_by_stage(self) -> tuple[tuple[int, ...], ...]:
        """As `stage_ranks`, of all stages."""
        per_node = self.template.devices_per_node
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


@dataclass(frozen=True, slots=True, order=True)
class Hop:
    """One visit of a microbatch: `rank` computes layers [first_layer, end_layer)."""

    rank: int
    first_layer: int
    end_layer: int


Route = tuple[Hop, ...]


class Ticks(NamedTuple):
    """What a stage takes in the virtual time of a schedule (schedule/routed.py), in any unit.

    Attributes:
        forward: of all its layers.
        backward_input, backward_weight: the parts of their backward.
        arrival: of its input, from the rank before; the gradient that goes back takes as long.
    """

    forward: int
    backward_input: int
    backward_weight: int
    arrival: int


@dataclass(frozen=True)
class Plan:
    """Who computes what: pipelines, and the route of every microbatch of an iteration.

    Attributes:
        epoch: rises by one with each membership record; older ones are fenced off.
        routes: one per microbatch of the job, indexed by microbatch.
        silent: layers that a rank takes part in reducing and steps like their holders, but does
            not compute: it is about to need them (DESIGN 5, joins).
        gone: nodes of the pipelines that are no more, ascending. Their places are empty, and
            routes go around them.
        in_flight: by rank, how many microbatches it may keep in flight at most, where that is not
            as many as the schedule would (schedule/routed.py).
        splits_backward: whether gradients of weights are put off into bubbles.
        ticks: of the stage of each rank; empty if the stages of a pipeline count as equal.
        shadows: layers that a rank holds besides, reduces and steps like their holders, to compute
            them once the node that does is lost; their forwards it computes ahead of that.
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
        """The nodes that have a place, ascending."""
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
        """The ranks that compute or are silent, ascending: whoever takes part in a commit."""
        return tuple(sorted({*self.layers_by_rank, *self.silent}))

    @property
    def num_layers(self) -> int:
        return self.pipelines[0].template.stages[-1].end_layer

    @cached_property
    def layers_by_rank(self) -> Mapping[int, range]:
        """For every rank that computes the layers whose parameters it holds for that."""
        empty = {
            node * pipeline.template.devices_per_node + device
            for pipeline in self.pipelines[:1]  # All have as many.
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
    def slow_nodes(self) -> Mapping[int, float]:
        """The speeds of nodes that differ from those that the profile was measured on."""
        return {
            node: kind.speed
            for pipeline in self.pipelines
            for node, kind in zip(pipeline.nodes, pipeline.template.kinds, strict=False)
            if kind.speed != 1.0 and node not in self.gone
        }

    @cached_property
    def held_by_rank(self) -> Mapping[int, frozenset[int]]:
        """As `layers_by_rank`, of all ranks, with their shadows and what they have silently."""
        parts = (self.layers_by_rank, self.shadows, self.silent)
        return {
            rank: frozenset(layer for part in parts for layer in part.get(rank, ()))
            for rank in self.all_ranks
        }

    def holders(self, layer: int) -> tuple[int, ...]:
        """The ranks that hold the layer to compute it, ascending; the first is its owner."""
        return tuple(sorted(r for r, layers in self.layers_by_rank.items() if layer in layers))


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """Chunks of the state of one layer, parameters and optimizer state, from rank to rank.

    Attributes:
        num_bytes: of these chunks, as far as the profile knows.
        first_chunk, end_chunk: of NUM_CHUNKS of equal size into which the state is cut, its
            tensors' bytes end to end.
    """

    layer: int
    source: int
    target: int
    num_bytes: int
    first_chunk: int = 0
    end_chunk: int = NUM_CHUNKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One way from a plan to the next, with its price.

    Attributes:
        rounds: transfers that run at the same time, round after round.
        downtime_s: predicted, from the decision to the first forward of the next plan.
        iteration_s: predicted, of an iteration of the next plan.
        redone_samples: that the job had already computed and computes again.
        policy: that proposes it.
        answer: how the policy would do it, such as "borrow" or "global".
        then: what the job may change to at commits, while it trains by `after`; its downtime is for
            how long layers move.
        goes_back: all ranks drop what they hold, and go on from the newest save on disk.
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

    def __post_init__(self) -> None:
        assert self.after.epoch > self.before.epoch
        # The global batch never changes, whoever is left to compute it.
        assert len(self.after.routes) == len(self.before.routes)


def plain_plan(epoch: int, pipelines: tuple[Pipeline, ...], microbatches: tuple[int, ...]) -> Plan:
    """The plan in which pipeline p takes microbatches[p] microbatches, in order, on its own route.

    Which microbatch is made of which samples does not depend on this (DESIGN 4.1).
    """
    assert len(pipelines) == len(microbatches)
    routes = tuple(
        route
        for pipeline, count in zip(pipelines, microbatches, strict=True)
        for route in (pipeline.route(),) * count
    )
    return Plan(epoch, pipelines, routes)


def scaled(profile: ModelProfile, time_scale: float) -> ModelProfile:
    """The profile with all its seconds multiplied: those of its layers, and of bytes on links."""

    def times(seconds: Mapping[int, float]) -> dict[int, float]:
        return {count: value * time_scale for count, value in seconds.items()}

    layers = tuple(
        replace(
            layer,
            forward_s=times(layer.forward_s),
            backward_input_s=times(layer.backward_input_s),
            backward_weight_s=times(layer.backward_weight_s),
            update_s=times(layer.update_s),
        )
        for layer in profile.layers
    )
    links = {
        kind: Link(link.latency_s * time_scale, link.bandwidth_bytes_per_s / time_scale)
        for kind, link in profile.links.items()
    }
    return replace(profile, layers=layers, links=links)


def on_one_device(profile: ModelProfile) -> ModelProfile:
    """The profile without what its layers cost on several devices."""
    layers = tuple(
        replace(
            layer,
            forward_s={1: layer.forward_s[1]},
            backward_input_s={1: layer.backward_input_s[1]},
            backward_weight_s={1: layer.backward_weight_s[1]},
            update_s={1: layer.update_s[1]} if layer.update_s else {},
        )
        for layer in profile.layers
    )
    return replace(profile, layers=layers)
