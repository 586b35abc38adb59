"""A simulated job: nodes, coordinator, launcher, store and disk on one loop.

Faults strike it, and a `SimulationObserver` watches it from outside: it is told what really
happens.
"""

from collections.abc import Callable
from random import Random
from typing import Protocol

from planaria.coordinator.commands import Discard, Publish, Published
from planaria.coordinator.crashes import UNREAD
from planaria.coordinator.membership.standby import nodes_to_replace
from planaria.coordinator.membership.standstill import is_standing_still
from planaria.core.kinds import Ending
from planaria.core.messages import Blame, DrainRequested, Raised, StopRequested
from planaria.core.records import Beat, Committed, Ended, Rescue, ToLauncher
from planaria.errors import SpoiltError
from planaria.protocol.agent_lease import TICKS_PER_LEASE
from planaria.simulator.checkers.crash_log import CrashFact
from planaria.simulator.checkers.recording import Recording
from planaria.simulator.loop import Loop, Process
from planaria.simulator.modelled.agent import SimulatedAgent, port_step
from planaria.simulator.modelled.leader import SimulatedCoordinator
from planaria.simulator.modelled.links import SimulatedLinks
from planaria.simulator.modelled.rescue import RESCUES_MAX, ReportedRecords
from planaria.simulator.modelled.saver import SimulatedSaves
from planaria.simulator.modelled.store import DiskModel, SimulatedDisk
from planaria.simulator.modelled.worker import SimulatedWorker
from planaria.simulator.network import Endpoint, Network
from planaria.simulator.scenario import LEASE_S, PlannedJob, StoreTrouble, first_content
from planaria.store.store import Event

LAUNCHER = -1
_RESTART_S = 0.03
_NOTICE_S = 0.002
_REJOIN_S = 0.5
_REJOINS_MAX = 5  # Number of nodes that come anew in place of those that ended themselves.


class SimulationObserver(Protocol):
    """An observer from outside."""

    def on_place(self, place: str, worker: SimulatedWorker, iteration: int) -> None:
        """Called when a worker is at a place of an iteration or of a recovery."""

    def on_record(self, event: Event) -> None:
        """Called when a change of a key is on the disk."""

    def on_message(self, message: ToLauncher) -> None:
        """Called with each message from the coordinator to the launcher."""

    def on_save(self, iteration: int, layers: dict[int, int]) -> None:
        """Called when a checkpoint is complete."""

    def on_crash(self, fact: CrashFact) -> None:
        """Called when the code in a worker has raised or its process has ended."""

    def on_standstill(self) -> None:
        """Called when the launcher takes the coordinator for one that stands still."""

    def on_rescue(self, rescue: Rescue) -> None:
        """Called before a coordinator starts that only saves, with what it goes on from."""

    def on_unexpected_error(self, error: BaseException) -> None:
        """Called when code of the system or of a model raises an unexpected error."""


