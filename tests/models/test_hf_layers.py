"""A Hugging Face model cut into layers computes, and starts from, what the whole model does."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from helpers.hf_models import (
    CLASSIFIERS,
    FAMILIES,
    GPT2,
    GROUPED,
    LENGTH,
    NO_DROPOUT,
    SEED,
    SIZES,
    VOCABULARY,
    assert_same_bits,
    chained,
    ids_of,
    layers_of,
    split_of,
    tensors_of,
    whole_of,
)
from planaria.core.job import ModelConfig
from planaria.engine.prepare import split_model
from planaria.errors import ConfigError
from planaria.models.hf_model import hf_config, meta_model

# B microbatch, L sequence, D model


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_nothing_is_drawn_for_a_model_without_memory(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no effect there, and took three quarters of the time in which a worker builds it."""

    def drawn(*_: object, **__: object) -> None:
        raise AssertionError("weights are drawn")

    for name in ("normal_", "uniform_"):
        monkeypatch.setattr(Tensor, name, drawn)
    model = ModelConfig(kind="hf", config=FAMILIES[family])
    config = hf_config(model, vocabulary_size=VOCABULARY, sequence_length=LENGTH)

    built, _ = meta_model(config, is_deterministic=True)

    assert all(parameter.is_meta for parameter in built.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_chain_of_layers_has_the_bits_of_the_whole_model(
    family: str, dtype: torch.dtype
) -> None:
    """Logits and gradients are equal bit for bit; a tied one is the sum over its leaves."""
    split, whole = split_of(FAMILIES[family]), whole_of(FAMILIES[family], dtype)
    layers, ids_BL = layers_of(split, whole, dtype), ids_of()
    expected, actual = whole(ids_BL).logits, chained(layers, ids_BL)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(SEED))
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


@torch.no_grad()
@pytest.mark.parametrize("family", [*FAMILIES, "bert-generation"])
def test_no_token_of_a_causal_model_sees_those_after_it(family: str) -> None:
    """Else it would learn to copy what it is to predict. A masked model sees all."""
    decoder = {"model_type": family, **SIZES, **NO_DROPOUT, "is_decoder": True}
    split = split_of(FAMILIES.get(family, decoder))
    layers = [split.materialise(layer).eval() for layer in range(split.num_layers)]
    ids_BL, others_BL = ids_of(), ids_of()
    others_BL[:, -1] = (others_BL[:, -1] + 1) % VOCABULARY

    differ = (chained(layers, ids_BL) - chained(layers, others_BL)).abs().amax(-1)
    assert differ[:, -1].min() > 1e-3
    # Products of experts round otherwise for other numbers of tokens.
    assert (differ[:, :-1].max() < 1e-6) == (split.objective == "causal")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_built_alone_with_the_same_bits_each_time(family: str) -> None:
    """Any process may need any layer: built in another order, from other random numbers."""
    one, other = split_of(FAMILIES[family]), split_of(FAMILIES[family])
    layers = [one.materialise(layer) for layer in range(one.num_layers)]
    torch.manual_seed(99)

    for layer in reversed(range(one.num_layers)):
        built, shapes = other.materialise(layer), one.parameter_shapes(layer)
        assert_same_bits(layers[layer], built)
        assert {n: p.shape for n, p in built.named_parameters()} == shapes
        assert list(shapes) == [name for name, _ in built.named_parameters()]
        assert all(tensor.device.type == "cpu" for tensor in tensors_of(built).values())
        assert all(tensor.dtype == torch.float32 for tensor in built.parameters())
        assert built.training
    for group in one.tied:
        first, *others = [layers[use.layer].get_parameter(use.name) for use in group.uses]
        assert all(torch.equal(first, leaf) and first is not leaf for leaf in others)


def test_two_layers_and_two_seeds_start_from_different_weights() -> None:
    """A seed that does not reach the generator would give equal blocks."""
    split = split_of(GPT2)
    other = split_model(
        ModelConfig(config=GPT2),
        seed=SEED + 2**32,
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
    )
    name = "transformer.h.{}.mlp.c_fc.weight"
    first = split.materialise(1).get_parameter(name.format(0))

    assert not torch.equal(first, split.materialise(2).get_parameter(name.format(1)))
    assert not torch.equal(first, other.materialise(1).get_parameter(name.format(0)))


