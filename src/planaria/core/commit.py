"""The commit vector: what all ranks agree on at the end of an iteration, and what follows from it.

Whoever holds the vector of an iteration knows that every gradient of it is complete everywhere.
The ranks sum their parts; each entry is contributed by one rank alone and is +0 elsewhere, so the
sum is exact and the same everywhere. Beside the gradient norms it carries the losses and the
samples that were used, so that any one holder can tell all about the iteration, also after the
ranks that computed those are lost.

Source: DESIGN 4.4 and 4.5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from planaria.core.job import JobConfig, TrainingConfig
from planaria.core.plan import Plan
from planaria.core.samples import sample_digest


class Votes(NamedTuple):
    """What a rank asks for, or knows, at a commit; each is counted.

    Attributes:
        stop: that this iteration be the last.
        switch: it knows the plan of the next epoch, and waits for the others to.
        copied: it is through with the newest version of the copies in memory.
        uncopied: it could not keep, or give, all of that.
    """

    stop: int
    switch: int = 0
    copied: int = 0
    uncopied: int = 0


NUM_VOTES: Final = len(Votes._fields)


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """Where what stands: squared norms, losses, sample numbers, votes."""

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
    """The layout of a job's commit vectors."""
    return VectorLayout(num_layers, job.num_microbatches, job.training.global_batch_size)


@dataclass(frozen=True, slots=True)
class CommitVector:
    """What the ranks agree on at a commit.

    Attributes:
        squared_norms: of the reduced gradients, by layer; tied ones in the layer of first use.
        losses: by microbatch, each divided by the global count; their sum is the loss.
        samples: sample numbers as the first stages consumed them, by microbatch.
        votes: of all ranks together.
    """

    squared_norms: tuple[float, ...]
    losses: tuple[float, ...]
    samples: tuple[int, ...]
    votes: Votes

    @property
    def loss(self) -> float:
        return float(sum(self.losses))

    @property
    def gradient_norm(self) -> float:
        return float(sum(self.squared_norms) ** 0.5)

    @property
    def sample_digest(self) -> str:
        """The xxh3_128 of the sorted sample numbers."""
        return sample_digest(np.array(self.samples, dtype=np.int64))

    def is_last(self, iteration: int, training: TrainingConfig) -> bool:
        """Whether training ends after this iteration; the same for all who hold the vector."""
        reached = training.target_loss > 0.0 and self.loss <= training.target_loss
        return iteration + 1 >= training.iterations or reached or self.votes.stop > 0

    def switches(self, plan: Plan) -> bool:
        """Whether the next epoch begins after this iteration: all who take part know its plan."""
        return self.votes.switch == len(plan.all_ranks)

    def copied(self, plan: Plan) -> bool:
        """Whether all ranks are through with the newest version of the copies in memory."""
        return self.votes.copied == len(plan.all_ranks)


def commit_vector(entries: Sequence[float], layout: VectorLayout) -> CommitVector:
    """The vector as the ranks have summed it."""
    assert len(entries) == layout.size
    numbers = entries[layout.samples : -NUM_VOTES]
    samples = tuple(int(number) for number in numbers)
    assert all(int_ == float_ for int_, float_ in zip(samples, numbers, strict=True))
    return CommitVector(
        tuple(entries[: layout.num_layers]),
        tuple(entries[layout.losses : layout.samples]),
        samples,
        Votes(*(int(entry) for entry in entries[-NUM_VOTES:])),
    )


def encode_vector(vector: CommitVector) -> bytes:
    """The vector as little-endian float64."""
    entries = (*vector.squared_norms, *vector.losses, *vector.samples, *vector.votes)
    return np.array(entries, dtype="<f8").tobytes()


def decode_vector(data: bytes, layout: VectorLayout) -> CommitVector:
    """What `encode_vector` encoded."""
    entries: npt.NDArray[np.float64] = np.frombuffer(data, dtype="<f8")
    return commit_vector(entries.tolist(), layout)
