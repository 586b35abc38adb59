"""What is taken out of the tier: saves with a name, which are the user's, and models for others.

A named save is a tier of its own beside the versions, {place}/{name}/{iteration}-{epoch}/..., so
`checkpoint.directory` may name it to go on from it, and nothing ever prunes it. An export is a
directory as Hugging Face tools read it: parameters by name in safetensors files, and config.json
where the model has one. Both are checked against the hashes of what was saved.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np

from planaria.checkpoint.disk.storage import Directory
from planaria.checkpoint.disk.tiers import Manifest, Tier, serialized, tier_of
from planaria.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

SHARD_BYTES: Final = 5_000_000_000  # As the tools that write such directories have it.
_TRIES_MAX: Final = 8  # Versions that are pruned one after the other while they are read.
_PREFIX: Final = "parameter/"
_NAME: Final = re.compile(r"(?!\d+-\d+$)[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


def save_as(place: str, name: str) -> str:
    """Keeps the newest complete version at a place under a name; where that is.

    A job that runs there may prune the version meanwhile: then the one that is newest by then is
    kept.

    Raises:
        ConfigError: the name will not do or is taken, or there is no version.
        CheckpointError: the version is damaged, or the storage refuses; nothing is left under the
            name then.
    """
    if not _NAME.fullmatch(name):
        remedy = "letters, digits, '.', '_' and '-' make a name, and not those of a version"
        raise ConfigError("--name", name, remedy)
    tier, kept = tier_of(place), tier_of(f"{place.rstrip('/')}/{name}")
    if there := [version.name for version in kept.versions() if version.manifest]:
        raise ConfigError("--name", name, f"is taken: it holds {there[0]} already")
    for number in count(1):
        manifest = newest_of(tier, place)
        try:
            _copy(tier, kept, manifest)
            break
        except CheckpointError as error:
            if number == _TRIES_MAX or _is_there(tier, manifest):
                raise
            logger.info("%s was pruned: %s", tier.where(*_numbers(manifest)), error)
    return kept.where(*_numbers(manifest))


def _copy(source: Tier, target: Tier, manifest: Manifest) -> None:
    """Copies a version, or nothing of it."""
    with ExitStack() as undo:
        undo.callback(_discard, target, manifest)
        # Another release may have laid out its files otherwise, so they have hashes of their own.
        files = tuple(
            target.write_layer(
                *_numbers(manifest), entry.layer, source.read_layer(manifest, entry.layer)
            )
            for entry in manifest.layers
        )
        target.publish(replace(manifest, layers=files))
        undo.pop_all()


def _discard(tier: Tier, manifest: Manifest) -> None:
    """Removes what there is of a copy, and of a directory that was made for it."""
    with suppress(CheckpointError):  # The error that led here is the one to tell.
        tier.discard(*_numbers(manifest))
    if isinstance(tier.storage, Directory):
        with suppress(OSError):  # There is something else in it.
            tier.storage.path.rmdir()


def _is_there(tier: Tier, manifest: Manifest) -> bool:
    """Whether a version is still complete."""
    return any(version.manifest == manifest for version in tier.versions())


def _numbers(manifest: Manifest) -> tuple[int, int]:
    return manifest.iteration, manifest.epoch


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
