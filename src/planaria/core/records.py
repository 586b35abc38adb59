"""What the coordinator records before it tells anyone, and what it tells its launcher.

Records are kept in the coordination store, one of each kind per epoch; a coordinator that is
restarted goes on from them alone (docs/protocol.md). Records are compressed, because a plan has a
route per microbatch. A record that is still too large for one value of the store is cut into
pieces, and a `Pieces` value stands for it.
"""

import zlib
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from planaria.core.clock_offsets import ClockReading
from planaria.core.cluster import ClusterState, NodesChanged, NodesLost
from planaria.core.copies import Label
from planaria.core.findings import FailureHistory, Findings
from planaria.core.kinds import ChangeKind, Ending, LossKind
from planaria.core.messages import (
    DrainRequested,
    IterationDone,
    Message,
    NoticeTaken,
    Raised,
    SaveLayers,
    StartEpoch,
    StopRequested,
    WorkerFailed,
    WorkerReady,
)
from planaria.core.plan import Plan


class Members(msgspec.Struct, frozen=True, kw_only=True):
    """The record of the nodes that belong to an epoch.

    Attributes:
        gone: nodes that were members once and are not any more; they are out of the job for good.
        is_planned: whether the epoch begins at a commit of the epoch before it, or never begins; it
            has no decision on record until it has begun.
        untold: nodes that switches up to this epoch's have made members, or members no more, with
            the kind of the change; the launcher is told once every rank has begun a change's last
            epoch, or when a loss ends the change.
        spoilt: versions of the disk tier that could not be read, not even by the head.
        failures: number of failures and time of the last one, by machine; machines whose failures
            no longer count may be left out.
        history: failures of the job so far.
        findings: deviations of the job's seconds and bytes from its profile.
        recorded: moment of this record, by the clock of all moments in it. A coordinator with
            another clock, after a reboot or on another machine, moves them onto its own.
    """

    epoch: int
    term: int
    nodes: tuple[int, ...]
    gone: tuple[int, ...] = ()
    is_planned: bool = False
    untold: dict[int, ChangeKind] = {}
    spoilt: tuple[str, ...] = ()
    failures: dict[str, tuple[int, float]] = {}
    history: FailureHistory = FailureHistory()
    findings: Findings = Findings()
    recorded: ClockReading = ClockReading()


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The state that all iterations are built on: the job's start, or what all ranks last went back
    to.

    Attributes:
        iteration: first iteration to run from there.
        source: version of the disk tier that holds all layers; "": the seed or the given weights.
        epoch: epoch in which all went back to this state; -1: the job's start.
        copied: version of the copies in memory that all went back to; None: not to copies.
    """

    iteration: int = 0
    source: str = ""
    epoch: int = -1
    copied: Label | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Where all ranks go on: COMMIT of iteration - 1, which is also REDO of iteration, or going
    back.

    For the ranks COMMIT and REDO are the same: each rank that has not applied iteration - 1 applies
    it by its vector, and drops the gradients of later iterations. If the job goes back, all ranks
    drop what they hold.

    Attributes:
        iteration: next iteration to run.
        vector: commit vector of iteration - 1; empty if `iteration` is the origin's, or if every
            rank that trained has been replaced by a new process.
        is_redo: whether every member had applied iteration - 1, so that what they had computed of
            the next iteration is lost.
        origin: state that the iterations before this one are built on. It has this epoch if all go
            back in it; later outcomes inherit it.
    """

    epoch: int
    iteration: int
    vector: bytes = b""
    is_redo: bool = True
    origin: Origin = Origin()


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What the members of an epoch do; addresses are filled in when the members are told.

    Attributes:
        predicted_s: predicted seconds of an iteration.
        ending: kind of end that follows once the layers are saved; "": the job goes on.
        reason: why the job ends so; "" if it goes on.
        failure: failure that ends the job; None: none does.
    """

    order: StartEpoch | SaveLayers
    predicted_s: float = 0.0
    ending: str = ""
    reason: str = ""
    failure: WorkerFailed | None = None


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the job has come.

    Attributes:
        num_committed: number of committed iterations.
        ends: whether the last one of these iterations was the job's last.
        is_trained: whether training would have ended with it though nobody had asked for that.
        stop_reason: why the job had to stop before its end; "": it had not.
        is_stopping: whether its user, or the job itself, had asked it to stop.
        is_early: whether the job itself had.
        since: epoch in which the job last went back; -1: never, as in StartEpoch.
        epoch: epoch that the findings are of.
        findings: deviations of seconds and bytes from the profile.
        recorded: moment of the newest commit, by the clock of all moments in this record.
    """

    num_committed: int
    ends: bool
    is_trained: bool = False
    stop_reason: str = ""
    is_stopping: bool = False
    is_early: bool = False
    since: int = -1
    epoch: int = -1
    findings: Findings = Findings()
    recorded: ClockReading = ClockReading()


Record = Members | Outcome | Decision | Progress
_Record = TypeVar("_Record", Members, Outcome, Decision, Progress)


def encode_record(record: Record) -> bytes:
    """The record in the form in which the store keeps it."""
    return zlib.compress(msgspec.json.encode(record), level=1)


