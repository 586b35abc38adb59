"""A modelled node: real code makes the agent's decisions; its processes and sockets are simulated.

Source: nodes/agent.py; the steps come in the same order.
"""

from collections.abc import Callable
from random import Random
from typing import Literal, Protocol

from planaria.core.messages import (
    Blame,
    Fact,
    Heartbeat,
    HeartbeatTaken,
    NodeArrived,
    NoticeTaken,
    Raised,
    Shutdown,
    ToNode,
    WorkerExited,
)
from planaria.protocol.agent_lease import (
    TICKS_PER_LEASE,
    AgentLease,
    first_lease,
    is_given_up,
    renewed,
    ticked,
    unconnected,
    watches_workers,
)
from planaria.protocol.agent_state import (
    AgentState,
    heard,
    said,
    said_again,
    successor_order,
)
from planaria.simulator.loop import Loop, Process, Waiting
from planaria.simulator.modelled.copying import CopyMemory
from planaria.simulator.modelled.links import SimulatedLinks
from planaria.simulator.modelled.worker import SimulatedWorker, Surroundings
from planaria.simulator.network import End, Network
from planaria.simulator.scenario import LEASE_S, PlannedJob

_RECONNECT_S = 0.02
_STARTUP_S = 0.05
_LEAVES_S = 0.3  # Time from a shutdown to the node's end, in which workers finish writing.
KILLED = -9
UNANSWERED = "its lease ran out, unanswered"
ANYWHERE = "anywhere"  # A worker's code may raise at any of its places: start, layers, step.


class World(Surroundings, Protocol):
    """The surroundings of a node."""

    loop: Loop
    rng: Random
    network: Network
    job: PlannedJob

    def door(self, agent: "SimulatedAgent") -> End | None:
        """A new connection to the coordinator; None while no coordinator accepts any."""

    def listener(self, port: int) -> SimulatedLinks | None:
        """The links of the worker that listens at a port; None: nobody does."""

    def happened(self, what: str, *facts: object) -> None:
        """Adds an entry to the log."""


def machine_of(node: int) -> str:
    """The machine of a node; there are only two, so that machines fail more than once."""
    return f"machine {node % 2}"


