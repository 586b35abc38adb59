"""A Hugging Face model cut into layers computes, and starts from, what the whole model does."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from planaria.core.job import ModelConfig
from planaria.engine.prepare import split_model
from planaria.errors import ConfigError
from planaria.models.hf_model import hf_config, meta_model
from planaria.models.layers import SplitModel, cross_entropy_sum
from planaria.models.packing import unpack

# B microbatch, L sequence, D model

_SEED = 7
_VOCABULARY = 128
_LENGTH = 12
_SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 64,
    "n_head": 4,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
_OPT = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_dim": 96,
    "word_embed_proj_dim": 32,
    "dropout": 0.0,
}
_EXPERTS = {"num_experts_per_tok": 2}
_FALCON = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
_FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "llama": {"model_type": "llama", **_SIZES},
    "llama-sdpa": {"model_type": "llama", **_SIZES, "attn_implementation": "sdpa"},
    "qwen2": {"model_type": "qwen2", **_GROUPED},
    "qwen3": {"model_type": "qwen3", **_GROUPED, "head_dim": 16, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **_GROUPED, "sliding_window": 5},
    "gemma2": {"model_type": "gemma2", **_GROUPED, "head_dim": 16, "sliding_window": 5},
    "gpt_neox": {"model_type": "gpt_neox", **_SIZES},
    "opt": {"model_type": "opt", **_OPT},
    "falcon": {"model_type": "falcon", **_FALCON},
    "bert": {"model_type": "bert", **_SIZES, **_NO_DROPOUT},
    "roberta": {"model_type": "roberta", **_SIZES, **_NO_DROPOUT},
    "mixtral": {"model_type": "mixtral", **_GROUPED, **_EXPERTS, "num_local_experts": 4},
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_GROUPED,
        **_EXPERTS,
        "num_local_experts": 4,
        "head_dim": 16,
        "sliding_window": 5,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_GROUPED,
        **_EXPERTS,
        "num_experts": 4,
        "head_dim": 16,
        "moe_intermediate_size": 16,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_SIZES,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
    },
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _hf(config: dict[str, Any], path: str = "", sequence_length: int = _LENGTH) -> SplitModel:
    return split_model(
        ModelConfig(kind="hf", config=config, path=path),
        seed=_SEED,
        vocabulary_size=_VOCABULARY,
        sequence_length=sequence_length,
    )


def _whole(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """The model of transformers itself, with weights that differ in every element."""
    model_config = hf_config(
        ModelConfig(kind="hf", config=config),
        vocabulary_size=_VOCABULARY,
        sequence_length=_LENGTH,
    )
    model_config._experts_implementation = "eager"
    is_masked = config["model_type"] in ("bert", "roberta")
    auto_class = AutoModelForMaskedLM if is_masked else AutoModelForCausalLM
    attention = config.get("attn_implementation", "eager")
    model = auto_class.from_config(model_config, attn_implementation=attention, dtype=dtype)
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter.to(torch.float32) + 0.1 * noise)
    return model.train()


def _layers_of(split: SplitModel, whole: nn.Module, dtype: torch.dtype) -> list[nn.Module]:
    """Each layer built alone, with the weights of the whole model."""
    weights = dict(whole.named_parameters(remove_duplicate=False))
    layers = [split.structure(layer).to(dtype) for layer in range(split.num_layers)]
    with torch.no_grad():
        for layer in layers:
            for name, parameter in layer.named_parameters():
                parameter.copy_(weights[name])
    return layers


def _chained(layers: list[nn.Module], inputs: Tensor) -> Tensor:
    value = inputs
    for layer in layers:
        value = layer(value)
    return value


def _ids(num_samples: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(0, _VOCABULARY, (num_samples, _LENGTH), generator=generator)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _assert_same_bits(expected: nn.Module, actual: nn.Module) -> None:
    before, after = _tensors(expected), _tensors(actual)
    assert list(before) == list(after)
    for name in before:
        assert torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_nothing_is_drawn_for_a_model_without_memory(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no effect there, and took three quarters of the time in which a worker builds it."""

    def drawn(*_: object, **__: object) -> None:
        raise AssertionError("weights are drawn")

    for name in ("normal_", "uniform_"):
        monkeypatch.setattr(Tensor, name, drawn)
    model = ModelConfig(kind="hf", config=_FAMILIES[family])
    config = hf_config(model, vocabulary_size=_VOCABULARY, sequence_length=_LENGTH)

    built, _ = meta_model(config, is_deterministic=True)

    assert all(parameter.is_meta for parameter in built.parameters())


