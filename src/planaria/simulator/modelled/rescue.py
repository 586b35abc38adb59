"""When the simulated launcher starts a coordinator that only saves, and from which records.

The launcher of nodes/head/launcher.py keeps its records in the same class, `NewestRecords`.
"""

from collections.abc import Collection
from typing import Final

from planaria.core.plan import Plan
from planaria.core.records import (
    Committed,
    Leading,
    Members,
    Recorded,
    Rescue,
    ToLauncher,
    Unrecorded,
)
from planaria.protocol.newest_records import NewestRecords

RESTARTS_MAX: Final = 5  # Restarts of the coordinator without a commit in between.
RESCUES_MAX: Final = 3  # Coordinators that only save.


class ReportedRecords:
    """The records of a job as its coordinators have reported them.

    Attributes:
        save_only_reason: why no coordinator can go on from the records; "": one can.
        num_restarts: number of restarts of the coordinator since the last commit.
        num_rescues: number of coordinators that were started only to save.
    """

    def __init__(self, plan: Plan) -> None:
        self.save_only_reason = ""
        self.num_restarts = self.num_rescues = 0
        self._led_term = -1
        self._newest = NewestRecords(Members(epoch=plan.epoch, term=-1, nodes=plan.nodes))

    @property
    def nodes(self) -> tuple[int, ...]:
        """The newest members."""
        return self._newest.nodes

    def on_message(self, message: ToLauncher) -> None:
        """Takes a message of the coordinator."""
        match message:
            case Leading():
                self._led_term = message.term
            case Recorded():
                self._newest.add_records(message)
            case Unrecorded():
                self.save_only_reason = self.save_only_reason or message.reason
            case Committed() if self._newest.add_commit(message):
                self.num_restarts = 0

    def restart(self) -> None:
        """Counts a coordinator that ended before the job did."""
        self.num_restarts += 1
        if self.num_restarts > RESTARTS_MAX and not self.save_only_reason:
            self.save_only_reason = (
                f"the coordinator ended {self.num_restarts} times without a commit"
            )

    def rescue(self, live_nodes: Collection[int]) -> Rescue:
        """What the next coordinator, which only saves, goes on from.

        Args:
            live_nodes: nodes whose agents are alive.
        """
        self.num_rescues += 1
        return self._newest.rescue(
            self.save_only_reason, term=self._led_term + 1, live_nodes=live_nodes
        )
