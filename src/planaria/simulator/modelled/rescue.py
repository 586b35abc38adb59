"""What the simulated launcher knows of a job's records, and hands to a coordinator that only saves.

Source: nodes/head/launcher.py; the steps come in the same order.
"""

from collections.abc import Collection
from typing import Final

from planaria.core.plan import Plan
from planaria.core.records import (
    Committed,
    Leading,
    Members,
    Outcome,
    Progress,
    Recorded,
    Rescue,
    ToLauncher,
    Unrecorded,
)

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
        self._members = Members(epoch=plan.epoch, term=-1, nodes=plan.nodes)
        self._outcome: Outcome | None = None
        self._progress: Progress | None = None
        self._reported_until = (-1, 0)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The newest members."""
        return self._members.nodes

    def on_message(self, message: ToLauncher) -> None:
        """Takes a message of the coordinator."""
        match message:
            case Leading():
                self._led_term = message.term
            case Recorded():
                self._members = message.members or self._members
                self._outcome = message.outcome or self._outcome
            case Unrecorded():
                self.save_only_reason = self.save_only_reason or message.reason
            case Committed() if (message.since, message.iteration) >= self._reported_until:
                self._reported_until = (message.since, message.iteration + 1)
                self._progress = Progress(
                    num_committed=message.iteration + 1, ends=message.ends, since=message.since
                )
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
        staying = tuple(node for node in self._members.nodes if node in live_nodes)
        gone = {*self._members.gone, *self._members.nodes}.difference(staying)
        self._members = Members(
            epoch=self._members.epoch + 1,
            term=self._members.term + 1,
            nodes=staying,
            gone=tuple(sorted(gone)),
        )
        return Rescue(
            reason=self.save_only_reason,
            term=self._led_term + 1,
            members=self._members,
            outcome=self._outcome,
            progress=self._progress,
        )
