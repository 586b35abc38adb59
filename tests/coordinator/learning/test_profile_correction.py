"""The profile is corrected while a job trains, and what it predicts from then on is right."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import pytest

from helpers import fake_cluster
from helpers.coordinated import NOW_S, NUM_MICROBATCHES, of_type, small_rules
from helpers.fake_cluster import FakeCluster
from helpers.jobs import template
from helpers.strategies import layer_profile, model_profile
from planaria.coordinator.frozen import replace
from planaria.coordinator.leadership import progress_of
from planaria.coordinator.learning import profile_correction
from planaria.coordinator.learning.profile_correction import (
    BESIDE_MIN,
    DRIFT_MIN,
    iteration_s,
    policy_of,
    restored_learning,
)
from planaria.coordinator.learning.slowness import COMPUTING_S_MIN, WINDOW
from planaria.core.cluster import ClusterState, NodesLost
from planaria.core.findings import Findings
from planaria.core.messages import IterationDone
from planaria.core.plan import Plan, RecomputationCost, Transition
from planaria.core.records import Changed, Committed, Decided, ProfileCorrected
from planaria.estimator.time import RANK_ITERATION_S
from planaria.planner.plans import PlanCatalog, plan_catalog, plan_of_templates, rebuilt_catalog
from planaria.planner.problem import Problem
from planaria.planner.reroute.reroutes import expected_times, simulated_s
from planaria.policies.policy import profile_prices
from planaria.policies.reinstantiate import Reinstantiate
from planaria.policies.unequal_nodes import UnequalNodes

NUM_LAYERS = 10
LAYER_S = 0.15  # Forward and backward, as the profile says.
END = 200


@pytest.fixture(autouse=True)
def _long_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cluster, "END", END)


def example_catalog() -> PlanCatalog:
    """Plans of a job of ten equal layers, of one to four nodes a pipeline."""
    layers = tuple(
        layer_profile(f"layer {i}", LAYER_S / 3, parameter_bytes=1024, activation_bytes=0)
        for i in range(NUM_LAYERS)
    )
    problem = Problem(
        profile=model_profile(layers),
        devices_per_node=1,
        num_microbatches=NUM_MICROBATCHES,
        failures_tolerated=1,
    )
    return plan_catalog(problem, 6, {n: template(n) for n in (1, 2, 3, 4)})


EVERY = example_catalog()


def policy(catalog: PlanCatalog) -> UnequalNodes:
    return UnequalNodes(Reinstantiate(catalog))


def training(sizes: tuple[int, ...] = (2, 2), *, catalog: PlanCatalog = EVERY) -> FakeCluster:
    """A job that trains on pipelines of so many nodes, with what the profile says predicted."""
    made = small_rules(n0=min(2, *sizes))
    profile = catalog.problem.profile
    made = replace(
        made,
        job=replace(made.job, training=replace(made.job.training, iterations=END)),
        policy=policy(catalog),
        prices=profile_prices(profile, regroup_s=0.05),
        profile=profile,
        catalog=catalog,
        policy_of=policy,
    )
    templates = [catalog.templates[size] for size in sizes]
    cluster = FakeCluster(
        made, plan_of_templates(catalog.problem, templates, range(sum(sizes)), epoch=0)
    )
    cluster.begin()
    assert cluster.state.facts.decision is not None
    predicted_s = expected_times(catalog.problem, cluster.plan).iteration_s
    decision = msgspec.structs.replace(cluster.state.facts.decision, predicted_s=predicted_s)
    cluster.state = replace(cluster.state, facts=replace(cluster.state.facts, decision=decision))
    return cluster


def train(
    cluster: FakeCluster,
    number: int,
    *,
    true: Mapping[int, float],
    slow: Mapping[int, float] | None = None,
    scale: float = 1.0,
) -> None:
    """So many iterations in which layers take so many times what the profile says, and nodes."""
    for _ in range(number):
        state = cluster.state
        for rank in state.plan.ranks:
            layers = [
                layer
                for route in state.plan.routes
                for hop in route
                if hop.rank == rank
                for layer in range(hop.first_layer, hop.end_layer)
            ]
            work_s = scale * LAYER_S * sum(true.get(layer, 1.0) for layer in layers)
            cluster.nodes[rank].computing_s = (slow or {}).get(rank, 1.0) * work_s
        cluster.train_at(state.commits.next_iteration, NOW_S)


def factors(cluster: FakeCluster) -> tuple[float, ...]:
    return cluster.state.learning.findings.layer_factors


def test_layers_that_take_longer_are_found_and_the_iteration_is_predicted_anew() -> None:
    """Everything takes 1.5 times as long: after a window the prediction does, too."""
    cluster = training()
    predicted_s = EVERY.times.iteration_s(
        [p.template for p in cluster.state.plan.pipelines], (3, 3)
    )
    train(cluster, WINDOW, true=dict.fromkeys(range(NUM_LAYERS), 1.5))
    assert not of_type(cluster.commands, ProfileCorrected)  # The first iteration does not count.
    train(cluster, 1, true=dict.fromkeys(range(NUM_LAYERS), 1.5))
    (notice,) = of_type(cluster.commands, ProfileCorrected)

    assert factors(cluster) == pytest.approx((1.5,) * NUM_LAYERS)
    assert notice.layer_factors == factors(cluster)
    assert notice.predicted_s == pytest.approx(1.5 * predicted_s, rel=1e-2)
    assert notice.iteration == cluster.state.commits.next_iteration
    assert "layers take 1.50 times as long as the profile says" in notice.warning
    train(cluster, 3 * WINDOW, true=dict.fromkeys(range(NUM_LAYERS), 1.5))
    assert len(of_type(cluster.commands, ProfileCorrected)) == 1


def test_a_new_coordinator_expects_of_a_slow_node_what_the_one_before_did() -> None:
    """Otherwise its layers would be taken for slow ones, whoever computes them."""
    problem = replace(EVERY.problem, processors=2)
    cluster = training(catalog=replace(EVERY, problem=problem))
    plan, slow = cluster.state.plan, Findings(speeds={0: 0.5})
    fast_s, slow_s = (
        restored_learning(cluster.rules, findings, plan).computing_s
        for findings in (Findings(), slow)
    )

    assert slow_s[0] > fast_s[0]


def test_layers_of_one_stage_share_a_factor_until_other_cuts_tell_them_apart() -> None:
    """Layer 2 alone takes 1.6 times as long. Only it is in the first stage of three and in the
    second of four; the seconds of all stages come out right in the end."""
    true = {2: 1.6}
    cluster = training((3, 4))
    train(cluster, 1 + WINDOW, true=true)
    first = factors(cluster)
    train(cluster, 20 * WINDOW, true=true)

    found = factors(cluster)
    assert first[:3] == pytest.approx((1.1, 1.1, 1.2))
    assert found[2] > first[2] > first[0] > found[0]
    for layers in cluster.state.plan.layers_by_rank.values():
        true_s = sum(true.get(layer, 1.0) for layer in layers)
        assert sum(found[layer] for layer in layers) == pytest.approx(true_s, rel=2 * DRIFT_MIN)


def test_layers_that_are_computed_again_take_what_the_profile_says() -> None:
    """With what their stages compute again to save memory."""
    costs = {"full": RecomputationCost(activation_bytes=0, additional_s={1: 0.5 * LAYER_S})}
    profile = EVERY.problem.profile
    layers = tuple(replace(layer, recomputed=costs) for layer in profile.layers)
    problem = replace(EVERY.problem, profile=replace(profile, layers=layers))
    first, last = EVERY.templates[2].stages
    first = replace(first, recomputation=tuple("full" for _ in range(first.end_layer)))
    templates = {2: replace(EVERY.templates[2], stages=(first, last))}
    cluster = training(catalog=rebuilt_catalog(problem, templates, EVERY.plans))
    train(cluster, 3 * WINDOW, true=dict.fromkeys(range(first.end_layer), 1.5))

    assert factors(cluster) == ()
    assert cluster.state.speeds == {}


def test_less_than_the_threshold_and_too_short_iterations_change_nothing() -> None:
    """Noise is not followed, nor is what no clock can tell."""
    for true, scale in ((1.0 + 0.8 * DRIFT_MIN, 1.0), (2.0, 0.5 * COMPUTING_S_MIN / 30)):
        cluster = training()
        train(cluster, 3 * WINDOW, true=dict.fromkeys(range(NUM_LAYERS), true), scale=scale)

        assert factors(cluster) == ()
        assert policy_of(cluster.rules, cluster.state) is cluster.rules.policy


@pytest.mark.parametrize("sizes", [(2, 2), (2, 2, 2)])
@pytest.mark.parametrize("since", [0, 2 * WINDOW])
def test_a_slow_node_is_no_slow_layer(sizes: tuple[int, ...], since: int) -> None:
    """Its speed is in the plan; its layers take what they take elsewhere, also where its only peer
    tells of that, and what was measured before it was found does not count."""
    cluster = training(sizes)
    train(cluster, since, true={})
    train(cluster, 4 * WINDOW, true={}, slow={1: 2.0})

    assert cluster.state.speeds == {1: 0.5}
    assert not of_type(cluster.commands, ProfileCorrected)
    assert all(abs(factor - 1.0) <= DRIFT_MIN for factor in factors(cluster))


def test_the_answers_to_a_loss_are_priced_by_the_corrected_profile() -> None:
    """All candidates, and with them the iteration that is predicted after the loss."""
    prices = {}
    for true in (1.0, 2.0):
        cluster = training()
        train(cluster, WINDOW + 1, true=dict.fromkeys(range(NUM_LAYERS), true))
        cluster.lose(3)
        (decided,) = of_type(cluster.commands, Decided)
        prices[true] = {c.answer: c.iteration_s for c in decided.candidates}

    assert prices[1.0].keys() == prices[2.0].keys()
    for answer, before_s in prices[1.0].items():
        assert prices[2.0][answer] == pytest.approx(2.0 * before_s, rel=1e-2)


def test_a_new_coordinator_prices_as_the_one_before_did() -> None:
    """The factors are on record with the members."""
    cluster = training()
    train(cluster, WINDOW + 1, true=dict.fromkeys(range(NUM_LAYERS), 2.0))
    cluster.lose(3)

    cluster.restart()

    learning = cluster.state.learning
    assert learning.findings.layer_factors == pytest.approx((2.0,) * NUM_LAYERS)
    assert isinstance(learning.policy, UnequalNodes)
    profile = learning.policy.reinstantiate.catalog.problem.profile
    assert profile.layers[0].forward_s[1] == pytest.approx(2.0 * LAYER_S / 3)


def test_a_new_coordinator_knows_what_was_learned_since_the_newest_loss() -> None:
    """Nobody was lost yet, and agents tell no iteration again that is on record."""
    cluster = training()
    train(cluster, WINDOW + 2, true=dict.fromkeys(range(NUM_LAYERS), 2.0))
    committed = of_type(cluster.commands, Committed)[-1]
    cluster.progress = progress_of(cluster.state, committed)
    before = cluster.state.learning.findings
    predicted_s = iteration_s(cluster.state)
    for node in cluster.nodes.values():
        facts = node.agent.facts.items()
        told = {key: fact for key, fact in facts if not isinstance(fact, IterationDone)}
        node.agent = replace(node.agent, facts=told)

    cluster.restart()

    assert before.layer_factors == pytest.approx((2.0,) * NUM_LAYERS)
    assert cluster.state.learning.findings == before
    assert iteration_s(cluster.state) == pytest.approx(predicted_s)


def test_what_there_is_beside_layers_is_predicted_once_it_was_measured() -> None:
    """Optimizer and sums take 0.2 s, while the layers' seconds vary by more than that; and later
    all candidates have them."""
    cluster = training()
    predicted_s = cluster.state.facts.decision.predicted_s if cluster.state.facts.decision else 0.0
    for ratio in (1.0, 1.3, 0.8, 1.04, 0.9, 1.2, 1.0, 1.02):
        for node in cluster.nodes.values():
            node.seconds = ratio * predicted_s + 0.2
        train(cluster, 1, true=dict.fromkeys(range(NUM_LAYERS), ratio))
    notice = of_type(cluster.commands, ProfileCorrected)[-1]

    assert cluster.state.learning.findings.beside_s == pytest.approx(0.2)
    assert notice.predicted_s == pytest.approx(predicted_s + 0.2, rel=DRIFT_MIN)
    cluster.lose(3)
    (decided,) = of_type(cluster.commands, Decided)
    calm = training()
    train(calm, WINDOW + 1, true={})
    calm.lose(3)
    (without,) = of_type(calm.commands, Decided)
    assert decided.predicted_s == pytest.approx(without.predicted_s + 0.2, rel=DRIFT_MIN)
    cluster.restart()
    assert cluster.state.learning.findings.beside_s == pytest.approx(0.2)


def test_a_change_is_priced_by_what_an_iteration_takes_now() -> None:
    """Layers take twenty times what the profile says, which is known when a node comes: its layers
    move in one iteration, between two others."""
    cluster = training()
    config = cluster.rules.job.cluster
    job = replace(cluster.rules.job, cluster=replace(config, max_nodes=6))
    cluster.rules = replace(cluster.rules, job=job)
    slow = dict.fromkeys(range(NUM_LAYERS), 20.0)
    train(cluster, WINDOW + 2, true=slow)
    now_s = of_type(cluster.commands, ProfileCorrected)[-1].predicted_s
    cluster.join(4)
    train(cluster, 6, true=slow)
    (changed,) = of_type(cluster.commands, Changed)

    assert [candidate.moving_s for candidate in changed.candidates] == [pytest.approx(3 * now_s)]


def train_alone(cluster: FakeCluster, number: int, *, ratio: float, slowness: float) -> float:
    """So many iterations on a node a pipeline, where a slow node is no reason to move microbatches;
    the seconds of each."""
    iteration_s = slowness * ratio * LAYER_S * NUM_LAYERS * NUM_MICROBATCHES / 2
    for node in cluster.nodes.values():
        node.seconds = iteration_s
    train(cluster, number, true=dict.fromkeys(range(NUM_LAYERS), ratio), slow={1: slowness})
    return iteration_s


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_a_slow_node_that_no_plan_betters_is_predicted_and_so_is_its_end(ratio: float) -> None:
    """Layers take what was found before, a node 1.34 times as long for a while. What it takes more
    is in its speed alone: nothing of it is beside the layers, where it would stay for ever."""
    cluster = training((1, 1))
    for number, slowness in ((12, 1.0), (28, 1.34), (60, 1.0)):
        true_s = train_alone(cluster, number, ratio=ratio, slowness=slowness)

        assert iteration_s(cluster.state) == pytest.approx(true_s, rel=2e-2)
        assert cluster.state.learning.findings.beside_s < BESIDE_MIN * true_s
    assert not of_type(cluster.commands, Changed)
    cluster.lose(1)
    (decided,) = of_type(cluster.commands, Decided)
    assert decided.predicted_s == pytest.approx(2.0 * true_s, rel=2e-2)


def test_layers_that_drift_beside_a_slow_node_are_predicted_with_its_speed() -> None:
    """All layers begin to take twice as long while no plan betters a slow node."""
    cluster = training((1, 1))
    for ratio in (1.0, 2.0):
        true_s = train_alone(cluster, 20, ratio=ratio, slowness=1.34)

    assert iteration_s(cluster.state) == pytest.approx(true_s, rel=2e-2)
    assert cluster.state.learning.findings.beside_s < BESIDE_MIN * true_s


def test_an_epoch_is_predicted_by_its_own_plan_before_its_first_commit() -> None:
    """A change that is begun then is weighed beside it: after a loss, and after a change."""
    cluster, true = training((2, 2, 2)), dict.fromkeys(range(NUM_LAYERS), 2.0)
    train(cluster, WINDOW + 2, true=true)
    before_s = iteration_s(cluster.state)
    cluster.lose(3)
    (decided,) = of_type(cluster.commands, Decided)
    assert iteration_s(cluster.state) == pytest.approx(decided.predicted_s) != before_s
    train(cluster, 1, true=true)
    assert iteration_s(cluster.state) == pytest.approx(decided.predicted_s)

    cluster.join(6)
    while not of_type(cluster.commands, Changed):
        train(cluster, 1, true=true)

    (changed,) = of_type(cluster.commands, Changed)
    assert iteration_s(cluster.state) == pytest.approx(changed.predicted_s) != decided.predicted_s


def test_a_little_beside_layers_is_not_followed() -> None:
    """Every notice would be a new prediction of each iteration."""
    cluster = training()
    assert cluster.state.facts.decision is not None
    for node in cluster.nodes.values():
        node.seconds = (1.0 + 0.8 * BESIDE_MIN) * cluster.state.facts.decision.predicted_s
    train(cluster, 3 * WINDOW, true={})

    assert not of_type(cluster.commands, ProfileCorrected)
    assert policy_of(cluster.rules, cluster.state) is cluster.rules.policy


def sharing(processors: int) -> PlanCatalog:
    """As EVERY, on nodes that share so many processors."""
    problem = replace(EVERY.problem, processors=processors)
    return rebuilt_catalog(problem, EVERY.templates, EVERY.plans)


def train_sharing(cluster: FakeCluster, number: int, *, times: float) -> None:
    """So many iterations of ranks that compute so many times what is expected of them beside each
    other, by the profile as it was at the start."""
    assert cluster.rules.catalog is not None
    computing_s = expected_times(cluster.rules.catalog.problem, cluster.state.plan).computing_s
    for _ in range(number):
        for rank, seconds in computing_s.items():
            cluster.nodes[rank].computing_s = times * seconds
        cluster.train_at(cluster.state.commits.next_iteration, NOW_S)


def test_ranks_that_share_processors_as_predicted_correct_no_layer() -> None:
    """Four ranks on one processor compute for four times what their layers take, or nearly."""
    cluster = training(catalog=sharing(1))
    alone_s = simulated_s(EVERY.problem, cluster.plan)
    train_sharing(cluster, 2 * WINDOW, times=1.0)

    assert factors(cluster) == ()
    assert iteration_s(cluster.state) > 2.5 * alone_s


def test_layers_that_take_longer_are_found_where_processors_are_shared() -> None:
    """What is left when the share of the others is taken off is the layers' own."""
    cluster = training(catalog=sharing(1))
    predicted_s = iteration_s(cluster.state)
    train_sharing(cluster, WINDOW + 1, times=1.5)

    assert factors(cluster) == pytest.approx((1.5,) * NUM_LAYERS)
    assert iteration_s(cluster.state) == pytest.approx(1.5 * predicted_s, rel=0.01)
    train_sharing(cluster, 3 * WINDOW, times=1.5)
    assert len(of_type(cluster.commands, ProfileCorrected)) == 1


