"""Varuna: job morphing. After each change of nodes the job starts anew, from its newest save, with
the grid of pipelines that is the fastest for the nodes that are there.

Nodes beyond width x depth idle. Training waits while a save is made. The time between saves is
Young's optimum by the losses so far, and before the first loss that of the job. A notice makes it
save besides, so that the save is complete when the nodes are gone: then little is done again. It
also saves before it starts anew for nodes that come.

Source: Varuna (EuroSys '22); microsoft/varuna for `dp = G // pp` and the save at a notice. Young,
"A first order approximation to the optimum checkpoint interval" (1974): sqrt(2 x seconds of a save
x mean time between losses). Saves and restarts follow from `[costs]`: `restart_s`, and the bytes of
a node over `save_bytes_per_s`; replicas save a share of their state each (`shard` in Varuna).
Differs: stages are cut so that they take equally long, not by equal numbers of cut-points, and the
microbatch keeps its size. Training goes on once a save is in storage, not once it is on a local
disk from which it is copied later. The stalls of saves are spread over all iterations. Oobleck
(SOSP '23, section 7.1) has it save every ten iterations; there these take 81 s to half an hour, by
model, and a save 6% to 14% of that. Seconds that its authors measured are in papers/oobleck, with
the rates of the same devices.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Final

from planaria.observe.ledger import Category
from planaria.systems.equal_pipelines import EqualPipelines, fastest_equal_pipelines
from planaria.systems.modelled_job import ModelledJob, Phase, StoredSaves
from planaria.systems.system import Setting

# Age of a job at which it first thinks over how often it saves; then at each doubling.
_REVIEW_S: Final = 600.0
_ROUNDING_S: Final = 1e-6  # By which a save may seem to be late.


@dataclass(frozen=True, slots=True)
class Varuna:
    """Varuna; implements `System`."""

    @property
    def name(self) -> str:
        """See `System`."""
        return "varuna"

    def begin(self, setting: Setting, *, absent: Collection[int] = ()) -> ModelledJob:
        """A job that begins; see `System`."""
        saves = StoredSaves(every=setting.job.checkpoint.persist_every, write_s=0.0)
        return ModelledJob(setting, _Morphing(setting), saves, absent=absent)


class _Morphing:
    """Starts anew with the fastest grid; implements `Behaviour`."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._grid: EqualPipelines | None = None  # None: too few nodes are there.
        self._nodes: tuple[int, ...] = ()  # Nodes that were there when it was taken.
        self._save_s = 0.0
        self._num_losses = 0

    def begin(self, job: ModelledJob) -> None:
        """See `Behaviour`."""
        self._take_grid(job, 0.0)
        job.post(_REVIEW_S, partial(self._review, job))

    def on_lost(self, job: ModelledJob, nodes: tuple[int, ...], now_s: float) -> None:
        """See `Behaviour`."""
        del nodes
        self._num_losses += 1
        self._fall_back(job, now_s, (Category.DETECT, self._setting.costs.detect_s))

    def on_joined(self, job: ModelledJob, nodes: tuple[int, ...], now_s: float) -> None:
        """See `Behaviour`."""
        del nodes
        if job.is_training:
            job.at_commit(partial(self._morph, job))
        elif left_s := job.saves.left_s(now_s):
            self._morph_after_save(job, now_s, left_s)
        else:
            self._fall_back(job, now_s)

    def on_notice(self, job: ModelledJob, nodes: tuple[int, ...], deadline_s: float) -> None:
        """Trains on until the last commit after which a save is in time; see `Behaviour`."""
        del nodes
        last_s = deadline_s - self._save_s - job.iteration_s
        job.post(last_s, partial(self._save_soon, job, deadline_s))

    def _save_soon(self, job: ModelledJob, deadline_s: float, _now_s: float) -> None:
        """Saves at the next commit, if that may be in time."""
        if not job.is_waiting:
            job.at_commit(partial(self._save_by, job, deadline_s))

    def _fall_back(self, job: ModelledJob, now_s: float, *phases: Phase) -> None:
        """Starts anew from the newest save."""
        job.interrupt(now_s)
        job.go_back_to_save()
        self._restart(job, now_s, *phases)

    def _morph(self, job: ModelledJob, now_s: float) -> None:
        """Saves and starts anew with more nodes."""
        save = self._save(job, now_s)
        job.end()
        self._restart(job, now_s, save)

    def _morph_after_save(self, job: ModelledJob, now_s: float, left_s: float) -> None:
        """Starts anew as soon as the save that is being written is complete."""
        job.interrupt(now_s)
        job.saves.begin(job.account.num_iterations, now_s, write_s=left_s)
        job.end()
        self._restart(job, now_s, (Category.CHECKPOINT_STALL, left_s))

    def _save_by(self, job: ModelledJob, deadline_s: float, now_s: float) -> None:
        """Saves if that is in time, and waits for the loss: what is trained after the save would be
        lost."""
        is_saved = job.account.num_iterations == job.saves.newest
        left_s = deadline_s - now_s - (0.0 if is_saved else self._save_s)
        if left_s >= -_ROUNDING_S:
            job.go_on(now_s, self._save(job, now_s), (Category.IDLE, max(0.0, left_s)))

    def _save(self, job: ModelledJob, now_s: float) -> Phase:
        """Begins a save of what is not saved, for which training waits."""
        job.pause(now_s)
        num_committed = job.account.num_iterations
        save_s = self._save_s if num_committed > job.saves.newest else 0.0
        job.saves.begin(num_committed, now_s, write_s=save_s)
        return (Category.CHECKPOINT_STALL, save_s)

    def _restart(self, job: ModelledJob, now_s: float, *phases: Phase) -> None:
        grid = self._take_grid(job, now_s)
        if grid is None:
            job.wait(now_s, *phases)
            return
        load_s = job.load_s(self._setting.node_bytes([grid.template]))
        restart = (Category.RESTART, self._setting.costs.restart_s)
        job.go_on(now_s, *phases, restart, (Category.TRANSFER, load_s))

    def _take_grid(self, job: ModelledJob, now_s: float) -> EqualPipelines | None:
        """Has the job train by the fastest grid of the nodes that are there; None if there is
        none."""
        setting = self._setting
        self._grid = fastest_equal_pipelines(setting, len(job.members))
        self._nodes = tuple(job.members)
        self._train(job, now_s)
        return self._grid

    def _train(self, job: ModelledJob, now_s: float) -> None:
        """Has the job train by the grid, and save as often as is best."""
        grid, setting = self._grid, self._setting
        if grid is None:
            return
        node_bytes = setting.node_bytes([grid.template])
        self._save_s = node_bytes / grid.num_pipelines / setting.costs.save_bytes_per_s
        if self._num_losses:
            interval_s = sqrt(2.0 * self._save_s * now_s / self._num_losses)
            job.saves.every = max(1, round(interval_s / grid.iteration_s))
        every = job.saves.every
        stall_s = self._save_s / every if every else 0.0
        job.train_at(grid.pace(self._nodes, stall_s=stall_s), now_s)

    def _review(self, job: ModelledJob, now_s: float) -> None:
        """Saves less often if no loss came; thinks that over when the job is twice as old."""
        self._train(job, now_s)
        job.post(2.0 * now_s, partial(self._review, job))
