"""What the coordinator knows: the rules of a run, and the state of its job."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from planaria.coordinator.commands import Command
from planaria.coordinator.learning.learned import Learning
from planaria.coordinator.membership.waiting import Candidate, Leave
from planaria.coordinator.switching import Change, Switch
from planaria.core.commit import VectorLayout
from planaria.core.findings import FailureHistory
from planaria.core.growing import Growing, is_among
from planaria.core.job import JobConfig
from planaria.core.messages import (
    Corrupted,
    EpochReady,
    IterationDone,
    LayerFile,
    Raised,
    Stopped,
    WorkerFailed,
    WorkerReady,
)
from planaria.core.plan import NodeKind, Plan
from planaria.core.records import Decision, Origin, Outcome
from planaria.planner.plans import EveryPlan
from planaria.policies.policy import Policy, Prices


class Phase(Enum):
    """The phase of an epoch; the value says what the coordinator waits for in it."""

    RECORDING = "the record of members"
    STOPPING = "members to leave the epoch before"
    DECIDING = "the records of outcome and decision"
    JOINING = "workers to report"
    STARTING = "workers to hold their layers"
    TRAINING = "iterations"
    SAVING = "the last save"
    ENDED = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rules:
    """The settings of a run, which do not change.

    Attributes:
        policy: policy that proposes answers to losses.
        prices: prices of a recovery by the profile, before the job has measured any.
        n0: number of nodes of the smallest pipeline.
        max_nodes: largest number of nodes that there are plans for.
        layer_s: seconds of forward and backward of each layer for one microbatch, by the profile;
            empty: slow nodes are not looked for.
        looks_ahead: whether answers to losses, and plans better than one chosen in a hurry, are
            searched ahead of need. If not, better plans are looked for at each commit.
        every: plans that the job can be re-formed to; None: its profile is not corrected.
        policy_of: function from such plans, which may have a corrected profile, to their policy.
        version_iterations: predicted number of iterations from one version of the copies in memory
            to the next.
        first_iteration: iteration at which this run starts.
        source: version of the disk tier that this run starts from; "": it starts from the seed.
        processors: number of processors that all ranks share; 0: each rank has its own.
    """

    job: JobConfig
    policy: Policy
    prices: Prices
    n0: int
    max_nodes: int
    num_layers: int
    layout: VectorLayout
    first_iteration: int
    source: str = ""
    layer_s: tuple[float, ...] = ()
    looks_ahead: bool = False
    every: EveryPlan | None = None
    policy_of: Callable[[EveryPlan], Policy] | None = None
    version_iterations: int = 1
    processors: int = 0


@dataclass(frozen=True, slots=True)
class Loss:
    """The event that made the epoch before this one end.

    Attributes:
        kind: name of what happened, as the report has it.
        nodes: the nodes that it concerns; they are lost if they are no members any more.
        lost_s: time at which it was noticed.
        joined: candidates that were needed, and so became members at once.
        is_waiting: whether too few nodes are left, and the launcher was told that the job waits for
            a machine.
        awaits_saves: whether the launcher was told that the recovery waits for the disk's answer.
    """

    kind: str
    nodes: tuple[int, ...]
    reason: str
    lost_s: float
    joined: tuple[int, ...] = ()
    is_waiting: bool = False
    awaits_saves: bool = False


@dataclass(frozen=True, slots=True)
class Crash:
    """An error that a worker's code raised, or the end of a worker's process.

    Attributes:
        epoch: epoch of the error, as in `WorkerFailed`; -1: the process ended.
    """

    node: int
    rank: int
    pid: int
    epoch: int
    raised: Raised

    @property
    def key(self) -> tuple[int, int, int]:
        """The identity of this crash, by which a report that an agent repeats is recognised."""
        return (self.rank, self.pid, self.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """Everything that the coordinator knows.

    Attributes:
        term: number of this coordinator; the store refuses writes of older terms.
        epoch: number of the newest membership, recorded or not.
        nodes: members of this epoch, ascending.
        plan: the newest plan.
        workers: newest worker of each rank.
        answers: answers to this epoch's order to stop, by rank.
        outcome: newest outcome, of this epoch or an older one; in the phase DECIDING, the one that
            is being recorded.
        decision: decision of this epoch; None: there is none yet.
        ready: ranks that have begun this epoch, with their reports.
        corrupted: ranks that left this epoch because holders of a layer differ, with their reports.
        next_iteration: first iteration that is not committed.
        reports: reports of iterations not yet committed, by iteration, then by rank.
        saves: files so far of saves not yet published, by (iteration, epoch), then by layer.
        versions: (iteration, epoch) of published saves, the newest first, without the one that this
            run began with.
        spoilt: versions of the disk tier that turned out not to be what was saved.
        publishing: (iteration, epoch) of saves whose manifests are being written.
        is_listing: whether it is still unknown which saves existed when this coordinator began.
        num_skipped: number of saves that were skipped because earlier ones were under way.
        wrote_s: time at which a part of a save was last written, or the wait for the last save
            began.
        is_slow_told: whether the launcher was told that the last save is slow.
        origin: state on which the iterations that count are built.
        unsaved: reasons why saves of this run failed, by (iteration, epoch), the newest first.
        ends: whether the newest committed iteration is the job's last.
        stop_requested: whether the job is to stop at its next commit.
        loss: event that this epoch recovers from; None in the first epoch.
        is_degraded: whether the launcher knows that fewer than f failures are tolerated.
        gone: nodes that are out for good: former members, and candidates that were dropped.
        machines: machine of each node.
        missing_ticks: number of this coordinator's ticks in which members had not arrived.
        failures: number of failures of each machine, and time of the last one.
        history: statistics of the job's failures.
        candidates: nodes that have arrived and are not members.
        leaving: nodes that are to leave in peace.
        change: change of members or plan that is under way; None: none.
        asked: situation in which a change was last looked for: members, joining and leaving nodes,
            slow nodes and their speeds, nodes to be tried, and the binary exponent of the mean time
            to a failure.
        is_settled: whether the plan was searched for at leisure, not in a hurry after a loss.
        sought: newest epoch for whose nodes better plans have been searched; -1: none.
        ratios: slowness of each node in its newest iterations of this epoch; see slowness.py.
        learning: measured deviations from the profile, and which nodes are slow.
        fitted: rules with raised memory estimates, see memory.py; None: no estimate was raised.
        is_entered: whether every rank of this epoch has begun it, and the launcher knows.
        saves_since: oldest epoch whose new saves count; saves that had all layers before it count
            too.
        stop_reason: why nodes are too few, if that is why the job stops; "" if it is not.
        must_end: why the job has to end, saved, at its next commit or loss; "": it need not.
        furthest: number of iterations that were ever committed, even if the job has gone back
            since.
        crashes: crashes of workers since the last first-time commit of an iteration.
        raised: process id, by rank, of workers that raised since the last commit and were not
            replaced.
        replaced: process id, by rank, of the newest worker that ends because another replaces it.
        holding: ranks that surely hold what the plan gives them, in an epoch not yet decided.
        failure: failure that ends the job as soon as its live layers are saved; None: none.
        failed_s: time of the failure, or of the newest order to leave the epoch.
        failed_reason: description of what went wrong.
        unreachable_s: time since which a member cannot reach another though both live; 0: all can.
        unreached: ranks that others cannot reach in this epoch, one entry for each complaint.
        broken_links: number of epochs that ended for broken links since the last first-time commit.
    """

    term: int
    epoch: int
    nodes: tuple[int, ...]
    plan: Plan
    next_iteration: int
    phase: Phase = Phase.RECORDING
    workers: Growing[int, WorkerReady] = field(default_factory=Growing)
    answers: Growing[int, Stopped] = field(default_factory=Growing)
    outcome: Outcome | None = None
    decision: Decision | None = None
    ready: Growing[int, EpochReady] = field(default_factory=Growing)
    corrupted: Growing[int, Corrupted] = field(default_factory=Growing)
    reports: Mapping[int, Growing[int, IterationDone]] = field(default_factory=dict)
    saves: Mapping[tuple[int, int], Mapping[int, LayerFile]] = field(default_factory=dict)
    versions: tuple[tuple[int, int], ...] = ()
    spoilt: frozenset[str] = frozenset()
    publishing: frozenset[tuple[int, int]] = frozenset()
    is_listing: bool = False
    num_skipped: int = 0
    wrote_s: float = 0.0
    is_slow_told: bool = False
    origin: Origin = field(default_factory=Origin)
    unsaved: Mapping[tuple[int, int], str] = field(default_factory=dict)
    ends: bool = False
    stop_requested: bool = False
    loss: Loss | None = None
    is_degraded: bool = False
    gone: tuple[int, ...] = ()
    machines: Growing[int, str] = field(default_factory=Growing)
    missing_ticks: int = 0
    failures: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    history: FailureHistory = field(default_factory=FailureHistory)
    candidates: Mapping[int, Candidate] = field(default_factory=dict)
    leaving: Mapping[int, Leave] = field(default_factory=dict)
    change: Change | None = None
    asked: tuple[tuple[float, ...], ...] = ()
    is_settled: bool = False
    sought: int = -1
    ratios: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    learning: Learning = field(default_factory=Learning)
    fitted: Rules | None = None
    is_entered: bool = False
    saves_since: int = 0
    stop_reason: str = ""
    must_end: str = ""
    furthest: int = 0
    crashes: tuple[Crash, ...] = ()
    raised: Mapping[int, int] = field(default_factory=dict)
    replaced: Mapping[int, int] = field(default_factory=dict)
    holding: frozenset[int] = frozenset()
    failure: WorkerFailed | None = None
    failed_s: float = 0.0
    failed_reason: str = ""
    unreachable_s: float = 0.0
    unreached: tuple[int, ...] = ()
    broken_links: int = 0

    @property
    def published(self) -> int:
        """The number of iterations in the newest published save; -1: there is none."""
        return self.versions[0][0] if self.versions else -1

    @property
    def speeds(self) -> Mapping[int, float]:
        """The speeds of slow nodes, as in `Findings`."""
        return self.learning.findings.speeds

    @property
    def idle(self) -> Mapping[int, tuple[int, float]]:
        """The slow nodes without work, as in `Findings`."""
        return self.learning.findings.idle

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of all members, with work or without."""
        return self.ranks_of(self.nodes)

    @property
    def trains(self) -> bool:
        """Whether the job trains by its plan, and nothing else is under way."""
        is_busy = self.change is not None or self.ends or self.stop_requested
        return self.phase is Phase.TRAINING and self.is_entered and not is_busy

    @property
    def is_forking(self) -> bool:
        """Whether a member's worker crashed and the one forked in its place has yet to report."""
        crashed = {crash.node for crash in self.crashes}.intersection(self.nodes)
        return any(rank not in self.workers for rank in self.ranks_of(crashed))

    @property
    def switch(self) -> Switch | None:
        """The switch to the next epoch, if a change is about to begin one."""
        return self.change.switch if self.change else None

    @property
    def epochs(self) -> tuple[int, ...]:
        """This epoch, and the next one if some ranks may have begun it already."""
        return (self.epoch, self.switch.epoch) if self.switch else (self.epoch,)

    @property
    def all_nodes(self) -> tuple[int, ...]:
        """The members of this epoch and of a pending next one, ascending."""
        return tuple(sorted({*self.nodes, *(self.switch.nodes if self.switch else ())}))

    def is_member(self, node: int) -> bool:
        """Whether the node is among `all_nodes`."""
        groups = (self.nodes, self.switch.nodes) if self.switch else (self.nodes,)
        return any(is_among(node, nodes) for nodes in groups)

    def has_rank(self, rank: int) -> bool:
        """Whether the rank is among `ranks`."""
        return is_among(rank // self.devices_per_node, self.nodes)

    def has_workers(self, node: int) -> bool:
        """Whether every rank of the node has a worker."""
        return all(rank in self.workers for rank in self.ranks_of((node,)))

    def reports_of(self, iteration: int) -> Growing[int, IterationDone]:
        """The reports of an uncommitted iteration, by rank."""
        return self.reports.get(iteration, Growing())

    def is_told_by_all(self, facts: Mapping[int, object]) -> bool:
        """Whether every rank of the members has an entry; see `has_all`."""
        num_ranks = len(self.nodes) * self.devices_per_node
        return len(facts) >= num_ranks and all(rank in facts for rank in self.ranks)

    def ranks_of(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """All ranks of these nodes."""
        per_node = self.devices_per_node
        return tuple(node * per_node + device for node in nodes for device in range(per_node))

    def kind_of(self, node: int) -> NodeKind:
        """The node's kind, by the speed that it is seen to have."""
        return NodeKind(self.speeds.get(node, 1.0))

    @property
    def devices_per_node(self) -> int:
        return self.plan.pipelines[0].template.devices_per_node


Step = tuple[JobState, tuple[Command, ...]]