class SimulatedAgent:
    """An agent and the workers of its node.

    Attributes:
        workers: present workers, by device.
        memories: memories of the copies that ranks keep, by device; they outlive workers.
        state: knowledge of the agent.
        left: why the agent ended itself; "": it did not.
        left_s: time at which it did; -1: it did not.
        raising_until_s: end of the time in which the code in its workers raises because of this
            node.
        raising: (party at fault, place of a worker at which its code raises).
        mistaken_at: place at which a worker raises once for a mistake in the job's code; "": none.
    """

    def __init__(
        self,
        world: World,
        node: int,
        *,
        rate: float,
        failed: Callable[[BaseException], None],
        ended: Callable[["SimulatedAgent"], None],
    ) -> None:
        self.node = node
        self.left, self.left_s = "", -1.0
        self.raising_until_s = -1.0
        self.raising: tuple[Blame, str] = ("node", "layers")
        self.mistaken_at = ""
        self.state = AgentState(node=node)
        self.workers: list[SimulatedWorker] = []
        num_devices = world.job.scenario.devices_per_node
        self.memories = tuple(CopyMemory() for _ in range(num_devices))
        self._world = world
        self._rate = rate
        self._failed = failed
        self._num_forked = 0
        self._lines: list[End] = []
        self._to_coordinator: End | None = None
        self._is_shut_down = False
        self.process = Process(world.loop, f"agent {node}", place=node, failed=failed, rate=rate)
        self.process.at_exit(lambda: ended(self))
        self._lease: AgentLease = first_lease(LEASE_S, self.process.now_s)
        for device in range(world.job.scenario.devices_per_node):
            self.workers.append(self._forked(device))
            self._lines.append(self._joined(device))
        rank = node * world.job.scenario.devices_per_node
        self._say(NodeArrived(node=node, rank=rank, machine=machine_of(node)))
        self.process.spawn(self._serve())
        self.process.spawn(self._tick())

    def kill(self) -> None:
        """Kills the agent and all workers."""
        self.process.kill()
        for worker in self.workers:
            worker.process.kill()

    def notice(self, after_s: float) -> None:
        """Gives the node a preemption notice: it will be gone after `after_s`."""
        rank = self.node * self._world.job.scenario.devices_per_node
        self.process.do(lambda: self._say(NoticeTaken(node=self.node, rank=rank, after_s=after_s)))

    def mistake(self, place: str) -> None:
        """Has the code in one of the workers raise once at a place, for a mistake in the job's
        code."""
        self.mistaken_at = place

    def raise_for(self, lasts_s: float, blame: Blame, place: str) -> None:
        """Has the code in the workers raise for a while at a place."""
        self.raising_until_s = self._world.loop.now_s + lasts_s
        self.raising = blame, place

    def break_workers(self, *, device: int) -> None:
        """Kills one worker; the node lives on."""
        self.workers[device].process.kill()

    # -- the coordinator --------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Connects to the coordinator again and again and serves each connection until it ends."""
        while not self._is_shut_down:
            await self.process.sleep(self._world.network.latency_s() + _RECONNECT_S)
            end = self._world.door(self)
            if end is None:
                continue
            over: Waiting[None] = Waiting()
            end.received = self._hear

            def closed(over: Waiting[None] = over) -> None:
                over.resolve(None)

            end.closed = closed
            for fact in said_again(self.state, self.process.now_s):
                end.send(fact)
            self._to_coordinator = end
            self._beat()
            await over
            self._to_coordinator = None
            self._beat()

    def _hear(self, message: ToNode) -> None:
        result = heard(self.state, message)
        self.state = result.state
        if result.ends:
            self._leave(result.ends)
            return
        if isinstance(message, HeartbeatTaken):
            self._lease = renewed(self._lease, message.sent_s)
        if result.forwards:
            for line in self._lines:
                line.send(message)
        if isinstance(message, Shutdown):
            self._is_shut_down = True
            self.process.after(_LEAVES_S, self.kill)

    def _say(self, message: Fact) -> None:
        self.state = said(self.state, message, self.process.now_s)
        if self._to_coordinator is not None:
            self._to_coordinator.send(message)

    def _leave(self, reason: str) -> None:
        self._world.happened("leaves", self.node, reason)
        self.left, self.left_s = reason, self._world.loop.now_s
        self.kill()

    # -- the lease and the workers ----------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await self.process.sleep(LEASE_S / TICKS_PER_LEASE)
            now_s = self.process.now_s
            self._lease = ticked(self._lease, now_s)
            self._beat()
            if watches_workers(self._lease, now_s):
                for worker in self.workers:
                    stopped_s = worker.process.stopped_s
                    if stopped_s >= 0.0 and now_s - stopped_s > LEASE_S:
                        self._world.happened("stalled", worker.rank)
                        worker.process.kill()

    def _beat(self) -> None:
        now_s = self.process.now_s
        if self._to_coordinator is None:
            self._lease = unconnected(self._lease, now_s)
            return
        self._to_coordinator.send(Heartbeat(node=self.node, sent_s=now_s))
        if is_given_up(self._lease, now_s):
            self._leave(UNANSWERED)

    def _forked(self, device: int) -> SimulatedWorker:
        self._num_forked += 1
        rank = self.node * self._world.job.scenario.devices_per_node + device
        port = pid = rank + 1000 * self._num_forked
        name = f"worker {rank}.{self._num_forked}"
        process = Process(
            self._world.loop, name, place=self.node, failed=self._failed, rate=self._rate
        )
        links = SimulatedLinks(
            process,
            rank,
            ("host", port),
            network=self._world.network,
            find=self._world.listener,
        )
        return SimulatedWorker(
            process,
            links,
            self._world,
            node=self.node,
            rank=rank,
            pid=pid,
            startup_s=_STARTUP_S * (1.0 + 4.0 * self._world.rng.random()),
            memory=self.memories[device],
            may_write=self._is_member,
            raises=self._raises,
        )

    def _raises(self, place: str) -> Blame | Literal[""]:
        """Whose fault it is that the code in a worker raises now; "": it does not raise."""
        if self.mistaken_at in (place, ANYWHERE) and self.mistaken_at:
            self.mistaken_at = ""
            return "job"
        blame, where = self.raising
        is_there = where in (place, ANYWHERE)
        return blame if is_there and self._world.loop.now_s < self.raising_until_s else ""

    def _joined(self, device: int) -> End:
        """Starts a worker; returns this agent's end of the connection to it."""
        worker = self.workers[device]
        mine, theirs = self._world.network.pair(self.process, worker.process)
        mine.received = self._say
        mine.closed = lambda: self._worker_ended(device, worker)
        theirs.received = worker.hear
        theirs.closed = worker.process.kill
        worker.line = theirs
        worker.process.spawn(worker.run())
        return mine

    def _worker_ended(self, device: int, worker: SimulatedWorker) -> None:
        """Replaces a worker that has ended, before the coordinator hears of it: so the new one is
        there when orders follow."""
        if self._is_shut_down:
            return
        was_stalled = worker.process.stopped_s >= 0.0
        first_layer, end_layer = worker.pulse.layers
        if not worker.is_leaving:
            error = "stall" if was_stalled else "SIGKILL"
            raised = Raised(error=error, first_layer=first_layer, end_layer=end_layer)
            self._world.crashed(self.node, "node", raised)
        self._lines[device].close()
        self.workers[device] = self._forked(device)
        self._lines[device] = self._joined(device)
        if order := successor_order(self.state, worker.rank, worker.pid):
            self._lines[device].send(order)
        self._say(
            WorkerExited(
                node=self.node,
                rank=worker.rank,
                pid=worker.pid,
                status=KILLED,
                stalled=was_stalled,
                layers=worker.pulse.layers,
            )
        )

    def _is_member(self) -> bool:
        return self.process.now_s < self._lease.end_s
