"""What was answered with what was at hand is answered again at commits, where that is worth it."""

from dataclasses import dataclass, replace
from typing import Literal

import pytest

from coordinator.test_slow_nodes import END, example_catalog, training
from helpers import fake_cluster
from helpers.cases import every_nth
from helpers.coordinated import FIRST, NOW_S, of_type, small_rules
from helpers.fake_cluster import FakeCluster
from planaria.coordinator.commands import AnswersFound
from planaria.coordinator.transition_choice import time_to_failure_s
from planaria.core.cluster import ClusterEvent, ClusterState, NodesChanged
from planaria.core.messages import Raised, StartEpoch
from planaria.core.plan import Link, Plan, Transition
from planaria.core.records import Changed, Committed, Decided, Recovering
from planaria.planner.plans import PlanCatalog, plan_of_templates
from planaria.policies.adaptive import Adaptive
from planaria.policies.policy import Prices, profile_prices
from planaria.policies.reinstantiate import Reinstantiate
from planaria.policies.reroute import Reroute
from planaria.policies.unequal_nodes import STAY, UnequalNodes

pytestmark = pytest.mark.faults

Name = Literal["adaptive", "reroute"]

BYTES_PER_S = 1000.0  # A layer takes a little longer than an iteration.


@pytest.fixture(autouse=True)
def _long_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cluster, "END", END)


def lost_one(
    *,
    bytes_per_s: float = BYTES_PER_S,
    policy: Name = "adaptive",
    failure_rate: float = 60.0,
    looks_ahead: bool = False,
    iterations: int = END,
) -> FakeCluster:
    """Two pipelines of three nodes train, with a failure a minute; node 1 is lost."""
    catalog = example_catalog(6, n0=2)
    around = Reroute(catalog.problem, Adaptive(()))
    made = small_rules(n0=2, failure_rate=failure_rate)
    resilience = replace(made.job.resilience, policy=policy)
    training = replace(made.job.training, iterations=iterations)
    prices = profile_prices(catalog.problem.profile, regroup_s=0.05)
    made = replace(
        made,
        job=replace(made.job, resilience=resilience, training=training),
        looks_ahead=looks_ahead,
        policy=Adaptive((UnequalNodes(Reinstantiate(catalog)), around)),
        prices=replace(prices, links={"inter_node": Link(0.0, bytes_per_s)}),
    )
    templates = [catalog.templates[3]] * 2
    cluster = FakeCluster(made, plan_of_templates(catalog.problem, templates, range(6), epoch=0))
    cluster.begin()
    cluster.train(FIRST)
    cluster.lose(1)
    return cluster


def train(cluster: FakeCluster, number: int) -> None:
    for _ in range(number):
        cluster.train(cluster.state.commits.next_iteration)


def look(cluster: FakeCluster, number: int) -> None:
    """So many iterations, and after each what was looked for is found, if anybody looks."""
    for _ in range(number):
        train(cluster, 1)
        if cluster.rules.looks_ahead and not cluster.state.plan.silent:
            cluster.hear(AnswersFound(cluster.state.epoch))


def test_a_loss_is_rerouted_at_once_and_pipelines_are_made_anew_while_training_goes_on() -> None:
    """Layers move to silent members, nothing is redone, and it ends: the plan is looked at once."""
    cluster = lost_one()
    (decided,) = of_type(cluster.commands, Decided)
    assert (decided.policy, decided.answer) == ("reroute", "reroute, then simple")
    assert cluster.state.plan.gone == (1,)
    train(cluster, 40)

    (changed,) = of_type(cluster.commands, Changed)
    assert changed.policy == "reinstantiate"
    assert set(changed.kinds.values()) == {"reform"}
    assert changed.reason == "microbatches went around node 1"
    assert changed.transfer_bytes > 0
    scores = {candidate.answer: candidate.score for candidate in changed.candidates}
    assert scores[changed.answer] == max(scores.values()) > scores["stay"]
    assert not cluster.state.plan.gone
    assert cluster.state.plan.nodes == cluster.state.nodes == (0, 2, 3, 4, 5)
    iterations = [notice.iteration for notice in of_type(cluster.commands, Committed)]
    assert iterations == list(range(FIRST, cluster.state.commits.next_iteration))
    assert len(of_type(cluster.commands, Recovering)) == 1
    assert cluster.state.change is None
    number = len(of_type(cluster.commands, StartEpoch))
    train(cluster, 10)
    assert len(of_type(cluster.commands, StartEpoch)) == number


