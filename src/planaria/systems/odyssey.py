"""Odyssey: after each loss, reroute microbatches or form pipelines anew, whichever Equation 8 says.

1. A loss can be answered by data rerouting, which takes no time, or by dynamic parallelism, which
   takes the transfer of layers and a restart.
2. The step of rerouting is estimated by Equation 13, that of new pipelines by Equations 10 and 11.
   Algorithm 1 chooses the pipelines; the transfer is that of the fewest bytes in total (Kuhn and
   Munkres).
3. Equation 8 compares the samples until the next event. The paper calls that duration constant;
   when a loss is answered nobody knows it. `Duration.MEAN` takes the mean of the durations so far,
   `Duration.ORACLE` the one that it turns out to be.
4. Where a stage has lost as many nodes as there are pipelines (F_i = N_dp), Equation 13 divides by
   zero, and dynamic parallelism is demanded. No live node has that stage's layers then, so they are
   loaded from the newest save.
5. What was chosen runs as long as its exact schedule takes, not as long as was estimated.

Source: Odyssey (arXiv 2508.21613): section III, sections IV-A to IV-C.
Differs: Algorithm 1 is run for the nodes that are left; as printed it runs for one to N_f losses
and returns a plan for the most nodes. There is at most one pipeline more or less than before, with
up to two nodes more than the mean, or one less; more than 16 pipelines differ by one node at most.
Each is cut as the planner cuts it, not evenly with all places for the rest, and has memory by
Equation 14. In Equation 13 a longer pipeline's stages are scaled to the shortest one's. The restart
is 1.93 s on 8 devices, from 11.2 s and 8.2 s in section V-C of which transfers are shorter by
32.35%; that it grows with the logarithm of their number is assumed: the paper says only that it
depends on the scale. A node that comes is answered likewise: it is left out, takes an empty place,
or pipelines are formed anew. Plans of more than 16,384 hops are not simulated: an iteration is
longer by what the busiest stage gets.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import Enum
from math import inf, log2
from typing import Final, NamedTuple

from planaria.core.cluster import ClusterState, Node
from planaria.core.plan import Pipeline, PipelineTemplate, Plan, plain_plan
from planaria.estimator.makespan import stage_seconds
from planaria.observe.ledger import Category
from planaria.planner.plans import PlanCatalog, pipeline_microbatches
from planaria.planner.reroute.reroutes import best_reroute
from planaria.policies.building import transfer_s
from planaria.policies.policy import profile_prices
from planaria.restorer.assignment import UnboundPipeline
from planaria.restorer.strategies import LEAST_BYTES
from planaria.systems.account import Account
from planaria.systems.equal_pipelines import fastest_equal_pipelines
from planaria.systems.modelled_job import ModelledJob, Pace, save_stall_s, saves_of_job
from planaria.systems.rerouting import HOPS_MAX
from planaria.systems.system import Setting, SystemRun

RESTART_S: Final = 1.93  # On 8 devices.
_RESTART_DEVICES: Final = 8
_PIPELINES_MIN: Final = 2
_IDLE_MAX: Final = 3
_WIDE_MAX: Final = 16  # Number of pipelines beyond which they differ by one node at most.


class Duration(Enum):
    """Times until the next event with which Equation 8 is evaluated."""

    ORACLE = "oracle"
    MEAN = "mean"


def effective_iterations(iteration_s: float, transition_s: float, duration_s: float) -> float:
    """Iterations until the next event, to which Equation 8 is proportional since the duration does
    not depend on the answer."""
    return max(0.0, duration_s - transition_s) / iteration_s


def step_time(num_stages: int, num_microbatches: float, stage: float) -> float:
    """The time of a step of equal stages (Equation 9), in the unit of `stage`, T_f + T_b."""
    return (num_stages + num_microbatches - 1) * stage


def rerouted_microbatches(
    num_microbatches: float, num_pipelines: int, num_lost: Sequence[int]
) -> list[float]:
    """The microbatches that live nodes of each stage get in addition; their sum is in Equation 13,
    and for one lost node in Equation 12. Infinite where no node of a stage is left.

    Args:
        num_microbatches: N_m, those of one pipeline.
    """
    return [
        num_microbatches * lost / (num_pipelines - lost) if lost < num_pipelines else inf
        for lost in num_lost
    ]


def scaled_losses(depths: Sequence[int], lost: Collection[tuple[int, int]]) -> list[int]:
    """The number of lost nodes of each stage; those of longer pipelines are scaled.

    Args:
        depths: number of nodes of each pipeline.
        lost: pairs (pipeline, position) of lost nodes.
    """
    counts = [0] * min(depths)
    for pipeline, position in lost:
        counts[position * len(counts) // depths[pipeline]] += 1
    return counts


def distribute_batch(num_microbatches: int, depths: Sequence[int]) -> tuple[int, ...]:
    """Microbatches of each pipeline (section IV-A): in proportion to nodes, the rest one by one,
    and one of the largest for each that has none."""
    counts = [num_microbatches * depth // sum(depths) for depth in depths]
    for index in range(num_microbatches - sum(counts)):
        counts[index % len(counts)] += 1
    for index, count in enumerate(counts):
        if not count:
            counts[counts.index(max(counts))] -= 1
            counts[index] = 1
    return tuple(counts)


def integer_partitions(number: int, num_parts: int, sizes: Sequence[int]) -> Iterator[list[int]]:
    """The ways to write a number as a sum of parts of these sizes, largest part first."""
    if not sizes or not min(sizes) * num_parts <= number <= max(sizes) * num_parts:
        if not number and not num_parts:
            yield []
        return
    size, *smaller = sorted(sizes, reverse=True)
    for count in range(min(num_parts, number // size), -1, -1):
        for rest in integer_partitions(number - count * size, num_parts - count, smaller):
            yield [size] * count + rest


class ExecutionPlan(NamedTuple):
    """Templates and microbatches of pipelines, and the estimated seconds of a step."""

    step_s: float
    templates: tuple[PipelineTemplate, ...]
    microbatches: tuple[int, ...]


def execution_plan(
    catalog: PlanCatalog, num_nodes: int, num_pipelines: int
) -> ExecutionPlan | None:
    """The plan with the shortest step (Algorithm 1), for so many nodes; None if there is none.

    Up to _IDLE_MAX nodes stay idle if there is no plan for all.

    Args:
        num_pipelines: number of pipelines before.
    """
    for number in range(num_nodes, max(0, num_nodes - _IDLE_MAX - 1), -1):
        best = _execution_plan_on_all(catalog, number, num_pipelines)
        if best is not None:
            return best
    return None


def _execution_plan_on_all(
    catalog: PlanCatalog, num_nodes: int, num_pipelines: int
) -> ExecutionPlan | None:
    num_microbatches = catalog.problem.num_microbatches
    best: ExecutionPlan | None = None
    for count in range(max(1, num_pipelines - 1), min(num_pipelines + 1, num_microbatches) + 1):
        mean = num_nodes // count
        beyond = 1 if count <= _WIDE_MAX else 0
        near = range(mean - beyond, mean + 2 + beyond)
        sizes = [size for size in catalog.templates if size in near]
        for depths in integer_partitions(num_nodes, count, sizes):
            counts = distribute_batch(num_microbatches, depths)
            templates = tuple(catalog.templates[depth] for depth in depths)
            step_s = max(map(catalog.times.makespan_s, templates, counts))  # Equations 10, 11.
            if best is None or step_s < best.step_s:
                best = ExecutionPlan(step_s, templates, counts)
    return best


def restart_s(num_devices: int) -> float:
    """Seconds of a restart of training, which depends on the scale alone."""
    return RESTART_S * log2(max(2, num_devices)) / log2(_RESTART_DEVICES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Odyssey:
    """Adaptive choice between rerouting and new pipelines; implements `System`."""

    duration: Duration = Duration.MEAN

    @property
    def name(self) -> str:
        """See `System`."""
        return "odyssey" if self.duration is Duration.MEAN else "odyssey-oracle"

    def begin(self, setting: Setting, *, absent: Collection[int] = ()) -> SystemRun:
        """A job that begins; see `System`."""
        chooser = _Chooser(setting)
        job = ModelledJob(setting, chooser, saves_of_job(setting), absent=absent)
        return job if self.duration is Duration.MEAN else _Hindsight(job, chooser)


class Answer(Enum):
    """Answers to an event."""

    REROUTE = "data rerouting"
    FILL = "data rerouting with nodes in empty places"
    FORM = "dynamic parallelism"


class PricedAnswer(NamedTuple):
    """An answer: the plan, its estimated step, and the seconds of the transition."""

    answer: Answer
    plan: Plan
    step_s: float
    move_s: float
    restart_s: float

    @property
    def transition_s(self) -> float:
        """Seconds until training goes on."""
        return self.move_s + self.restart_s


class _Chooser:
    """Answers events by Equation 8; implements `Behaviour`.

    Attributes:
        forced: answer to the next loss, if it is possible; None: what Equation 8 says.
        chosen: the last answer; None: the job started anew from its save.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        problem = setting.catalog.problem
        self._problem = replace(problem, splits_backward=False)
        self._prices = profile_prices(problem.profile, regroup_s=setting.costs.regroup_s)
        self._exact_s: dict[object, float] = {}
        pipelines = fastest_equal_pipelines(
            setting, setting.num_nodes, min_pipelines=_PIPELINES_MIN
        )
        assert pipelines is not None
        self._plan: Plan | None = pipelines.plan(setting)
        self._num_pipelines = pipelines.num_pipelines
        self._num_events = 0
        self.forced: Answer | None = None
        self.chosen: PricedAnswer | None = None

    @property
    def shared(self) -> tuple[object, ...]:
        """What copies of this one may share with it."""
        return self._setting, self._problem, self._prices, self._exact_s

    def begin(self, job: ModelledJob) -> None:
        """See `Behaviour`."""
        if job.absent:
            self._plan = self._plan_anew(job)
        if self._plan is not None:
            self._train(job, 0.0)

    def on_lost(self, job: ModelledJob, nodes: tuple[int, ...], now_s: float) -> None:
        """See `Behaviour`."""
        self._num_events += 1
        if self._plan is not None:
            lost = set(self._plan.nodes).intersection(nodes)
            if not lost:
                return
            gone = tuple(sorted({*self._plan.gone, *lost}))
            self._plan = replace(self._plan, gone=gone)
        job.interrupt(now_s)
        detect = (Category.DETECT, self._setting.costs.detect_s)
        is_starting = job.start_left_s(now_s) > 0.0
        if self._plan is None or is_starting or not _has_all_layers(self._plan):
            self._start_anew(job, now_s, detect)
            return
        option = self._choose(job, now_s)
        if option is None:
            self._start_anew(job, now_s, detect)
        else:
            self._take(job, option, now_s, detect)

    def on_joined(self, job: ModelledJob, nodes: tuple[int, ...], now_s: float) -> None:
        """See `Behaviour`."""
        del nodes
        self._num_events += 1
        if self._plan is None:
            self._start_anew(job, now_s)
            return
        option = self._choose(job, now_s)
        if option is not None and option.answer is not Answer.REROUTE:
            job.pause(now_s)
            self._take(job, option, now_s)

    def on_notice(self, job: ModelledJob, nodes: tuple[int, ...], deadline_s: float) -> None:
        """See `Behaviour`."""

    # -- the choice -------------------------------------------------------------------------------

    def _choose(self, job: ModelledJob, now_s: float) -> PricedAnswer | None:
        """What Equation 8 prefers, or the answer that is forced; None if nothing is possible."""
        forced, self.forced = self.forced, None
        options = list(self._options(job))
        if forced is not None and any(option.answer is forced for option in options):
            options = [option for option in options if option.answer is forced]
        duration_s = now_s / self._num_events
        return max(
            options,
            key=lambda o: effective_iterations(o.step_s, o.transition_s, duration_s),
            default=None,
        )

    def _options(self, job: ModelledJob) -> Iterator[PricedAnswer]:
        plan = self._plan
        assert plan is not None
        spare = sorted(job.members.difference(plan.nodes))
        if self._exact(plan) < inf:
            yield PricedAnswer(Answer.REROUTE, plan, self._rerouted_s(plan), 0.0, 0.0)
        if spare and plan.gone:
            filled = _plan_on(plan, spare)
            move_s = self._move_s(plan, filled, job.members)
            step_s = self._rerouted_s(filled)
            yield PricedAnswer(Answer.FILL, filled, step_s, move_s, self._restart_s(filled))
        formed = self._new_plan(plan, job.members)
        if formed is not None:
            after, step_s = formed
            move_s = self._move_s(plan, after, job.members)
            yield PricedAnswer(Answer.FORM, after, step_s, move_s, self._restart_s(after))

    def _rerouted_s(self, plan: Plan) -> float:
        """The step of a plan around its lost nodes by Equation 13."""
        times, counts = self._setting.catalog.times, pipeline_microbatches(plan)
        templates = [pipeline.template for pipeline in plan.pipelines]
        step_s = max(map(times.makespan_s, templates, counts))
        num_lost = scaled_losses([t.num_nodes for t in templates], _lost_places(plan))
        more = rerouted_microbatches(sum(counts) / len(counts), len(counts), num_lost)
        return step_s + sum(more) * self._stage_s(templates[0])

    def _stage_s(self, template: PipelineTemplate) -> float:
        """Seconds of a microbatch on the slowest stage, T_f + T_b."""
        seconds = stage_seconds(self._problem.profile, template)
        return max(f + b for f, b in zip(seconds.forward_s, seconds.backward_s, strict=True))

    def _new_plan(self, plan: Plan, members: Collection[int]) -> tuple[Plan, float] | None:
        """The pipelines of Algorithm 1 on the nodes that there are, and their estimated step."""
        catalog = self._setting.catalog
        number = min(self._num_pipelines, max(1, len(members) // min(catalog.templates)))
        execution = execution_plan(catalog, len(members), number)
        if execution is None:
            return None
        unbound = [
            UnboundPipeline(template, index if index < len(plan.pipelines) else -1)
            for index, template in enumerate(execution.templates)
        ]
        pipelines = LEAST_BYTES.assignment(
            unbound,
            self._nodes(plan, members),
            before=plan,
            layer_bytes=self._setting.layer_bytes,
        )
        return plain_plan(0, pipelines, execution.microbatches), execution.step_s

    def _nodes(self, plan: Plan, members: Collection[int]) -> tuple[Node, ...]:
        """The members with the layers that their devices hold."""
        per_node = self._setting.job.cluster.devices_per_node
        held = plan.held_by_rank
        return tuple(
            Node(
                node,
                held=tuple(
                    held.get(node * per_node + device, frozenset()) for device in range(per_node)
                ),
            )
            for node in sorted(members)
        )

    def _move_s(self, plan: Plan, after: Plan, members: Collection[int]) -> float:
        """Seconds in which nodes get the layers that they lack."""
        cluster = ClusterState(0, self._nodes(plan, members))
        transfers = LEAST_BYTES.sources(after, cluster, layer_bytes=self._setting.layer_bytes)
        per_node = self._setting.job.cluster.devices_per_node
        return transfer_s(transfers, self._prices, devices_per_node=per_node)

    def _restart_s(self, plan: Plan) -> float:
        return restart_s(len(plan.nodes) * self._setting.job.cluster.devices_per_node)

    # -- what was chosen --------------------------------------------------------------------------

    def _take(
        self, job: ModelledJob, option: PricedAnswer, now_s: float, *phases: tuple[Category, float]
    ) -> None:
        self._plan, self.chosen = option.plan, option
        self._num_pipelines = len(option.plan.pipelines)
        self._train(job, now_s)
        moves = ((Category.TRANSFER, option.move_s), (Category.RESTART, option.restart_s))
        job.go_on(now_s, *phases, *moves)

    def _start_anew(self, job: ModelledJob, now_s: float, *phases: tuple[Category, float]) -> None:
        """Loads the newest save into pipelines on the nodes that there are, if they are enough."""
        if self._plan is not None:
            job.go_back_to_save()
        self.chosen, self.forced = None, None
        plan = self._plan = self._plan_anew(job)
        if plan is None:
            job.wait(now_s, *phases)
            return
        self._train(job, now_s)
        setting = self._setting
        most = setting.node_bytes(pipeline.template for pipeline in plan.pipelines)
        restart = (Category.RESTART, setting.costs.restart_s)
        job.start_again(now_s, *phases, restart, (Category.TRANSFER, job.load_s(most)))

    def _plan_anew(self, job: ModelledJob) -> Plan | None:
        """Pipelines on the nodes that there are, whatever these hold; None if they are too few."""
        setting = self._setting
        n0, number = min(setting.catalog.templates), len(job.members)
        count = max(1, min(self._num_pipelines, number // n0))
        execution = execution_plan(setting.catalog, number, count) if number >= n0 else None
        if execution is None:
            return None
        nodes = iter(sorted(job.members))
        pipelines = tuple(
            Pipeline(template, tuple(next(nodes) for _ in range(template.num_nodes)))
            for template in execution.templates
        )
        self._num_pipelines = len(pipelines)
        return plain_plan(0, pipelines, execution.microbatches)

    def _train(self, job: ModelledJob, now_s: float) -> None:
        assert self._plan is not None
        pace = Pace(
            iteration_s=self._exact(self._plan),
            nodes=frozenset(self._plan.nodes),
            stall_s=save_stall_s(self._setting),
        )
        job.train_at(pace, now_s)

    def _exact(self, plan: Plan) -> float:
        """Seconds of an iteration by its schedule; infinite if it cannot go around lost nodes."""
        counts = pipeline_microbatches(plan)
        key = tuple(
            (
                pipeline.template,
                count,
                tuple(i for i, node in enumerate(pipeline.nodes) if node in plan.gone),
            )
            for pipeline, count in zip(plan.pipelines, counts, strict=True)
        )
        if key not in self._exact_s:
            self._exact_s[key] = self._simulated_s(plan, counts)
        return self._exact_s[key]

    def _simulated_s(self, plan: Plan, counts: Sequence[int]) -> float:
        templates = [pipeline.template for pipeline in plan.pipelines]
        whole_s = self._setting.catalog.times.iteration_s(templates, counts)
        if not plan.gone:
            return whole_s
        if sum(map(len, plan.routes)) > HOPS_MAX:
            lost = scaled_losses([t.num_nodes for t in templates], _lost_places(plan))
            more = rerouted_microbatches(sum(counts) / len(counts), len(counts), lost)
            return whole_s + max(more) * self._stage_s(templates[0])
        rerouted = best_reroute(self._problem, plan, hops_max=0)
        # Lost nodes make no job faster.
        return inf if rerouted is None else max(whole_s, rerouted.iteration_s)


def _has_all_layers(plan: Plan) -> bool:
    """Whether the nodes that are left hold every layer."""
    held = {layer for layers in plan.layers_by_rank.values() for layer in layers}
    return len(held) == plan.num_layers


def _lost_places(plan: Plan) -> list[tuple[int, int]]:
    """The places of lost nodes, as pairs (pipeline, position)."""
    gone = set(plan.gone)
    return [
        (index, position)
        for index, pipeline in enumerate(plan.pipelines)
        for position, node in enumerate(pipeline.nodes)
        if node in gone
    ]


def _plan_on(plan: Plan, spare: Sequence[int]) -> Plan:
    """The plan with spare nodes in empty places; one that had a place gets that."""
    others = [node for node in spare if node not in plan.gone]
    holes = [node for node in plan.gone if node not in spare]
    new = dict(zip(holes, others, strict=False))
    pipelines = tuple(
        replace(p, nodes=tuple(new.get(node, node) for node in p.nodes)) for p in plan.pipelines
    )
    gone = tuple(node for node in holes if node not in new)
    return replace(plain_plan(0, pipelines, pipeline_microbatches(plan)), gone=gone)


class _Hindsight:
    """A job that answers each loss as Equation 8 says of the time until the next event; implements
    `SystemRun`.

    That time is known once the next event comes. Until then both answers go on beside each other,
    and the account is that of the better one, if the next event came now.
    """

    def __init__(self, job: ModelledJob, chooser: _Chooser) -> None:
        self._branches = [(job, chooser)]
        self._since_s = self._now_s = 0.0

    @property
    def account(self) -> Account:
        """See `SystemRun`."""
        return self._best()[0].account

    def run_until(self, now_s: float) -> None:
        """See `SystemRun`."""
        for job, _ in self._branches:
            job.run_until(now_s)
        self._now_s = now_s

    def lose(self, nodes: tuple[int, ...], now_s: float) -> None:
        """See `SystemRun`."""
        job, chooser = self._settle(now_s)
        branches: dict[Answer | None, tuple[ModelledJob, _Chooser]] = {}
        for answer in (Answer.REROUTE, Answer.FILL, Answer.FORM):
            shared = {id(part): part for part in chooser.shared}
            branch = deepcopy((job, chooser), shared)
            branch[1].chosen, branch[1].forced = None, answer
            branch[0].lose(nodes, now_s)
            branch[1].forced = None  # It may have had nothing to choose.
            chosen = branch[1].chosen
            branches[chosen.answer if chosen else None] = branch
            if chosen is None:
                break
        self._branches = list(branches.values())

    def take_back(self, nodes: tuple[int, ...], now_s: float) -> None:
        """See `SystemRun`."""
        self._settle(now_s)[0].take_back(nodes, now_s)

    def give_notice(self, nodes: tuple[int, ...], now_s: float, *, deadline_s: float) -> None:
        """See `SystemRun`."""
        for job, _ in self._branches:
            job.give_notice(nodes, now_s, deadline_s=deadline_s)

    def set_speeds(self, speeds: Mapping[int, float], now_s: float) -> None:
        """See `SystemRun`."""
        for job, _ in self._branches:
            job.set_speeds(speeds, now_s)

    def _settle(self, now_s: float) -> tuple[ModelledJob, _Chooser]:
        """Keeps the better branch alone, since an event comes now."""
        self.run_until(now_s)
        self._branches = [self._best()]
        self._since_s = now_s
        return self._branches[0]

    def _best(self) -> tuple[ModelledJob, _Chooser]:
        duration_s = self._now_s - self._since_s
        return max(self._branches, key=lambda branch: _iterations_of(branch[1].chosen, duration_s))


def _iterations_of(option: PricedAnswer | None, duration_s: float) -> float:
    if option is None:
        return 0.0
    return effective_iterations(option.step_s, option.transition_s, duration_s)
