"""What is taken out of the tier: saves with a name, which are the user's, and models for others.

A named save is a tier of its own beside the versions, {place}/{name}/{iteration}-{epoch}/..., so
`checkpoint.directory` may name it to go on from it, and nothing ever prunes it. An export is a
directory as Hugging Face tools read it: parameters by name in safetensors files, and config.json
where the model has one. Both are checked against the hashes of what was saved.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from planaria.checkpoint.storage import Directory
from planaria.checkpoint.tiers import Manifest, Tier, serialized, tier_of
from planaria.errors import ConfigError

SHARD_BYTES: Final = 5_000_000_000  # As the tools that write such directories have it.
_PREFIX: Final = "parameter/"
_NAME: Final = re.compile(r"(?!\d+-\d+$)[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


def save_as(place: str, name: str) -> str:
    """Keeps the newest complete version at a place under a name; where that is.

    Raises:
        ConfigError: the name will not do or is taken, or there is no version.
        CheckpointError: the version is damaged, or the storage refuses.
    """
    if not _NAME.fullmatch(name):
        remedy = "letters, digits, '.', '_' and '-' make a name, and not those of a version"
        raise ConfigError("--name", name, remedy)
    tier, kept = tier_of(place), tier_of(f"{place.rstrip('/')}/{name}")
    if there := [version.name for version in kept.versions() if version.manifest]:
        raise ConfigError("--name", name, f"is taken: it holds {there[0]} already")
    manifest = newest_of(tier, place)
    for entry in manifest.layers:
        tensors = tier.read_layer(manifest, entry.layer)
        copy = kept.write_layer(manifest.iteration, manifest.epoch, entry.layer, tensors)
        assert copy == entry
    kept.publish(manifest)
    return kept.where(manifest.iteration, manifest.epoch)


def newest_of(tier: Tier, place: str) -> Manifest:
    """Raises a ConfigError if there is no complete version with layers."""
    manifest = tier.newest()
    if manifest is None or not manifest.layers:
        remedy = (
            "holds no complete version; a job saves at its end, or see checkpoint.persist_every"
        )
        raise ConfigError("DIRECTORY", place, remedy)
    return manifest


def exported(tier: Tier, manifest: Manifest, output: Path) -> tuple[str, ...]:
    """Writes the parameters of a version to a new directory; the names of its files.

    Raises:
        ConfigError: there is something in the directory already.
        CheckpointError: the version is damaged, or the disk refuses.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError("--output", str(output), "is not empty; name a new directory")
    shards = list(_shards(manifest))
    target = Directory(output)
    names: list[str] = []
    where: dict[str, str] = {}
    for number, layers in enumerate(shards, 1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = _parameters(tier, manifest, layers)
        where |= dict.fromkeys(tensors, file)
        content = serialized(tensors, metadata={"format": "pt"})
        target.write(file, content, may_write=_always)
        names.append(file)
    texts: dict[str, Mapping[str, Any]] = {}
    if len(shards) > 1:
        texts["model.safetensors.index.json"] = {"metadata": {}, "weight_map": where}
    if config := manifest.job.get("config"):
        texts["config.json"] = config
    for file, value in texts.items():
        content = json.dumps(value, indent=2).encode() + b"\n"
        target.write(file, content, may_write=_always)
    return (*names, *texts)


def _shards(manifest: Manifest) -> Iterator[list[int]]:
    """Layers that go into one file, by the bytes of their state, which are more."""
    layers: list[int] = []
    num_bytes = 0
    for entry in manifest.layers:
        if layers and num_bytes + entry.num_bytes > SHARD_BYTES:
            yield layers
            layers, num_bytes = [], 0
        layers.append(entry.layer)
        num_bytes += entry.num_bytes
    yield layers


def _parameters(tier: Tier, manifest: Manifest, layers: list[int]) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(_PREFIX): array
        for layer in layers
        for name, array in tier.read_layer(manifest, layer).items()
        if name.startswith(_PREFIX)
    }


def _always() -> bool:
    return True
