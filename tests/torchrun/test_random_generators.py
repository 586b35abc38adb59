"""Random numbers go on where a version was saved."""

import random

import numpy as np
import torch

from planaria.torchrun.loop_state import (
    NonTensorState,
    RandomGenerators,
    decoded_state,
    encoded_state,
    readable_state,
)


def drawn() -> list[float]:
    """A number of each generator."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_generators_draw_what_they_would_have_drawn() -> None:
    """Through the bytes of a version, which torch reads back without running code."""
    saved = NonTensorState(per_rank={"random": RandomGenerators().state_dict()})
    expected = drawn()
    readable_state(saved)

    again = decoded_state(encoded_state(saved)).per_rank["random"]
    assert drawn() != expected
    RandomGenerators().load_state_dict(again)

    assert drawn() == expected
