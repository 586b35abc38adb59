"""Small models of transformers, whole and as layers."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from planaria.core.job import ModelConfig
from planaria.engine.prepare import split_model
from planaria.models.hf_model import hf_config
from planaria.models.layers import SplitModel

# B microbatch, L sequence, D model


SEED = 7
VOCABULARY = 128
LENGTH = 12
SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 64,
    "n_head": 4,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
OPT = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_dim": 96,
    "word_embed_proj_dim": 32,
    "dropout": 0.0,
}
EXPERTS = {"num_experts_per_tok": 2}
FALCON = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
DEEPSEEK = {
    "num_experts_per_tok": 2,
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
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "llama": {"model_type": "llama", **SIZES},
    "llama-sdpa": {"model_type": "llama", **SIZES, "attn_implementation": "sdpa"},
    "qwen2": {"model_type": "qwen2", **GROUPED},
    "qwen3": {"model_type": "qwen3", **GROUPED, "head_dim": 16, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **GROUPED, "sliding_window": 5},
    "gemma2": {"model_type": "gemma2", **GROUPED, "head_dim": 16, "sliding_window": 5},
    "gpt_neox": {"model_type": "gpt_neox", **SIZES},
    "opt": {"model_type": "opt", **OPT},
    "falcon": {"model_type": "falcon", **FALCON},
    "bert": {"model_type": "bert", **SIZES, **NO_DROPOUT},
    "roberta": {"model_type": "roberta", **SIZES, **NO_DROPOUT},
    "mixtral": {"model_type": "mixtral", **GROUPED, **EXPERTS, "num_local_experts": 4},
    "gpt_oss": {
        "model_type": "gpt_oss",
        **GROUPED,
        **EXPERTS,
        "num_local_experts": 4,
        "head_dim": 16,
        "sliding_window": 5,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **GROUPED,
        **EXPERTS,
        "num_experts": 4,
        "head_dim": 16,
        "moe_intermediate_size": 16,
    },
    "deepseek_v3": {"model_type": "deepseek_v3", **SIZES, **DEEPSEEK},
}


IMAGES = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
SHORT = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "vit": {"model_type": "vit", **SIZES, **IMAGES},
    "deit": {"model_type": "deit", **SIZES, **IMAGES},
    "dinov2": {"model_type": "dinov2", **SHORT, **IMAGES},  # It has a mask that nothing uses.
    "bert": {
        "model_type": "bert",
        **SIZES,
        **NO_DROPOUT,
        "num_labels": 3,
        "architectures": ["BertForSequenceClassification"],
    },
    "roberta": {
        "model_type": "roberta",
        **SIZES,
        **NO_DROPOUT,
        "num_labels": 3,
        "architectures": ["RobertaForTokenClassification"],
    },
}


def split_of(config: dict[str, Any], path: str = "", sequence_length: int = LENGTH) -> SplitModel:
    """The model of a config as layers."""
    return split_model(
        ModelConfig(kind="hf", config=config, path=path),
        seed=SEED,
        vocabulary_size=VOCABULARY,
        sequence_length=sequence_length,
    )


def whole_of(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """The model of transformers itself, with weights that differ in every element."""
    model_config = hf_config(
        ModelConfig(kind="hf", config=config),
        vocabulary_size=VOCABULARY,
        sequence_length=LENGTH,
    )
    model_config._experts_implementation = "eager"
    is_masked = config["model_type"] in ("bert", "roberta")
    auto_class = AutoModelForMaskedLM if is_masked else AutoModelForCausalLM
    attention = config.get("attn_implementation", "eager")
    model = auto_class.from_config(model_config, attn_implementation=attention, dtype=dtype)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter.to(torch.float32) + 0.1 * noise)
    return model.train()


def layers_of(split: SplitModel, whole: nn.Module, dtype: torch.dtype) -> list[nn.Module]:
    """Each layer built alone, with the weights of the whole model."""
    weights = dict(whole.named_parameters(remove_duplicate=False))
    layers = [split.structure(layer).to(dtype) for layer in range(split.num_layers)]
    with torch.no_grad():
        for layer in layers:
            for name, parameter in layer.named_parameters():
                parameter.copy_(weights[name])
    return layers


def chained(layers: list[nn.Module], inputs: Tensor) -> Tensor:
    """What the last layer returns for these inputs."""
    value = inputs
    for layer in layers:
        value = layer(value)
    return value


def ids_of(num_samples: int = 2) -> Tensor:
    """Token ids of some samples."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(0, VOCABULARY, (num_samples, LENGTH), generator=generator)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def assert_same_bits(expected: nn.Module, actual: nn.Module) -> None:
    """Refuses modules that differ in a bit."""
    before, after = tensors_of(expected), tensors_of(actual)
    assert list(before) == list(after)
    for name in before:
        assert torch.equal(before[name], after[name]), name
