"""Modelled copies in memory: the versions of layers that nodes keep, and when versions begin.

The memory belongs to the agent, so it outlives workers. A version is first copied within the node,
layer by layer, and then sent to its copy holders. The votes in a commit vector tell whether it is
complete everywhere.

Source: engine/copying.py and checkpoint/memory/stream.py; the steps come in the same order.
"""

from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from planaria.core.commit import CommitVector
from planaria.core.copies import Label, LayerCopy
from planaria.core.job import CheckpointConfig
from planaria.core.messages import StartEpoch
from planaria.core.plan import Plan
from planaria.errors import AbortedError, CheckpointError, PeerLostError
from planaria.simulator.loop import Process
from planaria.simulator.modelled.links import SimulatedLinks

_COPY_S: Final = 0.0005  # Time to copy a layer within the node.
_SEND_S: Final = 0.004  # Time to send a layer to another node.
_SPOILT: Final = -1  # Stands for spoilt content.

Contents = Mapping[int, int]


@dataclass(slots=True)
class CopyMemory:
    """The copies that a rank keeps.

    Attributes:
        contents: state of each copied layer (a hash of all that led to it), by (layer, version).
    """

    contents: dict[tuple[int, Label], int] = field(default_factory=dict)

    def versions(self) -> dict[int, tuple[Label, ...]]:
        """The versions of each layer that are here, ascending."""
        labels_by_layer: dict[int, list[Label]] = {}
        for layer, label in self.contents:
            labels_by_layer.setdefault(layer, []).append(label)
        return {layer: tuple(sorted(labels)) for layer, labels in labels_by_layer.items()}

    def read(self, layer: int, label: Label) -> int:
        """The state of a layer in a copy.

        Raises:
            CheckpointError: the copy was spoilt; it is dropped.
        """
        content = self.contents[layer, label]
        if content == _SPOILT:
            del self.contents[layer, label]
            raise CheckpointError(f"the copy of layer {layer} of iteration {label.age} is spoilt")
        return content

    def keep_only(self, labels: Collection[Label]) -> None:
        """Drops all versions except these."""
        self.contents = {
            key: label_here for key, label_here in self.contents.items() if key[1] in labels
        }

    def spoil(self) -> bool:
        """Spoils all copies; returns whether there were any."""
        self.contents = dict.fromkeys(self.contents, _SPOILT)
        return bool(self.contents)


class SimulatedCopying:
    """A rank's part in making copies, across epochs; does nothing if the job has no copies."""

    def __init__(
        self, process: Process, links: SimulatedLinks, memory: CopyMemory, job: CheckpointConfig
    ) -> None:
        self.memory = memory
        self._process = process
        self._links = links
        self._job = job
        self._complete_label: Label | None = None
        self._label: Label | None = None  # The newest version begun in this epoch.
        self._start: StartEpoch | None = None
        self._num_running = 0
        self._error: Exception | None = None

    def states(self, layers: Collection[int], label: Label | None) -> dict[int, int]:
        """The states of those of some layers that have a copy of a version.

        Raises:
            CheckpointError: copies were spoilt; all of these are dropped.
        """
        states: dict[int, int] = {}
        errors: list[CheckpointError] = []
        for layer, label_here in list(self.memory.contents):
            if layer in layers and label_here == label:
                try:
                    states[layer] = self.memory.read(layer, label_here)
                except CheckpointError as error:
                    errors.append(error)
        if errors:
            raise errors[0]
        return states

    def begin_epoch(self, start: StartEpoch, contents: Contents, *, is_planned: bool) -> None:
        """Begins an epoch and its first version."""
        if not self._job.copies:
            return
        self._start, self._label, self._error, self._num_running = start, None, None, 0
        if not is_planned:
            self._complete_label = start.kept
        self._begin(start.iteration, contents)

    def end_epoch(self) -> None:
        """Ends the epoch."""
        self._start = None

    async def votes(self, iteration: int) -> tuple[int, int]:
        """This rank's votes on the current version: 1 if its part is complete, and 1 if it failed
        (always 0 here)."""
        if self._start is None:
            return 0, 0
        if self._job.every != "auto" and (iteration + 1) % self._job.every == 0:
            while self._num_running:
                self._check()
                self._links.check_epoch()
                await self._process.sleep(_COPY_S)
        self._check()
        return int(not self._num_running), 0

    def on_applied(
        self, vector: CommitVector, plan: Plan, contents: Contents, *, age: int, goes_on: bool
    ) -> None:
        """Notes that all layers have an age; begins a version if one is due."""
        if self._start is None or not vector.has_all_copies(plan):
            return
        if not vector.votes.uncopied:
            self._complete_label = self._label
        if goes_on and (self._job.every == "auto" or age % self._job.every == 0):
            self._begin(age, contents)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _begin(self, age: int, contents: Contents) -> None:
        start = self._start
        assert start is not None
        assert not self._num_running
        label = self._label = Label(start.since, start.epoch, age)
        self.memory.keep_only({self._complete_label, label} if self._complete_label else {label})
        rank = self._links.rank
        self._num_running = 1 + sum(rank in copy.targets for copy in start.copies)
        self._process.spawn(self._run_part(self._make_copies(label, dict(contents), start.copies)))
        for copy in start.copies:
            if rank in copy.targets:
                self._process.spawn(self._run_part(self._receive_copy(label, copy)))

    async def _run_part(self, task: Coroutine[Any, Any, None]) -> None:
        """Runs a part of a version; an error is raised later, by the next votes."""
        epoch = self._links.epoch
        try:
            await task
        except (AbortedError, PeerLostError) as error:
            self._error = self._error or error
            return
        if self._start is not None and self._start.epoch == epoch:
            self._num_running -= 1

    async def _make_copies(
        self, label: Label, contents: Contents, copies: Collection[LayerCopy]
    ) -> None:
        for layer, content in sorted(contents.items()):
            await self._process.sleep(_COPY_S)
            self._links.check_epoch()
            self.memory.contents[layer, label] = content
        for copy in copies:
            for target in copy.targets if copy.source == self._links.rank else ():
                await self._process.sleep(_SEND_S)
                self._links.check_epoch()
                tag = ("copy", label, copy.layer)
                self._links.send(target, tag, contents[copy.layer])
                await self._links.receive(target, ("kept", label, copy.layer))

    async def _receive_copy(self, label: Label, copy: LayerCopy) -> None:
        content = await self._links.receive(copy.source, ("copy", label, copy.layer))
        self.memory.contents[copy.layer, label] = content
        self._links.send(copy.source, ("kept", label, copy.layer), None)
