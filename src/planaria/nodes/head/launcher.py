"""Starts the nodes of a job on this machine, and the process of its coordinator.

The launcher has one agent per node, and the coordinator, forked from the job's fork server
(node_handles.py, leader_runner.py). It tells the coordinator what the user requests and which
agents have ended, and passes the coordinator's messages to an observer. Faults are injected from
here.

A failure outside the nodes does not end training without a save while a node lives. A fork server
that is gone is renewed, and forks wait for it. If the launcher itself raises, the next coordinator
only saves the live state.

Ctrl-C stops the job at its next commit, after a save; a second Ctrl-C ends it at once. Any other
signal that tells a process to leave (process_events.py) acts like the first, however often it is
sent. Before training has begun, any of these signals ends the job at once.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from planaria.checkpoint.disk.tiers import Tier, newest_checkpoint_text
from planaria.checkpoint.disk.time_limits import discard
from planaria.core.inject import Injection
from planaria.core.kinds import LEAVING, Ending, LossKind
from planaria.core.messages import NoticeTaken, StopRequested
from planaria.core.records import (
    AgentEnded,
    AwaitingMachine,
    Changed,
    Ended,
    Members,
    Recovering,
    Running,
    ToLauncher,
    Unsaved,
    Warned,
)
from planaria.core.specs import NodeSpec
from planaria.nodes.faults.injector import Injector, Targets, coordinator_places, node_places
from planaria.nodes.faults.node_faults import LocalFaults, MachineFaults, NodeFaults
from planaria.nodes.forking import Forker
from planaria.nodes.forkserver import ForkServer
from planaria.nodes.head.cloud import CloudOperator, LocalOperator
from planaria.nodes.head.job_processes import JobProcesses
from planaria.nodes.head.leader_runner import LeaderCallbacks, LeaderRunner
from planaria.nodes.head.leader_spec import LeaderSpec
from planaria.nodes.head.node_handles import LocalNodes, NodeHandles
from planaria.nodes.head.observer import Observer
from planaria.nodes.head.process_events import (
    handle_signals,
    run_in_thread,
    running_loop,
    with_agent_exits,
)
from planaria.nodes.head.remote.open_head import LocalSockets, OpenHead
from planaria.nodes.head.request_socket import serve_requests
from planaria.nodes.head.requests import Drains, reply_function
from planaria.observe.status import JobStatus, Standing, job_status
from planaria.transport.frames import PROBES, derive

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What a launcher starts.

    Attributes:
        node: spec of every node; the launcher fills in `node`, all addresses, and a token if it has
            none.
        leader: spec of the coordinator; the launcher fills in the token, addresses and places.
        injections: faults to inject.
    """

    node: NodeSpec
    leader: LeaderSpec
    injections: tuple[Injection, ...] = ()