_IMAGES = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
_SHORT = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
_CLASSIFIERS: dict[str, dict[str, Any]] = {
    "vit": {"model_type": "vit", **_SIZES, **_IMAGES},
    "deit": {"model_type": "deit", **_SIZES, **_IMAGES},
    "dinov2": {"model_type": "dinov2", **_SHORT, **_IMAGES},  # It has a mask that nothing uses.
    "bert": {
        "model_type": "bert",
        **_SIZES,
        **_NO_DROPOUT,
        "num_labels": 3,
        "architectures": ["BertForSequenceClassification"],
    },
    "roberta": {
        "model_type": "roberta",
        **_SIZES,
        **_NO_DROPOUT,
        "num_labels": 3,
        "architectures": ["RobertaForTokenClassification"],
    },
}


@pytest.mark.parametrize("family", _CLASSIFIERS)
def test_classifiers_of_images_texts_and_tokens_have_the_bits_of_the_whole(family: str) -> None:
    """Their targets are classes, of a sample or of each token."""
    config = _CLASSIFIERS[family]
    model = ModelConfig(kind="hf", config=config)
    split = _hf(config)
    built = hf_config(model, vocabulary_size=_VOCABULARY, sequence_length=_LENGTH)
    whole = type(meta_model(built, is_deterministic=True)[0])(built).train()
    layers = _layers_of(split, whole, torch.float32)
    inputs = torch.randn(3, 1, 8, 8) if "image_size" in config else _ids(3)
    expected, actual = whole(inputs).logits, _chained(layers, inputs)
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
    config = _FAMILIES[family] | {"output_router_logits": True}
    split, whole = _hf(config), _whole(config)
    layers, ids_BL = _layers_of(split, whole, torch.float32), _ids()
    targets = ids_BL.roll(1, 1).clone()
    targets[0, :3] = -100

    theirs = whole(ids_BL, output_router_logits=True)
    logits, router_loss = unpack(output := _chained(layers, ids_BL))
    assert torch.equal(theirs.aux_loss, router_loss)
    assert torch.equal(theirs.logits, logits)

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
    split = _hf(_FAMILIES["mixtral"] | {"output_router_logits": True})
    layers = [split.materialise(layer).to(dtype) for layer in range(split.num_layers)]

    loss = split.loss_sum(_chained(layers, _ids()), _ids())
    torch.autograd.backward(loss)

    assert loss.isfinite()
    routers = [p for n, p in layers[1].named_parameters() if "gate.weight" in n]
    assert all(p.grad is not None and p.grad.norm() > 0 for p in routers)
    assert routers


def test_adapters_begin_as_the_model_itself_and_alone_are_trained() -> None:
    """Tied embeddings are frozen with all else; a rank draws or reads them as without adapters."""
    pytest.importorskip("peft")
    config = _FAMILIES["qwen3"]
    lora = {"r": 2, "target_modules": ["q_proj", "down_proj"]}
    model = ModelConfig(kind="hf", config=config, lora=lora)
    split_up = partial(
        split_model, seed=_SEED, vocabulary_size=_VOCABULARY, sequence_length=_LENGTH
    )
    split, base = split_up(model), _hf(config)

    layers = [split.materialise(layer) for layer in range(split.num_layers)]
    plain = [base.materialise(layer) for layer in range(base.num_layers)]
    assert torch.equal(_chained(layers, _ids()), _chained(plain, _ids()))
    assert split.tied == ()
    assert split.parameter_shapes(0) == split.parameter_shapes(5) == {}
    shapes = split.parameter_shapes(1)
    assert len(shapes) == 4
    assert all("lora_" in name for name in shapes)
    for layer in layers:
        for name, parameter in layer.named_parameters():
            assert parameter.requires_grad == ("lora_" in name)
    # A rank that gets the state of a layer has the frozen parameters already.
    _assert_same_bits(layers[2], split.structure(2))
    assert split.config["adapter_config"]["r"] == 2
    for mistake in ({"r": 2, "target_modules": ["nothing"]}, {"rank": 2}, {"use_dora": True}):
        with pytest.raises(ConfigError, match=r"^model\.lora = "):
            split_up(replace(model, lora=mistake))


