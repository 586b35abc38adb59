"""The commit vector: what went in comes out, and all who hold it agree on the end."""

import math
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.core import commit
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
def totals(draw: st.DrawFn) -> tuple[list[float], VectorLayout]:
    """What all ranks' parts sum to, with sample numbers as large as datasets get."""
    layout = VectorLayout(
        num_layers=draw(st.integers(1, 8)),
        num_microbatches=draw(st.integers(1, 8)),
        num_samples=draw(st.integers(1, 16)),
    )

    def drawn(one: st.SearchStrategy[float], number: int) -> list[float]:
        return draw(st.lists(one, min_size=number, max_size=number))

    return [
        *drawn(finite, layout.num_layers),
        *drawn(finite, layout.num_microbatches),
        *drawn(st.integers(0, 1 << 53), layout.num_samples),
        *(draw(st.integers(0, 1000)) for _ in Votes._fields),
    ], layout


def vector_of(entries: Sequence[float], layout: VectorLayout) -> CommitVector:
    return commit_vector(np.array(entries, dtype=np.float64), layout)


def vector(*, loss: float = 0.75, votes: Sequence[int] = (0,)) -> CommitVector:
    return CommitVector((9.0, 16.0), loss, 2, "ab" * 16, Votes(*votes))


@given(totals())
def test_a_vector_comes_back_bit_for_bit(drawn: tuple[list[float], VectorLayout]) -> None:
    """It decides how a lost rank's iteration is applied elsewhere, so no bit may change."""
    entries, layout = drawn
    summed = vector_of(entries, layout)
    data = encode_vector(summed)
    decoded = decode_vector(data, layout)

    assert decoded == summed
    assert encode_vector(decoded) == data
    assert all(isinstance(number, int) for number in (decoded.num_samples, *decoded.votes))


def test_not_a_number_and_negative_zero_survive() -> None:
    """A diverged loss has to be seen by all; equality alone would not show these."""
    diverged = CommitVector((math.inf, -0.0), math.nan, 1, "ab" * 16, Votes(0))
    decoded = decode_vector(encode_vector(diverged), VectorLayout(2, 1, 1))

    assert math.isnan(decoded.loss)
    assert decoded.squared_norms[0] == math.inf
    assert math.copysign(1.0, decoded.squared_norms[1]) == -1.0


def test_what_is_told_and_recorded_of_an_iteration_does_not_grow_with_its_batch() -> None:
    """With 300,000 samples a record held each of them, and was too large for the store."""
    sizes = []
    for num_samples in (3, 300_000):
        layout = VectorLayout(num_layers=2, num_microbatches=3, num_samples=num_samples)
        entries = [1.0] * 5 + [*range(num_samples)] + [*Votes(0)]
        sizes.append(len(encode_vector(vector_of(entries, layout))))

    assert sizes[0] == sizes[1] < 200


@given(totals(), st.integers(1, 4), st.randoms())
def test_parts_that_ranks_contribute_alone_sum_to_the_whole(
    drawn: tuple[list[float], VectorLayout], num_ranks: int, random: Random
) -> None:
    """Each entry comes from one rank and is +0 elsewhere, in whatever order they are added."""
    entries, layout = drawn
    owners = [random.randrange(num_ranks) for _ in entries]
    total = [0.0] * layout.size
    for rank in range(num_ranks):
        total = [
            sum_ + (entry if owner == rank else 0.0)
            for sum_, entry, owner in zip(total, entries, owners, strict=True)
        ]

    assert vector_of(total, layout) == vector_of(entries, layout)


@given(totals())
def test_a_loss_is_summed_in_the_order_of_the_microbatches(
    drawn: tuple[list[float], VectorLayout],
) -> None:
    """One after the other, so that it has the same bits on all ranks and under all plans."""
    entries, layout = drawn
    total = 0.0
    for loss in entries[layout.losses : layout.samples]:
        total += loss

    assert np.array_equal(vector_of(entries, layout).loss, total, equal_nan=True)


