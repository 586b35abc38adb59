"""Copies versions out of the tier: named saves that the user keeps, and exports for other tools.

A named save is a tier of its own beside the versions, {place}/{name}/{iteration}-{epoch}/..., so a
job continues from it if `checkpoint.directory` names it. It is marked, so that such a job, which
saves beside it, never prunes it either. A tokenizer that was learned from the job's text is kept
beside it.

An export is a directory as Hugging Face tools read it: parameters by name in safetensors files, and
config.json if the model has one; or the adapters alone, where only they were trained. The tokenizer
of the model that training began with goes along. Both check the hashes of the layers that they
read.
"""

import json
import logging
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from planaria.checkpoint.disk.parts import RUN_NAME
from planaria.checkpoint.disk.storage import Directory
from planaria.checkpoint.disk.tiers import (
    Manifest,
    SavedVersion,
    Tier,
    safetensors_content,
    tier_of,
)
from planaria.core.job import ModelFacts
from planaria.errors import CheckpointError, ConfigError, UnreadableError

logger = logging.getLogger(__name__)

SHARD_BYTES: Final = 5_000_000_000  # The size of files that Hugging Face tools write.
_TRIES_MAX: Final = 8  # Each try can fail because the version is pruned while it is read.
ADAPTERS: Final = "adapter_config"  # Key of a job's config whose model has adapters (LoRA).
MODEL_FACTS: Final = "model_facts"  # Key of the facts from which the model is built again.
TOKENIZER_FILE: Final = "tokenizer_file"  # Key of the file of a tokenizer learned from the text.
# Files beside a model's weights that belong to it whatever its weights are.
_COMPANIONS: Final = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("*.model", "*.tiktoken", "sentencepiece*", "chat_template*", "additional_chat_templates/*"),
    *("generation_config.json", "preprocessor_config.json", "processor_config.json"),
)
_CLAIM: Final = ".claim"  # Who lists saves ignores it, since no version has such a name.
_ADAPTER: Final = re.compile(r"(\.lora_[AB])\.default(?=\.)")
_PREFIX: Final = "parameter/"
_NAME: Final = re.compile(r"(?!\d+-\d+$)[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


def kept_saves(place: str) -> dict[str, Manifest]:
    """The complete versions at a place that are kept under names (`save_as`), by name.

    What cannot be looked into is left out; it may be somebody else's.

    Raises:
        CheckpointError: the storage refuses.
    """
    kept: dict[str, Manifest] = {}
    for name in _names(place):
        try:
            newest = tier_of(_place_of(place, name)).newest()
        except UnreadableError as error:
            logger.warning("%s; if it is a save that was kept, it is not listed", error)
            continue
        kept |= {name: newest} if newest is not None else {}
    return kept


def kept_versions(place: str) -> Iterator[tuple[str, Tier, SavedVersion]]:
    """Yields the name, the tier and the version of all saves at a place that lie under names.

    A job that went on from a kept save has others beside it. What cannot be listed is left out; it
    may be somebody else's.

    Raises:
        CheckpointError: the storage refuses.
    """
    for name in _names(place):
        tier = tier_of(_place_of(place, name))
        try:
            versions = tier.versions()
        except UnreadableError as error:
            logger.warning("%s; if it is a save that was kept, it is left out", error)
            continue
        yield from ((name, tier, version) for version in versions)


def _names(place: str) -> list[str]:
    """The names at a place under which there may be saves."""
    names = (name.rstrip("/") for name in tier_of(place).storage.versions())
    return sorted(filter(_NAME.fullmatch, names))


def _place_of(place: str, name: str) -> str:
    return f"{place.rstrip('/')}/{name}"


def save_as(place: str, name: str, *, field: str = "name") -> str:
    """Copies the newest complete version at a place to a named save; returns the copy's place.

    If a job that runs there prunes the version meanwhile, the version that is newest by then is
    copied.

    Args:
        field: argument or option that the name was given for, for the error.

    Raises:
        ConfigError: the name is not allowed or is taken, another process saves under it, or there
            is no version.
        CheckpointError: the version is damaged, or the storage refuses; nothing is left under the
            name then.
    """
    if not _NAME.fullmatch(name) or RUN_NAME.fullmatch(name):
        remedy = (
            "a name consists of letters, digits, '.', '_' and '-', and must not look like a "
            "version (120-1) or a run (run-000001-4f1c)"
        )
        raise ConfigError(field, name, remedy)
    tier, kept = tier_of(place), tier_of(_place_of(place, name))
    _check_free(kept, name, field=field)
    manifest = newest_of(tier, place)
    with _claimed_name(tier, name, field=field):
        _check_free(kept, name, field=field)  # Another process may just have given its claim back.
        for number in count(1):
            try:
                _copy(tier, kept, manifest)
                break
            except CheckpointError as error:
                if number == _TRIES_MAX or _is_there(tier, manifest):
                    raise
                logger.info("%s was pruned: %s", tier.where(*_numbers(manifest)), error)
            manifest = newest_of(tier, place)
    return kept.where(*_numbers(manifest))


def _check_free(kept: Tier, name: str, *, field: str) -> None:
    """Raises a ConfigError if there is a complete version under a name."""
    if there := [version.name for version in kept.versions() if version.manifest]:
        raise ConfigError(
            field, name, f"this name is taken: it already holds {there[0]}; choose another name"
        )


@contextmanager
def _claimed_name(tier: Tier, name: str, *, field: str) -> Iterator[None]:
    """A context in which no other process saves under a name.

    Two would write the same files, and the one that failed would remove those of the other.

    Raises:
        ConfigError: another process does, or one that was killed has.
    """
    claim = f"{name}/{_CLAIM}"
    if not tier.storage.create(claim, secrets.token_hex(16).encode()):
        remedy = (
            "another process is saving under this name, or was killed while it did; if none is, "
            f"remove {tier.storage.where(claim)}, or choose another name"
        )
        raise ConfigError(field, name, remedy)
    try:
        yield
    finally:
        try:
            tier.storage.remove(name, [claim])
        except CheckpointError as error:
            logger.warning("%s", error)


def _copy(source: Tier, target: Tier, manifest: Manifest) -> None:
    """Copies a version; removes what it has copied if it fails."""
    with ExitStack() as undo:
        undo.callback(_discard, target, manifest)
        # A file that another release wrote may have other bytes for the same tensors, so the copy
        # has its own hashes.
        files = tuple(
            target.write_layer(
                *_numbers(manifest), entry.layer, source.read_layer(manifest, entry.layer)
            )
            for entry in manifest.layers
        )
        if content := learned_tokenizer(source, manifest):
            name = Path(manifest.job[TOKENIZER_FILE]).name
            target.storage.create(name, content)
            undo.callback(_remove, target, name)
        target.keep(*_numbers(manifest))
        target.publish(replace(manifest, layers=files))
        undo.pop_all()


def _discard(tier: Tier, manifest: Manifest) -> None:
    """Removes an unfinished copy."""
    with suppress(CheckpointError):  # The error that led here is the one to report.
        tier.discard(*_numbers(manifest))


def _remove(tier: Tier, name: str) -> None:
    """Removes a file beside an unfinished copy."""
    with suppress(CheckpointError):
        tier.storage.remove("", [name])


def learned_tokenizer(tier: Tier, manifest: Manifest) -> bytes:
    """The content of the file of the tokenizer that was learned from the job's text; b"": there is
    none, or it is neither in the cache of this machine nor beside the saves.

    Raises:
        UnreadableError: the storage refuses.
    """
    if not (name := manifest.job.get(TOKENIZER_FILE, "")):
        return b""
    file = Path(name)
    with suppress(OSError):
        return file.read_bytes()
    try:
        return tier.storage.read(file.name)
    except UnreadableError:
        raise
    except CheckpointError:
        return b""


def _is_there(tier: Tier, manifest: Manifest) -> bool:
    """Whether the version is still complete."""
    return any(version.manifest == manifest for version in tier.versions())


def _numbers(manifest: Manifest) -> tuple[int, int]:
    return manifest.iteration, manifest.epoch


def newest_of(tier: Tier, place: str) -> Manifest:
    """The manifest of the newest complete version.

    Raises:
        ConfigError: there is no complete version, or the newest one has no layers.
    """
    manifest = tier.newest()
    if manifest is None or not manifest.layers:
        remedy = (
            "holds no complete version; a job saves at its end, and also after each "
            "checkpoint.persist_every iterations if that is set: try again then"
        )
        raise ConfigError("DIRECTORY", place, remedy)
    return manifest


def model_facts(manifest: Manifest) -> ModelFacts | None:
    """The facts from which the model of a save is built again; None: an older planaria wrote it.

    Raises:
        CheckpointError: this planaria cannot read them.
    """
    try:
        facts = manifest.job.get(MODEL_FACTS)
        return None if facts is None else msgspec.convert(facts, type=ModelFacts)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"cannot read {MODEL_FACTS} of the save's manifest: {error}"
        ) from error


