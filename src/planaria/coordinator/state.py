"""What the coordinator knows, and what it can ask of whoever calls it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from planaria.coordinator.learning.learned import Learning
from planaria.coordinator.switching import Change, Switch
from planaria.coordinator.waiting import Candidate, Leave
from planaria.core.commit import VectorLayout
from planaria.core.copies import version_name
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
    ToNode,
    WorkerFailed,
    WorkerReady,
)
from planaria.core.plan import NodeKind, Plan
from planaria.core.records import Decision, Members, Origin, Outcome, ToLauncher
from planaria.planner.plans import EveryPlan
from planaria.policies.policy import Policy, Prices


class Phase(Enum):
    """What the coordinator waits for."""

    RECORDING = "the record of members"
    STOPPING = "members to leave the epoch before"
    DECIDING = "the records of outcome and decision"
    JOINING = "workers to report"
    STARTING = "workers to hold their layers"
    TRAINING = "iterations"
    SAVING = "the last save"
    ENDED = "nothing"


class Ending(Enum):
    """How a job ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"
    UNSAVED = "unsaved"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rules:
    """What does not change in a run.

    Attributes:
        policy: proposes the answers to losses.
        n0: nodes of the smallest pipeline.
        max_nodes: that there are plans for.
        layer_s: of each layer, forward and backward for a microbatch, as the profile says; empty:
            nobody looks for slow nodes.
        looks_ahead: answers are looked for before they are needed, and those that are better than
            ones chosen in a hurry, too; without it those are looked for at each commit.
        every: what the job can be re-formed to; None: its profile is not corrected.
        policy_of: makes the policy of such plans, which may be priced by another profile.
        version_iterations: from one version of the copies in memory to the next, as predicted.
        first_iteration: where this run starts.
        source: version of the disk tier to start from, "" for the seed.
        processors: that all ranks share; 0: each has its own.
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
class Tell:
    """Send a message to the agents of these nodes, or of every member if there are none."""

    message: ToNode
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Evict:
    """Close the connections of nodes, whose leases end with them."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecordMembers:
    """Write the record, then say `MembersRecorded`."""

    members: Members


@dataclass(frozen=True, slots=True)
class RecordDecision:
    """Write both records, the outcome first, then say `DecisionRecorded`."""

    outcome: Outcome
    decision: Decision


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell the launcher."""

    message: ToLauncher


@dataclass(frozen=True, slots=True)
class Publish:
    """Every layer of (iteration, epoch) is on disk: create its manifest, then say `Published`, or
    `SaveFailed`.

    Attributes:
        unused: versions that could not be read, and so are none of the newest that are kept.
    """

    iteration: int
    epoch: int
    files: tuple[LayerFile, ...]
    unused: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Discard:
    """A save failed: remove what there is of it, and say so if there is a reason."""

    iteration: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class SetAside:
    """Take a version of the disk tier out of use, which is not what was saved."""

    source: str


@dataclass(frozen=True, slots=True)
class End:
    """The job is over: tell the launcher, then have every member leave; `reason` is in words."""

    ending: Ending
    reason: str = ""
    failure: WorkerFailed | None = None


Saving = Publish | Discard | SetAside
Command = Tell | Evict | RecordMembers | RecordDecision | Notify | Saving | End


@dataclass(frozen=True, slots=True)
class MembersRecorded:
    """The store has the record of this epoch's members."""

    epoch: int


@dataclass(frozen=True, slots=True)
class AnswersFound:
    """It is known what might be better than the plan of this epoch, see policies/ahead.py."""

    epoch: int


