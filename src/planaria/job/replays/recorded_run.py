"""A run as its report tells it: the job, planned again, and what happened to it.

Reports of version 2 and later can be read. The job is planned anew from the profile in the report,
for as many processors as its ranks shared, so that this machine does not matter.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from planaria.core.findings import Findings
from planaria.core.plan import Plan
from planaria.core.specs import Prepared
from planaria.errors import ConfigError
from planaria.job.config import job_from_dict
from planaria.job.planning import Planned, plan_job
from planaria.observe.ledger import Category
from planaria.observe.metrics import REPORT_VERSION, EventRecord
from planaria.profiles.profile_json import decode_profile

_OLDEST_VERSION: Final = 2
_OLD_REMEDY: Final = "train again with this version of planaria"
_END_KINDS: Final = ("failed", "lost")  # Events of an early end, which concern no node.

# What a report has beside the tables by which it is told from other files.
_TABLES: Final = ("plan", "plans", "profile", "processors", "checkpoints", "first_iteration")
_LEDGER: Final = (Category.STARTUP, Category.CHECKPOINT_STALL, "wall")

Value = TypeVar("Value")


class RecordedIteration(msgspec.Struct, frozen=True):
    """A committed iteration that counts, as in `IterationRecord`."""

    iteration: int
    samples: int
    seconds: float
    epoch: int
    at_s: float


class _Evaluation(msgspec.Struct, frozen=True):
    """What a replay needs of an evaluation; its loss may be no number."""

    iteration: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run that is over.

    Attributes:
        name: name of the report's file, without its suffix.
        planned: the job with the plans that it had.
        plans: plans of the run, by epoch; the same as in `Report`.
        iterations: committed iterations that count, in order.
        events: events in the order in which they happened.
        saves: seconds of saves, the table "disk" of the report's `checkpoints`.
        ledger: seconds by category.
        wasted: number and seconds of recoveries, by tier; empty in older reports.
        evaluated_s: seconds of evaluations, by the number of iterations before them.
    """

    name: str
    planned: Planned
    plans: Mapping[int, Plan]
    iterations: tuple[RecordedIteration, ...]
    events: tuple[EventRecord, ...]
    saves: Mapping[str, float]
    ledger: Mapping[str, float]
    wasted: Mapping[str, Mapping[str, float]]
    first_iteration: int
    evaluated_s: Mapping[int, float]

    @property
    def trained_until_s(self) -> float:
        """The time of the last commit, in seconds since the job started."""
        return self.iterations[-1].at_s

    @property
    def startup_s(self) -> float:
        """The seconds from the start of the job until it trained."""
        return self.ledger[Category.STARTUP]

    @property
    def samples(self) -> int:
        """The number of samples that count."""
        return sum(iteration.samples for iteration in self.iterations)

    @property
    def findings(self) -> Findings:
        """What the job had learned of itself by its last decision, without what is of one node."""
        # Clocks do not tell: a coordinator on another machine has another one.
        inputs = {event.epoch: event.inputs for event in self.events if event.inputs is not None}
        if not inputs:
            return Findings()
        newest = inputs[max(inputs)].findings
        return msgspec.structs.replace(newest, more_bytes=(), speeds={}, idle={})

    @property
    def decisions(self) -> Iterator[tuple[EventRecord, ...]]:
        """The events that have the inputs of their decision, those of one decision together."""
        by_epoch: dict[int, list[EventRecord]] = {}
        for event in self.events:
            if event.inputs is not None:
                by_epoch.setdefault(event.epoch, []).append(event)
        for epoch in sorted(by_epoch):
            yield tuple(by_epoch[epoch])


def read_run(path: Path, *, option: str) -> RecordedRun:
    """The run of a report that `planaria train --report` wrote.

    Args:
        option: option that names the file, for errors.

    Raises:
        ConfigError: the file cannot be read, is no report, is of another version, tells of no
            iteration, or contradicts itself.
    """
    report = _report(path, option=option)
    missing = [name for name in _TABLES if name not in report]
    try:
        if missing:
            raise msgspec.ValidationError(f"it has no {missing[0]}")
        return _run(report, path.stem)
    except (msgspec.ValidationError, AssertionError) as error:
        # Some types assert what whoever makes them must ensure.
        remedy = f"it is a damaged report: {str(error) or 'a value contradicts another one'}"
        raise ConfigError(option, str(path), remedy) from error