@pytest.mark.parametrize(
    ("is_deterministic", "kernels"), [(True, ("eager", "eager")), (False, ("sdpa", "grouped_mm"))]
)
def test_kernels_that_no_config_names_are_exact_or_fast(
    is_deterministic: bool, kernels: tuple[str, str]
) -> None:
    """Those that choose by shape and device have other bits for the same values."""
    for named in ({}, {"attn_implementation": "eager", "experts_implementation": "batched_mm"}):
        model = ModelConfig(kind="hf", config=_FAMILIES["mixtral"] | named)
        config = hf_config(model, vocabulary_size=_VOCABULARY, sequence_length=_LENGTH)
        built, _ = meta_model(config, is_deterministic=is_deterministic)
        found = built.config._attn_implementation, built.config._experts_implementation
        assert found == (tuple(named.values()) or kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", _FAMILIES)
def test_the_chain_of_layers_has_the_bits_of_the_whole_model(
    family: str, dtype: torch.dtype
) -> None:
    """Logits and gradients are equal bit for bit; a tied one is the sum over its leaves."""
    split, whole = _hf(_FAMILIES[family]), _whole(_FAMILIES[family], dtype)
    layers, ids_BL = _layers_of(split, whole, dtype), _ids()
    expected, actual = whole(ids_BL).logits, _chained(layers, ids_BL)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(_SEED))
    torch.autograd.backward([(expected * weight).sum(), (actual * weight).sum()])

    assert torch.equal(expected, actual)
    tied = {use.name: group for group in split.tied for use in group.uses}
    seen = set()
    for layer in layers:
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
            if name not in tied:
                seen.add(name)
                assert torch.equal(whole.get_parameter(name).grad, parameter.grad), name
    for group in split.tied:
        leaves = [layers[use.layer].get_parameter(use.name) for use in group.uses]
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        seen.add(group.uses[0].name)
        expected_gradient = whole.get_parameter(group.uses[0].name).grad
        error = (sum(g.float() for g in gradients) - expected_gradient.float()).norm()
        bound = 1e-6 if dtype == torch.float32 else 1e-2
        assert error <= bound * expected_gradient.float().norm()
    assert {name for name, _ in whole.named_parameters()} == seen


@pytest.mark.parametrize("family", _FAMILIES)
def test_a_layer_is_built_alone_with_the_same_bits_each_time(family: str) -> None:
    """Any process may need any layer: built in another order, from other random numbers."""
    one, other = _hf(_FAMILIES[family]), _hf(_FAMILIES[family])
    layers = [one.materialise(layer) for layer in range(one.num_layers)]
    torch.manual_seed(99)

    for layer in reversed(range(one.num_layers)):
        built, shapes = other.materialise(layer), one.parameter_shapes(layer)
        _assert_same_bits(layers[layer], built)
        assert {n: p.shape for n, p in built.named_parameters()} == shapes
        assert list(shapes) == [name for name, _ in built.named_parameters()]
        assert all(tensor.device.type == "cpu" for tensor in _tensors(built).values())
        assert all(tensor.dtype == torch.float32 for tensor in built.parameters())
        assert built.training
    for group in one.tied:
        first, *others = [layers[use.layer].get_parameter(use.name) for use in group.uses]
        assert all(torch.equal(first, leaf) and first is not leaf for leaf in others)


def test_two_layers_and_two_seeds_start_from_different_weights() -> None:
    """A seed that does not reach the generator would give equal blocks."""
    split = _hf(_GPT2)
    other = split_model(
        ModelConfig(config=_GPT2),
        seed=_SEED + 2**32,
        vocabulary_size=_VOCABULARY,
        sequence_length=_LENGTH,
    )
    name = "transformer.h.{}.mlp.c_fc.weight"
    first = split.materialise(1).get_parameter(name.format(0))

    assert not torch.equal(first, split.materialise(2).get_parameter(name.format(1)))
    assert not torch.equal(first, other.materialise(1).get_parameter(name.format(0)))


