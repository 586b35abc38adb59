"""A modelled worker: what engine/worker.py does between orders and answers, without tensors.

A layer's state is a hash of all that was ever applied to it, so two ages, a sample that is lost and
one that is used twice can be seen in it. What takes time is broken off by an abort or a lost peer,
but for an optimizer step.

Source: engine/worker.py, apply.py and saver.py, whose order of things it keeps.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Protocol

import msgspec

from planaria.checkpoint.memory.wire import copy_peers
from planaria.core.commit import CommitVector, Votes, decode_vector, encode_vector
from planaria.core.messages import (
    AT_COMMIT,
    Abort,
    Blame,
    CopySpoilt,
    EpochReady,
    Fact,
    IterationDone,
    Order,
    PeerUnreachable,
    Raised,
    SaveLayers,
    Shutdown,
    StartEpoch,
    Stopped,
    StopRequested,
    ToNode,
    WorkerFailed,
    WorkerReady,
)
from planaria.core.plan import Plan
from planaria.errors import AbortedError, CheckpointError, PeerLostError, SpoiltError
from planaria.simulator.loop import Process, Waiting
from planaria.simulator.modelled.copying import CopyMemory, SimulatedCopying
from planaria.simulator.modelled.exchange import exchange, prepare, receive_silently, wait_taken
from planaria.simulator.modelled.executor import NOT_YET, HeldLayer, Pulse, SimulatedExecutor
from planaria.simulator.modelled.layout import Layout, layout_of
from planaria.simulator.modelled.links import SimulatedLinks
from planaria.simulator.modelled.saver import SimulatedSaver, SimulatedSaves
from planaria.simulator.network import End
from planaria.simulator.scenario import PlannedJob, content_after

_STEP_S = 0.002  # The optimizer, a layer.
_LEAVE_S = 1.0  # For a save that is being written when the job has ended.


class CodeError(Exception):
    """When the code in a worker raises.

    Attributes:
        layers: that it was computing.
    """

    def __init__(self, blame: Blame, layers: Sequence[int]) -> None:
        super().__init__(f"{blame} in {layers}")
        self.blame: Blame = blame
        self.layers = layers

    @property
    def raised(self) -> Raised:
        """What is told of it."""
        if not self.layers:
            return Raised(error=self.blame)
        first, end = min(self.layers), max(self.layers) + 1
        return Raised(error=self.blame, first_layer=first, end_layer=end)


class Surroundings(Protocol):
    """What a worker finds around it, and what watches it."""

    job: PlannedJob
    saves: SimulatedSaves

    def write(self, iteration: int, epoch: int, layers: dict[int, int]) -> None:
        """Writes layers to disk."""

    def read(self, source: str, layer: int) -> int:
        """A layer of a version on disk, or the first one if that is "".

        Raises:
            SpoiltError: it is not what was saved.
        """

    def reached(self, place: str, worker: "SimulatedWorker", iteration: int) -> None:
        """A worker is at a place at which a fault may strike."""

    def crashed(self, node: int, blame: Blame, raised: Raised) -> None:
        """The code in a worker of a node has raised, or its process has ended."""


class SimulatedWorker:
    """The worker of a rank, from its start to its end.

    Args:
        startup_s: until it reports.
        memory: for the copies that it keeps.
        may_write: whether its node is a member, as far as it knows.
        raises: whose fault it is that its code raises now, at a place, "" if it does not.

    Attributes:
        pulse: what it is doing.
        is_leaving: its process ends by itself.
        held: the layers that it has.
        epoch: the newest that it has begun, or was told to leave older ones for.
        line: to its agent.
    """

    def __init__(
        self,
        process: Process,
        links: SimulatedLinks,
        around: Surroundings,
        *,
        node: int,
        rank: int,
        pid: int,
        startup_s: float,
        memory: CopyMemory,
        may_write: Callable[[], bool],
        raises: Callable[[str], Blame | Literal[""]],
    ) -> None:
        self._raises = raises
        self.pulse = Pulse()
        self.is_leaving = False
        self.process = process
        self.links = links
        self.rank = rank
        self.pid = pid
        self.held: dict[int, HeldLayer] = {}
        self.line: End
        self._saver = SimulatedSaver(
            process,
            rank,
            saves=around.saves,
            write=around.write,
            say=self._say,
            may_write=may_write,
            is_over=lambda epoch: epoch < self._first_epoch or self._is_shut_down,
        )
        self._node = node
        self._around = around
        self._startup_s = startup_s
        self._rules = around.job.rules
        self._copying = SimulatedCopying(process, links, memory, self._rules.job.checkpoint)
        self.epoch = -1
        self._saved_epoch = -1
        self._owes_save = False
        self._vector: tuple[int, CommitVector] | None = None
        self._since = -1
        self._stop_requested = False
        self._next_epoch = -1
        self._takes_part, self._switches_at = False, -1
        self._orders: deque[Order] = deque()
        self._first_epoch = -1  # Older ones are over.
        self._is_shut_down = False
        self._ordered: Waiting[None] | None = None

    @property
    def vector_iteration(self) -> int:
        """Of the newest commit vector that it holds, -1 if none."""
        return self._vector[0] if self._vector is not None else -1

    def hear(self, message: ToNode) -> None:
        """Takes in an order, as the control thread does: an abort frees whoever waits."""
        if isinstance(message, StopRequested):
            self._stop_requested = True
            return
        assert isinstance(message, Order)
        if isinstance(message, StartEpoch):
            if message.iteration == AT_COMMIT:
                self._next_epoch = message.epoch
            else:
                self._stop_requested = False
        if isinstance(message, Abort):
            self._first_epoch = max(self._first_epoch, message.epoch)
            self.links.abort(first_epoch=message.epoch)
        if isinstance(message, Shutdown):
            self._is_shut_down = True
        self._orders.append(message)
        ordered, self._ordered = self._ordered, None
        if ordered is not None:
            ordered.resolve(None)

    def _say(self, message: Fact) -> None:
        self.line.send(message)

    async def run(self) -> None:
        """Obeys one order after the other until the job shuts down."""
        await self.process.sleep(self._startup_s)
        if blame := self._raises("start"):
            self._say(self._failure(CodeError(blame, ()), -1))
            if blame == "job":
                await self._answer_nothing()
            self._leave()
            return
        host, port = self.links.address
        self._say(
            WorkerReady(
                node=self._node, rank=self.rank, pid=self.pid, pid_start=0.0, host=host, port=port
            )
        )
        while not isinstance(order := await self._next_order(), Shutdown):
            if isinstance(order, Abort) and order.replaced.get(self.rank) == self.pid:
                self._leave()
                return
            try:
                await self.obey(order)
            except CodeError as error:
                self._say(self._failure(error, order.epoch))
        await self._saver.leave(timeout_s=_LEAVE_S)

    def _leave(self) -> None:
        self.is_leaving = True
        self.process.kill()

    async def _answer_nothing(self) -> None:
        """Says of every epoch that it holds nothing of it, until the job has ended."""
        while not isinstance(order := await self._next_order(), Shutdown):
            if isinstance(order, Abort):
                self._say(Stopped(rank=self.rank, epoch=order.epoch, ages={}, complete=()))

    async def _next_order(self) -> Order:
        while not self._orders:
            self._ordered = Waiting()
            await self._ordered
        return self._orders.popleft()

    async def obey(self, order: Abort | StartEpoch | SaveLayers) -> None:
        """Carries out an order; one that came before, or is for another worker, not."""
        match order:
            case Abort() if order.epoch >= self.epoch:
                self.epoch, self._owes_save = order.epoch, False
                self.answer(order)
            case SaveLayers() if order.epoch == self.epoch > self._saved_epoch:
                self._saved_epoch = order.epoch
                await self.settle(order, order.iteration, order.vector)
                await self._write_last(order)
            case StartEpoch() if self._is_for_this(order):
                self.epoch = order.epoch
                try:
                    await self._serve_epoch(order)
                except AbortedError:
                    return
                except CheckpointError as error:
                    source = error.source if isinstance(error, SpoiltError) else ""
                    rank, reason = self.rank, str(error)
                    self._say(
                        CopySpoilt(rank=rank, epoch=order.epoch, reason=reason, source=source)
                    )
                except PeerLostError as loss:
                    self._say(
                        PeerUnreachable(
                            rank=self.rank, epoch=order.epoch, peer=loss.rank, reason=str(loss)
                        )
                    )

    def _computed(self, layers: Sequence[int]) -> None:
        if blame := self._raises("layers"):
            raise CodeError(blame, layers)

    def _failure(self, error: CodeError, epoch: int) -> WorkerFailed:
        self._around.crashed(self._node, error.blame, error.raised)
        return WorkerFailed(
            node=self._node,
            rank=self.rank,
            traceback="raised",
            pid=self.pid,
            epoch=epoch,
            blame=error.blame,
            raised=error.raised,
        )

    def _is_for_this(self, start: StartEpoch) -> bool:
        own = start.addresses.get(self.rank)
        is_new = start.epoch > self.epoch or (
            start.epoch == self.epoch and self.links.epoch < start.epoch
        )
        is_agreed = self._switches_at >= 0 or not self._takes_part
        is_its_turn = is_agreed or start.iteration != AT_COMMIT
        is_meant = own is not None and tuple(own) == self.links.address
        return is_new and is_its_turn and is_meant

    # -- between epochs ---------------------------------------------------------------------------

    def answer(self, order: Abort) -> None:
        """Says what this rank holds."""
        iteration, vector = -1, b""
        if self._vector is not None:
            iteration, vector = self._vector[0], encode_vector(self._vector[1])
        self._around.reached("answer", self, iteration + 1)
        whole = {layer: held for layer, held in self.held.items() if held.age != NOT_YET}
        self._say(
            Stopped(
                rank=self.rank,
                epoch=order.epoch,
                ages={layer: held.age for layer, held in whole.items()},
                complete=tuple(n for n, held in whole.items() if held.gradients_of == held.age),
                vector_iteration=iteration,
                vector=vector,
                since=self._since,
                copies=self._copying.memory.versions(),
            )
        )

    async def settle(self, order: StartEpoch | SaveLayers, iteration: int, vector: bytes) -> None:
        """Brings the layers to the age at which all go on; drops what does not get there."""
        if order.since != self._since:
            self._since, self._vector, self.held = order.since, None, {}
        if vector:
            self._vector = (iteration - 1, decode_vector(vector, self._rules.layout))
            await self.apply(iteration - 1)
        self.held = {layer: held for layer, held in self.held.items() if held.age == iteration}
        for held in self.held.values():
            held.gradients_of = -1

    async def apply(self, iteration: int) -> None:
        """Takes the optimizer step of the layers that are ready for it; nothing can stop it."""
        self._around.reached("optimizer", self, iteration)
        for layer, held in sorted(self.held.items()):
            if held.gradients_of == iteration and held.age != NOT_YET:
                if blame := self._raises("step"):
                    raise CodeError(blame, (layer,))
                with self.pulse.computing(layer, layer + 1):
                    await self.process.sleep(_STEP_S)
                    self.step(layer, held, iteration)

    def step(self, layer: int, held: HeldLayer, iteration: int) -> None:
        """The optimizer step of a layer; nothing if it was taken already."""
        del layer
        if held.age == iteration:
            held.content = content_after(held.content, iteration, held.gradient)
            held.age += 1
        assert held.age == iteration + 1, (held.age, iteration)

    # -- an epoch ---------------------------------------------------------------------------------

    async def _serve_epoch(self, start: StartEpoch) -> None:
        plan, rank = start.plan, self.rank
        is_planned = start.iteration == AT_COMMIT
        start = await self._settled(start)
        transfers = [transfer for transfers in start.rounds for transfer in transfers]
        layout = layout_of(plan)
        self._takes_part, self._switches_at = rank in layout.ranks, -1
        if not self._takes_part and all(t.source != rank for t in transfers):
            return
        self._around.reached("regroup", self, start.iteration)
        ends = [(t.source, t.target) for t in transfers]
        peers = {a if b == rank else b for a, b in ends if rank in (a, b)}
        if rank in layout.ranks:
            peers |= layout.peers(rank) | copy_peers(rank, start.copies)
        addresses = {r: (host, port) for r, (host, port) in start.addresses.items()}
        await self.links.begin(start.epoch, addresses=addresses, peers=peers)
        self._around.reached("transfer", self, start.iteration)
        if plan.silent:
            start = await prepare(self, start, layout)
        own = layout.held(rank) if self._takes_part else ()
        if not plan.silent:
            sent = {t.layer for t in transfers if t.source == rank}
            wanted = {*sent, *own}.difference(self.held)
            copies = self._copying.states(wanted, start.copied)
            await exchange(self, transfers, start.iteration, copies=copies)
            if not start.vector:
                for n in sorted(set(own) - self.held.keys()):
                    read = copies[n] if start.copied else self._around.read(start.source, n)
                    self.held[n] = HeldLayer(age=start.iteration, content=read)
        if not self._takes_part:
            await wait_taken(self, transfers)
            return
        assert set(own) <= self.held.keys(), (own, self.held.keys())
        self._around.reached("resume", self, start.iteration)
        ready = EpochReady(rank=rank, epoch=start.epoch, layers_materialised=len(self.held))
        self._say(ready)
        try:
            self._copying.enter(start, self._contents(start.plan), is_planned=is_planned)
            await self._train(start, layout)
        except (AbortedError, CodeError, PeerLostError):
            self.links.abort(first_epoch=start.epoch + 1)
            raise
        finally:
            self._copying.leave()
        self.links.abort(first_epoch=start.epoch + 1)

    def _contents(self, plan: Plan) -> dict[int, int]:
        """What this rank holds and has copies of, but for what it has silently."""
        silent = plan.silent.get(self.rank, ())
        return {n: held.content for n, held in self.held.items() if n not in silent}

    async def _settled(self, start: StartEpoch) -> StartEpoch:
        """The order with its iteration, as far as this rank can know it, and its layers so."""
        if start.iteration == AT_COMMIT:
            if self._switches_at < 0:
                self._since, self.held = start.since, {}
                return start
            assert self._vector is not None
            vector = encode_vector(self._vector[1])
            start = msgspec.structs.replace(start, iteration=self._switches_at, vector=vector)
        await self.settle(start, start.iteration, start.vector)
        return start

    async def _train(self, start: StartEpoch, layout: Layout) -> None:
        training = self._rules.job.training
        iteration = start.iteration
        ends = iteration >= training.iterations
        executor = self._executor(start, layout)
        if start.persists:
            self._owes_save = not await self._save(start, layout, iteration)
        end_s = self.process.now_s
        while not ends:
            self._around.reached("start", self, iteration)
            votes = partial(self._votes, start.epoch, iteration)
            vector = await executor.run(iteration, self.held, votes=votes)
            self._vector = (iteration, vector)
            own = layout.held(self.rank)
            self.held = {n: held for n, held in self.held.items() if n in own}
            await receive_silently(self, start, iteration)
            await self.apply(iteration)
            assert all(held.age == iteration + 1 for held in self.held.values())
            ends = vector.is_last(iteration, training)
            switches = not ends and vector.switches(start.plan)
            self._copying.applied(
                vector,
                start.plan,
                self._contents(start.plan),
                age=iteration + 1,
                goes_on=not ends and not switches,
            )
            if not ends and (vector.saves or self._persists(iteration + 1)):
                await self._save(start, layout, iteration + 1)
            self._owes_save = vector.votes.unsaved > 0 and not vector.saves
            before_s, end_s = end_s, self.process.now_s
            self._say(
                IterationDone(
                    rank=self.rank,
                    epoch=start.epoch,
                    iteration=iteration,
                    loss=vector.loss,
                    num_samples=vector.num_samples,
                    sample_digest=vector.sample_digest,
                    seconds=end_s - before_s,
                    stall_s=0.0,
                    action_s=executor.action_s,
                    eager_s=executor.eager_s,
                    peak_bytes=0,
                    ends=ends,
                    switches=switches,
                )
            )
            iteration += 1
            if ends:
                await self._save_last(self._owned(layout), iteration, start.epoch)
            if switches:
                self._switches_at = iteration
                return
        await self._saver.wait_written(start.epoch)

    def _executor(self, start: StartEpoch, layout: Layout) -> SimulatedExecutor:
        return SimulatedExecutor(
            self.process,
            self.links,
            layout,
            job=self._around.job,
            pulse=self.pulse,
            shadows=start.plan.shadows.get(self.rank, ()),
            reached=lambda place, number: self._around.reached(place, self, number),
            computed=self._computed,
        )

    async def _votes(self, epoch: int, iteration: int) -> Votes:
        copied, uncopied = await self._copying.votes(iteration)
        stops, switches = self._stop_requested, self._next_epoch > epoch
        owes, writes = self._owes_save, self._saver.is_writing
        return Votes(int(stops), int(switches), copied, uncopied, int(owes), int(writes))

    # -- saves ------------------------------------------------------------------------------------

    async def _write_last(self, order: SaveLayers) -> None:
        """Saves what this rank is told to, before the job ends."""
        layers, age = order.layers.get(self.rank, ()), order.iteration
        try:
            states = self._copying.states(set(layers) - self.held.keys(), order.copied)
        except CheckpointError as error:
            self._saver.failed(age, order.epoch, str(error))
            return
        self.held |= {n: HeldLayer(age=age, content=content) for n, content in states.items()}
        await self._save_last(layers, age, order.epoch)

    def _owned(self, layout: Layout) -> list[int]:
        return [n for n in sorted(self.held) if layout.owner[n] == self.rank]

    def _persists(self, age: int) -> bool:
        every = self._rules.job.checkpoint.persist_every
        return every > 0 and age % every == 0

    async def _save(self, start: StartEpoch, layout: Layout, age: int) -> bool:
        if layers := self._owned(layout):
            self._around.reached("save", self, age)
            contents = {n: self.held[n].content for n in layers}
            return await self._saver.save(contents, age, start.epoch)
        return True

    async def _save_last(self, layers: Sequence[int], age: int, epoch: int) -> None:
        if layers:
            self._around.reached("save", self, age)
            await self._saver.save_last({n: self.held[n].content for n in layers}, age, epoch)
