"""What the coordinator knows of its job."""

from collections.abc import Iterable, Mapping
from enum import Enum

import msgspec

from planaria.coordinator.commands import Command
from planaria.coordinator.learning.learned import Learning
from planaria.coordinator.membership.waiting_nodes import LeaveRequest, WaitingNode
from planaria.coordinator.switching import Change, Switch
from planaria.core.cluster import PROFILED_KIND
from planaria.core.findings import FailureHistory
from planaria.core.kinds import ChangeKind, LossKind
from planaria.core.messages import (
    CopySpoilt,
    Corrupted,
    EpochReady,
    IterationDone,
    LayerFile,
    PeerUnreachable,
    Raised,
    Stopped,
    WorkerFailed,
    WorkerReady,
)
from planaria.core.persistent_map import PersistentMap, is_among
from planaria.core.plan import NodeKind, Plan
from planaria.core.records import Decision, Origin, Outcome


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


class Loss(msgspec.Struct, frozen=True):
    """The event that made the epoch before this one end.

    Attributes:
        kind: name of what happened, as the report has it.
        nodes: the nodes that it concerns; they are lost if they are no members any more.
        lost_s: time at which it was noticed.
        joined: candidates that were needed, and so became members at once, and nodes that switches
            have made members, and of which the launcher had not been told.
        is_waiting: whether too few nodes are left, and the launcher was told that the job waits for
            a machine.
        awaits_saves: whether the launcher was told that the recovery waits for the disk's answer.
    """

    kind: LossKind
    nodes: tuple[int, ...]
    reason: str
    lost_s: float
    joined: tuple[int, ...] = ()
    is_waiting: bool = False
    awaits_saves: bool = False


class Crash(msgspec.Struct, frozen=True):
    """An error that a worker's code raised, or the end of a worker's process.

    Attributes:
        epoch: epoch of the error, as in `WorkerFailed`; -1: the process ended.
        unfit: why its machine was found unfit after it; "": it was not.
        is_ignored: whether it counts against nobody, because the last save went on without it.
    """

    node: int
    rank: int
    pid: int
    epoch: int
    raised: Raised
    unfit: str = ""
    is_ignored: bool = False

    @property
    def key(self) -> tuple[int, int, int]:
        """The identity of this crash, by which a report that an agent repeats is recognised."""
        return (self.rank, self.pid, self.epoch)


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that are or want to be members, and how often they failed.

    Attributes:
        gone: nodes that are out for good: former members, and candidates that were dropped.
        machines: machine of each node that has arrived; a recovery drops those of nodes in `gone`.
        domains: name of the failure domain of each node that is in one; dropped likewise.
        exposed: domains of which the user knows that their loss takes all holders of some layer.
        missing_ticks: number of this coordinator's ticks in which members had not arrived.
        returning_ticks: number of ticks left in which nodes that had waited to join when the
            coordinator before this one was lost may come back.
        failures: number of failures of each machine, and time of the last one; without those that
            no longer counted at the newest loss.
        history: statistics of the job's failures.
        candidates: nodes that have arrived and are not members.
        leaving: nodes that are to leave, with the request for each.
        postponed: nodes on unfit machines that are to leave once others can take their places.
        untold: nodes that switches have made members, or members no more, and of which the launcher
            has not been told, with the kind of the change.
        tolerance: number of failures at once that the launcher knows to be survived; None: f.
    """

    gone: tuple[int, ...] = ()
    machines: PersistentMap[int, str] = msgspec.field(default_factory=PersistentMap)
    domains: PersistentMap[int, str] = msgspec.field(default_factory=PersistentMap)
    exposed: frozenset[str] = frozenset()
    missing_ticks: int = 0
    returning_ticks: int = 0
    failures: Mapping[str, tuple[int, float]] = msgspec.field(default_factory=dict)
    history: FailureHistory = msgspec.field(default_factory=FailureHistory)
    candidates: Mapping[int, WaitingNode] = msgspec.field(default_factory=dict)
    leaving: Mapping[int, LeaveRequest] = msgspec.field(default_factory=dict)
    postponed: Mapping[int, LeaveRequest] = msgspec.field(default_factory=dict)
    untold: Mapping[int, ChangeKind] = msgspec.field(default_factory=dict)
    tolerance: int | None = None


class EpochFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of this epoch; a loss begins another epoch with a new record.

    Attributes:
        loss: event that this epoch, or one that it was switched from, recovers from; None in the
            first epoch.
        holding: ranks that surely hold what the plan gives them, in an epoch that is not decided,
            or that only saves the layers; empty if another plan was decided on.
        answers: answers to this epoch's order to stop, by rank.
        decision: decision of this epoch; None: there is none yet.
        ready: ranks that have begun this epoch, with their reports.
        is_entered: whether every rank of this epoch has begun it, and the launcher knows.
        corrupted: ranks that left this epoch because holders of a layer differ, with their reports.
        unreachable_s: time since which a member cannot reach another though both live; 0: all can.
        complaints: reports of ranks that cannot reach others in this epoch.
        ratios: slowness of each node in its newest iterations of this epoch; see slowness.py.
    """

    loss: Loss | None = None
    holding: frozenset[int] = frozenset()
    answers: PersistentMap[int, Stopped] = msgspec.field(default_factory=PersistentMap)
    decision: Decision | None = None
    ready: PersistentMap[int, EpochReady] = msgspec.field(default_factory=PersistentMap)
    is_entered: bool = False
    corrupted: PersistentMap[int, Corrupted] = msgspec.field(default_factory=PersistentMap)
    unreachable_s: float = 0.0
    complaints: tuple[PeerUnreachable, ...] = ()
    ratios: Mapping[int, tuple[float, ...]] = msgspec.field(default_factory=dict)


