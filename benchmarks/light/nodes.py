"""Machines and nodes of a job that are only protocol: hundreds of them in this process.

Each machine has a real connection to the head, and each node one to the coordinator, with TLS and
all messages. What an agent and its worker decide, they decide with the code of a job: they are
those of the simulator, whose clock is the wall clock here (`RealTime`). Only layers, links between
nodes and saves are modelled, and no process imports torch.

An iteration would be over at once, so node 0 holds up each commit for a while. An order of the
coordinator ends that at once, so that all workers answer without delay.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from planaria.coordinator.job_rules import Rules
from planaria.core.commit import vector_layout
from planaria.core.job import JobConfig
from planaria.core.machine_messages import (
    PROTOCOL,
    FromMachine,
    JobOffered,
    JobOver,
    JobPrepared,
    LinkMeasured,
    LinkMeasureRequested,
    LinkServed,
    LinkServeRequested,
    MachineArrived,
    MachineFacts,
    MachineRefused,
    NodeDropped,
    NodeEnded,
    NodeRequested,
    PrepareRequested,
    ToMachine,
)
from planaria.core.messages import Abort, Blame, Raised, ToNode
from planaria.core.plan import Link, ModelProfile, Plan, Transition
from planaria.core.samples import sample_numbers
from planaria.core.specs import NodeSpec, NumSamples, Prepared
from planaria.errors import AuthenticationError
from planaria.nodes.machine_files import MachineFiles
from planaria.planner.plans import PlanCatalog
from planaria.planner.problem import Problem
from planaria.planner.times import PlainTimes
from planaria.policies.policy import profile_prices
from planaria.simulator.loop import Loop, Process
from planaria.simulator.modelled.agent import SimulatedAgent, port_step
from planaria.simulator.modelled.links import SimulatedLinks
from planaria.simulator.modelled.saver import SimulatedSaves
from planaria.simulator.modelled.worker import SimulatedWorker
from planaria.simulator.network import Endpoint, Network
from planaria.simulator.scenario import LEASE_S, PlannedJob, Scenario, StoreTrouble, first_content
from planaria.transport.acceptor import Purpose, connect
from planaria.transport.credentials import Credentials
from planaria.transport.frames import FrameDecoder, frame, message_of, order_of
from planaria.transport.sockets import Address

CONNECT_TIMEOUT_S: Final = 10.0
HOLD_S: Final = 1.0  # Time for which node 0 holds up each commit.
NODES_MAX: Final = 10_000  # No two nodes have the same machine.
NUM_SAMPLES: Final = 1 << 20
PATIENCE_S: Final = 600.0
SEED: Final = 1
_GATE: Final = -2  # Place of the process that stands for all connections to the coordinator.
_LATENCY_S: Final = 1e-4
_LINK: Final = Link(_LATENCY_S, 1e9)  # No machine measures it.
_LINK_PORT: Final = 1
_READ_BYTES: Final = 1 << 20
_KILLED: Final = -9
_IDLE_S_MAX: Final = 1.0
_NUM_ORDERS_KEPT: Final = 4
_machine_decoder: msgspec.json.Decoder[ToMachine] = msgspec.json.Decoder(ToMachine)


@dataclass(frozen=True, slots=True)
class Sight:
    """A message as this process saw it.

    Attributes:
        at_s: time by the monotonic clock.
        kind: name of the message's type.
        epoch: epoch of the message; -1: it has none.
    """

    at_s: float
    node: int
    kind: str
    epoch: int = -1


class RealTime:
    """Runs a simulator's loop by the wall clock, on the event loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._began_s = time.monotonic()
        self._next: asyncio.Handle | None = None

    def advance_soon(self) -> None:
        """Has what is due done once all messages that have arrived were taken."""
        if self._next is not None:
            self._next.cancel()
        self._next = asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        """Does what is due, and has itself called when the next event is."""
        now_s = time.monotonic() - self._began_s
        self._loop.run(until_s=now_s, is_over=lambda: False)
        self._loop.now_s = now_s
        delay_s = min(max(0.0, self._loop.next_s - now_s), _IDLE_S_MAX)
        self._next = asyncio.get_running_loop().call_later(delay_s, self._advance)


