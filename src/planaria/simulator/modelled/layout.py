"""What each rank does in a modelled iteration of a plan, computed once for all iterations.

Microbatches with the same route go together. Ranks run all forwards in the order of routes, and
then all backwards. So each wait is for work that is earlier in this order, and none is a deadlock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from planaria.core.plan import Pipeline, Plan, Route
from planaria.schedule.action import Bucket
from planaria.schedule.buckets import buckets_of
from planaria.simulator.scenario import PlannedJob

Samples = tuple[int, ...]
_DIRECT_RANKS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Visit:
    """A hop of all microbatches that have the same route.

    Attributes:
        route: index of the route among the plan's distinct routes.
        hop: index of the hop in the route.
        layers: layers that are computed there.
        before: rank of the previous hop; -1: there is none.
        after: rank of the next hop; -1: there is none.
        microbatches: microbatches that have this route.
    """

    route: int
    hop: int
    layers: range
    before: int
    after: int
    microbatches: tuple[int, ...]

    def samples(self, job: PlannedJob, iteration: int) -> Samples:
        """The samples of the route's microbatches in an iteration."""
        numbers = job.samples[iteration]
        return tuple(n for microbatch in self.microbatches for n in numbers[microbatch])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IterationLayout:
    """A plan by rank.

    Attributes:
        own: layers that each rank computes.
        silent: layers that each rank only reduces and steps.
        owner: rank that contributes a layer's entry to the commit vector and saves it, by layer.
        visits: visits of each rank that has any, in order.
        buckets: (number, bucket) of all that each rank reduces, in order.
    """

    plan: Plan
    ranks: tuple[int, ...]
    own: Mapping[int, range]
    silent: Mapping[int, tuple[int, ...]]
    owner: tuple[int, ...]
    visits: Mapping[int, tuple[Visit, ...]]
    buckets: Mapping[int, tuple[tuple[int, Bucket], ...]]

    def peers(self, rank: int) -> set[int]:
        """The ranks with which a rank exchanges messages in an iteration."""
        peers = set(tree_peers(rank, self.ranks)[0])
        for visit in self.visits.get(rank, ()):
            peers |= {visit.before, visit.after}
        for _, bucket in self.buckets[rank]:
            peers |= set(reduction_peers(rank, bucket))
        return peers - {rank, -1}

    def layers_of(self, rank: int) -> tuple[int, ...]:
        """All layers that a rank holds."""
        return tuple(sorted((*self.own.get(rank, ()), *self.silent.get(rank, ()))))

    def contribution(self, rank: int, job: PlannedJob, iteration: int) -> list[float]:
        """The entries that a rank adds to the commit vector of an iteration."""
        layout = job.rules.layout
        entries = [0.0] * layout.size
        for layer in self.own.get(rank, ()):
            if self.owner[layer] == rank:
                entries[layer] = 1.0
        size = layout.num_samples // layout.num_microbatches
        for visit in self.visits.get(rank, ()):
            for microbatch in visit.microbatches:
                if visit.after < 0:
                    entries[layout.losses + microbatch] = 1.0
                if visit.before < 0:
                    first = layout.samples + microbatch * size
                    entries[first : first + size] = job.samples[iteration][microbatch]
        return entries


class _Same:
    """A plan as a key that is equal to itself alone: all ranks have the same object, and comparing
    the routes of a thousand nodes takes milliseconds."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __hash__(self) -> int:
        return id(self.plan)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.plan is self.plan


def layout_of(plan: Plan) -> IterationLayout:
    """The layout of a plan."""
    return _layout_of(_Same(plan))


@lru_cache(maxsize=64)
def _layout_of(same: _Same) -> IterationLayout:
    plan = same.plan
    own = plan.layers_by_rank
    # Shadow layers are reduced and stepped like silent ones; eager forwards change nothing here.
    silent_layers = {
        rank: layers.difference(own.get(rank, ())) for rank, layers in plan.held_by_rank.items()
    }
    silent = tuple(
        (rank, tuple(sorted(silent_layers[rank])))
        for rank in sorted(silent_layers)
        if silent_layers[rank]
    )
    return _layout(plan.pipelines, plan.routes, silent, plan.gone, plan.splits_backward)


@lru_cache(maxsize=2048)
def _layout(
    pipelines: tuple[Pipeline, ...],
    routes: tuple[Route, ...],
    silent: tuple[tuple[int, tuple[int, ...]], ...],
    gone: tuple[int, ...],
    splits_backward: bool,
) -> IterationLayout:
    plan = Plan(0, pipelines, routes, dict(silent), gone, splits_backward=splits_backward)
    buckets = list(enumerate(buckets_of(plan)))
    return IterationLayout(
        plan=plan,
        ranks=plan.all_ranks,
        own=plan.layers_by_rank,
        silent=plan.silent,
        owner=tuple(plan.holders(layer)[0] for layer in range(plan.num_layers)),
        visits=_visits(routes),
        buckets={rank: tuple(b for b in buckets if rank in b[1].ranks) for rank in plan.all_ranks},
    )


def _visits(routes: Sequence[Route]) -> dict[int, tuple[Visit, ...]]:
    """The visits of each rank, those of the first route first."""
    visits: dict[int, list[Visit]] = {}
    for index, route in enumerate(dict.fromkeys(routes)):
        microbatches = tuple(m for m, path in enumerate(routes) if path == route)
        chain = [-1, *(hop.rank for hop in route), -1]
        for number, hop in enumerate(route):
            before, after = chain[number], chain[number + 2]
            layers = range(hop.first_layer, hop.end_layer)
            visit = Visit(index, number, layers, before, after, microbatches)
            visits.setdefault(hop.rank, []).append(visit)
    return {rank: tuple(of_rank) for rank, of_rank in visits.items()}


def is_summed_up_a_tree(bucket: Bucket) -> bool:
    """Whether so many ranks hold a bucket that they sum it along a tree, instead of each with each:
    the messages of hundreds of ranks would grow with the square of their number."""
    return len(bucket.ranks) > _DIRECT_RANKS_MAX


def reduction_peers(rank: int, bucket: Bucket) -> tuple[int, ...]:
    """The peers with which a rank reduces a bucket."""
    if is_summed_up_a_tree(bucket):
        return tree_peers(rank, bucket.ranks)[0]
    return tuple(peer for peer in bucket.ranks if peer != rank)


def tree_peers(rank: int, ranks: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """The peers with which a rank sums the commit vector, and whether the first is its parent."""
    index = ranks.index(rank)
    parent = (ranks[(index - 1) // 2],) if index else ()
    children = tuple(ranks[c] for c in (2 * index + 1, 2 * index + 2) if c < len(ranks))
    return parent + children, bool(index)
