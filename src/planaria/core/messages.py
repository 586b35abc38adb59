"""The messages between workers, agents and the coordinator, each one a frozen msgspec record.

A worker talks to its agent. The agent forwards what its workers say to the coordinator, and what
the coordinator says to all of its workers. Every message that belongs to an epoch carries the
epoch's number, so that a message of an older epoch can be refused. Messages travel as JSON with the
record's name as a tag.
"""

from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from planaria.core.clock_offsets import ClockOffset
from planaria.core.copies import CopiesDone, IdleSpans, Label, LayerCopy
from planaria.core.plan import Plan, Transfer

# The `iteration` of a StartEpoch that begins when the ranks of the epoch before agree to begin it.
AT_COMMIT: Final = -1
# The `rank` of a SaveFailed that concerns the whole save, such as its manifest.
BY_PUBLISHER: Final = -1


class Message(msgspec.Struct, frozen=True, tag=True):
    """The base of all messages; subclasses are final."""


@dataclass(frozen=True, slots=True)
class LayerFile:
    """The file of one layer in a checkpoint: its name there, its size and the hash of its bytes."""

    layer: int
    file: str
    num_bytes: int
    xxh3_128: str


class MeasuredSpan(msgspec.Struct, frozen=True, array_like=True):
    """The measured span of one action; start_s and end_s are seconds since the iteration began.

    Attributes:
        lane: "compute", or "reduce" for reductions, which run at the same time.
        action: text of the action.
    """

    lane: str
    action: str
    start_s: float
    end_s: float


class NodeArrived(Message, frozen=True, kw_only=True):
    """An agent has started.

    Attributes:
        rank: first rank of the node.
        machine: name of the machine that the agent runs on. A node that has been lost may have run
            there before.
        clock: name of the monotonic clock that the node reads.
        domain: name of the failure domain of that machine; "": none is known.
        speed: speed of that machine relative to the job's profile, as far as it is known.
    """

    node: int
    rank: int
    machine: str
    clock: str = ""
    domain: str = ""
    speed: float = 1.0


class WorkerReady(Message, frozen=True, kw_only=True):
    """A worker has started and listens at (host, port)."""

    node: int
    rank: int
    pid: int
    pid_start: float
    host: str
    port: int


class Stopped(Message, frozen=True, kw_only=True):
    """A rank has left all older epochs, and says what it holds now (docs/protocol.md, rule R2).

    Attributes:
        ages: number of iterations applied to each layer that the rank holds whole, by layer.
        complete: layers whose reduced gradients of iteration ages[layer] are complete too, so that
            the vector of that iteration can be applied to them.
        vector_iteration: iteration of `vector`; -1: the rank has no vector.
        vector: newest commit vector that the rank holds; empty: none.
        hashes: hash of a sample of each layer's parameters at these ages, by layer; empty: the job
            compares none.
        since: the same field of the newest StartEpoch or SaveLayers that the rank has carried out.
        copies: versions that the rank keeps whole in memory, by layer.
    """

    rank: int
    epoch: int
    ages: dict[int, int]
    complete: tuple[int, ...]
    vector_iteration: int = -1
    vector: bytes = b""
    hashes: dict[int, int] = {}
    since: int = -1
    copies: dict[int, tuple[Label, ...]] = {}


class EpochReady(Message, frozen=True, kw_only=True):
    """A rank holds its layers of the epoch and its links are up.

    Attributes:
        layers_materialised: number of layers that this worker has materialised since it started.
        received_bytes: bytes of state that peers sent for this epoch, counted on the sockets.
        regroup_s: seconds from when the rank began to enter the epoch until its last link was up.
        scheduled_s: processor seconds that computing the rank's schedule took.
        transfer_s: seconds from when its last link was up until the rank held its layers.
        comm_s: seconds from then until it could exchange tensors; NCCL forms its groups in them.
        receptions: (bytes, seconds) of large messages that came from ranks on other machines since
            the report before, by source rank; see transport/connection.py.
    """

    rank: int
    epoch: int
    layers_materialised: int
    received_bytes: int = 0
    regroup_s: float = 0.0
    scheduled_s: float = 0.0
    transfer_s: float = 0.0
    comm_s: float = 0.0
    receptions: dict[int, tuple[int, float]] = {}


