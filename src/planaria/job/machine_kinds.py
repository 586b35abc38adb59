"""Machines of a job that differ: what it is planned by, and its first plan.

The job is planned by the layers' seconds on the fastest kind of machine, with the speeds of the
others, with the least memory that any of the machines or devices has, and with links as they were
measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from planaria.core.job import JobConfig
from planaria.core.machine_messages import MachineFacts
from planaria.core.plan import Link, NodeKind, Plan
from planaria.core.specs import Prepared
from planaria.errors import InfeasibleError
from planaria.job.predictions import prediction
from planaria.nodes.head.remote.kind_speeds import Kind, KindSpeeds, layers_s
from planaria.nodes.head.remote.link_classes import LinkClass
from planaria.planner.layout.unequal import UnequalPlanner, planning_effort
from planaria.planner.problem import Problem
from planaria.policies.unequal_nodes import with_kinds

# Share of a machine's memory that the job's devices may use. The rest is for the operating system,
# the processes themselves, and machines that are sold as alike and differ by some percent.
_MEMORY_SHARE: Final = 0.9
# Effort of the first plan, some 15 s; 32 nodes and 34 layers are 245,000 and take 9 s. No training
# waits for it, and so it may be more than the effort of an answer.
_EFFORT_MAX: Final = 400_000


def of_fastest_kind(measured: Mapping[Kind, Prepared]) -> Prepared:
    """The facts on the job that the fastest kind of machine has found, with the memory of the
    smallest devices of all kinds."""

    def seconds(prepared: Prepared) -> float:
        return layers_s(prepared.profile) if prepared.profile is not None else 0.0

    fastest = min(measured.values(), key=seconds)
    profiles = [prepared.profile for prepared in measured.values() if prepared.profile is not None]
    known_bytes = [p.device_memory_bytes for p in profiles if p.device_memory_bytes]
    if fastest.profile is None or not known_bytes:
        return fastest
    profile = replace(fastest.profile, device_memory_bytes=min(known_bytes))
    return msgspec.structs.replace(fastest, profile=profile)


def with_memory_limit(
    prepared: Prepared, config: JobConfig, machines: Sequence[MachineFacts]
) -> Prepared:
    """The facts on the job, with a limit on the memory of each device.

    The least memory of the machines limits it, unless the job or its profile has a limit, or its
    layers only sleep.
    """
    profile = prepared.profile
    known_bytes = [facts.memory_bytes for facts in machines if facts.memory_bytes]
    is_paced = config.model.kind == "paced"
    if profile is None or profile.device_memory_bytes or is_paced or not known_bytes:
        return prepared
    limit_bytes = int(_MEMORY_SHARE * min(known_bytes)) // config.cluster.devices_per_node
    profile = replace(profile, device_memory_bytes=limit_bytes)
    return msgspec.structs.replace(prepared, profile=profile)


def with_measured_links(prepared: Prepared, links: Mapping[LinkClass, Link]) -> Prepared:
    """The facts on the job, with links between machines as they were measured.

    Without any, the links are those that a machine has to itself. If only far machines were
    measured, all others are as far.
    """
    profile = prepared.profile
    if profile is None or not links:
        return prepared
    named = {str(kind): link for kind, link in links.items()}
    if LinkClass.NEAR not in links:
        named = {LinkClass.NEAR.value: links[LinkClass.FAR]}
    profile = replace(profile, links={**profile.links, **named})
    return msgspec.structs.replace(prepared, profile=profile)


def node_kinds(machines: Mapping[int, MachineFacts], kinds: KindSpeeds) -> dict[int, NodeKind]:
    """The kind of each node, by its machine."""
    return {node: NodeKind(kinds.speed(facts)) for node, facts in machines.items()}


def plan_for_kinds(problem: Problem, plan: Plan, kinds: Mapping[int, NodeKind]) -> Plan:
    """The better of a plan for equal nodes and one that is made for the kinds of its nodes.

    Args:
        problem: problem with as many failures as the plan tolerates.
    """
    kinds = {node: kinds.get(node, NodeKind()) for node in plan.nodes}
    plan = with_kinds(plan, kinds)
    if not plan.slow_nodes or planning_effort(problem, kinds) > _EFFORT_MAX:
        return plan
    min_pipelines = problem.failures_tolerated + 1
    try:
        planner = UnequalPlanner(problem, kinds)
        unequal = planner.plan(plan.nodes, min_pipelines=min_pipelines, epoch=plan.epoch)
    except InfeasibleError:
        return plan

    def iteration_s(plan: Plan) -> float:
        return prediction(problem, plan).timeline.iteration_s

    return min(unequal, plan, key=iteration_s)