def decode_record(data: bytes, kind: type[_Record]) -> _Record:
    """The record that `encode_record` encoded."""
    return msgspec.json.decode(zlib.decompress(data), type=kind)


class Pieces(msgspec.Struct, frozen=True, kw_only=True):
    """The value that stands for a record which a leader of this term has written in `num`
    pieces."""

    term: int
    num: int


def encode_pieces(pieces: Pieces) -> bytes:
    """The value that stands for a record, in the form in which the store keeps it."""
    return msgspec.json.encode(pieces)


def decode_pieces(data: bytes) -> Pieces | None:
    """What `encode_pieces` encoded; None if the data is a record itself, which is compressed."""
    return msgspec.json.decode(data, type=Pieces) if data.startswith(b"{") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A transition that a policy proposed, with its prices.

    Attributes:
        iteration_s: predicted seconds of an iteration, as in `Transition`.
        downtime_s: predicted seconds of downtime, as in `Transition`.
        moving_s: predicted seconds during which layers move while training goes on.
        pause_s: predicted seconds of all switches to the plan that follows an answer to a loss.
        then_s: predicted seconds of an iteration by that plan; 0: no plan follows.
        samples_at_risk: average number of samples that the next failure makes the job train again,
            because the last copy of some layer is lost with it.
        score: expected samples per second; the candidate with the highest score is taken.
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


class DecisionInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision was made from that follows neither from the job nor from its plans. With it
    the same decision can be made again.

    Attributes:
        plan_epoch: epoch of the plan that the job left.
        members: members of the job when prices were made, with work or without.
        cluster: members after the event as policies saw them, with the layers that each held.
        lost: the loss that was answered; None: the decision was a change.
        changed: the change that was looked for; None: the decision answered a loss.
        findings: deviations of seconds and bytes from the profile so far.
        history: failures of the job so far.
        priced_s: time for which prices were made, by the clock of `history`.
        next_iteration: number of committed iterations.
        saved_iteration: number of iterations in the newest save of this run; -1: there was none.
        iteration_s: predicted seconds of an iteration with the plan of a change; 0: for a loss.
        version_iterations, processors: the same as in the coordinator's `Rules`.
        is_foreseen: whether the answer had been found ahead of need.
        plan: plan that the job left, which it may never have trained by; None: it is kept elsewhere
            under its epoch.
        domains: name of the failure domain of each node that is in one.
    """

    plan_epoch: int
    members: tuple[int, ...]
    cluster: ClusterState
    findings: Findings
    history: FailureHistory
    priced_s: float
    next_iteration: int
    saved_iteration: int
    version_iterations: int
    processors: int
    is_foreseen: bool
    lost: NodesLost | None = None
    changed: NodesChanged | None = None
    iteration_s: float = 0.0
    plan: Plan | None = None
    domains: dict[int, str] = {}


class Recovering(Message, frozen=True, kw_only=True):
    """Nodes or workers were lost, and the coordinator asks the others to leave the epoch and
    answer.

    Attributes:
        nodes: nodes that were lost, or whose workers were.
        lost_s: time at which the coordinator noticed the loss.
        is_forking: whether all wait for a worker that is being forked; `Forked` follows once it has
            reported.
        raised: error of a worker, if that is the loss.
    """

    epoch: int
    kind: LossKind
    nodes: tuple[int, ...]
    iteration: int
    reason: str
    lost_s: float
    is_forking: bool = False
    raised: Raised | None = None


class Forked(Message, frozen=True, kw_only=True):
    """Every newly forked worker has reported."""

    now_s: float


class AwaitingMachine(Message, frozen=True, kw_only=True):
    """Too few nodes are left to go on, so all wait for a machine that was asked for.

    Attributes:
        text: description of the wait, with its maximum.
    """

    text: str
    now_s: float


class AwaitingSaves(Message, frozen=True, kw_only=True):
    """The saves decide how the job goes on, and the disk has not answered yet which there are.

    Attributes:
        text: description of the wait, with its maximum.
    """

    text: str
    now_s: float


class Decided(Message, frozen=True, kw_only=True):
    """How the job goes on after a loss; nodes that `plan` leaves out have no work.

    Attributes:
        predicted_s: predicted seconds of an iteration.
        predicted_transfer_s: predicted seconds of the downtime in which layers move.
        detected_s: time at which all members had answered.
        noticed_s: time at which the coordinator noticed the loss; the recovery counts from it.
        predicted_recovery_s: predicted seconds until every rank goes on, between
            predicted_recovery_s_min and predicted_recovery_s_max.
        joined: nodes that had waited to join and are members now.
        source: version of the disk tier that all go back to; "": all go on from live layers, from
            copies in memory or from the job's start.
        copied: age of the copies in memory that all go back to; -1: not to copies.
        time_to_failure_s: mean time to the next failure that the candidates are weighed with.
        degraded: warning if fewer failures are tolerated than the job asks for; else "".
        is_newly_degraded: whether fewer are tolerated than before.
        inputs: facts from which this was decided.
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
    is_newly_degraded: bool = False
    inputs: DecisionInputs | None = None