class Commits(msgspec.Struct, frozen=True, kw_only=True):
    """Which iterations are committed, and what they are built on.

    Attributes:
        next_iteration: first iteration that is not committed.
        reports: reports of iterations not yet committed, by iteration, then by rank.
        outcome: newest outcome, of this epoch or an older one; in the phase DECIDING, the one that
            is being recorded.
        origin: state on which the iterations that count are built.
        ends: whether the newest committed iteration is the job's last.
        is_trained: whether training would end with that iteration though nobody asked for that.
        furthest: number of iterations that were ever committed, even if the job has gone back
            since.
    """

    next_iteration: int
    reports: Mapping[int, PersistentMap[int, IterationDone]] = msgspec.field(default_factory=dict)
    outcome: Outcome | None = None
    origin: Origin = msgspec.field(default_factory=Origin)
    ends: bool = False
    is_trained: bool = False
    furthest: int = 0

    def reports_of(self, iteration: int) -> PersistentMap[int, IterationDone]:
        """The reports of an uncommitted iteration, by rank."""
        return self.reports.get(iteration, PersistentMap())


class Saves(msgspec.Struct, frozen=True, kw_only=True):
    """The saves on disk, each named by (iteration, epoch).

    Attributes:
        files: files so far of saves not yet published, by save, then by layer.
        versions: published saves, the newest first, without the one that this run began with.
        spoilt: versions of the disk tier that turned out not to be what was saved.
        checking: versions of which a node says that they are spoilt, with what it says, while the
            head reads them itself.
        publishing: files by layer of saves whose manifests are being written.
        unsaved: reasons why saves of this run failed, by save, the newest first.
        kept: failed saves whose layers stay on disk, all of them, without a manifest.
        is_listing: whether it is still unknown which saves existed when this coordinator began.
        num_skipped: number of saves that were skipped because earlier ones were under way.
        wrote_s: time at which a part of a save was last written, or the wait for the last save
            began.
        is_slow_told: whether the launcher was told that the last save is slow.
        since_epoch: oldest epoch whose new saves count; saves that had all layers before it count
            too.
        owed_since: epoch that made the job less safe, and since which no save is published that
            began in it or later; -1: there is none.
        num_owed_tries: number of epochs since then in which such a save may have begun.
    """

    files: Mapping[tuple[int, int], Mapping[int, LayerFile]] = msgspec.field(default_factory=dict)
    versions: tuple[tuple[int, int], ...] = ()
    spoilt: frozenset[str] = frozenset()
    checking: Mapping[str, CopySpoilt] = msgspec.field(default_factory=dict)
    publishing: Mapping[tuple[int, int], Mapping[int, LayerFile]] = msgspec.field(
        default_factory=dict
    )
    unsaved: Mapping[tuple[int, int], str] = msgspec.field(default_factory=dict)
    kept: frozenset[tuple[int, int]] = frozenset()
    is_listing: bool = False
    num_skipped: int = 0
    wrote_s: float = 0.0
    is_slow_told: bool = False
    since_epoch: int = 0
    owed_since: int = -1
    num_owed_tries: int = 0

    @property
    def surely_spoilt(self) -> frozenset[str]:
        """The spoilt versions, without those that the head may yet find sound."""
        return self.spoilt.difference(self.checking)

    @property
    def newest_iteration(self) -> int:
        """The number of iterations in the newest published save; -1: there is none."""
        return self.versions[0][0] if self.versions else -1


