"""What a run leaves behind: one frozen record per fact, together the report (DESIGN 7)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationRecord:
    """A committed iteration.

    Attributes:
        samples: how many.
        sample_digest: xxh3_128 of the sorted sample numbers as the first stages consumed them.
        seconds: longest of the ranks', from the end of the iteration before.
        predicted_s: by the estimator, of the plan in use, with the profile as it was corrected by
            then.
        peak_bytes: largest of the ranks', measured above the worker's memory without layers.
    """

    iteration: int
    loss: float
    samples: int
    sample_digest: str
    seconds: float
    epoch: int
    predicted_s: float
    peak_bytes: int
    predicted_peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A worker's process, by pid and start time, and what it did."""

    node: int
    rank: int
    pid: int
    pid_start: float
    first_epoch: int
    last_epoch: int
    layers_materialised: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """What happened besides iterations, and what it cost.

    Attributes:
        kind: of the SPEC when injected, but unslowed for slow=1; else lost, crash, stall, leader,
            degraded, joined, drained, slow, fast, reformed, or what failed.
        nodes: concerned.
        fired: False for an injected fault whose place never came.
        candidates: the answers that were proposed, with their prices; `answer` was taken.
        time_to_failure_s: mean time to the next failure, by which they were weighed.
        error: the type of what raised in a worker, or the signal or status that ended it; `message`
            is the exception's, `layers` are those that it was computing.
        detect_s: from the loss until every member had left the old epoch and answered, and a
            machine had come if all waited for one; of a lost coordinator, until it ran again.
        decide_s: until the plan was on record and told.
        regroup_s, transfer_s: until links were up, and until every layer was where it belongs.
        received_bytes: of state, counted on the sockets; `transfer_bytes` is what was planned.
        downtime_s: the sum of these: from the loss until every rank could go on.
        recovery_s: of it, from when the coordinator noticed the loss. Expected was
            predicted_recovery_s, from predicted_recovery_s_min to predicted_recovery_s_max.
        predicted_downtime_s: once the answer is told, so without detect_s and decide_s; of these
            predicted_transfer_s for moving layers.
    """

    kind: str
    nodes: tuple[int, ...]
    iteration: int
    step: str = ""
    fired: bool = True
    policy: str = ""
    answer: str = ""
    candidates: tuple[Mapping[str, object], ...] = ()
    time_to_failure_s: float = 0.0
    detect_s: float = 0.0
    decide_s: float = 0.0
    regroup_s: float = 0.0
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    received_bytes: int = 0
    source_tier: str = ""
    downtime_s: float = 0.0
    predicted_downtime_s: float = 0.0
    predicted_transfer_s: float = 0.0
    recovery_s: float = 0.0
    predicted_recovery_s: float = 0.0
    predicted_recovery_s_min: float = 0.0
    predicted_recovery_s_max: float = 0.0
    redone_samples: int = 0
    reason: str = ""
    error: str = ""
    message: str = ""
    layers: tuple[int, ...] = ()

    @property
    def is_foreseen(self) -> bool:
        """Whether it was a recovery that took as long as it was expected to."""
        least_s, most_s = self.predicted_recovery_s_min, self.predicted_recovery_s_max
        return self.recovery_s > 0.0 and least_s <= self.recovery_s <= most_s

    @property
    def transition_s(self) -> float:
        """What `predicted_downtime_s` predicts."""
        return self.downtime_s - self.detect_s - self.decide_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRecord:
    """What a rank took for one kind of action in an iteration of an epoch, beside what it was to.

    Attributes:
        kind: "F" forward, "B" backward, or "BI" and "BW" where backwards are split.
        first_layer, end_layer: of its stage.
        predicted_s: as the profile says.
        corrected_s: as the profile says that the job has corrected by the end of the epoch.
        measured_s: median of the epoch's iterations but the first.
    """

    epoch: int
    rank: int
    kind: str
    first_layer: int
    end_layer: int
    predicted_s: float
    corrected_s: float
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRecord:
    """The most that a rank held in an epoch, beside Odyssey's equation 14.

    Attributes:
        tensor_bytes: what that predicts, as counted by the rank if the job was traced; else 0.
        measured_bytes: resident memory above the worker's without layers, so with messages, what
            actions take meanwhile, and what the allocator keeps.
    """

    epoch: int
    rank: int
    predicted_bytes: int
    tensor_bytes: int
    measured_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalRecord:
    """How the job ended.

    Attributes:
        iteration: number of committed iterations.
        parameters_sha256: over all parameters in layer order, tied ones once; "" if not saved.
        optimizer_sha256: over their optimizer state, in the same order.
    """

    iteration: int
    loss: float
    parameters_sha256: str
    optimizer_sha256: str
    nodes: tuple[int, ...]
    epoch: int
    checkpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report of a run, version 1."""

    job: dict[str, Any]
    seed: int
    versions: dict[str, str]
    workers: tuple[WorkerRecord, ...]
    iterations: tuple[IterationRecord, ...]
    events: tuple[EventRecord, ...]
    checkpoints: dict[str, float]
    ledger: dict[str, float]
    final: FinalRecord
    plan: dict[str, Any] = field(default_factory=dict)
    actions: tuple[ActionRecord, ...] = ()
    memory: tuple[MemoryRecord, ...] = ()
    version: int = 1
