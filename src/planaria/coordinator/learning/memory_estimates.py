"""Raises the memory estimate of a stage whose rank ran out of memory.

The raise is a number of bytes for each layer of the stage, added to the profile's bytes. It is just
so large that the stage no longer fits its device. Templates that no longer fit are made anew, and
only plans that fit are proposed from then on (policies/memory_checked.py). Each plan is made when
it is asked for, because all together would take the coordinator longer than its lease. Each raise
rules the stage out for good, so this ends: with stages that fit, or without any plan for f + 1
pipelines. In the second case the estimate is not raised, and the error counts like any other that
is not the job's.

A rank that holds layers for a change besides its stage may lack memory for these. Then nothing is
learned of its stage, and the members begin no such change again (`PlanSearch.short_of_memory`).

If neither the job nor its profile says how much a device holds, there is nothing to compare with,
and nothing is learned.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from planaria.coordinator.frozen import replace
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.learning.profile_correction import restored_learning
from planaria.coordinator.state import JobState
from planaria.core.findings import Findings
from planaria.core.plan import PipelineTemplate, Plan
from planaria.errors import InfeasibleError
from planaria.estimator.correction import with_more_bytes
from planaria.estimator.peak_memory import peak_bytes
from planaria.planner.plans import PlanCatalog, lazy_plan_catalog
from planaria.planner.problem import Problem
from planaria.planner.templates import pipeline_templates
from planaria.policies.memory_checked import MemoryChecked, stage_peaks


def fitted_rules(
    rules: Rules, findings: Findings, num_nodes: int, *, is_new: bool = False
) -> Rules | None:
    """The rules with the raised estimates, and with plans made by them.

    None if no estimate was raised, or if f + 1 pipelines do not fit on `num_nodes` nodes.

    Args:
        is_new: whether the coordinator is new; then fewer pipelines will do, down to one, because
            the estimate may have been raised when there were more nodes.
    """
    if rules.catalog is None or rules.policy_of is None or not findings.more_bytes:
        return None
    problem, policy_of = rules.catalog.problem, rules.policy_of
    problem = replace(problem, profile=with_more_bytes(problem.profile, findings.more_bytes))
    f = min(problem.failures_tolerated, max(0, num_nodes // rules.n0 - 1))
    known = _fitting_templates(problem, rules.catalog.templates)
    catalog = _catalog_for(problem, known, num_nodes, rules.max_nodes, failures_tolerated=f)
    while catalog is None and is_new and f:
        f -= 1
        catalog = _catalog_for(problem, known, num_nodes, rules.max_nodes, failures_tolerated=f)
    if catalog is None:
        return None

    def memory_checked_policy(plans: PlanCatalog) -> MemoryChecked:
        return MemoryChecked(policy_of(plans), plans)

    return replace(
        rules,
        n0=min(catalog.templates),
        catalog=catalog,
        policy=memory_checked_policy(catalog),
        policy_of=memory_checked_policy,
    )


def _fitting_templates(
    problem: Problem, templates: Mapping[int, PipelineTemplate]
) -> dict[int, PipelineTemplate]:
    """Those of the templates that still fit; they are still the fastest, as fewer others fit."""
    limit_bytes = problem.profile.device_memory_bytes
    return {
        size: template
        for size, template in templates.items()
        if not limit_bytes
        or limit_bytes
        >= max(
            peak_bytes(
                problem.profile,
                template,
                num_microbatches=problem.num_microbatches,
                gradient_copies=problem.gradient_copies,
            )
        )
    }


def _catalog_for(
    problem: Problem,
    known: Mapping[int, PipelineTemplate],
    num_nodes: int,
    max_nodes: int,
    *,
    failures_tolerated: int,
) -> PlanCatalog | None:
    """The plans if so many failures are to be tolerated with `num_nodes` nodes; None: none fit."""
    tolerant = replace(problem, failures_tolerated=failures_tolerated)
    try:
        templates = pipeline_templates(tolerant, num_nodes, max_nodes=max_nodes, known=known)
        return lazy_plan_catalog(problem, max_nodes, templates)
    except InfeasibleError:
        return None


def with_memory_shortage(state: JobState, rank: int) -> JobState:
    """The state that knows that a rank ran out of memory if it holds layers for a change."""
    plans = (state.plan, state.switch.plan) if state.switch else (state.plan,)
    if not any(plan.silent.get(rank) for plan in plans):
        return state
    return replace(state, search=replace(state.search, short_of_memory=state.all_nodes))


def with_more_room(rules: Rules, state: JobState, rank: int) -> tuple[JobState | None, str]:
    """The state in which the stage of a rank that ran out of memory is planned smaller.

    None if it cannot be. The second item is the stage's estimate in words; "" if it is not known.

    Args:
        rules: rules that the job began with.
    """
    stage = _stage_memory(rules, state.plan, rank)
    if stage is None:
        return None, ""
    layers, num_devices = stage.layers, stage.num_devices
    estimate = (
        f"its stage of layers {layers.start} to {layers.stop - 1} was estimated to hold "
        f"{stage.held_bytes} of {stage.limit_bytes} bytes"
    )
    if silent := state.plan.silent.get(rank):  # Nobody knows which of the two needed more.
        return None, f"{estimate}, and it also held {len(silent)} layers for a change"
    before = state.learning.findings.more_bytes or (0,) * rules.num_layers
    known_bytes = stage.held_bytes + sum(before[n] for n in layers) // num_devices
    smaller = f"{estimate}, and is planned smaller from now on"
    if known_bytes > stage.limit_bytes and state.learning.fitted is not None:
        return state, smaller  # Another rank with this stage has told it before.
    lacking_bytes = max(1, stage.limit_bytes + 1 - known_bytes) * num_devices
    share = -(-lacking_bytes // len(layers))
    more = tuple(size + share * (layer in layers) for layer, size in enumerate(before))
    findings = msgspec.structs.replace(state.learning.findings, more_bytes=more)
    fitted = fitted_rules(rules, findings, len(state.nodes))
    if fitted is None:
        why = "more than that, no plan fits; give it more nodes, or devices with more memory"
        return None, f"{estimate}; if it needs {why}"
    policy = restored_learning(fitted, findings, state.plan).policy
    learning = replace(state.learning, findings=findings, policy=policy, fitted=fitted)
    return replace(state, learning=learning), smaller


@dataclass(frozen=True, slots=True)
class _StageMemory:
    """The memory of a stage.

    Attributes:
        held_bytes: bytes that each of its devices holds, as the profile estimates.
        limit_bytes: bytes that each of them can hold.
    """

    layers: range
    held_bytes: int
    limit_bytes: int
    num_devices: int


def _stage_memory(rules: Rules, plan: Plan, rank: int) -> _StageMemory | None:
    """The memory of a rank's stage; None if the limit is not known, or if the rank has no stage."""
    if rules.catalog is None:
        return None
    problem: Problem = rules.catalog.problem
    per_node = problem.devices_per_node
    peaks = stage_peaks(problem, plan)
    for pipeline, peak in zip(plan.pipelines, peaks, strict=True):
        stages = zip(pipeline.template.stages, pipeline.ranks_by_stage(), peak, strict=True)
        for stage, ranks, held_bytes in stages:
            if rank in ranks:
                kind = pipeline.template.node_kinds[pipeline.nodes.index(rank // per_node)]
                limit_bytes = kind.device_memory_bytes or problem.profile.device_memory_bytes
                layers = range(stage.first_layer, stage.end_layer)
                if not limit_bytes:
                    return None
                return _StageMemory(layers, held_bytes, limit_bytes, stage.num_devices)
    return None
