"""Oobleck's equation 6, against every distribution there is."""

import random
from itertools import product

import pytest

from planaria.planner.layout.distribution import levelled_distribution

SEED = 20_261_121


def unevenness(seconds: list[float], counts: tuple[int, ...]) -> float:
    """The sum of squared distances of N_i * T_i from their mean."""
    products = [one * count for one, count in zip(seconds, counts, strict=True)]
    mean = sum(products) / len(products)
    return sum((value - mean) ** 2 for value in products)


def test_no_distribution_is_more_level() -> None:
    """Equation 6 is no sum of terms, as all pipelines share the mean; 500 random cases."""
    rng = random.Random(SEED)
    for case in range(500):
        num_pipelines = rng.randint(1, 4)
        total = rng.randint(num_pipelines, 14)
        seconds = [
            rng.choice((rng.uniform(0.1, 5), float(rng.randint(1, 5))))
            for _ in range(num_pipelines)
        ]
        everything = [
            counts
            for counts in product(range(1, total + 1), repeat=num_pipelines)
            if sum(counts) == total
        ]

        found = levelled_distribution(seconds, total)

        where = f"seed {SEED}, case {case}"
        assert found in everything, where
        best = min(unevenness(seconds, counts) for counts in everything)
        assert unevenness(seconds, found) == pytest.approx(best, abs=1e-9), where


def test_work_is_proportional_to_speed() -> None:
    """Pipelines of 1 and 3 seconds share 40 microbatches 30 to 10."""
    assert levelled_distribution([1.0, 3.0], 40) == (30, 10)
