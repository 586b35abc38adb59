"""What the coordinator writes down before it tells anyone, and what it tells its launcher.

Records are in the store of coordination, one of each kind an epoch; a coordinator that is
restarted goes on from them alone. They are compressed: a plan has a route per microbatch. One that
is still too large for one value of the store is in pieces, and `Pieces` stands for it.

Source: DESIGN 4.5 and 6 (Coordination).
"""

import zlib
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from planaria.core.copies import Label
from planaria.core.findings import FailureHistory, Findings
from planaria.core.messages import (
    DrainRequested,
    IterationDone,
    Message,
    Raised,
    SaveLayers,
    StartEpoch,
    StopRequested,
    WorkerFailed,
    WorkerReady,
)
from planaria.core.plan import Plan


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """Who belongs to an epoch.

    Attributes:
        gone: whoever was a member and is not: dead for good.
        is_planned: the epoch begins at a commit of the one before, or never; no decision is
            recorded before it has.
        failures: of machines, how many and when the last one was.
        history: of failures of the job.
        findings: of the job's seconds.
        spoilt: versions of the disk tier that could not be read.
    """

    epoch: int
    term: int
    nodes: tuple[int, ...]
    gone: tuple[int, ...] = ()
    is_planned: bool = False
    spoilt: tuple[str, ...] = ()
    failures: dict[str, tuple[int, float]] = {}
    history: FailureHistory = FailureHistory()
    findings: Findings = Findings()


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where what the job has trained begins: its start, or the state that all went back to last.

    Attributes:
        iteration: the first to run from there.
        source: the version of the disk tier with all layers, "" for the seed or given weights.
        epoch: in which all went back to it; -1 for the start.
        copied: the version of the copies in memory that all went back to, if it was one.
    """

    iteration: int = 0
    source: str = ""
    epoch: int = -1
    copied: Label | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Where all go on: COMMIT of iteration - 1, which is REDO of iteration, or back at a save.

    The ranks do the same in the first two: whoever has not applied iteration - 1 does so, by its
    vector, and gradients of later iterations are dropped. Back at a save, all drop what they have.

    Attributes:
        iteration: the next to run.
        vector: of iteration - 1; empty where the iteration is the origin's.
        is_redo: every member had applied iteration - 1, so what they had begun is lost.
        origin: on which the iterations before are built. It is of this epoch if all go back in it;
            later outcomes inherit it.
    """

    epoch: int
    iteration: int
    vector: bytes = b""
    is_redo: bool = True
    origin: Origin = Origin()


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What the members of an epoch do; addresses are filled in when it is told.

    Attributes:
        predicted_s: of an iteration.
        ending: of the job once the layers are saved; "" if it goes on.
        reason: for that ending.
        failure: that ends the job, if it is one.
    """

    order: StartEpoch | SaveLayers
    predicted_s: float = 0.0
    ending: str = ""
    reason: str = ""
    failure: WorkerFailed | None = None


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the job has come; `ends` if the last of these iterations was the job's last.

    `stop_reason` says why it had to stop before its end, "" if it had not. `since` is the epoch in
    which the job last went back to a save, as in StartEpoch. `findings` are those in `epoch`.
    """

    num_committed: int
    ends: bool
    stop_reason: str = ""
    since: int = -1
    epoch: int = -1
    findings: Findings = Findings()


Record = Members | Outcome | Decision | Progress
_Record = TypeVar("_Record", Members, Outcome, Decision, Progress)


def encode_record(record: Record) -> bytes:
    """The record as the store keeps it."""
    return zlib.compress(msgspec.json.encode(record), level=1)


def decode_record(data: bytes, kind: type[_Record]) -> _Record:
    """What `encode_record` encoded."""
    return msgspec.json.decode(zlib.decompress(data), type=kind)


class Pieces(msgspec.Struct, frozen=True, kw_only=True):
    """What stands for a record that is in `num` pieces, which a leader of this term has written."""

    term: int
    num: int


def encode_pieces(pieces: Pieces) -> bytes:
    """What stands for a record, as the store keeps it."""
    return msgspec.json.encode(pieces)


