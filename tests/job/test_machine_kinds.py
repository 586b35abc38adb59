"""The first plan of a job whose machines differ in speed and memory."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.command import PACED
from helpers.jobs import template
from helpers.left_runs import LISTENING
from helpers.strategies import equal_problem
from planaria.core.job import JobConfig
from planaria.core.machine_messages import MachineFacts
from planaria.core.plan import Link, NodeKind, scaled_profile
from planaria.core.specs import Prepared, PrepareRequest
from planaria.job import on_machines
from planaria.job.config import load_job
from planaria.job.machine_kinds import (
    of_fastest_kind,
    plan_for_kinds,
    with_measured_links,
    with_memory_limit,
)
from planaria.job.on_machines import begin_kinds, gather
from planaria.job.planning import Planned, given_profile, plan_job
from planaria.nodes.head.remote.kind_speeds import Kind, kind_of
from planaria.nodes.head.remote.link_classes import LinkClass
from planaria.planner.layout.unequal import EFFORT_MAX, planning_effort
from planaria.planner.plans import plan_of_templates
from planaria.planner.reroute.reroutes import simulated_s
from planaria.policies.unequal_nodes import with_kinds

GIB = 1 << 30
PACED_JOB = load_job(PACED)
# As another kind of job, the same layers are not paced.
JOB = replace(PACED_JOB, model=replace(PACED_JOB.model, kind="python", target="m:f"))
PREPARED = Prepared(profile=given_profile(PACED_JOB))
assert PREPARED.profile is not None
UNLIMITED = Prepared(profile=replace(PREPARED.profile, device_memory_bytes=0))
SLOW = NodeKind(0.5)


def planned_for(
    kinds: Mapping[int, NodeKind] | None, prepared: Prepared = PREPARED, **resilience: Any
) -> Planned:
    config = replace(JOB, resilience=replace(JOB.resilience, **resilience))
    return plan_job(config, prepared, kinds=kinds)


def slow_work(planned: Planned) -> int:
    """How many layers the slow node computes, once for each microbatch."""
    hops = [hop for route in planned.plan.routes for hop in route if hop.rank == 1]
    return sum(hop.end_layer - hop.first_layer for hop in hops)


def test_a_slow_machine_gets_less_work_from_the_start() -> None:
    """The plan is faster than the plan for equal nodes would be on these nodes."""
    equal = planned_for({})
    unequal = planned_for({1: SLOW})
    as_if_equal = plan_job(JOB, PREPARED, plan=with_kinds(equal.plan, {1: SLOW}), kinds={1: SLOW})

    assert unequal.plan.slow_nodes == {1: 0.5}
    assert slow_work(unequal) < slow_work(equal)
    assert unequal.predicted.iteration_s < as_if_equal.predicted.iteration_s


@pytest.mark.parametrize("policy", ["adaptive", "reinstantiate", "rollback", "morph", "absorb"])
def test_every_policy_begins_with_a_plan_for_machines_that_differ(policy: str) -> None:
    assert planned_for({1: SLOW}, UNLIMITED, policy=policy).plan.slow_nodes == {1: 0.5}


def test_the_first_plan_may_take_longer_than_an_answer_of_the_coordinator() -> None:
    """Nobody waits for its leases yet."""
    problem = equal_problem(num_layers=100, num_microbatches=8)
    kinds = {node: SLOW if node < 3 else NodeKind() for node in range(8)}
    assert planning_effort(problem, kinds) > EFFORT_MAX
    deep = template(4, num_layers=100)
    equal = plan_of_templates(problem, [deep, deep], range(8), epoch=0)

    planned = plan_for_kinds(problem, equal, kinds)
    as_if_equal = simulated_s(problem, with_kinds(equal, kinds))
    assert simulated_s(problem, planned) < 0.8 * as_if_equal


def test_machines_that_are_alike_get_the_plan_of_equal_nodes() -> None:
    alike = {node: NodeKind() for node in range(JOB.cluster.nodes)}

    assert planned_for(alike).plan == planned_for({}).plan


def test_nodes_on_machines_of_their_own_share_no_processors() -> None:
    assert planned_for(None).problem.processors > 0
    assert planned_for({}).problem.processors == 0


def test_the_fastest_kind_of_machine_counts() -> None:
    assert PREPARED.profile is not None
    layer = PREPARED.profile.layers[0]
    slower = replace(layer, forward_s={1: 10.0 * layer.forward_s[1]})
    layers = (slower, *PREPARED.profile.layers[1:])
    slow = Prepared(profile=replace(PREPARED.profile, layers=layers))

    fastest = of_fastest_kind(
        {("A", 1, (), ()): slow, ("B", 1, (), ()): PREPARED, ("C", 1, (), ()): slow}
    )

    assert fastest == PREPARED


@pytest.mark.parametrize(("fast_bytes", "slow_bytes"), [(80, 40), (40, 80), (0, 40)])
def test_the_smallest_devices_limit_what_all_are_planned_for(
    fast_bytes: int, slow_bytes: int
) -> None:
    """A plan for the fastest kind's memory does not fit on slower devices that hold less."""
    assert PREPARED.profile is not None
    fast, slow = (
        Prepared(profile=replace(scaled_profile(PREPARED.profile, scale), device_memory_bytes=held))
        for scale, held in ((1.0, fast_bytes), (2.0, slow_bytes))
    )

    fastest = of_fastest_kind({("A", 1, (), ()): slow, ("B", 1, (), ()): fast})

    assert fastest.profile is not None
    assert fastest.profile.layers == PREPARED.profile.layers
    assert fastest.profile.device_memory_bytes == 40


