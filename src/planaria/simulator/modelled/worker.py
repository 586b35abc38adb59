"""A modelled worker: takes the actions of protocol/worker_state.py without tensors.

A layer's state is a hash of everything that was ever applied to it, so that layers of two ages, a
lost sample and a sample used twice are visible in it. An abort or a lost peer interrupts every
action that takes time, except an optimizer step.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from planaria.checkpoint.memory.wire import copy_peers
from planaria.core.commit import Votes
from planaria.core.messages import (
    Abort,
    Blame,
    EpochReady,
    Fact,
    IterationDone,
    Order,
    Raised,
    SaveLayers,
    Shutdown,
    StartEpoch,
    Stopped,
    ToNode,
    WorkerFailed,
    WorkerReady,
)
from planaria.core.plan import Plan
from planaria.errors import CheckpointError
from planaria.protocol import worker_actions as act
from planaria.protocol.worker_state import (
    EPOCH_ERRORS,
    MessageSummary,
    WorkerRules,
    WorkerState,
    WorkerStep,
    on_computed,
    on_epoch_left,
    on_exchanged,
    on_iteration_told,
    on_message,
    on_order,
    on_raised,
    on_save_begun,
    on_settled,
    transfer_peers,
    votes,
)
from planaria.simulator.loop import Future
from planaria.simulator.modelled.copying import CopyMemory, SimulatedCopying
from planaria.simulator.modelled.exchange import exchange, prepare, receive_silently, wait_taken
from planaria.simulator.modelled.executor import (
    NOT_YET,
    ModelledLayer,
    ModelledPulse,
    SimulatedExecutor,
)
from planaria.simulator.modelled.layout import layout_of
from planaria.simulator.modelled.links import SimulatedLinks
from planaria.simulator.modelled.saver import SaveTarget, SimulatedSaver
from planaria.simulator.network import Endpoint
from planaria.simulator.scenario import PlannedJob, content_after

_STEP_S = 0.002  # Optimizer step of one layer.
_LEAVE_S = 1.0  # Limit for a save that is being written when the job ends.


class CodeError(Exception):
    """An exception of the code in a worker.

    Attributes:
        blame: party whose fault it is.
        layers: layers that it was computing; empty: none.
    """

    def __init__(self, blame: Blame, layers: Sequence[int]) -> None:
        super().__init__(f"{blame} in {layers}")
        self.blame: Blame = blame
        self.layers = layers

    @property
    def description(self) -> Raised:
        """Description for the coordinator."""
        if not self.layers:
            return Raised(error=self.blame)
        first, end = min(self.layers), max(self.layers) + 1
        return Raised(error=self.blame, first_layer=first, end_layer=end)


class WorkerSurroundings(SaveTarget, Protocol):
    """Environment of a worker: the job, its saves, the disk, and the checkers."""

    job: PlannedJob

    def read(self, source: str, layer: int, node: int) -> int:
        """Content of a layer in a version on disk; source "": content before the first iteration.

        Args:
            node: node that reads it.

        Raises:
            SpoiltError: the layer is not what was saved, or the node cannot read it.
        """

    def on_place(self, place: str, worker: "SimulatedWorker", iteration: int) -> None:
        """Announces that a worker is at a place at which a fault may strike."""

    def on_crash(self, node: int, blame: Blame, raised: Raised) -> None:
        """Announces that the code in a worker of a node raised, or that its process ended."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What an agent gives a worker that it forks.

    Attributes:
        startup_s: seconds until it reports.
        memory: memory with the copies that it keeps.
    """

    node: int
    pid: int
    startup_s: float
    memory: CopyMemory


class SimulatedWorker:
    """The worker of a rank, from its start to its end.

    Args:
        is_member: callable that says whether the node is a member, as far as it knows.
        blame_at: callable that says, for a place, whose fault an exception there is; "": none.

    Attributes:
        pulse: present work of the worker.
        is_leaving: whether its process is ending by itself.
        layers: layers that it holds, by number.
        state: state of the worker's protocol.
        agent_end: connection to its agent.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        links: SimulatedLinks,
        *,
        surroundings: WorkerSurroundings,
        is_member: Callable[[], bool],
        blame_at: Callable[[str], Blame | Literal[""]],
    ) -> None:
        self._blame_at = blame_at
        self.pulse = ModelledPulse()
        self.is_leaving = False
        self.process = links.process
        self.links = links
        self.rank = links.rank
        self.pid = spec.pid
        self.layers: dict[int, ModelledLayer] = {}
        self.agent_end: Endpoint
        self._saver = SimulatedSaver(
            links.process,
            links.rank,
            surroundings,
            report=self._report,
            is_member=is_member,
            is_over=lambda epoch: self._inbox.is_over(epoch),
        )
        self._node = spec.node
        self._surroundings = surroundings
        self._startup_s = spec.startup_s
        job = surroundings.job.rules.job
        self._copying = SimulatedCopying(links.process, links, spec.memory, job.checkpoint)
        self.state = WorkerState(
            rules=WorkerRules(
                rank=links.rank,
                pid=spec.pid,
                address=links.address,
                layout=surroundings.job.rules.layout,
                training=job.training,
                persist_every=job.checkpoint.persist_every,
                save_timeout_s=job.checkpoint.timeout_s,
            )
        )
        self._inbox = MessageSummary()
        self._orders: deque[Order] = deque()
        self._order_future: Future[None] | None = None
        # State of the epoch that is served.
        self._executor: SimulatedExecutor | None = None
        self._iteration_end_s = 0.0

    def on_coordinator_message(self, message: ToNode) -> None:
        """Handles a message like the control thread of a real worker: an abort breaks its links."""
        self._inbox, order = on_message(self._inbox, message, now_s=self.process.now_s)
        if isinstance(message, Abort):
            self.links.abort(first_epoch=message.epoch)
        if order is None:
            return
        self._orders.append(order)
        order_future, self._order_future = self._order_future, None
        if order_future is not None:
            order_future.resolve(None)

    def _report(self, message: Fact) -> None:
        self.agent_end.send(message)

    async def run(self) -> None:
        """Obeys one order after the other until the job shuts down."""
        await self.process.sleep(self._startup_s)
        if blame := self._blame_at("start"):
            self._report(self._failure(CodeError(blame, ()), -1))
            if blame == "job":
                await self._answer_without_layers()
            self._leave()
            return
        host, port = self.links.address
        self._report(
            WorkerReady(
                node=self._node, rank=self.rank, pid=self.pid, pid_start=0.0, host=host, port=port
            )
        )
        while not self.is_leaving:
            await self._obey(await self._next_order())

    def _leave(self) -> None:
        self.is_leaving = True
        self.process.kill()

    async def _answer_without_layers(self) -> None:
        """Answers every abort that it holds nothing, until the job shuts down."""
        while not isinstance(order := await self._next_order(), Shutdown):
            if isinstance(order, Abort):
                self._report(Stopped(rank=self.rank, epoch=order.epoch, ages={}, complete=()))

    async def _next_order(self) -> Order:
        while not self._orders:
            self._order_future = Future()
            await self._order_future
        return self._orders.popleft()

    async def _obey(self, order: Order) -> None:
        """Carries out an order; reports an exception of the code as a failure."""
        try:
            await self.carry_out(on_order(self.state, order))
        except EPOCH_ERRORS as error:
            if self.state.start is None:
                raise
            await self.carry_out(on_epoch_left(self.state, error))
        except CodeError as error:
            await self.carry_out(on_raised(self.state))
            self._report(self._failure(error, self.state.epoch))

    async def carry_out(self, step: WorkerStep | None) -> None:
        """Takes the actions of a step and of the steps that follow from it."""
        while step is not None:
            self.state, actions = step
            step = None
            for action in actions:
                assert step is None, action  # Only the last action returns a next step.
                step = await self._act(action)

    async def _act(self, action: act.Action) -> WorkerStep | None:
        """Takes an action; returns the next step if the action has one."""
        match action:
            case act.Leave():
                if action.waits:
                    await self._saver.wait_end(timeout_s=_LEAVE_S)
                    self.is_leaving = True
                else:
                    self._leave()
            case act.TellHeld():
                self._answer(action.epoch)
            case act.KeepLayers():
                self.layers = {
                    n: layer_state for n, layer_state in self.layers.items() if n in action.layers
                }
            case act.Settle():
                await self._settle(action)
                return on_settled(self.state, action)
            case act.WriteLast():
                await self._write_last(action.order)
            case act.Reach() if action.step not in ("optimizer", "applied"):  # See _apply.
                self._surroundings.on_place(action.step, self, action.iteration)
            case act.Regroup():
                await self._regroup(action.start)
            case act.Exchange():
                return on_exchanged(self.state, await self._exchange(action.start))
            case act.BeginEpoch():
                self._begin_epoch(action)
            case act.Reach() | act.CheckVector() | act.Compare():
                pass
            case _:
                return await self._act_in_epoch(action)
        return None

    async def _act_in_epoch(self, action: act.Action) -> WorkerStep | None:
        """Takes an action of an epoch that is served; returns the same as `_act`."""
        match action:
            case act.SaveFirst():
                is_begun = await self._save(action.age)
                self._iteration_end_s = self.process.now_s
                return on_save_begun(self.state, is_begun)
            case act.BeginLast() | act.Evaluate():
                raise AssertionError(action)  # No scenario asks for evaluations.
            case act.Compute():
                votes = partial(self._votes, action.iteration)
                vector = await self._current_executor().run(
                    action.iteration, self.layers, votes=votes
                )
                return on_computed(self.state, action.iteration, vector)
            case act.ReceiveSilently():
                await receive_silently(self, self._current_start(), action.iteration)
            case act.Apply():
                await self._apply(action.iteration)
            case act.Copy():
                self._copy(action)
            case act.Save():
                await self._save(action.age)
            case act.TellIteration():
                self._tell_iteration(action)
                return on_iteration_told(self.state, action)
            case act.SaveLast():
                await self._save_last(self._owned_layers(), action.age, self.state.epoch)
            case act.WaitWritten():
                await self._saver.wait_written(action.epoch, timeout_s=action.timeout_s)
            case act.EndEpoch():
                self.links.abort(first_epoch=action.epoch + 1)
                self._copying.end_epoch()
            case act.Complain():
                self._report(action.message)
            case _:
                raise AssertionError(action)
        return None

    def _current_start(self) -> StartEpoch:
        assert self.state.start is not None
        return self.state.start

    def _current_executor(self) -> SimulatedExecutor:
        assert self._executor is not None
        return self._executor

    def _raise_if_faulty(self, layers: Sequence[int]) -> None:
        if blame := self._blame_at("layers"):
            raise CodeError(blame, layers)

    def _failure(self, error: CodeError, epoch: int) -> WorkerFailed:
        self._surroundings.on_crash(self._node, error.blame, error.description)
        return WorkerFailed(
            node=self._node,
            rank=self.rank,
            traceback="raised",
            pid=self.pid,
            epoch=epoch,
            blame=error.blame,
            raised=error.description,
        )

    # -- between epochs ---------------------------------------------------------------------------

    def _answer(self, epoch: int) -> None:
        """Tells the coordinator what this rank holds."""
        state = self.state
        self._surroundings.on_place("answer", self, state.vector_iteration + 1)
        complete_layers = {
            layer: layer_state
            for layer, layer_state in self.layers.items()
            if layer_state.age != NOT_YET
        }
        self._report(
            Stopped(
                rank=self.rank,
                epoch=epoch,
                ages={layer: layer_state.age for layer, layer_state in complete_layers.items()},
                complete=tuple(
                    n
                    for n, layer_state in complete_layers.items()
                    if layer_state.gradients_of == layer_state.age
                ),
                vector_iteration=state.vector_iteration,
                vector=state.encoded_vector,
                since=state.since,
                copies=self._copying.memory.versions(),
            )
        )

    async def _settle(self, settle: act.Settle) -> None:
        if settle.drops:
            self.layers = {}
        if settle.outcome is not None:
            await self._apply(settle.outcome[0])
        self.keep_only_age(settle.age)
        for layer_state in self.layers.values():
            layer_state.gradients_of = -1

    def keep_only_age(self, age: int) -> None:
        """Drops layers of another age."""
        self.layers = {
            layer: layer_state
            for layer, layer_state in self.layers.items()
            if layer_state.age == age
        }

    async def _apply(self, iteration: int) -> None:
        """Takes the optimizer step of layers with complete gradients; no abort interrupts it."""
        self._surroundings.on_place("optimizer", self, iteration)
        for layer, layer_state in sorted(self.layers.items()):
            if layer_state.gradients_of == iteration and layer_state.age != NOT_YET:
                if blame := self._blame_at("step"):
                    raise CodeError(blame, (layer,))
                with self.pulse.computing(layer, layer + 1):
                    await self.process.sleep(_STEP_S)
                    self.step(layer, layer_state, iteration)

    def step(self, layer: int, layer_state: ModelledLayer, iteration: int) -> None:
        """Takes the optimizer step of a layer, unless it was taken already."""
        del layer
        if layer_state.age == iteration:
            layer_state.content = content_after(
                layer_state.content, iteration, layer_state.gradient
            )
            layer_state.age += 1
        assert layer_state.age == iteration + 1, (layer_state.age, iteration)

    # -- an epoch ---------------------------------------------------------------------------------

    async def _regroup(self, start: StartEpoch) -> None:
        peers = transfer_peers(start.rounds, self.rank)
        if self.state.takes_part:
            peers |= layout_of(start.plan).peers(self.rank) | copy_peers(self.rank, start.copies)
        addresses = {r: (host, port) for r, (host, port) in start.addresses.items()}
        await self.links.begin(start.epoch, addresses=addresses, peers=peers)

    async def _exchange(self, start: StartEpoch) -> int:
        """Exchanges layers until this rank has its own; returns the epoch's first iteration."""
        layout, takes_part = layout_of(start.plan), self.state.takes_part
        transfers = [transfer for transfers in start.rounds for transfer in transfers]
        own = layout.layers_of(self.rank) if takes_part else ()
        if start.plan.silent:
            start = await prepare(self, start, layout)
        else:
            sent = {t.layer for t in transfers if t.source == self.rank}
            wanted = {*sent, *own}.difference(self.layers)
            copies = self._copying.states(wanted, start.copied)
            await exchange(self, transfers, start.iteration, copies=copies)
            if not start.vector:
                read_save = partial(self._surroundings.read, start.source, node=self._node)
                for n in sorted(set(own) - self.layers.keys()):
                    read = copies[n] if start.copied else read_save(n)
                    self.layers[n] = ModelledLayer(age=start.iteration, content=read)
        if not takes_part:
            await wait_taken(self, transfers)
        assert set(own) <= self.layers.keys(), (own, self.layers.keys())
        return start.iteration

    def _begin_epoch(self, begin: act.BeginEpoch) -> None:
        start = begin.start
        self._report(
            EpochReady(rank=self.rank, epoch=start.epoch, layers_materialised=len(self.layers))
        )
        self._copying.begin_epoch(start, self._contents(start.plan), is_planned=begin.is_planned)
        self._executor = SimulatedExecutor(
            self.links,
            start.plan,
            job=self._surroundings.job,
            pulse=self.pulse,
            on_place=lambda place, number: self._surroundings.on_place(place, self, number),
            on_computed=self._raise_if_faulty,
        )
        self._iteration_end_s = self.process.now_s

    def _contents(self, plan: Plan) -> dict[int, int]:
        """Content of each layer that this rank holds, without its silent layers."""
        silent = plan.silent.get(self.rank, ())
        return {n: layer_state.content for n, layer_state in self.layers.items() if n not in silent}

    # -- an iteration -----------------------------------------------------------------------------

    async def _votes(self, iteration: int) -> Votes:
        copied, uncopied = await self._copying.votes(iteration)
        is_writing = self._saver.is_writing
        return votes(
            self.state,
            self._inbox,
            iteration=iteration,
            now_s=self.process.now_s,
            copied=copied,
            uncopied=uncopied,
            is_writing=is_writing,
        )

    def _copy(self, copy: act.Copy) -> None:
        assert all(layer_state.age == copy.age for layer_state in self.layers.values())
        plan = self._current_start().plan
        contents = self._contents(plan)
        self._copying.on_applied(copy.vector, plan, contents, age=copy.age, goes_on=copy.goes_on)

    def _tell_iteration(self, action: act.TellIteration) -> None:
        executor, vector = self._current_executor(), action.vector
        before_s, self._iteration_end_s = self._iteration_end_s, self.process.now_s
        self._report(
            IterationDone(
                rank=self.rank,
                epoch=self.state.epoch,
                iteration=action.iteration,
                loss=vector.loss,
                num_samples=vector.num_samples,
                sample_digest=vector.sample_digest,
                seconds=self._iteration_end_s - before_s,
                stall_s=0.0,
                action_s=executor.action_s,
                eager_s=executor.eager_s,
                peak_bytes=0,
                ends=action.ends,
                switches=action.switches,
            )
        )

    # -- saves ------------------------------------------------------------------------------------

    async def _write_last(self, order: SaveLayers) -> None:
        """Saves the layers that the order names for this rank, before the job ends."""
        layers, age = order.layers.get(self.rank, ()), order.iteration
        try:
            states = self._copying.states(set(layers) - self.layers.keys(), order.copied)
        except CheckpointError as error:
            self._saver.report_failure(age, order.epoch, str(error))
            return
        self.layers |= {n: ModelledLayer(age=age, content=content) for n, content in states.items()}
        await self._save_last(layers, age, order.epoch)

    def _owned_layers(self) -> list[int]:
        owner = layout_of(self._current_start().plan).owner
        return [n for n in sorted(self.layers) if owner[n] == self.rank]

    async def _save(self, age: int) -> bool:
        if layers := self._owned_layers():
            self._surroundings.on_place("save", self, age)
            contents = {n: self.layers[n].content for n in layers}
            return await self._saver.save(contents, age, self.state.epoch)
        return True

    async def _save_last(self, layers: Sequence[int], age: int, epoch: int) -> None:
        if layers:
            self._surroundings.on_place("save", self, age)
            await self._saver.save_last({n: self.layers[n].content for n in layers}, age, epoch)