def export_parameters(
    tier: Tier, manifest: Manifest, output: Path, *, origin: str = ""
) -> tuple[str, ...]:
    """Writes the parameters of a version to a new directory; returns the names of its files.

    Args:
        origin: directory of the model that training began with, whose tokenizer goes along; "": the
            one that the save names.

    Raises:
        ConfigError: the directory is not empty, or is a file.
        CheckpointError: the version is damaged, or the disk refuses.
    """
    config, facts = manifest.job.get("config") or {}, model_facts(manifest)
    target = new_directory(output)
    if ADAPTERS in config:
        names = _export_adapters(tier, manifest, target, config[ADAPTERS])
    else:
        sizes = [entry.num_bytes for entry in manifest.layers]

        def read(layer: int) -> Mapping[str, np.ndarray]:
            return _parameters(tier, manifest, [manifest.layers[layer].layer])

        names = write_model(target, sizes, read, config=config)
    return names + copy_companions(origin or (facts.model.path if facts else ""), target)


def new_directory(output: Path) -> Directory:
    """A directory to export to.

    Raises:
        ConfigError: it is not empty, or is a file, or cannot be looked at.
    """
    try:
        is_used = output.exists() and (not output.is_dir() or any(output.iterdir()))
    except OSError as error:
        remedy = f"cannot be reached: {error.strerror}"
        raise ConfigError("--output", str(output), remedy) from error
    if is_used:
        raise ConfigError("--output", str(output), "is not empty; name a new directory")
    return Directory(output, setting="--output")