class Launcher:
    """Runs one job.

    Args:
        tier: disk tier to which the job saves; must answer or raise in bounded time.
        other_journal: returns another directory for the journal, or "" if there is none.
        head: the open port of a head, and the machines that have come to it; None: all nodes are
            processes of this machine.

    Attributes:
        error: exception that the observer or the launcher raised; it makes the job save and end.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        *,
        server: ForkServer,
        observer: Observer,
        tier: Tier,
        other_journal: Callable[[], str] = str,
        head: OpenHead | None = None,
    ) -> None:
        # Machines that outlive their head have the token already.
        token = spec.node.token or secrets.token_bytes(32)
        self._node_spec = msgspec.structs.replace(spec.node, token=token)
        self._injections = spec.injections
        self._observer = observer
        self.error: Exception | None = None
        self._processes = JobProcesses()
        self._local = LocalNodes(
            lambda nodes: Forker(
                server,
                on_fork=nodes.on_fork,
                on_exit=nodes.on_exit,
                note=self._warn,
                meanwhile=self._training_text,
                on_error=self._save_and_raise,
            ),
            self._processes,
            self._on_node_end,
        )
        self._head = head
        self._nodes: NodeHandles = self._local if head is None else head.machines
        is_taken_up = head is not None and head.is_taken_up
        leader_spec = msgspec.structs.replace(spec.leader, token=token, is_taken_up=is_taken_up)
        self._leaders = self._leader_runner(leader_spec, other_journal)
        self._injector = self._made_injector(token, server)
        self._drains = Drains(self._leaders.send, self._job_nodes)
        self._operator: CloudOperator = LocalOperator(
            spec.node.job.cluster.grant_s, give_back=self._nodes.drop, start_node=self._on_grant
        )
        if head is not None and head.operator is not None:
            self._operator = head.operator
            head.operator.note = self._note_request
            head.operator.report_unfit = self._report_unfit
        self._plan = spec.leader.plan
        self._standing = Standing(plan=spec.leader.plan, num_committed=spec.leader.first_iteration)
        self._is_training = False
        self._stop_requested = self._stops_early = False
        self._is_interrupted = False
        self._interruption = ""
        self._tier = tier
        self._unsaved: set[tuple[int, int]] = set()
        self._unfit: dict[int, NoticeTaken] = {}  # What platforms have against machines, by node.
        self._unfired_injections: tuple[Injection, ...] = ()
        self._ended: asyncio.Future[Ended]
        self._is_over = self._has_given_up = False  # Given up: no coordinator has ended the job.

    def _made_injector(self, token: bytes, server: ForkServer) -> Injector:
        nodes: NodeFaults
        join, handshakes = self._join, None
        if self._head is None:
            nodes = LocalFaults(self._processes.live_agents)
        else:
            machines, handshakes = self._head.machines, self._head.machines.handshakes
            nodes, join = MachineFaults(machines.live_nodes, machines.tell), machines.open_places
            machines.on_injected = nodes.on_injected
        return Injector(
            self._injections,
            Targets(nodes, leader=lambda: self._leaders.pid, server=lambda: server.pid),
            token=derive(token, PROBES),
            handshakes=handshakes,
            join=join,
            on_fire=self._on_fire,
        )

    def _leader_runner(self, spec: LeaderSpec, other_journal: Callable[[], str]) -> LeaderRunner:
        return LeaderRunner(
            spec,
            forker=self._local.forker,
            processes=self._processes,
            live_nodes=self._nodes.live_nodes,
            callbacks=LeaderCallbacks(
                on_connect=self._repeat_messages,
                on_message=self._on_message,
                on_members=self._on_members,
                on_restart=self._on_leader_restart,
                end=self._end,
                pass_on=self._pass_to_observer,
                on_error=self._save_and_raise,
                other_journal=other_journal,
                on_taken=self._on_taken,
            ),
        )

    def run(self) -> Ended:
        """Runs the job to its end, and ends all its processes; see `error`.

        Raises:
            KeyboardInterrupt: the user ended the job at once; the text says what that cost.
        """
        if self._head is not None:
            ended = self._head.runner.run(self._run())
        elif running_loop() is None:
            ended = asyncio.run(self._run())
        else:  # As in a notebook, and in a coroutine, which waits here.
            loop = asyncio.new_event_loop()
            acts = (self._on_interrupt, self._on_leave_signal)
            with handle_signals(loop, acts[0], on_leave_signal=acts[1]):
                ended = run_in_thread(loop, self._run())
        if self._head is None or not self._head.keeps_run:
            for text in discard(self._tier, sorted(self._unsaved), run=self._node_spec.parts):
                self._warn(text)
        if self.error is not None:
            logger.warning(
                "the job has ended, %s; %s", ended.reason, newest_checkpoint_text(self._tier)
            )
        elif self._interruption:
            saved_text = f"; {newest_checkpoint_text(self._tier)}" if self._stop_requested else ""
            raise KeyboardInterrupt(f"{self._interruption}{saved_text}")
        return ended

    @property
    def has_ended(self) -> bool:
        """Whether training has ended in any way other than the user ending it at once."""
        return self._is_over and not self._interruption

    @property
    def unfired_injections(self) -> tuple[Injection, ...]:
        """The faults whose place was never reached."""
        return self._unfired_injections

    async def _run(self) -> Ended:
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        self._local.open()
        self._leader_sockets = LocalSockets() if self._head is None else self._head.leader_sockets
        with handle_signals(loop, self._on_interrupt, on_leave_signal=self._on_leave_signal):
            try:
                await self._begin()
                answer = reply_function(
                    self._drains,
                    events=self._observer.events,
                    status=self._status,
                    directory=self._node_spec.job.checkpoint.directory,
                )
                if self._head is not None:
                    self._head.answer_job = answer
                async with serve_requests(self._node_spec.job.name, answer, note=self._warn):
                    ended = await self._ended
                if self._head is not None and not self._has_given_up:
                    self._head.keeps_run = False
                self._is_over = True
                self._injector.on_job_end()
                self._stop_nodes()
                if ended.ending not in (Ending.FAILED, Ending.LOST):
                    await self._nodes.wait_left(ended.nodes)
            finally:
                self._leaders.stop()
                self._stop_nodes()
                if self._head is not None:
                    await self._head.close(self._ended)
                await self._local.end_all()
                self._leader_sockets.close()
                self._unfired_injections = self._injector.close() if self._injections else ()
        return with_agent_exits(ended, self._nodes.exit_statuses())

    async def _begin(self) -> None:
        """Starts the nodes and the first coordinator."""
        self._injector_address = await self._injector.listen() if self._injections else ("", 0)
        if self._head is None or not self._head.is_taken_up:
            for node in self._plan.nodes:
                self._start_node(node)
        if self._head is None:
            self._join(self._node_spec.job.cluster.standby)
        else:
            if self._injections:
                self._head.serve_probes(self._injector.accept)
            self._head.begin(self._on_node_end, self._join_machines, on_taken=self._on_taken)
        self._leaders.set_faults(
            coordinator_places(self._injections),
            heeds=self._injector.keeps_connections,
            injector=self._injector_address,
        )
        self._local.forker.begin()
        self._leaders.start(
            self._ended,
            listener_fd=self._leader_sockets.leader_fd,
            lifeline_fd=self._local.lifeline_fd,
        )

    # -- nodes ------------------------------------------------------------------------------------

    def _start_node(self, node: int, *, is_granted: bool = False) -> None:
        """Starts a node on a machine without a live node, or on a new one that was granted."""
        spec = msgspec.structs.replace(
            self._node_spec,
            node=node,
            coordinator=self._injector.coordinator_address(node, self._leader_sockets.address),
            places=node_places(self._injections, node),
            injector=self._injector_address,
            heeds=self._injector.keeps_connections,
        )
        self._nodes.start(spec, is_granted=is_granted)

    def _on_node_end(self, ended: AgentEnded) -> None:
        if self._drains.has_asked_for(ended.node):
            self._nodes.release(ended.node)
        self._drains.on_node_left(ended.node)
        self._leaders.send(ended)

    def _on_members(self, members: Members) -> None:
        self._nodes.on_members(members)
        if not members.is_planned:
            self._drains.on_departure(members.gone)

    def _stop_nodes(self) -> None:
        self._operator.close()
        self._nodes.stop()

    def _join(self, num_nodes: int) -> None:
        """Starts nodes with numbers that were never used before."""
        for _ in range(num_nodes):
            self._start_node(self._nodes.next_node)

    def _join_machines(self) -> None:
        """Starts a node on each machine that is free, as far as the job has room for it."""
        assert self._head is not None
        is_ending = self._stop_requested or bool(self._leaders.save_only_reason)
        while self._head.machines.has_room and not is_ending:
            self._join(1)

    def _on_grant(self, replaced_node: int) -> None:
        """Starts a node on a machine that was granted in place of the lost node's."""
        if not (self._stop_requested or self._leaders.save_only_reason):
            node = self._nodes.next_node
            self._start_node(node, is_granted=True)
            self._call_observer(partial(self._observer.on_grant, node, replaced_node=replaced_node))

    # -- the coordinator --------------------------------------------------------------------------

    def _save_and_raise(self, error: Exception) -> bool:
        """Makes the job save and end; the first error that is given here is kept.

        Returns:
            Whether it is the first.
        """
        if self.error is not None:
            if repr(error) != repr(self.error):
                logger.warning("the launcher raised %r", error)
            return False
        self.error = error
        self._leaders.save_and_end(f"the launcher raised {error!r}")
        return True

    def _call_observer(self, call: Callable[[], None]) -> None:
        """Calls the observer; if it raises, the job saves and ends."""
        try:
            call()
        except Exception as error:
            self._save_and_raise(error)

    def _pass_to_observer(self, message: ToLauncher) -> None:
        self._call_observer(partial(self._observer.on_message, message))
        if self._observer.stop_reason and self._is_training and not self._ended.done():
            self._request_stop(self._observer.stop_reason)

    def _warn(self, text: str) -> None:
        self._pass_to_observer(Warned(text=text))

    def _note_request(self, text: str) -> None:
        """Shows that a machine was asked for, and why; the report has it, too."""
        self._pass_to_observer(Warned(text=text, event="machine"))

    def _report_unfit(self, node: int, reason: str) -> None:
        """Tells the coordinator that the machine of a node is unfit, and the next one, too."""
        cluster = self._node_spec.job.cluster
        rank = node * cluster.devices_per_node
        self._unfit[node] = NoticeTaken(
            node=node, rank=rank, after_s=cluster.notice_s, reason=reason
        )
        self._leaders.send(self._unfit[node])

    def _training_text(self) -> str:
        """Text about the job to show while a fork server is renewed."""
        if self._leaders.save_only_reason:
            return ", to save the live layers"
        is_led = self._is_training and self._leaders.is_connected
        return ", and training goes on meanwhile" if is_led else ""

    def _repeat_messages(self) -> None:
        """Tells a new coordinator what the one before it may not have heard or recorded."""
        for message in self._nodes.ends():
            self._leaders.send(message)
        self._drains.repeat()
        for node, notice in self._unfit.items():
            if node in self._nodes.live_nodes:
                self._leaders.send(notice)
        if self._stop_requested:
            self._leaders.send(StopRequested(is_early=self._stops_early))

    def _on_message(self, message: ToLauncher) -> None:
        """Handles a message of the coordinator."""
        self._standing = self._standing.after(message)
        if self._head is not None and isinstance(message, AwaitingMachine | Running):
            self._head.machines.note_shortage(is_short=isinstance(message, AwaitingMachine))
        match message:
            case Running() if not self._is_training:
                self._is_training = True
                if self._head is not None:
                    self._head.keeps_run = False
                if self._injections:
                    self._injector.on_training_start()
            case Warned():
                self._drains.on_refusal(message.undrained, message.text)
                self._drains.on_departure(message.left)
                self._drains.on_loss(message.gone, message.text)
                self._nodes.on_candidates_lost(message.gone)
            case Recovering() if message.kind is LossKind.LOST:
                self._drains.on_loss(message.nodes, message.reason)
            case Changed():
                kinds = message.kinds.items()
                self._drains.on_departure([node for node, kind in kinds if kind in LEAVING])
            case Unsaved():
                self._unsaved.add((message.iteration, message.epoch))
        self._operator.on_coordinator_message(message)
        self._pass_to_observer(message)

    def _on_taken(self) -> None:
        """Handles that another head has taken the run up: its nodes and records are that one's."""
        assert self._head is not None
        self._head.is_taken = self._head.keeps_run = True
        self._end("another head has taken this run up, and goes on with its nodes")

    def _on_leader_restart(self, lost_s: float, now_s: float) -> None:
        if self.error is None:
            call = partial(self._observer.on_coordinator_restart, lost_s=lost_s, now_s=now_s)
            self._call_observer(call)

    # -- the user, and faults ---------------------------------------------------------------------

    def _job_nodes(self) -> Collection[int]:
        """The nodes that live and were not lost; the end of a lost machine's node is not known."""
        return set(self._nodes.live_nodes).difference(self._standing.lost)

    def _status(self) -> JobStatus:
        """What the job does at the moment."""
        live, plan = self._nodes.live_nodes, self._standing.plan
        known = {*live, *(plan.nodes if plan is not None else ())}
        events = self._observer.events()
        return job_status(
            self._node_spec.job,
            self._standing,
            hosts={node: self._nodes.host(node) for node in known},
            live=live,
            unreachable=[node for node in live if not self._nodes.is_reachable(node)],
            leaving=self._drains.nodes,
            last_event=events[-1] if events else None,
        )

    def _on_fire(self, injection: Injection) -> None:
        first = self._nodes.next_node
        nodes = injection.nodes or tuple(range(first, first + injection.num_nodes))
        injection = replace(injection, nodes=nodes)
        self._call_observer(partial(self._observer.on_fault, injection, now_s=time.monotonic()))

    def _on_interrupt(self) -> None:
        """Handles Ctrl-C."""
        if self._ended.done():
            return
        if not self._is_training:
            self._interruption = "interrupted before training began"
        elif self._is_interrupted:
            self._interruption = "interrupted again, so nothing was saved"
        else:
            self._is_interrupted = True
            self._request_stop()
            return
        self._end(self._interruption)

    def _on_leave_signal(self) -> None:
        """Handles a signal that tells the process to leave."""
        if self._is_training and not self._ended.done():
            self._request_stop()
        else:
            self._on_interrupt()

    def _request_stop(self, reason: str = "") -> None:
        """Has training stop at the next commit; without a reason, the user asked for it."""
        if not self._stop_requested:
            self._stop_requested, self._stops_early = True, bool(reason)
            self._leaders.send(StopRequested(is_early=self._stops_early))
            self._call_observer(partial(self._observer.on_stop_request, reason))

    def _end(self, reason: str) -> None:
        """Ends the job for a reason that the coordinator does not know."""
        if not self._ended.done():
            self._has_given_up = True
            ended = Ended(ending=Ending.LOST, reason=reason, failure=None, nodes=(), epoch=0)
            self._ended.set_result(ended)