def test_a_new_coordinator_knows_that_ranks_share_processors() -> None:
    """It takes over in the middle of an epoch, of which nobody tells it the first iteration; what
    it is told then is no drift."""
    cluster = training(catalog=sharing(1))
    train_sharing(cluster, 2, times=1.0)
    committed = of_type(cluster.commands, Committed)[-1]
    cluster.progress = progress_of(cluster.state, committed)
    for node in cluster.nodes.values():
        facts = node.agent.facts.items()
        told = {key: fact for key, fact in facts if not isinstance(fact, IterationDone)}
        node.agent = replace(node.agent, facts=told)
    cluster.restart()
    train_sharing(cluster, 3 * WINDOW, times=1.0)

    assert factors(cluster) == ()


@pytest.mark.parametrize("hops_max", [0, 13, 1 << 9])
def test_answers_are_priced_by_the_processors_that_ranks_share(
    hops_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one processor every plan takes what all layers take of all microbatches, and the answer to
    a loss is no slower than what there was; also where plans are too large to be simulated."""
    monkeypatch.setattr(profile_correction, "_HOPS_MAX", hops_max)
    cluster = training((2, 2, 2), catalog=sharing(1))
    train_sharing(cluster, 1, times=1.0)
    cluster.lose(5)
    (decided,) = of_type(cluster.commands, Decided)

    work_s = NUM_MICROBATCHES * NUM_LAYERS * LAYER_S + 5 * RANK_ITERATION_S
    assert decided.predicted_s == pytest.approx(work_s, rel=0.02)
    prices_s = [one.iteration_s for one in decided.candidates]
    assert prices_s == pytest.approx([work_s] * len(prices_s), rel=0.02)


def test_prices_of_one_decision_are_found_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two plans is too large to be simulated, so neither is."""
    catalog = sharing(2)
    cluster = training((2, 2), catalog=catalog)
    plans = [
        plan_of_templates(catalog.problem, [catalog.templates[n] for n in sizes], range(4), epoch=1)
        for sizes in ((4,), (1, 3))
    ]
    hops = sorted(sum(map(len, plan.routes)) for plan in plans)
    prices = {}
    for hops_max in (0, hops[0], hops[1]):
        monkeypatch.setattr(profile_correction, "_HOPS_MAX", hops_max)
        both = policy_of(replace(cluster.rules, policy=Given(plans)), cluster.state)
        state = ClusterState(1, ())
        proposed = both.propose(cluster.plan, state, NodesLost((), 0), cluster.rules.prices)
        prices[hops_max] = [transition.iteration_s for transition in proposed]

    assert prices[0] == prices[hops[0]] != prices[hops[1]]
    assert prices[hops[1]] == [expected_times(catalog.problem, x).iteration_s for x in plans]


@dataclass(frozen=True)
class Given:
    """A policy with these plans for its answers, all of them fast without sharing."""

    plans: list[Plan]

    def propose(self, plan: Plan, *_: object) -> tuple[Transition, ...]:
        return tuple(
            Transition(
                before=plan,
                after=after,
                rounds=(),
                downtime_s=0.1,
                iteration_s=0.1,
                redone_samples=0,
                policy="given",
                answer="given",
            )
            for after in self.plans
        )
