"""Gemini: copies of the state in the memory of other nodes, after each iteration.

1. Nodes keep their own state and that of k - 1 others in the memory of the host (algorithm 1). A
   copy travels while the next iteration computes, and costs training nothing. If it takes longer
   than an iteration, copies are made every few iterations.
2. After a loss every node serialises the copies that it keeps, and lost nodes are replaced. The new
   ones get their states from the memory of others, and all train on from the newest complete copy:
   that of the iteration before the last one.
3. If a whole placement group is lost, all load the newest save in remote storage, which is made
   every three hours.

Source: Gemini (SOSP '23): sections 3 to 6; k = 2 and the phases of a recovery (section 7.3, figure
14): detection 15 s, torch.save of two copies of 9.4 GB a device 162 s, taken as a speed, and a
start of 4 minutes; three hours between saves as Strawman (section 7.2).
Differs: nodes are replaced when the scenario says so, not after 4 to 7 minutes, and meanwhile the
others serialise. All other traffic leaves the links to the copies alone. The model is trained by
the plan that all systems begin with, not by ZeRO-3, so a node's state is what it holds in that
plan. Nodes without a place in the plan are standby nodes. There are no failures of software: every
lost node has lost its memory. Saves to remote storage cost no stall, since they are made of copies.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil
from typing import Final

from planaria.observe.ledger import Category
from planaria.observe.recoveries import SourceTier
from planaria.placement.placement import paper_placement
from planaria.systems.modelled_job import (
    ModelledJob,
    Pace,
    Places,
    StoredSaves,
    bytes_by_place,
    remote_s,
)
from planaria.systems.remote_saves import DETECT_S, restart_if_full, serialise_s
from planaria.systems.strawman import STRAWMAN_INTERVAL_S
from planaria.systems.system import Setting

NUM_COPIES: Final = 2
SERIALISE_S: Final = 162.0  # torch.save of the two copies of 9.4 GB a device that a node keeps.


@dataclass(frozen=True, slots=True)
class Gemini:
    """Copies in memory after each iteration; implements `System`.

    Attributes:
        copies: k, the number of copies of each node's state, its own included.
    """

    copies: int = NUM_COPIES

    @property
    def name(self) -> str:
        """See `System`."""
        return "gemini"

    def begin(self, setting: Setting, *, absent: Collection[int] = ()) -> ModelledJob:
        """A job that begins; see `System`."""
        every = max(1, ceil(STRAWMAN_INTERVAL_S / setting.failure_free_s))
        saves = StoredSaves(every=every, write_s=remote_s(setting))
        return ModelledJob(setting, _CopiesInMemory(setting, self.copies), saves, absent=absent)


class _CopiesInMemory:
    """Recovers from the memory of other nodes where it can; implements `Behaviour`."""

    def __init__(self, setting: Setting, copies: int) -> None:
        plan = setting.catalog.plans[setting.num_nodes]
        place_bytes = bytes_by_place(setting, plan)
        copies = min(copies, len(place_bytes))
        link = setting.catalog.problem.profile.links["inter_node"]
        self._places = Places(len(place_bytes), range(setting.num_nodes))
        self._holders = paper_placement(len(place_bytes), copies, "mixed").holders
        self._pace = Pace(iteration_s=setting.failure_free_s, nodes=self._places.at_work)
        copy_s = (copies - 1) * link.seconds(max(place_bytes))
        # Number of iterations from one copy to the next.
        self._every = max(1, ceil(copy_s / setting.failure_free_s))
        self._detect_and_serialise = (
            (Category.DETECT, DETECT_S),
            (Category.TRANSFER, copies * serialise_s(setting)),
        )
        self._fetch_s = link.seconds(max(place_bytes))
        self._place_bytes = max(place_bytes)
        self._since = 0  # Number of iterations with which the job began or recovered.
        # Places whose node keeps no copies, because it is new since the last complete ones.
        self._without_copies: set[int] = set()
        self._loads_save = False

    def begin(self, job: ModelledJob) -> None:
        """See `Behaviour`."""
        self._places.drop(job.absent)
        if not self._places.empty:
            job.train_at(self._pace, 0.0)

    def on_lost(self, job: ModelledJob, nodes: tuple[int, ...], now_s: float) -> None:
        """See `Behaviour`."""
        emptied = self._places.drop(nodes)
        if not emptied:
            return
        job.interrupt(now_s)
        num_complete = (job.account.num_iterations - self._since) // self._every
        if num_complete:
            self._without_copies.clear()
            self._loads_save = False
        self._without_copies.update(emptied)
        copied = self._since + max(0, num_complete - 1) * self._every
        # What is lost during a recovery from a save is loaded again, with all the rest. A save that
        # is written in less than an iteration may be newer than the copies.
        self._loads_save |= copied < job.saves.newest or any(
            self._without_copies.issuperset(holders) for holders in self._holders
        )
        if self._loads_save:
            job.go_back_to_save()
        else:
            job.account.go_back(copied)
            job.recover(SourceTier.MEMORY)
        self._since = job.account.num_iterations
        job.wait(now_s, *self._detect_and_serialise)
        self._restart_if_full(job, now_s)

    def on_joined(self, job: ModelledJob, nodes: tuple[int, ...], now_s: float) -> None:
        """See `Behaviour`."""
        del nodes
        if job.is_waiting:
            self._restart_if_full(job, now_s)

    def on_notice(self, job: ModelledJob, nodes: tuple[int, ...], deadline_s: float) -> None:
        """See `Behaviour`."""

    def _restart_if_full(self, job: ModelledJob, now_s: float) -> None:
        move_s = job.load_s(self._place_bytes) if self._loads_save else self._fetch_s
        restart_if_full(job, self._places, now_s, pace=self._pace, move_s=move_s)
