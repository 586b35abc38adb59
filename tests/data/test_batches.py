"""Batches: which samples a microbatch is made of depends on the seed and the iteration alone."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from planaria.core.job import DataConfig, TrainingConfig
from planaria.core.samples import sample_numbers
from planaria.data.batches import (
    Batches,
    HeldOut,
    copied_text,
    num_targets,
    refuse_unshifted,
    unrepeated_text,
)
from planaria.data.datasets import UserDataset
from planaria.data.text import IGNORED
from planaria.errors import ConfigError
from planaria.models.layers import cross_entropy_sum

TRAINING = TrainingConfig(global_batch_size=12, microbatch_size=3, seed=5)
NUM_SAMPLES = 50


class _Numbers:
    """A sample is its number, and notes how it is read. Of its two targets the second is -100,
    which counts for nothing, where the number is odd."""

    vocabulary_size = 0

    def __init__(self) -> None:
        self.reads: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return NUM_SAMPLES

    def sample(self, index: int, *, seed: int) -> tuple[Tensor, Tensor]:
        self.reads.append((index, seed))
        return torch.tensor([float(index)]), torch.tensor([index, -100 if index % 2 else index])


def numbers(iteration: int) -> list[int]:
    """The samples of an iteration, in order."""
    drawn = sample_numbers(
        iteration, seed=TRAINING.seed, num_samples=NUM_SAMPLES, global_batch_size=12
    )
    return [int(number) for number in drawn]


@pytest.mark.parametrize("iteration", [0, 3, 4, 11])
def test_microbatches_cut_the_iterations_samples_in_order(iteration: int) -> None:
    """Also across the end of a data epoch, which comes after four iterations here."""
    batches = Batches(_Numbers(), TRAINING, iteration=iteration)
    inputs = torch.cat([batches.inputs(index) for index in range(4)]).flatten().tolist()
    targets = torch.cat([batches.targets(index) for index in range(4)]).tolist()

    consumed = [int(number) for index in range(4) for number in batches.consumed[index]]
    assert inputs == numbers(iteration) == consumed
    assert [first for first, _ in targets] == inputs


def test_a_microbatch_is_the_same_on_any_rank_in_any_order() -> None:
    """One rank takes inputs only, another targets only, a third both the other way round."""
    first, last, both = (Batches(_Numbers(), TRAINING, iteration=2) for _ in range(3))
    for index in (3, 0, 2):
        targets = both.targets(index)
        inputs = both.inputs(index)

        assert torch.equal(inputs, first.inputs(index))
        assert torch.equal(targets, last.targets(index))
    assert last.consumed == {}
    assert list(first.consumed) == list(both.consumed) == [3, 0, 2]
    for index, samples in first.consumed.items():
        assert samples.tolist() == both.consumed[index].tolist()


def test_a_rank_that_needs_both_loads_a_microbatch_once() -> None:
    """And does not keep it after its last hop."""
    dataset = _Numbers()
    batches = Batches(dataset, TRAINING, iteration=2)
    batches.inputs(1)
    batches.targets(1)

    assert [index for index, _ in dataset.reads] == numbers(2)[3:6]
    assert not batches._loaded


def test_a_sample_has_a_seed_of_its_own_in_every_iteration() -> None:
    """A random transform must give the same wherever it runs, and something else elsewhere."""
    reads = []
    for iteration in (0, 0, 1):
        dataset = _Numbers()
        Batches(dataset, TRAINING, iteration=iteration).inputs(0)
        reads.append(dataset.reads)

    assert reads[0] == reads[1]
    seeds = [seed for read in (reads[0], reads[2]) for _, seed in read]
    assert len(set(seeds)) == len(seeds)


def test_the_loss_is_divided_by_the_targets_of_the_global_batch() -> None:
    """The same on every rank, whichever microbatches it has; -100 is no target."""
    batches = Batches(_Numbers(), TRAINING, iteration=2)

    assert batches.num_targets() == sum(1 if number % 2 else 2 for number in numbers(2))


def test_held_out_samples_come_in_order_and_the_last_microbatch_may_be_small() -> None:
    """The seed of a sample is the same in every evaluation."""
    dataset = _Numbers()
    held_out = HeldOut(dataset, TRAINING, num_samples=7)

    inputs = [held_out.inputs(index).flatten().tolist() for index in range(3)]
    assert inputs == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0]]
    assert [held_out.num_targets(index) for index in range(3)] == [5, 4, 2]
    assert held_out.num_microbatches == 3
    first = list(dataset.reads)
    held_out.clear()
    for index in range(3):
        held_out.targets(index)
    assert dataset.reads == [*first, *first]
    assert HeldOut(dataset, TRAINING, num_samples=0).num_samples == NUM_SAMPLES
    assert HeldOut(dataset, TRAINING, num_samples=10**6).num_samples == NUM_SAMPLES


def test_inputs_have_the_dtype_that_training_computes_in() -> None:
    """A layer in bfloat16 does not take float32 inputs; targets stay as they are."""
    training = replace(TRAINING, dtype="bfloat16")
    batches = Batches(_Numbers(), training, iteration=0)

    assert batches.inputs(0).dtype == torch.bfloat16
    assert batches.targets(0).dtype == torch.int64


class _Augmented:
    """A sample is its number, NaN, and a coin that decides whether it is negated."""

    def __init__(self, coin: Callable[[], float]) -> None:
        self._coin = coin

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        sign = 1.0 if self._coin() < 0.5 else -1.0
        return torch.tensor([sign * (1 + index), float("nan")]), {"y": torch.tensor(index)}


def _pairs(items: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in items]), torch.tensor([y["y"] for _, y in items])


@pytest.mark.parametrize("collate", [None, _pairs])
def test_a_data_set_that_keeps_a_generator_is_told_before_training(
    collate: Callable[[list[Any]], Any] | None,
) -> None:
    """What such a sample is depends on what its process has read before, so on who is lost."""
    training = TrainingConfig(global_batch_size=32, microbatch_size=16)
    kept, torch_kept = np.random.default_rng(0), torch.Generator().manual_seed(0)
    before = torch.get_rng_state()

    def text(coin: Callable[[], float]) -> str:
        dataset = UserDataset(_Augmented(coin), "mine:data", "supervised", collate, NUM_SAMPLES)
        return unrepeated_text(dataset, training)

    part = "the first microbatch" if collate else "sample "
    for coin in (kept.random, lambda: float(torch.rand(1, generator=torch_kept))):
        assert text(coin).startswith(f"data.target = 'mine:data': {part}")
        assert "differs each time that it is read" in text(coin)
    for coin in (random.random, np.random.random, lambda: float(torch.rand(1)), lambda: 0.0):
        assert text(coin) == ""
    assert torch.equal(before, torch.get_rng_state())
    assert unrepeated_text(_Numbers(), training) == ""


def _rows(items: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


def _masked_rows(items: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    inputs, targets = _rows(items)
    return {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}, targets


IDS = torch.arange(60).reshape(10, 6) % 7
PROMPT = torch.where(torch.arange(6) < 5, -100, IDS)
EQUAL = torch.full((10, 6), 3)


@pytest.mark.parametrize("collate", [None, _rows, _masked_rows])
@pytest.mark.parametrize(
    ("inputs", "targets", "objective", "is_refused"),
    [
        (IDS, IDS, "causal", True),
        (IDS, torch.where(torch.arange(6) < 2, -100, IDS), "causal", True),
        (IDS[:, :-1], IDS[:, 1:], "causal", False),
        (IDS[:, :-1], PROMPT[:, 1:], "causal", False),
        (EQUAL, EQUAL, "causal", False),
        (IDS, torch.full_like(IDS, -100), "causal", False),
        (IDS, IDS, "masked", False),
        (IDS, IDS, "supervised", False),
    ],
)
def test_causal_targets_that_are_the_inputs_are_refused(
    inputs: Tensor,
    targets: Tensor,
    objective: str,
    is_refused: bool,
    collate: Callable[[list[Any]], Any] | None,
) -> None:
    """As one writes them for transformers, which shifts them. Rows of one token may be right."""
    training = TrainingConfig(global_batch_size=8, microbatch_size=4)
    items = list(zip(inputs, targets, strict=True))
    dataset = UserDataset(items, "mine:data", objective, collate, len(items))

    if is_refused:
        with pytest.raises(ConfigError, match=r"mine:data.* return \(ids\[:-1\], ids\[1:\]\)"):
            refuse_unshifted(dataset, training)
    else:
        refuse_unshifted(dataset, training)
    refuse_unshifted(_Numbers(), training)


@pytest.mark.parametrize("collate", [None, _rows])
@pytest.mark.parametrize(
    ("inputs", "targets", "objective", "is_told"),
    [
        (IDS, IDS, "supervised", True),
        (IDS, torch.where(torch.arange(6) < 2, -100, IDS), "supervised", True),
        (IDS.int(), IDS, "supervised", True),
        (IDS[:, :-1], IDS[:, 1:], "supervised", False),
        (EQUAL, EQUAL, "supervised", False),
        (IDS, torch.full_like(IDS, -100), "supervised", False),
        (IDS, IDS[:, 0], "supervised", False),
        (IDS[:, 0], IDS[:, 0], "supervised", False),
        (IDS.float(), IDS.float(), "supervised", False),
        (IDS.reshape(10, 2, 3), IDS.reshape(10, 2, 3), "supervised", False),
        (IDS, IDS, "masked", False),
    ],
)
def test_own_targets_that_are_the_inputs_are_told(
    inputs: Tensor,
    targets: Tensor,
    objective: str,
    is_told: bool,
    collate: Callable[[list[Any]], Any] | None,
) -> None:
    """Rows of token ids alone: what is rebuilt from images or numbers is meant so."""
    training = TrainingConfig(global_batch_size=8, microbatch_size=4)
    items = list(zip(inputs, targets, strict=True))
    dataset = UserDataset(items, "mine:data", objective, collate, len(items))
    data = DataConfig(kind="python", target="mine:data")

    text = copied_text(dataset, data=data, training=training)

    assert text.startswith("data.target = 'mine:data': ") == is_told
    assert is_told or text == ""


def test_targets_of_several_tensors_are_no_copies() -> None:
    """Nobody knows which of them is compared with what."""
    training = TrainingConfig(global_batch_size=8, microbatch_size=4)
    items = [(row, {"ids": row}) for row in IDS]
    dataset = UserDataset(items, "mine:data", "supervised", None, len(items))

    assert copied_text(dataset, data=DataConfig(kind="python"), training=training) == ""


def _sliced(items: list[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    rows = torch.stack(items)
    images = rows.reshape(4, 2, 4, 1).permute(0, 3, 1, 2)  # Of one channel, which comes last.
    return rows[:, :6], {"turned": rows.T, "repeated": rows[0].expand(2, 8), "images": images}


def test_what_a_function_collates_lies_in_memory_as_if_a_loader_had_sent_it() -> None:
    """A product of a slice has other bits than that of its copy, and a loader sends copies."""
    rows = list(torch.arange(80.0).reshape(10, 8))
    training = TrainingConfig(global_batch_size=8, microbatch_size=4)
    dataset = UserDataset(rows, "mine:data", "supervised", _sliced, len(rows))
    batches = Batches(dataset, training, iteration=0)

    parts = [batches.inputs(0), *batches.targets(0).values()]
    assert all(part.stride() == torch.empty(part.shape).stride() for part in parts)
    assert torch.equal(parts[0], parts[1].T[:, :6])


def _in_a_row(items: list[list[int]]) -> tuple[Tensor, Tensor]:
    return torch.zeros(len(items)), torch.tensor(items).flatten()


def _in_rows(items: list[list[int]]) -> tuple[Tensor, Tensor]:
    return torch.zeros(len(items)), torch.tensor(items)


@pytest.mark.parametrize("collate", [_in_a_row, _in_rows])
@pytest.mark.parametrize(
    ("items", "expected"),
    [([[IGNORED, IGNORED, 1, 2, 3]] * 4, 12), ([[0], [IGNORED], [2], [IGNORED]], 2)],
    ids=["packed", "classes"],
)
def test_collated_targets_that_are_ignored_never_count(
    items: list[list[int]], expected: int, collate: Callable[[list[Any]], Any]
) -> None:
    """Whatever their shape: cross entropy leaves them out, and its mean divides by the others."""
    dataset = UserDataset(items, "mine:data", "supervised", collate, len(items))
    targets = torch.tensor(items).flatten()
    scores = torch.randn(len(targets), 4, generator=torch.Generator().manual_seed(1))
    mean = torch.nn.functional.cross_entropy(scores, targets)
    held_out = HeldOut(
        dataset, TrainingConfig(global_batch_size=4, microbatch_size=2), num_samples=0
    )

    for size in (1, 2, 4):
        count = num_targets(dataset, np.arange(4), seed=0, microbatch_size=size)
        assert count == expected
        torch.testing.assert_close(cross_entropy_sum(scores, targets) / count, mean)
    assert held_out.num_targets(0) + held_out.num_targets(1) == expected


@pytest.mark.parametrize("collate", [None, _rows])
def test_bytes_are_targets_whatever_their_value(
    collate: Callable[[list[Any]], Any] | None,
) -> None:
    """-100 as an unsigned byte is 156, which cross entropy takes for a class like any other."""
    items = [(torch.zeros(256), torch.arange(256, dtype=torch.uint8))] * 4
    dataset = UserDataset(items, "mine:data", "supervised", collate, len(items))
    training = TrainingConfig(global_batch_size=4, microbatch_size=2)
    held_out = HeldOut(dataset, training, num_samples=0)

    assert Batches(dataset, training, iteration=0).num_targets() == 1024
    assert held_out.num_targets(0) == held_out.num_targets(1) == 512


def _batches_of(
    targets: list[Tensor],
    *,
    collate: Callable[[list[Any]], Any] | None = None,
    seed: int = 0,
) -> Batches:
    items = [(torch.zeros(2), each) for each in targets]
    dataset = UserDataset(items, "mine:data", "supervised", collate, len(items))
    training = TrainingConfig(global_batch_size=len(items), microbatch_size=1, seed=seed)
    return Batches(dataset, training, iteration=0)


def test_float_targets_of_another_length_are_refused() -> None:
    """The first sample of an iteration stands for all in the count by which a loss is divided, and
    microbatches of one sample are never stacked. A collate function may give any lengths."""
    targets = [torch.zeros(10 if n % 2 else 1000) for n in range(8)]
    plain, collated = _batches_of(targets), _batches_of(targets, collate=_rows)
    lengths = [plain.load(n)[1].numel() for n in range(8)]

    assert plain.num_targets() == 8 * lengths[0]
    for index, length in enumerate(lengths):
        plain.inputs(index)
        if length == lengths[0]:
            assert plain.targets(index).numel() == length
        else:
            words = rf"has {length} elements, and sample \d has {lengths[0]}; .* data\.collate"
            with pytest.raises(ConfigError, match=words):
                plain.targets(index)
    assert collated.num_targets() == sum(collated.targets(n).numel() for n in range(8)) == 4040


@pytest.mark.parametrize("seed", range(4))
def test_a_sample_without_targets_may_be_among_rows_of_integers(seed: int) -> None:
    """A list without numbers becomes a tensor of floats, whichever place it has."""
    batches = _batches_of([torch.as_tensor(row) for row in ([], [1, 2], [3], [])], seed=seed)

    assert batches.num_targets() == sum(batches.targets(n).numel() for n in range(4)) == 3
