"""Which samples an iteration uses: a pure function of the seed and the iteration's number.

Iteration i belongs to data epoch e = i // (n // B), where n is the number of samples and B the
global batch size. It uses permutation(seed, e)[j * B : (j + 1) * B] with j = i mod (n // B), cut
into fixed microbatches. Nothing here depends on a node, so no failure can change what is trained
on. The last n mod B samples of each permutation are left out, so that no iteration mixes two data
epochs. Within a data epoch every sample is used at most once, and the next permutation leaves out
others.

The permutation is computed, not stored. A Feistel network permutes the range [0, 4**h), the
smallest with 4**h >= n, and a position that lands at n or above is sent through the network again
until it lands below n (cycle walking; less than 4 passes on average where n > 16). This costs O(1)
memory and O(number of samples requested) time. It uses integer arithmetic only, so no release of
numpy can change the order.

Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (CT-RSA 2002), section 4; the
mixing function is splitmix64's (Steele et al., OOPSLA 2014).
Differs: the rounds are keyed by splitmix64, which is fast and mixes well but is no cipher; an order
of samples needs no secrecy.
"""

import numpy as np
import xxhash

from planaria.errors import ConfigError

_MASK = (1 << 64) - 1
_INCREMENT = 0x9E3779B97F4A7C15
_FIRST_FACTOR = 0xBF58476D1CE4E5B9
_SECOND_FACTOR = 0x94D049BB133111EB

# With 4 rounds, the places of 5 samples in 3000 orders were up to 7 times as uneven (chi square) as
# chance makes them. With 8 rounds on halves of 3 bits or more they are not; 4096 samples take 2 ms.
_NUM_ROUNDS = 8
_HALF_BITS_MIN = 3

# First argument of `mix`, so that seeds for different purposes are never the same.
_ORDER = 1
_DATA = 2
_HELD_OUT = 3


def mix(*values: int) -> int:
    """64 well-mixed bits that depend on the values and on their order; values count modulo
    2**64."""
    state = len(values)
    for value in values:
        state = _mixed_word(((state ^ (value & _MASK)) + _INCREMENT) & _MASK)
    return state


def random_words(seed: int, count: int) -> np.ndarray:
    """`count` words of 64 random bits, uint64 [count]; every release of numpy gives the same."""
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_INCREMENT)
    return _mixed_words(steps + np.uint64(seed & _MASK))


def data_seed(iteration: int, *, seed: int) -> int:
    """The seed of everything random in an iteration's data (masks, random transforms)."""
    return mix(_DATA, seed, iteration)


def held_out_seed(*, seed: int) -> int:
    """The seed of everything random in the data of evaluations, the same for all of them."""
    return mix(_HELD_OUT, seed)


def held_out_id(name: str, num_samples: int) -> int:
    """A number below 2**53 that differs between held-out data of another name or size."""
    return xxhash.xxh3_64_intdigest(f"{name}/{num_samples}".encode()) >> 11


def sample_numbers(
    iteration: int, *, seed: int, num_samples: int, global_batch_size: int
) -> np.ndarray:
    """The samples of an iteration, in order, int64 [global_batch_size].

    Raises:
        ConfigError: there are fewer samples than one iteration uses.
    """
    return _samples_at(
        iteration,
        np.arange(global_batch_size, dtype=np.int64),
        seed=seed,
        num_samples=num_samples,
        global_batch_size=global_batch_size,
    )


def microbatch_samples(
    iteration: int,
    microbatch: int,
    *,
    seed: int,
    num_samples: int,
    global_batch_size: int,
    microbatch_size: int,
) -> np.ndarray:
    """The samples of one microbatch of the job, int64 [microbatch_size].

    Raises:
        ConfigError: there are fewer samples than one iteration uses.
    """
    first = microbatch * microbatch_size
    assert 0 <= first < first + microbatch_size <= global_batch_size
    return _samples_at(
        iteration,
        np.arange(first, first + microbatch_size, dtype=np.int64),
        seed=seed,
        num_samples=num_samples,
        global_batch_size=global_batch_size,
    )


def sample_digest(samples: np.ndarray) -> str:
    """xxh3_128 of the sorted sample numbers as little-endian int64, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(np.sort(samples).astype("<i8").tobytes())


def _samples_at(
    iteration: int, places: np.ndarray, *, seed: int, num_samples: int, global_batch_size: int
) -> np.ndarray:
    assert iteration >= 0
    if num_samples < global_batch_size:
        raise ConfigError(
            "training.global_batch_size",
            global_batch_size,
            f"the data has {num_samples} samples: at most {num_samples} fit in an iteration; "
            "give more data, shorter sequences or a smaller batch",
        )
    data_epoch, j = divmod(iteration, num_samples // global_batch_size)
    positions = (j * global_batch_size + places).astype(np.uint64)
    return _permuted_positions(positions, num_samples, mix(_ORDER, seed, data_epoch)).astype(
        np.int64
    )


def _permuted_positions(positions: np.ndarray, num_samples: int, key: int) -> np.ndarray:
    """The places to which the permutation of [0, num_samples) moves the positions, uint64."""
    half_bits = max(_HALF_BITS_MIN, ((num_samples - 1).bit_length() + 1) // 2)
    round_keys = [mix(key, index) for index in range(_NUM_ROUNDS)]
    values = _feistel(positions, half_bits, round_keys)
    outside = np.flatnonzero(values >= num_samples)
    # This loop ends: the cycle of a position leads back to the position itself, which is below n.
    while len(outside) > 0:
        values[outside] = _feistel(values[outside], half_bits, round_keys)
        outside = outside[values[outside] >= num_samples]
    return values


def _feistel(values: np.ndarray, half_bits: int, round_keys: list[int]) -> np.ndarray:
    """A permutation of [0, 4**half_bits): each round swaps the halves and xors one with a hash."""
    bits = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for key in round_keys:
        left, right = right, left ^ (_mixed_words(right + np.uint64(key)) & mask)
    return (left << bits) | right


def _mixed_word(word: int) -> int:
    """splitmix64's finalizer: a bijection of 64 bits in which every input bit affects every output
    bit."""
    word = ((word ^ (word >> 30)) * _FIRST_FACTOR) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND_FACTOR) & _MASK
    return word ^ (word >> 31)


def _mixed_words(words: np.ndarray) -> np.ndarray:
    """`_mixed_word` of every element; uint64 arrays wrap around without a warning."""
    mixed: np.ndarray = (words ^ (words >> np.uint64(30))) * np.uint64(_FIRST_FACTOR)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND_FACTOR)
    mixed ^= mixed >> np.uint64(31)
    return mixed