class Running(Message, frozen=True, kw_only=True):
    """Every rank holds its layers and its links are up, so training runs since `now_s`.

    Attributes:
        members: members of the epoch, including those without a layer.
        materialised: number of layers that a worker has materialised since it started, by rank.
        received_bytes: sum of the ranks' received_bytes; see EpochReady.
        regroup_s, transfer_s: largest value of any rank; see EpochReady.
        predicted_s: predicted seconds of an iteration.
        layer_factors: factors by layer that correct the profile; empty: no correction.
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
    predicted_s: float
    layer_factors: tuple[float, ...] = ()


class Changed(Message, frozen=True, kw_only=True):
    """Nodes have joined, left or changed their work while training went on.

    Attributes:
        kinds: kind of change by node.
        candidates, time_to_failure_s, degraded, is_newly_degraded, inputs: the same as in Decided.
        predicted_s: predicted seconds of an iteration.
        asked_s: time at which the change was begun.
        pause_s: seconds in which ranks did not train, all switches together.
        reason: description of what the kinds do not say; "" if they say all.
    """

    epoch: int
    kinds: dict[int, ChangeKind]
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
    is_newly_degraded: bool = False
    inputs: DecisionInputs | None = None


class ProfileCorrected(Message, frozen=True, kw_only=True):
    """The profile is corrected, because layers take other seconds than it predicted so far.

    Attributes:
        iteration: first iteration that is predicted with these factors.
        layer_factors: factor on the profile's seconds, by layer.
        predicted_s: predicted seconds of an iteration of the current plan.
        warning: text if the factors are now far from the profile and were not before; else "".
    """

    epoch: int
    iteration: int
    layer_factors: tuple[float, ...]
    predicted_s: float
    warning: str = ""


class Committed(Message, frozen=True, kw_only=True):
    """Every member has applied the iteration.

    After the job went back, in epoch `since`, the iterations from there on are committed once more.

    Attributes:
        is_trained: whether training would have ended with it though nobody had asked for that.
        reports: reports of the ranks that could still send one, without `receptions`.
        links: measured bytes per second by kind of link between machines; empty: none was measured.
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
    is_trained: bool = False
    links: dict[str, float] = msgspec.field(default_factory=dict)


class Saved(Message, frozen=True, kw_only=True):
    """A checkpoint is complete on disk."""

    iteration: int
    epoch: int


class Unsaved(Message, frozen=True, kw_only=True):
    """A save failed, and its partial files are removed."""

    iteration: int
    epoch: int
    reason: str


class Warned(Message, frozen=True, kw_only=True):
    """Something went wrong that does not stop the job.

    Attributes:
        undrained: nodes that were to be drained and stay.
        untold: iteration that is committed although nobody can report it; -1: none.
        gone: nodes that had waited to join and are gone.
        left: nodes that are out of the job, as they were asked to be, and that no change names.
        preempted: nodes of `left` whose machines are taken away.
        unfit: nodes whose machines are unfit.
        event: kind of the event that the report has of it; "": it has none.
    """

    text: str
    undrained: tuple[int, ...] = ()
    untold: int = -1
    gone: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    unfit: tuple[int, ...] = ()
    event: str = ""


class Ended(Message, frozen=True, kw_only=True):
    """The job is over.

    Attributes:
        is_early: whether the job itself had asked for a stop, because it has had enough.
    """

    ending: Ending
    reason: str
    failure: WorkerFailed | None
    nodes: tuple[int, ...]
    epoch: int
    is_early: bool = False


class AgentEnded(Message, frozen=True, kw_only=True):
    """The launcher reports that the process of a node has ended."""

    node: int
    reason: str


class Leading(Message, frozen=True, kw_only=True):
    """A coordinator has read its records and now serves agents."""

    term: int
    now_s: float


class Recorded(Message, frozen=True, kw_only=True):
    """What has just been put on record, before anybody else is told; see `Rescue`."""

    members: Members | None = None
    outcome: Outcome | None = None


class Unrecorded(Message, frozen=True, kw_only=True):
    """The coordinator cannot record its decisions any more, or has ended because of that; no
    coordinator may go on from the records.

    Attributes:
        is_taken: whether another head has taken the records, and the run, up.
    """

    reason: str
    is_taken: bool = False


class Rescue(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher knows of a job whose coordinator cannot go on from its records. A
    coordinator that is started with this only saves the live layers and ends the job.

    Attributes:
        reason: why the job ends.
        term: term of that new coordinator.
        members: members that are left, with an epoch of their own.
        outcome: newest outcome that was on record; None: there was none.
        progress: progress that the launcher was last told of; None: nothing is committed.
    """

    reason: str
    term: int
    members: Members
    outcome: Outcome | None
    progress: Progress | None


class Beat(Message, frozen=True, kw_only=True):
    """The coordinator is alive; it says so TICKS_PER_LEASE times per lease."""


class Starting(Message, frozen=True, kw_only=True):
    """Every worker has reported; the workers are told to get their layers and to connect."""

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
FromLauncher = AgentEnded | StopRequested | DrainRequested | NoticeTaken
