"""A stage that ran out of memory is planned smaller, if there is a plan."""

from dataclasses import replace

import msgspec
import pytest

from helpers.coordinated import FIRST, of_type, small_rules
from helpers.fake_cluster import FakeCluster
from helpers.jobs import template
from helpers.strategies import layer_profile, model_profile
from planaria.coordinator.commands import End, Evict
from planaria.coordinator.learning.memory_estimates import with_more_room
from planaria.coordinator.state import Phase
from planaria.core.kinds import Ending
from planaria.core.messages import Raised, SaveLayers
from planaria.core.plan import Plan
from planaria.core.records import Recovering
from planaria.planner.layout.sets import SetSearch
from planaria.planner.plans import PlanCatalog, plan_catalog, plan_of_templates
from planaria.planner.problem import Problem
from planaria.policies.memory_checked import has_room, stage_peaks
from planaria.policies.policy import profile_prices
from planaria.policies.reinstantiate import Reinstantiate
from planaria.policies.unequal_nodes import UnequalNodes

NUM_LAYERS = 10
NO_MEMORY = Raised(error="MemoryError", message="no room", first_layer=5, end_layer=10)


def example_catalog(*, num_layers_max: int) -> PlanCatalog:
    """Plans for devices that hold so many layers, as the profile says."""
    layers = tuple(
        layer_profile(f"layer {i}", 0.05, parameter_bytes=1000, activation_bytes=0)
        for i in range(NUM_LAYERS)
    )
    profile = model_profile(layers)
    problem = Problem(profile=profile, devices_per_node=1, num_microbatches=6, failures_tolerated=1)
    ((layer_bytes, *_), *_) = stage_peaks(
        problem, plan_of_templates(problem, [template(10)], range(10), epoch=0)
    )
    limited = replace(profile, device_memory_bytes=num_layers_max * layer_bytes)
    problem = replace(problem, profile=limited)
    return plan_catalog(problem, 6, {n: template(n) for n in (2, 3, 4)})


def policy(catalog: PlanCatalog) -> UnequalNodes:
    return UnequalNodes(Reinstantiate(catalog))


def training(*, num_layers_max: int) -> FakeCluster:
    """A job on two pipelines of two nodes, five layers each."""
    catalog = example_catalog(num_layers_max=num_layers_max)
    rules = replace(
        small_rules(max_nodes=6),
        policy=policy(catalog),
        policy_of=policy,
        catalog=catalog,
        prices=profile_prices(catalog.problem.profile, regroup_s=0.05),
    )
    plan = plan_of_templates(catalog.problem, [template(2), template(2)], range(4), epoch=0)
    cluster = FakeCluster(rules, plan)
    cluster.begin()
    cluster.train(FIRST)
    return cluster


def stage_of(plan: Plan, rank: int) -> range:
    return plan.layers_by_rank[rank]


def test_a_stage_that_ran_out_of_memory_gets_fewer_layers() -> None:
    """In all pipelines; the estimate that was wrong is told with its figures."""
    cluster = training(num_layers_max=7)
    assert stage_of(cluster.state.plan, 1) == range(5, 10)
    cluster.fail(1, NO_MEMORY, blame="memory")

    state = cluster.state
    assert state.phase is Phase.TRAINING
    assert len(state.plan.pipelines) == 2
    assert all(not set(range(5, 10)) <= set(s) for s in state.plan.layers_by_rank.values())
    assert state.learning.fitted is not None
    assert state.learning.fitted.catalog is not None
    assert has_room(state.learning.fitted.catalog.problem, state.plan)
    (notice,) = of_type(cluster.commands, Recovering)
    assert "was estimated to hold" in notice.reason
    assert "is planned smaller from now on" in notice.reason


def test_the_same_error_on_another_rank_changes_nothing_more() -> None:
    """Ranks with the same stage run out of memory together; the first one's report did it."""
    cluster = training(num_layers_max=7)
    first, text = with_more_room(cluster.rules, cluster.state, 1)
    assert first is not None

    assert with_more_room(cluster.rules, first, 3) == (first, text)


