"""The order of samples: a permutation per data epoch, the same everywhere and for ever."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.core.samples import (
    data_seed,
    microbatch_samples,
    mix,
    random_words,
    sample_digest,
    sample_numbers,
)
from planaria.errors import ConfigError

SEEDS = st.integers(0, 2**63 - 1)


def order(seed: int, data_epoch: int, num_samples: int) -> list[int]:
    """The whole permutation: one iteration that uses every sample."""
    samples = sample_numbers(
        data_epoch, seed=seed, num_samples=num_samples, global_batch_size=num_samples
    )
    return [int(sample) for sample in samples]


@settings(max_examples=60)
@given(num_samples=st.integers(1, 5000), seed=SEEDS, data_epoch=st.integers(0, 1000))
def test_order_is_a_permutation(num_samples: int, seed: int, data_epoch: int) -> None:
    """Every sample comes exactly once, also where n is no power of two."""
    assert sorted(order(seed, data_epoch, num_samples)) == list(range(num_samples))


@pytest.mark.parametrize(
    "num_samples", [*range(1, 34), 63, 64, 65, 255, 256, 257, 4095, 4096, 4097]
)
def test_order_is_a_permutation_around_powers_of_two(num_samples: int) -> None:
    """The domain of the network changes size at powers of four."""
    assert sorted(order(3, 1, num_samples)) == list(range(num_samples))


@settings(max_examples=40)
@given(data=st.data(), num_samples=st.integers(1, 400), seed=SEEDS)
def test_each_data_epoch_uses_a_sample_at_most_once(
    data: st.DataObject, num_samples: int, seed: int
) -> None:
    """n // B iterations take distinct samples, and only n mod B are left out."""
    batch = data.draw(st.integers(1, num_samples))
    data_epoch = data.draw(st.integers(0, 3))
    per_epoch = num_samples // batch

    used = np.concatenate(
        [
            sample_numbers(i, seed=seed, num_samples=num_samples, global_batch_size=batch)
            for i in range(data_epoch * per_epoch, (data_epoch + 1) * per_epoch)
        ]
    )

    assert len(set(used.tolist())) == len(used) == num_samples - num_samples % batch
    assert used.min() >= 0
    assert used.max() < num_samples


@settings(max_examples=40)
@given(
    num_microbatches=st.integers(1, 12), size=st.integers(1, 9), seed=SEEDS, i=st.integers(0, 99)
)
def test_microbatches_in_order_are_the_iteration(
    num_microbatches: int, size: int, seed: int, i: int
) -> None:
    """A rank computes its microbatch alone and gets what the whole order has there."""
    batch = num_microbatches * size
    whole = sample_numbers(i, seed=seed, num_samples=200, global_batch_size=batch)

    parts = [
        microbatch_samples(
            i, m, seed=seed, num_samples=200, global_batch_size=batch, microbatch_size=size
        )
        for m in range(num_microbatches)
    ]

    assert np.concatenate(parts).tolist() == whole.tolist()
    assert all(part.dtype == np.int64 for part in parts)


@settings(max_examples=30)
@given(seed=SEEDS, data_epoch=st.integers(0, 100))
def test_order_differs_by_data_epoch_and_seed(seed: int, data_epoch: int) -> None:
    """Of 200! orders two equal ones would mean that an argument is ignored."""
    here = order(seed, data_epoch, 200)

    assert here != order(seed, data_epoch + 1, 200)
    assert here != order(seed + 1, data_epoch, 200)
    assert here == order(seed, data_epoch, 200)


@pytest.mark.parametrize("num_samples", [5, 70])
def test_every_sample_is_equally_likely_in_every_place(num_samples: int) -> None:
    """Chi square over 400 seeds; too few rounds of the network give several times this."""
    counts = np.zeros((num_samples, num_samples))
    for seed in range(400):
        counts[np.arange(num_samples), order(seed, 0, num_samples)] += 1

    expected = 400 / num_samples
    degrees = (num_samples - 1) ** 2
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5


def test_order_is_what_it_always_was() -> None:
    """A change here would make a resumed job train on other samples than it saved."""
    assert order(0, 0, 10) == [1, 6, 3, 7, 2, 0, 9, 8, 4, 5]
    assert order(7, 3, 12) == [2, 9, 4, 8, 11, 5, 7, 10, 3, 1, 6, 0]
    large = sample_numbers(5, seed=2**63, num_samples=10**12, global_batch_size=4)
    assert large.tolist() == [245465439690, 435928351783, 315992631999, 832026636529]
    assert mix(1, 2, 3) == 74078413316773926
    assert data_seed(4, seed=1) == 2191281495647906032
    assert random_words(5, 2).tolist() == [7134611160154358618, 13877614986023876344]
    assert sample_digest(np.array([3, 1, 2])) == "d0d66ae2837a0117026f21f9c50dcf1f"


def test_random_words_are_those_of_splitmix64() -> None:
    """The first outputs for seed 1234567 as published with the reference implementation."""
    assert random_words(1234567, 3).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@settings(max_examples=200)
@given(a=st.lists(SEEDS, max_size=4), b=st.lists(SEEDS, max_size=4))
def test_mix_tells_values_order_and_length_apart(a: list[int], b: list[int]) -> None:
    """Seeds of different purposes must not meet."""
    assert (mix(*a) == mix(*b)) == (a == b)
    assert 0 <= mix(*a) < 2**64


def test_digest_does_not_depend_on_the_order() -> None:
    """Which rank reports which samples is the plan's business."""
    assert sample_digest(np.array([9, 2, 5])) == sample_digest(np.array([5, 9, 2]))
    assert sample_digest(np.array([9, 2, 5])) != sample_digest(np.array([5, 9, 3]))


def test_too_few_samples_are_refused_by_name() -> None:
    """The message tells how many there are."""
    with pytest.raises(ConfigError, match="31 samples") as caught:
        sample_numbers(0, seed=0, num_samples=31, global_batch_size=32)

    assert caught.value.field == "training.global_batch_size"
