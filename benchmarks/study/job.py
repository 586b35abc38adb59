"""Models a whole job: how a policy does on a cluster whose nodes fail and come back.

The policies, and the choice among their answers, are planaria's own. The clock advances by what
they predict: downtime, iterations, and redone iterations. A node that is back joins while training
goes on. If an adaptive job changes its plan after a loss, it does so once the layers have moved.
Answers are cached: nodes are numbered by their places in the plan, so the same loss at the same
place of the same plan is the same question. A policy that goes back to a save at every loss finds
the newest save; the state before the first iteration counts as a save.

Not modelled: coordinators that fail, slow or distrusted nodes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import floor, inf
from typing import Final

from planaria.coordinator.learning.history import (
    learned_failures_per_s,
    learned_nodes_per_failure,
    with_failure,
)
from planaria.coordinator.switching import weighed_changes
from planaria.coordinator.transition_choice import is_better, weighed_answers
from planaria.core.cluster import (
    ClusterEvent,
    ClusterState,
    Node,
    NodesChanged,
    NodesLost,
    SavePoint,
)
from planaria.core.findings import FailureHistory
from planaria.core.plan import Hop, Plan, Transition
from planaria.planner.plans import PlanCatalog
from planaria.planner.reroute.reroutes import PricedPlan, price_plan
from planaria.planner.reroute.shadows import with_shadows
from planaria.policies.absorb import Absorb
from planaria.policies.policy import Policy, Prices, profile_prices
from planaria.policies.value import Outlook, best_transition, expected_samples_per_s

RESTART_S: Final = 60.0  # Start of a job that had ended because too few nodes were left.
LEASE_S: Final = 3.0
REGROUP_S: Final = 0.05  # A recovery without its transfers, or a switch.
_ROUNDING: Final = 1e-9  # Fraction of an iteration.

# The save to go back to. `Job` knows which one it is and what is redone; if these were part of the
# question, no question would come twice.
_SAVED: Final = SavePoint(iteration=0, source="newest", redone_samples=0)


@dataclass(frozen=True, slots=True)
class Happening:
    """Nodes that are lost, or come back, at one time."""

    at_s: float
    nodes: tuple[int, ...]
    is_loss: bool


class Answers:
    """Cache of the transitions that a policy proposes."""

    def __init__(self, catalog: PlanCatalog, policy: Policy) -> None:
        self.catalog = catalog
        self.prices: Prices = profile_prices(catalog.problem.profile, regroup_s=REGROUP_S)
        self._policy = policy
        self._known: dict[object, tuple[Transition, ...]] = {}
        self._starts: dict[int, PricedPlan | None] = {}

    def start(self, num_nodes: int) -> PricedPlan | None:
        """Initial plan of a job on num_nodes nodes, with its iteration time.

        None: they are too few to hold the model, or lack memory for the layers that the policy
        keeps in addition.
        """
        if num_nodes not in self._starts:
            self._starts[num_nodes] = self._start(num_nodes)
        return self._starts[num_nodes]

    def _start(self, num_nodes: int) -> PricedPlan | None:
        plan = self.catalog.plans.get(num_nodes)
        if plan is None:
            return None
        if isinstance(self._policy, Absorb):
            return price_plan(self.catalog.problem, with_shadows(plan))
        templates = [pipeline.template for pipeline in plan.pipelines]
        return PricedPlan(plan, self.catalog.distribution(templates)[0])

    def load_s(self, plan: Plan) -> float:
        """Seconds until all ranks have loaded their layers from a save, as under morph."""
        layer_bytes = self.prices.layer_bytes
        held = plan.held_by_rank.values()
        most = max(sum(layer_bytes[layer] for layer in layers) for layers in held)
        return self.prices.links["inter_node"].seconds(most)

    def to(
        self, plan: Plan, alive: Iterable[int], event: ClusterEvent
    ) -> tuple[tuple[Transition, ...], Mapping[int, int]]:
        """Transitions that answer an event, whose nodes are labels, and the node of each label."""
        labels = _labels(plan, alive)
        asked = _relabelled(plan, labels)
        here = tuple(sorted(labels[node] for node in alive))
        if isinstance(event, NodesLost):  # A node outside the plan is no loss.
            lost = tuple(sorted(labels[n] for n in event.nodes if n in labels))
            event = replace(event, nodes=lost)
        else:
            event = replace(event, joined=tuple(sorted(labels[n] for n in event.joined)))
        by_rank = (asked.in_flight, asked.ticks, asked.shadows)
        schedule = (asked.splits_backward, *(tuple(sorted(one.items())) for one in by_rank))
        key = (asked.pipelines, asked.routes, asked.gone, *schedule, here, event)
        if key not in self._known:
            held = asked.held_by_rank
            nodes = tuple(Node(n, (frozenset(held.get(n, ())),)) for n in here)
            cluster = ClusterState(1, nodes)
            self._known[key] = self._policy.propose(asked, cluster, event, self.prices)
        return self._known[key], {label: node for node, label in labels.items()}


def _labels(plan: Plan, alive: Iterable[int]) -> dict[int, int]:
    """Label of each node: its place in the plan; nodes outside the plan have the labels behind."""
    placed = [node for pipeline in plan.pipelines for node in pipeline.nodes]
    idle = sorted(set(alive).difference(placed))
    return {node: label for label, node in enumerate((*placed, *idle))}


def _relabelled(plan: Plan, labels: Mapping[int, int]) -> Plan:
    """The plan with renumbered nodes of one device each, and epoch 0."""
    return Plan(
        0,
        tuple(replace(p, nodes=tuple(labels[node] for node in p.nodes)) for p in plan.pipelines),
        tuple(
            tuple(Hop(labels[hop.rank], hop.first_layer, hop.end_layer) for hop in route)
            for route in plan.routes
        ),
        gone=tuple(sorted(labels[node] for node in plan.gone)),
        in_flight={labels[rank]: most for rank, most in plan.in_flight.items()},
        splits_backward=plan.splits_backward,
        ticks={labels[rank]: ticks for rank, ticks in plan.ticks.items() if rank in labels},
        shadows={labels[rank]: layers for rank, layers in plan.shadows.items() if rank in labels},
    )


@dataclass(slots=True)
class Job:
    """One job up to some time.

    Attributes:
        answers: transitions that its policy proposes.
        batch: samples of one iteration.
        between_saves: samples from one save to the next.
        improves: whether a plan that was made quickly is replaced by a better one at a commit.
        plan: current plan; None: too few nodes are left.
        iteration_s: seconds of an iteration of the plan.
        alive: live nodes.
        begins_s: time at which the next iteration of the plan begins.
        samples: samples trained so far.
        history: failures so far.
        following: start time, plan and iteration time of a change that is being made; None: none.
    """

    answers: Answers
    batch: int
    between_saves: int
    improves: bool
    plan: Plan | None
    iteration_s: float
    alive: set[int]
    begins_s: float = 0.0
    samples: int = 0
    history: FailureHistory = field(default_factory=lambda: FailureHistory(since_s=1e-9))
    following: tuple[float, Plan, float] | None = None

    def go_on(self, until_s: float) -> None:
        """Trains until a time; iterations that have not ended do not count."""
        if self.following is not None and self.following[0] <= until_s:
            at_s, plan, iteration_s = self.following
            self._count(at_s)
            self.plan, self.iteration_s, self.following = plan, iteration_s, None
            self.begins_s = at_s
        self._count(until_s)

    def _count(self, until_s: float) -> None:
        if self.plan is None or until_s <= self.begins_s:
            return
        done = floor((until_s - self.begins_s) / self.iteration_s + _ROUNDING)
        self.samples += self.batch * done
        self.begins_s += done * self.iteration_s

    @property
    def unsaved(self) -> int:
        """Samples trained since the newest save."""
        return self.samples % self.between_saves

    def answer(self, what: Happening) -> None:
        """Handles nodes that are lost or come back."""
        self.go_on(what.at_s)
        self.following = None
        if what.is_loss:
            self.alive -= set(what.nodes)
            self.history = with_failure(self.history, what.at_s, nodes=what.nodes, lease_s=LEASE_S)
        else:
            self.alive |= set(what.nodes)
        if self.plan is None:
            self._restart(what.at_s, RESTART_S)
        elif what.is_loss:
            self._recover(what)
        else:
            self._change(NodesChanged(what.nodes, ()), what.at_s)

    def _recover(self, what: Happening) -> None:
        assert self.plan is not None
        event = NodesLost(what.nodes, self.batch, _SAVED)
        if not set(what.nodes).intersection(self.plan.nodes):
            return
        transitions, node_of = self.answers.to(self.plan, sorted(self.alive), event)
        if not transitions:  # A layer has no holder: all go back to the save.
            self.samples -= self.unsaved
            self._restart(what.at_s, self.answers.prices.regroup_s)
            return
        best = self._best_answer(transitions, what.at_s)
        if best.goes_back:
            self.samples -= self.unsaved
        self._take(best, node_of)
        self.begins_s = what.at_s + best.downtime_s
        if self.plan.gone:
            self.improve()

    def improve(self) -> None:
        """Changes to a better plan at the first commit, if the job improves plans."""
        if self.improves:
            self._change(NodesChanged((), ()), self.begins_s + self.iteration_s)

    def _best_answer(self, transitions: tuple[Transition, ...], now_s: float) -> Transition:
        """Best answer to a loss, as coordinator/transition_choice.py chooses it.

        The change that is to follow it is weighed too.
        """
        outlook = self._outlook(now_s)
        pairs = weighed_answers(
            transitions,
            prices=self.answers.prices,
            switch_s=lambda _plan: REGROUP_S,
            global_batch_size=self.batch,
            outlook=outlook,
        )
        best = self._best(tuple(as_that for _, as_that in pairs), outlook)
        return next(one for one, as_that in pairs if as_that is best)

    def _change(self, event: NodesChanged, now_s: float) -> None:
        """Changes to the best plan, if it pays or gives work to nodes that joined.

        Layers move while training goes on with the current plan. The downtime of the change is
        counted first.
        """
        assert self.plan is not None
        transitions, node_of = self.answers.to(self.plan, sorted(self.alive), event)
        if not transitions:
            return
        weighed = weighed_changes(
            transitions,
            iteration_s=self.iteration_s,
            leaving=(),
            prices=self.answers.prices,
            switch_s=lambda _plan: REGROUP_S,
        )
        outlook = self._outlook(now_s)
        best = self._best(weighed, outlook)
        then = best.then or best
        placed = any(node_of[label] in event.joined for label in then.after.nodes)
        if not placed and not self._pays(weighed, best, outlook):
            return
        num_before = floor(max(0.0, now_s - self.begins_s) / self.iteration_s + _ROUNDING)
        self.begins_s += best.downtime_s
        moved_s = self.begins_s + num_before * self.iteration_s + then.downtime_s
        self.following = (moved_s, _relabelled(then.after, node_of), then.iteration_s)

    def _pays(
        self, transitions: tuple[Transition, ...], best: Transition, outlook: Outlook
    ) -> bool:
        """Whether a transition is better than staying, by the rule of coordinator/change.py."""
        stay = next((one for one in transitions if one.keeps_plan), None)
        if stay is None:
            return False
        scores = [
            expected_samples_per_s(one, global_batch_size=self.batch, outlook=outlook)
            for one in (best, stay)
        ]
        return is_better(*scores, samples_per_s=self.batch / stay.iteration_s)

    def _best(self, transitions: tuple[Transition, ...], outlook: Outlook) -> Transition:
        return best_transition(transitions, global_batch_size=self.batch, outlook=outlook)

    def _outlook(self, now_s: float) -> Outlook:
        """What the job expects of failures, as in coordinator/transition_choice.py."""
        return Outlook(
            failures_per_s=learned_failures_per_s(self.history, now_s),
            unsaved_samples=self.unsaved,
            between_saves=self.between_saves,
            lost_max=inf,
            nodes_per_failure=learned_nodes_per_failure(self.history, now_s),
        )

    def _take(self, best: Transition, node_of: Mapping[int, int]) -> None:
        self.plan = _relabelled(best.after, node_of)
        self.iteration_s = best.iteration_s

    def _restart(self, now_s: float, takes_s: float) -> None:
        """Restarts from the newest save with the live nodes, if they are enough.

        Args:
            takes_s: seconds of the restart without loading layers.
        """
        found = self.answers.start(len(self.alive))
        self.plan = None
        if found is not None:
            labels = dict(zip(found.plan.nodes, sorted(self.alive), strict=False))
            self.plan = _relabelled(found.plan, labels)
            self.iteration_s = found.iteration_s
            self.begins_s = now_s + takes_s + self.answers.load_s(self.plan)
            self.improve()
