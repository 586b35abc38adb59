"""State on its way between a device and its host, on the device whose copies come late."""

import numpy as np
import torch
from torch import nn

from planaria.core.job import TrainingConfig
from planaria.engine.devices import LateDevice
from planaria.engine.stage import HeldLayer

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
