"""Profiles made of shapes: published sizes, formulas by hand, and what no machine can beat."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.core.plan import LayerProfile, ModelProfile
from planaria.planner.problem import Problem
from planaria.planner.templates import smallest_num_nodes
from planaria.profiles.analytic import (
    TransformerShape,
    analytic_profile,
    num_parameters,
    sample_flops,
)
from planaria.profiles.profile_json import decode_profile, encode_profile
from planaria.profiles.shipped import A100, LLAMA2_7B, SHIPPED, shipped_profiles

SHAPES = {shape.name: shape for shape, _ in SHIPPED}
PROFILES = {profile.model: profile for profile in shipped_profiles()}
SMALL = TransformerShape(
    name="small",
    num_blocks=2,
    hidden_size=96,
    num_heads=6,
    num_kv_heads=6,
    feed_forward_size=384,
    vocabulary_size=1000,
    sequence_length=64,
)


@st.composite
def shapes(draw: st.DrawFn) -> TransformerShape:
    """Any small transformer."""
    num_kv_heads = draw(st.integers(1, 8))
    num_heads = num_kv_heads * draw(st.integers(1, 3))
    return TransformerShape(
        name="any",
        num_blocks=draw(st.integers(1, 4)),
        hidden_size=num_heads * draw(st.sampled_from((8, 64, 128))),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        feed_forward_size=draw(st.integers(1, 5000)),
        vocabulary_size=draw(st.integers(2, 60_000)),
        sequence_length=draw(st.integers(1, 4096)),
        is_encoder=draw(st.booleans()),
        is_gated=draw(st.booleans()),
        has_biases=draw(st.booleans()),
        has_learned_positions=draw(st.booleans()),
        has_tied_embedding=draw(st.booleans()),
        has_dropout=draw(st.booleans()),
    )


@given(shapes(), st.integers(1, 8))
def test_a_profile_of_any_shape_is_whole_and_devices_speed_it_up_at_most_so_many_times(
    shape: TransformerShape, microbatch_size: int
) -> None:
    """What a user's own shape gives must plan, and sharing costs messages and never saves work."""
    profile = analytic_profile(shape, A100, microbatch_size=microbatch_size)

    assert profile == decode_profile(encode_profile(profile), source="any")
    assert shape.num_blocks + 2 == len(profile.layers)
    shared_bytes = sum(tied.parameter_bytes for tied in profile.tied)
    parameter_bytes = sum(layer.parameter_bytes for layer in profile.layers) - shared_bytes
    assert 2 * num_parameters(shape) == parameter_bytes
    for layer in profile.layers:
        for seconds in (layer.forward_s, layer.backward_input_s, layer.backward_weight_s):
            assert all(seconds[1] <= count * seconds[count] * 1.001 for count in seconds)