class Evaluated(Message, frozen=True, kw_only=True):
    """The result of an evaluation on held-out data, the same on all ranks.

    Attributes:
        iteration: number of iterations applied to the parameters.
        loss: mean over the targets; None: it is not a number, which JSON cannot say.
        num_samples: number of samples; 0: the job was asked to stop, and there is no result.
        metrics: the same of each further number, by name.
        seconds: seconds that this rank took.
    """

    iteration: int
    loss: float | None
    num_samples: int
    num_targets: int
    metrics: dict[str, float | None] = {}
    seconds: float = 0.0


class IterationDone(Message, frozen=True, kw_only=True):
    """A rank has applied an iteration; the age of its layers is now iteration + 1.

    Attributes:
        loss: loss of the global batch. It is the same on all ranks, as are num_samples and
            sample_digest, because all of them come from the commit vector.
        seconds: seconds since this rank ended the iteration before.
        stall_s: seconds, part of `seconds`, for copying state for a save or waiting for copies in
            memory.
        peak_bytes: peak resident memory above the memory of the worker before it held a layer.
        ends: whether this iteration is the job's last one (all are trained, target_loss is reached,
            or a rank was asked to stop, or `early`).
        early: whether the losses of held-out data end training with this iteration.
        has_targets: whether any sample has a target; without one the loss is 0 and says nothing.
        tensor_bytes: peak bytes of tensors held if the job is traced; else 0.
        switches: whether this iteration is the last one of its epoch; the rank then goes on with
            the order for the next epoch, which it already has.
        received_bytes: bytes of state that arrived during the iteration for layers that the rank
            holds silently.
        copied: progress of the copies in memory during the iteration.
        action_s: seconds, part of `seconds`, by kind of action: "F" forward, "B" backward, or "BI"
            and "BW" for the parts of split backwards; waits and reductions are left out.
        eager_s: seconds, part of `seconds`, for eager forwards of shadowed layers.
        spans: measured spans of the iteration; empty if the job is not traced.
        began_s: moment from which the spans count, by the node's clock; from the coordinator on by
            the head's clock; None: unknown.
        clock_error_s: bound on the error of `began_s` by the head's clock, in seconds.
        receptions: (bytes, seconds) of large messages that came from ranks on other machines since
            the report before, by source rank; see transport/connection.py.
        evaluated: evaluations since the report before; `seconds` has not their time.
    """

    rank: int
    epoch: int
    iteration: int
    loss: float
    num_samples: int
    sample_digest: str
    seconds: float
    stall_s: float
    peak_bytes: int
    ends: bool
    tensor_bytes: int = 0
    switches: bool = False
    received_bytes: int = 0
    copied: CopiesDone = CopiesDone()
    action_s: dict[str, float] = {}
    eager_s: float = 0.0
    spans: tuple[MeasuredSpan, ...] = ()
    began_s: float | None = None
    clock_error_s: float = 0.0
    receptions: dict[int, tuple[int, float]] = {}
    evaluated: tuple[Evaluated, ...] = ()
    early: bool = False
    has_targets: bool = True

    @property
    def computing_s(self) -> float:
        """Seconds of all forwards and backwards together, without eager forwards."""
        return sum(self.action_s.values())


class Corrupted(Message, frozen=True, kw_only=True):
    """A rank has left the epoch because the holders of a layer have different parameters.

    Attributes:
        age: number of iterations applied to these parameters.
        hashes: this rank's hash of each layer concerned, by layer; empty if it holds none of them.
    """

    rank: int
    epoch: int
    age: int
    hashes: dict[int, int]


class LayersSaved(Message, frozen=True, kw_only=True):
    """A rank has written these of the layers that it owns; each further message names all so far.

    Attributes:
        iteration: number of iterations that are committed in the saved state.
    """

    rank: int
    epoch: int
    iteration: int
    files: tuple[LayerFile, ...]


class SaveFailed(Message, frozen=True, kw_only=True):
    """A rank could not write its layers, or the save of a whole version failed or was skipped.

    Attributes:
        rank: rank that failed; BY_PUBLISHER: the failure is that of the whole save.
        is_skipped: whether the save was not attempted because other saves were still under way.
    """

    rank: int
    epoch: int
    iteration: int
    reason: str
    is_skipped: bool = False


class CopySpoilt(Message, frozen=True, kw_only=True):
    """A rank has left the epoch because it could not read saved state as it was written.

    Attributes:
        source: version of the disk tier; "": a copy in memory, which is dropped.
        layer: layer of that version that could not be read; -1: its manifest.
    """

    rank: int
    epoch: int
    reason: str
    source: str = ""
    layer: int = -1


class CopiesFailed(Message, frozen=True, kw_only=True):
    """A rank could not keep or send a version of the copies in memory; it goes on training."""

    rank: int
    epoch: int
    reason: str


