"""Trains small models of many types of transformers with a node killed, beside a plain loop.

    python benchmarks/families.py [--only TYPE ...] [--page docs/FAMILIES.md]

Each is trained for three iterations on three nodes, of which one is killed in the second, and in
plain torch by the class of transformers, from the same weights on the same microbatches. The
distance is that of the parameters of a layer, relative to what the plain loop changed of them; the
largest is shown. A type that planaria refuses is shown with its words. It ends with 1 if a type is
neither trained nor refused, or is further away than the goal.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.hf_models import DEEPSEEK
from helpers.oracle import microbatches_of, train
from planaria.checkpoint.disk.tiers import tier_of
from planaria.core.inject import parse_injection
from planaria.core.job import (
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    JobConfig,
    ModelConfig,
    ResilienceConfig,
    TrainingConfig,
)
from planaria.engine.prepare import load_data, load_model
from planaria.errors import ConfigError
from planaria.job.planning import cache_directory, fork_server
from planaria.job.training_job import Job
from planaria.models.hf_model import hf_config, meta_model
from planaria.models.layers import SplitModel, cross_entropy_sum
from planaria.transport.timekeeping import Timekeeper

GOAL = 1e-3
ITERATIONS, LENGTH, SAMPLES = 3, 16, 64
_WIDE = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = _WIDE | {"num_key_value_heads": 2}
_QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_EXPERTS = _GROUPED | {"num_experts_per_tok": 2, "num_local_experts": 4}
_OWN_EXPERTS = _GROUPED | {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 16}
_IMAGES = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 2,
    "num_channels": 1,
    "num_labels": 5,
}
_N = {"n_layer": 4, "n_embd": 32, "n_head": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": _N | dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    "gptj": _N
    | {"rotary_dim": 4}
    | dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    "gpt_bigcode": _N | dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    "gpt_neox": _WIDE,
    "opt": {
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
        "dropout": 0.0,
        "max_position_embeddings": 64,
    },
    "bloom": {"n_layer": 4, "hidden_size": 32, "n_head": 4},
    "falcon": {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4},
    "llama": _GROUPED,
    "mistral": _GROUPED | {"sliding_window": 5},
    "qwen2": _GROUPED,
    "qwen3": _GROUPED | {"head_dim": 8},
    "gemma": _GROUPED | {"head_dim": 8},
    "gemma2": _GROUPED | {"head_dim": 8, "sliding_window": 5},
    "gemma3_text": _GROUPED | {"head_dim": 8, "sliding_window": 5},
    "phi": _WIDE | {"resid_pdrop": 0.0},
    "phi3": _GROUPED | {"pad_token_id": 0},
    "stablelm": _GROUPED,
    "starcoder2": _GROUPED | {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "olmo": _GROUPED,
    "olmo2": _GROUPED,
    "cohere": _GROUPED,
    "granite": _GROUPED,
    "glm4": _GROUPED | {"head_dim": 8},
    "smollm3": _GROUPED,
    "nemotron": _GROUPED,
    "helium": _GROUPED | {"head_dim": 8},
    "mixtral": _EXPERTS | {"output_router_logits": True},
    "phimoe": _EXPERTS | {"router_jitter_noise": 0.0},  # Else it draws random numbers.
    "gpt_oss": _EXPERTS | {"head_dim": 8, "sliding_window": 5},
    "olmoe": _GROUPED | {"num_experts_per_tok": 2, "num_experts": 4},
    "qwen2_moe": _OWN_EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": _OWN_EXPERTS | {"head_dim": 8},
    "deepseek_v3": _WIDE | DEEPSEEK,
    "mamba": {"num_hidden_layers": 4, "hidden_size": 32},
    "bert": _WIDE | _QUIET,
    "roberta": _WIDE | _QUIET,
    "electra": _WIDE | _QUIET | {"embedding_size": 32},
    "distilbert": {
        "n_layers": 4,
        "dim": 32,
        "n_heads": 4,
        "hidden_dim": 48,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "max_position_embeddings": 64,
    },
    "modernbert": _WIDE,
    "albert": _WIDE | _QUIET,
    "vit": _IMAGES,
    "deit": _IMAGES,
    "dinov2": _IMAGES,
    "beit": _IMAGES | {"drop_path_rate": 0.0},
    "resnet": {"num_channels": 1, "num_labels": 5},
    "t5": {},
}


class _Images:
    """Random images with random classes."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(1, 8, 8, generator=generator), index % 5


