"""What a device has no memory for is refused where that is known, and only there."""

from dataclasses import dataclass, replace

from helpers.losses import example_catalog, plan_of, prices
from planaria.core.cluster import ClusterEvent, ClusterState, NodesLost, survivors
from planaria.core.plan import NodeKind, Plan, Transition
from planaria.estimator.peak_memory import bytes_by_rank, kept_bytes
from planaria.planner.plans import PlanCatalog, rebuilt_catalog
from planaria.planner.reroute.reroutes import best_reroute, with_split_backwards
from planaria.planner.reroute.shadows import with_shadows
from planaria.policies.ahead import ForeseenAnswers, Lookup
from planaria.policies.memory_checked import MemoryChecked, has_room, stage_peaks
from planaria.policies.policy import Prices
from planaria.policies.reinstantiate import Reinstantiate
from planaria.schedule.lower import unchecked_schedule


def with_memory(plan: Plan, *memory_bytes: int) -> Plan:
    """The plan's only pipeline, on nodes of which each device has so many bytes; 0: unknown."""
    (pipeline,) = plan.pipelines
    kinds = tuple(NodeKind(device_memory_bytes=size) for size in memory_bytes)
    template = replace(pipeline.template, kinds=kinds)
    return replace(plan, pipelines=(replace(pipeline, template=template),))


def book() -> tuple[PlanCatalog, Plan, int, int]:
    """A pipeline of two stages, and what a device of each holds."""
    found = example_catalog(2, n0=1, f=0)
    plan = plan_of(found, (2,))
    ((first, second),) = stage_peaks(found.problem, plan)
    return found, plan, first, second


def test_a_node_of_unknown_memory_does_not_hide_that_another_has_too_little() -> None:
    """The least of both limits was taken, and 0 means that there is none."""
    found, plan, first, second = book()

    assert has_room(found.problem, with_memory(plan, 0, second))
    assert not has_room(found.problem, with_memory(plan, 0, second - 1))
    assert not has_room(found.problem, with_memory(plan, first - 1, 0))


def test_each_stage_is_measured_by_its_own_node() -> None:
    """A large stage may lie on a large node though there is a small one."""
    found, plan, first, second = book()

    assert first != second
    assert has_room(found.problem, with_memory(plan, first, second))


def test_layers_that_a_node_keeps_for_its_neighbour_take_memory() -> None:
    """Parameters, gradients and optimizer states of both, and the activations of its own."""
    found, plan, first, second = book()
    keeping = with_shadows(plan)
    profile, copies = found.problem.profile, found.problem.gradient_copies
    state_bytes = [
        one.state_bytes for one in bytes_by_rank(profile, plan, gradient_copies=copies).values()
    ]

    ((more_first, more_second),) = stage_peaks(found.problem, keeping)

    assert keeping.shadows.keys() == {0, 1}
    assert (more_first, more_second) == (first + state_bytes[1], second + state_bytes[0])


def test_what_split_backwards_keep_takes_memory() -> None:
    """Activations, and gradients between layers, until those of the weights are computed."""
    found, plan, first, second = book()
    split = with_split_backwards(found.problem, plan)
    problem = found.problem
    held = bytes_by_rank(problem.profile, split, gradient_copies=problem.gradient_copies)
    schedule = unchecked_schedule(split)

    peaks = stage_peaks(problem, split)

    kept = tuple(
        held[rank].state_bytes + kept_bytes(problem.profile, schedule, rank) for rank in (0, 1)
    )
    assert peaks == (kept,)
    assert kept[0] > first
    assert kept[1] > second


def test_who_computes_what_a_lost_node_did_needs_memory_for_it() -> None:
    """Node 2 computes for both pipelines, and an empty place needs nothing."""
    found = example_catalog(4, n0=1, f=1)
    before = plan_of(found, (2, 2))
    answer = best_reroute(found.problem, replace(before, gone=(0,)))
    assert answer is not None
    plan = replace(answer.plan, splits_backward=False, in_flight={})

    (nothing, _), (around, _) = stage_peaks(found.problem, plan)
    (alone, _), _ = stage_peaks(found.problem, before)

    assert nothing == 0
    assert around > alone


@dataclass(frozen=True)
class Fixed:
    """A policy that always has the same answers."""

    transitions: tuple[Transition, ...]

    def propose(
        self, _plan: Plan, _cluster: ClusterState, _event: ClusterEvent, _prices: Prices
    ) -> tuple[Transition, ...]:
        """See Policy."""
        return self.transitions


def tight_loss() -> tuple[PlanCatalog, ClusterState, Transition, Transition]:
    """Node 0 of two pipelines of three is lost: what is left of the job, an answer that devices
    have too little memory for, and one that fits."""
    found = example_catalog(6, n0=2, f=1)
    plan, lost = plan_of(found, (3, 3)), NodesLost((0,), 0)
    cluster = survivors(plan, (0,), epoch=1)
    (large, *_) = Reinstantiate(found).propose(plan, cluster, lost, prices(found))
    single = replace(plan_of(found, (5,), (1, 2, 3, 4, 5)), epoch=1)
    limit_bytes = max(map(max, stage_peaks(found.problem, single)))
    profile = replace(found.problem.profile, device_memory_bytes=limit_bytes)
    problem = replace(found.problem, profile=profile)
    assert not has_room(problem, large.after)
    fitted = rebuilt_catalog(problem, found.templates, found.plans)
    return fitted, cluster, large, replace(large, after=single, answer="single")


def test_an_answer_that_was_found_ahead_and_does_not_fit_does_not_hide_those_that_do() -> None:
    """It was found by the estimates of before. None but new pipelines were asked for then."""
    fitted, cluster, large, single = tight_loss()
    foreseen = ForeseenAnswers()
    foreseen.add(large.before, (0,), lambda: (large,))
    lookup = Lookup(Fixed(()), foreseen, Fixed((single,)))

    args = large.before, cluster, NodesLost((0,), 0), prices(fitted)
    assert all(answer.is_foreseen for answer in lookup.propose(*args))
    assert MemoryChecked(lookup, fitted).propose(*args) == (single,)


def test_no_answer_is_followed_by_a_plan_that_does_not_fit() -> None:
    """It would be valued by a plan that can never follow; without it, the answer is another one."""
    fitted, cluster, large, single = tight_loss()
    policy = Fixed((single, replace(single, answer="single, then large", then=large)))

    args = large.before, cluster, NodesLost((0,), 0), prices(fitted)
    assert MemoryChecked(policy, fitted).propose(*args) == (single,)


def test_the_only_plan_that_fits_is_taken_though_it_relies_on_distrusted_nodes() -> None:
    """Machines that lack memory fail, so they are distrusted. The job went on with the plan that
    had lacked memory, again and again."""
    found = example_catalog(4, n0=2, f=1)
    plan, single = plan_of(found, (2, 2)), plan_of(found, (4,))
    limit_bytes = max(map(max, stage_peaks(found.problem, single)))
    profile = replace(found.problem.profile, device_memory_bytes=limit_bytes)
    problem = replace(found.problem, profile=profile)
    assert not has_room(problem, plan)
    fitted = rebuilt_catalog(problem, found.templates, {**found.plans, 4: single})
    cluster = survivors(plan, (), epoch=1)
    nodes = tuple(replace(node, is_trusted=node.node not in (0, 3)) for node in cluster.nodes)

    args = plan, replace(cluster, nodes=nodes), NodesLost((), 0), prices(found)
    answers = MemoryChecked(Fixed(()), fitted).propose(*args)
    assert answers
    assert all(has_room(problem, answer.after) for answer in answers)