@pytest.mark.parametrize("bytes_per_s", [1000.0, 3000.0])
def test_a_change_takes_as_many_iterations_as_it_is_priced_at(bytes_per_s: float) -> None:
    """Three waves, or two; messages take no time."""
    cluster = lost_one(bytes_per_s=bytes_per_s)
    began = cluster.state.commits.next_iteration
    while not of_type(cluster.commands, Changed) and cluster.state.commits.next_iteration < END:
        train(cluster, 1)

    (changed,) = of_type(cluster.commands, Changed)
    (taken,) = (one for one in changed.candidates if one.answer == changed.answer)
    (stay,) = (one for one in changed.candidates if one.answer == "stay")
    assert taken.moving_s == pytest.approx(
        (cluster.state.commits.next_iteration - began) * stay.iteration_s
    )


def test_a_change_is_told_with_the_failures_that_it_was_weighed_by() -> None:
    """They are learned, so what is expected has changed when all layers have moved."""
    cluster = lost_one(failure_rate=0.0)
    expected_s = time_to_failure_s(cluster.rules, cluster.state, NOW_S)
    for number in range(40):
        cluster.train_at(cluster.state.commits.next_iteration, NOW_S + 3.0 * number)

    (changed,) = of_type(cluster.commands, Changed)
    assert (changed.asked_s, changed.time_to_failure_s) == (NOW_S, expected_s)
    assert time_to_failure_s(cluster.rules, cluster.state, changed.now_s) > expected_s


def test_what_the_next_failure_would_end_is_not_begun() -> None:
    """In six seconds, as expected, while layers move for nine: only the switches are short."""
    cluster = lost_one(failure_rate=600.0)
    assert cluster.state.plan.gone == (1,)
    train(cluster, 40)

    assert of_type(cluster.commands, Changed) == []


def test_what_was_not_worth_it_is_begun_when_failures_have_become_rare() -> None:
    """The rate that is learned is highest right after a loss, when the plan is first looked at; it
    is looked at again as the rate falls, but not at every commit."""
    cluster = lost_one(failure_rate=0.0, bytes_per_s=60.0, iterations=10_000)
    asked = set()
    for later_s in range(0, 7200, 60):
        cluster.train_at(cluster.state.commits.next_iteration, NOW_S + later_s)
        asked.add(cluster.state.search.last_situation)
        if later_s == 60:
            assert not of_type(cluster.commands, Changed)

    (changed,) = of_type(cluster.commands, Changed)
    assert set(changed.kinds.values()) == {"reform"}
    assert not cluster.state.plan.gone
    assert len(asked) < 10


def test_a_job_that_looks_ahead_waits_until_better_plans_have_been_looked_for() -> None:
    """It would stand still while it looks itself. Once it has changed it is left as it is."""
    cluster = lost_one(looks_ahead=True)
    train(cluster, 40)
    assert of_type(cluster.commands, Changed) == []

    cluster.hear(AnswersFound(cluster.state.epoch - 1))
    train(cluster, 5)
    assert of_type(cluster.commands, Changed) == []

    cluster.hear(AnswersFound(cluster.state.epoch))
    train(cluster, 20)
    (changed,) = of_type(cluster.commands, Changed)
    assert set(changed.kinds.values()) == {"reform"}

    cluster.hear(AnswersFound(cluster.state.epoch))
    train(cluster, 20)
    assert of_type(cluster.commands, Changed) == [changed]


