"""Restart from a checkpoint, as torchrun does it: whatever changes, all processes start anew.

The pipelines keep the depth that is the fastest on all nodes; there are as many of them as nodes
allow, and the rest of the nodes idle. Each save keeps all ranks waiting while they write; what
several pipelines hold is shared out among them, as evenly as their bytes allow. A lost
node is noticed when it has sent no keep-alive for long enough; then the rendezvous waits for late
comers, if more nodes may come, processes start, and load the newest save. A node that comes back
restarts the job likewise, and the work since the newest save is done again.

On a static cluster (`StaticRestart`) a job has the same number of nodes at all times: spare nodes
take the places of lost ones, and once they are used up it waits until a node is back.

Source: torch.distributed.elastic, rendezvous/dynamic_rendezvous.py of torch 2: `last_call` is 30 s,
which a rendezvous of `max_nodes` does not wait for; keep_alive_interval is 5 s and
keep_alive_max_attempt 3. The start of processes is `costs.restart_s`. torch.distributed.checkpoint,
_dedup_save_plans.py: of what ranks hold twice the one with the least to write so far writes it.
Differs: the stalls of saves are spread over all iterations.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from planaria.observe.ledger import Category
from planaria.systems.equal_pipelines import (
    EqualPipelines,
    fastest_equal_pipelines,
    pipelines_of_depth,
)
from planaria.systems.modelled_job import ModelledJob, Phase, StoredSaves
from planaria.systems.system import Setting

KEEP_ALIVE_S: Final = 15.0  # 3 keep-alives, each 5 s after the one before, are missed.
LAST_CALL_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Restart:
    """torchrun with a job that saves; implements `System`."""

    @property
    def name(self) -> str:
        """See `System`."""
        return "restart"

    def begin(self, setting: Setting, *, absent: Collection[int] = ()) -> ModelledJob:
        """A job that begins; see `System`."""
        return _job(setting, absent, fixed_nodes=0)


@dataclass(frozen=True, slots=True)
class StaticRestart:
    """torchrun with a job of a fixed number of nodes; implements `System`.

    Attributes:
        num_spares: number of nodes of the cluster that wait to take the places of lost ones.
    """

    num_spares: int = 0

    @property
    def name(self) -> str:
        """See `System`."""
        return "static"

    def begin(self, setting: Setting, *, absent: Collection[int] = ()) -> ModelledJob:
        """A job that begins; see `System`."""
        return _job(setting, absent, fixed_nodes=setting.num_nodes - self.num_spares)


def _job(setting: Setting, absent: Collection[int], *, fixed_nodes: int) -> ModelledJob:
    saves = StoredSaves(every=setting.job.checkpoint.persist_every, write_s=0.0)
    return ModelledJob(setting, _Rendezvous(setting, fixed_nodes), saves, absent=absent)


class _Rendezvous:
    """Starts all processes anew from the newest save; implements `Behaviour`.

    Args:
        fixed_nodes: number of nodes that the job needs to train; 0: as many as are there.
    """

    def __init__(self, setting: Setting, fixed_nodes: int) -> None:
        pipelines = fastest_equal_pipelines(setting, fixed_nodes or setting.num_nodes)
        assert pipelines is not None
        self._setting, self._fixed, self._depth = setting, fixed_nodes, pipelines.depth
        self._in_job: frozenset[int] = frozenset()  # Nodes of the rendezvous; none: it waits.

    def begin(self, job: ModelledJob) -> None:
        """See `Behaviour`."""
        self._take_grid(job, 0.0)

    def on_lost(self, job: ModelledJob, nodes: tuple[int, ...], now_s: float) -> None:
        """See `Behaviour`."""
        if not self._in_job.isdisjoint(nodes):  # Else they are spare, or the job waits.
            self._restart(job, now_s, (Category.DETECT, KEEP_ALIVE_S))

    def on_joined(self, job: ModelledJob, nodes: tuple[int, ...], now_s: float) -> None:
        """See `Behaviour`."""
        del nodes
        if not (self._fixed and self._in_job):
            self._restart(job, now_s)

    def on_notice(self, job: ModelledJob, nodes: tuple[int, ...], deadline_s: float) -> None:
        """See `Behaviour`."""

    def _restart(self, job: ModelledJob, now_s: float, *phases: Phase) -> None:
        job.interrupt(now_s)
        job.go_back_to_save()
        grid = self._take_grid(job, now_s)
        if grid is None:
            job.wait(now_s, *phases)
            return
        load_s = job.load_s(self._setting.node_bytes([grid.template]))
        is_complete = len(self._in_job) == (self._fixed or self._setting.num_nodes)
        last_call_s = 0.0 if is_complete else LAST_CALL_S
        restart = (Category.RESTART, last_call_s + self._setting.costs.restart_s)
        job.go_on(now_s, *phases, restart, (Category.TRANSFER, load_s))

    def _take_grid(self, job: ModelledJob, now_s: float) -> EqualPipelines | None:
        """Has the job train by the grid for the nodes that are there; None if there is none."""
        setting, every = self._setting, job.saves.every
        nodes = sorted(job.members)[: self._fixed or None]
        grid = None
        if len(nodes) >= self._fixed:
            grid = pipelines_of_depth(setting, len(nodes), self._depth)
        self._in_job = frozenset(nodes if grid else ())
        if grid is not None:
            share_bytes = setting.node_bytes([grid.template]) / grid.num_pipelines
            save_s = share_bytes / setting.costs.save_bytes_per_s
            stall_s = save_s / every if every else 0.0
            job.train_at(grid.pace(nodes, stall_s=stall_s), now_s)
        return grid
