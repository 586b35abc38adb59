"""What is looked at before an iteration is applied: is memory sound, and does training converge.

Memory is compared, not trusted: all holders of a layer have the same bits at the same age, in fast
mode too, for a reduction gives all of them the same gradient and the optimizer is the same. So a
hash of the parameters must be the same. Of a large layer a window of `SAMPLE_BYTES` is hashed, a
different one with each age, until all bytes have had their turn.

Both copies of a parameter are hashed where there are two, the float32 master and what the forward
uses in bfloat16: each is of use to one of the two alone.
"""

import math
from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor

from planaria.core.agreement import HASH_BITS
from planaria.core.commit import CommitVector
from planaria.core.job import ResilienceConfig, TrainingConfig
from planaria.engine.stage import HeldLayer
from planaria.errors import DivergedError

SAMPLE_BYTES = 1 << 22  # Of each layer, each time.


def sampled_hashes(layers: Iterable[HeldLayer], resilience: ResilienceConfig) -> dict[int, int]:
    """A hash of each layer's window at its age; none if the job is not to compare any."""
    if not resilience.corruption_guard:
        return {}
    return {held.layer: sampled_hash(held) for held in layers}


def sampled_hash(held: HeldLayer) -> int:
    """The hash of one window of the layer's parameters: of `HASH_BITS` bits."""
    tensors = list(_stored(held))
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    num_windows = max(1, -(-num_bytes // SAMPLE_BYTES))
    first = held.age % num_windows * SAMPLE_BYTES
    end = first + SAMPLE_BYTES
    hashed = xxhash.xxh3_64()
    for tensor in tensors:
        window = slice(max(first, 0), max(end, 0))
        if first < tensor.nbytes and end > 0:
            # A view on the host; of a device only the window is copied.
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            hashed.update(flat[window].cpu().numpy().data)
        first, end = first - tensor.nbytes, end - tensor.nbytes
    return hashed.intdigest() % (1 << HASH_BITS)


def _stored(held: HeldLayer) -> Iterator[Tensor]:
    """All tensors in which parameters are, each once."""
    yield from held.masters.values()
    for name, parameter in held.parameters.items():
        if parameter is not held.masters[name]:
            yield parameter


def refuse_divergence(iteration: int, vector: CommitVector, training: TrainingConfig) -> None:
    """Ends training before a step would turn every parameter into a NaN.

    All ranks see the same vector, so all end here. The state is not saved: the parameters that led
    here are suspect, and resuming from them would compute the same numbers.

    Raises:
        DivergedError: the loss or the gradient norm is infinite or not a number.
    """
    if math.isfinite(vector.loss) and math.isfinite(vector.gradient_norm):
        return
    raise DivergedError(
        "",
        vector.loss,
        f"training diverged in iteration {iteration}, which has loss {vector.loss} and gradient "
        f"norm {vector.gradient_norm}, and was not applied; lower training.learning_rate = "
        f"{training.learning_rate}, set training.gradient_clip, or mend the data, and --resume "
        "from the newest save (checkpoint.persist_every) if there is one",
    )
