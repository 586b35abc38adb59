"""Hashes of parameters: the same for the same bits, another one for any bit in its turn."""

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from torch import nn

from planaria.core.agreement import HASH_BITS
from planaria.core.job import ModelConfig, ResilienceConfig, TrainingConfig
from planaria.engine.iteration import guard
from planaria.engine.iteration.guard import sampled_hash, sampled_hashes
from planaria.engine.prepare import split_model
from planaria.engine.stage import HeldLayer, RankStage
from planaria.engine.worker_faults import flip_bit

NUM_BYTES = 4 * (5 * 3 + 3)


def layer(dtype: Literal["float32", "bfloat16"] = "float32") -> HeldLayer:
    torch.manual_seed(0)
    return HeldLayer(0, nn.Linear(5, 3), training=TrainingConfig(dtype=dtype), tied=())


def hashes(held: HeldLayer, num_ages: int) -> list[int]:
    found = []
    for held.age in range(num_ages):
        found.append(sampled_hash(held))
    return found


def flips(held: HeldLayer) -> Iterator[str]:
    """Each byte of each tensor in turn, with one bit flipped while it is looked at."""
    for kind in (held.masters, held.parameters):
        for name, tensor in kind.items():
            flat = tensor.data.view(-1).view(torch.uint8)
            for index in range(len(flat)):
                flat[index] ^= 1 << index % 8
                yield f"{name}, byte {index}"
                flat[index] ^= 1 << index % 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sample_bytes", [1 << 20, NUM_BYTES, 13, 1])
def test_every_bit_has_its_turn(
    dtype: Literal["float32", "bfloat16"], sample_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of masters and of what the forward uses, in as many ages as there are windows; in the other
    ages nothing is seen."""
    monkeypatch.setattr(guard, "SAMPLE_BYTES", sample_bytes)
    held = layer(dtype)
    num_bytes = NUM_BYTES * 3 // 2 if dtype == "bfloat16" else NUM_BYTES
    num_windows = -(-num_bytes // sample_bytes)
    before = hashes(held, num_windows)

    for place in flips(held):
        after = hashes(held, num_windows)
        assert [a != b for a, b in zip(after, before, strict=True)].count(True) == 1, place
    assert hashes(held, num_windows) == before
    assert max(before) < 1 << HASH_BITS


def test_peers_have_the_same_hash_and_nothing_is_hashed_for_a_job_without_guard() -> None:
    """Two layers that were made alike; one without parameters has a hash too."""
    bare = HeldLayer(1, nn.ReLU(), training=TrainingConfig(), tied=())

    assert sampled_hash(layer()) == sampled_hash(layer())
    assert sorted(sampled_hashes([layer(), bare], ResilienceConfig())) == [0, 1]
    assert sampled_hashes([layer()], ResilienceConfig(corruption_guard=False)) == {}


def test_a_fault_flips_one_bit_somewhere_else_on_each_rank() -> None:
    """Two nodes with the same flipped bit would outvote a third that is sound."""
    split = split_model(
        ModelConfig(kind="python", target="helpers.user_models:sequential"),
        seed=0,
        vocabulary_size=0,
        sequence_length=0,
    )
    found = set()
    for rank in range(4):
        stage = RankStage(split, training=TrainingConfig())
        stage.hold(range(4), states={}, age=3)
        before = {number: sampled_hash(held) for number, held in stage.layers.items()}
        flip_bit(stage, rank=rank, iteration=2)
        after = {number: sampled_hash(held) for number, held in stage.layers.items()}
        changed = [number for number in before if after[number] != before[number]]
        assert len(changed) == 1
        found.add(after[changed[0]])

    assert len(found) == 4


def test_a_rank_without_parameters_has_nothing_to_flip() -> None:
    """A node that is left over by the plan holds no layer."""
    split = split_model(
        ModelConfig(kind="python", target="helpers.user_models:sequential"),
        seed=0,
        vocabulary_size=0,
        sequence_length=0,
    )
    stage = RankStage(split, training=TrainingConfig())
    flip_bit(stage, rank=0, iteration=0)

    assert not stage.layers
