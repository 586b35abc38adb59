"""The report of a run: one frozen record per fact."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from planaria.core.records import DecisionInputs

REPORT_VERSION: Final = 3


def _record_text(record: object, *names: str) -> str:
    """A record in one line, with these of its fields that are not empty."""
    values = ((name, getattr(record, name)) for name in names)
    shown = (f"{name}={value!r}" for name, value in values if name == "iteration" or value)
    return f"{type(record).__name__}({', '.join(shown)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationRecord:
    """A committed iteration.

    Attributes:
        iteration: number of the iteration, from 0.
        loss: mean loss of its samples.
        samples: number of samples.
        sample_digest: xxh3_128 of the sorted sample numbers that the first stages consumed.
        seconds: time since the end of the iteration before, as the slowest rank measured it.
        epoch: epoch of the plan in use.
        predicted_s: the estimator's iteration time for the plan in use, from the profile with its
            corrections so far.
        peak_bytes: highest peak memory of a rank, without what a worker without layers uses.
        predicted_peak_bytes: prediction of it by Odyssey's equation 14.
        at_s: time of the commit on the head's clock, in seconds since the job started.
        clock_error_s: bound on the error with which spans of ranks on several machines are placed
            on one clock, in seconds; 0: all have one clock, or the job is not traced; None: the
            clocks are not known to each other, and the spans of each rank count from when it began.
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
    at_s: float = 0.0
    clock_error_s: float | None = 0.0

    def __str__(self) -> str:
        return _record_text(self, "iteration", "loss", "samples", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """The result of an evaluation on held-out data.

    Attributes:
        iteration: number of iterations that the parameters were trained for.
        loss: mean over the targets.
        samples: number of samples.
        targets: number of targets.
        metrics: mean over the targets of each further number, by name.
        seconds: time that it took; training waited for it.
        at_s: time at which it was known on the head's clock, in seconds since the job started.
    """

    iteration: int
    loss: float
    samples: int
    targets: int
    metrics: dict[str, float]
    seconds: float
    at_s: float

    def __str__(self) -> str:
        return _record_text(self, "iteration", "loss", "metrics", "samples", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """What one worker process did; its pid and start time identify it.

    Attributes:
        node: number of its node.
        rank: number of its rank.
        pid: id of the process on its machine.
        pid_start: time at which the process began, in seconds since 1970.
        first_epoch, last_epoch: first and last epoch in which it had work.
        layers_materialised: number of layers that it has filled with a state.
    """

    node: int
    rank: int
    pid: int
    pid_start: float
    first_epoch: int
    last_epoch: int
    layers_materialised: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """An event other than an iteration, and its cost.

    Attributes:
        kind: kind of the injected fault ("unslowed" for slow=1); for other events lost, crash,
            stall, leader, degraded, joined, drained, preempted, slow, fast, reformed, early,
            granted, machine, unfit, save_failed, or what failed.
        nodes: nodes concerned.
        iteration: iteration that was in progress.
        step: step of the iteration, or of the recovery, at which a fault was injected; "": none.
        fired: False for an injected fault whose place never came.
        value: value of the injected fault, such as the seconds of a notice.
        at_s: time at which it happened, in seconds since the job started, on the head's clock; -1:
            not known.
        noticed_at_s: time at which the coordinator noticed the loss or chose the change; -1: never.
        over_at_s: time at which every rank could go on, or the change was made; -1: never.
        epoch: epoch that answered it; -1: none did.
        policy: policy that answered it.
        answer: name of the answer, such as "reroute".
        inputs: facts from which the answer was chosen, beside the job, its profile and its plans;
            null in what a running job tells `planaria events`.
        candidates: the proposed answers with their prices; `answer` names the chosen one.
        time_to_failure_s: mean time to the next failure that the choice assumed.
        error: type of the exception in a worker, or the signal or exit status that ended it;
            `message` is the text of the exception, `layers` are the layers it was computing.
        detect_s: time from the loss until every member had left the old epoch and answered, and a
            node had come if all waited for one; for a lost coordinator, until it ran again.
        decide_s: time from then until the plan was recorded and sent.
        regroup_s: time from then until every rank could go on, without transfer_s.
        transfer_s: time in which layers moved, once links were up.
        received_bytes: bytes of state received, counted on the sockets; `transfer_bytes` is the
            planned number.
        source_tier: place that layers came from: "live" holders; "memory" or "disk" if all nodes
            went back; "": no layer moved.
        downtime_s: sum of these four times: from the loss until every rank could go on.
        recovery_s: the part of downtime_s since the coordinator noticed the loss. The prediction
            is predicted_recovery_s, between predicted_recovery_s_min and predicted_recovery_s_max.
        predicted_downtime_s: predicted time from sending the plan until every rank goes on, so
            without detect_s and decide_s; it includes predicted_transfer_s for moving layers.
        redone_samples: number of samples that were computed again.
        reason: text about what happened, for people.
    """

    kind: str
    nodes: tuple[int, ...]
    iteration: int
    step: str = ""
    fired: bool = True
    value: float = 0.0
    at_s: float = -1.0
    noticed_at_s: float = -1.0
    over_at_s: float = -1.0
    epoch: int = -1
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
    inputs: DecisionInputs | None = None

    def __str__(self) -> str:
        names = ("kind", "nodes", "iteration", "step", "policy", "answer", "downtime_s")
        return _record_text(self, *names, "redone_samples", "reason", "error", "message")

    @property
    def is_foreseen(self) -> bool:
        """Whether this is a recovery whose time lies in the predicted range."""
        least_s, most_s = self.predicted_recovery_s_min, self.predicted_recovery_s_max
        return self.recovery_s > 0.0 and least_s <= self.recovery_s <= most_s

    @property
    def transition_s(self) -> float:
        """Downtime after the plan was sent: the time that `predicted_downtime_s` predicts."""
        return self.downtime_s - self.detect_s - self.decide_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRecord:
    """Measured and predicted time of one kind of action per iteration, on one rank in one epoch.

    Attributes:
        epoch: epoch of the plan in use.
        rank: number of the rank.
        kind: "F" forward, "B" backward, or "BI" and "BW" where backwards are split.
        first_layer, end_layer: layers of the rank's stage, end exclusive.
        predicted_s: prediction from the profile.
        corrected_s: prediction from the profile with the corrections at the end of the epoch.
        measured_s: median of the epoch's newest iterations, never counting the first one.
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
    """Measured and predicted peak memory of a rank in an epoch.

    Attributes:
        epoch: epoch of the plan in use.
        rank: number of the rank.
        predicted_bytes: prediction by Odyssey's equation 14.
        tensor_bytes: bytes that equation 14 predicts, as the rank counted them; 0 if the job was
            not traced.
        measured_bytes: resident memory above that of a worker without layers. It includes
            messages, temporary memory of actions, and what the allocator keeps.
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
        loss: loss of the last one.
        parameters_sha256: hash of all parameters in layer order, tied ones once; "" if not saved.
        optimizer_sha256: hash of their optimizer state, in the same order.
        nodes: nodes that were left.
        epoch: epoch of the last plan.
        checkpoint: place of the newest save; "": there is none.
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
    """The report of a run, version 3.

    Reports of version 2 have the entries of `disk` in `checkpoints` itself, or those of `memory` in
    their place. Reports of version 1 have no inputs of decisions.

    Attributes:
        job: all keys of the job file, by table.
        seed: seed of the job.
        versions: versions of what it ran with, by package.
        workers: processes that computed.
        iterations: iterations that stayed committed.
        events: faults, losses, answers, nodes that came or left, and other events, in their order.
        checkpoints: tables "disk", of saves, and "memory", of copies. Both have `every`, the number
            of iterations from one to the next; `checkpoint_s`, the seconds from a commit until its
            state is complete there; `retrieval_s`, the seconds to read it; and
            `expected_wasted_s`, which a failure costs (Gemini's equation 1): the first, half of the
            period and the last. That of memory lacks them if no two versions were complete without
            a recovery between them, and has `idle_used_s` and `idle_left_s`: seconds of an
            iteration's idle network that copies used and left.
        ledger: seconds by category, and their sum as `wall` (docs/GLOSSARY.md).
        wasted: tables "live", "memory", "disk" and "start", by the tier that kept the state with
            which recoveries went on, in "start" none: `recoveries`, their number; `redo_s`, the
            seconds that were computed again; `transfer_s`, those for which the job waited for
            layers; and `wasted_s`, the sum of both. They add up to `redo` and `transfer` of the
            ledger. A recovery that another loss broke off is one with the next. Empty in older
            reports.
        final: end of the job.
        plan: plan that the job began with.
        plans: plans that decisions made or left, by epoch. Of a change in several switches, the
            epochs before the last have none.
        profile: profile by which the job was planned, as `planaria profile` writes it.
        processors: number of processors that all ranks share; 0: each rank has its own.
        first_iteration: iteration with which the run began.
        evaluations: evaluations on held-out data.
        actions: seconds of forwards and backwards, predicted and measured; of the newest epochs if
            all have more than 262,144 figures and hops of microbatches.
        memory: memory of ranks, predicted and measured; likewise.
        version: version of this format.
    """

    job: dict[str, Any]
    seed: int
    versions: dict[str, str]
    workers: tuple[WorkerRecord, ...]
    iterations: tuple[IterationRecord, ...]
    events: tuple[EventRecord, ...]
    checkpoints: dict[str, dict[str, float]]
    ledger: dict[str, float]
    final: FinalRecord
    plan: dict[str, Any] = field(default_factory=dict)
    plans: dict[int, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)
    processors: int = 0
    first_iteration: int = 0
    wasted: dict[str, dict[str, float]] = field(default_factory=dict)
    evaluations: tuple[EvaluationRecord, ...] = ()
    actions: tuple[ActionRecord, ...] = ()
    memory: tuple[MemoryRecord, ...] = ()
    version: int = REPORT_VERSION