class LightNodes:
    """The machines of a job, and the nodes that its head asks them for.

    Args:
        head: address of the head.
        cache: directory in which machines may keep digests of files.

    Attributes:
        sights: messages that nodes got from the coordinator, or sent it, in order.
        machines: machines by number, those that were killed included.
        agents: agents by node, those of lost nodes included.
    """

    def __init__(self, head: Address, credentials: Credentials, *, cache: Path) -> None:
        self.sights: list[Sight] = []
        self.machines: list[LightMachine] = []
        self.agents: dict[int, SimulatedAgent] = {}
        # Attributes that the simulator's agents and workers look for.
        self.loop = Loop()
        self.rng = Random(SEED)
        self.network = Network(self.loop, self.rng)
        self.network.delay_s = _LATENCY_S
        self.saves = SimulatedSaves(self.loop, StoreTrouble(), self.rng)
        self.job: PlannedJob
        self._real_time = RealTime(self.loop)
        self.head = head
        self.credentials = credentials
        self.cache = cache
        self._gate = Network(self.loop, self.rng)
        self._gate.delay_s = 0.0
        self._gateway = Process(self.loop, "gateway", place=_GATE, on_error=_raise)
        self._streams: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self._connecting: dict[int, asyncio.Task[None]] = {}
        self._passing: set[asyncio.Task[None]] = set()
        self._owners: dict[int, LightMachine] = {}
        self._held: Process | None = None
        self._held_s = 0.0
        self._orders: dict[bytes, ToNode] = {}

    def add_machines(self, num_machines: int) -> None:
        """Has more machines come to the head."""
        for _ in range(num_machines):
            machine = LightMachine(self, len(self.machines))
            self.machines.append(machine)
            machine.begin()

    @property
    def is_held(self) -> bool:
        """Whether a commit is held up, so that all workers would answer an order at once."""
        held_s = time.monotonic() - self._held_s
        return self._held is not None and held_s > HOLD_S / 3

    def start_node(self, spec: NodeSpec, machine: "LightMachine") -> None:
        """Starts a node on a machine."""
        if not self.agents:
            assert spec.profile is not None
            self.job = modelled_job(spec.job, spec.profile)
        self._owners[spec.node] = machine
        self.agents[spec.node] = SimulatedAgent(
            self, spec.node, rate=1.0, on_error=_raise, on_exit=self._on_agent_exit
        )
        self._real_time.advance_soon()

    def kill(self, node: int) -> None:
        """Has the machine of a node vanish; its connections close."""
        self._owners[node].kill()
        self.agents[node].kill()
        self._real_time.advance_soon()

    async def close(self) -> None:
        """Ends all machines and connections."""
        for machine in self.machines:
            machine.kill()
        tasks = (*self._connecting.values(), *self._passing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_agent_exit(self, agent: SimulatedAgent) -> None:
        self._owners[agent.node].on_node_end(agent.node)

    # -- the coordinator --------------------------------------------------------------------------

    def coordinator_connection(self, agent: SimulatedAgent) -> Endpoint | None:
        """See AgentSurroundings."""
        node = agent.node
        streams = self._streams.pop(node, None)
        if streams is None:
            if node not in self._connecting:
                self._connecting[node] = asyncio.create_task(self._connect(node))
            return None
        reader, writer = streams
        agent_end, own_end = self._gate.pair(agent.process, self._gateway)

        def send(message: Any) -> None:
            self._see(node, message)
            writer.write(frame(message))

        own_end.on_message, own_end.on_close = send, writer.transport.abort
        task = asyncio.create_task(self._pass_on_orders(node, reader, own_end))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)
        return agent_end

    async def _connect(self, node: int) -> None:
        with contextlib.suppress(ConnectionError, AuthenticationError):
            self._streams[node] = await connect(
                self.head, Purpose.NODE, self.credentials, timeout_s=LEASE_S / 2, identity=node
            )
        del self._connecting[node]

    async def _pass_on_orders(self, node: int, reader: asyncio.StreamReader, end: Endpoint) -> None:
        """Passes messages of the coordinator to a node, until the connection ends."""
        decoder = FrameDecoder()
        with contextlib.suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                for body in decoder.feed(data):
                    message = self._order(body)
                    self._see(node, message)
                    if isinstance(message, Abort):
                        self._go_on()
                    end.send(message)
                self._real_time.advance_soon()
        end.close()
        self._real_time.advance_soon()

    def _order(self, body: bytes) -> ToNode:
        """The message of a body; equal ones are decoded once, as if each machine did it itself."""
        if len(body) < 256:
            return order_of(body)
        if body not in self._orders:
            self._orders[body] = order_of(body)
            while len(self._orders) > _NUM_ORDERS_KEPT:
                del self._orders[next(iter(self._orders))]
        return self._orders[body]

    def _see(self, node: int, message: Any) -> None:
        epoch = getattr(message, "epoch", -1)
        self.sights.append(Sight(time.monotonic(), node, type(message).__name__, epoch))

    # -- surroundings of workers ------------------------------------------------------------------

    def links_at(self, port: int) -> SimulatedLinks | None:
        """See AgentSurroundings."""
        for worker in self.agents[port % port_step(self.job.scenario)].workers:
            if worker.links.address[1] == port and worker.process.is_alive:
                return worker.links
        return None

    def on_place(self, place: str, worker: SimulatedWorker, _: int) -> None:
        """See WorkerSurroundings; the worker of rank 0 is held up before its commit."""
        if place == "commit" and worker.rank == 0:
            worker.process.stop()
            self._held, self._held_s = worker.process, time.monotonic()
            self.loop.after(HOLD_S, self._go_on)

    def _go_on(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.resume()

    def on_crash(self, node: int, blame: Blame, raised: Raised) -> None:
        """See WorkerSurroundings."""

    def log_event(self, what: str, *facts: object) -> None:
        """See AgentSurroundings."""
        if what == "leaves":
            raise AssertionError(facts)

    def read(self, source: str, layer: int, node: int) -> int:
        """See WorkerSurroundings; there are no saves."""
        del node
        assert not source
        return first_content(layer)

    def write(self, iteration: int, epoch: int, layers: dict[int, int]) -> None:
        """See SaveTarget; nothing is written."""


class LightMachine:
    """The connection of a machine to the head.

    Attributes:
        began_s: time at which it began to connect.
        asked_s: time at which the head asked it to examine the job; infinite if it was not asked.
        requested_s: time at which the head asked it for its newest node.
    """

    def __init__(self, nodes: LightNodes, number: int) -> None:
        self.began_s = self.asked_s = self.requested_s = inf
        self._nodes = nodes
        self._number = number
        self._writer: asyncio.StreamWriter | None = None
        self._files = MachineFiles(nodes.cache, _ignore)
        self._task: asyncio.Task[None]

    def begin(self) -> None:
        """Begins to connect to the head."""
        self._task = asyncio.create_task(self._run())

    def kill(self) -> None:
        """Closes the connection, as if the machine were gone."""
        self._task.cancel()
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None

    def on_node_end(self, node: int) -> None:
        """Tells the head that a node has ended."""
        self._tell(NodeEnded(node=node, status=_KILLED))

    async def _run(self) -> None:
        self.began_s = time.monotonic()
        reader, self._writer = await connect(
            self._nodes.head,
            Purpose.MACHINE,
            self._nodes.credentials,
            timeout_s=CONNECT_TIMEOUT_S,
        )
        facts = MachineFacts(name=f"light-{self._number}", host="127.0.0.1")
        self._tell(MachineArrived(protocol=PROTOCOL, facts=facts))
        decoder = FrameDecoder()
        with contextlib.suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                for body in decoder.feed(data):
                    self._on_message(message_of(body, _machine_decoder))

    async def _take_job(self, offer: JobOffered) -> None:
        self._tell(await self._files.ready(offer))

    def _tell(self, message: FromMachine) -> None:
        if self._writer is not None:
            self._writer.write(frame(message))

    def _on_message(self, message: ToMachine) -> None:
        match message:
            case JobOffered():
                self._taking = asyncio.create_task(self._take_job(message))
            case PrepareRequested(request, number):
                self.asked_s = time.monotonic()
                assert request.profile is not None
                self._tell(JobPrepared(_prepared(request.profile), number=number))
            case LinkServeRequested(number=number):
                self._tell(LinkServed(port=_LINK_PORT, number=number))
            case LinkMeasureRequested(number=number):
                self._tell(LinkMeasured(link=_LINK, number=number))
            case NodeRequested(spec):
                self.requested_s = time.monotonic()
                self._nodes.start_node(spec, self)
            case NodeDropped(node):
                self._nodes.agents[node].kill()
            case JobOver():
                pass
            case MachineRefused(reason=reason):
                raise AssertionError(reason)
            case _:
                raise AssertionError(f"a light machine has no answer to {message}")


def _prepared(profile: ModelProfile) -> Prepared:
    """What a machine finds out about a paced job."""
    num_layers = len(profile.layers)
    return Prepared(
        profile=profile,
        num_samples=NumSamples(NUM_SAMPLES),
        objective="supervised",
        parameters=(("weight",),) * num_layers,
        num_parameters=num_layers,
    )


def modelled_job(job: JobConfig, profile: ModelProfile) -> PlannedJob:
    """The job as the simulator's agents and workers know it; they need no plans in advance."""
    num_layers = len(profile.layers)
    problem = Problem(
        profile=profile,
        devices_per_node=job.cluster.devices_per_node,
        num_microbatches=job.num_microbatches,
        failures_tolerated=job.resilience.failures_tolerated,
    )
    rules = Rules(
        job=job,
        policy=_NoPolicy(),
        prices=profile_prices(profile, regroup_s=0.0),
        n0=1,
        max_nodes=job.cluster.nodes,
        num_layers=num_layers,
        layout=vector_layout(job, num_layers),
        first_iteration=0,
    )
    scenario = Scenario(
        job.cluster.nodes,
        1,
        job.resilience.failures_tolerated,
        num_layers=num_layers,
        num_microbatches=job.num_microbatches,
        devices_per_node=job.cluster.devices_per_node,
        num_machines=NODES_MAX,
        patience_s=PATIENCE_S,
    )
    return PlannedJob(
        scenario=scenario,
        rules=rules,
        saving_rules=rules,
        catalog=PlanCatalog(problem=problem, templates={}, plans={}, times=PlainTimes(problem)),
        plan=Plan(0, (), ()),
        predicted_s=0.0,
        forward_s=tuple(layer.forward_s[1] for layer in profile.layers),
        samples=_Samples(job),
        contents={},
    )


class _NoPolicy:
    """Workers propose nothing."""

    def propose(self, *_: Any, **__: Any) -> tuple[Transition, ...]:
        """See Policy."""
        return ()


class _Samples(Mapping[int, tuple[tuple[int, ...], ...]]):
    """The samples of each iteration by microbatch, drawn when they are asked for."""

    def __init__(self, job: JobConfig) -> None:
        self._training = job.training
        self._newest: tuple[int, tuple[tuple[int, ...], ...]] = (-1, ())

    def __getitem__(self, iteration: int) -> tuple[tuple[int, ...], ...]:
        if iteration != self._newest[0]:
            training = self._training
            numbers = sample_numbers(
                iteration,
                seed=training.seed,
                num_samples=NUM_SAMPLES,
                global_batch_size=training.global_batch_size,
            ).tolist()
            size = training.microbatch_size
            cut = tuple(tuple(numbers[i : i + size]) for i in range(0, len(numbers), size))
            self._newest = (iteration, cut)
        return self._newest[1]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._training.iterations))

    def __len__(self) -> int:
        return self._training.iterations


def _raise(error: BaseException) -> None:
    raise error


def _ignore(_: str) -> None:
    """Shows nothing to anybody."""
