"""A modelled node: real code makes the agent's decisions; its processes and sockets are simulated.

Source: nodes/agent.py; the steps come in the same order.
"""

from collections.abc import Callable
from random import Random
from typing import Literal, Protocol

from planaria.core.clock_offsets import ClockOffset
from planaria.core.messages import (
    Blame,
    Fact,
    Heartbeat,
    HeartbeatRequested,
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
    can_judge_workers,
    connected_lease,
    first_lease,
    is_given_up,
    is_silent,
    lease_after_contact,
    lease_after_tick,
    offset_after,
    reconnect_s,
    refused_lease,
    renewed_lease,
    unconnected_lease,
)
from planaria.protocol.agent_state import (
    AgentState,
    on_coordinator_message,
    on_report,
    repeated_reports,
    successor_order,
)
from planaria.simulator.loop import Future, Loop, Process
from planaria.simulator.modelled.copying import CopyMemory
from planaria.simulator.modelled.links import SimulatedLinks
from planaria.simulator.modelled.worker import SimulatedWorker, WorkerSpec, WorkerSurroundings
from planaria.simulator.network import Endpoint, Network
from planaria.simulator.scenario import LEASE_S, PlannedJob, Scenario

_STARTUP_S = 0.05
_LEAVE_S = 0.3  # Time from a shutdown to the node's end, in which workers finish writing.
KILLED = -9
UNANSWERED = "its lease ran out, unanswered"
ANY_PLACE = "anywhere"  # A worker's code may raise at any of its places: start, layers, step.


class AgentSurroundings(WorkerSurroundings, Protocol):
    """The surroundings of a node."""

    loop: Loop
    rng: Random
    network: Network
    job: PlannedJob

    def coordinator_connection(self, agent: "SimulatedAgent") -> Endpoint | None:
        """A new connection to the coordinator; None while no coordinator accepts any."""

    def links_at(self, port: int) -> SimulatedLinks | None:
        """The links of the worker that listens at a port; None: nobody does."""

    def log_event(self, what: str, *facts: object) -> None:
        """Adds an entry to the log."""


def machine_of(node: int, *, num_machines: int) -> str:
    """The machine of a node."""
    return f"machine {node % num_machines}"


def port_step(scenario: Scenario) -> int:
    """The step from the port and pid of a rank's process to those of the one that replaces it.

    The first process of rank r has this plus r. It is as small as it can be, for the time that a
    record takes grows with its bytes, and each number of a run's log with it.
    """
    return 1000 if scenario.max_nodes * scenario.devices_per_node < 500 else 100_000


