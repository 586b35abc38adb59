"""Sums of hashes tell of every difference among the holders of a layer, and of nothing else."""

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planaria.core.agreement import HASH_BITS, disagreeing_layers, hash_entries

NUM_LAYERS = 4
LARGEST = (1 << HASH_BITS) - 1

a_hash = st.one_of(st.integers(0, LARGEST), st.sampled_from([0, 1, 1 << 20, LARGEST]))
# A few hashes, so that holders often agree, in any number of ranks with any layers.
held = st.lists(
    st.dictionaries(st.integers(0, NUM_LAYERS - 1), st.sampled_from([0, 5, 5 << 20, LARGEST])),
    min_size=1,
    max_size=6,
)


@given(held, st.randoms())
def test_a_layer_disagrees_where_two_hashes_of_it_differ(
    ranks: list[dict[int, int]], random: Random
) -> None:
    """In whatever order the ranks are summed; one holder, or none, has nobody to differ from."""
    random.shuffle(ranks)
    sums = sum(hash_entries(own, NUM_LAYERS) for own in ranks)
    assert isinstance(sums, np.ndarray)

    expected = [
        layer
        for layer in range(NUM_LAYERS)
        if len({own[layer] for own in ranks if layer in own}) > 1
    ]
    assert list(disagreeing_layers(sums)) == expected


@given(a_hash, a_hash, st.integers(1, (1 << 13) - 1))
def test_thousands_of_holders_are_summed_exactly(common: int, odd: int, num_others: int) -> None:
    """One bit among 2^13 holders of the largest hashes is neither rounded away nor made up."""
    others = num_others * hash_entries({0: common}, 1)
    sums = others + hash_entries({0: odd}, 1)

    assert sums.max() < 2**53
    assert disagreeing_layers(sums) == (() if odd == common else (0,))
