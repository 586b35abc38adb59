"""The commit vector: what went in comes out, and all who hold it agree on the end."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.core.commit import (
    CommitVector,
    VectorLayout,
    Votes,
    commit_vector,
    decode_vector,
    encode_vector,
    vector_layout,
)
from planaria.core.job import JobConfig, TrainingConfig

finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def vectors(draw: st.DrawFn) -> tuple[CommitVector, VectorLayout]:
    """Any vector, with sample numbers as large as datasets get, and its layout."""
    layout = VectorLayout(
        num_layers=draw(st.integers(1, 8)),
        num_microbatches=draw(st.integers(1, 8)),
        num_samples=draw(st.integers(1, 16)),
    )

    def tuples(one: st.SearchStrategy[float], number: int) -> st.SearchStrategy[list[float]]:
        return st.lists(one, min_size=number, max_size=number)

    vector = CommitVector(
        squared_norms=tuple(draw(tuples(finite, layout.num_layers))),
        losses=tuple(draw(tuples(finite, layout.num_microbatches))),
        samples=tuple(
            int(number) for number in draw(tuples(st.integers(0, 1 << 53), layout.num_samples))
        ),
        votes=Votes(*(draw(st.integers(0, 1000)) for _ in Votes._fields)),
    )
    return vector, layout


@given(vectors())
def test_a_vector_comes_back_bit_for_bit(drawn: tuple[CommitVector, VectorLayout]) -> None:
    """It decides how a lost rank's iteration is applied elsewhere, so no bit may change."""
    vector, layout = drawn
    data = encode_vector(vector)
    decoded = decode_vector(data, layout)

    assert len(data) == 8 * layout.size
    assert decoded == vector
    assert encode_vector(decoded) == data
    assert all(isinstance(number, int) for number in (*decoded.samples, *decoded.votes))


def test_not_a_number_and_negative_zero_survive() -> None:
    """A diverged loss has to be seen by all; equality alone would not show these."""
    vector = CommitVector((math.inf, -0.0), (math.nan,), (3,), Votes(0))
    decoded = decode_vector(encode_vector(vector), VectorLayout(2, 1, 1))

    assert math.isnan(decoded.losses[0])
    assert decoded.squared_norms[0] == math.inf
    assert math.copysign(1.0, decoded.squared_norms[1]) == -1.0


@given(vectors(), st.integers(1, 4), st.randoms())
def test_parts_that_ranks_contribute_alone_sum_to_the_whole(
    drawn: tuple[CommitVector, VectorLayout], num_ranks: int, random: Random
) -> None:
    """Each entry comes from one rank and is +0 elsewhere, in whatever order they are added."""
    vector, layout = drawn
    entries = [*vector.squared_norms, *vector.losses, *vector.samples, *vector.votes]
    owners = [random.randrange(num_ranks) for _ in entries]
    total = [0.0] * layout.size
    for rank in range(num_ranks):
        total = [
            sum_ + (entry if owner == rank else 0.0)
            for sum_, entry, owner in zip(total, entries, owners, strict=True)
        ]

    assert commit_vector(total, layout) == vector


@pytest.mark.parametrize("entries", [[0.0] * 7, [0.0] * 9])
def test_a_vector_of_another_size_is_refused(entries: list[float]) -> None:
    """It is of another job."""
    with pytest.raises(AssertionError):
        commit_vector(entries, VectorLayout(1, 1, 2))


def test_a_sample_that_is_no_number_of_one_is_refused() -> None:
    """Two ranks have contributed the same microbatch, or half of one."""
    with pytest.raises(AssertionError):
        commit_vector([1.0, 1.0, 2.5, 3.0, *Votes(0)], VectorLayout(1, 1, 2))


def test_the_layout_follows_the_job() -> None:
    """A norm per layer, a loss per microbatch, a number per sample, and the votes."""
    job = JobConfig(training=TrainingConfig(global_batch_size=12, microbatch_size=3))
    layout = vector_layout(job, num_layers=7)

    assert layout == VectorLayout(num_layers=7, num_microbatches=4, num_samples=12)
    assert (layout.losses, layout.samples, layout.size) == (7, 11, 27)


def test_loss_and_norm_are_those_of_the_global_batch() -> None:
    """The losses are divided already; the norms are squared."""
    vector = CommitVector((9.0, 16.0), (0.5, 0.25), (1, 0), Votes(0))

    assert (vector.loss, vector.gradient_norm) == (0.75, 5.0)
    assert vector.sample_digest == CommitVector((0.0,), (0.0,), (0, 1), Votes(0)).sample_digest


ENDS = {
    "in the middle": (3, 0.0, 0, False),
    "the last but one": (8, 0.0, 0, False),
    "the last": (9, 0.0, 0, True),
    "beyond the last": (12, 0.0, 0, True),
    "the target is missed": (3, 0.7, 0, False),
    "the target is hit": (3, 0.75, 0, True),
    "one votes to stop": (3, 0.0, 1, True),
}


@pytest.mark.parametrize("case", ENDS)
def test_training_ends_for_all_who_hold_the_vector(case: str) -> None:
    """By number, by loss, or because the user asked any of them."""
    iteration, target_loss, stop_votes, is_last = ENDS[case]
    vector = CommitVector((1.0,), (0.5, 0.25), (0,), Votes(stop_votes))
    training = TrainingConfig(iterations=10, target_loss=target_loss)

    assert vector.is_last(iteration, training) == is_last


def test_without_a_target_no_loss_ends_training() -> None:
    """A loss of zero, or below it, is no reason where nobody asked for one."""
    vector = CommitVector((1.0,), (-1.0,), (0,), Votes(0))

    assert not vector.is_last(0, TrainingConfig(iterations=10))
