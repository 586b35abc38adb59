"""What the coordinator asks of whoever calls it, and what it is told when that is done.

A command is carried out by the coordinator's process, or by the simulator's model of it. Where the
coordinator waits for the result, the command's docstring names the event that it waits for.
"""

from dataclasses import dataclass

from planaria.core.copies import version_name
from planaria.core.kinds import Ending
from planaria.core.messages import LayerFile, ToNode, WorkerFailed
from planaria.core.records import Decision, Members, Outcome, ToLauncher


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to the agents of these nodes; if none are given, to those of all members."""

    message: ToNode
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Evict:
    """Close the connections of these nodes and end their leases."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordMembers:
    """Write the record, then send the event `MembersRecorded`."""

    members: Members


@dataclass(frozen=True, slots=True)
class RecordDecision:
    """Write both records, the outcome first, then send the event `DecisionRecorded`."""

    outcome: Outcome
    decision: Decision


@dataclass(frozen=True, slots=True)
class Notify:
    """Send a message to the launcher."""

    message: ToLauncher


@dataclass(frozen=True, slots=True)
class Publish:
    """Create the manifest of a save, all of whose layers are on disk.

    Then send the event `Published`, or `SaveFailed`.

    Attributes:
        unused: versions that could not be read; they do not count among the newest to be kept.
    """

    iteration: int
    epoch: int
    files: tuple[LayerFile, ...]
    unused: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Discard:
    """Remove what there is of a failed save, and tell the launcher if there is a reason."""

    iteration: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckSave:
    """Read a layer of a save that a node could not read, and set the save aside if it is damaged.

    Attributes:
        layer: number of the layer; -1: the manifest.
    """

    source: str
    layer: int = -1


@dataclass(frozen=True, slots=True)
class End:
    """Tell the launcher that the job is over, then have every member leave.

    Attributes:
        reason: why it is over, in words.
    """

    ending: Ending
    reason: str = ""
    failure: WorkerFailed | None = None


Saving = Publish | Discard | CheckSave
Command = Tell | Evict | RecordMembers | RecordDecision | Notify | Saving | End


# -- what it is told when they are done, and of time -----------------------------------------------


@dataclass(frozen=True, slots=True)
class MembersRecorded:
    """The record of the epoch's members is durable."""

    epoch: int


@dataclass(frozen=True, slots=True)
class AnswersFound:
    """The search for plans better than that of this epoch has ended; see policies/ahead.py."""

    epoch: int


@dataclass(frozen=True, slots=True)
class DecisionRecorded:
    """The records of the epoch's outcome and decision are durable."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Published:
    """The manifest of a save exists."""

    iteration: int
    epoch: int

    @property
    def source(self) -> str:
        """The save's version of the disk tier."""
        return version_name(self.iteration, self.epoch)


@dataclass(frozen=True, slots=True)
class Pruned:
    """A version of the disk tier was removed, because enough newer ones are kept."""

    source: str


@dataclass(frozen=True, slots=True)
class SavesListed:
    """A `Published` was sent for every save that existed when this coordinator began."""


@dataclass(frozen=True, slots=True)
class SaveChecked:
    """A save that a node could not read was read here.

    Attributes:
        is_sound: whether what the node could not read is as it was written.
    """

    source: str
    is_sound: bool


@dataclass(frozen=True, slots=True)
class MustEnd:
    """The job cannot go on, whatever its nodes do; its live layers are to be saved first."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeaseExpired:
    """The lease of a node has run out; the node is lost unless it has a new one by now."""

    node: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed.

    Attributes:
        is_cut_off: whether no member is heard, so that members cannot be blamed for their silence.
        is_lease_overdue: whether the lease of a member has run out, which is about to be told.
    """

    is_cut_off: bool = False
    is_lease_overdue: bool = False
