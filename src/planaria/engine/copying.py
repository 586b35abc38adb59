"""A rank's copies in memory, from one epoch to the next: when a version begins, and what it means.

The state does not change from one optimizer step to the next, so a version begins after a step, as
soon as the one before is complete on all ranks, which the commit tells; the optimizer waits for a
layer to be copied here, and for nothing else, unless the job asks for a version every so many
iterations: then the commit waits for it.

Source: DESIGN 6 (checkpoints); Gemini (SOSP '23), section 5.
"""

from collections.abc import Callable, Collection

from planaria.checkpoint.arena import Arena
from planaria.checkpoint.stream import Buffers, Copier
from planaria.checkpoint.wire import State, state_of
from planaria.core.commit import CommitVector
from planaria.core.copies import Label
from planaria.core.messages import CopiesFailed, Message, StartEpoch
from planaria.core.plan import Plan
from planaria.core.specs import NodeSpec
from planaria.engine.stage import Stage
from planaria.transport.links import Links


class Copying:
    """The copies that a rank keeps and gives; nothing if the job has none.

    Args:
        send: is told of versions that cannot be complete.
        timeout_s: for the next piece.
    """

    def __init__(
        self, spec: NodeSpec, links: Links, *, send: Callable[[Message], None], timeout_s: float
    ) -> None:
        self._spec = spec
        self._job = spec.job.checkpoint
        self._links = links
        self._send = send
        self._timeout_s = timeout_s
        self._arena = Arena(spec.copies_fd) if spec.copies_fd >= 0 else None
        self._kept: Label | None = None  # The newest version that is complete, as far as known.
        self._copier: Copier | None = None

    # -- between epochs ---------------------------------------------------------------------------

    @property
    def versions(self) -> dict[int, tuple[Label, ...]]:
        """Of each layer those that are here, and whole."""
        return self._arena.versions() if self._arena else {}

    def states(self, layers: Collection[int], label: Label | None) -> dict[int, State]:
        """Those of these layers of which there is a copy of that version.

        Raises:
            CheckpointError: one is not what was written; it is dropped.
        """
        if self._arena is None or label is None:
            return {}
        return {
            layer: state_of(self._arena.read(layer, label))
            for layer, labels in self._arena.versions().items()
            if layer in layers and label in labels
        }

    # -- in an epoch ------------------------------------------------------------------------------

    def enter(self, start: StartEpoch, stage: Stage, *, is_planned: bool) -> None:
        """Begins the epoch's first version, if there are copies.

        Args:
            is_planned: it follows on the one before at a commit, and this rank knows what is kept.
        """
        if self._arena is None:
            return
        plan, rank, epoch = start.plan, self._spec.rank, start.epoch
        if not is_planned:
            self._kept = start.kept
        own = set(plan.held_by_rank[rank]).difference(plan.silent.get(rank, ()))
        self._stage = stage
        self._copier = Copier(
            self._links,
            self._arena,
            own=sorted(own),
            copies=start.copies,
            since=start.since,
            epoch=epoch,
            kept=self._kept,
            buffers=Buffers(self._job.buffer_bytes, self._job.num_buffers),
            virtual_bytes=stage.model.virtual_state_bytes,
            failed=lambda reason: self._send(CopiesFailed(rank=rank, epoch=epoch, reason=reason)),
            timeout_s=self._timeout_s,
        )
        self._begin(start.iteration)

    def votes(self, iteration: int) -> tuple[int, int]:
        """Whether this rank is through with the version, and whether it failed, for the commit of
        an iteration."""
        if self._copier is None:
            return 0, 0
        if self._job.every != "auto" and (iteration + 1) % self._job.every == 0:
            self._copier.wait_ended()
        has_ended = self._copier.has_ended
        return int(has_ended), int(has_ended and self._copier.has_failed)

    def wait_copied(self, layer: int) -> None:
        """Blocks until the layer may change; raises what ended the copying."""
        if self._copier is not None:
            self._copier.wait_copied(layer)

    def applied(self, vector: CommitVector, plan: Plan, *, age: int, goes_on: bool) -> None:
        """All layers are of this age now; the commit before that told how far the copies were.

        Args:
            goes_on: neither training nor the epoch ends here; else no version begins. There is none
                of the job's last state, from which nobody could tell that it was the last.
        """
        if self._copier is None or not vector.copied(plan):
            return
        if not vector.votes.uncopied:
            self._copier.complete()
            self._kept = self._copier.kept
        if goes_on and (self._job.every == "auto" or age % self._job.every == 0):
            self._begin(age)

    def leave(self) -> None:
        """Ends the epoch's threads; what they wait for must have been aborted or be over."""
        if self._copier is not None:
            self._copier.close()
            self._copier = None

    def _begin(self, age: int) -> None:
        assert self._copier is not None
        layers = self._stage.layers
        self._copier.begin(age, {n: layers[n].state_views() for n in self._copier.own})
