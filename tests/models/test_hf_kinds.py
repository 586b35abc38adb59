"""Mixtures of experts, classifiers and adapters of transformers, as layers."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from helpers.hf_models import (
    CLASSIFIERS,
    FAMILIES,
    LENGTH,
    SEED,
    VOCABULARY,
    assert_same_bits,
    chained,
    ids_of,
    layers_of,
    split_of,
    whole_of,
)
from helpers.saved_datasets import load, saved_dataset
from planaria.core.job import JobConfig, ModelConfig
from planaria.engine.iteration.evaluation import load_evaluation
from planaria.engine.prepare import split_model
from planaria.errors import ConfigError
from planaria.models.hf_model import hf_config, meta_model
from planaria.models.layers import cross_entropy_sum
from planaria.models.packing import unpack

# B microbatch, L sequence, D model


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_classifiers_of_images_texts_and_tokens_have_the_bits_of_the_whole(family: str) -> None:
    """Their targets are classes, of a sample or of each token."""
    config = CLASSIFIERS[family]
    model = ModelConfig(kind="hf", config=config)
    split = split_of(config)
    built = hf_config(model, vocabulary_size=VOCABULARY, sequence_length=LENGTH)
    whole = type(meta_model(built, is_deterministic=True)[0])(built).train()
    layers = layers_of(split, whole, torch.float32)
    inputs = torch.randn(3, 1, 8, 8) if "image_size" in config else ids_of(3)
    expected, actual = whole(inputs).logits, chained(layers, inputs)
    classes = torch.arange(expected[..., 0].numel()).reshape(expected.shape[:-1]) % 3

    assert split.objective == "supervised"
    assert torch.equal(expected, actual)
    cross_entropy_sum(expected, classes).backward()  # type: ignore[no-untyped-call]
    split.loss_sum(actual, classes).backward()  # type: ignore[no-untyped-call]
    for layer in layers:
        for name, parameter in layer.named_parameters():
            theirs = whole.get_parameter(name).grad
            assert (theirs is None) == (parameter.grad is None) == (not parameter.requires_grad)
            if theirs is not None and parameter.grad is not None:
                assert torch.equal(theirs, parameter.grad), name


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_the_routers_loss_has_the_bits_of_the_whole_model(family: str) -> None:
    """It is computed from sums that blocks pass on, and its gradients flow back through them."""
    config = FAMILIES[family] | {"output_router_logits": True}
    split, whole = split_of(config), whole_of(config)
    layers, ids_BL = layers_of(split, whole, torch.float32), ids_of()
    targets = ids_BL.roll(1, 1).clone()
    targets[0, :3] = -100

    theirs = whole(ids_BL, output_router_logits=True)
    logits, router_loss = unpack(output := chained(layers, ids_BL))
    assert torch.equal(theirs.aux_loss, router_loss)
    assert torch.equal(theirs.logits, logits)
    assert torch.equal(theirs.logits, split.predictions(output))

    count = int((targets != -100).sum())
    loss = cross_entropy_sum(theirs.logits, targets)
    loss = loss + whole.router_aux_loss_coef * count * theirs.aux_loss
    ours = split.loss_sum(output, targets)
    assert ours.item() == pytest.approx(loss.item(), rel=1e-6)
    torch.autograd.backward([loss, ours])
    for layer in layers:
        for name, parameter in layer.named_parameters():
            expected = whole.get_parameter(name).grad
            assert parameter.grad is not None, name
            assert (expected - parameter.grad).norm() <= 1e-5 * expected.norm(), name
    assert split.config["output_router_logits"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_routers_pass_on_their_sums_in_any_precision(dtype: torch.dtype) -> None:
    """The hidden states are in bfloat16 then, and the sums in float32."""
    split = split_of(FAMILIES["mixtral"] | {"output_router_logits": True})
    layers = [split.materialise(layer).to(dtype) for layer in range(split.num_layers)]

    loss = split.loss_sum(chained(layers, ids_of()), ids_of())
    torch.autograd.backward(loss)

    assert loss.isfinite()
    routers = [p for n, p in layers[1].named_parameters() if "gate.weight" in n]
    assert all(p.grad is not None and p.grad.norm() > 0 for p in routers)
    assert routers


def test_adapters_begin_as_the_model_itself_and_alone_are_trained() -> None:
    """Tied embeddings are frozen with all else; a rank draws or reads them as without adapters."""
    pytest.importorskip("peft")
    config = FAMILIES["qwen3"]
    lora = {"r": 2, "target_modules": ["q_proj", "down_proj"]}
    model = ModelConfig(kind="hf", config=config, lora=lora)
    split_up = partial(split_model, seed=SEED, vocabulary_size=VOCABULARY, sequence_length=LENGTH)
    split, base = split_up(model), split_of(config)

    layers = [split.materialise(layer) for layer in range(split.num_layers)]
    plain = [base.materialise(layer) for layer in range(base.num_layers)]
    assert torch.equal(chained(layers, ids_of()), chained(plain, ids_of()))
    assert split.tied == ()
    assert split.parameter_shapes(0) == split.parameter_shapes(5) == {}
    shapes = split.parameter_shapes(1)
    assert len(shapes) == 4
    assert all("lora_" in name for name in shapes)
    for layer in layers:
        for name, parameter in layer.named_parameters():
            assert parameter.requires_grad == ("lora_" in name)
    # A rank that gets the state of a layer has the frozen parameters already.
    assert_same_bits(layers[2], split.structure(2))
    assert split.config["adapter_config"]["r"] == 2
    mistakes = (
        *({"r": 2, "target_modules": ["nothing"]}, {"rank": 2}, {"use_dora": True}),
        *({**lora, "bias": "lora_only"}, {**lora, "init_lora_weights": "pissa"}),
        {**lora, "modules_to_save": ["lm_head"]},
    )
    for mistake in mistakes:
        with pytest.raises(ConfigError, match=r"^model\.lora = "):
            split_up(replace(model, lora=mistake))


def test_held_out_tokens_are_compared_with_the_vocabulary_with_adapters_too(tmp_path: Path) -> None:
    """Their config.json is that of the adapters; the first evaluation failed, hours later."""
    pytest.importorskip("peft")
    lora = {"r": 2, "target_modules": ["q_proj"]}
    job = JobConfig(
        model=ModelConfig(kind="hf", config=FAMILIES["qwen3"], lora=lora),
        data=saved_dataset(tmp_path, {"input_ids": [[1, 2, 3, 4]] * 3}),
    )
    other = saved_dataset(tmp_path / "other", {"input_ids": [[1, 2, VOCABULARY, 4]] * 3})
    job = replace(job, evaluation=replace(job.evaluation, every=1, path=other.path))
    split = split_model(job.model, seed=SEED, vocabulary_size=VOCABULARY, sequence_length=LENGTH)
    with pytest.raises(ConfigError, match=f"has the token id {VOCABULARY}; the model") as caught:
        load_evaluation(job, load(job.data, tmp_path), model=split, cache_directory=tmp_path)

    assert caught.value.field == "evaluation.path"


def test_the_head_of_a_classifier_with_adapters_is_trained() -> None:
    """It begins with random values; peft would train it as well."""
    pytest.importorskip("peft")
    lora = {"r": 2, "target_modules": ["query"]}
    model = ModelConfig(kind="hf", config=CLASSIFIERS["bert"], lora=lora)
    split = split_model(model, seed=1, vocabulary_size=VOCABULARY, sequence_length=LENGTH)

    head = split.num_layers - 1
    assert set(split.parameter_shapes(head)) == {"classifier.weight", "classifier.bias"}
    assert split.config["adapter_config"]["modules_to_save"] == ["classifier"]


@pytest.mark.parametrize(
    ("is_deterministic", "kernels"), [(True, ("eager", "eager")), (False, ("sdpa", "grouped_mm"))]
)
def test_kernels_that_no_config_names_are_exact_or_fast(
    is_deterministic: bool, kernels: tuple[str, str]
) -> None:
    """Those that choose by shape and device have other bits for the same values."""
    for named in ({}, {"attn_implementation": "eager", "experts_implementation": "batched_mm"}):
        model = ModelConfig(kind="hf", config=FAMILIES["mixtral"] | named)
        config = hf_config(model, vocabulary_size=VOCABULARY, sequence_length=LENGTH)
        built, _ = meta_model(config, is_deterministic=is_deterministic)
        found = built.config._attn_implementation, built.config._experts_implementation
        assert found == (tuple(named.values()) or kernels)
