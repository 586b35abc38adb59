"""A modelled iteration of one rank, up to and including the commit vector.

A rank computes forwards and backwards along the routes, reduces gradients bucket by bucket, and
sums the commit vector up and down a binary tree, and the buckets of many holders like it. The
samples that went into a gradient stand for it.

Source: engine/iteration/executor.py and groups.py; the steps come in the same order.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from planaria.core.commit import CommitVector, Votes, commit_vector
from planaria.core.plan import Plan
from planaria.schedule.action import Bucket
from planaria.simulator.modelled.layout import (
    Samples,
    Visit,
    is_summed_up_a_tree,
    layout_of,
    reduction_peers,
    tree_peers,
)
from planaria.simulator.modelled.links import SimulatedLinks
from planaria.simulator.scenario import PlannedJob

Addend = TypeVar("Addend", float, Samples)
NOT_YET: Final = -1  # Age of a silent layer whose state has not arrived.


@dataclass(slots=True)
class ModelledLayer:
    """A layer on a rank.

    Attributes:
        content: its state, a hash of all that led to it.
        gradients_of: iteration whose gradients are complete; -1: none.
        gradient: samples in its reduced gradients, sorted.
    """

    age: int
    content: int
    gradients_of: int = -1
    gradient: Samples = ()


@dataclass(slots=True)
class ModelledPulse:
    """What a worker is doing, as its agent can see it.

    Attributes:
        layers: (first, end) of the layers that it is computing; (0, 0): none.
    """

    layers: tuple[int, int] = (0, 0)

    @contextmanager
    def computing(self, first_layer: int, end_layer: int) -> Iterator[None]:
        """A context in which the worker computes these layers."""
        self.layers = first_layer, end_layer
        try:
            yield
        finally:
            self.layers = (0, 0)


class SimulatedExecutor:
    """One rank's part of the iterations of one epoch.

    Args:
        plan: plan of the epoch; the forwards of the rank's shadow layers are computed eagerly.
        on_place: callback for each place and iteration that it reaches.
        on_computed: callback that gets the layers of each forward and backward, and may raise.

    Attributes:
        action_s: seconds of forwards ("F") and backwards ("B") in the last iteration.
        eager_s: seconds of eager forwards in the last iteration, which fill time in which the rank
            would wait.
    """

    def __init__(
        self,
        links: SimulatedLinks,
        plan: Plan,
        *,
        job: PlannedJob,
        pulse: ModelledPulse,
        on_place: Callable[[str, int], None],
        on_computed: Callable[[Sequence[int]], None],
    ) -> None:
        self.action_s: dict[str, float] = {}
        self.eager_s = 0.0
        self._pulse = pulse
        self._on_computed = on_computed
        self._process = links.process
        self._links = links
        self._rank = links.rank
        self._shadows = plan.shadows.get(self._rank, ())
        self._layout = layout_of(plan)
        self._job = job
        self._on_place = on_place

    async def run(
        self,
        iteration: int,
        layers: Mapping[int, ModelledLayer],
        *,
        votes: Callable[[], Awaitable[Votes]],
    ) -> CommitVector:
        """Computes all gradients of an iteration and returns its commit vector."""
        own = [(layer, layers[layer]) for layer in self._layout.layers_of(self._rank)]
        for _, layer_state in own:
            layer_state.gradients_of = -1
            has_age = layer_state.age in (iteration, NOT_YET)
            assert has_age, f"iteration {iteration} begins with age {layer_state.age}"
        samples = await self._compute(iteration)
        self._on_place("reduce", iteration)
        reduced = await self._reduce(iteration, samples)
        for layer, layer_state in own:
            layer_state.gradient = reduced[layer] if layer in reduced else samples.get(layer, ())
            layer_state.gradients_of = iteration
        self._on_place("commit", iteration)
        return await self._commit(iteration, await votes())

    async def _compute(self, iteration: int) -> dict[int, Samples]:
        """Runs forwards and backwards of all routes; returns the samples that passed each layer."""
        visits = self._layout.visits.get(self._rank, ())
        self.action_s = {"F": 0.0, "B": 0.0}
        number = sum(len(visit.microbatches) for visit in visits)
        self.eager_s = number * sum(self._job.forward_s[layer] for layer in self._shadows)
        samples_by_layer: dict[int, Samples] = {}
        arrived = {}
        for visit in visits:
            arrived[visit] = await self._forward(visit, iteration)
        postponed = []
        for visit in sorted(visits, key=lambda visit: (visit.route, -visit.hop)):
            if await self._backward(visit, iteration, arrived[visit]):
                postponed.append(visit)
            for layer in visit.layers:
                samples_by_layer[layer] = (*samples_by_layer.get(layer, ()), *arrived[visit])
        for visit in postponed:
            await self._work(visit, "B", 1)
        return {layer: tuple(sorted(samples)) for layer, samples in samples_by_layer.items()}

    async def _forward(self, visit: Visit, iteration: int) -> Samples:
        if visit.before >= 0:
            tag = ("forward", iteration, visit.route, visit.hop)
            samples: Samples = await self._links.receive(visit.before, tag)
        else:
            samples = visit.samples(self._job, iteration)
        await self._work(visit, "F", 1)
        self._on_computed(visit.layers)
        if visit.after >= 0:
            tag = ("forward", iteration, visit.route, visit.hop + 1)
            self._links.send(visit.after, tag, samples)
        return samples

    async def _backward(self, visit: Visit, iteration: int, samples: Samples) -> bool:
        """Computes a backward; returns whether the gradients of the weights are left for later."""
        if visit.after >= 0:
            await self._links.receive(visit.after, ("backward", iteration, visit.route, visit.hop))
        self._on_place("backward", iteration)
        is_split = self._layout.plan.splits_backward and visit.before >= 0
        await self._work(visit, "B", 1 if is_split else 2)
        self._on_computed(visit.layers)
        if visit.before >= 0:
            tag = ("backward", iteration, visit.route, visit.hop - 1)
            self._links.send(visit.before, tag, samples)
        return is_split

    async def _work(self, visit: Visit, kind: str, num_parts: int) -> None:
        """Computes a forward, or one or both parts of a backward; each takes the forward's time."""
        each_s = sum(self._job.forward_s[layer] for layer in visit.layers)
        seconds = num_parts * each_s * len(visit.microbatches)
        with self._pulse.computing(visit.layers.start, visit.layers.stop):
            await self._process.sleep(seconds)
        self.action_s[kind] += seconds
        self._links.check_epoch()

    async def _reduce(self, iteration: int, samples: Mapping[int, Samples]) -> dict[int, Samples]:
        """Sums the gradients of each bucket over its holders; returns their samples by layer."""
        reduced: dict[int, Samples] = {}
        for index, bucket in self._layout.buckets[self._rank]:
            # A silent holder adds nothing.
            total = [samples.get(layer, ()) for layer in bucket.layers]
            tag = (iteration, index)
            if is_summed_up_a_tree(bucket):
                with self._pulse.computing(min(bucket.layers), max(bucket.layers) + 1):
                    total = await self._sum_up_tree(bucket.ranks, tag, total)
            else:
                total = await self._sum_directly(bucket, tag, total)
            for layer, layer_samples in zip(bucket.layers, total, strict=True):
                reduced[layer] = tuple(sorted(layer_samples))
        return reduced

    async def _sum_directly(
        self, bucket: Bucket, tag: tuple[int, int], total: list[Samples]
    ) -> list[Samples]:
        """The sum over all holders of a bucket; each sends its part to all others."""
        peers = reduction_peers(self._rank, bucket)
        for rank in peers:
            self._links.send(rank, ("reduce", *tag), tuple(total))
        with self._pulse.computing(min(bucket.layers), max(bucket.layers) + 1):
            for rank in peers:
                peer_samples = await self._links.receive(rank, ("reduce", *tag))
                total = [a + b for a, b in zip(total, peer_samples, strict=True)]
        return total

    async def _sum_up_tree(
        self, ranks: Sequence[int], tag: tuple[int, ...], total: list[Addend]
    ) -> list[Addend]:
        """The sum over ranks, entry by entry, up and down a binary tree of them."""
        peers, has_parent = tree_peers(self._rank, ranks)
        children = peers[has_parent:]
        for child in children:
            part = await self._links.receive(child, ("up", *tag))
            total = [a + b for a, b in zip(total, part, strict=True)]
        if has_parent:
            self._links.send(peers[0], ("up", *tag), total)
            total = await self._links.receive(peers[0], ("down", *tag))
        for child in children:
            self._links.send(child, ("down", *tag), total)
        return total

    async def _commit(self, iteration: int, votes: Votes) -> CommitVector:
        """Sums the commit vector over all ranks."""
        part = self._layout.contribution(self._rank, self._job, iteration)
        part[-len(votes) :] = votes
        total = await self._sum_up_tree(self._layout.ranks, (iteration,), part)
        return commit_vector(np.array(total), self._job.rules.layout)
