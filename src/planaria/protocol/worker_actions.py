"""What a worker is to do, as data: the actions that follow from protocol/worker_state.py.

They are taken in the order in which they are given. What an action does to tensors, links and files
is in engine/worker.py, what it does in a simulation in the simulator's modelled worker.
"""

from dataclasses import dataclass
from typing import Final

from planaria.core.commit import CommitVector
from planaria.core.messages import Fact, SaveLayers, StartEpoch

RECOVERY_STEPS: Final = ("regroup", "transfer", "resume")


@dataclass(frozen=True, slots=True)
class Leave:
    """The process ends.

    Attributes:
        waits: a save that is being written gets a moment to end.
    """

    waits: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """Tells the coordinator what this rank holds (`Stopped`)."""

    epoch: int


@dataclass(frozen=True, slots=True)
class KeepLayers:
    """Drops all layers but these."""

    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Settle:
    """Brings the layers to the age at which all go on; see `on_settled`.

    Attributes:
        order: what asks for it.
        drops: all layers are dropped first: they are older than what all went back to.
        outcome: an iteration that is committed, and its vector: layers whose gradients of it are
            complete take their optimizer step.
        age: layers of another age are dropped then, and all gradients.
    """

    order: StartEpoch | SaveLayers
    drops: bool
    outcome: tuple[int, CommitVector] | None
    age: int


@dataclass(frozen=True, slots=True)
class WriteLast:
    """Saves the layers that the order names for this rank."""

    order: SaveLayers


@dataclass(frozen=True, slots=True)
class Reach:
    """A fault may strike here.

    Attributes:
        step: one of RECOVERY_STEPS, or "start", "optimizer", "applied" of an iteration.
        recovers_from: as in WorkerState.
    """

    step: str
    iteration: int
    recovers_from: int = -1


@dataclass(frozen=True, slots=True)
class Regroup:
    """Makes links to the peers of this rank in the epoch."""

    start: StartEpoch


@dataclass(frozen=True, slots=True)
class Exchange:
    """Sends layers that others lack, and waits until all links stand and this rank has its own
    layers. A rank that takes no part waits until others have theirs. See `on_exchanged`."""

    start: StartEpoch


@dataclass(frozen=True, slots=True)
class BeginEpoch:
    """Tells that the rank is ready, and prepares to train.

    Attributes:
        is_planned: training was not interrupted for this epoch.
    """

    start: StartEpoch
    is_planned: bool


@dataclass(frozen=True, slots=True)
class Compare:
    """Compares the parameters of this age with those of the other ranks that hold them."""

    age: int


@dataclass(frozen=True, slots=True)
class SaveFirst:
    """Begins to save the layers that this rank owns; see `on_save_begun`."""

    age: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Runs an iteration up to its commit vector; see `on_computed`."""

    iteration: int


@dataclass(frozen=True, slots=True)
class CheckVector:
    """Refuses to go on where training has diverged."""

    iteration: int
    vector: CommitVector


@dataclass(frozen=True, slots=True)
class ReceiveSilently:
    """Waits for layers that this rank is to hold, but does not compute."""

    iteration: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Takes the optimizer step of all layers."""

    iteration: int
    vector: CommitVector


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies of layers in memory: the layers have reached this age.

    Attributes:
        goes_on: another iteration of this epoch follows.
    """

    age: int
    vector: CommitVector
    goes_on: bool


@dataclass(frozen=True, slots=True)
class Save:
    """Begins to save the layers that this rank owns, while training goes on."""

    age: int


@dataclass(frozen=True, slots=True)
class TellIteration:
    """Tells the coordinator that the iteration is done (`IterationDone`); see `on_told`.

    Attributes:
        ends: training ends after it.
        switches: the next epoch begins after it.
    """

    iteration: int
    vector: CommitVector
    ends: bool
    switches: bool


@dataclass(frozen=True, slots=True)
class SaveLast:
    """Saves the layers that this rank owns, and waits until they are written."""

    age: int


@dataclass(frozen=True, slots=True)
class WaitWritten:
    """Waits until what is being saved is written.

    Attributes:
        timeout_s: for how long; 0: as long as it takes.
    """

    epoch: int
    timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EndEpoch:
    """Takes down what the epoch had: its links, its threads, its copies under way."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Complain:
    """Tells the coordinator why this rank has left its epoch."""

    message: Fact


Action = (
    Leave
    | Answer
    | KeepLayers
    | Settle
    | WriteLast
    | Reach
    | Regroup
    | Exchange
    | BeginEpoch
    | Compare
    | SaveFirst
    | Compute
    | CheckVector
    | ReceiveSilently
    | Apply
    | Copy
    | Save
    | TellIteration
    | SaveLast
    | WaitWritten
    | EndEpoch
    | Complain
)
