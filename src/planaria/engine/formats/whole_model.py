"""The whole model of a save, layer by layer: with what was frozen, and with adapters merged.

A save has trained parameters only. The others come from where training began: from the directory
`model.path`, or from the seed. One layer at a time is in memory, or, of an export as safetensors,
those of one file.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from planaria.checkpoint.disk.outgoing import (
    copy_companions,
    model_facts,
    new_directory,
    write_model,
)
from planaria.checkpoint.disk.tiers import Manifest, Tier
from planaria.core.job import ModelFacts
from planaria.engine.prepare import split_model
from planaria.engine.staging import as_tensor
from planaria.errors import CheckpointError, ConfigError
from planaria.models.hf_adapters import is_adapter, merge_adapters, name_without_adapters
from planaria.models.layers import SplitModel

_OF_TOKENS = ("pad_token_id", "vocab_size")  # Keys of configs of transformers.
_TIED = "tie_word_embeddings"  # Key of configs of transformers.


class Adapters(Enum):
    """What becomes of adapters: they stay, or are merged into the weights that they adapt."""

    KEPT = "kept"
    MERGED = "merged"


@dataclass(frozen=True, slots=True)
class WholeModel:
    """The model of a save.

    Attributes:
        adapters: state of its adapters, if it has any.
        facts: facts of the save from which the model was built again.
        split: the model as layers.
    """

    tier: Tier
    manifest: Manifest
    facts: ModelFacts
    split: SplitModel
    adapters: Adapters = Adapters.KEPT

    @property
    def has_adapters(self) -> bool:
        """Whether adapters were trained."""
        return bool(self.facts.model.lora)

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """What the layer adds to the `state_dict` of the whole model.

        Raises:
            CheckpointError: the save is damaged, or lacks a parameter of the model.
        """
        module = self._layer(layer)
        is_merged = self.has_adapters and self.adapters is Adapters.MERGED
        if is_merged:
            merge_adapters(module)
        return {
            name_without_adapters(name) if is_merged else name: value.detach()
            for name, value in module.state_dict().items()
            if isinstance(value, Tensor) and not (is_merged and is_adapter(name))
        }

    def _layer(self, layer: int) -> nn.Module:
        """The layer with the parameters of the save, and with those that were frozen."""
        module = self.split.structure(layer)
        state = self.tier.read_layer(self.manifest, layer)
        shapes = self.split.parameter_shapes(layer)
        for name, shape in shapes.items():
            array = state.get(f"parameter/{name}")
            if array is None or array.shape != tuple(shape):
                actual = "no" if array is None else f"a {array.shape}"
                raise CheckpointError(
                    f"layer {layer} of the save has {actual} parameter {name}, and the model that "
                    f"its manifest describes has one of {tuple(shape)}"
                )
            with torch.no_grad():
                module.get_parameter(name).copy_(as_tensor(array))
        return module


def whole_model(
    tier: Tier, manifest: Manifest, *, adapters: Adapters = Adapters.KEPT, model_path: str = ""
) -> WholeModel:
    """The model of a save.

    Args:
        adapters: state that its adapters are to have, if it has any.
        model_path: directory of the model that training began with; "": the one that the save
            names.

    Raises:
        ConfigError: the model cannot be built here.
        CheckpointError: the save is one of another model.
    """
    facts = model_facts(manifest)
    where = tier.where(manifest.iteration, manifest.epoch)
    if facts is None:
        remedy = (
            "an older planaria made this save, and did not write down what the model is; have the "
            "job go on from it with --resume, and export what it saves then"
        )
        raise ConfigError("DIRECTORY", where, remedy)
    path = model_path or facts.model.path
    if path and not os.path.isdir(path):
        remedy = "the job's model.path is no directory here; say where it is now by --model-path"
        raise ConfigError("model.path", path, remedy)
    facts = replace(facts, model=replace(facts.model, path=path))
    split = _split(facts, manifest)
    if split.num_layers != len(manifest.layers):
        raise CheckpointError(
            f"{where} has {len(manifest.layers)} layers, and its model has {split.num_layers}; "
            "export it where the model is the same as in the job"
        )
    return WholeModel(tier, manifest, facts, split, adapters)


def export_whole(model: WholeModel, output: Path) -> tuple[str, ...]:
    """Writes a model whose adapters are merged as `from_pretrained` reads it; returns file names.

    Raises:
        ConfigError: the directory is not empty, or is a file.
        CheckpointError: the save is damaged, or the disk refuses.
    """
    assert model.adapters is Adapters.MERGED
    plain, target = model.split, new_directory(output)
    if model.has_adapters:
        facts = replace(model.facts, model=replace(model.facts.model, lora={}))
        plain = _split(facts, model.manifest)
    config: dict[str, Any] = dict(plain.config)
    head = model.split.num_layers - 1
    if config.get(_TIED) and any(map(is_adapter, model.split.parameter_shapes(head))):
        config[_TIED] = False  # The head is not the embedding any more.
    sizes = [plain.whole_bytes(layer) for layer in range(plain.num_layers)]

    def read(layer: int) -> Mapping[str, np.ndarray]:
        return {name: tensor.numpy() for name, tensor in model.tensors(layer).items()}

    names = write_model(target, sizes, read, config=config)
    return names + copy_companions(model.facts.model.path, target)


def _split(facts: ModelFacts, manifest: Manifest) -> SplitModel:
    config = manifest.job.get("config") or {}
    # What the job's tokenizer has made of them; a save of an older planaria may have other values.
    kept = {key: config[key] for key in _OF_TOKENS if key in config}
    return split_model(
        replace(facts.model, config={**facts.model.config, **kept}),
        seed=facts.training.seed,
        vocabulary_size=facts.vocabulary_size,
        sequence_length=facts.sequence_length,
        is_deterministic=facts.training.deterministic,
    )
