"""Simulates a recovery with thousands of nodes: real decisions, modelled time.

The coordinator is real, with its records on disk; so are the plans, the frames, and what a worker
computes when it begins an epoch. Only the nodes are missing. Time is added up, phase after phase:

    detect     A connection closes. The coordinator handles that, records the members that are left
               and tells them. Each answers, and it handles the answers one after the other.
    decide     It decides after the last answer, records the decision, and encodes the plan.
    regroup    It sends the plan to all, limited by the bandwidth of its link. A worker decodes the
               plan (after its agent), computes its schedule, and makes the links that it lacks.
               The coordinator handles a message of each worker that it is ready.

The code that runs here is timed. The rest is the cost from costs.py times the number of messages or
links. A worker that is told to leave first ends its current action; among thousands of workers one
has just begun the longest action.
"""

import asyncio
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from growth.costs import Costs
from planaria.coordinator.commands import CheckSave, Discard, Publish
from planaria.coordinator.contact import HeadContact
from planaria.coordinator.job_rules import Rules
from planaria.coordinator.leadership import Leadership, Queued
from planaria.coordinator.step import Event
from planaria.core.messages import (
    Abort,
    EpochReady,
    IterationDone,
    Message,
    NodeArrived,
    NodeLost,
    StartEpoch,
    Stopped,
    ToNode,
    WorkerReady,
)
from planaria.core.plan import Plan
from planaria.core.records import ToLauncher
from planaria.engine.iteration.groups import iteration_peers
from planaria.nodes.head.journal import open_store
from planaria.schedule.lower import rank_schedule
from planaria.store.logbook import open_logbook
from planaria.transport.frames import FrameDecoder, frame, order_of

