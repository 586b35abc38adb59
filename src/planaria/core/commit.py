"""The commit vector: what all ranks agree on at the end of an iteration, and what follows from it.

A rank that holds the vector of an iteration knows that every gradient of the iteration is complete
on every rank. The ranks sum their parts. Each entry but the votes is contributed by one rank alone
and is +0 on all others; votes are small whole numbers. So the sum is exact and the same everywhere.
In addition to the gradient norms the parts carry the losses and the sample numbers, so that any one
holder can report the iteration, even after the ranks that computed them are lost. A rank keeps only
the total loss and one digest of the samples: a vector is sent and recorded after a loss of nodes,
and must not grow with the batch.

See docs/protocol.md, "The commit vector".
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from planaria.core.job import JobConfig, TrainingConfig
from planaria.core.plan import Plan
from planaria.core.samples import sample_digest


class Votes(NamedTuple):
    """What a rank asks for, or reports, at a commit; the votes of all ranks are summed.

    Attributes:
        stop: 1 if it asks that this iteration be the last.
        switch: 1 if it knows the plan of the next epoch.
        copied: 1 if it has finished its part of the newest version of the copies in memory.
        uncopied: 1 if it could not keep or send all of that version.
        unsaved: 1 if it could not begin the save with which its epoch was to begin.
        writing: 1 if it is still writing a save.
        early: 1 if it holds the losses of held-out data, and they say that training ends.
        untargeted: 1 if it has computed a loss, and no sample of the iteration has a target.
    """

    stop: int
    switch: int = 0
    copied: int = 0
    uncopied: int = 0
    unsaved: int = 0
    writing: int = 0
    early: int = 0
    untargeted: int = 0


NUM_VOTES: Final = len(Votes._fields)
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """The order of entries in the ranks' parts: squared norms, losses, sample numbers, votes."""

    num_layers: int
    num_microbatches: int
    num_samples: int

    @property
    def size(self) -> int:
        return self.num_layers + self.num_microbatches + self.num_samples + NUM_VOTES

    @property
    def losses(self) -> int:
        """Index of the first loss."""
        return self.num_layers

    @property
    def samples(self) -> int:
        """Index of the first sample number."""
        return self.num_layers + self.num_microbatches


def vector_layout(job: JobConfig, num_layers: int) -> VectorLayout:
    """The layout of the ranks' parts of a job's commit vectors."""
    return VectorLayout(num_layers, job.num_microbatches, job.training.global_batch_size)


@dataclass(frozen=True, slots=True)
class CommitVector:
    """What the ranks agree on at a commit.

    Attributes:
        squared_norms: squared norm of the reduced gradients, by layer; a tied parameter counts in
            the layer of its first use.
        loss: loss of the global batch.
        num_samples: number of samples that the first stages consumed.
        sample_digest: xxh3_128 of the sorted sample numbers.
        votes: sum of the votes of all ranks.
    """

    squared_norms: tuple[float, ...]
    loss: float
    num_samples: int
    sample_digest: str
    votes: Votes

    @property
    def gradient_norm(self) -> float:
        return float(ordered_sum(self.squared_norms) ** 0.5)

    def is_last(self, iteration: int, training: TrainingConfig) -> bool:
        """Whether training ends after this iteration; all holders of the vector find the same."""
        return self.votes.stop > 0 or self.is_trained(iteration, training)

    def is_trained(self, iteration: int, training: TrainingConfig) -> bool:
        """Whether training would end after this iteration though nobody asked for that."""
        return is_trained_after(
            iteration,
            training,
            loss=self.loss,
            has_targets=self.has_targets,
            is_early=self.votes.early > 0,
        )

    def is_switch_agreed(self, plan: Plan) -> bool:
        """Whether the next epoch begins after this iteration: all ranks in the commit know its
        plan."""
        return self.votes.switch == len(plan.all_ranks)

    def has_all_copies(self, plan: Plan) -> bool:
        """Whether all ranks have finished the newest version of the copies in memory."""
        return self.votes.copied == len(plan.all_ranks)

    @property
    def has_targets(self) -> bool:
        """Whether any sample has a target; without one the loss is 0 and says nothing."""
        return self.votes.untargeted == 0

    @property
    def is_save_due(self) -> bool:
        """Whether a save that is due begins after this iteration: no rank is writing another
        one."""
        return self.votes.unsaved > 0 and not self.votes.writing


def is_trained_after(
    iteration: int, training: TrainingConfig, *, loss: float, has_targets: bool, is_early: bool
) -> bool:
    """Whether training would end after this iteration though nobody asked for that.

    Args:
        loss: loss of the global batch.
        has_targets: whether any sample has a target; without one the loss is 0 and says nothing.
        is_early: whether the losses of held-out data end training with this iteration.
    """
    reached = has_targets and training.target_loss > 0.0 and loss <= training.target_loss
    return iteration + 1 >= training.iterations or reached or is_early


def commit_vector(total: npt.NDArray[np.float64], layout: VectorLayout) -> CommitVector:
    """The vector that the sum of all ranks' parts gives."""
    assert total.shape == (layout.size,)
    numbers = total[layout.samples : -NUM_VOTES]
    samples = numbers.astype(np.int64)
    assert np.array_equal(samples, numbers)
    return CommitVector(
        squared_norms=tuple(total[: layout.num_layers].tolist()),
        loss=ordered_sum(total[layout.losses : layout.samples].tolist()),
        num_samples=layout.num_samples,
        sample_digest=sample_digest(samples),
        votes=_votes(total[-NUM_VOTES:].tolist()),
    )


def ordered_sum(values: Iterable[float]) -> float:
    """The sum of numbers that are added one after the other, and rounded each time.

    It has the same bits everywhere. numpy adds in another order, and from Python 3.12 on `sum`
    makes up for what was rounded off.
    """
    total = 0.0
    for value in values:
        total += value
    return total


def encode_vector(vector: CommitVector) -> bytes:
    """The vector as little-endian float64, followed by the digest."""
    entries = (*vector.squared_norms, vector.loss, vector.num_samples, *vector.votes)
    return np.array(entries, dtype="<f8").tobytes() + bytes.fromhex(vector.sample_digest)


def decode_vector(data: bytes, layout: VectorLayout) -> CommitVector:
    """The vector that `encode_vector` encoded."""
    num_entries = layout.num_layers + 2 + NUM_VOTES
    assert len(data) == 8 * num_entries + _DIGEST_BYTES
    entries = np.frombuffer(data, dtype="<f8", count=num_entries).tolist()
    loss, num_samples = entries[layout.num_layers : -NUM_VOTES]
    assert num_samples == layout.num_samples
    return CommitVector(
        squared_norms=tuple(entries[: layout.num_layers]),
        loss=loss,
        num_samples=layout.num_samples,
        sample_digest=data[-_DIGEST_BYTES:].hex(),
        votes=_votes(entries[-NUM_VOTES:]),
    )


def _votes(entries: Sequence[float]) -> Votes:
    return Votes(*(int(entry) for entry in entries))
