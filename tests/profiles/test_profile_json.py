"""Profiles as files: what was measured comes back, what cannot be is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from helpers.strategies import layer_profile, model_profile, profiles
from planaria.core.plan import Link, ModelProfile, TiedParameters
from planaria.errors import ConfigError
from planaria.profiles.profile_json import decode_profile, encode_profile


@given(profiles(device_counts=(1, 2, 4)))
def test_a_profile_comes_back_as_it_was_written(profile: ModelProfile) -> None:
    """Device counts are strings in JSON and numbers again."""
    assert decode_profile(encode_profile(profile), source="x") == profile


def test_what_an_iteration_adds_comes_back_and_is_absent_where_nobody_measured_it() -> None:
    """Profiles of before have none."""
    unmeasured = model_profile((layer_profile("first", 0.01),))
    layers = tuple(replace(layer, update_s={1: 0.25}) for layer in unmeasured.layers)
    measured = replace(unmeasured, layers=layers)

    assert decode_profile(encode_profile(measured), source="x") == measured
    assert b"update_s" in encode_profile(measured)
    assert b"update_s" not in encode_profile(unmeasured)


def written() -> dict[str, Any]:
    """A valid profile of two tied layers as its JSON says it."""
    layers = (layer_profile("first", 0.01), layer_profile("last", 0.02))
    profile = encode_profile(model_profile(layers))
    return {**json.loads(profile), "tied": [{"layers": [0, 1], "parameter_bytes": 8}]}


def test_the_file_has_the_documented_form() -> None:
    """Users write profiles by hand for clusters that they do not have."""
    data = written()

    assert data["version"] == 1
    assert data["layers"][0]["forward_s"] == {"1": 0.01}
    assert data["links"]["inter_node"] == {"latency_s": 1e-4, "bandwidth_bytes_per_s": 1e9}
    profile = decode_profile(json.dumps(data).encode(), source="x")
    assert profile.tied == (TiedParameters((0, 1), 8),)


def test_what_may_be_absent_or_zero_is_accepted() -> None:
    """Times, bytes and latencies of nothing, tied parameters, links that nobody measured."""
    data = written()
    del data["tied"], data["version"]
    data["links"]["device_to_host"] = {"latency_s": 0, "bandwidth_bytes_per_s": 1}
    data["layers"][0] |= {
        "forward_s": {"1": 0, "8": 0},
        "backward_input_s": {"1": 0, "8": 0},
        "backward_weight_s": {"1": 0, "8": 0},
        "parameter_bytes": 0,
    }
    profile = decode_profile(json.dumps(data).encode(), source="x")

    assert profile.links["device_to_host"] == Link(0.0, 1.0)
    assert profile.layers[0].forward_s == {1: 0.0, 8: 0.0}


def _in_layer(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["layers"][1].update(changes)


def _in_link(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["links"]["inter_node"].update(changes)


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "version 2": lambda data: data.update(version=2),
    "it has no layers": lambda data: data.update(layers=[]),
    "not a profile": lambda data: data.pop("microbatch_size"),
    "links.intra_node is missing": lambda data: data["links"].pop("intra_node"),
    "links.inter_node is missing": lambda data: data["links"].pop("inter_node"),
    "layer last: forward_s and backward": _in_layer(backward_input_s={"1": 0.1, "2": 0.1}),
    "layer last: forward_s": _in_layer(forward_s={}),
    "layer last: update_s needs": _in_layer(update_s={"2": 0.1}),
    "layer last: seconds are 0 or": _in_layer(update_s={"1": -0.1}),
    "layer last: a device count": _in_layer(
        forward_s={"0": 1}, backward_input_s={"0": 1}, backward_weight_s={"0": 1}
    ),
    "layer last: seconds are 0": _in_layer(backward_weight_s={"1": -0.1}),
    "layer last: bytes are 0": _in_layer(activation_bytes=-1),
    "a latency is 0 s or more": _in_link(latency_s=-1),
    "a bandwidth above 0": _in_link(bandwidth_bytes_per_s=0),
    "tied names layers": lambda data: data.update(tied=[{"layers": [0, 2], "parameter_bytes": 8}]),
    r"tied names layers \(\)": lambda data: data.update(
        tied=[{"layers": [], "parameter_bytes": 8}]
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_is_refused_naming_the_file(message: str) -> None:
    """Before it turns into a plan that makes no sense, or a division by zero."""
    data = written()
    WRONG[message](data)

    with pytest.raises(ConfigError, match=message) as error:
        decode_profile(json.dumps(data).encode(), source="my.json")
    assert error.value.value == "my.json"


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff\xfe", b"{", b'{"layers": "\xff"}'])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    """The user may have named any file."""
    with pytest.raises(ConfigError, match="not a profile"):
        decode_profile(data, source="my.json")
