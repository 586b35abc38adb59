"""Restart from a checkpoint, as torchrun does it: whatever changes, all processes start anew.

The pipelines keep the depth that is the fastest on all nodes; there are as many of them as nodes
allow, and the rest of the nodes idle. Each save keeps all ranks waiting while they write. A lost
node is noticed when it has sent no keep-alive for long enough; then the rendezvous waits for late
comers, processes start, and load the newest save. A node that comes back restarts the job likewise,
and the work since the newest save is done again.

On a static cluster (`StaticRestart`) a job has the same number of nodes at all times: spare nodes
take the places of lost ones, and once they are used up it waits until a node is back.

Source: torch.distributed.elastic, rendezvous/dynamic_rendezvous.py of torch 2: `last_call` is 30 s,
keep_alive_interval 5 s and keep_alive_max_attempt 3. The start of processes is `costs.restart_s`.
"""

from dataclasses import dataclass
from typing import Final

from planaria.observe.ledger import Category
from planaria.policies.morph import grid_templates
from planaria.systems.grids import NO_GRID, grid_of_depth
from planaria.systems.system import Setting
from planaria.systems.virtual_job import VirtualRun

KEEP_ALIVE_S: Final = 15.0  # 3 keep-alives, each 5 s after the one before, are missed.
LAST_CALL_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Restart:
    """torchrun with a job that saves; implements `System`."""

    @property
    def name(self) -> str:
        """See `System`."""
        return "restart"

    def begin(self, setting: Setting) -> "RestartRun":
        """See `System`."""
        return RestartRun(setting)


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

    def begin(self, setting: Setting) -> "RestartRun":
        """See `System`."""
        return RestartRun(setting, fixed_nodes=setting.num_nodes - self.num_spares)


class RestartRun(VirtualRun):
    """One job; implements `SystemRun`.

    Args:
        fixed_nodes: number of nodes that the job needs to train; 0: as many as are there.
    """

    def __init__(self, setting: Setting, *, fixed_nodes: int = 0) -> None:
        super().__init__(setting, save_every=setting.job.checkpoint.persist_every)
        self._fixed = fixed_nodes
        self._at_work: frozenset[int] = frozenset()
        num_nodes = fixed_nodes or setting.num_nodes
        self._depth = grid_templates(setting.catalog, num_nodes)[0].num_nodes
        self._take_grid()

    def lose(self, nodes: tuple[int, ...], now_s: float) -> None:
        """See `SystemRun`."""
        if self._at_work.isdisjoint(nodes):  # Spare nodes, or the job waits.
            self.run_until(now_s)
            self.account.num_failures += 1
            self._machines.remove(nodes)
            return
        self._remove(nodes, now_s)
        self._restart(now_s, noticed_s=KEEP_ALIVE_S)

    def take_back(self, nodes: tuple[int, ...], now_s: float) -> None:
        """See `SystemRun`."""
        self._add(nodes, now_s)
        if not (self._fixed and self._at_work):
            self._restart(now_s, noticed_s=self._setting.costs.node_start_s)

    def give_notice(self, nodes: tuple[int, ...], now_s: float, *, deadline_s: float) -> None:
        """Nobody listens; see `SystemRun`."""
        del nodes, deadline_s
        self.run_until(now_s)

    def _restart(self, now_s: float, *, noticed_s: float) -> None:
        """Starts all processes anew, from the newest save."""
        costs = self._setting.costs
        self._job.lose_in_flight(now_s)
        self._job.interrupt()
        self._job.go_back()
        rank_bytes = self._take_grid()
        self._job.slow_down(self._machines.slowness)
        if rank_bytes:
            self.account.num_restarts += 1
            self._job.pause(Category.DETECT, noticed_s)
            start_s = LAST_CALL_S + costs.restart_s + rank_bytes / costs.save_bytes_per_s
            self._job.pause(Category.RESTART, start_s)

    def _take_grid(self) -> int:
        """Has the job train by the grid for the nodes that are there; bytes of its largest rank."""
        there = self._machines.there
        number = self._fixed or len(there)
        can_train = number <= len(there)
        grid = grid_of_depth(self._setting, number, self._depth) if can_train else NO_GRID
        self._at_work = frozenset(there[:number] if grid.rank_bytes else ())
        save_s = grid.rank_bytes / self._setting.costs.save_bytes_per_s
        self._job.train_by(grid.iteration_s, save_s=save_s, idle=grid.idle)
        return grid.rank_bytes