def decode_pieces(data: bytes) -> Pieces | None:
    """What `encode_pieces` encoded; None if it is a record itself, which is compressed."""
    return msgspec.json.decode(data, type=Pieces) if data.startswith(b"{") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An answer that was proposed.

    Attributes:
        iteration_s, downtime_s: predicted, as of a `Transition`.
        moving_s: for how long layers move besides while training goes on.
        pause_s: of all switches to the plan that follows an answer to a loss.
        then_s: of an iteration by that plan; 0 if none follows.
        samples_at_risk: that the next failure makes the job train again, on average, because a last
            copy of some layer is lost with it.
        score: in samples a second; the highest is taken.
    """

    policy: str
    answer: str
    iteration_s: float
    downtime_s: float
    moving_s: float
    pause_s: float
    then_s: float
    samples_at_risk: float
    score: float


class Recovering(Message, frozen=True, kw_only=True):
    """Nodes or workers were lost, and the others are about to answer.

    Attributes:
        lost_s: when the coordinator noticed it.
        is_forking: all wait for a worker that is forked anew; `Forked` tells when it is there.
        raised: what raised in a worker, if that was it.
    """

    epoch: int
    kind: str
    nodes: tuple[int, ...]
    iteration: int
    reason: str
    lost_s: float
    is_forking: bool = False
    raised: Raised | None = None


class Forked(Message, frozen=True, kw_only=True):
    """Every worker that was forked anew has reported."""

    now_s: float


class AwaitingMachine(Message, frozen=True, kw_only=True):
    """Too few nodes are left to go on, so all wait for a machine that is asked for.

    Attributes:
        text: what is waited for, and how long at most.
    """

    text: str
    now_s: float


class AwaitingSaves(Message, frozen=True, kw_only=True):
    """What is saved decides how the job goes on, and the disk has yet to say.

    Attributes:
        text: what is waited for, and how long at most.
    """

    text: str
    now_s: float


class Decided(Message, frozen=True, kw_only=True):
    """How the job goes on; `plan` may leave nodes out only if there is no work for them.

    Attributes:
        predicted_transfer_s: of the downtime, what moving layers is to take.
        noticed_s: when the loss was, since when the recovery lasts.
        predicted_recovery_s: until every rank goes on; at least predicted_recovery_s_min, at most
            predicted_recovery_s_max.
        joined: nodes that had waited to be members.
        source: the version of the disk tier that all go back to; "" if live layers serve, or none
            was saved.
        copied: of the iteration whose copies in memory all go back to, -1 for none.
        time_to_failure_s: mean time to the next failure, as the candidates are weighed by it.
    """

    epoch: int
    iteration: int
    policy: str
    answer: str
    candidates: tuple[Candidate, ...]
    plan: Plan
    predicted_s: float
    predicted_downtime_s: float
    predicted_transfer_s: float
    transfer_bytes: int
    redone_samples: int
    detected_s: float
    noticed_s: float = 0.0
    predicted_recovery_s: float = 0.0
    predicted_recovery_s_min: float = 0.0
    predicted_recovery_s_max: float = 0.0
    joined: tuple[int, ...] = ()
    source: str = ""
    copied: int = -1
    time_to_failure_s: float = 0.0
    degraded: str = ""


class Running(Message, frozen=True, kw_only=True):
    """Every rank holds its layers and its links are up: training runs, since `now_s`.

    Attributes:
        members: of the epoch, also those that have no layer.
    """

    epoch: int
    plan: Plan
    members: tuple[int, ...]
    workers: dict[int, WorkerReady]
    materialised: dict[int, int]
    received_bytes: int
    regroup_s: float
    transfer_s: float
    now_s: float


class Changed(Message, frozen=True, kw_only=True):
    """Nodes have come or left, or have other work, while training went on.

    Attributes:
        kinds: of each node concerned: join, preempt, drain, slow, fast or reform.
        candidates, time_to_failure_s: as in Decided.
        asked_s: when the change was begun.
        pause_s: for how long ranks did not train, all switches together.
        reason: in words, where the kinds do not tell it.
    """

    epoch: int
    kinds: dict[int, str]
    iteration: int
    policy: str
    answer: str
    candidates: tuple[Candidate, ...]
    plan: Plan
    predicted_s: float
    predicted_pause_s: float
    transfer_bytes: int
    received_bytes: int
    asked_s: float
    pause_s: float
    now_s: float
    time_to_failure_s: float = 0.0
    reason: str = ""
    degraded: str = ""


class ProfileCorrected(Message, frozen=True, kw_only=True):
    """The profile is corrected: layers take other seconds than were predicted so far.

    Attributes:
        iteration: the first that is predicted by them.
        layer_factors: how many times the profile's seconds each layer takes.
        predicted_s: of an iteration of the plan in use.
        warning: in words, where they are far from the profile and were not before; else empty.
    """

    epoch: int
    iteration: int
    layer_factors: tuple[float, ...]
    predicted_s: float
    warning: str = ""


class Committed(Message, frozen=True, kw_only=True):
    """Every member has applied the iteration; `reports` are those of the ranks that could.

    After the job went back to a save, in epoch `since`, iterations are committed once more.
    """

    iteration: int
    epoch: int
    loss: float
    num_samples: int
    sample_digest: str
    ends: bool
    reports: tuple[IterationDone, ...]
    now_s: float
    since: int = -1


class Saved(Message, frozen=True, kw_only=True):
    """A checkpoint is complete on disk."""

    iteration: int
    epoch: int


class Unsaved(Message, frozen=True, kw_only=True):
    """A save failed, and what there was of it is removed."""

    iteration: int
    epoch: int
    reason: str


class Warned(Message, frozen=True, kw_only=True):
    """Something went wrong that does not stop the job.

    Attributes:
        undrained: nodes that stay.
        untold: an iteration that is committed though nobody can report it, -1 for none.
        gone: nodes that waited to be members.
    """

    text: str
    undrained: tuple[int, ...] = ()
    untold: int = -1
    gone: tuple[int, ...] = ()


class Ended(Message, frozen=True, kw_only=True):
    """The job is over."""

    ending: str
    reason: str
    failure: WorkerFailed | None
    nodes: tuple[int, ...]
    epoch: int


class AgentEnded(Message, frozen=True, kw_only=True):
    """The launcher's word that the process of a node is gone."""

    node: int
    reason: str


