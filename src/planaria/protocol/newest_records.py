"""The newest records that a launcher has been told of, for a coordinator that only saves.

The launcher of nodes/head and the simulated one both keep them here.
"""

from collections.abc import Collection

from planaria.core.records import Committed, Members, Outcome, Progress, Recorded, Rescue


class NewestRecords:
    """The newest members, outcome and progress on record, as far as the launcher was told.

    Args:
        members: members with which the job begins.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._outcome: Outcome | None = None
        self._progress: Progress | None = None
        # Epoch in which the job last went back, and end of the iterations reported as committed.
        self._reported_until = (-1, 0)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes that are members."""
        return self._members.nodes

    def add_records(self, message: Recorded) -> None:
        """Notes newer members or a newer outcome."""
        self._members = message.members or self._members
        self._outcome = message.outcome or self._outcome

    def add_commit(self, message: Committed) -> bool:
        """Notes a committed iteration; False if an earlier coordinator has reported it."""
        if (message.since, message.iteration) < self._reported_until:
            return False
        self._reported_until = (message.since, message.iteration + 1)
        self._progress = Progress(
            num_committed=message.iteration + 1,
            ends=message.ends,
            is_trained=message.is_trained,
            since=message.since,
        )
        return True

    def rescue(self, reason: str, *, term: int, live_nodes: Collection[int]) -> Rescue:
        """The state from which a coordinator that only saves goes on.

        Each such coordinator begins an epoch of its own.

        Args:
            reason: why it only saves.
            term: its term.
            live_nodes: nodes whose agents live.
        """
        self._members = _saving_members(self._members, live_nodes)
        return Rescue(
            reason=reason,
            term=term,
            members=self._members,
            outcome=self._outcome,
            progress=self._progress,
        )


def _saving_members(members: Members, live_nodes: Collection[int]) -> Members:
    """The members with which a coordinator that only saves begins: those whose agents live.

    Their epoch is one that no node knows yet, because each epoch is recorded before any node is
    told of it.

    Args:
        members: the recorded members of the newest epoch.
    """
    staying = tuple(node for node in members.nodes if node in live_nodes)
    gone = {*members.gone, *members.nodes}.difference(staying)
    return Members(
        epoch=members.epoch + 1, term=members.term + 1, nodes=staying, gone=tuple(sorted(gone))
    )
