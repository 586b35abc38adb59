"""Whether all holders of a layer have the same parameters, told from sums alone.

Every rank hashes a sample of each layer that it holds and cuts the hash into pieces. For each
layer, the ranks contribute 1, each piece and its square to sums that travel behind the commit
vector. With n holders, n times the sum of squares equals the square of the sum if all pieces are
equal, and is larger if not (Cauchy-Schwarz). So each rank that has the sums can tell, without
knowing the hashes of any other rank; two hashes that differ look equal once in 2^40.

A piece is below 2^20, so the sums are whole numbers below 2^53, exact in float64 in any order, for
up to 2^13 holders.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

PIECE_BITS = 20
NUM_PIECES = 2
HASH_BITS = PIECE_BITS * NUM_PIECES
SAMPLE_BYTES = 1 << 22  # Bytes hashed of each layer at each age.

_PER_LAYER = 1 + 2 * NUM_PIECES  # Number of holders; sum and sum of squares of each piece.


def hash_entries(hashes: Mapping[int, int], num_layers: int) -> npt.NDArray[np.float64]:
    """A rank's contribution to the sums: one group of entries per layer.

    Args:
        hashes: hash of each layer that the rank holds, by layer.
    """
    entries = np.zeros((num_layers, _PER_LAYER), dtype=np.float64)
    for layer, layer_hash in hashes.items():
        assert 0 <= layer_hash < 1 << HASH_BITS, (layer, layer_hash)
        entries[layer, 0] = 1
        for piece in range(NUM_PIECES):
            value = layer_hash >> (piece * PIECE_BITS) & (1 << PIECE_BITS) - 1
            entries[layer, 1 + 2 * piece : 3 + 2 * piece] = value, value * value
    return entries.reshape(-1)


def disagreeing_layers(sums: npt.NDArray[np.float64]) -> tuple[int, ...]:
    """The layers whose holders do not all have the same hash, ascending."""
    disagreeing = []
    for layer, entries in enumerate(sums.reshape(-1, _PER_LAYER).tolist()):
        num_holders, *pieces = map(int, entries)
        pairs = zip(pieces[::2], pieces[1::2], strict=True)
        if any(num_holders * squares != total * total for total, squares in pairs):
            disagreeing.append(layer)
    return tuple(disagreeing)
