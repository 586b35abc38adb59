"""A whole job in numbers: what a policy makes of a cluster whose nodes fail and come back.

The policies and the choice among their answers are the product's own. Time goes on by what they
predict: downtime, iterations, and what is done again. A node that is back joins while training goes
on, and what an adaptive job may change to after a loss it changes to once the layers have moved.
What is asked again is looked up: nodes are numbered by their places, so the same loss at the same
place of the same plan is the same question. A policy that goes back to a save at every loss finds
the newest one; the state before the first iteration counts as one.

Not modelled: coordinators that fail, slow or distrusted nodes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import floor, inf
from typing import Final

from planaria.coordinator.choice import gains, weighed_answers
from planaria.coordinator.learning.history import (
    learned_failures_per_s,
    learned_nodes_per_failure,
    with_failure,
)
from planaria.coordinator.switching import weighed_as
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
from planaria.planner.plans import EveryPlan
from planaria.planner.reroute.reroutes import Priced, priced
from planaria.planner.reroute.shadows import shadowed
from planaria.policies.absorb import Absorb
from planaria.policies.policy import (
    Outlook,
    Policy,
    Prices,
    best_transition,
    expected_samples_per_s,
    profile_prices,
)
from planaria.policies.unequal import STAY

RESTART_S: Final = 60.0  # Of a job that had ended, for too few nodes were left.
LEASE_S: Final = 3.0
REGROUP_S: Final = 0.05  # Of a recovery beside moving layers, and of a switch.
_ROUNDING: Final = 1e-9  # Of an iteration.

# What all can go back to. Which save it is, and what is done again, `Job` knows: asked with those,
# no question would come twice.
_SAVED: Final = SavePoint(iteration=0, source="newest", redone_samples=0)


@dataclass(frozen=True, slots=True)
class Happening:
    """Nodes that are lost, or back, at a time."""

    at_s: float
    nodes: tuple[int, ...]
    is_loss: bool


class Answers:
    """What a policy proposes, remembered."""

    def __init__(self, every: EveryPlan, policy: Policy) -> None:
        self.every = every
        self.prices: Prices = profile_prices(every.problem.profile, regroup_s=REGROUP_S)
        self._policy = policy
        self._known: dict[object, tuple[Transition, ...]] = {}
        self._starts: dict[int, Priced | None] = {}

    def start(self, num_nodes: int) -> Priced | None:
        """What a job begins with; None if so few nodes do not hold the model, or too little memory
        is theirs for the layers that the policy has them keep besides."""
        if num_nodes not in self._starts:
            self._starts[num_nodes] = self._start(num_nodes)
        return self._starts[num_nodes]

    def _start(self, num_nodes: int) -> Priced | None:
        plan = self.every.plans.get(num_nodes)
        if plan is None:
            return None
        if isinstance(self._policy, Absorb):
            return priced(self.every.problem, shadowed(plan))
        templates = [pipeline.template for pipeline in plan.pipelines]
        return Priced(plan, self.every.distribution(templates)[0])

    def load_s(self, plan: Plan) -> float:
        """For all to load their layers from a save, as morph has it."""
        layer_bytes = self.prices.layer_bytes
        held = plan.held_by_rank.values()
        most = max(sum(layer_bytes[layer] for layer in layers) for layers in held)
        return self.prices.links["inter_node"].seconds(most)

    def to(
        self, plan: Plan, alive: Iterable[int], event: ClusterEvent
    ) -> tuple[tuple[Transition, ...], Mapping[int, int]]:
        """The transitions, of nodes by their labels, and the node of each label."""
        labels = _labels(plan, alive)
        asked = _relabelled(plan, labels)
        here = tuple(sorted(labels[node] for node in alive))
        if isinstance(event, NodesLost):  # Whoever had no place is no loss.
            lost = tuple(sorted(labels[n] for n in event.nodes if n in labels))
            event = replace(event, nodes=lost)
        else:
            event = replace(event, joined=tuple(sorted(labels[n] for n in event.joined)))
        shadows = tuple(sorted(asked.shadows.items()))
        key = (asked.pipelines, asked.routes, asked.gone, shadows, here, event)
        if key not in self._known:
            held = asked.held_by_rank
            nodes = tuple(Node(n, (frozenset(held.get(n, ())),)) for n in here)
            cluster = ClusterState(1, nodes)
            self._known[key] = self._policy.propose(asked, cluster, event, self.prices)
        return self._known[key], {label: node for node, label in labels.items()}


def _labels(plan: Plan, alive: Iterable[int]) -> dict[int, int]:
    """Of the nodes of a plan by their places, of others behind."""
    placed = [node for pipeline in plan.pipelines for node in pipeline.nodes]
    idle = sorted(set(alive).difference(placed))
    return {node: label for label, node in enumerate((*placed, *idle))}


def _relabelled(plan: Plan, labels: Mapping[int, int]) -> Plan:
    """The plan with other numbers for its nodes, of one device each; of epoch 0."""
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
    """One job until some time.

    Attributes:
        between_saves: samples from one save to the next.
        improves: a plan that was not searched for gives way to a better one at a commit.
        begins_s: when it trains by its plan; samples count from then on.
        following: a change that is being made, and when its plan begins.
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
        """Trains until then; iterations that have not ended do not count."""
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
        """Samples that the newest save does not have."""
        return self.samples % self.between_saves

    def answer(self, what: Happening) -> None:
        """Loses nodes, or gets them back."""
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
        if not transitions:  # Some layer has no holder: all go back to the save, in place.
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
        """Looks for a better plan at the first commit."""
        if self.improves:
            self._change(NodesChanged((), ()), self.begins_s + self.iteration_s)

    def _best_answer(self, transitions: tuple[Transition, ...], now_s: float) -> Transition:
        """As coordinator/choice.py has it: what is to follow counts if it will."""
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
        """Layers move while training goes on by the plan as it is; all pauses come first."""
        assert self.plan is not None
        transitions, node_of = self.answers.to(self.plan, sorted(self.alive), event)
        if not transitions:
            return
        weighed = weighed_as(
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
        """As coordinator/change.py asks."""
        stay = next((one for one in transitions if one.answer == STAY), None)
        if stay is None:
            return False
        scores = [
            expected_samples_per_s(one, global_batch_size=self.batch, outlook=outlook)
            for one in (best, stay)
        ]
        return gains(*scores, samples_per_s=self.batch / stay.iteration_s)

    def _best(self, transitions: tuple[Transition, ...], outlook: Outlook) -> Transition:
        return best_transition(transitions, global_batch_size=self.batch, outlook=outlook)

    def _outlook(self, now_s: float) -> Outlook:
        """As coordinator/choice.py has it."""
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
        """From the newest save with those that are there, if they are enough; it takes so long
        besides loading."""
        found = self.answers.start(len(self.alive))
        self.plan = None
        if found is not None:
            labels = dict(zip(found.plan.nodes, sorted(self.alive), strict=False))
            self.plan = _relabelled(found.plan, labels)
            self.iteration_s = found.iteration_s
            self.begins_s = now_s + takes_s + self.answers.load_s(self.plan)
            self.improve()
