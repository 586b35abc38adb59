"""The messages between workers, agents and the coordinator, each one a frozen msgspec record.

A worker talks to its agent; the agent forwards what its workers say to the coordinator, and
what the coordinator says to all of its workers. Every message of an epoch carries it, so that
an older one can be refused. On the wire: JSON with the record's name as its tag.
"""

from dataclasses import dataclass

import msgspec

from planaria.core.job import JobConfig
from planaria.core.plan import ModelProfile, Plan


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


class WorkerReady(Message, frozen=True, kw_only=True):
    """A worker has started and listens at (host, port)."""

    node: int
    rank: int
    pid: int
    pid_start: float
    host: str
    port: int


class EpochReady(Message, frozen=True, kw_only=True):
    """A rank holds its layers of the epoch and its links are up."""

    rank: int
    epoch: int
    layers_materialised: int


class IterationDone(Message, frozen=True, kw_only=True):
    """A rank has applied an iteration: its age is now iteration + 1.

    Attributes:
        loss: of the global batch, the same on all ranks (it rides on the commit vector).
        samples: the sample numbers that this rank consumed as a first stage.
        seconds: since this rank ended the iteration before.
        stall_s: of those, spent in copying state for a save.
        peak_bytes: most resident memory above that of the worker before it held a layer.
        ends: this iteration is the last one (the end, target_loss, or a request to stop).
    """

    rank: int
    epoch: int
    iteration: int
    loss: float
    samples: tuple[int, ...]
    seconds: float
    stall_s: float
    peak_bytes: int
    ends: bool
    spans: tuple[MeasuredSpan, ...] = ()


class LayersSaved(Message, frozen=True, kw_only=True):
    """A rank has written the layers that it owns; iteration counts the committed ones."""

    rank: int
    epoch: int
    iteration: int
    files: tuple[LayerFile, ...]


class SaveFailed(Message, frozen=True, kw_only=True):
    """A rank could not write its layers; nothing of it is left on disk."""

    rank: int
    epoch: int
    iteration: int
    reason: str


class WorkerFailed(Message, frozen=True, kw_only=True):
    """The code in a worker raised; `mistake` is (field, value, remedy) of a ConfigError, the
    value as JSON."""

    node: int
    rank: int
    traceback: str
    mistake: tuple[str, str, str] | None = None


class WorkerExited(Message, frozen=True, kw_only=True):
    """A worker's process is gone: exit status, negative for a signal."""

    node: int
    rank: int
    status: int


class NodeLost(Message, frozen=True, kw_only=True):
    """The connection to a node's agent closed."""

    node: int


class StopRequested(Message, frozen=True, kw_only=True):
    """The user asks the job to stop at the next commit."""


class StartEpoch(Message, frozen=True, kw_only=True):
    """Form the links and hold the layers of a plan, then train from an iteration on.

    Attributes:
        addresses: where each rank's worker listens.
        iteration: the first to run; all ranks start with this age.
        source: the version of the disk tier to load, "" to start from the seed.
    """

    epoch: int
    plan: Plan
    addresses: dict[int, tuple[str, int]]
    iteration: int
    source: str = ""


class Shutdown(Message, frozen=True, kw_only=True):
    """All is saved; leave."""


FromNode = (
    WorkerReady
    | EpochReady
    | IterationDone
    | LayersSaved
    | SaveFailed
    | WorkerFailed
    | WorkerExited
    | NodeLost
    | StopRequested
)
ToNode = StartEpoch | StopRequested | Shutdown


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent, and each of its workers, is told when it is forked.

    Attributes:
        worker: the worker's main function, "module:function".
        cache_directory: where tokens and profiles are kept between jobs.
        profile: of a paced job, whose layers it describes.
        trace: whether workers report the spans of every iteration.
    """

    job: JobConfig
    node: int
    token: bytes
    coordinator: tuple[str, int]
    worker: str
    cache_directory: str
    profile: ModelProfile | None = None
    trace: bool = False
    device: int = 0

    @property
    def rank(self) -> int:
        """The rank of the worker that this spec is given to."""
        return self.node * self.job.cluster.devices_per_node + self.device


class PrepareRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that looks at a job before it starts is told.

    Attributes:
        profile: given by the user; measured where it is None.
    """

    job: JobConfig
    cache_directory: str
    profile: ModelProfile | None = None


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What it found.

    Attributes:
        parameters: for each layer its parameters' names, without later uses of tied ones.
        mistake: (field, value, remedy) of a ConfigError; the rest is empty then.
        traceback: of what the user's code raised; the rest is empty then.
    """

    profile: ModelProfile | None = None
    num_samples: int = 0
    vocabulary_size: int = 0
    objective: str = ""
    parameters: tuple[tuple[str, ...], ...] = ()
    num_parameters: int = 0
    mistake: tuple[str, str, str] | None = None
    traceback: str = ""
