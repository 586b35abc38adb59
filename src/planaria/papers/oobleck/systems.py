"""Oobleck, Varuna and Bamboo as the simulator of Oobleck's authors runs them.

Times are milliseconds. What each system's times are spent on is counted as that simulator does,
since Figure 11 is made of these counts:

- Oobleck and Varuna count an iteration as training when it begins, so also one that is lost.
- A loss costs Oobleck and Bamboo one iteration, whenever it happens.
- A loss costs Varuna the present time of an iteration for each one that ended since the last save,
  twice for every one but the first.

Source: SymbioticLab/Oobleck, branch sosp23-artifact, tools/simulator (MIT).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from planaria.papers.oobleck.replay import Replay, ReplayNode, Status

_STANDSTILL_MS: Final = 10**12  # Time of an iteration on nodes that cannot hold the model.
_FALLBACK_SLOWDOWN: Final = (
    1.5  # bamboo_simulator.py: an iteration in which a neighbour takes over.
)
_BAMBOO_FULL_REGROUP_MS: Final = 30_000


@dataclass(frozen=True, slots=True)
class Rates:
    """The measured speed of a system with a model.

    Attributes:
        samples_per_iteration: number of samples of an iteration.
        samples_per_s: rates on 30, 29, .. 15 nodes.
    """

    samples_per_iteration: float
    samples_per_s: tuple[float, ...]

    def iteration_ms(self, num_nodes: int) -> int:
        """Time of an iteration on so many nodes."""
        rate = self.samples_per_s[30 - max(15, min(30, num_nodes))]
        return int(self.samples_per_iteration / rate * 1000) if rate else _STANDSTILL_MS


@dataclass(slots=True)
class OobleckSystem:
    """Oobleck: a loss costs the present iteration and a constant time, and no restart.

    Attributes:
        reconfiguration_ms: time in which pipelines are formed anew.
    """

    rates: Rates
    reconfiguration_ms: int

    @property
    def samples_per_iteration(self) -> float:
        """Number of samples of an iteration."""
        return self.rates.samples_per_iteration

    def iteration_ms(self, num_nodes: int) -> int:
        """Time of an iteration on so many nodes."""
        return self.rates.iteration_ms(num_nodes)

    def regroup(self, run: Replay) -> None:
        """Forms pipelines."""
        run.spent_ms["reconfigure"] += self.reconfiguration_ms
        run.regroup_for(self.reconfiguration_ms)

    def on_removed(self, run: Replay, node: ReplayNode) -> None:
        """Forms pipelines anew."""
        del node
        run.spent_ms["fallback"] += run.iteration_ms
        self.regroup(run)

    def on_iteration_end(self, run: Replay) -> None:
        """Goes on."""
        run.record_iteration()
        run.begin_iteration(run.now_ms)


@dataclass(slots=True)
class VarunaSystem:
    """Varuna: a loss costs all iterations since the last save, and a restart.

    It saves every few iterations, and after the first one that ends after a loss. A save fails if a
    node is lost before it ends, and then the iterations that it was to save are lost.

    Attributes:
        restart_ms: time of a restart, by the number of nodes at the last one; `restart_ms[0]` is
            the time for every other number.
        save_ms: time in which training stands still for a save; a restart takes so much less.
        iterations_per_save: number of iterations between saves.
        has_free_saves: whether saves take no time and never fail.
        has_notices: whether a notice lets it save all iterations before a node is lost.
        idle_nodes: numbers of nodes that its grid leaves idle, by the number of nodes.
    """

    rates: Rates
    restart_ms: Mapping[int, int]
    save_ms: int
    iterations_per_save: int = 10
    has_free_saves: bool = False
    has_notices: bool = False
    idle_nodes: Mapping[int, int] = field(default_factory=dict)
    _nodes_at_restart: int = 0
    _num_iterations: int = 0
    _num_saved: int | None = None  # Number of recorded iterations at the last save.
    _is_save_due: bool = False

    @property
    def samples_per_iteration(self) -> float:
        """Number of samples of an iteration."""
        return self.rates.samples_per_iteration

    def iteration_ms(self, num_nodes: int) -> int:
        """Time of an iteration on so many nodes, which have just restarted."""
        self._nodes_at_restart = max(15, min(30, num_nodes))
        return self.rates.iteration_ms(num_nodes)

    def regroup(self, run: Replay) -> None:
        """Restarts."""
        time_ms = self.restart_ms.get(self._nodes_at_restart, self.restart_ms[0]) - self.save_ms
        run.spent_ms["restart"] += time_ms
        run.regroup_for(time_ms)

    def on_removed(self, run: Replay, node: ReplayNode) -> None:
        """Goes back to the last save, and restarts."""
        del node
        self._is_save_due = True
        if not self.has_notices:
            self._lose_iterations(run)
        self.regroup(run)

    def on_iteration_end(self, run: Replay) -> None:
        """Saves if it is time to, and goes on."""
        run.record_iteration()
        num_idle = self.idle_nodes.get(self._nodes_at_restart, 0)
        num_ready = sum(node.is_ready for node in run.nodes.values())
        run.spent_ms["idle"] += (run.now_ms - run.iterations[-1].start_ms) * num_idle / num_ready
        self._num_iterations += 1
        if self._num_iterations % self.iterations_per_save == 0 or self._is_save_due:
            self._is_save_due = False
            self._save(run)
        run.begin_iteration(run.iteration_start_ms)

    def _lose_iterations(self, run: Replay) -> None:
        if self._num_saved is None:
            run.spent_ms["fallback"] += run.now_ms
        else:
            num_ends = 2 * (len(run.iterations) - self._num_saved) - (not self.has_free_saves)
            run.spent_ms["fallback"] += run.iteration_ms * max(0, num_ends)
        for iteration in run.iterations[self._num_saved or 0 :]:
            iteration.is_counted = False

    def _save(self, run: Replay) -> None:
        if not self.has_free_saves:
            run.spent_ms["save"] += self.save_ms
            run.iteration_start_ms += self.save_ms
            # In the authors' simulator a save can fail for twice its time.
            if run.fails_save(run.iteration_start_ms + self.save_ms) and not self.has_notices:
                self._fail_save(run)
                return
        self._num_saved = len(run.iterations)

    def _fail_save(self, run: Replay) -> None:
        run.spent_ms["fallback"] += self.iterations_per_save * run.iteration_ms
        self._num_iterations = max(0, self._num_iterations - self.iterations_per_save)
        for iteration in run.iterations[-self.iterations_per_save :]:
            iteration.is_counted = False


@dataclass(slots=True)
class BambooSystem:
    """Bamboo: a node takes over its lost neighbour's stage, at the price of redundant work.

    A node that has taken over cannot be lost, nor take over again: then all nodes regroup. After an
    iteration nodes change places if enough of them wait, if too many have two stages, or if another
    pipeline fits.

    Attributes:
        rebalance_ms: time in which nodes change places.
    """

    rates: Rates
    rebalance_ms: int
    _num_iterations: int = 0
    # Numbers of iterations and the time at the first loss since the last regrouping.
    _loss: tuple[int, int] | None = None
    _is_loss_paid: bool = False

    @property
    def samples_per_iteration(self) -> float:
        """Number of samples of an iteration."""
        return self.rates.samples_per_iteration

    def iteration_ms(self, num_nodes: int) -> int:
        """Time of an iteration on so many nodes, which have just regrouped."""
        self._loss, self._is_loss_paid = None, False
        return self.rates.iteration_ms(num_nodes)

    def regroup(self, run: Replay) -> None:
        """Restarts, as after a loss that no neighbour can take over."""
        run.spent_ms["restart"] += _BAMBOO_FULL_REGROUP_MS
        run.regroup_for(_BAMBOO_FULL_REGROUP_MS)

    def on_removed(self, run: Replay, node: ReplayNode) -> None:
        """Lets the neighbour take over, if it can."""
        run.spent_ms["fallback"] += run.iteration_ms
        if node.places and not self._is_taken_over(run, node):
            self.regroup(run)
        elif run.status is Status.RUNNING and self._loss is None:
            self._loss = self._num_iterations, run.now_ms
            run.iteration_ms = int(run.iteration_ms * _FALLBACK_SLOWDOWN)

    def on_iteration_end(self, run: Replay) -> None:
        """Lengthens the iteration in which a node was lost, or goes on."""
        if (
            self._loss is not None
            and not self._is_loss_paid
            and self._loss[0] == self._num_iterations
        ):
            self._is_loss_paid = True
            delay_ms = int((run.now_ms - self._loss[1]) * (_FALLBACK_SLOWDOWN - 1.0))
            run.end_iteration_at(run.now_ms + delay_ms)
            return
        self._num_iterations += 1
        run.record_iteration()
        if self._wants_other_places(run):
            run.spent_ms["rebalance"] += self.rebalance_ms
            run.regroup_for(self.rebalance_ms)
        else:
            run.begin_iteration(run.now_ms)

    def _is_taken_over(self, run: Replay, node: ReplayNode) -> bool:
        if len(node.places) > 1:
            return False
        pipeline, stage = node.places[0]
        before = pipeline, (stage - 1) % run.stages
        for neighbour in run.nodes.values():
            if before in neighbour.places:
                if len(neighbour.places) > 1:
                    return False
                neighbour.places.append((pipeline, stage))
                break
        return True

    def _wants_other_places(self, run: Replay) -> bool:
        num_double = sum(len(node.places) > 1 for node in run.nodes.values())
        num_active = run.num_pipelines * run.stages - num_double
        is_enough = 0 < num_double <= run.num_waiting
        is_risky = num_double > 0 and 2 * num_double / num_active > 0.05
        return (
            is_enough
            or is_risky
            or (num_active + run.num_waiting) // run.stages > run.num_pipelines
        )
