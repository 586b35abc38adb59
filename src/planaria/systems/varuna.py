"""Varuna: job morphing. After each change of nodes the job starts anew, from its newest save, with
the grid of pipelines that is the fastest for the nodes that are there.

Nodes beyond width x depth idle. Training waits while a save is made, every ten iterations. A notice
makes it save at once: if the save is complete before the nodes are gone, nothing is done again. It
also saves before it starts anew for nodes that come.

Source: Varuna (EuroSys '22); microsoft/varuna for `dp = G // pp` and the save at a notice. The
seconds of saves and restarts were measured by Oobleck's authors (SymbioticLab/Oobleck, branch
sosp23-artifact, tools/simulator, MIT) on nodes of one A40; for other models they follow from
`[costs]`: `restart_s`, and the bytes of a rank over `save_bytes_per_s`.
Differs: stages are cut so that they take equally long, not by equal numbers of cut-points, and the
microbatch keeps its size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from planaria.observe.ledger import Category
from planaria.systems.grids import fastest_grid
from planaria.systems.system import Setting
from planaria.systems.virtual_job import VirtualRun

SAVE_EVERY: Final = 10  # Oobleck (SOSP '23), section 7.1.


@dataclass(frozen=True, slots=True)
class VarunaTimes:
    """Measured seconds.

    Attributes:
        restart_s: a restart, with the loading of the save.
        save_s: a save.
    """

    restart_s: float
    save_s: float


# By the name of the shipped profile. A restart with BERT-Large took 49 to 112 s, by the number of
# nodes; 76 s is what the simulator of Oobleck's authors takes for other numbers.
TIMES: Final[Mapping[str, VarunaTimes]] = {
    "bert-large": VarunaTimes(76.0, 15.8),
    "gpt2": VarunaTimes(83.0, 11.5),
    "gpt3-350m": VarunaTimes(78.7, 11.2),
    "gpt3-2.7b": VarunaTimes(515.0, 50.0),
    "gpt3-6.7b": VarunaTimes(701.0, 120.0),
}


@dataclass(frozen=True, slots=True)
class Varuna:
    """Varuna; implements `System`."""

    @property
    def name(self) -> str:
        """See `System`."""
        return "varuna"

    def begin(self, setting: Setting) -> "VarunaRun":
        """See `System`."""
        return VarunaRun(setting)


class VarunaRun(VirtualRun):
    """One job; implements `SystemRun`."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, save_every=SAVE_EVERY)
        self._save_s = 0.0
        self._take_grid()

    def lose(self, nodes: tuple[int, ...], now_s: float) -> None:
        """See `SystemRun`."""
        self._remove(nodes, now_s)
        self._job.go_back()
        self._restart(self._setting.costs.detect_s)

    def take_back(self, nodes: tuple[int, ...], now_s: float) -> None:
        """See `SystemRun`."""
        self._add(nodes, now_s)
        if self._job.is_pausing:
            self._job.interrupt()
            self._job.go_back()
            self._restart(self._setting.costs.node_start_s)
        else:
            self._job.at_commit(self._morph)

    def give_notice(self, nodes: tuple[int, ...], now_s: float, *, deadline_s: float) -> None:
        """Saves at the next commit, if that may be in time; see `SystemRun`."""
        del nodes
        self.run_until(now_s)
        if self._save_s >= deadline_s - now_s:
            return
        if self._job.is_pausing:
            self._job.pause(Category.CHECKPOINT_STALL, 0.0, partial(self._save_by, deadline_s))
        else:
            self._job.at_commit(partial(self._save_by, deadline_s))

    def _save_by(self, deadline_s: float) -> None:
        """Saves, and waits for the loss: what is trained after the save would be lost."""
        left_s = deadline_s - self.account.now_s
        if self.account.num_iterations > self._job.saved:
            left_s -= self._save_s
            if left_s < 0.0:
                return
            self._job.save_now()
        self._job.pause(Category.IDLE, left_s)

    def _morph(self) -> None:
        """Saves and starts anew with more nodes."""
        self._job.save_now()
        self._restart(0.0)

    def _restart(self, noticed_s: float) -> None:
        rank_bytes = self._take_grid()
        if not rank_bytes:
            return
        self.account.num_restarts += 1
        costs, times = self._setting.costs, TIMES.get(self._setting.model)
        loading_s = rank_bytes / costs.save_bytes_per_s
        self._job.pause(Category.DETECT, noticed_s)
        self._job.pause(Category.RESTART, times.restart_s if times else costs.restart_s + loading_s)

    def _take_grid(self) -> int:
        """Has the job train by the best grid of the nodes that are there; bytes of its largest
        rank."""
        grid = fastest_grid(self._setting, len(self._machines.there))
        times = TIMES.get(self._setting.model)
        saving_s = grid.rank_bytes / self._setting.costs.save_bytes_per_s
        self._save_s = times.save_s if times else saving_s
        self._job.train_by(grid.iteration_s, save_s=self._save_s, idle=grid.idle)
        self._job.slow_down(self._machines.slowness)
        return grid.rank_bytes
