"""Saves of jobs, made without a process: each layer takes some optimizer steps on its own."""

from pathlib import Path

import numpy as np
import torch

from planaria.checkpoint.disk.tiers import Manifest, Tier, tier_of
from planaria.core.job import JobConfig
from planaria.core.specs import Prepared
from planaria.data.datasets import has_own_tokens
from planaria.engine.optimizer import optimizer_factory, optimizer_state
from planaria.job.save_facts import save_facts
from planaria.models.layers import SplitModel


def stepped_save(
    config: JobConfig,
    split: SplitModel,
    directory: Path,
    *,
    vocabulary_size: int = 0,
    tokenizer_file: str = "",
    num_steps: int = 2,
) -> tuple[Tier, Manifest]:
    """A save after steps whose gradients depend on shapes alone, so that tied parameters agree."""
    tier = tier_of(str(directory))
    files = tuple(
        tier.write_layer(num_steps, 0, layer, _state(config, split, layer, num_steps))
        for layer in range(split.num_layers)
    )
    known = Prepared(
        config=dict(split.config),
        vocabulary_size=vocabulary_size,
        has_own_tokens=has_own_tokens(config.data),
        tokenizer_file=tokenizer_file,
    )
    facts = save_facts(config, known)
    tier.publish(Manifest(iteration=num_steps, epoch=0, job=facts, layers=files))
    manifest = tier.newest()
    assert manifest is not None
    return tier, manifest


def _state(
    config: JobConfig, split: SplitModel, layer: int, num_steps: int
) -> dict[str, np.ndarray]:
    module = split.materialise(layer)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    tensors = {}
    if parameters:
        optimizer = optimizer_factory(config.training)(parameters.items())
        for step in range(num_steps):
            for parameter in parameters.values():
                numbers = torch.arange(parameter.numel(), dtype=torch.float32)
                parameter.grad = torch.sin(numbers * (step + 1)).reshape(parameter.shape)
            optimizer.step()
        tensors = {
            f"optimizer/{name}": tensor
            for name, tensor in optimizer_state(optimizer, parameters, num_steps=num_steps).items()
        }
    tensors |= {f"parameter/{name}": p.detach() for name, p in parameters.items()}
    return {name: tensor.numpy().copy() for name, tensor in tensors.items()}
