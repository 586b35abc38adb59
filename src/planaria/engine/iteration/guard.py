"""Checks before an iteration is applied: that parameters are not corrupt, and losses are finite.

All holders of a layer have the same bits at the same age, in fast mode too, because a reduction
gives all of them the same gradient and they run the same optimizer. So a hash of the parameters
must be the same on all of them. One window of `SAMPLE_BYTES` of each layer is hashed; the window
moves with the age, so that all bytes of a large layer are checked in turn.

In a bfloat16 job both the float32 master and the bfloat16 parameter are hashed: the optimizer uses
only the first and the forward only the second, so a flipped bit in one does not show in the other.
"""

import math
from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor

from planaria.core.agreement import HASH_BITS, SAMPLE_BYTES
from planaria.core.commit import CommitVector
from planaria.core.job import ResilienceConfig, TrainingConfig
from planaria.engine.stage import HeldLayer
from planaria.errors import DivergedError


def sampled_hashes(layers: Iterable[HeldLayer], resilience: ResilienceConfig) -> dict[int, int]:
    """The sampled hash of each layer, by layer; empty if the job does not compare hashes."""
    if not resilience.corruption_guard:
        return {}
    return {held.layer: sampled_hash(held) for held in layers}


def sampled_hash(held: HeldLayer) -> int:
    """The hash, of `HASH_BITS` bits, of the window of parameters that is due at the layer's age."""
    tensors = list(_parameter_tensors(held))
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    num_windows = max(1, -(-num_bytes // SAMPLE_BYTES))
    first = held.age % num_windows * SAMPLE_BYTES
    end = first + SAMPLE_BYTES
    hasher = xxhash.xxh3_64()
    for tensor in tensors:
        window = slice(max(first, 0), max(end, 0))
        if first < tensor.nbytes and end > 0:
            hasher.update(_bytes_of(tensor.detach(), window))
        first, end = first - tensor.nbytes, end - tensor.nbytes
    return hasher.intdigest() % (1 << HASH_BITS)


def _bytes_of(tensor: Tensor, window: slice) -> memoryview:
    """A window of the tensor's bytes: a view on the host; from a device only they are copied."""
    is_whole = window.start == 0 and window.stop >= tensor.nbytes
    is_plain = tensor.is_cpu and tensor.dtype is torch.float32 and tensor.is_contiguous()
    if is_whole and is_plain:  # In a fifth of the time of what follows.
        return tensor.numpy().data
    return tensor.reshape(-1).view(torch.uint8)[window].cpu().numpy().data


def _parameter_tensors(held: HeldLayer) -> Iterator[Tensor]:
    """All tensors that store parameters: masters, and parameters that are not their own masters."""
    yield from held.masters.values()
    for name, parameter in held.parameters.items():
        if parameter is not held.masters.get(name):
            yield parameter


def refuse_divergence(iteration: int, vector: CommitVector, training: TrainingConfig) -> None:
    """Ends training before a step would turn every parameter into a NaN.

    All ranks have the same vector, so all raise. The state is not saved: its parameters are
    suspect, and resuming from them would compute the same numbers.

    Raises:
        DivergedError: the loss or the gradient norm is infinite or not a number.
    """
    if math.isfinite(vector.loss) and math.isfinite(vector.gradient_norm):
        return
    raise DivergedError(
        "",
        vector.loss,
        f"training diverged in iteration {iteration}, which has loss {vector.loss} and "
        f"gradient norm {vector.gradient_norm}, and was not applied; lower "
        f"training.learning_rate = {training.learning_rate}, set training.gradient_clip, "
        "or correct the data; then go on from the newest save, if there is one, with "
        "--resume (checkpoint.persist_every)",
    )
