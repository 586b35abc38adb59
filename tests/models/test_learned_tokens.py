"""Where planaria has learned the tokens of a text, none of them is the model's padding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers.hf_models import FAMILIES, LENGTH, NO_DROPOUT, SEED, SIZES, VOCABULARY
from planaria.core.job import DataConfig, JobConfig, ModelConfig, TrainingConfig
from planaria.engine.prepare import load_model, split_model
from planaria.models.layers import SplitModel
from planaria.transport.timekeeping import Timekeeper

_QUOTE = 1  # Id of the character in what is learned; that of "!" is 0.
_WITH_PADDING: dict[str, dict[str, Any]] = {
    **{family: FAMILIES[family] for family in ("bert", "opt", "roberta")},
    # Its config has no place for a model without padding.
    "nomic_bert": {"model_type": "nomic_bert", **SIZES},
    "xlm-roberta": {"model_type": "xlm-roberta", **SIZES, **NO_DROPOUT},
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _split(config: dict[str, Any], *, has_learned_tokens: bool = True) -> SplitModel:
    return split_model(
        ModelConfig(config=config),
        seed=SEED,
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
        has_learned_tokens=has_learned_tokens,
    )


def _embedding(module: nn.Module, *endings: str) -> nn.Embedding:
    (embedding,) = (part for name, part in module.named_modules() if name.endswith(endings))
    assert isinstance(embedding, nn.Embedding)
    return embedding


@pytest.mark.parametrize("family", _WITH_PADDING)
def test_the_embedding_of_each_token_begins_with_numbers_and_is_trained(family: str) -> None:
    """That of a quotation mark was zero, and had no gradient."""
    module = _split(_WITH_PADDING[family]).materialise(0)
    words = _embedding(module, "word_embeddings", "embed_tokens")
    ids_BL = torch.arange(2 * LENGTH).reshape(2, LENGTH) % VOCABULARY
    factors = torch.randn(2 * LENGTH, generator=torch.Generator().manual_seed(SEED))
    (module(ids_BL).flatten(0, 1).sin() * factors[:, None]).sum().backward()

    assert words.weight.grad is not None
    for row in range(VOCABULARY):
        assert words.weight[row].any(), row
    for row in set(ids_BL.flatten().tolist()):
        assert words.weight.grad[row].any(), row


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta"])
def test_no_position_skips_a_quotation_mark(family: str) -> None:
    """It had the position of padding, and those after it were one too low."""
    module = _split(_WITH_PADDING[family]).materialise(0)
    positions = _embedding(module, "position_embeddings")
    given: list[Tensor] = []
    positions.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    ids_BL = torch.full((2, LENGTH), 7)
    ids_BL[:, 3::4] = _QUOTE
    module(ids_BL)

    (positions_BL,) = given
    assert (positions_BL.diff() == 1).all()
    assert positions_BL.min() >= 0


def test_other_models_and_tokens_keep_their_padding() -> None:
    """So that their bits stay: a name in the config, other tokens, and no padding at all."""
    named = _split(FAMILIES["bert"] | {"pad_token_id": 5})
    others = _split(FAMILIES["bert"], has_learned_tokens=False)
    assert named.config["pad_token_id"] == 5
    assert others.config.get("pad_token_id", 0) == 0

    for family in ("gpt2", "llama"):
        configs = [
            _split(FAMILIES[family], has_learned_tokens=learned).config for learned in (True, False)
        ]
        assert configs[0] == configs[1]


@pytest.mark.parametrize(("tokenizer", "padding"), [("bpe", -1), ("bytes", 1)])
def test_a_job_says_whether_its_tokens_are_learned(tokenizer: Any, padding: int) -> None:
    """Of bytes, padding is a control character."""
    job = JobConfig(
        model=ModelConfig(config=FAMILIES["roberta"]),
        data=DataConfig(tokenizer=tokenizer, vocabulary_size=300, sequence_length=LENGTH),
        training=TrainingConfig(seed=SEED),
    )
    model = load_model(job, cache_directory=Path(), profile=None, timekeeper=Timekeeper())

    assert model.config.get("pad_token_id", 1) == padding
    assert model.vocabulary_size == (257 if tokenizer == "bytes" else 302)
