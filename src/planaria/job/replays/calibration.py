"""The costs of recoveries as a real run had them, for `[costs]` of a simulation.

A cost is the mean over the run's events, so that a simulation of the same events takes as long as
they took; its spread is that from the least to the most. A cost of which the run had no event keeps
its default.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from statistics import fmean
from typing import Final

from planaria.coordinator.learning.profile_correction import corrected_plans
from planaria.core.cluster import NodesChanged, NodesLost
from planaria.core.plan import Plan
from planaria.job.replays.recorded_run import RecordedRun
from planaria.observe.ledger import Category
from planaria.observe.metrics import EventRecord
from planaria.observe.recoveries import SourceTier
from planaria.planner.problem import Problem
from planaria.planner.reroute.reroutes import expected_times
from planaria.systems.system import RecoveryCosts

_ITERATIONS_MIN: Final = 8  # Iterations of an epoch that tells what an iteration takes.


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """A cost of a simulation.

    Attributes:
        name: key of `[costs]`.
        num_events: number of events of the run that it is from; 0: it is the default.
        low, high: least and largest value of these events.
    """

    name: str
    value: float
    num_events: int = 0
    low: float = 0.0
    high: float = 0.0


def calibrated_costs(run: RecordedRun) -> tuple[MeasuredCost, ...]:
    """Every cost of `[costs]`, in the order of its keys."""
    answered = [_newest(events) for events in run.decisions]
    losses = [event for event in answered if _loss(event) is not None and event.recovery_s > 0.0]
    # An answer to a crash waits until the worker has been forked anew.
    of_nodes = [event for event in losses if (loss := _loss(event)) and loss.nodes]
    noticed_s = [event.noticed_at_s - event.at_s for event in of_nodes]
    iteration_s = fmean(iteration.seconds for iteration in run.iterations)
    measured = {
        "startup_s": [run.startup_s],
        "node_start_s": [
            max(0.0, event.noticed_at_s - event.at_s - iteration_s / 2.0)
            for event in run.events
            if event.kind == "join" and event.noticed_at_s > event.at_s
        ],
        "detect_s": noticed_s,
        "answer_s": [
            max(0.0, event.detect_s - s) for event, s in zip(of_nodes, noticed_s, strict=True)
        ],
        "decide_s": [event.decide_s for event in losses],
        "look_ahead_s": _look_ahead(run, answered),
        "regroup_s": [event.regroup_s + _late_transfer_s(event) for event in losses],
        "per_rank_s": [],
        "switch_s": [_switch_s(event) for event in answered if _num_switches(event)],
        "restart_s": [],
        "save_stall_s": _save_stalls(run),
        "save_bytes_per_s": _save_speeds(run),
        "profile_factor": _profile_factors(run),
    }
    assert set(measured) == {cost.name for cost in fields(RecoveryCosts)}
    defaults = RecoveryCosts()
    costs = []
    for name, values in measured.items():
        if not values:
            costs.append(MeasuredCost(name, getattr(defaults, name)))
            continue
        mean = _weighted_factor(run) if name == "profile_factor" else fmean(values)
        costs.append(MeasuredCost(name, mean, len(values), min(values), max(values)))
    return tuple(costs)


def recovery_costs(measured: Sequence[MeasuredCost]) -> RecoveryCosts:
    """The costs as a simulation takes them."""
    return RecoveryCosts(**{cost.name: cost.value for cost in measured})


def _loss(event: EventRecord) -> NodesLost | None:
    return event.inputs.lost if event.inputs else None


def _newest(events: Sequence[EventRecord]) -> EventRecord:
    """The last of the events that one decision answered: its seconds contain no other loss."""
    return max(events, key=lambda event: event.noticed_at_s)


def _late_transfer_s(event: EventRecord) -> float:
    """The seconds by which layers came later than predicted; 0 for those of a save, whose reading
    a simulation prices by itself."""
    is_read = event.source_tier == SourceTier.DISK
    return 0.0 if is_read else max(0.0, event.transfer_s - event.predicted_transfer_s)


def _num_switches(event: EventRecord) -> int:
    """The number of switches of a change: each one begins an epoch."""
    is_change = event.inputs is not None and event.inputs.lost is None
    return event.epoch - event.inputs.plan_epoch if is_change and event.inputs else 0


def _switch_s(event: EventRecord) -> float:
    return event.downtime_s / _num_switches(event)


def _look_ahead(run: RecordedRun, answered: Sequence[EventRecord]) -> list[float]:
    """The seconds until a coordinator that looks ahead had its answers.

    They are those until it took a better plan for the same nodes. Without such a change there are
    bounds: a plan was at least as old at each loss whose answer was ready, and at most as old at
    others.
    """
    if not run.planned.config.resilience.failures_ahead:
        return []
    began_s = {run.iterations[0].epoch: run.startup_s}
    began_s |= {event.epoch: event.over_at_s for event in run.events if event.over_at_s >= 0.0}
    better_s, ages = list[float](), {True: list[float](), False: list[float]()}
    for event in answered:
        inputs = event.inputs
        if inputs is None or inputs.plan_epoch not in began_s:
            continue
        age_s = event.noticed_at_s - began_s[inputs.plan_epoch]
        if inputs.lost is not None and inputs.lost.nodes:
            ages[inputs.is_foreseen].append(age_s)
        elif inputs.changed == NodesChanged((), ()) and inputs.is_foreseen:
            better_s.append(age_s)
    if better_s:
        return better_s
    default_s = RecoveryCosts().look_ahead_s
    ready_s, late_s = min(ages[True], default=inf), max(ages[False], default=0.0)
    if late_s < default_s < ready_s:
        return []
    return [bound_s for bound_s in (late_s, ready_s) if 0.0 < bound_s < inf]


def _save_stalls(run: RecordedRun) -> list[float]:
    """The seconds for which training stood still for a save, on average."""
    every = run.planned.config.checkpoint.persist_every
    number = len(run.iterations) // every if every else 0
    after_s = run.ledger["wall"] - run.trained_until_s  # The last save is in no iteration.
    stalled_s = max(0.0, run.ledger[Category.CHECKPOINT_STALL] - after_s)
    return [stalled_s / number] if number else []


def _save_speeds(run: RecordedRun) -> list[float]:
    """The speed of each node in the average save."""
    took_s = run.saves.get("checkpoint_s", 0.0)
    if not took_s:
        return []
    layers = run.planned.problem.profile.layers
    num_bytes = sum(layer.parameter_bytes + layer.optimizer_bytes for layer in layers)
    return [num_bytes / run.planned.config.cluster.nodes / took_s]


# -- iterations -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TrainedEpoch:
    """The iterations of an epoch.

    Attributes:
        began_s, ended_s: times of the begin of the first and of the commit of the last.
        seconds: seconds of all of them on the head's clock, without stalls for saves.
    """

    plan: Plan
    began_s: float
    ended_s: float
    seconds: float
    number: int

    @property
    def each_s(self) -> float:
        return self.seconds / self.number

    def distance_s(self, now_s: float) -> float:
        """The seconds from this epoch to a time."""
        return max(self.began_s - now_s, now_s - self.ended_s, 0.0)


def _trained_epochs(run: RecordedRun) -> tuple[_TrainedEpoch, ...]:
    """The iterations that count, by epoch. One that follows a recovery began with its end."""
    ends_s = sorted(event.over_at_s for event in run.events if _loss(event) is not None)
    every = run.planned.config.checkpoint.persist_every
    stall_s = sum(_save_stalls(run)) / every if every else 0.0
    epochs: dict[int, _TrainedEpoch] = {}
    before_s, last = run.startup_s, run.iterations[-1]
    for iteration in run.iterations:
        at_s, plan = iteration.at_s, run.plans.get(iteration.epoch)
        began_s = max([before_s, *(end_s for end_s in ends_s if end_s <= at_s)])
        before_s = at_s
        if plan is not None:
            known = epochs.get(iteration.epoch, _TrainedEpoch(plan, began_s, at_s, 0.0, 0))
            # The last iteration is reported after the evaluation that follows it.
            ages = (iteration.iteration, *([iteration.iteration + 1] if iteration is last else []))
            evaluated_s = sum(run.evaluated_s.get(age, 0.0) for age in ages)
            seconds = known.seconds + max(0.0, at_s - began_s - stall_s - evaluated_s)
            epochs[iteration.epoch] = replace(
                known, ended_s=at_s, seconds=seconds, number=known.number + 1
            )
    return tuple(epochs.values())


def _profile_factors(run: RecordedRun) -> list[float]:
    """Measured over predicted seconds of the iterations of each epoch."""
    problem = run.planned.problem
    return [epoch.each_s / _predicted_s(problem, epoch.plan) for epoch in _trained_epochs(run)]


def _weighted_factor(run: RecordedRun) -> float:
    """The factor with which all iterations together take what they took."""
    epochs, problem = _trained_epochs(run), run.planned.problem
    predicted_s = sum(epoch.number * _predicted_s(problem, epoch.plan) for epoch in epochs)
    return sum(epoch.seconds for epoch in epochs) / predicted_s


def _predicted_s(problem: Problem, plan: Plan) -> float:
    return expected_times(problem, replace(plan, silent={})).iteration_s


class PlanSeconds:
    """The seconds of an iteration of any plan at any time, as far as a run tells them.

    A machine that other work shares is faster at one time than at another, so what was measured
    nearest in time counts. An epoch of a few iterations, whose first has cold caches, tells little.
    """

    def __init__(self, run: RecordedRun) -> None:
        findings, catalog = run.findings, run.planned.catalog
        self._problem = corrected_plans(catalog, findings.layer_factors).problem
        self._beside_s = findings.beside_s
        epochs = _trained_epochs(run)
        self._by_layout: dict[object, list[_TrainedEpoch]] = {}
        epochs = tuple(epoch for epoch in epochs if epoch.seconds > 0.0)
        self._long_epochs = tuple(e for e in epochs if e.number >= _ITERATIONS_MIN) or epochs
        for epoch in self._long_epochs:
            self._by_layout.setdefault(_layout(epoch.plan), []).append(epoch)
        self._factors = {id(epoch): self._factor(epoch) for epoch in self._long_epochs}

    @property
    def fastest_s(self) -> float:
        """The seconds of an iteration in the fastest epoch. The shortest iteration tells nothing:
        one whose reports are lost with their coordinator may seem to take no time at all."""
        return min(epoch.each_s for epoch in self._long_epochs)

    def _factor(self, epoch: _TrainedEpoch) -> float:
        return epoch.each_s / (_predicted_s(self._problem, epoch.plan) + self._beside_s)

    def seconds(self, plan: Plan, predicted_s: float, now_s: float) -> float:
        """The seconds of an iteration: as measured of a plan that differs only in the numbers of
        nodes; without one as predicted, times the factor by which predictions were off."""
        alike = self._by_layout.get(_layout(plan), [])
        nearest = min(alike or self._long_epochs, key=lambda epoch: epoch.distance_s(now_s))
        return nearest.each_s if alike else self._factors[id(nearest)] * predicted_s


def _layout(plan: Plan) -> object:
    """What is the same for plans that differ only in the numbers of nodes."""
    first_ranks = Counter(route[0].rank for route in plan.routes)
    num_hops = tuple(sorted(Counter(map(len, plan.routes)).items()))
    pipelines = Counter(
        (
            pipeline.template,
            tuple(node in plan.gone for node in pipeline.nodes),
            sum(first_ranks[rank] for rank in pipeline.stage_ranks(0)),
        )
        for pipeline in plan.pipelines
    )
    return frozenset(pipelines.items()), num_hops, plan.splits_backward