def test_building_a_layer_leaves_the_callers_random_numbers_alone() -> None:
    """A rank that gets a layer in mid-training must not change what is drawn later."""
    split = _hf(_GPT2)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    layer = split.materialise(1)
    layer(torch.zeros(1, 4, 64))

    assert torch.equal(expected, torch.rand(3))


def test_first_weights_follow_the_rules_of_the_architecture() -> None:
    """GPT-2 scales the residual projections by depth: 0.02 / sqrt(2 * 8)."""
    split = _hf({**_GPT2, "n_layer": 8, "n_embd": 128})
    embedding, block, head = (split.materialise(layer) for layer in (0, 5, 9))
    path = "transformer.h.4."

    def deviation(module: nn.Module, name: str) -> float:
        return module.get_parameter(name).std().item()

    assert deviation(embedding, "transformer.wte.weight") == pytest.approx(0.02, rel=0.03)
    assert deviation(block, f"{path}attn.c_attn.weight") == pytest.approx(0.02, rel=0.03)
    assert deviation(block, f"{path}attn.c_proj.weight") == pytest.approx(0.005, rel=0.03)
    assert deviation(block, f"{path}mlp.c_proj.weight") == pytest.approx(0.005, rel=0.03)
    assert torch.equal(block.get_parameter(f"{path}ln_1.weight"), torch.ones(128))
    assert torch.equal(head.get_parameter("transformer.ln_f.weight"), torch.ones(128))
    for name, parameter in block.named_parameters():
        assert not name.endswith("bias") or not parameter.any(), name