def test_only_templates_that_fit_no_longer_are_made_anew_and_no_plan_before_its_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The coordinator answers nobody meanwhile."""
    cluster = training(num_layers_max=7)

    def no_plan(*_: object) -> None:
        pytest.fail("a plan is made")

    with monkeypatch.context() as patched:
        patched.setattr(SetSearch, "fastest", no_plan)
        roomier, _ = with_more_room(cluster.rules, cluster.state, 1)
    assert roomier is not None
    assert roomier.learning.fitted is not None

    before, after = cluster.rules.catalog, roomier.learning.fitted.catalog
    assert before is not None
    assert after is not None
    same = [size for size in after.templates if after.templates[size] is before.templates[size]]
    assert same == [3, 4]
    assert sorted(after.plans) == [2, 3, 4, 5, 6]
    assert all(has_room(after.problem, plan) for plan in after.plans.values())


def test_nothing_is_learned_of_a_stage_whose_rank_also_holds_layers_for_a_change() -> None:
    """They are what does not fit, and no estimate counts them; the stage was ruled out for good."""
    cluster = training(num_layers_max=7)
    silent = replace(cluster.state.plan, silent={1: (0, 1, 2, 3, 4)})
    cluster.state = msgspec.structs.replace(cluster.state, plan=silent)
    cluster.fail(1, NO_MEMORY, blame="memory")

    assert cluster.state.phase is Phase.TRAINING
    assert cluster.state.learning.findings.more_bytes == ()
    (notice,) = of_type(cluster.commands, Recovering)
    assert "it also held 5 layers for a change" in notice.reason


def test_a_loss_later_is_answered_with_what_fits() -> None:
    """What was learned stays."""
    cluster = training(num_layers_max=7)
    cluster.fail(1, NO_MEMORY, blame="memory")
    cluster.train(FIRST + 1)
    cluster.join(4)
    cluster.lose(0)

    state = cluster.state
    assert state.learning.fitted is not None
    assert state.learning.fitted.catalog is not None
    assert has_room(state.learning.fitted.catalog.problem, state.plan)


def test_a_new_coordinator_knows_what_was_learned() -> None:
    """It is on record with the members."""
    cluster = training(num_layers_max=7)
    cluster.fail(1, NO_MEMORY, blame="memory")
    before = cluster.state.learning.fitted
    cluster.restart()

    after = cluster.state.learning.fitted
    assert before is not None
    assert after is not None
    assert before.catalog is not None
    assert after.catalog is not None
    assert after.catalog.problem == before.catalog.problem


def test_a_new_coordinator_knows_it_also_where_fewer_nodes_are_left() -> None:
    """Two pipelines of what fits take more nodes than there are now; it forgot what was learned."""
    cluster = training(num_layers_max=7)
    cluster.rules = replace(cluster.rules, n0=1)  # As was estimated when the job began.
    cluster.fail(1, NO_MEMORY, blame="memory")
    cluster.train(FIRST + 1)
    cluster.lose(0)
    cluster.restart()

    fitted = cluster.state.learning.fitted
    assert len(cluster.state.nodes) == 3
    assert fitted is not None
    assert fitted.catalog is not None
    assert has_room(fitted.catalog.problem, cluster.state.plan)


def test_where_no_plan_fits_the_node_is_tried_again_and_then_evicted() -> None:
    """It may be the only one that is short; the reason has the figures."""
    cluster = training(num_layers_max=5)
    for _ in range(3):
        cluster.fail(1, NO_MEMORY, blame="memory")

    assert cluster.state.learning.fitted is None
    assert of_type(cluster.commands, Evict) == [Evict((1,))]
    assert "no plan fits" in of_type(cluster.commands, Recovering)[-1].reason


def test_where_no_plan_fits_on_two_nodes_the_job_ends_saved() -> None:
    """It says what was estimated, and what would do."""
    cluster = training(num_layers_max=5)
    for rank in (1, 3, 1, 3, 1):
        cluster.fail(rank, NO_MEMORY, blame="memory")

    end = cluster.commands[-1]
    assert isinstance(end, End)
    assert end.ending is Ending.FAILED
    assert end.failure is not None
    assert "no plan fits; give it more nodes" in end.failure.traceback
    assert of_type(cluster.commands, SaveLayers)


def test_where_nobody_says_what_a_device_holds_nothing_is_learned() -> None:
    """There is nothing to compare the estimate with."""
    cluster = training(num_layers_max=0)
    cluster.fail(1, NO_MEMORY, blame="memory")

    assert cluster.state.phase is Phase.TRAINING
    assert not cluster.state.learning.findings.more_bytes
    (notice,) = of_type(cluster.commands, Recovering)
    assert notice.reason.endswith("no room")