class Troubles(msgspec.Struct, frozen=True, kw_only=True):
    """Failures of workers and links while their nodes live; see crashes.py and broken_links.py.

    Attributes:
        crashes: crashes of workers since all ranks reported an iteration that was not done again.
        raised: process id, by rank, of workers that raised since the last commit and were not
            replaced.
        replaced: process id, by rank, of the newest worker that ends because another replaces it.
        broken_links: number of epochs that ended for broken links since then.
        unlinked: pairs of nodes that could not reach each other in these epochs, the lower first.
        unlinked_s: time of the end of the first of these epochs.
    """

    crashes: tuple[Crash, ...] = ()
    raised: Mapping[int, int] = msgspec.field(default_factory=dict)
    replaced: Mapping[int, int] = msgspec.field(default_factory=dict)
    broken_links: int = 0
    unlinked: frozenset[tuple[int, int]] = frozenset()
    unlinked_s: float = 0.0


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """Why the job is to end before its last iteration; by default it is not.

    Attributes:
        is_requested: whether the job is to stop at its next commit.
        is_early: whether the job itself has asked for that, and not its user.
        shortage: why nodes are too few, if that is why the job stops; "" if it is not.
        must_end: why the job has to end, saved, at its next commit or loss; "": it need not.
        failure: failure that ends the job as soon as its live layers are saved; None: none.
        failed_s: time of the failure, or of the newest order to leave the epoch.
        failed_reason: description of what went wrong.
    """

    is_requested: bool = False
    is_early: bool = False
    shortage: str = ""
    must_end: str = ""
    failure: WorkerFailed | None = None
    failed_s: float = 0.0
    failed_reason: str = ""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What decides whether a change is worth looking for.

    Attributes:
        nodes: members.
        joining: candidates that can become members now, and members that wait for work.
        leaving: members that are to leave.
        speeds: (node, speed) of each slow node.
        retried: slow nodes without work that are assumed to be fast again.
        failure_exponent: binary exponent of the mean time to a failure in seconds.
    """

    nodes: tuple[int, ...]
    joining: tuple[int, ...]
    leaving: tuple[int, ...]
    speeds: tuple[tuple[int, float], ...]
    retried: tuple[int, ...]
    failure_exponent: int


class PlanSearch(msgspec.Struct, frozen=True, kw_only=True):
    """Which better plans were looked for; a loss, which makes a new plan, begins a new record.

    Attributes:
        last_situation: situation in which a change was last looked for; None: in none yet.
        is_plan_searched: whether the plan was searched for at leisure, not in a hurry after a loss.
        searched_epoch: newest epoch for whose nodes better plans have been searched; -1: none.
        short_of_memory: members when a rank last lacked memory for the layers of a change; they
            begin no other one unless nodes join or leave. Losses do not clear it.
        waiting: members that had no work when a change was dropped, a drain was refused, or this
            coordinator began. They count as joining nodes when a change is next looked for.
        dropped_s: seconds for which changes paused training that were dropped since the last one
            that was finished. The next one counts them as its own.
        dropped_bytes: bytes of layers that moved in these changes.
    """

    last_situation: Situation | None = None
    is_plan_searched: bool = False
    searched_epoch: int = -1
    short_of_memory: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    dropped_s: float = 0.0
    dropped_bytes: int = 0


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the coordinator knows: one record for what changes together.

    Attributes:
        term: number of this coordinator; the store refuses writes of older terms.
        epoch: number of the newest membership, recorded or not.
        nodes: members of this epoch, ascending.
        plan: the newest plan.
        workers: newest worker of each rank.
        change: change of members or plan that is under way; None: none.
        learning: measured deviations from the profile, and which nodes are slow.
    """

    term: int
    epoch: int
    nodes: tuple[int, ...]
    plan: Plan
    commits: Commits
    phase: Phase = Phase.RECORDING
    workers: PersistentMap[int, WorkerReady] = msgspec.field(default_factory=PersistentMap)
    change: Change | None = None
    membership: Membership = msgspec.field(default_factory=Membership)
    facts: EpochFacts = msgspec.field(default_factory=EpochFacts)
    saves: Saves = msgspec.field(default_factory=Saves)
    troubles: Troubles = msgspec.field(default_factory=Troubles)
    stop: Stop = msgspec.field(default_factory=Stop)
    search: PlanSearch = msgspec.field(default_factory=PlanSearch)
    learning: Learning = msgspec.field(default_factory=Learning)

    @property
    def speeds(self) -> Mapping[int, float]:
        """The speeds of slow nodes, as in `Findings`."""
        return self.learning.findings.speeds

    @property
    def idle(self) -> Mapping[int, tuple[int, float]]:
        """The slow nodes without work, as in `Findings`."""
        return self.learning.findings.idle

    @property
    def workless(self) -> tuple[int, ...]:
        """The members without work, except those that are or were slow, and those that leave."""
        others = {*self.plan.nodes, *self.speeds, *self.idle, *self.membership.leaving}
        return tuple(node for node in self.nodes if node not in others)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of all members, with work or without."""
        return self.ranks_of(self.nodes)

    @property
    def is_training(self) -> bool:
        """Whether the job trains by its plan, and nothing else is under way."""
        is_busy = self.change is not None or self.commits.ends or self.stop.is_requested
        return self.phase is Phase.TRAINING and self.facts.is_entered and not is_busy

    @property
    def is_forking(self) -> bool:
        """Whether a member's worker crashed and the one forked in its place has yet to report."""
        crashed = {crash.node for crash in self.troubles.crashes}.intersection(self.nodes)
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

    def has_all_ranks(self, facts: Mapping[int, object]) -> bool:
        """Whether every rank of the members has an entry; see `has_all`."""
        num_ranks = len(self.nodes) * self.devices_per_node
        return len(facts) >= num_ranks and all(rank in facts for rank in self.ranks)

    def ranks_of(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """All ranks of these nodes."""
        per_node = self.devices_per_node
        if per_node == 1:  # So it is faster.
            return tuple(nodes)
        return tuple([node * per_node + device for node in nodes for device in range(per_node)])

    def kind_of(self, node: int) -> NodeKind:
        """The node's kind, by the speed that it is seen to have, or that its machine has."""
        candidate = self.membership.candidates.get(node)
        speed = self.speeds.get(node, candidate.speed if candidate else 1.0)
        return PROFILED_KIND if speed == 1.0 else NodeKind(speed)

    @property
    def devices_per_node(self) -> int:
        return self.plan.devices_per_node


Step = tuple[JobState, tuple[Command, ...]]