class SimulatedAgent:
    """An agent and the workers of its node.

    Attributes:
        workers: present workers, by device.
        memories: memories of the copies that ranks keep, by device; they outlive workers.
        state: knowledge of the agent.
        end_reason: why the agent ended itself; "": it did not.
        ended_s: time at which it did; -1: it did not.
        code_error_until_s: end of the time in which the code in its workers raises because of this
            node.
        code_error: (party at fault, place of a worker at which its code raises).
        mistake_place: place at which a worker raises once for a mistake in the job's code; "": no
            worker does.
    """

    def __init__(
        self,
        surroundings: AgentSurroundings,
        node: int,
        *,
        rate: float,
        on_error: Callable[[BaseException], None],
        on_exit: Callable[["SimulatedAgent"], None],
    ) -> None:
        self.node = node
        self.end_reason, self.ended_s = "", -1.0
        self.code_error_until_s = -1.0
        self.code_error: tuple[Blame, str] = ("node", "layers")
        self.mistake_place = ""
        self.state = AgentState(node=node, is_elsewhere=surroundings.job.scenario.patience_s > 0.0)
        self.workers: list[SimulatedWorker] = []
        num_devices = surroundings.job.scenario.devices_per_node
        self.memories = tuple(CopyMemory() for _ in range(num_devices))
        self._surroundings = surroundings
        self._rate = rate
        self._failed = on_error
        self._num_forked = 0
        self._worker_ends: list[Endpoint] = []
        self._to_coordinator: Endpoint | None = None
        self._closed: Future[None]
        self._silent_ends: list[Endpoint] = []
        self._is_shut_down = self._is_leaving = False
        self._offset: ClockOffset | None = None
        self.process = Process(
            surroundings.loop, f"agent {node}", place=node, on_error=on_error, rate=rate
        )
        self.process.at_exit(lambda: on_exit(self))
        patience_s = surroundings.job.scenario.patience_s
        self._lease: AgentLease = first_lease(LEASE_S, self.process.now_s, patience_s=patience_s)
        for device in range(surroundings.job.scenario.devices_per_node):
            self.workers.append(self._fork_worker(device))
            self._worker_ends.append(self._start_worker(device))
        rank = node * surroundings.job.scenario.devices_per_node
        machine = machine_of(node, num_machines=surroundings.job.scenario.num_machines)
        self._report(NodeArrived(node=node, rank=rank, machine=machine))
        self.process.spawn(self._serve())
        self.process.spawn(self._run_ticks())

    def kill(self) -> None:
        """Kills the agent and all workers."""
        self.process.kill()
        for worker in self.workers:
            worker.process.kill()

    def give_notice(self, after_s: float) -> None:
        """Gives the node a preemption notice: it will be gone after `after_s`."""
        rank = self.node * self._surroundings.job.scenario.devices_per_node

        def take() -> None:
            self._is_leaving = True
            self._report(NoticeTaken(node=self.node, rank=rank, after_s=after_s))

        self.process.call(take)

    def raise_once(self, place: str) -> None:
        """Has the code in one of the workers raise once at a place, for a mistake in the job's
        code."""
        self.mistake_place = place

    def raise_for(self, duration_s: float, blame: Blame, place: str) -> None:
        """Has the code in the workers raise for a while at a place."""
        self.code_error_until_s = self._surroundings.loop.now_s + duration_s
        self.code_error = blame, place

    # -- the coordinator --------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Connects to the coordinator again and again and serves each connection until it ends."""
        since_s = self.process.now_s
        while not self._is_shut_down:
            lost_s = self.process.now_s - since_s
            pause_s = reconnect_s(LEASE_S, lost_s=lost_s, is_refused=False)
            await self.process.sleep(self._surroundings.network.latency_s() + pause_s)
            end = self._surroundings.coordinator_connection(self)
            if end is None:
                continue
            closed = self._closed = Future()
            end.on_message = self._on_message

            def resolve(closed: Future[None] = closed) -> None:
                closed.resolve(None)

            end.on_close = resolve
            for fact in repeated_reports(self.state, self.process.now_s):
                end.send(fact)
            self._to_coordinator = end
            self._offset = None
            self._lease = connected_lease(self._lease, self.process.now_s)
            self._send_heartbeat()
            await closed
            since_s = self.process.now_s
            self._to_coordinator = None
            self._send_heartbeat()

    def _leave_silent(self, end: Endpoint) -> None:
        """Leaves a connection over which nothing comes; it stays open until another is answered."""
        end.on_message, end.on_close = _ignore, _ignore
        self._silent_ends.append(end)
        self._closed.resolve(None)

    def _on_message(self, message: ToNode) -> None:
        now_s, offset = self.process.now_s, self._offset
        self._lease = lease_after_contact(self._lease, now_s)
        self._offset = offset_after(offset, message, now_s)
        result = on_coordinator_message(self.state, message)
        self.state = result.state
        if result.leaves and self._to_coordinator is not None:
            self._lease = refused_lease(self._lease)
            self._to_coordinator.close()
            self._closed.resolve(None)
            return
        if result.ends:
            self._end_node(result.ends)
            return
        if isinstance(message, HeartbeatTaken):
            self._lease = renewed_lease(self._lease, message.sent_s)
            while self._silent_ends:
                self._silent_ends.pop().close()
        if isinstance(message, HeartbeatRequested):
            self._send_heartbeat(request=message.number)
        elif offset is None and self._offset is not None:
            self._send_heartbeat()
        if result.forwards:
            for end in self._worker_ends:
                end.send(message)
        if isinstance(message, Shutdown):
            self._is_shut_down = True
            self.process.after(_LEAVE_S, self.kill)

    def _report(self, message: Fact) -> None:
        self.state = on_report(self.state, message, self.process.now_s)
        if self._to_coordinator is not None:
            self._to_coordinator.send(message)

    def _end_node(self, reason: str) -> None:
        self._surroundings.log_event("leaves", self.node, reason)
        self.end_reason, self.ended_s = reason, self._surroundings.loop.now_s
        self.kill()

    # -- the lease and the workers ----------------------------------------------------------------

    async def _run_ticks(self) -> None:
        while True:
            await self.process.sleep(LEASE_S / TICKS_PER_LEASE)
            now_s = self.process.now_s
            self._lease = lease_after_tick(self._lease, now_s)
            self._send_heartbeat()
            if can_judge_workers(self._lease, now_s):
                for worker in self.workers:
                    stopped_s = worker.process.stopped_s
                    if stopped_s >= 0.0 and now_s - stopped_s > LEASE_S:
                        self._surroundings.log_event("stalled", worker.rank)
                        worker.process.kill()

    def _send_heartbeat(self, *, request: int = 0) -> None:
        now_s, to_coordinator = self.process.now_s, self._to_coordinator
        if to_coordinator is None:
            self._lease = unconnected_lease(self._lease, now_s)
        else:
            heartbeat = Heartbeat(
                node=self.node, sent_s=now_s, offset=self._offset, request=request
            )
            to_coordinator.send(heartbeat)
        is_connected, is_leaving = to_coordinator is not None, self._is_leaving
        if is_given_up(self._lease, now_s, is_connected=is_connected, is_leaving=is_leaving):
            self._end_node(UNANSWERED)
        elif to_coordinator is not None and is_silent(self._lease, now_s):
            self._leave_silent(to_coordinator)

    def _fork_worker(self, device: int) -> SimulatedWorker:
        self._num_forked += 1
        rank = self.node * self._surroundings.job.scenario.devices_per_node + device
        port = pid = rank + port_step(self._surroundings.job.scenario) * self._num_forked
        name = f"worker {rank}.{self._num_forked}"
        process = Process(
            self._surroundings.loop, name, place=self.node, on_error=self._failed, rate=self._rate
        )
        links = SimulatedLinks(
            process,
            rank,
            ("host", port),
            network=self._surroundings.network,
            links_at=self._surroundings.links_at,
        )
        startup_s = _STARTUP_S * (1.0 + 4.0 * self._surroundings.rng.random())
        return SimulatedWorker(
            WorkerSpec(self.node, pid, startup_s, self.memories[device]),
            links,
            surroundings=self._surroundings,
            is_member=self._is_member,
            blame_at=self._blame_at,
        )

    def _blame_at(self, place: str) -> Blame | Literal[""]:
        """Whose fault it is that the code in a worker raises now; "": it does not raise."""
        if self.mistake_place in (place, ANY_PLACE) and self.mistake_place:
            self.mistake_place = ""
            return "job"
        blame, where = self.code_error
        is_here = where in (place, ANY_PLACE)
        return blame if is_here and self._surroundings.loop.now_s < self.code_error_until_s else ""

    def _start_worker(self, device: int) -> Endpoint:
        """Starts a worker; returns this agent's end of the connection to it."""
        worker = self.workers[device]
        agent_end, worker_end = self._surroundings.network.pair(self.process, worker.process)
        agent_end.on_message = self._report
        agent_end.on_close = lambda: self._on_worker_exit(device, worker)
        worker_end.on_message = worker.on_coordinator_message
        worker_end.on_close = worker.process.kill
        worker.agent_end = worker_end
        worker.process.spawn(worker.run())
        return agent_end

    def _on_worker_exit(self, device: int, worker: SimulatedWorker) -> None:
        """Replaces a worker that has ended, before the coordinator hears of it: so the new one is
        there when orders follow."""
        if self._is_shut_down:
            return
        was_stalled = worker.process.stopped_s >= 0.0
        first_layer, end_layer = worker.pulse.layers
        if not worker.is_leaving:
            error = "stall" if was_stalled else "SIGKILL"
            raised = Raised(error=error, first_layer=first_layer, end_layer=end_layer)
            self._surroundings.on_crash(self.node, "node", raised)
        self._worker_ends[device].close()
        self.workers[device] = self._fork_worker(device)
        self._worker_ends[device] = self._start_worker(device)
        if order := successor_order(self.state, worker.rank, worker.pid):
            self._worker_ends[device].send(order)
        self._report(
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


def _ignore(*_: object) -> None:
    """Takes nothing more from a connection that the agent has left."""
