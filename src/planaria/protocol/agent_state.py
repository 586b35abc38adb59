"""What an agent decides; nodes/agent.py acts on it.

An agent remembers what its workers have said until nobody asks for it any more, and says it again
to a coordinator that was restarted: `facts`, the newest of each kind. Of a notice it says what is
left, for such a coordinator has not heard when it came. It obeys the newest term
and epoch only, and takes its node for lost when it is not among the members any more.

Source: DESIGN 5 (epochs fence) and 6 (Coordination).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from planaria.core.messages import (
    Abort,
    Acknowledged,
    CopiesFailed,
    CopySpoilt,
    Corrupted,
    EpochReady,
    Fact,
    HeartbeatTaken,
    IterationDone,
    LayersSaved,
    NodeArrived,
    NoticeTaken,
    PeerUnreachable,
    SaveFailed,
    SaveLayers,
    Shutdown,
    StartEpoch,
    Stopped,
    StopRequested,
    ToNode,
    Welcome,
    WorkerExited,
    WorkerFailed,
    WorkerReady,
)

Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """What an agent knows.

    Attributes:
        term: of the newest coordinator heard.
        abort: the newest order to leave an epoch.
        epoch: the newest of which an order came.
        facts: what a new coordinator has to be told, by kind, rank and iteration, oldest first.
        noticed_s: by the node's clock when it was first told that it will be taken away, 0 if it
            was not.
    """

    node: int
    term: int = -1
    epoch: int = -1
    abort: Abort | None = None
    facts: Mapping[Key, Fact] = field(default_factory=dict)
    noticed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Heard:
    """What follows from a message of the coordinator.

    Attributes:
        forwards: the workers are to get it too.
        ends: why the node is to end itself, "" if it is not.
    """

    state: AgentState
    forwards: bool = False
    ends: str = ""


def said(state: AgentState, message: Fact, now_s: float) -> AgentState:
    """The state after a worker, or the agent of one, has said something."""
    iteration = 0
    match message:
        case SaveFailed(is_skipped=True):  # What came before it is of more use to a coordinator.
            return state
        case IterationDone() | LayersSaved() | SaveFailed():
            iteration = message.iteration
        case WorkerReady() | Stopped() | EpochReady() | WorkerExited() | WorkerFailed():
            pass
        case CopiesFailed() | CopySpoilt():
            pass
        case NoticeTaken():
            state = replace(state, noticed_s=state.noticed_s or now_s)
        case Corrupted() | NodeArrived() | PeerUnreachable():
            pass
    key = (type(message).__name__, message.rank, iteration)
    # A new coordinator that is told of a worker that has ended would take the end of its successor
    # for old news.
    over = ("WorkerReady", message.rank, 0) if isinstance(message, WorkerExited) else key
    facts = {other: fact for other, fact in state.facts.items() if other not in (key, over)}
    return replace(state, facts={**facts, key: message})


def said_again(state: AgentState, now_s: float) -> tuple[Fact, ...]:
    """What a coordinator is told on a new connection, oldest first."""
    ago_s = now_s - state.noticed_s
    return tuple(
        msgspec.structs.replace(fact, after_s=max(0.0, fact.after_s - ago_s))
        if isinstance(fact, NoticeTaken)
        else fact
        for fact in state.facts.values()
    )


def heard(state: AgentState, message: ToNode) -> Heard:
    """What follows from what the coordinator says."""
    match message:
        case Welcome():
            if message.term < state.term:
                return Heard(state, ends=f"a coordinator of term {message.term} is out of date")
            return Heard(replace(state, term=message.term))
        case Acknowledged():
            return Heard(_acknowledged(state, message.num_committed))
        case Abort() if message.epoch < state.epoch:
            return Heard(state)
        case Abort():
            if state.node not in message.nodes:
                return Heard(state, ends=f"it is no member of epoch {message.epoch}")
            facts = state.facts
            if message.epoch > state.epoch:  # Else it is told again, and answers nothing.
                facts = {key: f for key, f in facts.items() if not _is_over(f, message.epoch)}
            return Heard(
                replace(state, epoch=message.epoch, abort=message, facts=facts), forwards=True
            )
        case HeartbeatTaken():
            return Heard(state)
        case StartEpoch() | SaveLayers() | StopRequested() | Shutdown():
            return Heard(state, forwards=True)


def _acknowledged(state: AgentState, num_committed: int) -> AgentState:
    facts = {
        key: fact
        for key, fact in state.facts.items()
        if not isinstance(fact, IterationDone) or fact.iteration >= num_committed
    }
    # Of a save the newest two are kept: it takes as long as an iteration, rarely longer.
    saves = sorted({f.iteration for f in facts.values() if isinstance(f, LayersSaved | SaveFailed)})
    facts = {
        key: fact
        for key, fact in facts.items()
        if not isinstance(fact, LayersSaved | SaveFailed) or fact.iteration in saves[-2:]
    }
    return replace(state, facts=facts)


def successor_order(state: AgentState, rank: int, pid: int) -> Abort | None:
    """What a worker is told that takes the place of a process that has ended: what that one was not
    to answer itself."""
    abort = state.abort
    return abort if abort is not None and abort.replaced.get(rank) == pid else None


def _is_over(fact: Fact, epoch: int) -> bool:
    """Whether an epoch that begins makes a fact worthless."""
    if isinstance(fact, WorkerExited):
        return True  # It was answered by this very epoch.
    if isinstance(fact, WorkerFailed):  # Of one that ends the job every coordinator has to know.
        return fact.blame != "job" and fact.epoch < epoch
    told = Stopped | EpochReady | Corrupted | PeerUnreachable | CopySpoilt | CopiesFailed
    return isinstance(fact, told) and fact.epoch < epoch
