"""The saves of a simulated job: when each is complete, and which are kept."""

from collections import defaultdict
from collections.abc import Sequence

from planaria.coordinator.commands import Pruned, Published
from planaria.coordinator.job_rules import Rules
from planaria.core.copies import version_name
from planaria.core.plan import Plan
from planaria.systems.save_times import Pending, saves_after
from planaria.systems.system import RecoveryCosts


class VirtualSaves:
    """The saves of one job on disk, or in a store that every node reads and writes.

    A save is due after each `checkpoint.persist_every` iterations, is begun unless one is being
    written (systems/save_times.py), and is complete after `write_s`. One that is being written when
    training is interrupted is lost.

    Attributes:
        write_s: seconds from the commit that a save is of until it is complete.
        newest: number of iterations and version of the newest complete save; (0, "") for the start.
    """

    def __init__(self, rules: Rules, costs: RecoveryCosts) -> None:
        self._every = rules.job.checkpoint.persist_every
        self._keep = rules.job.checkpoint.keep
        self._layer_bytes = rules.prices.layer_bytes
        self._per_node = rules.job.cluster.devices_per_node
        self._bytes_per_s = costs.save_bytes_per_s
        self._pending: Pending | None = None
        self._kept: list[Published] = []
        self.write_s = sum(self._layer_bytes) / rules.job.cluster.nodes / self._bytes_per_s
        self.newest = (rules.first_iteration, rules.source)

    def load_s(self, plan: Plan) -> float:
        """Seconds until every node of a plan has read its layers."""
        held: defaultdict[int, set[int]] = defaultdict(set)
        for rank, layers in plan.held_by_rank.items():
            held[rank // self._per_node].update(layers)
        most = max(sum(self._layer_bytes[layer] for layer in layers) for layers in held.values())
        return most / self._bytes_per_s

    def begin(self, iteration: int, now_s: float) -> float:
        """Begins a save of the state after so many iterations; returns when it will be complete."""
        self._pending = (now_s + self.write_s, iteration)
        return self._pending[0]

    def interrupt(self) -> None:
        """Loses the save that is being written."""
        self._pending = None

    def complete_by(self, now_s: float) -> tuple[Published, ...]:
        """The save that was being written, if it is complete by now."""
        if self._pending is None or self._pending[0] > now_s:
            return ()
        (_, iteration), self._pending = self._pending, None
        return self._newer_save(iteration)

    def on_commits(
        self, number: int, num_committed: int, now_s: float, *, iteration_s: float
    ) -> tuple[Published, ...]:
        """The newest save that is complete after some more commits, the last of which is now."""
        complete, self._pending = saves_after(
            number,
            num_committed,
            now_s,
            pace_s=iteration_s,
            every=self._every,
            write_s=self.write_s,
            pending=self._pending,
        )
        return self._newer_save(complete)

    def _newer_save(self, iteration: int) -> tuple[Published, ...]:
        return (Published(iteration, 0),) if iteration > self.newest[0] else ()

    def on_published(self, published: Published) -> Sequence[Pruned]:
        """Notes a complete save; returns those that are removed, because enough are kept."""
        self._kept.append(published)
        self.newest = (published.iteration, version_name(published.iteration, published.epoch))
        if not self._keep or len(self._kept) <= self._keep:
            return ()
        removed, self._kept = self._kept[: -self._keep], self._kept[-self._keep :]
        return [Pruned(save.source) for save in removed]
