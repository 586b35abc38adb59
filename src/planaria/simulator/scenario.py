"""The jobs that are simulated: small models on a few nodes, each planned once for all runs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, Final

import numpy as np

from planaria.coordinator.job_rules import Rules
from planaria.core.commit import vector_layout
from planaria.core.job import (
    CheckpointConfig,
    ClusterConfig,
    JobConfig,
    PolicyName,
    ResilienceConfig,
    TrainingConfig,
)
from planaria.core.plan import LayerProfile, Link, ModelProfile, Plan, Transition
from planaria.core.samples import sample_numbers
from planaria.planner.plans import PlanCatalog, plan_catalog
from planaria.planner.problem import Problem
from planaria.planner.reroute.shadows import with_shadows
from planaria.planner.templates import pipeline_templates
from planaria.policies.ahead import ForeseenAnswers
from planaria.policies.memory_checked import stage_peaks
from planaria.policies.named import lookup_policy
from planaria.policies.policy import Policy, profile_prices
from planaria.policies.traits import TRAITS

PLAINEST: Final[PolicyName] = "reinstantiate"  # Its answers do not depend on predictions.
LAYER_S = 0.01  # Time of the forward of a layer for a microbatch; its backward takes twice that.
LEASE_S = 3.0
NUM_SAMPLES = 1000
REGROUP_S = 0.05
_FIRST_DRIFT = 1.15  # Too little for a node to be taken for slow.
TIMEOUT_S = 4.0  # checkpoint.timeout_s


@dataclass(frozen=True, slots=True)
class StoreTrouble:
    """How badly the disk or store of saves behaves, for a while.

    Attributes:
        at_s: time at which it begins; infinity: never.
        duration_s: seconds that it lasts.
        late_s: upper bound on the delay of a request.
        refuses: share of requests that are refused, 0 to 1.
        hangs: share of requests that are not answered before it is over, 0 to 1.
    """

    at_s: float = math.inf
    duration_s: float = 0.0
    late_s: float = 0.0
    refuses: float = 0.0
    hangs: float = 0.0

    @property
    def end_s(self) -> float:
        return self.at_s + self.duration_s


@dataclass(frozen=True, slots=True)
class Scenario:
    """A job; `n0` to `max_nodes` nodes can train it, and it starts with `num_nodes`.

    Attributes:
        num_machines: number of machines, to which nodes are dealt out in turn. There are few, so
            that machines fail more than once.
        num_more: number of nodes that can work besides the first ones.
        copies: number of copies of each layer in memory.
        copies_every: number of iterations after which a commit waits for complete copies; 0: no
            commit waits, and a version begins whenever the last one is complete.
        num_standby: number of standby nodes at the start.
        grant_s: upper bound on the time until a machine is granted for a lost one; 0: none is.
        patience_s: seconds in which nodes look for a head that they have lost; 0: all are on the
            head's machine.
        wait_s: seconds that the job waits for machines with fewer than n0 nodes; 0: it ends.
        failures_per_hour: failure rate by which answers are chosen; 0: it is learned.
        link_bytes_per_s: bandwidth of links by which answers are priced.
        learns: whether the coordinator corrects its predictions by measurements.
        drift: time of a layer in a job that learns, as a multiple of the predicted time.
        processors: number of processors that all ranks are predicted to share; 0: each has its own.
        memory_factor: memory of a device, as a multiple of the largest peak that is estimated for
            any stage; 0: unknown.
    """

    num_nodes: int
    n0: int
    failures_tolerated: int
    num_layers: int = 4
    num_microbatches: int = 8
    devices_per_node: int = 1
    iterations: int = 6
    persist_every: int = 0
    stops_below: bool = False
    num_machines: int = 2
    num_more: int = 0
    copies: int = 0
    copies_every: int = 0
    num_standby: int = 0
    grant_s: float = 0.0
    patience_s: float = 0.0
    wait_s: float = 0.0
    policy: PolicyName = PLAINEST
    failures_per_hour: float = 0.0
    link_bytes_per_s: float = 1e8
    learns: bool = False
    drift: float = 1.0
    processors: int = 0
    memory_factor: float = 0.0

    @property
    def max_nodes(self) -> int:
        return self.num_nodes + self.num_more


SCENARIOS = (
    Scenario(2, 1, 1),
    Scenario(3, 1, 1, persist_every=2),
    Scenario(3, 1, 2),
    Scenario(4, 2, 1),
    Scenario(4, 1, 1, num_layers=3),
    Scenario(5, 2, 1, persist_every=3),
    Scenario(5, 2, 1, stops_below=True),
    Scenario(4, 1, 1, devices_per_node=2),
    Scenario(6, 2, 2),
    Scenario(6, 3, 1, num_layers=6),
    Scenario(7, 2, 1, num_layers=6),
    Scenario(2, 1, 1, num_more=1, iterations=10),
    Scenario(3, 1, 1, num_more=2, iterations=10, persist_every=3),
    Scenario(4, 2, 1, num_more=2, iterations=12, num_layers=6),
    Scenario(5, 2, 1, num_more=1, iterations=10),
    Scenario(4, 1, 1, num_more=1, devices_per_node=2, iterations=10),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedJob:
    """A scenario with everything that its coordinator and workers need.

    Attributes:
        saving_rules: rules of a coordinator that only saves the live state.
        catalog: prepared plans for all numbers of nodes.
        plan: the first plan.
        predicted_s: predicted time of an iteration by the first plan.
        forward_s: actual time of each layer's forward for a microbatch; the backward takes twice
            that.
        samples: sample numbers by iteration and microbatch.
        contents: the correct state of each layer at each age, by (layer, age): a hash of all that
            led to it.
    """

    scenario: Scenario
    rules: Rules
    saving_rules: Rules
    catalog: PlanCatalog
    plan: Plan
    predicted_s: float
    forward_s: tuple[float, ...]
    samples: Mapping[int, tuple[tuple[int, ...], ...]]
    contents: Mapping[tuple[int, int], int]


def planned_job(scenario: Scenario) -> PlannedJob:
    """The job of a scenario, planned, with a new policy: one that was asked before has searched
    further than others, and a run would depend on those before it."""
    planned = _planned_job(scenario)
    rules = planned.rules
    return replace(planned, rules=replace(rules, policy=_policy_of(rules.job, planned.catalog)))


def _policy_of(job: JobConfig, catalog: PlanCatalog) -> Policy:
    return lookup_policy(job, catalog, ForeseenAnswers())


@lru_cache(maxsize=1024)
def _planned_job(scenario: Scenario) -> PlannedJob:
    job = _config(scenario)
    # The plans depend neither on the policy nor on the number of iterations.
    plan_scenario = replace(
        scenario, policy=PLAINEST, failures_per_hour=0.0, iterations=0, drift=1.0
    )
    plan_scenario = replace(plan_scenario, copies=0, copies_every=0, num_standby=0)
    catalog = _catalog(replace(plan_scenario, grant_s=0.0, patience_s=0.0, wait_s=0.0))
    policy_of = partial(_policy_of, job)
    profile = catalog.problem.profile
    rules = Rules(
        job=job,
        policy=policy_of(catalog),
        profile=profile if scenario.learns else None,
        catalog=catalog if scenario.learns else None,
        policy_of=policy_of if scenario.learns else None,
        processors=scenario.processors,
        wait_s=scenario.wait_s,
        prices=profile_prices(profile, regroup_s=REGROUP_S),
        n0=min(catalog.templates),
        max_nodes=scenario.max_nodes,
        num_layers=scenario.num_layers,
        layout=vector_layout(job, scenario.num_layers),
        first_iteration=0,
    )
    plan = catalog.plans[scenario.num_nodes]
    if TRAITS[scenario.policy].has_shadows and scenario.devices_per_node == 1:
        plan = with_shadows(plan)
    counts = [plan.routes.count(pipeline.route()) for pipeline in plan.pipelines]
    samples = {iteration: _samples(job, iteration) for iteration in range(scenario.iterations)}
    return PlannedJob(
        scenario=scenario,
        rules=rules,
        saving_rules=_saving_rules(rules),
        catalog=catalog,
        plan=plan,
        predicted_s=catalog.times.iteration_s([p.template for p in plan.pipelines], counts),
        forward_s=_forward_s(scenario, profile.layer_s),
        samples=samples,
        contents=_contents(scenario, samples),
    )


def _saving_rules(rules: Rules) -> Rules:
    return replace(
        rules, policy=_NoPolicy(), catalog=None, policy_of=None, profile=None, wait_s=0.0
    )


class _NoPolicy:
    """The policy of a coordinator that only saves."""

    def propose(self, *_: Any, **__: Any) -> tuple[Transition, ...]:
        """See Policy."""
        return ()


def _forward_s(scenario: Scenario, layer_s: tuple[float, ...]) -> tuple[float, ...]:
    """The actual forward time of each layer.

    In a job that learns, the first layer deviates more from its prediction than the others.
    """
    if not scenario.learns:
        return (LAYER_S,) * scenario.num_layers
    first_s, *others_s = (scenario.drift * seconds / 3.0 for seconds in layer_s)
    return (_FIRST_DRIFT * first_s, *others_s)


@cache
def _catalog(scenario: Scenario) -> PlanCatalog:
    profile = _profile(scenario)
    if scenario.memory_factor:
        unlimited = _catalog(replace(scenario, memory_factor=0.0))
        peaks = (stage_peaks(unlimited.problem, plan) for plan in unlimited.plans.values())
        peak_bytes_max = max(bytes_ for plan in peaks for stages in plan for bytes_ in stages)
        profile = replace(profile, device_memory_bytes=int(scenario.memory_factor * peak_bytes_max))
    problem = Problem(
        profile=profile,
        processors=scenario.processors,
        devices_per_node=scenario.devices_per_node,
        num_microbatches=scenario.num_microbatches,
        failures_tolerated=scenario.failures_tolerated,
    )
    nodes_max = scenario.max_nodes - scenario.failures_tolerated * scenario.n0
    templates_by_nodes = pipeline_templates(
        problem, scenario.num_nodes, max_nodes=scenario.max_nodes
    )
    templates = {n: t for n, t in templates_by_nodes.items() if scenario.n0 <= n <= nodes_max}
    return plan_catalog(problem, scenario.max_nodes, templates)


def content_after(content: int, iteration: int, samples: tuple[int, ...]) -> int:
    """A layer's state after an optimizer step with the gradients of these samples."""
    return hash((content, iteration, samples))


