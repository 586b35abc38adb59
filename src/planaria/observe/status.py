"""What a running job does at the moment: the record that `planaria status` prints.

The launcher keeps a `Standing`, which follows from the coordinator's messages alone. Together with
the nodes that live it makes the record.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec

from planaria.core.job import JobConfig
from planaria.core.kinds import ChangeKind, LossKind
from planaria.core.plan import Plan
from planaria.core.records import (
    Changed,
    Committed,
    Decided,
    Leading,
    Recovering,
    Running,
    ToLauncher,
    Warned,
)
from planaria.observe.metrics import EventRecord


class NodeState(StrEnum):
    """What a node does."""

    STARTING = "starting"  # It belongs to the job's first plan, and training has not begun.
    TRAINING = "training"
    RECOVERING = "recovering"  # A loss is being answered; the node takes part in that.
    LEAVING = "leaving"  # The user has asked that it leaves.
    STANDBY = "standby"  # It lives and is in no plan.
    LOST = "lost"


class Health(StrEnum):
    """How well a node does."""

    OK = "ok"
    SLOW = "slow"  # It computes more slowly than its peers, and got less work for that.
    UNREACHABLE = "unreachable"  # Its machine's connection to the head is broken.
    LOST = "lost"


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node, as the head knows it.

    Attributes:
        host: address at which others reach it.
    """

    node: int
    host: str
    state: NodeState
    ranks: tuple[int, ...]
    health: Health


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a job does at the moment.

    Attributes:
        job: name of the job.
        iteration: number of committed iterations.
        epoch: epoch of the newest plan; -1: there is none yet.
        term: number of the coordinator; -1: none has led yet.
        policy: the job's `resilience.policy`.
        degraded: warning if fewer failures are tolerated than the job asks for; else "".
        nodes: nodes that live or belong to the plan, ascending.
        pipelines: nodes of each pipeline, in the order of its stages; lost ones are left out.
        standby: nodes that live and are in no plan.
        last_event: newest event of the report; None: there was none.
        links: bytes per second of each kind of link between machines, as training has measured it:
            "inter_node" within a failure domain, "inter_domain" between two.
    """

    job: str
    iteration: int
    epoch: int
    term: int
    policy: str
    degraded: str
    nodes: tuple[NodeStatus, ...]
    pipelines: tuple[tuple[int, ...], ...]
    standby: tuple[int, ...]
    last_event: EventRecord | None
    links: dict[str, float] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the coordinator's messages say of a job.

    Attributes:
        plan: newest plan; None: the job is not planned yet.
        num_committed: number of committed iterations.
        is_training: whether all ranks train; False while they start or recover.
        has_trained: whether training has begun.
        lost: nodes that were lost, also while they waited to join.
        slow: nodes that have become slow and were given less work; the plan has the speeds of
            others that were slow when they joined, or when it answered a loss.
        links: measured bytes per second by kind of link.
    """

    plan: Plan | None = None
    term: int = -1
    num_committed: int = 0
    degraded: str = ""
    is_training: bool = False
    has_trained: bool = False
    lost: frozenset[int] = frozenset()
    slow: frozenset[int] = frozenset()
    links: Mapping[str, float] = field(default_factory=dict)

    def after(self, message: ToLauncher) -> "Standing":
        """The standing once a message has come."""
        match message:
            case Leading(term=term):
                return replace(self, term=term)
            case Recovering():
                is_loss = message.kind is LossKind.LOST
                lost = self.lost.union(message.nodes if is_loss else ())
                return replace(self, is_training=False, lost=lost)
            case Decided():
                return replace(
                    self,
                    plan=message.plan,
                    num_committed=message.iteration,
                    degraded=message.degraded,
                    # The plan has the speeds of the nodes at work; no change tells them anew.
                    slow=self.slow.difference(message.plan.nodes),
                )
            case Running():
                return replace(self, plan=message.plan, is_training=True, has_trained=True)
            case Changed():
                kinds = message.kinds.items()
                fast = {node for node, kind in kinds if kind is ChangeKind.FAST}
                slow = {node for node, kind in kinds if kind is ChangeKind.SLOW}
                return replace(
                    self,
                    plan=message.plan,
                    degraded=message.degraded,
                    slow=(self.slow - fast) | slow,
                )
            case Committed():
                return replace(self, num_committed=message.iteration + 1, links=message.links)
            case Warned():
                return replace(self, lost=self.lost.union(message.gone))
        return self


def job_status(
    job: JobConfig,
    standing: Standing,
    *,
    hosts: Mapping[int, str],
    live: Collection[int] = (),
    unreachable: Collection[int] = (),
    leaving: Collection[int] = (),
    last_event: EventRecord | None = None,
) -> JobStatus:
    """The record of a job.

    Args:
        hosts: address of each node that lives or belongs to the plan.
        live: nodes whose agents have not ended.
        unreachable: live nodes whose machines have no connection to the head now.
        leaving: nodes that were asked to leave.
    """
    plan, per_node = standing.plan, job.cluster.devices_per_node
    planned = frozenset(plan.nodes if plan is not None else ())
    # No message names a node as slow whose low speed was known before it joined.
    slow = standing.slow.union(plan.slow_nodes if plan is not None else ())

    def health(node: int, state: NodeState) -> Health:
        if state is NodeState.LOST:
            return Health.LOST
        if node in unreachable:
            return Health.UNREACHABLE
        return Health.SLOW if node in slow else Health.OK

    def state(node: int) -> NodeState:
        is_planned, is_leaving = node in planned, node in leaving
        return _state(
            standing, node, is_live=node in live, is_planned=is_planned, is_leaving=is_leaving
        )

    states = {node: state(node) for node in sorted(planned.union(live))}
    nodes = tuple(
        NodeStatus(
            node=node,
            host=hosts[node],
            state=node_state,
            ranks=tuple(range(node * per_node, (node + 1) * per_node)),
            health=health(node, node_state),
        )
        for node, node_state in states.items()
    )
    return JobStatus(
        job=job.name,
        iteration=standing.num_committed,
        epoch=-1 if plan is None else plan.epoch,
        term=standing.term,
        policy=job.resilience.policy,
        degraded=standing.degraded,
        nodes=nodes,
        pipelines=_pipelines(plan),
        standby=tuple(node.node for node in nodes if node.state is NodeState.STANDBY),
        last_event=last_event,
        links=dict(standing.links),
    )


def _state(
    standing: Standing, node: int, *, is_live: bool, is_planned: bool, is_leaving: bool
) -> NodeState:
    if node in standing.lost:
        return NodeState.LOST
    if not is_live:  # Before training begins, its agent may not have been started yet.
        return NodeState.LOST if standing.has_trained else NodeState.STARTING
    if not is_planned:
        return NodeState.STANDBY
    if is_leaving:
        return NodeState.LEAVING
    if standing.is_training:
        return NodeState.TRAINING
    return NodeState.RECOVERING if standing.has_trained else NodeState.STARTING


def _pipelines(plan: Plan | None) -> tuple[tuple[int, ...], ...]:
    if plan is None:
        return ()
    return tuple(
        tuple(node for node in pipeline.nodes if node not in plan.gone)
        for pipeline in plan.pipelines
    )