_LEASE_S: Final = 3600.0
_Result = TypeVar("_Result")
_Order = TypeVar("_Order", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Seconds of the phases of a recovery, without transfers."""

    detect_s: float
    decide_s: float
    regroup_s: float

    @property
    def total_s(self) -> float:
        return self.detect_s + self.decide_s + self.regroup_s


@dataclass(slots=True)
class _Line:
    """Connection of an agent that never answers.

    Attributes:
        told: messages that the coordinator sent.
        counts: whether messages are kept; one agent is enough, because all hear the same.
    """

    told: list[ToNode]
    counts: bool

    def tell(self, message: ToNode) -> None:
        if self.counts:
            self.told.append(message)

    def close(self) -> None:
        pass


@dataclass(slots=True)
class _Effects:
    queued: list[Queued] = field(default_factory=list)

    def queue(self, event: Queued) -> None:
        self.queued.append(event)

    def notify(self, message: ToLauncher) -> None:
        pass

    def carry_out(self, command: Publish | Discard | CheckSave) -> None:
        pass

    def on_place_reached(self, place: str, iteration: int) -> None:
        pass


def simulated_recovery(
    rules: Rules, plan: Plan, *, lost: int, action_s: float, costs: Costs
) -> Phases:
    """Phases of a recovery from the loss of one node of the plan.

    Args:
        lost: node that is lost.
        action_s: seconds of the longest action of a worker.
    """
    gc.freeze()  # As in a real coordinator, which is forked from a server with all imports done.
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(_Recovery(rules, plan, action_s, costs).run(Path(directory), lost))


class _Recovery:
    def __init__(self, rules: Rules, plan: Plan, action_s: float, costs: Costs) -> None:
        self._rules = rules
        self._plan = plan
        self._action_s = action_s
        self._costs = costs
        self._told: list[ToNode] = []
        self._effects = _Effects()

    async def run(self, directory: Path, lost: int) -> Phases:
        async with open_store(directory, now_s=time.monotonic) as store:
            logbook = await open_logbook(store, "growth", lease_s=_LEASE_S)
            contact = HeadContact(lease_s=_LEASE_S, patience_s=0.0, now_s=time.monotonic)
            self._leadership = Leadership[_Line](
                self._rules, logbook, self._effects, contact=contact
            )
            await self._begin()
            return await self._recover(lost)

    async def _begin(self) -> None:
        """Brings the job to the end of its first iteration."""
        plan = self._plan
        await self._leadership.restore(plan, predicted_s=1.0, now_s=time.monotonic())
        for node in plan.nodes:
            await self._leadership.admit(node, _Line(self._told, counts=node == plan.nodes[0]))
        await self._take([NodeArrived(node=n, rank=n, machine=str(n)) for n in plan.nodes])
        await self._take([_worker(node) for node in plan.nodes])
        await self._take([_ready(rank, 0) for rank in plan.all_ranks])
        await self._take([_done(rank) for rank in plan.all_ranks])
        assert self._leadership.state.commits.next_iteration == 1

    async def _recover(self, lost: int) -> Phases:
        costs, plan = self._costs, self._plan
        held = plan.held_by_rank
        left = [node for node in plan.nodes if node != lost]
        num = len(left)

        recording_s = await self._take([NodeLost(node=lost, reason="its connection closed")])
        abort, encoding_s, _ = _framed(self._newest(Abort))
        answers = [
            Stopped(
                rank=rank,
                epoch=abort.epoch,
                ages=dict.fromkeys(held[rank], 1),
                complete=(),
                hashes=dict.fromkeys(held[rank], 1 << 60),
            )
            for rank in left
        ]
        answering_s = await self._take(answers[:-1]) + num * costs.receive_s
        # Answers that arrive while it still tells others wait.
        telling_s = encoding_s + num * costs.send_s
        detect_s = (
            costs.hop_s
            + recording_s
            + max(telling_s + answering_s, telling_s + 2.0 * costs.hop_s + self._action_s)
        )
        decide_s = await self._take(answers[-1:])
        order, encoding_s, data = _framed(self._newest(StartEpoch))
        decide_s += encoding_s

        link = self._rules.prices.links["inter_node"]
        sending_s = num * max(costs.send_s, len(data) / link.bandwidth_bytes_per_s)
        begun_s, peers = max(self._begun(order, data, rank) for rank in self._samples(order.plan))
        readiness_s = await self._take([_ready(rank, order.epoch) for rank in order.plan.all_ranks])
        regroup_s = sending_s + 2.0 * costs.hop_s + begun_s + peers * costs.link_s
        regroup_s += readiness_s + num * costs.receive_s
        return Phases(detect_s=detect_s, decide_s=decide_s, regroup_s=regroup_s)

    def _samples(self, after: Plan) -> Sequence[int]:
        """Ranks to time: up to four whose layers change, which need most links, and the first."""
        before = self._plan.held_by_rank
        changed = [r for r, layers in after.held_by_rank.items() if before.get(r) != layers]
        return (*changed[:3], *changed[-1:], after.all_ranks[0])

    def _begun(self, order: StartEpoch, data: bytes, rank: int) -> tuple[float, int]:
        """Seconds that agent and worker compute when the order arrives, and number of new links."""
        (body,) = FrameDecoder().feed(data)
        heard_s, _ = _timed(lambda: FrameDecoder().feed(data))
        decoding_s, _ = _timed(lambda: order_of(body))
        encoding_s, _ = _timed(lambda: frame(order))
        own_s, schedule = _timed(lambda: rank_schedule(order.plan, rank))
        peers_s, peers = _timed(lambda: iteration_peers(schedule, rank, order.plan.all_ranks))
        old = rank_schedule(self._plan, rank)
        known = iteration_peers(old, rank, self._plan.all_ranks)
        seconds = 2.0 * (heard_s + decoding_s) + encoding_s + own_s + peers_s
        return seconds, len(peers - known)

    async def _take(self, events: Sequence[Event]) -> float:
        """Seconds in which the coordinator handles events, and those that it queues for itself."""
        begin_s = time.perf_counter()
        for event in events:
            await self._leadership.handle(event, time.monotonic())
            while self._effects.queued:
                await self._leadership.handle(self._effects.queued.pop(0), time.monotonic())
        return time.perf_counter() - begin_s

    def _newest(self, kind: type[_Order]) -> _Order:
        return next(message for message in reversed(self._told) if isinstance(message, kind))


def _timed(call: Callable[[], _Result]) -> tuple[float, _Result]:
    begin_s = time.perf_counter()
    result = call()
    return time.perf_counter() - begin_s, result


def _framed(message: _Order) -> tuple[_Order, float, bytes]:
    """The message after a round trip, the seconds to encode it, and its frame."""
    seconds, data = _timed(lambda: frame(message))
    (body,) = FrameDecoder().feed(data)
    return msgspec.json.decode(body, type=type(message)), seconds, data


def _worker(node: int) -> WorkerReady:
    return WorkerReady(
        node=node, rank=node, pid=node, pid_start=0.0, host="10.0.0.1", port=10_000 + node
    )


def _ready(rank: int, epoch: int) -> EpochReady:
    return EpochReady(rank=rank, epoch=epoch, layers_materialised=1)


def _done(rank: int) -> IterationDone:
    return IterationDone(
        rank=rank,
        epoch=0,
        iteration=0,
        loss=1.0,
        num_samples=1,
        sample_digest="",
        seconds=1.0,
        stall_s=0.0,
        peak_bytes=0,
        ends=False,
    )
