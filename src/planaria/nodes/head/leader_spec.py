"""The spec of the coordinator's process, and the rules that are derived from it."""

import os
from dataclasses import replace
from typing import Any, Final

import msgspec

from planaria.checkpoint.memory.turns import Buffers
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.placing import version_iterations
from planaria.core.commit import vector_layout
from planaria.core.inject import Place
from planaria.core.job import JobConfig
from planaria.core.plan import PipelineTemplate, Plan, Transition
from planaria.core.records import Rescue
from planaria.planner.plans import (
    PlanCatalog,
    PlanOutline,
    outline_of,
    outlined_plan,
    rebuilt_catalog,
)
from planaria.planner.problem import Problem
from planaria.policies.ahead import ForeseenAnswers
from planaria.policies.named import looks_ahead, lookup_policy
from planaria.policies.policy import Policy, profile_prices
from planaria.transport.credentials import Credentials
from planaria.transport.sockets import Address
from planaria.transport.timekeeping import clock_name

# Duration of a recovery besides moving layers, until the job has measured it; see docs/LOG.md.
REGROUP_S: Final = 0.005


class LeaderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The spec of the coordinator's process; mostly the same each time that it is started.

    Attributes:
        plan: plan with which the job begins; used unless the journal has a plan already.
        predicted_s: predicted seconds of an iteration of `plan`.
        templates: see `PlanCatalog`.
        outlines: those of the plans of `PlanCatalog`, whose routes take a megabyte each where an
            iteration has thousands of microbatches.
        first_iteration: iteration with which the job begins.
        source: version of the disk tier from which the job begins; "": it begins without a save.
        fingerprint: description of the job to write into each checkpoint.
        directory: directory of the journal.
        holder: random name of the head, which has taken that directory; "": no other head can.
        patience_s: seconds in which nodes look for a head that they have lost; 0: all are on this
            machine.
        parts: directory of the run at the place of saves, in which epochs are marked for nodes that
            lose their head; "": they are not.
        addresses: hosts and ports at which other machines may reach the head; (): none can.
        wait_s: see `Rules`.
        heeds: whether to keep a connection to the injector.
        injector: address of the injector.
        led_term: term of the last coordinator that has led; -1: none has.
        is_taken_up: whether the nodes are those of a head before this one. Then nothing is done to
            them before a coordinator has read its records.
        domains: name of the failure domain of each first node that is in one.
        speeds: speed of each first node whose machine is slower than the profile.
        credentials: contents of the token file, with which agents on other machines connect; None:
            all agents are on this machine, and connect with the token.
        rescue: state to go on from instead of the journal, only to save the live state; None: go
            on from the journal.
    """

    job: JobConfig
    plan: Plan
    predicted_s: float
    problem: Problem
    templates: dict[int, PipelineTemplate]
    outlines: dict[int, PlanOutline]
    first_iteration: int
    source: str
    fingerprint: dict[str, Any]
    directory: str
    token: bytes
    holder: str = ""
    patience_s: float = 0.0
    parts: str = ""
    addresses: tuple[Address, ...] = ()
    wait_s: float = 0.0
    places: tuple[Place, ...] = ()
    heeds: bool = False
    injector: tuple[str, int] = ("", 0)
    led_term: int = -1
    is_taken_up: bool = False
    domains: dict[int, str] = {}
    speeds: dict[int, float] = {}
    credentials: Credentials | None = None
    rescue: Rescue | None = None

    def __repr__(self) -> str:
        """The term alone: logs and tracebacks must not show the secrets of the job."""
        return f"LeaderSpec(led_term={self.led_term}, ...)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """The term alone, for the same reason."""
        return [("led_term", self.led_term)]


def catalog_of(spec: LeaderSpec) -> PlanCatalog:
    """The templates and plans to which the job can be re-formed."""
    plans = {num: outlined_plan(each, spec.templates) for num, each in spec.outlines.items()}
    return rebuilt_catalog(spec.problem, spec.templates, plans)


def outlines_of(catalog: PlanCatalog) -> dict[int, PlanOutline]:
    """The outlines of all plans of a catalog."""
    return {number: outline_of(plan) for number, plan in catalog.plans.items()}


class _EmptyPolicy:
    """The policy of a coordinator that only saves: it proposes nothing."""

    def propose(self, *_: Any, **__: Any) -> tuple[Transition, ...]:
        """See Policy."""
        return ()


def saving_rules_of(spec: LeaderSpec) -> Rules:
    """The rules for a coordinator that only saves.

    They need no plans, because making plans may be what ended other coordinators.
    """
    num_layers = len(spec.problem.profile.layers)
    return Rules(
        job=spec.job,
        policy=_EmptyPolicy(),
        prices=profile_prices(spec.problem.profile, regroup_s=REGROUP_S),
        n0=min(spec.templates),
        max_nodes=spec.job.cluster.nodes,  # Nobody joins.
        num_layers=num_layers,
        layout=vector_layout(spec.job, num_layers),
        first_iteration=spec.first_iteration,
        source=spec.source,
        domains=spec.domains,
        speeds=spec.speeds,
        clock=clock_name(),
    )


def rules_of(spec: LeaderSpec, foreseen: ForeseenAnswers) -> Rules:
    """The rules for a coordinator: everything that does not change during the run.

    Args:
        foreseen: answers to losses, found before they are needed; stays empty unless the job looks
            ahead.
    """
    catalog = catalog_of(spec)

    def policy(plans: PlanCatalog) -> Policy:
        return lookup_policy(spec.job, plans, foreseen)

    rules = replace(
        saving_rules_of(spec),
        policy=policy(catalog),
        max_nodes=max(spec.job.cluster.max_nodes, spec.job.cluster.nodes),
        profile=spec.problem.profile,
        catalog=catalog,
        policy_of=policy,
        looks_ahead=looks_ahead(spec.job),
        wait_s=spec.wait_s,
        # Nodes on other machines share no processors.
        processors=0 if spec.credentials else len(os.sched_getaffinity(0)),
    )
    buffers = Buffers(spec.job.checkpoint.buffer_bytes, spec.job.checkpoint.num_buffers)
    number = version_iterations(rules, spec.plan, chunk_bytes=buffers.piece_bytes)
    return replace(rules, version_iterations=number)
