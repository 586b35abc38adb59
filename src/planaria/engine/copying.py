"""A rank's copies in memory across epochs: when a version begins, and when it is complete.

The state does not change between two optimizer steps, so a version begins right after a step, as
soon as the version before is complete on all ranks, which the commit vector tells. The optimizer
step of a layer waits only until the layer is copied within this node. If the job asks for a version
every so many iterations (`checkpoint.every`), the commit of such an iteration also waits until
this rank's part of the version has ended.

Source: Gemini (SOSP '23), section 5.
"""

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Final

from planaria.checkpoint.memory.arena import Arena
from planaria.checkpoint.memory.chunk_list import ChunkList
from planaria.checkpoint.memory.filling import Filler, HostCopy, fill_alone
from planaria.checkpoint.memory.interleaving import CopyPeers, Interleaving, SpanUse
from planaria.checkpoint.memory.landing import DevicePath
from planaria.checkpoint.memory.stream import Copier, CopyPlan
from planaria.checkpoint.memory.turns import AtOnce, Buffers, FlowControl
from planaria.checkpoint.memory.wire import State, incoming_layers, outgoing_copies, state_of
from planaria.core.commit import CommitVector
from planaria.core.copies import CopiesDone, Label
from planaria.core.messages import CopiesFailed, Message, StartEpoch
from planaria.core.plan import Link, Plan, link_between_pipelines
from planaria.core.specs import NodeSpec
from planaria.engine.comm.chunks import ArrivingChunks, LeavingChunks
from planaria.engine.comm.device_comm import ChunkComm
from planaria.engine.devices import Device
from planaria.engine.stage import RankStage
from planaria.errors import CheckpointError
from planaria.transport.links import Links

_FILL_THREADS_MAX: Final = 4  # More do not copy faster.


