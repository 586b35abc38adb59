"""What is saved beside tensors comes back as it was, or is refused before it is needed."""

from collections import Counter, OrderedDict
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.errors import CheckpointError, ConfigError
from planaria.torchrun import loop_state
from planaria.torchrun.loop_state import (
    NonTensorState,
    decoded_state,
    encoded_state,
    readable_state,
)

KEYS = st.one_of(st.integers(), st.text(max_size=3))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=8,
)


class Odd:
    """Nothing that torch.load knows."""


@given(value=VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    """With their types, which JSON does not keep."""
    beside = NonTensorState({"optimizer/w/step": 3}, [{"lr": 0.1}], {"sampler": {"is": value}})
    readable_state(beside)

    found = decoded_state(encoded_state(beside))

    assert repr(value) == repr(found.others["sampler"]["is"])
    assert found.numbers == beside.numbers
    assert found.groups == beside.groups


@pytest.mark.parametrize(
    "value",
    [
        np.float64(0.5),
        np.float32(0.5),
        np.int64(5),
        np.bool_(True),
        inf,
        torch.tensor(0.5, dtype=torch.bfloat16),
        np.random.default_rng(1).bit_generator.state,
        np.random.RandomState(1).get_state(),
        torch.get_rng_state(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rates_of_numpy_and_states_of_generators_come_back(value: Any) -> None:
    """Schedules compute with numpy, and samplers draw."""
    beside = NonTensorState({}, ({"lr": value},), {})
    readable_state(beside)

    found = decoded_state(encoded_state(beside)).groups[0]["lr"]

    assert type(value) is type(found)
    assert repr(value) == repr(found)


@pytest.mark.parametrize("odd", [Odd(), lambda: 0], ids=["read", "written"])
def test_what_would_not_come_back_is_named(odd: object) -> None:
    """By the key at fault, whether it is that it cannot be read or cannot be written."""
    with pytest.raises(ConfigError, match="add_safe_globals") as caught:
        readable_state(
            NonTensorState(
                {}, ({"lr": 0.1},), {"fine": {}, "sampler": {"state": {"at": 1, "is": odd}}}
            )
        )
    assert caught.value.field == "others.sampler.state.is"
    with pytest.raises(ConfigError) as caught:
        readable_state(NonTensorState({}, ({"lr": 0.1}, {"lr": odd}), {}))
    assert caught.value.field == "optimizer.lr"


def test_a_large_state_is_not_read_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the model among others has gigabytes, and each save tries what it saves. What is
    beside its tensors is tried."""
    sizes: list[int] = []
    really = loop_state._value_of

    def value_of(raw: bytes) -> Any:
        sizes.append(len(raw))
        return really(raw)

    monkeypatch.setattr(loop_state, "_value_of", value_of)
    model = torch.nn.Linear(1000, 1000)
    beside = NonTensorState({}, (), {"average": model.state_dict(), "more": [torch.ones(9999)]})
    raw = readable_state(beside)

    assert sizes[0] < 10_000 < 4_000_000 < len(raw)
    assert model.weight.shape == decoded_state(raw).others["average"]["weight"].shape
    odd = {"average": {**model.state_dict(), "odd": Odd()}}
    with pytest.raises(ConfigError, match=r"others\.average\.odd"):
        readable_state(NonTensorState({}, (), odd))


def test_an_optimizer_s_state_of_many_parts_is_refused() -> None:
    """Nobody could tell which rank's part of a tensor within is whose."""
    with pytest.raises(ConfigError, match="not lists or dicts") as caught:
        readable_state(NonTensorState({"optimizer/w/old": [torch.ones(2)]}, (), {}))
    assert caught.value.field == "optimizer/w/old"


def test_bytes_that_cannot_be_read_are_a_damaged_version() -> None:
    """Not an error of whoever reads it."""
    with pytest.raises(CheckpointError, match="cannot be read"):
        decoded_state(b"something else")