def test_a_job_that_ends_soon_is_left_as_it_is() -> None:
    """A node is on its own with its layers, but a failure comes every two hours, not in the minutes
    that are left."""
    cluster = lost_one(failure_rate=0.5)
    train(cluster, 40)

    assert of_type(cluster.commands, Changed) == []
    assert cluster.state.plan.gone == (1,)


def test_who_fixed_rerouting_by_name_keeps_it() -> None:
    """To compare it with others. Looking ahead is for its next answer alone."""
    cluster = lost_one(policy="reroute", looks_ahead=True)
    cluster.hear(AnswersFound(cluster.state.epoch))
    train(cluster, 40)

    assert of_type(cluster.commands, Changed) == []
    assert cluster.state.plan.gone == (1,)


@pytest.mark.parametrize("is_preparing", [False, True])
def test_a_change_for_which_a_rank_lacked_memory_is_not_begun_again(is_preparing: bool) -> None:
    """By the same members: each of its beginnings cost a recovery. A node that joins is let in."""
    cluster = lost_one()
    layers = (0, 0) if is_preparing else (0, 1)
    raised = Raised(error="MemoryError", message="", first_layer=layers[0], end_layer=layers[1])
    for _ in range(30):
        train(cluster, 1)
        if silent := cluster.state.plan.silent:
            cluster.fail(min(silent), raised, blame="memory")

    assert len(of_type(cluster.commands, Recovering)) == 2
    assert not of_type(cluster.commands, Changed)
    cluster.join(6)
    train(cluster, 30)
    (changed,) = of_type(cluster.commands, Changed)
    assert changed.kinds == {6: "join"}


LATER = [(node, later) for node in (0, 2, 3, 5) for later in (0, 1, 3, 7)]


@pytest.mark.parametrize(("node", "later"), [*every_nth(3, LATER), (4, 7)])
def test_a_loss_in_the_middle_is_answered_like_any_other(node: int, later: int) -> None:
    """What silent members hold by then they keep, and the rest is looked at anew. Node 4 was the
    only holder of what node 1 had held, too; seven iterations later it is not any more."""
    cluster = lost_one()
    train(cluster, later)
    cluster.lose(node)
    train(cluster, 60)

    assert cluster.state.nodes == tuple(sorted({0, 2, 3, 4, 5} - {node}))
    assert set(cluster.state.plan.nodes) == set(cluster.state.nodes)
    iterations = [notice.iteration for notice in of_type(cluster.commands, Committed)]
    assert iterations == list(range(FIRST, cluster.state.commits.next_iteration))


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("later", every_nth(3, zip(range(8))))
def test_a_new_coordinator_goes_on_with_it(later: int, *, looks_ahead: bool) -> None:
    """In a switch or between two waves. Who looks ahead finds nothing while there are silent
    members, so what the one before had begun must not be left as it is."""
    cluster = lost_one(looks_ahead=looks_ahead)
    look(cluster, later)
    cluster.restart()
    look(cluster, 60)

    assert not cluster.state.plan.gone
    assert not cluster.state.plan.silent


@pytest.mark.parametrize("later", every_nth(3, zip(range(8))))
def test_a_new_coordinator_gives_work_to_who_was_joining(later: int) -> None:
    """The node is a member from the first wave on, so it is no candidate any more."""
    cluster = training(5, (2, 3))
    slow = replace(cluster.rules.prices, links={"inter_node": Link(0.0, BYTES_PER_S)})
    cluster.rules = replace(
        cluster.rules, prices=slow, policy=UnequalNodes(Reinstantiate(example_catalog(6, n0=2)))
    )
    cluster.join(5)
    train(cluster, later)
    cluster.restart()
    train(cluster, 60)

    assert cluster.state.nodes == (0, 1, 2, 3, 4, 5)
    assert set(cluster.state.plan.nodes) == set(cluster.state.nodes)
    assert not cluster.state.plan.silent