def test_a_block_of_a_deep_model_holds_its_own_parameters_only() -> None:
    """No other block, no embedding: what a module does not register must not hide in it."""
    split = _hf({**_GPT2, "n_layer": 60, "n_embd": 16, "n_head": 2, "n_inner": 32})
    block = split.materialise(37)
    held: dict[int, Tensor] = {}
    stack: list[Any] = [block]
    seen: set[int] = set()
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            held[id(item)] = item
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set):
            stack.extend(item)
        elif hasattr(item, "__dict__") and not isinstance(item, type | ModuleType):
            stack.extend(vars(item).values())
    num_elements = sum(shape.numel() for shape in split.parameter_shapes(37).values())
    num_stored = sum(t.untyped_storage().nbytes() // 4 for t in held.values())

    assert split.num_layers == 62
    assert all(not tensor.is_meta for tensor in held.values())
    assert sum(parameter.numel() for parameter in block.parameters()) == num_elements
    assert num_elements <= num_stored <= num_elements + len(held)


def test_dropout_follows_train_and_eval_in_every_layer() -> None:
    """The model's own dropouts lie in no registered module; they must obey all the same."""
    split = _hf({**_GPT2, "attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5})
    value = _ids()
    for layer in range(split.num_layers - 1):
        module = split.materialise(layer)
        torch.manual_seed(1)
        one, other = module(value), module(value)
        assert not torch.equal(one, other), split.layer_names[layer]
        torch.manual_seed(1)
        assert torch.equal(one, module(value)), split.layer_names[layer]
        module.eval()
        assert torch.equal(module(value), module(value)), split.layer_names[layer]
        value = module(value)


def test_microbatches_of_another_size_are_taken_too() -> None:
    """Masks are kept per shape; the last microbatch or a profile may have another."""
    split, whole = _hf(_FAMILIES["mistral"]), _whole(_FAMILIES["mistral"])
    layers = _layers_of(split, whole, torch.float32)

    for ids_BL in (_ids(2), _ids(3), _ids(2)[:, :5], _ids(2)):
        assert torch.equal(whole(ids_BL).logits, _chained(layers, ids_BL))


@pytest.mark.parametrize("shard", ["50GB", "60KB"])
@pytest.mark.parametrize("is_base", [False, True])
def test_weights_on_disk_are_the_first_weights(tmp_path: Path, shard: str, is_base: bool) -> None:
    """One file or many, saved from the whole model or its base, whose names lack a prefix."""
    whole = _whole(_GPT2)
    (whole.base_model if is_base else whole).save_pretrained(tmp_path, max_shard_size=shard)
    split = _hf({}, path=str(tmp_path))
    layers = [split.materialise(layer) for layer in range(split.num_layers)]

    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "60KB")
    for layer in layers:
        for name, parameter in layer.named_parameters():
            assert torch.equal(whole.get_parameter(name), parameter), name
    assert torch.equal(whole(_ids()).logits, _chained(layers, _ids()))


def test_weights_saved_in_bfloat16_become_float32(tmp_path: Path) -> None:
    """config.json then says bfloat16, which must not become the dtype of the masters."""
    _whole(_GPT2, torch.bfloat16).save_pretrained(tmp_path)
    split = _hf({}, path=str(tmp_path))

    assert {p.dtype for p in split.materialise(1).parameters()} == {torch.float32}


def test_weights_on_disk_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """A block without weights, or with others, is not what the user asked for."""
    _whole(_GPT2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no file in it holds the parameter transformer\.h\.4"):
        _hf({"n_layer": 5}, path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"on disk and .* in the model's config"):
        _hf({"n_inner": 32}, path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"config\.json"):
        _hf({}, path=str(tmp_path / "nothing"))


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "opt", "bert"])
def test_the_head_looks_nothing_up_in_the_embedding(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes before the blocks is thrown away; on a GPU it took longer than the head."""
    split = _hf(_FAMILIES[family])
    head = split.materialise(split.num_layers - 1)
    embedding, shapes = functional.embedding, []

    def noting(ids: Tensor, weight: Tensor, *more: Any, **named: Any) -> Tensor:
        if not weight.is_meta:
            shapes.append(weight.shape)
        return embedding(ids, weight, *more, **named)

    monkeypatch.setattr(functional, "embedding", noting)
    logits = head(torch.zeros(2, _LENGTH, 64))

    assert not logits.is_meta
    assert not shapes


def test_cross_entropy_is_summed_over_targets_that_count() -> None:
    """Whoever calls divides by the count of the whole iteration, so no mean is taken here."""
    split, targets = _hf(_GPT2), _ids()
    targets[0, :5] = -100
    logits = torch.randn(2, _LENGTH, _VOCABULARY, generator=torch.Generator().manual_seed(1))
    picked = logits.log_softmax(-1).gather(2, targets.clamp(min=0)[..., None])[..., 0]

    loss = split.loss_sum(logits.to(torch.bfloat16).float(), targets)
    expected = -(picked * (targets != -100)).sum()
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)


@pytest.mark.parametrize(
    ("config", "field", "words"),
    [
        ({"model_type": "gpt3"}, "model.config.model_type", "gpt2"),
        ({**_GPT2, "n_layers": 3}, "model.config.n_layers", "similar names are n_layer"),
        ({**_GPT2, "n_layer": "3"}, "model.config", "expected int"),
        ({**_GPT2, "vocab_size": 100}, "model.config.vocab_size", "128 different tokens"),
        ({**_GPT2, "n_positions": 8}, "model.config.n_positions", "sequence_length"),
        (
            {**_FAMILIES["roberta"], "max_position_embeddings": _LENGTH},
            "model.config.max_position_embeddings",
            "sequence_length = 12",
        ),
        ({**_FAMILIES["opt"], "layerdrop": 0.1}, "model.config.layerdrop", "0.0"),
        ({"model_type": "t5"}, "model.config.model_type", 'kind = "python"'),
        ({"model_type": "albert", **_SIZES}, "model.config.model_type", "more than once"),
        ({"model_type": "resnet"}, "model.config.model_type", "no image_size"),
        ({"model_type": "sam"}, "model.config.model_type", "no language model"),
        (
            {"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"]},
            "model.config.architectures",
            "encoders only",
        ),
        (
            {"model_type": "doge", **_GROUPED, "is_moe": True, "output_router_logits": True},
            "model.config.output_router_logits",
            'kind = "python"',
        ),
    ],
    ids=lambda value: str(value.get("model_type")) if isinstance(value, dict) else None,
)
def test_what_cannot_be_trained_is_refused_with_a_way_out(
    config: dict[str, Any], field: str, words: str
) -> None:
    """The user's mistake names its field, and says what would do."""
    with pytest.raises(ConfigError) as caught:
        _hf(config)

    assert field == caught.value.field
    assert words in caught.value.remedy
