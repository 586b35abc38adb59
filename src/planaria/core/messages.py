"""The messages between workers, agents and the coordinator, each one a frozen msgspec record.

A worker talks to its agent; the agent forwards what its workers say to the coordinator, and
what the coordinator says to all of its workers. Every message of an epoch carries it, so that
an older one can be refused. On the wire: JSON with the record's name as its tag.
"""

from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from planaria.core.copies import CopiesDone, IdleSpans, Label, LayerCopy
from planaria.core.plan import Plan, Transfer

# The iteration of a StartEpoch that begins when the ranks of the epoch before agree to.
AT_COMMIT: Final = -1
# The rank of a SaveFailed about the manifest.
BY_PUBLISHER: Final = -1


class Message(msgspec.Struct, frozen=True, tag=True):
    """The base of all messages: final subclasses only."""


@dataclass(frozen=True, slots=True)
class LayerFile:
    """One layer's file in a checkpoint: its name there, its size and the hash of its bytes."""

    layer: int
    file: str
    num_bytes: int
    xxh3_128: str


class MeasuredSpan(msgspec.Struct, frozen=True, array_like=True):
    """A measured span: the action's text, its lane, and its seconds since the iteration began."""

    lane: str
    action: str
    start_s: float
    end_s: float


class NodeArrived(Message, frozen=True, kw_only=True):
    """An agent has started; `rank` is its first one.

    Attributes:
        machine: on which it runs. Another node may have run there before, and been lost.
    """

    node: int
    rank: int
    machine: str


class WorkerReady(Message, frozen=True, kw_only=True):
    """A worker has started and listens at (host, port)."""

    node: int
    rank: int
    pid: int
    pid_start: float
    host: str
    port: int


class Stopped(Message, frozen=True, kw_only=True):
    """A rank has left everything of older epochs; what it holds now (DESIGN 4.5 b).

    Attributes:
        ages: of the layers that are there whole, the number of iterations applied to each.
        complete: those whose reduced gradients of iteration `age` are complete too, so that the
            vector of that iteration can be applied.
        vector: the newest commit vector that the rank holds, of iteration vector_iteration; -1
            and empty if it has none.
        hashes: sampled, of the layers' parameters at these ages; empty if none are compared.
        since: as in StartEpoch, of the newest order that the rank has carried out.
        copies: of the layers of which the rank keeps copies in memory, the versions that are whole.
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
        layers_materialised: by this worker since it started.
        received_bytes: of state that came from peers for this epoch, as its sockets count them.
        regroup_s: until its last link stood.
        scheduled_s: processor seconds that its schedule took.
        transfer_s: that the layers took after that.
    """

    rank: int
    epoch: int
    layers_materialised: int
    received_bytes: int = 0
    regroup_s: float = 0.0
    scheduled_s: float = 0.0
    transfer_s: float = 0.0


class IterationDone(Message, frozen=True, kw_only=True):
    """A rank has applied an iteration: its age is now iteration + 1.

    Attributes:
        loss: of the global batch, the same on all ranks, as are the samples: they are in the
            commit vector.
        seconds: since this rank ended the iteration before.
        stall_s: of those, spent in copying state for a save, or in waiting for copies in memory.
        action_s: of those, spent in forwards ("F") and backwards ("B", or "BI" and "BW"); waits and
            reductions are left out.
        eager_s: of those, spent in eager forwards of shadowed layers.
        peak_bytes: most resident memory above that of the worker before it held a layer.
        tensor_bytes: most bytes of tensors held, of a job that is traced; else 0.
        ends: this iteration is the last one (the end, target_loss, or a request to stop).
        switches: it is the last one of this epoch; the rank goes on with the order that it has.
        received_bytes: of state that came in the iteration, for layers that the rank has silently.
        copied: what it has meant for copies in memory.
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

    @property
    def computing_s(self) -> float:
        """In forwards and backwards together."""
        return sum(self.action_s.values())


class Corrupted(Message, frozen=True, kw_only=True):
    """A rank has left the epoch, for the holders of a layer have different parameters.

    Attributes:
        age: of the parameters.
        hashes: what this rank has in the layers concerned; empty if it holds none of them.
    """

    rank: int
    epoch: int
    age: int
    hashes: dict[int, int]


class LayersSaved(Message, frozen=True, kw_only=True):
    """A rank has written these of the layers that it owns, more each time that it says so;
    iteration counts the committed ones."""

    rank: int
    epoch: int
    iteration: int
    files: tuple[LayerFile, ...]


class SaveFailed(Message, frozen=True, kw_only=True):
    """A rank could not write its layers, or has not tried to.

    Attributes:
        is_skipped: a save before was still under way.
    """

    rank: int
    epoch: int
    iteration: int
    reason: str
    is_skipped: bool = False


class CopySpoilt(Message, frozen=True, kw_only=True):
    """A rank has left the epoch, for state that it was to read is not what was written.

    Attributes:
        source: the version of the disk tier; "" for a copy in memory, which is dropped.
        is_damaged: otherwise its storage refuses to give it.
    """

    rank: int
    epoch: int
    reason: str
    source: str = ""
    is_damaged: bool = True


class CopiesFailed(Message, frozen=True, kw_only=True):
    """A rank could not keep, or give, all of a version of the copies in memory; it trains on."""

    rank: int
    epoch: int
    reason: str


# Whose fault an exception is: the job's own, its node's, or the node's for want of memory.
Blame = Literal["job", "node", "memory"]


class Raised(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong in a worker, and where.

    Attributes:
        error: the type of an exception, or the signal or status that the process ended with.
        message: of the exception, one line.
        first_layer, end_layer: the layers that the rank was computing; both 0 if it was not.
    """

    error: str
    message: str = ""
    first_layer: int = 0
    end_layer: int = 0

    def is_like(self, other: "Raised") -> bool:
        """Whether it is the same error at the same layer, however pipelines are cut there."""
        both = max(self.first_layer, other.first_layer), min(self.end_layer, other.end_layer)
        is_nowhere = not self.end_layer and not other.end_layer
        return self.error == other.error and (both[0] < both[1] or is_nowhere)