def first_content(layer: int) -> int:
    """The initial state of a layer."""
    return hash((layer, -1))


def _samples(job: JobConfig, iteration: int) -> tuple[tuple[int, ...], ...]:
    size = job.training.microbatch_size
    batch = job.training.global_batch_size
    numbers: np.ndarray = sample_numbers(
        iteration, seed=job.training.seed, num_samples=NUM_SAMPLES, global_batch_size=batch
    )
    return tuple(tuple(numbers[i : i + size].tolist()) for i in range(0, batch, size))


def _contents(
    scenario: Scenario, samples: Mapping[int, tuple[tuple[int, ...], ...]]
) -> dict[tuple[int, int], int]:
    contents = {}
    for layer in range(scenario.num_layers):
        content = contents[layer, 0] = first_content(layer)
        for iteration in range(scenario.iterations):
            used_samples = tuple(sorted(n for numbers in samples[iteration] for n in numbers))
            content = contents[layer, iteration + 1] = content_after(
                content, iteration, used_samples
            )
    return contents


def _config(scenario: Scenario) -> JobConfig:
    return JobConfig(
        name="simulated",
        training=TrainingConfig(
            iterations=scenario.iterations,
            global_batch_size=2 * scenario.num_microbatches,
            microbatch_size=2,
        ),
        resilience=ResilienceConfig(
            failures_tolerated=scenario.failures_tolerated,
            policy=scenario.policy,
            failure_rate=scenario.failures_per_hour,
            when_below="stop" if scenario.stops_below else "continue",
        ),
        checkpoint=CheckpointConfig(
            persist_every=scenario.persist_every,
            timeout_s=TIMEOUT_S,
            copies=scenario.copies,
            every=scenario.copies_every or "auto",
            mode="naive",
        ),
        cluster=ClusterConfig(
            nodes=scenario.num_nodes,
            max_nodes=scenario.max_nodes,
            standby=scenario.num_standby,
            grant_s=scenario.grant_s,
            devices_per_node=scenario.devices_per_node,
            lease_s=LEASE_S,
        ),
    )


def _profile(scenario: Scenario) -> ModelProfile:
    """A profile of unequal layers, each with roughly 10 ms of compute and a few MiB of state."""
    layers = tuple(
        LayerProfile(
            name=f"layer {layer}",
            forward_s={1: 0.004 + 0.002 * (layer % 3)},
            backward_input_s={1: 0.004 + 0.002 * (layer % 3)},
            backward_weight_s={1: 0.004},
            parameter_bytes=(1 + layer % 2) << 20,
            optimizer_bytes=2 << 20,
            activation_bytes=1 << 16,
            output_bytes=1 << 16,
        )
        for layer in range(scenario.num_layers)
    )
    links = {
        "intra_node": Link(latency_s=1e-5, bandwidth_bytes_per_s=1e10),
        "inter_node": Link(1e-4, scenario.link_bytes_per_s),
    }
    return ModelProfile(
        model="simulated",
        microbatch_size=2,
        dtype="float32",
        device="cpu",
        device_memory_bytes=0,
        layers=layers,
        links=links,
    )