# What is to blame for an exception: the job itself, the node, or the node for lack of memory.
Blame = Literal["job", "node", "memory"]


class Raised(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong in a worker, and where.

    Attributes:
        error: type of the exception, or the signal or status that the process ended with.
        message: message of the exception, on one line.
        first_layer, end_layer: range of layers that the rank was computing; both 0: none.
    """

    error: str
    message: str = ""
    first_layer: int = 0
    end_layer: int = 0

    def is_like(self, other: "Raised") -> bool:
        """Whether both errors have the same type and their ranges of layers overlap or are both
        empty."""
        both = max(self.first_layer, other.first_layer), min(self.end_layer, other.end_layer)
        is_nowhere = not self.end_layer and not other.end_layer
        return self.error == other.error and (both[0] < both[1] or is_nowhere)


class WorkerFailed(Message, frozen=True, kw_only=True):
    """The code in a worker raised; the worker has left its epoch and keeps what it holds.

    Attributes:
        epoch: epoch that the worker has left; -1: it raised before it had reported. Then it holds
            nothing, and its process ends unless the job is to blame.
        mistake: (field, value, remedy) of a ConfigError, the value as JSON; None: another
            exception.
        has_diverged: whether training diverged; then the parameters are suspect, and nothing is
            saved.
    """

    node: int
    rank: int
    traceback: str
    pid: int = 0
    epoch: int = -1
    blame: Blame = "job"
    raised: Raised | None = None
    mistake: tuple[str, str, str] | None = None
    has_diverged: bool = False


class WorkerExited(Message, frozen=True, kw_only=True):
    """A worker's process has ended, and its agent has forked a new one in its place.

    Attributes:
        status: exit status of the process; negative: the signal that ended it.
        stalled: whether the agent killed the process because it made no progress.
        stack: stacks of its threads, if they could be read; else "".
        layers: first and end of the layers that it was computing; both 0: none.
    """

    node: int
    rank: int
    pid: int
    status: int
    stalled: bool = False
    stack: str = ""
    layers: tuple[int, int] = (0, 0)


class PeerUnreachable(Message, frozen=True, kw_only=True):
    """A rank lost its link to a peer, or heard nothing from it for too long."""

    rank: int
    epoch: int
    peer: int
    reason: str


class NoticeTaken(Message, frozen=True, kw_only=True):
    """A process of a node was told that the node is going to be taken away; or the node's agent, or
    the head, has found out that its machine is unfit.

    Attributes:
        rank: rank of that process, or the node's first rank if it was no worker.
        after_s: seconds from this message until the node is gone.
        reason: description of why the machine is unfit; "": it will be taken away.
    """

    node: int
    rank: int
    after_s: float
    reason: str = ""


class Heartbeat(Message, frozen=True, kw_only=True):
    """A node is alive.

    Attributes:
        sent_s: time of sending by the node's own clock; the coordinator sends it back.
        offset: offset of the coordinator's clock from the node's; None: not measured yet.
        request: number of the request that it answers; 0: nobody asked for it.
    """

    node: int
    sent_s: float
    offset: ClockOffset | None = None
    request: int = 0


class NodeLost(Message, frozen=True, kw_only=True):
    """A node is gone: its agent's connection closed, its lease ran out, or its agent ended."""

    node: int
    reason: str


class StopRequested(Message, frozen=True, kw_only=True):
    """The user, or the job itself, asks the job to stop at the next commit.

    Attributes:
        is_early: whether the job itself does, because it has had enough.
    """

    is_early: bool = False


class DrainRequested(Message, frozen=True, kw_only=True):
    """The user asks that the job go on without this node."""

    node: int


class Welcome(Message, frozen=True, kw_only=True):
    """The first message of a coordinator on a connection; agents refuse one of an older term."""

    term: int


class HeartbeatTaken(Message, frozen=True, kw_only=True):
    """A heartbeat has renewed the node's lease.

    Attributes:
        sent_s: the same as in the heartbeat.
        taken_s: time by the coordinator's clock.
    """

    sent_s: float
    taken_s: float = 0.0


class HeartbeatRequested(Message, frozen=True, kw_only=True):
    """The agent is to send a heartbeat at once: the coordinator asks who still hears it.

    Attributes:
        number: number of the request, from 1.
    """

    number: int


class Acknowledged(Message, frozen=True, kw_only=True):
    """The iterations before num_committed are on record; their reports are not needed any more."""

    num_committed: int


class Abort(Message, frozen=True, kw_only=True):
    """Leave all older epochs, finish an optimizer step that has begun, then answer `Stopped`.

    Attributes:
        nodes: members of the epoch, which are on record. Any other node is out of the job for good.
        replaced: pid, by rank, of a process that must end instead of answering, because its code
            raised and others hold its layers. A new process answers in its place.
    """

    epoch: int
    nodes: tuple[int, ...]
    replaced: dict[int, int] = {}


class StartEpoch(Message, frozen=True, kw_only=True):
    """Connect to the peers and get the layers that a plan assigns, then train from an iteration on.

    Attributes:
        addresses: host and port at which each rank's worker listens, by rank.
        iteration: first iteration to run; every layer has this age when it begins. AT_COMMIT: the
            iteration after the commit at which all ranks of the epoch before have voted for this
            epoch; a rank that has no part in that epoch begins at once.
        vector: commit vector of iteration - 1, which a rank applies first if it has not; empty
            before the first iteration of a run, or after the job went back. Gradients of any other
            iteration are dropped.
        source: version of the disk tier that holds all layers, for a start without a vector; "":
            layers are made from the seed or the given weights.
        rounds: rounds of transfers of the layers that ranks lack. Layers that a rank is to hold
            silently arrive while training goes on.
        persists: whether all ranks save to disk before the first iteration, or, if a rank is still
            writing another save, after the first commit at which none is.
        since: epoch in which the job last went back, to a save or to copies in memory; -1: never. A
            rank drops what it holds from before that.
        copies: copies in memory beyond what the plan assigns: which ranks keep which layers.
        copied: version of the copies in memory to start from where there is no vector; None: the
            job starts from a save or from its beginning.
        kept: version of the copies in memory that is to be kept until the next one is complete: the
            safest that has all layers; None: the version that the rank itself knows, if any.
        idle: predicted spans in which copies may be sent; empty: ranks first measure them in
            iterations without copies.
        put_off_s: longest time for which a rank puts off the commit at which the epoch begins while
            it writes a save, because nodes leave then.
    """

    epoch: int
    plan: Plan
    addresses: dict[int, tuple[str, int]]
    iteration: int
    vector: bytes = b""
    source: str = ""
    rounds: tuple[tuple[Transfer, ...], ...] = ()
    persists: bool = False
    since: int = -1
    copies: tuple[LayerCopy, ...] = ()
    copied: Label | None = None
    kept: Label | None = None
    idle: tuple[IdleSpans, ...] = ()
    put_off_s: float = 0.0


class SaveLayers(Message, frozen=True, kw_only=True):
    """Save the layers to disk, and end training.

    Attributes:
        iteration: age of the saved layers.
        layers: layers that each rank writes, by rank.
        vector, since, copied: the same as in StartEpoch.
    """

    epoch: int
    iteration: int
    layers: dict[int, tuple[int, ...]]
    vector: bytes = b""
    since: int = -1
    copied: Label | None = None


class Shutdown(Message, frozen=True, kw_only=True):
    """The job is over; end the process."""


class SavePart(Message, frozen=True, kw_only=True):
    """Leave all epochs for good, and save what you hold; an agent says so when it gives its head up
    (docs/protocol.md, "Nodes without a head")."""


class PartSaved(Message, frozen=True, kw_only=True):
    """A rank has written some of its layers by itself; said to the agent alone.

    Attributes:
        iteration: highest age of the rank's layers, so far; -1: there are none.
        num_others: number of its layers that are left to others that hold them.
        is_done: whether the rank writes nothing more.
        reason: why it could not write all that it holds; "": it could, so far.
    """

    rank: int
    iteration: int = -1
    num_layers: int = 0
    num_others: int = 0
    is_done: bool = False
    reason: str = ""


# What workers and their agent report to the coordinator as facts.
Fact = (
    NodeArrived
    | NoticeTaken
    | WorkerReady
    | Stopped
    | EpochReady
    | IterationDone
    | Corrupted
    | LayersSaved
    | SaveFailed
    | CopySpoilt
    | CopiesFailed
    | WorkerFailed
    | WorkerExited
    | PeerUnreachable
)
FromNode = Fact | Heartbeat
ToNode = (
    Welcome
    | HeartbeatTaken
    | HeartbeatRequested
    | Acknowledged
    | Abort
    | StartEpoch
    | SaveLayers
    | StopRequested
    | Shutdown
)
ToWorker = ToNode | SavePart
FromWorker = Fact | PartSaved
Order = Abort | StartEpoch | SaveLayers | SavePart | Shutdown