def images() -> _Images:
    """The data set of models of images."""
    return _Images()


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one type.

    Attributes:
        distance: largest distance of a layer; -1: it was not trained.
        refusal: the words with which it was refused; "": it was not.
    """

    model_type: str
    objective: str
    num_layers: int
    distance: float
    refusal: str

    @property
    def is_right(self) -> bool:
        """Whether it was refused in words, or is near enough."""
        return bool(self.refusal) or 0.0 <= self.distance <= GOAL


def _job(model_type: str, directory: Path) -> JobConfig:
    config = CONFIGS[model_type]
    data = DataConfig(sequence_length=LENGTH)
    if "num_labels" in config:
        data = DataConfig(kind="python", target="families:images")
    return JobConfig(
        name=model_type,
        model=ModelConfig(config={"model_type": model_type, **config}),
        data=data,
        training=TrainingConfig(
            iterations=ITERATIONS, global_batch_size=12, microbatch_size=2, learning_rate=1e-3
        ),
        resilience=ResilienceConfig(failures_tolerated=1),
        checkpoint=CheckpointConfig(directory=str(directory)),
        cluster=ClusterConfig(nodes=3),
    )


def trained(model_type: str, directory: Path) -> Row:
    """Trains one type both ways."""
    job, cache = _job(model_type, directory), Path(cache_directory())
    try:
        split = load_model(job, cache_directory=cache, profile=None, timekeeper=Timekeeper())
    except ConfigError as error:
        return Row(model_type, "", 0, -1.0, error.remedy)
    search_path = [str(Path(__file__).parent)]
    server = fork_server(job, search_path=search_path)
    try:
        Job(job, search_path=search_path).train(
            server=server, injections=[parse_injection("kill:1@1.backward")]
        )
    finally:
        server.close()
    distances = list(_distances(job, split, cache))
    return Row(model_type, split.objective, split.num_layers, max(distances), "")


def _distances(job: JobConfig, split: SplitModel, cache: Path) -> Iterator[float]:
    """The distance of each layer from that of the plain loop."""
    dataset = load_data(job, objective=split.objective, cache_directory=cache)
    config = hf_config(
        job.model,
        vocabulary_size=dataset.vocabulary_size,
        sequence_length=job.data.sequence_length,
    )
    skeleton, _ = meta_model(config, is_deterministic=True)
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False  # The oracle's loss asks for them.
    whole: nn.Module = type(skeleton)(config).train()
    named = dict(whole.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for layer in range(split.num_layers):
            for name, parameter in split.materialise(layer).named_parameters():
                named[name].copy_(parameter)
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    train(
        _WithRouters(whole, job.model.config.get("output_router_logits", False)),
        microbatches_of(job, dataset),
        loss_sum=_loss_sum,
        learning_rates=[job.training.learning_rate] * ITERATIONS,
    )
    tier = tier_of(job.checkpoint.directory)
    manifest = tier.newest()
    assert manifest is not None
    for layer in range(split.num_layers):
        state = tier.read_layer(manifest, layer)
        names = list(split.parameter_shapes(layer))
        if not names:
            continue
        ours = torch.cat([torch.from_numpy(state[f"parameter/{n}"]).flatten() for n in names])
        theirs = torch.cat([named[name].detach().flatten() for name in names])
        changed = theirs - torch.cat([before[name].flatten() for name in names])
        yield float((ours - theirs).norm() / changed.norm())


class _WithRouters(nn.Module):
    """A model whose output holds the routers' loss beside the logits, if there is one."""

    def __init__(self, model: Any, has_routers: bool) -> None:
        super().__init__()
        self.model = model
        self._has_routers = has_routers

    def forward(self, inputs: Tensor) -> Any:
        if not self._has_routers:
            return self.model(inputs).logits
        output = self.model(inputs, output_router_logits=True)
        return output.logits, self.model.router_aux_loss_coef * output.aux_loss


def _loss_sum(output: Any, targets: Tensor) -> Tensor:
    if not isinstance(output, tuple):
        return cross_entropy_sum(output, targets)
    logits, router_loss = output
    loss: Tensor = cross_entropy_sum(logits, targets) + router_loss * (targets != -100).sum()
    return loss


def page(rows: list[Row]) -> str:
    """The page of all types, in Markdown."""
    lines = [
        "# Types of models of transformers",
        "",
        "Written by `python benchmarks/families.py --page docs/FAMILIES.md`: a small model of each",
        f"type, {ITERATIONS} iterations on three nodes, of which one is killed in the second,",
        "beside a plain loop of torch with the class of transformers. The distance is that of the",
        "parameters of the layer that is furthest away, relative to what the plain loop changed.",
        "",
        "| type | trained for | layers | distance | refused because |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        distance = f"{row.distance:.1e}" if row.distance >= 0.0 else ""
        layers = str(row.num_layers or "")
        lines.append(
            f"| `{row.model_type}` | {row.objective} | {layers} | {distance} | {row.refusal} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Prints a line for each type; returns 1 if one is neither near enough nor refused."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    for model_type in arguments.only or CONFIGS:
        with tempfile.TemporaryDirectory() as directory:
            row = trained(model_type, Path(directory))
        rows.append(row)
        result = f"refused: {row.refusal}" if row.refusal else f"distance {row.distance:.1e}"
        print(f"{model_type:<12} {row.objective:<10} {result}", flush=True)
    if arguments.page is not None:
        arguments.page.write_text(page(rows))
    return 0 if all(row.is_right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