def test_loss_and_norm_have_the_same_bits_in_every_version_of_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From 3.12 on `sum` makes up for what floats round off; ranks may have either."""
    monkeypatch.setattr(commit, "sum", math.fsum, raising=False)
    layout = VectorLayout(num_layers=3, num_microbatches=3, num_samples=1)
    losses, squares = [1e16, 1.0, -1e16], [1e16, 1.0, 1.0]
    vector = vector_of([*squares, *losses, 0, *Votes(0)], layout)

    assert (vector.loss, vector.gradient_norm) == (0.0, 1e8)


@pytest.mark.parametrize("entries", [[0.0] * 7, [0.0] * 9])
def test_a_vector_of_another_size_is_refused(entries: list[float]) -> None:
    """It is of another job."""
    with pytest.raises(AssertionError):
        vector_of(entries, VectorLayout(1, 1, 2))


def test_a_sample_that_is_no_number_of_one_is_refused() -> None:
    """Two ranks have contributed the same microbatch, or half of one."""
    with pytest.raises(AssertionError):
        vector_of([1.0, 1.0, 2.5, 3.0, *Votes(0)], VectorLayout(1, 1, 2))


def test_the_layout_follows_the_job() -> None:
    """A norm per layer, a loss per microbatch, a number per sample, and the votes."""
    job = JobConfig(training=TrainingConfig(global_batch_size=12, microbatch_size=3))
    layout = vector_layout(job, num_layers=7)

    assert layout == VectorLayout(num_layers=7, num_microbatches=4, num_samples=12)
    assert (layout.losses, layout.samples, layout.size) == (7, 11, 31)


def test_a_save_that_any_rank_owes_begins_once_none_is_writing() -> None:
    """On all ranks at the same age, else it would be whole at none."""
    votes = {
        (owes, writes): vector(votes=(0, 0, 0, 0, owes, writes)).is_save_due
        for owes in range(2)
        for writes in range(2)
    }

    assert votes == {(0, 0): False, (0, 1): False, (1, 0): True, (1, 1): False}


def test_loss_and_norm_are_those_of_the_global_batch() -> None:
    """The losses are divided already; the norms are squared; the order of samples is none."""
    layout = VectorLayout(num_layers=2, num_microbatches=2, num_samples=2)
    one = vector_of([9.0, 16.0, 0.5, 0.25, 1, 0, *Votes(0)], layout)
    other = vector_of([0.0, 0.0, 0.0, 0.0, 0, 1, *Votes(0)], layout)

    assert (one.loss, one.gradient_norm, one.num_samples) == (0.75, 5.0, 2)
    assert one.sample_digest == other.sample_digest


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
    training = TrainingConfig(iterations=10, target_loss=target_loss)

    assert vector(loss=0.75, votes=(stop_votes,)).is_last(iteration, training) == is_last


def test_a_stop_that_is_asked_for_is_no_end_of_what_is_trained() -> None:
    """If nodes are short, and enough come in time, training goes on after it."""
    training = TrainingConfig(iterations=10)

    assert not vector(votes=(1,)).is_trained(3, training)
    assert vector(votes=(1, *[0] * 5, 1)).is_trained(3, training)


@pytest.mark.parametrize(
    ("loss", "untargeted", "is_last"),
    [(0.0, 0, True), (-0.3, 0, True), (math.nan, 0, False), (0.0, 2, False)],
)
def test_a_loss_of_zero_or_below_hits_the_target_if_it_is_one(
    loss: float, untargeted: int, is_last: bool
) -> None:
    """A hinge loss may be zero, and a log density below it. Where no sample has a target, zero says
    nothing."""
    training = TrainingConfig(iterations=10, target_loss=0.05)
    committed = vector(loss=loss, votes=Votes(stop=0, untargeted=untargeted))

    assert committed.is_last(0, training) == is_last


def test_without_a_target_no_loss_ends_training() -> None:
    """A loss of zero, or below it, is no reason where nobody asked for one."""
    for loss in (-1.0, 0.0):
        assert not vector(loss=loss).is_last(0, TrainingConfig(iterations=10))
