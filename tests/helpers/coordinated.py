"""A small job for tests of the coordinator: its rules, and what its ranks say."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from helpers.jobs import NUM_LAYERS, shaped_plan, template
from planaria.coordinator.commands import Command, DecisionRecorded, Notify, Tell
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.start import first_step
from planaria.coordinator.state import JobState, Phase
from planaria.coordinator.step import Event, step
from planaria.core.cluster import ClusterEvent, ClusterState
from planaria.core.commit import CommitVector, Votes, encode_vector, vector_layout
from planaria.core.job import JobConfig, ResilienceConfig, TrainingConfig
from planaria.core.messages import (
    Blame,
    Corrupted,
    EpochReady,
    IterationDone,
    LayerFile,
    LayersSaved,
    NodeArrived,
    NodeLost,
    NoticeTaken,
    Raised,
    SaveFailed,
    Stopped,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
)
from planaria.core.plan import Pipeline, Plan, Transfer, Transition, plain_plan
from planaria.policies.policy import Prices

FIRST, END = 10, 15  # The run goes on from ten committed iterations and does five.
NUM_MICROBATCHES = 6
LEASE_S = 3.0
SOURCE = "10-3"
NOW_S = 100.0

Kind = TypeVar("Kind")
Report = IterationDone | Corrupted | LayersSaved | SaveFailed
Ended = WorkerExited | WorkerFailed
Word = NodeArrived | NoticeTaken | WorkerReady | Stopped | EpochReady | Ended | Report


@dataclass
class Survivors:
    """A policy: each who is left holds all layers, at two prices of which the second is better.

    Attributes:
        seen: what it was asked.
        num_idle: the last nodes get no work.
        rounds: that it asks for.
    """

    seen: list[tuple[ClusterState, ClusterEvent]] = field(default_factory=list)
    knows_an_answer: bool = True
    num_idle: int = 0
    rounds: tuple[tuple[Transfer, ...], ...] = ()

    def propose(
        self, plan: Plan, cluster: ClusterState, event: ClusterEvent, prices: Prices
    ) -> tuple[Transition, ...]:
        self.seen.append((cluster, event))
        if not self.knows_an_answer:
            return ()
        at_work = cluster.nodes[: len(cluster.nodes) - self.num_idle]
        pipelines = tuple(Pipeline(template(1), (node.node,)) for node in at_work)
        share, rest = divmod(len(plan.routes), len(pipelines))
        counts = tuple(share + (index < rest) for index in range(len(pipelines)))
        slow = Transition(
            before=plan,
            after=plain_plan(cluster.epoch, pipelines, counts),
            rounds=self.rounds,
            downtime_s=prices.regroup_s,
            iteration_s=2.0,
            redone_samples=event.redone_samples,
            policy="survivors",
            answer="slow",
        )
        return slow, replace(slow, iteration_s=1.0, answer="fast")


def small_rules(
    *,
    n0: int = 2,
    max_nodes: int = 8,
    failures_tolerated: int = 1,
    policy: Survivors | None = None,
    **keys: Any,
) -> Rules:
    """A job of ten layers and six microbatches; `keys` are of its resilience."""
    resilience = ResilienceConfig(failures_tolerated=failures_tolerated, **keys)
    job = JobConfig(
        training=TrainingConfig(
            iterations=END, global_batch_size=NUM_MICROBATCHES, microbatch_size=1
        ),
        resilience=resilience,
    )
    return Rules(
        job=job,
        policy=policy or Survivors(),
        prices=Prices(links={}, layer_bytes=(8,) * NUM_LAYERS, regroup_s=0.1),
        n0=n0,
        max_nodes=max_nodes,
        num_layers=NUM_LAYERS,
        layout=vector_layout(job, NUM_LAYERS),
        first_iteration=FIRST,
        source=SOURCE,
    )


# -- what ranks say -------------------------------------------------------------------------------


def worker(rank: int, *, pid: int = 0) -> WorkerReady:
    pid = pid or 50 + rank
    return WorkerReady(node=rank, rank=rank, pid=pid, pid_start=1.0, host="h", port=rank)


def worker_exit(
    rank: int, *, status: int = -9, stalled: bool = False, stack: str = "", pid: int = 0
) -> WorkerExited:
    pid = pid or 50 + rank
    return WorkerExited(node=rank, rank=rank, pid=pid, status=status, stalled=stalled, stack=stack)


def worker_failure(
    rank: int, raised: Raised, *, epoch: int, pid: int = 0, blame: Blame = "node"
) -> WorkerFailed:
    return WorkerFailed(
        node=rank,
        rank=rank,
        traceback=f"its traceback\n{raised.error}: {raised.message}",
        pid=pid or 50 + rank,
        epoch=epoch,
        blame=blame,
        raised=raised,
    )


def node_loss(node: int) -> NodeLost:
    return NodeLost(node=node, reason="closed")


def ready(rank: int, epoch: int) -> EpochReady:
    return EpochReady(rank=rank, epoch=epoch, layers_materialised=rank + 1)


def iteration_report(rank: int, iteration: int, *, epoch: int, ends: bool = False) -> IterationDone:
    return IterationDone(
        rank=rank,
        epoch=epoch,
        iteration=iteration,
        loss=float(iteration),
        num_samples=NUM_MICROBATCHES,
        sample_digest="digest",
        seconds=0.1,
        stall_s=0.0,
        peak_bytes=0,
        ends=ends,
    )


def vector(iteration: int, *, stop_votes: int = 0) -> bytes:
    """The commit vector of an iteration, whose loss is the iteration's number."""
    norms, votes = (1.0,) * NUM_LAYERS, Votes(stop_votes)
    return encode_vector(CommitVector(norms, float(iteration), NUM_MICROBATCHES, "00" * 16, votes))