def test_building_a_layer_leaves_the_callers_random_numbers_alone() -> None:
    """A rank that gets a layer in mid-training must not change what is drawn later."""
    split = split_of(GPT2)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    layer = split.materialise(1)
    layer(torch.zeros(1, 4, 64))

    assert torch.equal(expected, torch.rand(3))


def test_first_weights_follow_the_rules_of_the_architecture() -> None:
    """GPT-2 scales the residual projections by depth: 0.02 / sqrt(2 * 8)."""
    split = split_of({**GPT2, "n_layer": 8, "n_embd": 128})
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
    split = split_of({**GPT2, "n_layer": 60, "n_embd": 16, "n_head": 2, "n_inner": 32})
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
    split = split_of({**GPT2, "attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5})
    value = ids_of()
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
    split, whole = split_of(FAMILIES["mistral"]), whole_of(FAMILIES["mistral"])
    layers = layers_of(split, whole, torch.float32)

    for ids_BL in (ids_of(2), ids_of(3), ids_of(2)[:, :5], ids_of(2)):
        assert torch.equal(whole(ids_BL).logits, chained(layers, ids_BL))


@pytest.mark.parametrize("shard", ["50GB", "60KB"])
@pytest.mark.parametrize("is_base", [False, True])
def test_weights_on_disk_are_the_first_weights(tmp_path: Path, shard: str, is_base: bool) -> None:
    """One file or many, saved from the whole model or its base, whose names lack a prefix."""
    whole = whole_of(GPT2)
    (whole.base_model if is_base else whole).save_pretrained(tmp_path, max_shard_size=shard)
    split = split_of({}, path=str(tmp_path))
    layers = [split.materialise(layer) for layer in range(split.num_layers)]

    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "60KB")
    for layer in layers:
        for name, parameter in layer.named_parameters():
            assert torch.equal(whole.get_parameter(name), parameter), name
    assert torch.equal(whole(ids_of()).logits, chained(layers, ids_of()))


def test_weights_saved_in_bfloat16_become_float32(tmp_path: Path) -> None:
    """config.json then says bfloat16, which must not become the dtype of the masters."""
    whole_of(GPT2, torch.bfloat16).save_pretrained(tmp_path)
    split = split_of({}, path=str(tmp_path))

    assert {p.dtype for p in split.materialise(1).parameters()} == {torch.float32}


def test_weights_on_disk_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """A block without weights, or with others, is not what the user asked for."""
    whole_of(GPT2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no file in it holds the parameter transformer\.h\.4"):
        split_of({"n_layer": 5}, path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"on disk and .* in the model's config"):
        split_of({"n_inner": 32}, path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"config\.json"):
        split_of({}, path=str(tmp_path / "nothing"))


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "opt", "bert"])
def test_the_head_looks_nothing_up_in_the_embedding(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes before the blocks is thrown away; on a GPU it took longer than the head."""
    split = split_of(FAMILIES[family])
    head = split.materialise(split.num_layers - 1)
    embedding, shapes = functional.embedding, []

    def noting(ids: Tensor, weight: Tensor, *more: Any, **named: Any) -> Tensor:
        if not weight.is_meta:
            shapes.append(weight.shape)
        return embedding(ids, weight, *more, **named)

    monkeypatch.setattr(functional, "embedding", noting)
    logits = head(torch.zeros(2, LENGTH, 64))

    assert not logits.is_meta
    assert not shapes


def test_cross_entropy_is_summed_over_targets_that_count() -> None:
    """Whoever calls divides by the count of the whole iteration, so no mean is taken here."""
    split, targets = split_of(GPT2), ids_of()
    targets[0, :5] = -100
    logits = torch.randn(2, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(1))
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
        ({**GPT2, "n_layers": 3}, "model.config.n_layers", "similar names are n_layer"),
        ({**GPT2, "n_layer": "3"}, "model.config", "expected int"),
        ({**GPT2, "vocab_size": 100}, "model.config.vocab_size", "128 different tokens"),
        ({**GPT2, "n_positions": 8}, "model.config.n_positions", "sequence_length"),
        (
            {**FAMILIES["roberta"], "max_position_embeddings": LENGTH},
            "model.config.max_position_embeddings",
            "sequence_length = 12",
        ),
        ({**FAMILIES["opt"], "layerdrop": 0.1}, "model.config.layerdrop", "0.0"),
        (
            {"model_type": "bart", "is_encoder_decoder": False, "decoder_layerdrop": 0.1},
            "model.config.decoder_layerdrop",
            "set it to 0.0",
        ),
        (
            {"model_type": "bamba", **GROUPED, "z_loss_coefficient": 0.1},
            "model.config.z_loss_coefficient",
            "set it to 0.0",
        ),
        ({"model_type": "t5"}, "model.config.model_type", 'kind = "python"'),
        ({"model_type": "bert-generation", **SIZES}, "model.config.is_decoder", "set it to true"),
        (
            {**FAMILIES["llama"], "is_causal": False},
            "model.config.is_causal",
            "sees those after it",
        ),
        (
            {"model_type": "gemma3_text", **GROUPED, "use_bidirectional_attention": True},
            "model.config.use_bidirectional_attention",
            "set it to false",
        ),
        ({"model_type": "xlnet"}, "model.config.attn_type", "sees those after it"),
        ({"model_type": "xlnet", "attn_type": "uni"}, "model.config.model_type", "the dtype of"),
        ({"model_type": "albert", **SIZES}, "model.config.model_type", "more than once"),
        ({"model_type": "resnet"}, "model.config.model_type", "no image_size"),
        ({"model_type": "sam"}, "model.config.model_type", "no language model"),
        ({"model_type": "llava"}, "model.config.model_type", "beside text"),
        ({"model_type": "big_bird", **SIZES}, "model.config.model_type", "more with its blocks"),
        (
            {"model_type": "rwkv", "num_hidden_layers": 2, "hidden_size": 16},
            "model.config.model_type",
            "more with its blocks",
        ),
        (
            {"model_type": "falcon_h1", **GROUPED},
            "model.config.model_type",
            "more with its blocks",
        ),
        ({"model_type": "dbrx"}, "model.config.model_type", "cannot build it"),
        ({"model_type": "xmod", **SIZES}, "model.config.model_type", "Input language unknown"),
        (
            {"model_type": "bert", "architectures": "BertForSequenceClassification"},
            "model.config.architectures",
            "list of one name",
        ),
        (
            {"model_type": "bert", "architectures": ["BertForQuestionAnswering"]},
            "model.config.architectures",
            "ForSequenceClassification",
        ),
        (
            {**CLASSIFIERS["bert"], "problem_type": "regression"},
            "model.config.problem_type",
            "one class",
        ),
        (
            {"model_type": "llama", **SIZES, "vocab_size": 0},
            "model.config.vocab_size",
            "more than 0",
        ),
        (
            {"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"]},
            "model.config.architectures",
            "encoders only",
        ),
        ({**FAMILIES["mixtral"], "num_experts_per_tok": 5}, "model.config", "fit each other"),
        ({**FAMILIES["mixtral"], "num_key_value_heads": 3}, "model.config", "fit each other"),
        (
            {"model_type": "doge", **GROUPED, "is_moe": True, "output_router_logits": True},
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
        split_of(config)

    assert field == caught.value.field
    assert words in caught.value.remedy


def test_a_model_that_pads_its_samples_is_refused() -> None:
    """BigBird hides the padding by a mask that its blocks would not get."""
    config = {**CLASSIFIERS["bert"], "model_type": "big_bird", "num_random_blocks": 1}
    config |= {"block_size": 2, "architectures": ["BigBirdForSequenceClassification"]}

    assert split_of(config, sequence_length=16).objective == "supervised"
    with pytest.raises(ConfigError, match=r"its blocks get 16 tokens.*set it to 16") as caught:
        split_of(config, sequence_length=15)
    assert caught.value.field == "data.sequence_length"