@dataclass(frozen=True)
class Hasty:
    """Makes two long pipelines of whoever joins, and looks further only when there is time."""

    catalog: PlanCatalog

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        equal = Reinstantiate(self.catalog)
        if not (isinstance(event, NodesChanged) and event.joined):
            return UnequalNodes(equal).propose(plan, cluster, event, prices)
        long = plan_of_templates(
            self.catalog.problem, [self.catalog.templates[3]] * 2, range(6), epoch=0
        )
        return (equal.transition(long.pipelines, "long", plan, cluster, event, prices),)


def test_the_first_plan_gives_way_to_a_better_one() -> None:
    """It is the best of the templates; layouts are looked for while training goes on."""
    cluster = training(6, (3, 3))
    cluster.rules = replace(cluster.rules, looks_ahead=True, policy=Hasty(example_catalog(6, n0=2)))
    train(cluster, 20)
    assert of_type(cluster.commands, Changed) == []

    cluster.hear(AnswersFound(cluster.state.epoch))
    train(cluster, 20)

    (changed,) = of_type(cluster.commands, Changed)
    assert changed.reason == "the plan was the best at hand"
    assert len(cluster.state.plan.pipelines) == 3
    assert not of_type(cluster.commands, Recovering)


@dataclass(frozen=True)
class Splitting:
    """Better than what there is: the same work, with backwards split.

    Attributes:
        stay_name: name of the answer that keeps the plan.
    """

    policy: UnequalNodes
    stay_name: str = STAY

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        found = self.policy.propose(plan, cluster, event, prices)
        if plan.splits_backward or not isinstance(event, NodesChanged):
            return found
        stay = next(transition for transition in found if transition.keeps_plan)
        split = replace(plan, epoch=cluster.epoch, splits_backward=True)
        half_s = stay.iteration_s / 2
        better = replace(stay, after=split, iteration_s=half_s, answer="split", keeps_plan=False)
        return replace(stay, answer=self.stay_name), better


@pytest.mark.parametrize("stay_name", [STAY, "as it is"])
def test_a_better_plan_that_moves_no_layer_is_told(stay_name: str) -> None:
    """It pauses training, and all train by it, whatever a policy calls keeping the plan."""
    cluster = lost_one(looks_ahead=True)
    policy = UnequalNodes(Reinstantiate(example_catalog(6, n0=2)))
    cluster.rules = replace(cluster.rules, policy=Splitting(policy, stay_name))
    cluster.lose(2)
    cluster.hear(AnswersFound(cluster.state.epoch))
    train(cluster, 5)

    (changed,) = of_type(cluster.commands, Changed)
    assert changed.answer == "split"
    assert changed.kinds == dict.fromkeys((0, 3, 4, 5), "reform")


def test_what_answers_a_join_in_a_hurry_is_bettered_when_there_is_time() -> None:
    """Six nodes are faster in three pipelines of two than in two of three."""
    cluster = training(5, (2, 3))
    cluster.rules = replace(cluster.rules, looks_ahead=True, policy=Hasty(example_catalog(6, n0=2)))
    cluster.join(5)
    train(cluster, 20)
    (joined,) = of_type(cluster.commands, Changed)
    assert (set(joined.kinds.values()), joined.answer) == ({"join"}, "long")

    cluster.hear(AnswersFound(cluster.state.epoch))
    train(cluster, 20)
    _, bettered = of_type(cluster.commands, Changed)
    assert set(bettered.kinds.values()) == {"reform"}
    assert bettered.predicted_s < joined.predicted_s
    assert bettered.reason == "the plan was the best at hand"

    cluster.hear(AnswersFound(cluster.state.epoch))
    train(cluster, 20)
    assert of_type(cluster.commands, Changed) == [joined, bettered]