def stop_report(
    rank: int,
    epoch: int,
    *,
    layers: Iterable[int] = (),
    age: int = FIRST,
    complete: bool = False,
    last: int = -1,
) -> Stopped:
    """What a rank holds: layers of one age, and the vector of iteration `last` if it has one."""
    held = tuple(layers)
    return Stopped(
        rank=rank,
        epoch=epoch,
        ages=dict.fromkeys(held, age),
        complete=held if complete else (),
        vector_iteration=last,
        vector=vector(last) if last >= 0 else b"",
    )


def file(layer: int) -> LayerFile:
    return LayerFile(layer, f"{layer}.safetensors", 7, "hash")


def save_report(rank: int, iteration: int, *, epoch: int, layers: Iterable[int]) -> LayersSaved:
    files = tuple(file(layer) for layer in layers)
    return LayersSaved(rank=rank, epoch=epoch, iteration=iteration, files=files)


def save_failure(rank: int, iteration: int, *, epoch: int) -> SaveFailed:
    return SaveFailed(rank=rank, epoch=epoch, iteration=iteration, reason="disk full")


def of_type(commands: Sequence[object], kind: type[Kind]) -> list[Kind]:
    """The commands of a kind, or what is told or notified of that kind."""
    inner = [c.message if isinstance(c, Tell | Notify) else c for c in commands]
    return [one for one in (*inner,) if isinstance(one, kind)]


# -- what follows from it -------------------------------------------------------------------------

HALVES = shaped_plan((2, 2), 6)  # Ranks 0 and 2 hold layers 0 to 4, ranks 1 and 3 the others.
LOWER, UPPER = range(5), range(5, 10)
NEXT = FIRST + 2  # The next to be committed where tests with this plan begin.


def after(state: JobState, events: Iterable[Event], rules: Rules) -> tuple[JobState, list[Command]]:
    """All commands that the events bring about."""
    commands: list[Command] = []
    for event in events:
        state, more = step(rules, state, event, NOW_S)
        commands += more
    return state, commands


def training_halves(rules: Rules) -> JobState:
    """All four ranks of that plan have committed two iterations."""
    state, _ = first_step(rules, HALVES, term=0, predicted_s=1.0)
    events: list[Event] = [DecisionRecorded(0), *map(worker, HALVES.ranks)]
    events += [ready(rank, 0) for rank in HALVES.ranks]
    events += [
        iteration_report(rank, i, epoch=0) for i in range(FIRST, NEXT) for rank in HALVES.ranks
    ]
    state, _ = after(state, events, rules)
    assert (state.phase, state.commits.next_iteration) == (Phase.TRAINING, NEXT)
    return state


def training_of_four_ranks(rules: Rules) -> JobState:
    """Two nodes of four ranks train."""
    of_four = replace(template(4), num_nodes=1)
    plan = plain_plan(0, (Pipeline(of_four, (0,)), Pipeline(of_four, (1,))), (3, 3))
    state, _ = first_step(rules, plan, term=0, predicted_s=1.0)
    workers = [worker_of_four(rank) for rank in plan.ranks]
    events: list[Event] = [DecisionRecorded(0), *workers, *(ready(rank, 0) for rank in plan.ranks)]
    return after(state, events, rules)[0]


def worker_of_four(rank: int, *, pid: int = 0) -> WorkerReady:
    """As `worker`, on a node of four ranks."""
    return msgspec.structs.replace(worker(rank, pid=pid), node=rank // 4)
