"""What a plan means for each rank of a modelled iteration, worked out once for all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from planaria.core.plan import Pipeline, Plan, Route
from planaria.schedule.action import Bucket
from planaria.schedule.buckets import buckets_of
from planaria.simulator.scenario import PlannedJob

_LAYER_S = 0.01  # Of a layer and a microbatch, forward; the backward takes twice that.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """A plan by rank.

    Attributes:
        own: the layers that each rank computes.
        silent: those that it only reduces and steps.
        owner: of each layer, the rank that speaks and writes for it.
        neighbours: the ranks before and after in the pipeline, -1 at its ends.
        microbatches: that go through each rank.
        buckets: that each rank reduces, with their numbers, in order.
    """

    plan: Plan
    ranks: tuple[int, ...]
    own: Mapping[int, range]
    silent: Mapping[int, tuple[int, ...]]
    owner: tuple[int, ...]
    neighbours: Mapping[int, tuple[int, int]]
    microbatches: Mapping[int, tuple[int, ...]]
    buckets: Mapping[int, tuple[tuple[int, Bucket], ...]]

    def peers(self, rank: int) -> set[int]:
        """Whom a rank exchanges anything with in an iteration."""
        found = set(tree_peers(rank, self.ranks)[0]) | set(self.neighbours.get(rank, ()))
        for _, bucket in self.buckets[rank]:
            found |= set(bucket.ranks)
        return found - {rank, -1}

    def seconds(self, rank: int) -> float:
        """A rank's forward of all its microbatches."""
        return _LAYER_S * len(self.own[rank]) * len(self.microbatches[rank])

    def held(self, rank: int) -> tuple[int, ...]:
        """All layers that a rank is to hold."""
        return tuple(sorted((*self.own.get(rank, ()), *self.silent.get(rank, ()))))

    def samples(self, rank: int, job: PlannedJob, iteration: int) -> tuple[int, ...]:
        """What goes through a rank, as its pipeline's first stage takes it from the data."""
        numbers = job.samples[iteration]
        return tuple(n for microbatch in self.microbatches[rank] for n in numbers[microbatch])

    def contribution(self, rank: int, job: PlannedJob, iteration: int) -> list[float]:
        """What a rank adds to the commit vector of an iteration."""
        layout = job.rules.layout
        entries = [0.0] * layout.size
        for layer in self.own.get(rank, ()):
            if self.owner[layer] == rank:
                entries[layer] = 1.0
        before, after = self.neighbours.get(rank, (-1, -1))
        size = layout.num_samples // layout.num_microbatches
        for microbatch in self.microbatches.get(rank, ()):
            if after < 0:
                entries[layout.losses + microbatch] = 1.0
            if before < 0:
                first = layout.samples + microbatch * size
                entries[first : first + size] = job.samples[iteration][microbatch]
        return entries


def layout_of(plan: Plan) -> Layout:
    """The layout of a plan."""
    key = (plan.epoch, plan.pipelines, plan.routes, tuple(sorted(plan.silent.items())))
    return _layout(*key)


@lru_cache(maxsize=512)
def _layout(
    epoch: int,
    pipelines: tuple[Pipeline, ...],
    routes: tuple[Route, ...],
    silent: tuple[tuple[int, tuple[int, ...]], ...],
) -> Layout:
    plan = Plan(epoch, pipelines, routes, dict(silent))
    own = plan.layers_by_rank
    neighbours, microbatches = {}, {}
    for pipeline in plan.pipelines:
        route = pipeline.route()
        taken = tuple(m for m, path in enumerate(plan.routes) if path == route)
        chain = [-1, *(hop.rank for hop in route), -1]
        for before, rank, after in zip(chain, chain[1:], chain[2:], strict=False):
            neighbours[rank] = (before, after)
            microbatches[rank] = taken
    buckets = list(enumerate(buckets_of(plan)))
    return Layout(
        plan=plan,
        ranks=plan.all_ranks,
        own=own,
        silent=plan.silent,
        owner=tuple(plan.holders(layer)[0] for layer in range(plan.num_layers)),
        neighbours=neighbours,
        microbatches=microbatches,
        buckets={rank: tuple(b for b in buckets if rank in b[1].ranks) for rank in plan.all_ranks},
    )


def tree_peers(rank: int, ranks: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Whom a rank sums the commit vector with; whether the first of them is its parent."""
    index = ranks.index(rank)
    parent = (ranks[(index - 1) // 2],) if index else ()
    children = tuple(ranks[c] for c in (2 * index + 1, 2 * index + 2) if c < len(ranks))
    return parent + children, bool(index)