@dataclass(frozen=True, slots=True)
class DecisionRecorded:
    """The store has the outcome and the decision of this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Published:
    """The manifest of a save exists."""

    iteration: int
    epoch: int

    @property
    def source(self) -> str:
        """Its version of the disk tier."""
        return version_name(self.iteration, self.epoch)


@dataclass(frozen=True, slots=True)
class Pruned:
    """A version of the disk tier is gone: newer ones are kept."""

    source: str


@dataclass(frozen=True, slots=True)
class SavesListed:
    """Every save that was there when this coordinator began was said to be `Published`."""


@dataclass(frozen=True, slots=True)
class MustEnd:
    """The job cannot go on, whatever its nodes do; what is live is to be saved before it ends."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What made the epoch before this one end; `lost_s` is when it was noticed.

    Attributes:
        joined: candidates that were needed, and so became members at once.
        is_waiting: too few are left, and it was said that a machine is waited for.
        awaits_saves: all have answered, and it was said that the disk has yet to.
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
    """The code in a worker of a node raised, or its process ended.

    Attributes:
        epoch: as in `WorkerFailed`; -1 if the process ended.
    """

    node: int
    rank: int
    pid: int
    epoch: int
    raised: Raised

    @property
    def key(self) -> tuple[int, int, int]:
        """Nothing else has it; agents tell again what they have told."""
        return (self.rank, self.pid, self.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """All that the coordinator knows.

    Attributes:
        term: of this coordinator; the store fences those of older terms.
        epoch: of the newest members, whether on record yet or not.
        nodes: these members, ascending.
        plan: the newest there was.
        workers: the newest worker of each rank.
        answers: of this epoch, by rank.
        outcome: the newest on record, of this epoch or an older one.
        decision: of this epoch, once it is on record.
        ready: by rank, in this epoch.
        corrupted: ranks that left this epoch because holders differ.
        next_iteration: the first that is not committed.
        reports: of iterations not yet committed, by iteration, then rank.
        saves: files so far by (iteration, epoch), then layer, of saves not yet published.
        versions: (iteration, epoch) of published saves beside the one that this run began with, the
            newest first.
        spoilt: versions of the disk tier that turned out not to be what was saved.
        publishing: saves that are being published, by (iteration, epoch).
        is_listing: it is not known yet which saves there were when this coordinator began.
        num_skipped: saves that were not made, for others before were under way.
        wrote_s: when a part of the last save was written last; since when that is waited for.
        is_slow_told: it was said that the last save is slow.
        origin: on which the iterations that count are built.
        unsaved: why saves of this run failed, by (iteration, epoch).
        ends: the last committed iteration was the job's last.
        loss: what this epoch answers to, None in the first.
        gone: nodes that were members and are not any more.
        machines: on which nodes run.
        missing_ticks: in how many ticks of this coordinator members had yet to come.
        failures: of machines, how many and when the last one was.
        history: how often the job has failed.
        candidates: nodes that are there and no members.
        leaving: nodes that are to leave in peace.
        change: that is being made.
        asked: for what a change was last looked for: members, candidates, leaving, speeds, and at
            the end to which power of two failures are rare.
        is_settled: the plan was looked for at leisure.
        sought: the newest epoch for whose nodes better plans have been looked for, -1 for none.
        ratios: by node, of its newest iterations in this epoch; see slowness.py.
        learning: how far seconds are from predicted ones, and which nodes are slow.
        fitted: the rules with memory estimates that were raised, see memory.py; None: none were.
        is_entered: every rank of this epoch has begun it, and the launcher knows.
        saves_since: saves of this epoch and of later ones count, and what was whole when it began.
        must_end: why the job ends at its next commit, or after its next loss, saved; "" if it need
            not.
        furthest: iterations that were ever committed, even if all have gone back behind them since.
        crashes: of workers since an iteration was committed last that never was before.
        raised: by rank the process of a worker that raised since then, and was not replaced.
        replaced: by rank the newest process that ends because another one takes its place.
        holding: in an epoch that is not decided yet, the ranks that surely hold what the plan gives
            them.
        failure: that ends the job as soon as what is live is saved.
        failed_s: when that came, or since when all are asked to leave their epoch for it.
        failed_reason: what went wrong, in words.
        unreachable_s: since when a member cannot reach another though both live; 0 if all can.
        unreached: the ranks that others cannot reach in this epoch, one entry a complaint.
        broken_links: epochs that ended for that, since the same time as crashes.
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
        """Iterations in the newest published save, -1 for none."""
        return self.versions[0][0] if self.versions else -1

    @property
    def speeds(self) -> Mapping[int, float]:
        """As in Findings."""
        return self.learning.findings.speeds

    @property
    def idle(self) -> Mapping[int, tuple[int, float]]:
        """As in Findings."""
        return self.learning.findings.idle

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the members, whether they have work or not."""
        return self.ranks_of(self.nodes)

    @property
    def trains(self) -> bool:
        """Whether it trains by its plan, and nothing else is under way."""
        is_busy = self.change is not None or self.ends or self.stop_requested
        return self.phase is Phase.TRAINING and self.is_entered and not is_busy

    @property
    def is_forking(self) -> bool:
        """Whether a worker of a member ended and the one that is forked anew has yet to report."""
        crashed = {crash.node for crash in self.crashes}.intersection(self.nodes)
        return any(rank not in self.workers for rank in self.ranks_of(crashed))

    @property
    def switch(self) -> Switch | None:
        """The next epoch, where a change is about to begin it."""
        return self.change.switch if self.change else None

    @property
    def epochs(self) -> tuple[int, ...]:
        """This epoch, and the next one if some may have begun it already."""
        return (self.epoch, self.switch.epoch) if self.switch else (self.epoch,)

    @property
    def all_nodes(self) -> tuple[int, ...]:
        """The members, and those of the next epoch, ascending."""
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
        """By rank, of an iteration that is not committed."""
        return self.reports.get(iteration, Growing())

    def is_told_by_all(self, facts: Mapping[int, object]) -> bool:
        """Whether every rank of the members has its entry; see `has_all`."""
        num_ranks = len(self.nodes) * self.devices_per_node
        return len(facts) >= num_ranks and all(rank in facts for rank in self.ranks)

    def ranks_of(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """All ranks of these nodes."""
        per_node = self.devices_per_node
        return tuple(node * per_node + device for node in nodes for device in range(per_node))

    def kind_of(self, node: int) -> NodeKind:
        """As the node is seen to be."""
        return NodeKind(self.speeds.get(node, 1.0))

    @property
    def devices_per_node(self) -> int:
        return self.plan.pipelines[0].template.devices_per_node


Step = tuple[JobState, tuple[Command, ...]]
