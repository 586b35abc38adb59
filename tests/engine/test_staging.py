"""State on its way between a device and its host, on the device whose copies come late."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from helpers.jobs import tiny_job
from planaria.core.job import TrainingConfig
from planaria.core.specs import NodeSpec
from planaria.engine import prepare
from planaria.engine.devices import LateDevice
from planaria.engine.stage import HeldLayer
from planaria.engine.staging import State

TRAINING = TrainingConfig(learning_rate=0.1, seed=3)
WEIGHT = "parameter/weight"


def _held(device: LateDevice) -> HeldLayer:
    torch.manual_seed(0)
    return HeldLayer(0, nn.Linear(3, 2), training=TRAINING, tied=(), device=device)


def _step(held: HeldLayer) -> None:
    held.gradients.fill_(1.0)
    held.gradients_of = held.age
    held.apply(held.age, learning_rate=0.1, scale=1.0)


def test_the_mirror_has_the_state_of_its_age_though_the_layer_has_gone_on() -> None:
    """The step is ordered after the copy; a reader that comes later sees no part of the step."""
    held = _held(LateDevice())
    before = held.masters["weight"].detach().clone().numpy()
    mirror = held.state_views()
    _step(held)

    assert np.array_equal(mirror[WEIGHT], before)
    assert not np.array_equal(held.masters["weight"].detach().numpy(), before)


def test_a_reader_waits_for_the_mirror() -> None:
    """Nothing else made the copy."""
    held = _held(LateDevice())

    assert np.array_equal(held.state_views()[WEIGHT], held.masters["weight"].detach().numpy())


def test_all_readers_of_an_age_share_one_copy_and_the_next_age_has_its_own() -> None:
    """Copies in memory, saves and transfers of one age cost one copy from the device."""
    device = LateDevice()
    held = _held(device)
    first = held.state_views()
    assert held.state_views() is first
    _step(held)
    second = held.state_views()

    assert second is not first
    assert np.array_equal(second[WEIGHT], held.masters["weight"].detach().numpy())
    assert {"optimizer/weight/exp_avg", "optimizer/weight/step"} < set(second)
    assert second["optimizer/weight/step"] == 1


def test_a_state_that_was_loaded_is_mirrored_anew() -> None:
    """It may have the age of the state before it."""
    held, other = _held(LateDevice()), _held(LateDevice())
    held.state_views()
    with torch.no_grad():
        other.masters["weight"].add_(1.0)
    held.load(other.state(), age=0)

    assert np.array_equal(held.state_views()[WEIGHT], other.state()[WEIGHT])


def test_a_copy_of_the_state_outlives_the_layer_and_its_mirror() -> None:
    """A save is written while training goes on, for longer than an iteration."""
    held = _held(LateDevice())
    before = held.masters["weight"].detach().clone().numpy()
    copy = held.state()
    _step(held)
    held.state_views()
    _step(held)

    assert np.array_equal(held.state_views()[WEIGHT], held.masters["weight"].detach().numpy())
    assert np.array_equal(copy[WEIGHT], before)


@pytest.mark.parametrize("ask", [HeldLayer.state, HeldLayer.state_views])
def test_the_state_of_layers_asks_before_it_pins_memory(
    ask: Callable[[HeldLayer], State], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is more than everything else that is pinned, and may be more than can be."""
    device, asked = LateDevice(), list[int]()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(tensor.nbytes)
        return torch.empty_like(tensor)

    held = _held(device)
    monkeypatch.setattr(device, "state_like", note)

    assert sum(array.nbytes for array in ask(held).values()) == sum(asked)


@pytest.mark.parametrize(
    ("host", "given", "share"), [("127.0.0.1", 0, 12), ("10.0.0.7", 0, 2), ("127.0.0.1", 77, 0)]
)
def test_a_rank_pins_its_share_of_half_the_memory_that_its_machine_has_left(
    host: str, given: int, share: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All nodes share the machine where they are on loopback."""
    monkeypatch.setattr(prepare, "available_bytes", lambda: 2400)
    job = tiny_job("sequential", tmp_path)
    changes: Any = {"nodes": 4, "max_nodes": 6, "devices_per_node": 2, "pinned_memory_bytes": given}
    job = replace(job, cluster=replace(job.cluster, **changes))
    spec = NodeSpec(
        job=job,
        node=0,
        token=b"",
        coordinator=("", 0),
        worker="",
        cache_directory="",
        host=host,
    )

    assert prepare.pinned_bytes_of(spec) == (given or 1200 // share)
