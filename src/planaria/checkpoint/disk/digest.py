"""The digests that two runs are compared by: one over all parameters, one over optimizer state.

`parameters_sha256` runs over the parameters in layer order, within a layer in the order that the
model names them, tied ones once, little-endian. `optimizer_sha256` runs in the same order over
each parameter's state tensors by sorted name, the step as int64 (DESIGN 7).
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from planaria.checkpoint.disk.tiers import Manifest, Tier


def digests(
    tier: Tier,
    manifest: Manifest,
    *,
    parameters: Sequence[Sequence[str]],
    progress: Callable[[int], None] = lambda _num_read: None,
) -> tuple[str, str]:
    """(parameters_sha256, optimizer_sha256) of a checkpoint.

    Args:
        parameters: for each layer the names of its parameters, without later uses of tied ones.
        progress: is told after each layer how many have been read.

    Raises:
        CheckpointError: a file of the checkpoint is missing or damaged.
    """
    of_parameters, of_optimizer = hashlib.sha256(), hashlib.sha256()
    for layer, names in enumerate(parameters):
        tensors = tier.read_layer(manifest, layer)
        for name in names:
            of_parameters.update(_bytes(tensors[f"parameter/{name}"]))
            prefix = f"optimizer/{name}/"
            for key in sorted(key for key in tensors if key.startswith(prefix)):
                of_optimizer.update(_bytes(tensors[key]))
        progress(layer + 1)
    return of_parameters.hexdigest(), of_optimizer.hexdigest()


def _bytes(array: npt.NDArray[np.generic]) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