class Leading(Message, frozen=True, kw_only=True):
    """A coordinator has read its records and serves agents."""

    term: int
    now_s: float


class Recorded(Message, frozen=True, kw_only=True):
    """What has just gone on record, of which nobody else was told yet; see `Rescue`."""

    members: Members | None = None
    outcome: Outcome | None = None


class Unrecorded(Message, frozen=True, kw_only=True):
    """What a coordinator decides from now on is not on record any more, or it has ended for that:
    no coordinator may go on from the records."""

    reason: str


class Rescue(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher knows of a job whose coordinator cannot go on from its records: one that
    only has saved what is live does, and ends the job.

    Attributes:
        reason: of the end.
        term: of that coordinator.
        members: that are left, with an epoch of their own.
        outcome: the newest that was on record.
        progress: as far as the launcher was told; None: nothing is committed.
    """

    reason: str
    term: int
    members: Members
    outcome: Outcome | None
    progress: Progress | None


class Beat(Message, frozen=True, kw_only=True):
    """The coordinator runs; it says so TICKS_PER_LEASE times a lease."""


class Starting(Message, frozen=True, kw_only=True):
    """Every worker has reported; they are told to take their layers and connect."""

    epoch: int
    num_nodes: int
    now_s: float


ToLauncher = (
    Leading
    | Beat
    | Starting
    | Recovering
    | Forked
    | AwaitingMachine
    | AwaitingSaves
    | Decided
    | Running
    | Changed
    | ProfileCorrected
    | Committed
    | Saved
    | Unsaved
    | Warned
    | Recorded
    | Unrecorded
    | Ended
)
FromLauncher = AgentEnded | StopRequested | DrainRequested