class Copying:
    """The copies that a rank keeps and sends; does nothing if the job keeps no copies.

    Args:
        send: sends a message to the coordinator, here about a version that cannot be completed.
        timeout_s: maximum wait for the next piece.
    """

    def __init__(
        self, spec: NodeSpec, links: Links, *, send: Callable[[Message], None], timeout_s: float
    ) -> None:
        self._spec = spec
        self._job = spec.job.checkpoint
        self._device_to_host: Link | None = None
        if spec.job.model.kind == "paced" and spec.profile is not None:
            self._device_to_host = spec.profile.links.get("device_to_host")
        self._links = links
        self._send = send
        self._timeout_s = timeout_s
        self._arena = Arena(spec.copies_fd) if spec.copies_fd >= 0 else None
        self._complete_label: Label | None = None  # The newest version known to be complete.
        self._sent_label: Label | None = None  # Layers of this one may still be on the wire.
        self._copier: Copier | None = None
        self._filler: Filler | None = None
        self._turns: Interleaving | None = None
        self._epoch_ends = threading.Event()
        self._reserving: threading.Thread | None = None
        self._first_age = 0  # The age of the epoch's first version.
        self._stall_s = 0.0

    # -- between epochs ---------------------------------------------------------------------------

    @property
    def versions(self) -> dict[int, tuple[Label, ...]]:
        """The complete versions that this node keeps of each layer, by layer."""
        return self._arena.versions() if self._arena else {}

    def states(self, layers: Collection[int], label: Label | None) -> dict[int, State]:
        """The states of those of `layers` of which this node keeps a copy of version `label`.

        Raises:
            CheckpointError: copies differ from what was written; they are dropped.
        """
        if self._arena is None or label is None:
            return {}
        versions = self._arena.read_all(label, layers=layers)
        return {layer: state_of(version) for layer, version in versions.items()}

    # -- in an epoch ------------------------------------------------------------------------------

    def enter(
        self, start: StartEpoch, stage: RankStage, comm: ChunkComm, *, is_planned: bool
    ) -> None:
        """Begins the copies of an epoch, and its first version unless that is to begin later.

        Args:
            comm: exchanges chunks with other ranks, if the job has them go from device to device.
            is_planned: whether the epoch began at a commit of the one before, so that this rank
                knows itself which version is kept.
        """
        if self._arena is None:
            return
        plan, rank, epoch = start.plan, self._spec.rank, start.epoch
        if not is_planned:
            self._complete_label = start.kept
        self._hold_sent(self._arena, start.copied)
        own = set(plan.held_by_rank[rank]).difference(plan.silent.get(rank, ()))
        self._stage = stage
        self._epoch_ends = threading.Event()
        self._turns = self._interleaving(start)
        if not stage.device.is_host:  # The processors have little else to do.
            self._filler = Filler(_fill_threads(self._spec.job.cluster.devices_per_node))
        unprotected = self._job.profile_iterations if self._turns and not start.idle else 0
        self._first_age = start.iteration + unprotected
        self._copier = Copier(
            self._links,
            CopyPlan(
                own=tuple(sorted(own)),
                copies=start.copies,
                since=start.since,
                epoch=epoch,
                complete_label=self._complete_label,
            ),
            host_copy=HostCopy(
                self._arena,
                self._filler or fill_alone,
                stage.model.virtual_state_bytes,
                self._sleep_device_to_host,
            ),
            flow=FlowControl(self._buffers(), self._turns or AtOnce(), self._timeout_s),
            on_failure=lambda reason: self._send(
                CopiesFailed(rank=rank, epoch=epoch, reason=reason)
            ),
            device_path=self._device_path(comm, stage.device),
        )
        if self._complete_label is None and not self._arena.num_bytes:  # The job begins.
            sizes = self._layer_bytes(start, own)
            self._reserve(sizes)
            # Pinning memory for the mirrors would stop training later. They come and go together,
            # and the allocator keeps their memory for the mirrors.
            buffers = [stage.layers[n].mirror_buffers(num_bytes=sizes[n]) for n in own]
            buffers.clear()
        if not unprotected:
            self._begin(start.iteration)

    def _hold_sent(self, arena: Arena, label: Label | None) -> None:
        """Keeps the version from which layers are being sent, in place of the one before it."""
        if self._sent_label is not None:
            arena.release(self._sent_label)
        if label is not None:
            arena.hold(label, layers=[n for n, those in arena.versions().items() if label in those])
        self._sent_label = label

    def _reserve(self, sizes: Mapping[int, int]) -> None:
        """Has memory for two versions made, while training begins: it takes seconds for GBs."""
        arena, epoch_ends = self._arena, self._epoch_ends
        assert arena is not None

        def reserve() -> None:
            with suppress(CheckpointError):  # The first version will report it.
                arena.reserve(sizes, is_over=epoch_ends.is_set)

        self._reserving = threading.Thread(target=reserve, name="reserve", daemon=True)
        self._reserving.start()

    def _layer_bytes(self, start: StartEpoch, own: Collection[int]) -> dict[int, int]:
        """Bytes of each layer that this rank keeps, as far as it can know them, by layer."""
        held = self._stage.layers
        num_bytes = {n: self._profiled_bytes(n) or held[n].state_bytes() for n in own}
        if self._spec.profile is not None and self._spec.job.model.kind != "paced":
            for layers in incoming_layers(self._spec.rank, start.copies).values():
                num_bytes |= {layer: self._profiled_bytes(layer) for layer in layers}
        return num_bytes

    def _profiled_bytes(self, layer: int) -> int:
        """Bytes of a layer's state after its first step; 0: there is no profile."""
        profile = self._spec.profile
        if profile is None or self._spec.job.model.kind == "paced":
            return 0
        return profile.layers[layer].parameter_bytes + profile.layers[layer].optimizer_bytes

    def _device_path(self, comm: ChunkComm, device: Device) -> DevicePath | None:
        """The way of copies over devices; None: they go over links."""
        buffers = self._buffers()
        if buffers is None or not self._spec.job.sends_copies_over_devices:
            return None
        sender = LeavingChunks(comm, device, buffers)
        return DevicePath(sender, ArrivingChunks(comm, device, buffers))

    def _buffers(self) -> Buffers | None:
        job = self._job
        if job.mode == "naive":
            return None
        return Buffers(job.buffer_bytes, 1 if job.mode == "unpipelined" else job.num_buffers)

    def _interleaving(self, start: StartEpoch) -> Interleaving | None:
        """The idle spans in which copies of an epoch are sent; None: copies wait for none."""
        job, rank, profile = self._job, self._spec.rank, self._spec.profile
        per_node = self._spec.job.cluster.devices_per_node
        if profile is None or job.mode in ("naive", "blocking"):
            return None
        link = link_between_pipelines(profile.links)
        return Interleaving(
            self._links,
            CopyPeers(
                targets={target for target, _ in outgoing_copies(rank, start.copies)},
                sources=incoming_layers(rank, start.copies).keys(),
                is_far=lambda peer: peer // per_node != rank // per_node,
            ),
            link=link,
            idle={entry.target: entry.spans for entry in start.idle if entry.source == rank},
            use=SpanUse(
                num_iterations=job.profile_iterations - 1,
                gamma=None if job.gamma == "auto" else job.gamma,
                chunks=ChunkList(link) if job.schedule == "paper" else None,
            ),
        )

    def _sleep_device_to_host(self, num_bytes: int, *, is_own: bool) -> None:
        """Sleeps as long as a paced job's device would take to move the bytes to its host.

        Copies from other ranks arrive at the host directly, unless `checkpoint.path` is "device".
        """
        if self._device_to_host is not None and (is_own or self._job.path == "device"):
            self._links.timekeeper.sleep(self._device_to_host.seconds(num_bytes))

    def on_iteration_begin(self, iteration: int) -> None:
        """Must be called when an iteration begins."""
        if self._turns is not None:
            must_end = self._job.every != "auto" and (iteration + 1) % self._job.every == 0
            self._turns.on_iteration_begin(iteration, must_end=must_end)

    def on_pause(self) -> None:
        """Must be called before what is done between two iterations and takes long."""
        if self._turns is not None:
            self._turns.on_pause()

    def on_action_done(self) -> None:
        """Must be called after each forward and backward."""
        if self._turns is not None:
            self._turns.on_action_done()

    def votes(self, iteration: int) -> tuple[int, int]:
        """This rank's votes for the commit of an iteration, each 0 or 1.

        The first says whether its part of the version has ended, the second whether it failed.
        """
        if self._copier is None:
            return 0, 0
        if self._job.every != "auto" and (iteration + 1) % self._job.every == 0:
            if self._turns is not None:
                self._turns.rush()
            self._wait(self._copier.wait_ended)
        has_ended = self._copier.has_ended
        return int(has_ended), int(has_ended and self._copier.has_failed)

    def is_copied(self, layer: int) -> bool:
        """Whether `wait_copied` would not block for the layer."""
        return self._copier is None or self._copier.is_copied(layer)

    def wait_copied(self, layer: int) -> None:
        """Blocks until the layer may change; raises the error that ended the copying, if any."""
        if self._copier is not None:
            copier = self._copier
            self._wait(lambda: copier.wait_copied(layer))

    def take_done(self) -> CopiesDone:
        """The state of the copies after an iteration was applied."""
        idle_s, used_s = self._turns.take_idle_s() if self._turns else (0.0, 0.0)
        age = self._complete_label.age if self._complete_label else -1
        return CopiesDone(age=age, idle_s=idle_s, idle_used_s=used_s)

    def take_stall_s(self) -> float:
        """The seconds that training waited for copies since this was last asked."""
        stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

    def on_iteration_applied(
        self, vector: CommitVector, plan: Plan, *, age: int, goes_on: bool
    ) -> None:
        """Completes the version if all ranks have voted so, and begins the next one if it is due.

        Args:
            vector: the commit vector that was applied.
            age: the age that all layers have now.
            goes_on: whether neither training nor the epoch ends here; if not, no version begins.
                The job's last state gets no version: nothing in it would say that it is the last.
        """
        if self._arena is not None:  # All ranks have their layers, or none would have a vector.
            self._hold_sent(self._arena, None)
        if self._copier is None or age < self._first_age:
            return
        if self._copier.has_begun:
            if not vector.has_all_copies(plan):
                return
            if not vector.votes.uncopied:
                self._copier.complete()
                self._complete_label = self._copier.complete_label
        if goes_on and (self._job.every == "auto" or age % self._job.every == 0):
            self._begin(age)

    def leave(self) -> None:
        """Ends the epoch's threads; everything they wait for must have ended or been aborted."""
        self._epoch_ends.set()
        if self._reserving is not None:  # It ends after a piece, in some milliseconds.
            self._reserving.join()
            self._reserving = None
        if self._turns is not None:
            self._turns.close()
            self._turns = None
        if self._copier is not None:
            self._copier.close()
            self._copier = None
        if self._filler is not None:
            self._filler.close()
            self._filler = None

    def _begin(self, age: int) -> None:
        assert self._copier is not None
        if self._turns is not None:
            self._turns.hold()
        layers, states = self._stage.layers, dict[int, State]()
        own = self._copier.own
        # Copies through memory that is not pinned are made here.
        self._wait(lambda: states.update({n: layers[n].state_views() for n in own}))
        self._copier.begin(age, states)
        if self._job.mode == "blocking":
            self._wait(self._copier.wait_ended)

    def _wait(self, wait: Callable[[], None]) -> None:
        """Calls `wait` and adds its duration to the stall."""
        begin_s = time.monotonic()
        wait()
        self._stall_s += time.monotonic() - begin_s


def _fill_threads(devices_per_node: int) -> int:
    """The number of threads that fill a rank's copies, of which each node's ranks have as many."""
    processors = len(os.sched_getaffinity(0)) // devices_per_node
    return max(1, min(_FILL_THREADS_MAX, processors // 2))
