"""What a device has no memory for is refused where that is known, and only there."""

from dataclasses import replace

from helpers.losses import every, plan_of
from planaria.core.plan import NodeKind, Plan
from planaria.planner.plans import EveryPlan
from planaria.policies.roomy import has_room, stage_peaks


def with_memory(plan: Plan, *memory_bytes: int) -> Plan:
    """The plan's only pipeline, on nodes of which each device has so many bytes; 0: unknown."""
    (pipeline,) = plan.pipelines
    kinds = tuple(NodeKind(device_memory_bytes=size) for size in memory_bytes)
    template = replace(pipeline.template, kinds=kinds)
    return replace(plan, pipelines=(replace(pipeline, template=template),))


def book() -> tuple[EveryPlan, Plan, int, int]:
    """A pipeline of two stages, and what a device of each holds."""
    found = every(2, n0=1, f=0)
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