def machines(*memory_bytes: int) -> list[MachineFacts]:
    return [MachineFacts(name="m", host="h", memory_bytes=number) for number in memory_bytes]


def limit_bytes(config: JobConfig, prepared: Prepared, *memory_bytes: int) -> int:
    limited = with_memory_limit(prepared, config, machines(*memory_bytes))
    assert limited.profile is not None
    return limited.profile.device_memory_bytes


def test_the_machine_with_the_least_memory_limits_what_a_device_holds() -> None:
    """With a tenth for all else; machines of which nothing is known set no limit."""
    two_devices = replace(JOB, cluster=replace(JOB.cluster, devices_per_node=2))

    assert limit_bytes(JOB, UNLIMITED, 20 * GIB, 10 * GIB, 0) == 9 * GIB
    assert limit_bytes(two_devices, UNLIMITED, 10 * GIB) == 9 * GIB // 2
    assert limit_bytes(JOB, UNLIMITED, 0) == 0


NEAR, FAR = Link(1e-4, 1e9), Link(1e-2, 1e8)


def links_with(measured: Mapping[LinkClass, Link]) -> Mapping[str, Link]:
    prepared = with_measured_links(UNLIMITED, measured)
    assert prepared.profile is not None
    return prepared.profile.links


def test_links_are_those_that_machines_have_measured() -> None:
    """Where no two machines are near, all are as far as those that were measured."""
    assert UNLIMITED.profile is not None
    own = UNLIMITED.profile.links

    both = links_with({LinkClass.NEAR: NEAR, LinkClass.FAR: FAR})

    assert links_with({}) == own
    assert both == {**own, "inter_node": NEAR, "inter_domain": FAR}
    assert links_with({LinkClass.NEAR: NEAR}) == {**own, "inter_node": NEAR}
    assert links_with({LinkClass.FAR: FAR}) == {**own, "inter_node": FAR}


def test_a_limit_of_the_job_counts_more_than_memory_and_paced_layers_need_none() -> None:
    assert PREPARED.profile is not None
    limited = Prepared(profile=replace(PREPARED.profile, device_memory_bytes=7))

    assert limit_bytes(JOB, limited, 10 * GIB) == 7
    assert limit_bytes(PACED_JOB, UNLIMITED, 10 * GIB) == 0


@pytest.mark.parametrize(("device", "least"), [("cpu", 80 * GIB), ("NVIDIA H100", 0)])
def test_machines_need_no_memory_for_what_accelerators_hold(device: str, least: int) -> None:
    """A machine whose memory is smaller than its accelerator's was refused for good."""
    asked: list[object] = []
    checks = SimpleNamespace(memory_bytes_min=0)
    kinds = SimpleNamespace(begin=lambda *facts: asked.extend(facts))
    machines = SimpleNamespace(checks=checks, kinds=kinds, compare_again=lambda: None)
    head: Any = SimpleNamespace(machines=machines)
    assert PREPARED.profile is not None
    profile = replace(PREPARED.profile, device=device, device_memory_bytes=80 * GIB)
    cluster = replace(JOB.cluster, device_memory_bytes=0)
    job = replace(JOB, model=replace(JOB.model, profile=""), cluster=cluster)
    begin_kinds(head, job, Prepared(profile=profile), {})

    assert len(asked) == 3
    assert checks.memory_bytes_min == least


def test_a_kind_that_comes_while_others_measure_is_measured_before_the_job_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine of it took the place of one that was lost, and counted as one of the first kind."""
    first, later = (MachineFacts(name=name, host="", processor=name) for name in "ab")
    machines = FakeMachines([first], coming=[later])
    asked: list[Mapping[Kind, Prepared]] = []
    monkeypatch.setattr(on_machines, "remove_other_marks", lambda *_: None)
    monkeypatch.setattr(on_machines, "begin_kinds", lambda *facts: asked.append(facts[-1]))
    job = replace(JOB, model=replace(JOB.model, profile=""))
    with asyncio.Runner() as runner:
        head: Any = SimpleNamespace(machines=machines, runner=runner)
        gather(head, job, LISTENING)

    assert asked == [{kind_of(first): PREPARED, kind_of(later): PREPARED}]


class FakeMachines:
    """Machines of a head that measure at once.

    Args:
        coming: machines that come, in place of the first ones, while these measure.
    """

    def __init__(self, facts: list[MachineFacts], *, coming: list[MachineFacts]) -> None:
        self.facts, self._coming = facts, coming
        self.checks = SimpleNamespace(mark="")

    @property
    def num_ready(self) -> int:
        """See Machines."""
        return len(self.facts)

    async def wait_ready(self, num_machines: int, *, timeout_s: float) -> None:
        """See Machines."""
        assert num_machines <= self.num_ready
        assert timeout_s > 0.0

    async def prepare(
        self, _: PrepareRequest, known: Mapping[Kind, Prepared]
    ) -> dict[Kind, Prepared]:
        """See Machines."""
        measured = {**known, **{kind_of(facts): PREPARED for facts in self.facts}}
        self.facts, self._coming = self._coming or self.facts, []
        return measured

    async def measure_links(self) -> dict[LinkClass, Link]:
        """See Machines."""
        return {}
