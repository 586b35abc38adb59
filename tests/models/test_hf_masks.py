"""Padded microbatches have the bits of transformers' own forward with their attention_mask."""

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.hf_models import (
    FAMILIES,
    GPT2,
    LENGTH,
    NO_DROPOUT,
    SIZES,
    VOCABULARY,
    chained,
    ids_of,
    layers_of,
    split_of,
)
from planaria.core.job import ModelConfig
from planaria.errors import ConfigError
from planaria.models.hf_frame import move_ghosts
from planaria.models.hf_masks import mask_of, mask_text
from planaria.models.hf_model import hf_config, meta_model
from planaria.models.layers import cross_entropy_sum
from planaria.models.packing import is_packed, pack, unpack

# B microbatch, L sequence, D model

_DISTILBERT = {
    "model_type": "distilbert",
    "n_layers": 3,
    "dim": 64,
    "n_heads": 4,
    "hidden_dim": 96,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
}
_MODERNBERT = {
    "model_type": "modernbert",
    **SIZES,
    "pad_token_id": 0,
    "local_attention": 6,
    "architectures": ["ModernBertForSequenceClassification"],
    "num_labels": 3,
}
_MODELS: dict[str, dict[str, Any]] = {
    "bert": FAMILIES["bert"],
    "bert-sdpa": FAMILIES["bert"] | {"attn_implementation": "sdpa"},
    "bert-classes": FAMILIES["bert"]
    | {"architectures": ["BertForSequenceClassification"], "num_labels": 3},
    "roberta": FAMILIES["roberta"],
    "roberta-tokens": FAMILIES["roberta"]
    | {"architectures": ["RobertaForTokenClassification"], "num_labels": 3},
    "distilbert": _DISTILBERT,
    "distilbert-classes": _DISTILBERT
    | {"architectures": ["DistilBertForSequenceClassification"], "num_labels": 3},
    "electra": {"model_type": "electra", **SIZES, **NO_DROPOUT, "embedding_size": 32},
    "modernbert-mean": _MODERNBERT | {"classifier_pooling": "mean"},
    "modernbert-first": _MODERNBERT | {"classifier_pooling": "cls"},
    # Its embedding hides padding as well.
    "esm": {"model_type": "esm", **SIZES, **NO_DROPOUT, "pad_token_id": 1, "mask_token_id": 5},
    "gpt2": GPT2,
    "mistral": FAMILIES["mistral"],
}
_MASKS = {
    "right": [[1] * LENGTH, [1] * 7 + [0] * 5, [1] * 3 + [0] * 9],
    "left": [[0] * 2 + [1] * 10, [1] * LENGTH, [0] * 9 + [1] * 3],
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _whole(config: dict[str, Any], dtype: torch.dtype) -> Any:
    """The model of transformers itself, with random weights."""
    built = hf_config(
        ModelConfig(kind="hf", config=config), vocabulary_size=VOCABULARY, sequence_length=LENGTH
    )
    kind = type(meta_model(built, is_deterministic=True)[0])
    torch.manual_seed(3)
    return kind._from_config(built, dtype=dtype).train()


def _padded(side: str, padding: int) -> dict[str, Tensor]:
    mask_BL = torch.tensor(_MASKS[side])
    return {
        "input_ids": ids_of(3).masked_fill(mask_BL == 0, padding),
        "attention_mask": mask_BL,
    }


@pytest.mark.parametrize(
    ("name", "side", "dtype"),
    [
        *((name, "right", torch.float32) for name in _MODELS),
        *((name, "left", torch.float32) for name in ("bert", "roberta-tokens", "mistral")),
        *((name, "right", torch.bfloat16) for name in ("distilbert", "modernbert-mean")),
    ],
)
def test_logits_and_gradients_are_those_of_transformers_with_the_mask(
    name: str, side: str, dtype: torch.dtype
) -> None:
    """Bit for bit; and not those without it, which see the padding."""
    config = _MODELS[name]
    split, whole = split_of(config), _whole(config, dtype)
    layers = layers_of(split, whole, dtype)
    inputs = _padded(side, whole.config.pad_token_id or 0)
    expected = whole(**inputs).logits
    actual = chained(layers, pack(inputs, "data"))
    classes = torch.arange(expected[..., 0].numel()).reshape(expected.shape[:-1]) % 3
    if classes.dim() == 2:
        classes[inputs["attention_mask"] == 0] = -100

    assert torch.equal(expected, actual)
    is_seen = side == "left" or split.objective != "causal"
    kept = classes != -100
    assert not is_seen or not torch.equal(whole(inputs["input_ids"]).logits[kept], actual[kept])
    cross_entropy_sum(expected, classes).backward()  # type: ignore[no-untyped-call]
    split.loss_sum(actual, classes).backward()  # type: ignore[no-untyped-call]
    tied = {use.name for group in split.tied for use in group.uses}
    compared = 0
    for layer in layers:
        for path, parameter in layer.named_parameters():
            theirs = whole.get_parameter(path).grad
            if path not in tied and parameter.requires_grad:
                compared += 1
                assert parameter.grad is not None
                assert torch.equal(theirs, parameter.grad), path
    assert compared


def test_a_layer_passes_on_what_the_next_one_needs() -> None:
    """Two microbatches of one shape, with other masks, take turns as in a pipeline; ranks get one
    tensor each time. The bytes of the mask are part of it.
    """
    split = split_of(_MODELS["distilbert-classes"])
    layers = [split.materialise(layer) for layer in range(split.num_layers)]
    left, right = (_padded(side, 0) for side in ("left", "right"))
    alone = [chained(layers, pack(inputs, "data")) for inputs in (left, right)]

    values = [layers[0](pack(inputs, "data")) for inputs in (left, right)]
    for layer in layers[1:]:
        # As from another rank: without what the tensor carries along in a process.
        values = [layer(value.detach().clone().requires_grad_()) for value in values]
        assert all(is_packed(value) for value in values) == (layer is not layers[-1])
    assert torch.equal(alone[0], values[0])
    assert torch.equal(alone[1], values[1])
    assert not torch.equal(*alone)
    hidden_BLD, mask = unpack(layers[0](pack(left, "data")))
    assert hidden_BLD.shape == (3, LENGTH, 64)
    assert mask == "0,2,10;12;0,9,3"


def test_a_mask_of_ones_is_none() -> None:
    """Hidden states are one tensor then, with the bits that they have without it."""
    split = split_of(FAMILIES["bert"])
    layers = [split.materialise(layer) for layer in range(split.num_layers)]
    ids_BL = ids_of()
    given = pack({"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL).bool()}, "data")

    assert not is_packed(layers[0](given))
    assert torch.equal(chained(layers, ids_BL), chained(layers, given))


@pytest.mark.parametrize("length", [1, 2, 9])
def test_a_mask_is_a_text_and_back(length: int) -> None:
    """Any mask, on whichever side its zeros are."""
    generator = torch.Generator().manual_seed(length)
    for _ in range(20):
        mask_BL = torch.randint(0, 2, (4, length), generator=generator)
        mask_BL[0, -1] = 0
        for dtype in (torch.int64, torch.bool, torch.float32):
            text = mask_text(mask_BL.to(dtype))
            assert text
            assert torch.equal(mask_BL, mask_of(text, torch.device("cpu")))
    assert mask_text(torch.ones(2, length)) == ""
    assert mask_text(torch.full((2, length), 2)) is None


@pytest.mark.parametrize(
    ("config", "inputs", "words"),
    [
        (FAMILIES["bert"], {"token_type_ids": ids_of()}, "input_ids, or a dict of it and its"),
        (FAMILIES["bert"], {"attention_mask": torch.ones(2, 1, LENGTH)}, "of the shape of input"),
        (FAMILIES["bert"], {"attention_mask": 1 - ids_of()}, "1 for each token and 0"),
        (
            FAMILIES["mixtral"] | {"output_router_logits": True},
            {"attention_mask": torch.tensor([[1] * LENGTH, [1] + [0] * (LENGTH - 1)])},
            r"would see padding.*the routers' loss \(output_router_logits\) would count",
        ),
        (
            {"model_type": "fnet", **{k: v for k, v in SIZES.items() if "heads" not in k}},
            {"attention_mask": torch.tensor([[1] * LENGTH, [1] + [0] * (LENGTH - 1)])},
            r"would see padding.*its forward takes no attention_mask; give samples of one length",
        ),
    ],
)
def test_what_would_be_silently_wrong_is_refused(
    config: dict[str, Any], inputs: dict[str, Tensor], words: str
) -> None:
    """Before any layer has seen it."""
    embedding = split_of(config).materialise(0)

    with pytest.raises(ConfigError, match=words):
        embedding(pack({"input_ids": ids_of(), **inputs}, "data"))


def test_a_model_that_pads_samples_itself_is_refused_where_they_are_padded() -> None:
    """Longformer pads to a multiple of its window, and the others' mask would be too short. Samples
    of one length it would pad in silence."""
    config = {"model_type": "longformer", **SIZES, **NO_DROPOUT, "attention_window": 8}
    split = split_of(config, sequence_length=16)
    embedding = split.materialise(0)
    ids_BL = torch.full((2, 14), 7)
    mask_BL = torch.ones_like(ids_BL)
    mask_BL[0, 5:] = 0

    assert "it pads samples itself" in split.mask_problem()
    with pytest.raises(ConfigError, match=r"would see padding.* it pads samples itself"):
        embedding(pack({"input_ids": ids_BL, "attention_mask": mask_BL}, "data"))
    with pytest.raises(ConfigError, match="the model itself pads such samples to 16 tokens"):
        embedding(ids_BL)


def test_a_head_that_reads_the_mask_has_its_ghosts_beside_it() -> None:
    """On a GPU the mask meets what the model's forward computes before its blocks. A microbatch
    without padding may come next.
    """
    split = split_of(_MODELS["modernbert-mean"])
    head: Any = split.materialise(split.num_layers - 1)
    hidden_BLD = torch.randn(2, 4, 64)
    before = head(hidden_BLD)
    move_ghosts(head._frame.model, torch.device("meta"))

    logits = head(pack((hidden_BLD, "4;1,3"), "data"))

    assert torch.equal(before[0], logits[0])
    assert not torch.equal(before[1], logits[1])
    assert torch.equal(before, head(hidden_BLD))


def test_nothing_looks_for_masks_where_no_sample_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a large vocabulary it takes seconds, which a recovery would wait for."""

    def look(*_: object, **__: object) -> None:
        raise AssertionError("the use of masks is looked for")

    monkeypatch.setattr("planaria.models.hf_masks._mask_use", look)
    split = split_of(FAMILIES["bert"])
    layers = [split.materialise(layer) for layer in range(split.num_layers)]

    assert chained(layers, ids_of()).isfinite().all()
    with pytest.raises(AssertionError, match="looked for"):
        split.mask_problem()
