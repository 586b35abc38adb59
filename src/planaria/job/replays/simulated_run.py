"""A recorded run, simulated: what happened to its nodes happens again, and the coordinator decides.

The simulated coordinator begins with the corrections of the profile that the real one had by its
last decision. An iteration of a plan that the run had takes what it took; any other takes what the
coordinator predicts, times the factor by which the run was off.

Nodes are lost, join, are told of their end and slow down when they did in the run. A worker that
crashed or hung while its node lived is no event of the simulation, so training stands still for as
long as it did. What strikes no node, such as a slow disk, is left out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import msgspec

from planaria.coordinator.job_rules import Rules
from planaria.coordinator.learning.profile_correction import (
    corrected_plans,
    iteration_s,
)
from planaria.core.job import PolicyName
from planaria.core.records import Changed, Decided, DecisionInputs, ToLauncher
from planaria.job.replays.calibration import PlanSeconds
from planaria.job.replays.recorded_run import RecordedRun
from planaria.observe.ledger import Category
from planaria.observe.metrics import EventRecord
from planaria.planner.reroute.reroutes import PricedPlan, expected_times
from planaria.planner.reroute.shadows import first_plan_with_shadows
from planaria.policies.traits import TRAITS
from planaria.simulator.economics.compare import is_complete
from planaria.simulator.economics.planaria_run import PlanariaRun, RepeatedRun
from planaria.simulator.economics.planaria_system import plans_of, rules_of_setting
from planaria.systems.system import RecoveryCosts, Setting

_FASTER_MAX = 4.0  # No plan is so many times as fast as the fastest epoch of the run.
HORIZON_TIMES = 4.0  # A policy that takes so many times as long as the run is given up.


@dataclass(frozen=True, slots=True)
class SimulatedDecision:
    """A decision of a simulation."""

    at_s: float
    answer: str
    inputs: DecisionInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedRun:
    """A run that was simulated.

    Attributes:
        samples: samples that count.
        wall_s: seconds until the last commit, from the start of the job.
        startup_s: seconds of these until it trained.
        ledger: seconds by category, and their sum as `wall`.
        wasted: number and seconds of recoveries, by tier.
        left_out: events of the recorded run that could not be simulated.
        stood_for: events for which training stood still for as long as in the run.
    """

    policy: PolicyName
    samples: int
    wall_s: float
    startup_s: float
    num_redone: int
    num_restarts: int
    ledger: Mapping[str, float]
    wasted: Mapping[str, Mapping[str, float]]
    decisions: tuple[SimulatedDecision, ...]
    left_out: tuple[EventRecord, ...]
    stood_for: tuple[EventRecord, ...]

    @property
    def samples_per_s(self) -> float:
        """The goodput, of all seconds until the last commit."""
        return self.samples / self.wall_s

    @property
    def trained_samples_per_s(self) -> float:
        """The goodput since the job trained."""
        return self.samples / max(1e-9, self.wall_s - self.startup_s)


def simulated_run(run: RecordedRun, costs: RecoveryCosts, *, policy: PolicyName) -> ReplayedRun:
    """The run as it would have been with a policy, simulated with given costs.

    Raises:
        InfeasibleError: the policy has no plan for the nodes of the job.
    """
    setting = _setting(run, costs, policy)
    decisions: list[SimulatedDecision] = []
    seconds = PlanSeconds(run)
    simulated = _planaria_run(run, setting, seconds, partial(_note, decisions))
    least_s = seconds.fastest_s / _FASTER_MAX
    complete_by = partial(
        is_complete, simulated, iterations=len(run.iterations), iteration_s_min=least_s
    )
    happenings = _happenings(run)
    since_s = 0.0
    for at_s, _, happen in happenings.in_order:
        if complete_by(at_s, since_s=since_s):
            break
        since_s = at_s
        happen(simulated, at_s)
    else:
        complete_by(HORIZON_TIMES * run.trained_until_s, since_s=since_s)
    account = simulated.account
    return ReplayedRun(
        policy=policy,
        samples=account.samples,
        wall_s=account.now_s,
        startup_s=account.ledger.seconds.get(Category.STARTUP, 0.0),
        num_redone=account.num_redone,
        num_restarts=account.num_restarts,
        ledger=account.ledger.parts(),
        wasted=account.ledger.wasted_parts(),
        decisions=tuple(decisions),
        left_out=tuple(happenings.left_out),
        stood_for=tuple(happenings.stood_for),
    )


def _note(decisions: list[SimulatedDecision], message: ToLauncher, now_s: float) -> None:
    if isinstance(message, Decided | Changed) and message.inputs is not None:
        answer = f"{message.policy}: {message.answer}"
        decisions.append(SimulatedDecision(now_s, answer, message.inputs))


def _setting(run: RecordedRun, costs: RecoveryCosts, policy: PolicyName) -> Setting:
    """The job with another policy, and with layers that take what they took in the run."""
    config, problem = run.planned.config, run.planned.problem
    training = config.training
    job = replace(
        config,
        resilience=replace(config.resilience, policy=policy),
        training=replace(training, iterations=training.iterations - run.first_iteration),
    )
    return Setting(
        job=job,
        catalog=corrected_plans(run.planned.catalog, run.findings.layer_factors),
        costs=costs,
        model=problem.profile.model,
    )


def _planaria_run(
    run: RecordedRun,
    setting: Setting,
    seconds: PlanSeconds,
    on_notice: Callable[[ToLauncher, float], None],
) -> PlanariaRun:
    """The simulated job; it begins with the plan of the run, unless the policy needs another."""
    problem, planned = setting.catalog.problem, run.planned
    plan_of = plans_of(setting)
    # The catalog has the factors; the speeds are those of the first machines' kinds.
    kinds = planned.plan.slow_nodes
    findings = msgspec.structs.replace(run.findings, layer_factors=(), speeds=dict(kinds))

    if TRAITS[setting.job.resilience.policy].has_shadows:
        plan = setting.catalog.plans[setting.num_nodes]
        first_plan_with_shadows(problem, plan, templates=setting.catalog.templates)

    def first_or_best(number: int) -> PricedPlan | None:
        best = plan_of(number)
        if best is None:
            return None
        is_first = number == len(planned.plan.nodes)
        has_shadows = TRAITS[setting.job.resilience.policy].has_shadows
        plan = planned.plan if is_first and not has_shadows else best.plan
        return PricedPlan(plan, expected_times(problem, plan).iteration_s + findings.beside_s)

    simulated = PlanariaRun(
        _rules(setting),
        first_or_best,
        setting.costs,
        problem,
        replay=RepeatedRun(
            on_notice=on_notice,
            seconds_of=lambda state, now_s: seconds.seconds(state.plan, iteration_s(state), now_s),
            # The time of the last commit includes the evaluation after it: so all of them count.
            evaluated_s=sum(run.evaluated_s.values()) / len(run.iterations),
            findings=findings,
            head_lives=True,
        ),
    )
    simulated.machines.set_speeds(kinds)
    return simulated


def _rules(setting: Setting) -> Rules:
    """The rules of the coordinator; it knows of processors that its ranks share."""
    rules, processors = rules_of_setting(setting), setting.catalog.problem.processors
    if not processors:
        return rules
    return replace(rules, catalog=setting.catalog, processors=processors)


# -- what happened --------------------------------------------------------------------------------

_Happen = Callable[[PlanariaRun, float], None]


class _Happenings:
    """What happened in a run, as it is done to a simulated one.

    Attributes:
        left_out, stood_for: the same as in `ReplayedRun`.
    """

    def __init__(self) -> None:
        self.left_out: list[EventRecord] = []
        self.stood_for: list[EventRecord] = []
        self._happenings: list[tuple[float, int, _Happen]] = []
        self._numbers = count()

    @property
    def in_order(self) -> Sequence[tuple[float, int, _Happen]]:
        """All of them, as (time, number, what is done), in order of time."""
        return sorted(self._happenings, key=lambda happening: happening[:2])

    def add(self, at_s: float, happen: _Happen) -> None:
        """Adds something that happens."""
        self._happenings.append((at_s, next(self._numbers), happen))


def _happenings(run: RecordedRun) -> _Happenings:
    happenings, lost = _Happenings(), set[int]()
    for event in run.events:
        if not event.fired or (event.at_s < 0.0 and not event.nodes):
            continue
        inputs = event.inputs
        if event.at_s < 0.0:
            happenings.left_out.append(event)
        elif gone := tuple(sorted(_lost_nodes(event) - lost)):
            lost.update(gone)
            happenings.add(event.at_s, partial(_lose, gone))
        elif event.kind in ("join", "joined") and event.nodes:
            happenings.add(event.at_s, partial(_take_back, event.nodes))
        elif event.kind in ("preempt", "preempted", "drained") and event.nodes:
            notice_s = event.value or run.planned.config.cluster.notice_s
            happenings.add(event.at_s, partial(_give_notice, event.nodes, notice_s))
        elif event.kind == "unslowed" or (event.kind == "slow" and event.value):
            speed = 1.0 / event.value if event.kind == "slow" else 1.0
            kinds = run.planned.plan.slow_nodes  # A fault adds to what a kind is slower.
            speeds = {node: speed * kinds.get(node, 1.0) for node in event.nodes}
            happenings.add(event.at_s, partial(_set_speeds, speeds))
        elif inputs and inputs.lost and event.over_at_s > event.at_s:
            happenings.stood_for.append(event)
            happenings.add(event.at_s, partial(_stand_still, event.over_at_s))
        elif event.kind != "reformed":
            happenings.left_out.append(event)
    return happenings


def _lost_nodes(event: EventRecord) -> set[int]:
    """The nodes of an event that the answer to it did without.

    The loss in its inputs may be that of the last node alone, if several were lost one by one
    before they were answered together.
    """
    inputs = event.inputs
    if inputs is None or inputs.lost is None:
        return set()
    cluster = inputs.cluster
    return set(event.nodes).difference(node.node for node in (*cluster.nodes, *cluster.leaving))


def _lose(nodes: tuple[int, ...], job: PlanariaRun, now_s: float) -> None:
    there = job.machines.there
    job.lose(tuple(node for node in nodes if node in there), now_s)


def _take_back(nodes: tuple[int, ...], job: PlanariaRun, now_s: float) -> None:
    job.take_back(nodes, now_s)


def _give_notice(nodes: tuple[int, ...], notice_s: float, job: PlanariaRun, now_s: float) -> None:
    there = job.machines.there
    staying = tuple(node for node in nodes if node in there)
    job.give_notice(staying, now_s, deadline_s=now_s + notice_s)


def _set_speeds(speeds: Mapping[int, float], job: PlanariaRun, now_s: float) -> None:
    job.set_speeds(speeds, now_s)


def _stand_still(until_s: float, job: PlanariaRun, now_s: float) -> None:
    job.stand_still(now_s, until_s=until_s)