def write_model(
    target: Directory,
    sizes: Sequence[int],
    read: Callable[[int], Mapping[str, np.ndarray]],
    *,
    config: Mapping[str, Any],
) -> tuple[str, ...]:
    """Writes a model as `from_pretrained` reads it; returns the names of the files.

    Args:
        sizes: bytes of each layer's tensors, or about as many, by which they are dealt to files.
        read: function that returns the tensors of a layer.
        config: content of config.json; empty: the model has none.
    """
    shards = list(_shards(sizes))
    names: list[str] = []
    where: dict[str, str] = {}
    for number, layers in enumerate(shards, 1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        where |= dict.fromkeys(_write_layers(target, file, layers, read), file)
        names.append(file)
    texts: dict[str, Mapping[str, Any]] = {}
    if len(shards) > 1:
        texts["model.safetensors.index.json"] = {"metadata": {}, "weight_map": where}
    if config:
        texts["config.json"] = config
    for file, value in texts.items():
        content = json.dumps(value, indent=2).encode() + b"\n"
        target.write(file, content, may_write=_always)
    return (*names, *texts)


def _write_layers(
    target: Directory,
    file: str,
    layers: Sequence[int],
    read: Callable[[int], Mapping[str, np.ndarray]],
) -> list[str]:
    """Writes the tensors of some layers to one file; returns their names.

    Nothing of them stays in memory while those of the next file are read.
    """
    tensors = {name: array for layer in layers for name, array in read(layer).items()}
    content = safetensors_content(tensors, metadata={"format": "pt"})
    target.write(file, content, may_write=_always)
    return list(tensors)


def copy_companions(origin: str, target: Directory) -> tuple[str, ...]:
    """Copies what belongs to a model beside its weights, such as its tokenizer, to an export.

    Args:
        origin: directory of the model; nothing is copied if it is "" or does not exist.

    Returns:
        The names of the files.
    """
    directory = Path(origin)
    paths = [path for pattern in _COMPANIONS for path in directory.glob(pattern)] if origin else []
    names = sorted({path.relative_to(directory).as_posix() for path in paths if path.is_file()})
    for name in names:
        target.write(name, Directory(directory).read(name), may_write=_always)
    return tuple(names)


def _export_adapters(
    tier: Tier, manifest: Manifest, target: Directory, config: Mapping[str, Any]
) -> tuple[str, ...]:
    """Writes adapters as `PeftModel.from_pretrained` reads them; returns the names of its files."""
    parameters = _parameters(tier, manifest, [entry.layer for entry in manifest.layers])
    tensors = {
        "base_model.model." + _ADAPTER.sub(r"\1", name): array for name, array in parameters.items()
    }
    contents = {
        "adapter_model.safetensors": safetensors_content(tensors, metadata={"format": "pt"}),
        "adapter_config.json": json.dumps(config, indent=2).encode() + b"\n",
    }
    for file, content in contents.items():
        target.write(file, content, may_write=_always)
    return tuple(contents)


def _shards(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yields the layers of each file."""
    layers: list[int] = []
    num_bytes = 0
    for layer, size in enumerate(sizes):
        if layers and num_bytes + size > SHARD_BYTES:
            yield layers
            layers, num_bytes = [], 0
        layers.append(layer)
        num_bytes += size
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
