"""The decisions of an agent; nodes/agent.py carries them out.

An agent keeps what its workers have reported, as long as a coordinator may need it: `facts`, the
newest one of each kind. It repeats them to a restarted coordinator. A repeated notice names the
time that is left, because the new coordinator does not know when the notice came. The agent obeys
only the newest term and epoch, and ends its node when the node is no longer a member.

Source: docs/protocol.md, "Epochs fence" and "The coordinator".
"""

import math
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
    HeartbeatRequested,
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
        is_elsewhere: whether the coordinator is on another machine, so that an old one may still be
            reached.
        term: term of the newest coordinator heard; -1: none.
        epoch: the epoch that `abort` announces; -1: none.
        abort: the newest order to leave an epoch.
        facts: reports that a new coordinator needs, by kind, rank and iteration, oldest first.
        gone_s: earliest time by the node's clock at which a notice says that the node is gone;
            infinity: there was none.
    """

    node: int
    is_elsewhere: bool = False
    term: int = -1
    epoch: int = -1
    abort: Abort | None = None
    facts: Mapping[Key, Fact] = field(default_factory=dict)
    gone_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Consequence:
    """Consequence of a message from the coordinator.

    Attributes:
        forwards: the agent must pass the message on to the workers.
        leaves: reason why the agent must leave this coordinator and look for another; "": it must
            not.
        ends: reason why the node must end itself; "": it must not.
    """

    state: AgentState
    forwards: bool = False
    leaves: str = ""
    ends: str = ""


def on_report(state: AgentState, message: Fact, now_s: float) -> AgentState:
    """The state after a report of a worker, or of the agent about a worker."""
    iteration = 0
    match message:
        case SaveFailed(is_skipped=True):  # The report before it is more useful.
            return state
        case IterationDone() | LayersSaved() | SaveFailed():
            iteration = message.iteration
        case WorkerReady() | Stopped() | EpochReady() | WorkerExited() | WorkerFailed():
            pass
        case CopiesFailed() | CopySpoilt():
            pass
        case NoticeTaken() if message.reason:
            pass
        case NoticeTaken():
            state = replace(state, gone_s=min(state.gone_s, now_s + message.after_s))
        case Corrupted() | NodeArrived() | PeerUnreachable():
            pass
    key = (type(message).__name__, message.rank, iteration)
    # Forget that an ended worker was ready: a new coordinator that heard it would take the end of
    # the next worker for this one's.
    over = ("WorkerReady", message.rank, 0) if isinstance(message, WorkerExited) else key
    facts = {other: fact for other, fact in state.facts.items() if other not in (key, over)}
    return replace(state, facts={**facts, key: message})


def repeated_reports(state: AgentState, now_s: float) -> tuple[Fact, ...]:
    """The reports to repeat to a coordinator on a new connection, oldest first."""
    return tuple(
        msgspec.structs.replace(fact, after_s=max(0.0, state.gone_s - now_s))
        if isinstance(fact, NoticeTaken) and not fact.reason
        else fact
        for fact in state.facts.values()
    )


def on_coordinator_message(state: AgentState, message: ToNode) -> Consequence:
    """The consequence of a message from the coordinator."""
    match message:
        case Welcome():
            if message.term < state.term:
                reason = f"a coordinator of term {message.term} is out of date"
                leaves, ends = (reason, "") if state.is_elsewhere else ("", reason)
                return Consequence(state, leaves=leaves, ends=ends)
            return Consequence(replace(state, term=message.term))
        case Acknowledged():
            return Consequence(_without_acknowledged(state, message.num_committed))
        case Abort() if message.epoch < state.epoch:
            return Consequence(state)
        case Abort():
            if state.node not in message.nodes:
                return Consequence(state, ends=f"it is no member of epoch {message.epoch}")
            facts = state.facts
            if message.epoch > state.epoch:  # Else a repeated order, which ends no fact.
                facts = {key: f for key, f in facts.items() if not _is_over(f, message.epoch)}
            return Consequence(
                replace(state, epoch=message.epoch, abort=message, facts=facts), forwards=True
            )
        case HeartbeatTaken() | HeartbeatRequested():
            return Consequence(state)
        case StartEpoch():
            return Consequence(_without_succeeded(state, message), forwards=True)
        case SaveLayers() | StopRequested() | Shutdown():
            return Consequence(state, forwards=True)


def _without_succeeded(state: AgentState, order: StartEpoch) -> AgentState:
    """The state without the ends of workers whose successors the order names.

    Whoever gave the order has dealt with them. To drop them at an Abort would not do: a worker that
    makes way for another ends after that Abort, and none answers the end of a candidate's worker.
    """
    named = {
        fact.rank
        for fact in state.facts.values()
        if isinstance(fact, WorkerReady)
        and order.addresses.get(fact.rank) == (fact.host, fact.port)
    }
    facts = {
        key: fact
        for key, fact in state.facts.items()
        if not isinstance(fact, WorkerExited) or fact.rank not in named
    }
    return replace(state, facts=facts)


def _without_acknowledged(state: AgentState, num_committed: int) -> AgentState:
    facts = {
        key: fact
        for key, fact in state.facts.items()
        if not isinstance(fact, IterationDone) or fact.iteration >= num_committed
    }
    # Keep reports of the newest two saves: a save rarely takes longer than an iteration.
    saves = sorted({f.iteration for f in facts.values() if isinstance(f, LayersSaved | SaveFailed)})
    facts = {
        key: fact
        for key, fact in facts.items()
        if not isinstance(fact, LayersSaved | SaveFailed) or fact.iteration in saves[-2:]
    }
    return replace(state, facts=facts)


def successor_order(state: AgentState, rank: int, pid: int) -> Abort | None:
    """The order that the worker replacing process `pid` must answer; None if there is none.

    It is the newest Abort, if that names the process as replaced: such a process does not answer.
    """
    abort = state.abort
    return abort if abort is not None and abort.replaced.get(rank) == pid else None


def _is_over(fact: Fact, epoch: int) -> bool:
    """Whether nobody needs a fact any more once an epoch begins."""
    if isinstance(fact, WorkerExited):
        return True  # The epoch is the answer to it.
    if isinstance(fact, WorkerFailed):  # Keep one that ends the job.
        return fact.blame != "job" and fact.epoch < epoch
    of_an_epoch = Stopped | EpochReady | Corrupted | PeerUnreachable | CopySpoilt | CopiesFailed
    return isinstance(fact, of_an_epoch) and fact.epoch < epoch