def _report(path: Path, *, option: str) -> dict[str, Any]:
    try:
        report = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(option, str(path), f"cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(option, str(path), f"is not JSON: {error}") from error
    if isinstance(report, dict) and isinstance(report.get("report"), dict):
        report = report["report"]  # The file is what planaria chaos keeps of a run.
    if not isinstance(report, dict) or not {
        "job",
        "events",
        "ledger",
        "version",
    } <= set(report):
        remedy = "it is no report; name a file that planaria train --report has written"
        raise ConfigError(option, str(path), remedy)
    version = report["version"]
    if not isinstance(version, int) or version > REPORT_VERSION:
        remedy = f"it has version {version}, and this planaria knows {REPORT_VERSION}"
        raise ConfigError(option, str(path), remedy)
    if version < _OLDEST_VERSION:
        remedy = f"it has version {version}, which has no inputs of decisions; {_OLD_REMEDY}"
        raise ConfigError(option, str(path), remedy)
    if not report.get("iterations"):
        raise ConfigError(option, str(path), "no iteration of that run was committed")
    return report


def _run(report: Mapping[str, Any], name: str) -> RecordedRun:
    plans = _value(report["plans"], dict[int, Plan])
    profile = decode_profile(msgspec.json.encode(report["profile"]), source=name)
    first = _value(report["plan"], Plan)
    config = job_from_dict(_value(report["job"], dict[str, Any]), is_recorded=True)
    iterations = _value(report["iterations"], tuple[RecordedIteration, ...])
    events = _value(report["events"], tuple[EventRecord, ...])
    ledger = _value(report["ledger"], dict[str, float])
    plans |= {first.epoch: first}
    reason = (
        _plan_damage(plans, config.num_microbatches, len(profile.layers))
        or _iteration_damage(iterations, plans, ledger)
        or next(
            filter(None, (_event_damage(event, plans, len(profile.layers)) for event in events)), ""
        )
    )
    if reason:
        raise msgspec.ValidationError(reason)
    planned = plan_job(
        config,
        Prepared(profile=profile),
        plan=first,
        processors=_value(report["processors"], int),
    )
    return RecordedRun(
        name=name,
        planned=planned,
        plans=plans,
        iterations=iterations,
        events=events,
        saves=_saves(report, num_copies=config.checkpoint.copies),
        ledger=ledger,
        wasted=_value(report.get("wasted", {}), dict[str, dict[str, float]]),
        first_iteration=_value(report["first_iteration"], int),
        evaluated_s={
            evaluation.iteration: evaluation.seconds
            for evaluation in _value(report.get("evaluations", []), tuple[_Evaluation, ...])
        },
    )


def _saves(report: Mapping[str, Any], *, num_copies: int) -> dict[str, float]:
    """What saves took; reports of version 2 had no table of their own for them, and with copies
    in memory they tell what copies took in its place."""
    if report["version"] == _OLDEST_VERSION:
        table = _value(report["checkpoints"], dict[str, float])
        return {} if num_copies else table
    return _value(report["checkpoints"], dict[str, dict[str, float]]).get("disk", {})


def _plan_damage(plans: Mapping[int, Plan], num_microbatches: int, num_layers: int) -> str:
    """The reason why plans cannot be those of the job; "" for none."""
    for epoch, plan in plans.items():
        templates = [pipeline.template for pipeline in plan.pipelines]
        if not templates or not all(template.stages for template in templates):
            return f"the plan of epoch {epoch} has no stages"
        if plan.num_layers != num_layers or len(plan.routes) != num_microbatches:
            return f"the plan of epoch {epoch} is one of another job"
    return ""


def _iteration_damage(
    iterations: Sequence[RecordedIteration], plans: Mapping[int, Plan], ledger: Mapping[str, float]
) -> str:
    """The reason why iterations cannot be those of the run; "" for none."""
    lacking = [name for name in _LEDGER if name not in ledger]
    if lacking:
        return f"the ledger has no {lacking[0]}"
    for iteration in iterations:
        if iteration.seconds < 0.0 or iteration.samples < 1:
            return f"iteration {iteration.iteration} has negative seconds or no samples"
    # Of a change in several switches, only the last epoch has a plan in the report.
    if not any(iteration.epoch in plans for iteration in iterations):
        return "it has no plan of any iteration"
    if iterations[-1].at_s <= ledger[Category.STARTUP]:
        return "its last iteration was committed before it trained"
    return ""


def _event_damage(event: EventRecord, plans: Mapping[int, Plan], num_layers: int) -> str:
    """The reason why the event's decision cannot have been made; "" for none."""
    inputs = event.inputs
    if inputs is None:
        return ""
    for epoch in (inputs.plan_epoch, event.epoch):
        if epoch not in plans:
            return f"it has no plan of epoch {epoch}, which a decision needs"
    if (inputs.lost is None) == (inputs.changed is None):
        return "a decision must answer either a loss or a change"
    if inputs.cluster.epoch <= inputs.plan_epoch:
        return f"the decision for epoch {inputs.cluster.epoch} left that of {inputs.plan_epoch}"
    findings = inputs.findings
    num_findings = {len(findings.layer_factors), len(findings.more_bytes)}
    if not num_findings <= {0, num_layers} or min(findings.layer_factors, default=1.0) <= 0.0:
        return "the findings of a decision are those of another model"
    return ""


def _value(value: Any, kind: type[Value]) -> Value:
    return msgspec.convert(value, kind, str_keys=True)


def node_text(nodes: Sequence[int]) -> str:
    """Nodes in words; "" for none."""
    return f"node {', '.join(map(str, nodes))}" if nodes else ""
