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
microbatch keeps its size. The stalls of saves are spread over all iterations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from planaria.observe.ledger import Category
from planaria.systems.equal_pipelines import EqualPipelines, fastest_equal_pipelines
from planaria.systems.modelled_job import ModelledJob, Phase, StoredSaves
from planaria.systems.system import Setting

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

    def begin(self, setting: Setting) -> ModelledJob:
        """A job that begins; see `System`."""
        return ModelledJob(setting, _Morphing(setting), StoredSaves(every=SAVE_EVERY, write_s=0.0))


class _Morphing:
    """Starts anew with the fastest grid; implements `Behaviour`."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._times = TIMES.get(setting.model)
        self._save_s = 0.0

    def begin(self, job: ModelledJob) -> None:
        """See `Behaviour`."""
        self._take_grid(job, 0.0)

    def on_lost(self, job: ModelledJob, nodes: tuple[int, ...], now_s: float) -> None:
        """See `Behaviour`."""
        del nodes
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
        """Saves at the next commit, if that may be in time; see `Behaviour`."""
        del nodes
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
        """Saves, and waits for the loss: what is trained after the save would be lost."""
        is_saved = job.account.num_iterations == job.saves.newest
        left_s = deadline_s - now_s - (0.0 if is_saved else self._save_s)
        if left_s >= 0.0:
            job.go_on(now_s, self._save(job, now_s), (Category.IDLE, left_s))

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
        costs = self._setting.costs
        load_s = self._setting.rank_bytes([grid.template]) / costs.save_bytes_per_s
        restart_s = self._times.restart_s if self._times else costs.restart_s + load_s
        job.go_on(now_s, *phases, (Category.RESTART, restart_s))

    def _take_grid(self, job: ModelledJob, now_s: float) -> EqualPipelines | None:
        """Has the job train by the fastest grid of the nodes that are there; None if there is
        none."""
        setting = self._setting
        grid = fastest_equal_pipelines(setting, len(job.members))
        if grid is None:
            return None
        save_s = setting.rank_bytes([grid.template]) / setting.costs.save_bytes_per_s
        self._save_s = self._times.save_s if self._times else save_s
        job.train_at(grid.pace(job.members, stall_s=self._save_s / SAVE_EVERY), now_s)
        return grid
