"""A modelled iteration of one rank, up to and including the commit vector.

Forward and backward along the pipeline, reductions bucket by bucket, then the commit vector up and
down a binary tree. Gradients are the samples that went into them.

Source: engine/executor.py and groups.py, whose order of things it keeps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from planaria.core.commit import CommitVector, commit_vector
from planaria.simulator.layout import Layout, tree_peers
from planaria.simulator.links import SimulatedLinks
from planaria.simulator.loop import Process
from planaria.simulator.scenario import PlannedJob

Samples = tuple[int, ...]

NOT_YET: Final = -1  # The age of a silent layer whose state has not come.


@dataclass(slots=True)
class HeldLayer:
    """A layer on a rank; `gradient` is the samples in its reduced gradients."""

    age: int
    content: int
    gradients_of: int = -1
    gradient: Samples = ()


class SimulatedExecutor:
    """One rank's part of the iterations of one epoch."""

    def __init__(
        self,
        process: Process,
        links: SimulatedLinks,
        layout: Layout,
        *,
        job: PlannedJob,
        reached: Callable[[str, int], None],
    ) -> None:
        self._process = process
        self._links = links
        self._rank = links.rank
        self._layout = layout
        self._job = job
        self._reached = reached

    async def run(
        self,
        iteration: int,
        held: Mapping[int, HeldLayer],
        *,
        wants_stop: bool,
        wants_switch: Callable[[], bool],
    ) -> CommitVector:
        """Computes all gradients of an iteration; what the ranks agree on."""
        own = [(layer, held[layer]) for layer in self._layout.held(self._rank)]
        for _, one in own:
            one.gradients_of = -1
            is_there = one.age in (iteration, NOT_YET)
            assert is_there, f"iteration {iteration} begins with age {one.age}"
        is_at_work = self._rank in self._layout.own
        samples = await self._compute(iteration) if is_at_work else ()
        self._reached("reduce", iteration)
        reduced = await self._reduce(iteration, samples)
        for layer, one in own:
            one.gradient = reduced.get(layer, samples)
            one.gradients_of = iteration
        self._reached("commit", iteration)
        votes = (float(wants_stop), float(wants_switch()))
        return await self._commit(iteration, votes)

    async def _compute(self, iteration: int) -> Samples:
        """Forward and backward along the pipeline: the samples that went through this stage."""
        links, before, after = self._links, *self._layout.neighbours[self._rank]
        seconds = self._layout.seconds(self._rank)
        samples: Samples
        if before >= 0:
            samples = await links.receive(before, ("forward", iteration))
        else:
            samples = self._layout.samples(self._rank, self._job, iteration)
        await self._work(seconds)
        if after >= 0:
            links.send(after, ("forward", iteration), samples)
            await links.receive(after, ("backward", iteration))
        self._reached("backward", iteration)
        await self._work(2 * seconds)
        if before >= 0:
            links.send(before, ("backward", iteration), samples)
        return tuple(sorted(samples))

    async def _work(self, seconds: float) -> None:
        await self._process.sleep(seconds)
        self._links.check_epoch()

    async def _reduce(self, iteration: int, samples: Samples) -> dict[int, Samples]:
        """Sums the gradients of each bucket over its holders: by layer the samples in them."""
        reduced = {}
        for index, bucket in self._layout.buckets[self._rank]:
            others = [rank for rank in bucket.ranks if rank != self._rank]
            # What is silent adds nothing.
            computed = self._layout.own.get(self._rank, ())
            mine = samples if bucket.layers[0] in computed else ()
            for rank in others:
                self._links.send(rank, ("reduce", iteration, index), mine)
            total = mine
            for rank in others:
                total += await self._links.receive(rank, ("reduce", iteration, index))
            reduced.update(dict.fromkeys(bucket.layers, tuple(sorted(total))))
        return reduced

    async def _commit(self, iteration: int, votes: tuple[float, float]) -> CommitVector:
        """Sums the vector over all ranks, up and down a tree."""
        peers, has_parent = tree_peers(self._rank, self._layout.ranks)
        children = peers[has_parent:]
        total = self._layout.contribution(self._rank, self._job, iteration)
        total[-2:] = votes
        for child in children:
            part = await self._links.receive(child, ("up", iteration))
            total = [a + b for a, b in zip(total, part, strict=True)]
        if has_parent:
            self._links.send(peers[0], ("up", iteration), total)
            total = await self._links.receive(peers[0], ("down", iteration))
        for child in children:
            self._links.send(child, ("down", iteration), total)
        return commit_vector(total, self._job.rules.layout)
