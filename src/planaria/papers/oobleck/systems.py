"""Oobleck, Varuna and Bamboo as the simulator of Oobleck's authors runs them.

Times are milliseconds. What each system's times are spent on is counted as that simulator does,
since Figure 11 is made of these counts:

- Oobleck and Varuna count a step as training when it begins, so also a step that is lost.
- A loss costs Oobleck and Bamboo one step, whenever it happens.
- A loss costs Varuna the present time of a step for each end of a step since the last save, twice
  for every step but the first.

Source: SymbioticLab/Oobleck, branch sosp23-artifact, tools/simulator (MIT).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from planaria.papers.oobleck.replay import Replay, ReplayNode, Status

_STANDSTILL_MS: Final = 10**12  # Time of a step on nodes that cannot hold the model.
_FALLBACK_SLOWDOWN: Final = 1.5  # bamboo_simulator.py: a step in which a neighbour takes over.
_BAMBOO_FULL_MEETING_MS: Final = 30_000


@dataclass(frozen=True, slots=True)
class Rates:
    """The measured speed of a system with a model.

    Attributes:
        samples_per_step: number of samples of a step.
        samples_per_s: rates on 30, 29, .. 15 nodes.
    """

    samples_per_step: float
    samples_per_s: tuple[float, ...]

    def step_ms(self, num_nodes: int) -> int:
        """Time of a step on so many nodes."""
        rate = self.samples_per_s[30 - max(15, min(30, num_nodes))]
        return int(self.samples_per_step / rate * 1000) if rate else _STANDSTILL_MS


@dataclass(slots=True)
class OobleckSystem:
    """Oobleck: a loss costs the present step and a constant time, and no restart.

    Attributes:
        reconfiguration_ms: time in which pipelines are formed anew.
    """

    rates: Rates
    reconfiguration_ms: int

    @property
    def samples_per_step(self) -> float:
        """Number of samples of a step."""
        return self.rates.samples_per_step

    def step_ms(self, num_nodes: int) -> int:
        """Time of a step on so many nodes."""
        return self.rates.step_ms(num_nodes)

    def begin_meeting(self, run: Replay) -> None:
        """Forms pipelines."""
        run.spent_ms["reconfigure"] += self.reconfiguration_ms
        run.meet(self.reconfiguration_ms)

    def on_removed(self, run: Replay, node: ReplayNode) -> None:
        """Forms pipelines anew."""
        del node
        run.spent_ms["fallback"] += run.step_ms
        self.begin_meeting(run)

    def on_step_end(self, run: Replay) -> None:
        """Goes on."""
        run.record_step()
        run.begin_step(run.now_ms)


@dataclass(slots=True)
class VarunaSystem:
    """Varuna: a loss costs all steps since the last save, and a restart.

    It saves every few steps, and after the first step that ends after a loss. A save fails if a
    node is lost before it ends, and then the steps that it was to save are lost.

    Attributes:
        restart_ms: time of a restart, by the number of nodes at the last one; `restart_ms[0]` is
            the time for every other number.
        save_ms: time in which training stands still for a save; a restart takes so much less.
        steps_per_save: number of steps between saves.
        has_free_saves: whether saves take no time and never fail.
        has_notices: whether a notice lets it save all steps before a node is lost.
        idle_nodes: numbers of nodes that its grid leaves idle, by the number of nodes.
    """

    rates: Rates
    restart_ms: Mapping[int, int]
    save_ms: int
    steps_per_save: int = 10
    has_free_saves: bool = False
    has_notices: bool = False
    idle_nodes: Mapping[int, int] = field(default_factory=dict)
    _nodes_at_restart: int = 0
    _num_steps: int = 0
    _num_saved: int | None = None  # Number of recorded steps at the last save.
    _is_save_due: bool = False

    @property
    def samples_per_step(self) -> float:
        """Number of samples of a step."""
        return self.rates.samples_per_step

    def step_ms(self, num_nodes: int) -> int:
        """Time of a step on so many nodes, which have just restarted."""
        self._nodes_at_restart = max(15, min(30, num_nodes))
        return self.rates.step_ms(num_nodes)

    def begin_meeting(self, run: Replay) -> None:
        """Restarts."""
        time_ms = self.restart_ms.get(self._nodes_at_restart, self.restart_ms[0]) - self.save_ms
        run.spent_ms["restart"] += time_ms
        run.meet(time_ms)

    def on_removed(self, run: Replay, node: ReplayNode) -> None:
        """Goes back to the last save, and restarts."""
        del node
        self._is_save_due = True
        if not self.has_notices:
            self._lose_steps(run)
        self.begin_meeting(run)

    def on_step_end(self, run: Replay) -> None:
        """Saves if it is time to, and goes on."""
        run.record_step()
        num_idle = self.idle_nodes.get(self._nodes_at_restart, 0)
        num_ready = sum(node.is_ready for node in run.nodes.values())
        run.spent_ms["idle"] += (run.now_ms - run.steps[-1].start_ms) * num_idle / num_ready
        self._num_steps += 1
        if self._num_steps % self.steps_per_save == 0 or self._is_save_due:
            self._is_save_due = False
            self._save(run)
        run.begin_step(run.step_start_ms)

    def _lose_steps(self, run: Replay) -> None:
        if self._num_saved is None:
            run.spent_ms["fallback"] += run.now_ms
        else:
            num_ends = 2 * (len(run.steps) - self._num_saved) - (not self.has_free_saves)
            run.spent_ms["fallback"] += run.step_ms * max(0, num_ends)
        for step in run.steps[self._num_saved or 0 :]:
            step.is_counted = False

    def _save(self, run: Replay) -> None:
        if not self.has_free_saves:
            run.spent_ms["save"] += self.save_ms
            run.step_start_ms += self.save_ms
            # In the authors' simulator a save can fail for twice its time.
            if run.fails_save(run.step_start_ms + self.save_ms) and not self.has_notices:
                self._fail_save(run)
                return
        self._num_saved = len(run.steps)

    def _fail_save(self, run: Replay) -> None:
        run.spent_ms["fallback"] += self.steps_per_save * run.step_ms
        self._num_steps = max(0, self._num_steps - self.steps_per_save)
        for step in run.steps[-self.steps_per_save :]:
            step.is_counted = False


@dataclass(slots=True)
class BambooSystem:
    """Bamboo: a node takes over its lost neighbour's stage, at the price of redundant work.

    A node that has taken over cannot be lost, nor take over again: then all nodes meet. After a
    step nodes change places if enough of them wait, if too many have two stages, or if another
    pipeline fits.

    Attributes:
        rebalance_ms: time in which nodes change places.
    """

    rates: Rates
    rebalance_ms: int
    _num_steps: int = 0
    # Numbers of steps and the time at the first loss since the last meeting.
    _loss: tuple[int, int] | None = None
    _is_loss_paid: bool = False

    @property
    def samples_per_step(self) -> float:
        """Number of samples of a step."""
        return self.rates.samples_per_step

    def step_ms(self, num_nodes: int) -> int:
        """Time of a step on so many nodes, which have just met."""
        self._loss, self._is_loss_paid = None, False
        return self.rates.step_ms(num_nodes)

    def begin_meeting(self, run: Replay) -> None:
        """Restarts, as after a loss that no neighbour can take over."""
        run.spent_ms["restart"] += _BAMBOO_FULL_MEETING_MS
        run.meet(_BAMBOO_FULL_MEETING_MS)

    def on_removed(self, run: Replay, node: ReplayNode) -> None:
        """Lets the neighbour take over, if it can."""
        run.spent_ms["fallback"] += run.step_ms
        if node.places and not self._is_taken_over(run, node):
            self.begin_meeting(run)
        elif run.status is Status.RUNNING and self._loss is None:
            self._loss = self._num_steps, run.now_ms
            run.step_ms = int(run.step_ms * _FALLBACK_SLOWDOWN)

    def on_step_end(self, run: Replay) -> None:
        """Lengthens the step in which a node was lost, or goes on."""
        if self._loss is not None and not self._is_loss_paid and self._loss[0] == self._num_steps:
            self._is_loss_paid = True
            delay_ms = int((run.now_ms - self._loss[1]) * (_FALLBACK_SLOWDOWN - 1.0))
            run.end_step_at(run.now_ms + delay_ms)
            return
        self._num_steps += 1
        run.record_step()
        if self._wants_other_places(run):
            run.spent_ms["rebalance"] += self.rebalance_ms
            run.meet(self.rebalance_ms)
        else:
            run.begin_step(run.now_ms)

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
