"""The actions of a worker, as data; protocol/worker_state.py chooses them.

A worker takes them in the given order. engine/worker.py applies an action to tensors, links and
files; the simulator's modelled worker simulates its effect.
"""

from dataclasses import dataclass
from math import inf
from typing import Final

from planaria.core.commit import CommitVector
from planaria.core.messages import Fact, SaveLayers, StartEpoch

RECOVERY_STEPS: Final = ("regroup", "transfer", "resume")


@dataclass(frozen=True, slots=True)
class Leave:
    """Ends the process.

    Attributes:
        waits: the process first waits a moment for a save that is being written.
    """

    waits: bool


@dataclass(frozen=True, slots=True)
class TellHeld:
    """Tells the coordinator what this rank holds (`Stopped`)."""

    epoch: int


@dataclass(frozen=True, slots=True)
class KeepLayers:
    """Drops all layers but these."""

    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Settle:
    """Brings the layers to the age at which all ranks go on; see `on_settled`.

    Attributes:
        order: the order that requires it.
        drops: all layers are dropped first: they are from before the job last went back, or from
            before an epoch in which this rank did not train.
        outcome: a committed iteration and its vector: layers whose gradients of this iteration are
            complete take their optimizer step. None: there is no such iteration.
        age: age to keep: layers of another age are dropped after that, and so are all gradients.
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
class WritePart:
    """Saves all layers of this rank by itself, since there is no head any more.

    Attributes:
        epoch, since: the fields of these names in WorkerState.
    """

    epoch: int
    since: int


@dataclass(frozen=True, slots=True)
class Reach:
    """Marks a place at which an injected fault may strike.

    Attributes:
        step: one of RECOVERY_STEPS, or "start", "optimizer" or "applied" of an iteration.
        recovers_from: the field of this name in WorkerState.
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
    """Sends layers that others lack, and waits for this rank's own layers and all its links.

    A rank that takes no part in training waits until others have their layers. See `on_exchanged`.
    """

    start: StartEpoch


@dataclass(frozen=True, slots=True)
class BeginEpoch:
    """Tells the coordinator that the rank is ready, and prepares to train.

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
class BeginLast:
    """Begins to save the layers that this rank owns, which nothing changes before `SaveLast`."""

    age: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Computes the loss of held-out data with the parameters of this age."""

    age: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Runs an iteration up to its commit vector; see `on_computed`."""

    iteration: int


@dataclass(frozen=True, slots=True)
class CheckVector:
    """Refuses to go on if training has diverged."""

    iteration: int
    vector: CommitVector


@dataclass(frozen=True, slots=True)
class ReceiveSilently:
    """Receives the layers of which this rank becomes a silent member."""

    iteration: int


@dataclass(frozen=True, slots=True)
class Apply:
    """Takes the optimizer step of all layers."""

    iteration: int
    vector: CommitVector


@dataclass(frozen=True, slots=True)
class Copy:
    """Makes copies of layers in memory, now that the layers have reached this age.

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
    """Tells the coordinator that the iteration is done (`IterationDone`); see `on_iteration_told`.

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
    """Saves the layers that this rank owns, unless `BeginLast` has begun that; waits for it."""

    age: int


@dataclass(frozen=True, slots=True)
class WaitWritten:
    """Waits until the save in progress is written.

    Attributes:
        timeout_s: longest wait in seconds.
    """

    epoch: int
    timeout_s: float = inf


@dataclass(frozen=True, slots=True)
class EndEpoch:
    """Ends the links, threads and unfinished copies of the epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Complain:
    """Tells the coordinator why this rank has left its epoch."""

    message: Fact


Action = (
    Leave
    | TellHeld
    | KeepLayers
    | Settle
    | WriteLast
    | WritePart
    | Reach
    | Regroup
    | Exchange
    | BeginEpoch
    | Compare
    | SaveFirst
    | BeginLast
    | Evaluate
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
