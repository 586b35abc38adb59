"""The microbatches of one iteration, loaded where they are used.

Source: DESIGN 4.1: which microbatch is made of which samples depends on the seed and the
iteration alone, never on the plan.
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
        consumed: of the microbatches whose inputs were asked for, the sample numbers.
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
        """The inputs of a microbatch, for its first hop, in the dtype that training computes in."""
        self.consumed[index] = self._samples(index)
        inputs = self._load(index)[0]
        if inputs.is_floating_point():
            inputs = inputs.to(getattr(torch, self._training.dtype))
        return inputs

    def targets(self, index: int) -> Tensor:
        """The targets of a microbatch, for its last hop; not kept any longer."""
        targets = self._load(index)[1]
        del self._loaded[index]
        return targets

    def num_targets(self) -> int:
        """What the loss of every microbatch is divided by: the targets of the global batch."""
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
