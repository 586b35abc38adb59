"""Saves to remote storage, and restarts from them, as Strawman and HighFreq do both.

Each node serialises its state, for which training stands still, and sends it beside training. After
a loss the job waits until all lost nodes are replaced. Then all of them start, load the newest
complete save and train again from there.

Source: Gemini (SOSP '23), section 7.3 and figure 14: phases of a recovery, and 81 s to serialise
9.4 GB a device, taken as a speed.
Differs: the speed of the storage is the scenario's, not the paper's 20 Gb/s; nodes are replaced
when the scenario says so, not after 4 to 7 minutes. The model is trained by the plan that all
systems begin with, not by ZeRO-3. Nodes without a place in the plan are standby nodes.
"""

from collections.abc import Collection
from dataclasses import replace
from math import ceil
from typing import Final

from planaria.core.plan import Plan
from planaria.observe.ledger import Category
from planaria.systems.modelled_job import (
    ModelledJob,
    Pace,
    Places,
    StoredSaves,
    bytes_by_place,
    remote_s,
)
from planaria.systems.system import Setting

DETECT_S: Final = 15.0
WARM_UP_S: Final = 4 * 60.0  # "4 minutes and more".
SERIALISE_BYTES_PER_S: Final = 1.2e12 / 128 / 81.0  # Of each device.


def serialise_s(setting: Setting) -> float:
    """Seconds in which every device serialises one copy of its share of the state."""
    num_devices = setting.num_nodes * setting.job.cluster.devices_per_node
    return sum(setting.layer_bytes) / num_devices / SERIALISE_BYTES_PER_S


def begin_with_remote_saves(
    setting: Setting, absent: Collection[int], *, interval_s: float, stall_s: float
) -> ModelledJob:
    """A job with saves to remote storage.

    Args:
        absent: nodes that are not there at the start.
        interval_s: lower bound on the seconds of training between two saves.
        stall_s: seconds for which training stands still for a save.
    """
    every = max(1, ceil(interval_s / setting.failure_free_s - 1e-9))
    behaviour = _RemoteSaves(setting, stall_s / every)
    saves = StoredSaves(every=every, write_s=remote_s(setting))
    return ModelledJob(setting, behaviour, saves, absent=absent)


def restart_if_full(
    job: ModelledJob, places: Places, now_s: float, *, pace: Pace, move_s: float
) -> None:
    """Starts a job anew once nodes that wait fill all places.

    Args:
        pace: pace at which the job trains; its nodes are replaced by those at the places.
        move_s: seconds in which nodes get their layers.
    """
    places.fill(tuple(job.members))
    if not places.empty:
        job.train_at(replace(pace, nodes=places.at_work), now_s)
        job.go_on(now_s, (Category.RESTART, WARM_UP_S), (Category.TRANSFER, move_s))


class _RemoteSaves:
    """Restarts from remote storage once all places are filled; implements `Behaviour`.

    Args:
        stall_s: seconds of each iteration, on average, in which training stands still for saves.
    """

    def __init__(self, setting: Setting, stall_s: float) -> None:
        self._plan: Plan = setting.catalog.plans[setting.num_nodes]
        self._places = Places(len(self._plan.nodes), range(setting.num_nodes))
        self._pace = Pace(
            iteration_s=setting.failure_free_s, stall_s=stall_s, nodes=self._places.at_work
        )
        self._place_bytes = max(bytes_by_place(setting, self._plan))

    def begin(self, job: ModelledJob) -> None:
        """See `Behaviour`."""
        self._places.drop(job.absent)
        if not self._places.empty:
            job.train_at(self._pace, 0.0)

    def on_lost(self, job: ModelledJob, nodes: tuple[int, ...], now_s: float) -> None:
        """See `Behaviour`."""
        if not self._places.drop(nodes):
            return
        job.interrupt(now_s)
        job.go_back_to_save()
        job.wait(now_s, (Category.DETECT, DETECT_S))
        self._restart_if_full(job, now_s)

    def on_joined(self, job: ModelledJob, nodes: tuple[int, ...], now_s: float) -> None:
        """See `Behaviour`."""
        del nodes
        if job.is_waiting:
            self._restart_if_full(job, now_s)

    def on_notice(self, job: ModelledJob, nodes: tuple[int, ...], deadline_s: float) -> None:
        """See `Behaviour`."""

    def _restart_if_full(self, job: ModelledJob, now_s: float) -> None:
        load_s = job.load_s(self._place_bytes)
        restart_if_full(job, self._places, now_s, pace=self._pace, move_s=load_s)