PUBLISHED = {
    "bert-large": 336e6,
    "gpt2": 355e6,
    "gpt3-350m": 356e6,
    "gpt3-2.7b": 2.65e9,
    "gpt3-6.7b": 6.66e9,
    "gpt3-175b": 174.6e9,
    "llama2-7b": 6.74e9,
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_parameters_are_as_many_as_published(name: str, published: float) -> None:
    """A shape with a wrong size or a forgotten matrix would not have them."""
    assert published == pytest.approx(num_parameters(SHAPES[name]), rel=0.01)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_sample_costs_six_flops_for_each_parameter_and_token_and_its_attention(
    shape: TransformerShape,
) -> None:
    """2 forward, 4 backward; attention 4 s h forward and 10 backward, half if causal."""
    table = shape.vocabulary_size * shape.hidden_size
    multiplied = num_parameters(shape) - (not shape.has_tied_embedding) * table
    attention = 14 * shape.sequence_length * shape.hidden_size * shape.num_blocks
    attention //= 1 if shape.is_encoder else 2

    expected = (6 * multiplied + attention) * shape.sequence_length

    assert expected == pytest.approx(sample_flops(shape), rel=0.01)


def test_a_block_that_computes_again_keeps_less_and_its_backward_takes_longer() -> None:
    """22 bytes for each hidden value with the results of products, 2 with the input alone; a whole
    forward takes longer than its norms and activation functions."""
    block = PROFILES["gpt3-175b"].layers[1]
    selective, full = block.recomputed["selective"], block.recomputed["full"]
    assert selective.activation_bytes == 22 * 2048 * 12_288
    assert full.activation_bytes == 2 * 2048 * 12_288
    for count, forward_s in block.forward_s.items():
        assert full.additional_s[count] == forward_s
        assert 0.0 < selective.additional_s[count] < 0.2 * forward_s


@given(shapes(), st.integers(1, 8))
def test_every_layer_but_the_head_can_compute_again(
    shape: TransformerShape, microbatch_size: int
) -> None:
    """The engine never computes the last layer again; no mode keeps more than none does."""
    *others, head = analytic_profile(shape, A100, microbatch_size=microbatch_size).layers
    assert not head.recomputed
    for layer in others:
        assert layer.recomputed.keys() == {"selective", "full"}
        full, selective = (layer.recomputed[m].activation_bytes for m in ("full", "selective"))
        assert full <= selective <= layer.activation_bytes


def test_a_gpt_block_keeps_34_bytes_for_each_hidden_value() -> None:
    """Korthikanti et al., section 4, without the scores."""
    block = PROFILES["gpt3-175b"].layers[1]

    assert block.activation_bytes == 34 * 2048 * 12_288


def test_a_gated_block_keeps_gate_and_product() -> None:
    """Per token of Llama-2: 8 hidden vectors and three of the feed-forward size, in bfloat16."""
    block = PROFILES["llama2-7b"].layers[1]

    assert block.activation_bytes == 4096 * 2 * (8 * 4096 + 3 * 11_008)


def test_a_block_takes_its_flops_and_its_all_reduces() -> None:
    """GPT-3 6.7B by hand: two all-reduces of 33.6 MB among eight, and 24 h^2 + 2 s h a token."""
    tokens, h, s = 2 * 2048, 4096, 2048
    compute_s = tokens * (24 * h * h + 2 * s * h) / 156e12
    all_reduce_s = 2 * 5e-6 + 2 * 7 / 8 * 2 * tokens * h / 300e9

    block = PROFILES["gpt3-6.7b"].layers[1]

    assert compute_s == pytest.approx(block.forward_s[1], rel=1e-3)
    assert compute_s / 8 + 2 * all_reduce_s == pytest.approx(block.forward_s[8], rel=1e-3)


def test_little_work_takes_as_long_as_its_bytes() -> None:
    """On a slow memory a block reads its parameters, and each activation twice."""
    machine = replace(A100, bandwidth_bytes_per_s=1e6)

    block = analytic_profile(SMALL, machine, microbatch_size=1).layers[1]

    moved_bytes = block.parameter_bytes + 2 * block.activation_bytes
    expected_s = pytest.approx(moved_bytes / 1e6, rel=1e-3)
    assert expected_s == block.forward_s[1]
    assert expected_s == block.backward_input_s[1]
    assert expected_s == block.backward_weight_s[1]


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_more_devices_are_faster(profile: ModelProfile) -> None:
    """A block and a head gain by each doubling, though less than twice."""

    def seconds(layer: LayerProfile, count: int) -> float:
        return layer.forward_s[count] + layer.backward_s(count)

    for layer in profile.layers[1:]:
        for few, many in ((1, 2), (2, 4), (4, 8)):
            assert seconds(layer, many) < seconds(layer, few)


@pytest.mark.parametrize(("num_kv_heads", "counts"), [(6, {1, 2}), (3, {1}), (2, {1, 2})])
def test_device_counts_share_the_heads_evenly(num_kv_heads: int, counts: set[int]) -> None:
    """Half a head has no product of its own; grouped heads count too."""
    shape = replace(SMALL, num_kv_heads=num_kv_heads)

    layers = analytic_profile(shape, A100, microbatch_size=1).layers

    assert all(counts == set(layer.forward_s) for layer in layers)


def test_a_shared_table_is_tied_and_another_is_not() -> None:
    """The first and the last layer of a GPT hold it, and its gradients are summed once."""
    (tied,) = PROFILES["gpt2"].tied

    assert tied.layers == (0, 25)
    assert tied.parameter_bytes == 2 * 50_257 * 1024
    assert not LLAMA2_7B.has_tied_embedding
    assert PROFILES["llama2-7b"].tied == ()


N0 = {
    ("bert-large", 1): 1,
    ("gpt2", 1): 1,
    ("gpt3-350m", 1): 1,
    ("gpt3-2.7b", 1): 1,
    ("gpt3-6.7b", 1): 2,
    ("llama2-7b", 1): 2,
    ("llama2-7b", 8): 1,
}


@pytest.mark.parametrize(("model", "n0"), N0.items(), ids=str)
def test_models_need_as_many_nodes_as_16_bytes_a_parameter_ask_for(
    model: tuple[str, int], n0: int
) -> None:
    """107 GB for 6.7 billion: two devices of 80 GB; 43 GB and activations for 2.7 billion: one."""
    name, devices_per_node = model
    problem = _problem(PROFILES[name], devices_per_node=devices_per_node)

    assert n0 == smallest_num_nodes(problem)


def test_gpt3_175b_tolerates_failures_on_64_nodes_of_8() -> None:
    """2.8 TB of state, and at its first stages activations of as many microbatches as stages."""
    n0 = smallest_num_nodes(_problem(PROFILES["gpt3-175b"], devices_per_node=8))

    assert n0 * 8 * 80e9 > 2.8e12
    assert 2 * n0 <= 64


def _problem(profile: ModelProfile, *, devices_per_node: int) -> Problem:
    return Problem(
        profile=profile,
        devices_per_node=devices_per_node,
        num_microbatches=4 * 64 * devices_per_node,
        failures_tolerated=1,
    )
