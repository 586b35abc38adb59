"""The microbatches of one iteration, loaded on the ranks that use them.

The samples of a microbatch depend only on the seed and the iteration, never on the plan
(docs/protocol.md, "The commit vector", C1).
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planaria.core.job import TrainingConfig
from planaria.core.samples import data_seed, sample_numbers
from planaria.data.datasets import Dataset, microbatch, num_targets


class Batches:
    """Inputs and targets of an iteration.

    Attributes:
        consumed: sample numbers of each microbatch whose inputs were asked for, by microbatch.
    """

    def __init__(self, dataset: Dataset, training: TrainingConfig, *, iteration: int) -> None:
        self.microbatch_size = training.microbatch_size
        self._dataset = dataset
        self._training = training
        self._seed = data_seed(iteration, seed=training.seed)
        self._numbers: npt.NDArray[np.int64] = sample_numbers(
            iteration,
            seed=training.seed,
            num_samples=len(dataset),
            global_batch_size=training.global_batch_size,
        )
        self._loaded: dict[int, tuple[Tensor, Tensor]] = {}
        self._num_targets = 0
        self.consumed: dict[int, npt.NDArray[np.int64]] = {}

    def inputs(self, index: int) -> Tensor:
        """The inputs of a microbatch, for its first hop; floats are in the dtype of training."""
        self.consumed[index] = self._samples(index)
        inputs = self._load(index)[0]
        if inputs.is_floating_point():
            inputs = inputs.to(getattr(torch, self._training.dtype))
        return inputs

    def targets(self, index: int) -> Tensor:
        """The targets of a microbatch, for its last hop; the microbatch is not kept after this."""
        targets = self._load(index)[1]
        del self._loaded[index]
        return targets

    def num_targets(self) -> int:
        """Number of targets in the global batch, by which every microbatch's loss is divided."""
        if not self._num_targets:
            self._num_targets = num_targets(self._dataset, self._numbers, seed=self._seed)
        return self._num_targets

    def _samples(self, index: int) -> npt.NDArray[np.int64]:
        size = self._training.microbatch_size
        return self._numbers[index * size : (index + 1) * size]

    def _load(self, index: int) -> tuple[Tensor, Tensor]:
        if index not in self._loaded:
            samples = self._samples(index)
            self._loaded[index] = microbatch(self._dataset, samples, seed=self._seed)
        return self._loaded[index]