class SimulatedCluster:
    """Everything that runs in a simulated job.

    Attributes:
        saves: disk or store of the saves.
        log: events in order: (seconds, what, details).
        place_callbacks: callbacks of faults that wait for a place, called with each and its node.
        disk: disk of the coordinator's records.
        agents: agents by node, those of lost nodes included.
        leader: newest process of the coordinator.
        ended: the end of the job; None before it.
        num_committed: number of iterations that were ever committed.
        files: layers of saves, by (iteration, epoch).
        published: complete saves, in order.
        discarded: (iteration, epoch) of saves that were given up.
        damaged: sources of complete saves that differ from what was written.
        set_aside: sources of those that are known to be damaged.
        blind_until_s: time until which a node cannot read saves, by node.
        recording: recorder of the launcher's messages.
        records: the launcher's knowledge of the coordinators' records.
        granted_s: time when each node on a granted machine came; in a job that waits for machines,
            of each node that came later than the first ones.
        leader_rate: rate of the clock of the coordinator and the launcher.
    """

    def __init__(
        self,
        job: PlannedJob,
        rng: Random,
        *,
        disk_model: DiskModel,
        store_trouble: StoreTrouble,
        store_rng: Random,
    ) -> None:
        self.job = job
        self.rng = rng
        self.loop = Loop()
        self.network = Network(self.loop, rng)
        self.recording = Recording(predicted_s=job.predicted_s)
        self.saves = SimulatedSaves(self.loop, store_trouble, store_rng)
        self.log: list[tuple[float, str, tuple[object, ...]]] = []
        self.observer: SimulationObserver
        self.place_callbacks: list[Callable[[str, int], None]] = []
        self.disk = SimulatedDisk(self.loop, rng, self._on_record, model=disk_model)
        self.agents: dict[int, SimulatedAgent] = {}
        self.leader: SimulatedCoordinator
        self.ended: Ended | None = None
        self.num_committed = 0
        self.files: dict[tuple[int, int], dict[int, int]] = {}
        self.published: list[Published] = []
        self.discarded: set[tuple[int, int]] = set()
        self.damaged: set[str] = set()
        self.set_aside: set[str] = set()
        self.blind_until_s: dict[int, float] = {}
        self.stop_requested = False
        self.drained: list[int] = []
        self.granted_s: dict[int, float] = {}
        self._replaced: set[int] = set()
        self._newest_vector = -1
        self.records = ReportedRecords(job.plan)
        self._num_rejoined = 0
        self._replaced_leaders: list[Process] = []
        self._num_leaders = 0
        self._is_starting = True
        self._has_begun = False
        self._silent_ticks = 0
        self.leader_rate = 1.0

    def begin(self, rates: dict[int, float]) -> None:
        """Starts every process.

        Args:
            rates: rates of clocks other than 1, by node; -1: the coordinator.
        """
        self.leader_rate = rates.get(LAUNCHER, 1.0)
        for node in self.job.plan.nodes:
            self._start_agent(node, rates.get(node, 1.0))
        for _ in range(self.job.scenario.num_standby):
            self.add_node()
        self._start_leader()
        self._watch_leader()

    def _start_agent(self, node: int, rate: float) -> None:
        self.agents[node] = SimulatedAgent(
            self, node, rate=rate, on_error=self._on_error, on_exit=self._on_agent_exit
        )

    def add_node(self) -> None:
        """Starts a new node."""
        node = max(self.agents) + 1
        self.log_event("comes", node)
        if self.job.scenario.wait_s:
            self.granted_s[node] = self.loop.now_s
        self._start_agent(node, 1.0)

    def _replace(self, nodes: tuple[int, ...]) -> None:
        """Grants machines for lost nodes, each within scenario.grant_s."""
        for node in sorted(set(nodes).difference(self._replaced)):
            self._replaced.add(node)
            self.loop.after(self.job.scenario.grant_s * self.rng.random(), self._grant)

    def _grant(self) -> None:
        if self.ended is None and not (self.stop_requested or self.records.save_only_reason):
            self.add_node()
            self.granted_s[max(self.agents)] = self.loop.now_s

    def drain(self, node: int) -> None:
        """Has the user ask that the job go on without a node."""
        self.drained.append(node)
        if self.leader.process.is_alive:
            self.leader.queue(DrainRequested(node=node))

    def log_event(self, what: str, *facts: object) -> None:
        """Adds an entry to the log."""
        self.log.append((self.loop.now_s, what, facts))

    def _on_error(self, error: BaseException) -> None:
        self.log_event("raised", repr(error))
        self.observer.on_unexpected_error(error)

    # -- the coordinator --------------------------------------------------------------------------

    def _start_leader(self) -> None:
        if self.ended is not None:
            return
        rescue = None
        if self.records.save_only_reason and (rescue := self._rescue()) is None:
            return
        self._num_leaders += 1
        self._is_starting = False
        self._has_begun, self._silent_ticks = False, 0
        process = Process(
            self.loop,
            f"coordinator {self._num_leaders}",
            place=LAUNCHER,
            on_error=self._on_error,
            rate=self.leader_rate,
        )
        disk = self.disk if rescue is None else self._memory()
        leader = self.leader = SimulatedCoordinator(
            process, disk, self, piece_bytes=self.disk.model.piece_bytes, rescue=rescue
        )
        process.spawn(leader.run())
        for node, agent in self.agents.items():
            if not (agent.process.is_alive or self.job.scenario.patience_s):
                self.leader.on_agent_loss(node, "its agent ended")
        for node in self.drained:
            self.leader.queue(DrainRequested(node=node))
        if self.stop_requested:
            self.leader.queue(StopRequested())

    def _rescue(self) -> Rescue | None:
        """What a coordinator that only saves goes on from; None if the job ends instead."""
        live_nodes = [node for node, agent in self.agents.items() if agent.process.is_alive]
        if self.records.num_rescues >= RESCUES_MAX:
            why = f"{RESCUES_MAX} more coordinators ended before they had saved it"
        elif not set(live_nodes).intersection(self.records.nodes):
            why = "no node is left to save"
        else:
            for process in self._replaced_leaders:
                process.kill()
            rescue = self.records.rescue(live_nodes)
            self.log_event("rescue", rescue.members.epoch, *rescue.members.nodes)
            self.observer.on_rescue(rescue)
            return rescue
        reason = f"{self.records.save_only_reason}; {why}"
        nodes, epoch = self.records.nodes, 0
        self.ended = Ended(
            ending=Ending.LOST, reason=reason, failure=None, nodes=nodes, epoch=epoch
        )
        self.observer.on_message(self.ended)
        return None

    def _memory(self) -> SimulatedDisk:
        """A store in memory for the records of a coordinator that only saves."""

        def on_write(event: Event) -> None:
            if self.leader.has_adopted:
                self._on_record(event)

        return SimulatedDisk(self.loop, self.rng, on_write, model=DiskModel(), is_memory=True)

    def _watch_leader(self) -> None:
        """Kills the coordinator if it stands still; repeats itself as the launcher's tick."""
        self.loop.after(LEASE_S / TICKS_PER_LEASE, self._watch_leader)
        self._silent_ticks += 1
        is_silent = is_standing_still(
            self._silent_ticks, has_begun=self._has_begun, lease_s=LEASE_S
        )
        if is_silent and not self._is_starting and self.ended is None:
            self.observer.on_standstill()
            self.kill_leader()

    def kill_leader(self, pause_s: float = 0.0) -> None:
        """Kills the coordinator and starts another soon after a pause."""
        self.log_event("coordinator killed")
        self.recording.on_coordinator_loss(self.launcher_s)
        self.leader.process.kill()
        self.disk.crash()
        self.records.restart()
        self._is_starting = True
        delay_s = _RESTART_S * (1.0 + 5.0 * self.rng.random())
        self.loop.after(pause_s + delay_s, self._start_leader)

    def replace_leader(self, duration_s: float) -> None:
        """Stops the coordinator for a while and meanwhile starts another.

        That is possible only with a store that outlives its coordinator.
        """
        self.log_event("coordinator replaced")
        self.recording.on_coordinator_loss(self.launcher_s)
        replaced = self.leader.process
        replaced.stop()
        self._replaced_leaders.append(replaced)
        self.leader.is_serving = False  # Agents connect to the coordinator that the store names.
        self.network.break_all(replaced)
        self.loop.after(duration_s, replaced.resume)
        self.records.restart()
        self._is_starting = True
        self.loop.after(_RESTART_S, self._start_leader)

    @property
    def launcher_s(self) -> float:
        """Time by the clock of the launcher's machine, on which the coordinator runs too."""
        return self.loop.now_s * self.leader_rate

    @property
    def can_lose_leader(self) -> bool:
        """Whether a coordinator is there, and the launcher could replace it once more."""
        return self.records.num_rescues < RESCUES_MAX and not self._is_starting

    def coordinator_connection(self, agent: SimulatedAgent) -> Endpoint | None:
        """See AgentSurroundings."""
        leader = self.leader
        is_cut = self.network.is_cut(agent.node, LAUNCHER)
        if is_cut or not leader.is_serving or not leader.process.is_alive:
            return None
        agent_end, coordinator_end = self.network.pair(agent.process, leader.process)
        self.log_event("connects", agent.node)
        leader.process.call(lambda: leader.accept(agent.node, coordinator_end))
        return agent_end

    def on_coordinator_message(self, leader: SimulatedCoordinator, message: ToLauncher) -> None:
        """See CoordinatorSurroundings."""
        if leader is not self.leader:  # It has been replaced.
            self.log_event("unheard", type(message).__name__)
            return
        self._has_begun, self._silent_ticks = True, 0
        if isinstance(message, Beat):
            return
        self.log_event("notice", type(message).__name__, getattr(message, "epoch", -1))
        self.records.on_message(message)
        self.recording.on_message(message, self.launcher_s)
        self.observer.on_message(message)
        if isinstance(message, Committed) and message.iteration >= self.num_committed:
            self.num_committed = message.iteration + 1
        if self.job.scenario.grant_s:
            self._replace(nodes_to_replace(message))
        if isinstance(message, Ended) and self.ended is None:
            self.ended = message

    def request_stop(self) -> None:
        """Has the user ask to stop the job."""
        self.stop_requested = True
        self.log_event("stop requested")
        if self.leader.process.is_alive:
            self.leader.queue(StopRequested())

    def _on_agent_exit(self, agent: SimulatedAgent) -> None:
        """Tells the coordinator; on another machine, a process there tells it if it still can."""
        self.log_event("agent ended", agent.node)
        patience_s = self.job.scenario.patience_s
        if not patience_s:
            self.loop.after(_NOTICE_S, lambda: self._tell_loss(agent.node))
            return
        if not self.network.is_cut(agent.node, LAUNCHER):
            self.loop.after(0.3 * self.rng.random(), lambda: self._tell_loss(agent.node))
        if agent.end_reason and self._num_rejoined < _REJOINS_MAX:
            self._num_rejoined += 1
            self.loop.after(_REJOIN_S, self._rejoin)

    def _rejoin(self) -> None:
        """Starts a new node where one ended itself."""
        if self.ended is None:
            self.add_node()

    def _tell_loss(self, node: int) -> None:
        leader = self.leader
        leader.process.call(lambda: leader.on_agent_loss(node, "its agent ended"))

    # -- workers ----------------------------------------------------------------------------------

    def workers(self) -> list[SimulatedWorker]:
        """The workers whose processes are alive."""
        workers = [worker for agent in self.agents.values() for worker in agent.workers]
        return [worker for worker in workers if worker.process.is_alive]

    def links_at(self, port: int) -> SimulatedLinks | None:
        """See AgentSurroundings."""
        scenario = self.job.scenario
        for worker in self.agents[port % port_step(scenario) // scenario.devices_per_node].workers:
            if worker.links.address[1] == port and worker.process.is_alive:
                return worker.links
        return None

    def on_place(self, place: str, worker: SimulatedWorker, iteration: int) -> None:
        """See WorkerSurroundings."""
        self.log_event(place, worker.rank, iteration)
        self.observer.on_place(place, worker, iteration)
        if place == "optimizer" and iteration > self._newest_vector:
            self._newest_vector = iteration
            place = "vector"
        node = worker.rank // self.job.scenario.devices_per_node
        self._call_place_callbacks(place, node)

    def on_crash(self, node: int, blame: Blame, raised: Raised) -> None:
        """See WorkerSurroundings."""
        self.log_event("crashed", node, blame, raised.error, raised.first_layer, raised.end_layer)
        self.observer.on_crash(CrashFact(self.loop.now_s, node, blame, raised))

    def on_coordinator_place(self, place: str, iteration: int) -> None:
        """See CoordinatorSurroundings."""
        self.log_event(place, "coordinator", iteration)
        self._call_place_callbacks(place, LAUNCHER)

    def _call_place_callbacks(self, place: str, node: int) -> None:
        for callback in tuple(self.place_callbacks):
            callback(place, node)

    # -- records and saves ------------------------------------------------------------------------

    def _on_record(self, event: Event) -> None:
        name = event.key.rsplit("/", 2)[-2:]
        self.log_event("recorded", *name)
        self.observer.on_record(event)
        self._call_place_callbacks(f"recorded {name[0]}", LAUNCHER)

    def write(self, iteration: int, epoch: int, layers: dict[int, int]) -> None:
        """See WorkerSurroundings."""
        self.files.setdefault((iteration, epoch), {}).update(layers)

    def read(self, source: str, layer: int, node: int) -> int:
        """See WorkerSurroundings."""
        if not source:
            return first_content(layer)
        if source in self.damaged:
            raise SpoiltError(source, f"{source} is damaged")
        if self.loop.now_s < self.blind_until_s.get(node, 0.0):
            self.on_crash(node, "node", Raised(error=UNREAD))
            raise SpoiltError(source, f"{source} cannot be read on node {node}")
        iteration, epoch = map(int, source.split("-"))
        return self.files[iteration, epoch][layer]

    def damage(self) -> bool:
        """Damages the newest save; returns whether there is one."""
        if not self.published:
            return False
        self.damaged.add(self.published[-1].source)
        return True

    def publish(self, command: Publish) -> bool:
        """See CoordinatorSurroundings."""
        files = self.files.get((command.iteration, command.epoch), {})
        if {file.layer for file in command.files} - files.keys():
            return False
        published = Published(command.iteration, command.epoch)
        if published not in self.published:
            self.published.append(published)
            self.observer.on_save(command.iteration, dict(files))
        return True

    def discard(self, command: Discard) -> None:
        """See CoordinatorSurroundings."""
        if Published(command.iteration, command.epoch) not in self.published:
            self.discarded.add((command.iteration, command.epoch))
            self.files.pop((command.iteration, command.epoch), None)
