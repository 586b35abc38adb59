"""The seconds of the hops of routes, on their ranks and on the links between them."""

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

from planaria.core.plan import Hop, Link, ModelProfile, Plan, Route, profile_on
from planaria.estimator.sharing import LinkUse


class HopTimes(NamedTuple):
    """Times of one hop of a microbatch, on its rank and on its links.

    Attributes:
        input_s: the part of backward_s for the gradient of the input.
        onward: link direction and times of the output; `_NO_LINK_USE` at the last hop.
        back: link direction and times of the gradient; `_NO_LINK_USE` at the first hop.
    """

    forward_s: float
    backward_s: float
    input_s: float
    onward: LinkUse
    back: LinkUse


_NO_LINK_USE = LinkUse(-1, 0.0, 0.0)


class ClusterTimes:
    """The times of hops and messages of a plan, each computed once."""

    def __init__(self, profile: ModelProfile, plan: Plan) -> None:
        self._profile = profile
        self._profiles = {
            rank: profile_on(profile, plan, rank) for rank in plan.recomputation_by_rank
        }
        self._devices_per_node = plan.devices_per_node
        # (number of devices, speed) of the stage, by rank.
        self._stages = {
            rank: (stage.num_devices, kind.speed)
            for pipeline in plan.pipelines
            for index, (stage, kind) in enumerate(
                zip(pipeline.template.stages, pipeline.template.stage_kinds(), strict=True)
            )
            for rank in pipeline.stage_ranks(index)
        }
        self._hop_times: dict[Route, tuple[HopTimes, ...]] = {}
        self._has_shadows = bool(plan.shadows)
        self._shadows_s: dict[Route, tuple[float, ...]] = {}
        self._links: dict[tuple[int, int], int] = {}

    @property
    def speeds(self) -> dict[int, float]:
        """Speed of the node of each rank that has a stage."""
        return {rank: speed for rank, (_, speed) in self._stages.items()}

    @property
    def num_links(self) -> int:
        """Number of link directions that the routes asked about so far use."""
        return len(self._links)

    def hop_times(self, route: Route) -> tuple[HopTimes, ...]:
        """The times of the hops of a route."""
        if route not in self._hop_times:
            onward = [self._link_use(hop, after, hop) for hop, after in pairwise(route)]
            back = [self._link_use(hop, before, before) for before, hop in pairwise(route)]
            uses_by_hop = zip(route, [*onward, _NO_LINK_USE], [_NO_LINK_USE, *back], strict=True)
            self._hop_times[route] = tuple(
                HopTimes(*self._compute_s(hop), *uses) for hop, *uses in uses_by_hop
            )
        return self._hop_times[route]

    def all_shadows_s(self, routes: Sequence[Route]) -> list[float]:
        """Times of eager forwards by the hops of all routes; empty if the plan has no shadows.

        Without them a rank may have no times for the layers of the next one, if their stages have
        different numbers of devices.
        """
        if not self._has_shadows:
            return []
        return [shadow_s for route in routes for shadow_s in self._route_shadows_s(route)]

    def _route_shadows_s(self, route: Route) -> tuple[float, ...]:
        """Time of each hop's forward on the rank of the hop before it; 0 for the first hop."""
        if route not in self._shadows_s:
            moved = (
                Hop(before.rank, hop.first_layer, hop.end_layer) for before, hop in pairwise(route)
            )
            self._shadows_s[route] = (0.0, *(self._compute_s(hop)[0] for hop in moved))
        return self._shadows_s[route]

    def updates_s(self, plan: Plan) -> list[float]:
        """Seconds per iteration of optimizer steps, and of preparing gradients, per computing rank.

        Gradients are prepared for the step, and for the next iteration. A rank steps all layers
        that it holds, also those that it keeps for others.
        """
        updates_s = []
        for rank in plan.layers_by_rank:
            count, speed = self._stages[rank]
            layers = [self._profile.layers[layer] for layer in sorted(plan.held_by_rank[rank])]
            updates_s.append(sum(layer.update_s.get(count, 0.0) for layer in layers) / speed)
        return updates_s

    def _compute_s(self, hop: Hop) -> tuple[float, float, float]:
        """Seconds of a hop: (forward, backward, the backward's part for the input's gradient)."""
        count, speed = self._stages[hop.rank]
        profile = self._profiles.get(hop.rank, self._profile)
        layers = profile.layers[hop.first_layer : hop.end_layer]
        forward_s = sum(layer.forward_s[count] for layer in layers) / speed
        backward_s = sum(layer.backward_s(count) for layer in layers) / speed
        return forward_s, backward_s, sum(layer.backward_input_s[count] for layer in layers) / speed

    def _link_use(self, source: Hop, target: Hop, upstream: Hop) -> LinkUse:
        """The link direction and times from source to target for upstream's output or gradient."""
        ranks = (source.rank, target.rank)
        link = self._link(ranks)
        num_bytes = self._profile.layers[upstream.end_layer - 1].output_bytes
        transfer_s = num_bytes / link.bandwidth_bytes_per_s
        return LinkUse(self._links.setdefault(ranks, len(self._links)), transfer_s, link.latency_s)

    def _link(self, ranks: Collection[int]) -> Link:
        nodes = {rank // self._devices_per_node for rank in ranks}
        return self._profile.links["intra_node" if len(nodes) == 1 else "inter_node"]