class WorkerFailed(Message, frozen=True, kw_only=True):
    """The code in a worker raised; the worker has left its epoch, and keeps what it holds.

    Attributes:
        epoch: that it has left, -1 where it raised before it had reported; then it holds nothing,
            and unless the job is to blame its process ends.
        mistake: (field, value, remedy) of a ConfigError, the value as JSON.
        has_diverged: what led to it is suspect: there is nothing to be saved.
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
    """A worker's process is gone, and a new one is forked in its place.

    Attributes:
        status: of its exit, negative for a signal.
        stalled: the agent killed it, because it made no progress.
        stack: where its threads stood, if that could be told.
        layers: first and end of those that it was computing, both 0 if it was not.
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
    """A node is going to be taken away; some process of it, of this rank, was told so.

    Attributes:
        after_s: it will be gone then, counted from when this is said.
    """

    node: int
    rank: int
    after_s: float


class Heartbeat(Message, frozen=True, kw_only=True):
    """A node lives; `sent_s` is by its own clock and comes back to it."""

    node: int
    sent_s: float


class NodeLost(Message, frozen=True, kw_only=True):
    """A node is gone: its agent's connection closed, its lease ran out, or its agent ended."""

    node: int
    reason: str


class StopRequested(Message, frozen=True, kw_only=True):
    """The user asks the job to stop at the next commit."""


class DrainRequested(Message, frozen=True, kw_only=True):
    """The user asks that the job go on without a node."""

    node: int


class Welcome(Message, frozen=True, kw_only=True):
    """The first word of a coordinator on a connection; one of an older term is not obeyed."""

    term: int


class HeartbeatTaken(Message, frozen=True, kw_only=True):
    """A heartbeat has renewed the node's lease."""

    sent_s: float


class Acknowledged(Message, frozen=True, kw_only=True):
    """Iterations before this number are recorded; nobody asks for their reports again."""

    num_committed: int


class Abort(Message, frozen=True, kw_only=True):
    """Leave all that is of an older epoch, finish a step that has begun, then answer `Stopped`.

    Attributes:
        nodes: the members of the epoch, which are on record. Any other node is dead for good.
        replaced: by rank the process that is not to answer but to end: its code raised, and others
            hold its layers. A new one answers in its place.
    """

    epoch: int
    nodes: tuple[int, ...]
    replaced: dict[int, int] = {}


class StartEpoch(Message, frozen=True, kw_only=True):
    """Form the links and hold the layers of a plan, then train from an iteration on.

    Attributes:
        addresses: where each rank's worker listens.
        iteration: the first to run; all layers have this age then. AT_COMMIT: the one after the
            commit at which all ranks of the epoch before ask for this one; whoever has no part
            in that one begins at once.
        vector: of iteration - 1, to be applied first by whoever has not; empty before the first
            iteration of a run, or after the job went back to a save. Gradients of any other
            iteration are dropped.
        source: where there is no vector, the version of the disk tier in which all layers are, ""
            if the seed or given weights tell them.
        rounds: of transfers of the layers that a rank lacks; those of the silent ones arrive while
            training goes on.
        persists: save to disk before the first iteration, or after the first commit at which no
            rank is writing another save.
        since: the epoch in which the job last went back, to a save or to copies in memory, -1 if
            never. What a rank has from before that counts no more, and is dropped.
        copies: who keeps which in memory, besides what the plan gives to each.
        copied: the copies in memory from which all go on where there is no vector; None: from a
            save, or from the start.
        kept: the newest version of the copies in memory that is there of all layers, and is to be
            kept until the next one is complete; None: the one that the rank knows, if any.
        idle: when copies may go, as predicted; none: as ranks find out in iterations without.
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


class SaveLayers(Message, frozen=True, kw_only=True):
    """Save the layers to disk, and train no more.

    Attributes:
        layers: that each rank writes.
        vector, since, copied: as in StartEpoch.
    """

    epoch: int
    iteration: int
    layers: dict[int, tuple[int, ...]]
    vector: bytes = b""
    since: int = -1
    copied: Label | None = None


class Shutdown(Message, frozen=True, kw_only=True):
    """The job is over; leave."""


# What workers and their agent say about what is; the coordinator notes it.
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
    | Acknowledged
    | Abort
    | StartEpoch
    | SaveLayers
    | StopRequested
    | Shutdown
)
Order = Abort | StartEpoch | SaveLayers | Shutdown
