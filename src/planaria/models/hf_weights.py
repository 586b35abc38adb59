"""The weights of a Hugging Face model on disk, read one parameter at a time.

Files may name and lay out parameters in another way than the model: transformers renames what older
releases named otherwise, and stacks the weights of experts. Its own rules are applied here to the
tensors that one parameter is made of. Files are never unpickled, and quantised weights are refused:
without their scales they are codes.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from planaria.core.job import ModelConfig
from planaria.errors import ConfigError
from planaria.models.hf_adapters import name_without_adapters
from planaria.models.hf_model import QUANTISATION, keys_on_disk

_CODES: Final = ("F4", "F6", "F8", "I4", "I8", "U4", "U8")  # Dtypes of quantised weights begin so.
# Patterns of tensors that older releases of transformers saved, and newer ones compute.
_COMPUTED: Final = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
_OTHER_FORMS: Final = ("*.bin", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.pt", "*.pth")
_NUM_SHOWN: Final = 5  # Tensors that a note names.


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    key: str
    shape: torch.Size
    dtype: str

    def read(self) -> Tensor:
        with safe_open(self.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(self.key)
        return tensor

    def sketch(self) -> Tensor:
        """A tensor of this shape without memory."""
        return torch.empty(self.shape, device="meta")


@dataclass(frozen=True, slots=True)
class _Outline:
    """What the rules of transformers may ask a model.

    Attributes:
        parameters: parameters and buffers by name, on the meta device.
        config: the model's config.
    """

    parameters: Mapping[str, Tensor]
    config: Any

    def get_parameter(self, name: str) -> Tensor:
        """The parameter of this name, for its shape."""
        return self.parameters[name]


@dataclass(frozen=True, slots=True)
class _Conversion:
    """Parameters that are made of several tensors, or of one that is laid out otherwise.

    Attributes:
        rule: converter of transformers.
        target: name of the first parameter that it makes.
        sources: tensors that it is made of, each with the pattern of the rule that it fits.
    """

    rule: Any
    target: str
    sources: tuple[tuple[str, _Entry], ...]
    outline: _Outline

    def results(self, read: Callable[[_Entry], Tensor]) -> dict[str, Tensor]:
        """The parameters by name."""
        rule = copy.deepcopy(self.rule)
        for pattern, entry in self.sources:
            rule.add_tensor(self.target, entry.key, pattern, read(entry))
        made = rule.convert(self.target, model=self.outline, config=self.outline.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }


@dataclass(frozen=True, slots=True)
class Weights:
    """The safetensors files of a directory, by the names that parameters have in the model.

    Attributes:
        entries: tensors that are parameters as they are.
        conversions: rules by the names of the parameters that they make.
        shapes: shape of each parameter.
        buffers: names of buffers that are among them.
        notes: lines for the user about the files.
    """

    directory: str
    entries: Mapping[str, _Entry]
    conversions: Mapping[str, _Conversion]
    shapes: Mapping[str, torch.Size]
    buffers: frozenset[str]
    notes: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        """Whether the files hold the parameter."""
        return name_without_adapters(name) in self.shapes

    def check_shape(self, name: str, shape: torch.Size) -> None:
        """Raises ConfigError if the files hold the parameter in another shape."""
        shape_on_disk = self.shapes[name_without_adapters(name)]
        if shape_on_disk != shape:
            remedy = (
                f"{name} is {tuple(shape_on_disk)} on disk and {tuple(shape)} in the model's config"
            )
            raise ConfigError("model.path", self.directory, remedy)

    def tensor(self, name: str) -> Tensor:
        """The parameter in float32, read without the rest of its files."""
        plain = name_without_adapters(name)
        if plain in self.entries:
            return self.entries[plain].read().to(torch.float32)
        return self.conversions[plain].results(_Entry.read)[plain].to(torch.float32)


def weights_on_disk(config: ModelConfig, model: Any) -> Weights:
    """The weights in the directory `config.path`; empty if it is "" or has no weights.

    Args:
        model: model of transformers on the meta device, without adapters.

    Raises:
        ConfigError: a file is missing, or the weights are of another form or quantised, or do not
            fit the model, or there are none for the adapters of `config.lora`.
    """
    directory = config.path
    if not directory:
        return Weights(directory, {}, {}, {}, frozenset())
    known = model.state_dict(keep_vars=True)  # Of buffers, those that are kept in files.
    outline = _Outline(known, model.config)
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    entries: dict[str, _Entry] = {}
    sources: dict[str, list[tuple[str, _Entry]]] = {}
    unused: dict[str, str] = {}
    prefix = model.base_model_prefix
    for entry in sorted(_entries(Path(directory)), key=lambda entry: _natural(entry.key)):
        name, pattern = rename_source_key(entry.key, renamings, converters, prefix, known)
        if name not in known and entry.key in known:
            name, pattern = entry.key, None
        if name not in known:
            unused[entry.key] = name
            continue
        _refuse_codes(directory, entry, known[name])
        if pattern is None:
            entries[name] = entry
        else:
            sources.setdefault(name, []).append((pattern, entry))
    conversions: dict[str, _Conversion] = {}
    shapes = {name: entry.shape for name, entry in entries.items()}
    for target, tensors in sources.items():
        made = _Conversion(by_pattern[tensors[0][0]], target, tuple(tensors), outline)
        try:
            sketches = made.results(_Entry.sketch)
        except (RuntimeError, ValueError, KeyError, StopIteration) as error:
            remedy = f"the tensors of {target} do not fit together: {error}"
            raise ConfigError("model.path", directory, remedy) from error
        conversions |= dict.fromkeys(sketches, made)
        shapes |= {name: tensor.shape for name, tensor in sketches.items()}
    buffers = frozenset(name for name, _ in model.named_buffers() if name in known)
    notes = _notes(directory, unused, model) if shapes else (_empty_note(config, unused, model),)
    return Weights(directory, entries, conversions, shapes, buffers & shapes.keys(), notes)


def _entries(directory: Path) -> Iterator[_Entry]:
    """The tensors of all files."""
    files = _weight_files(directory)
    if files and (method := keys_on_disk(str(directory)).get(QUANTISATION)):
        raise _quantised_error(directory, f"its config.json has {QUANTISATION} = {method}")
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (a safetensors file is not iterable)
                    part = file.get_slice(key)
                    yield _Entry(path, key, torch.Size(part.get_shape()), part.get_dtype())
        except (OSError, SafetensorError) as error:  # As of a pointer of git-lfs, or half a file.
            remedy = f"{path.name} cannot be read: {error}"
            raise ConfigError("model.path", str(directory), remedy) from error


def _refuse_codes(directory: str, entry: _Entry, target: Tensor) -> None:
    """Refuses a tensor of codes, which need scales to be floats, in place of floats."""
    if target.is_floating_point() and entry.dtype.startswith(_CODES):
        raise _quantised_error(Path(directory), f"{entry.key} is of dtype {entry.dtype}")


def _quantised_error(directory: Path, sign: str) -> ConfigError:
    """The error for quantised weights."""
    remedy = (
        f"its weights are quantised ({sign}); load them with transformers, dequantise them "
        "(dequantize=True in the config of the method, or model.dequantize()), and write them "
        "with save_pretrained"
    )
    return ConfigError("model.path", str(directory), remedy)


def _empty_note(config: ModelConfig, unused: Mapping[str, str], model: Any) -> str:
    """The note that a model begins without the weights that its directory might have.

    Args:
        unused: the tensors in the directory, by name.

    Raises:
        ConfigError: there are tensors, and none is the model's; or adapters are to be trained.
    """
    if unused:
        remedy = f"{type(model).__name__} takes none of its tensors ({_some_of(list(unused))})"
        raise ConfigError("model.path", config.path, remedy)
    if config.lora:
        remedy = (
            "it has no weights (*.safetensors) for the adapters of model.lora, which would be "
            "trained for random values; get the files, or name another directory"
        )
        raise ConfigError("model.path", config.path, remedy)
    return (
        f"model.path = {config.path!r} has no weights (*.safetensors), so a model that begins "
        "anew has random values"
    )


def _notes(directory: str, unused: Mapping[str, str], model: Any) -> tuple[str, ...]:
    """A note that tensors are left out; none for those of which it is known to be harmless.

    Args:
        unused: names that the model would have for tensors, by those in the files.
    """
    patterns = (*_COMPUTED, *(model._keys_to_ignore_on_load_unexpected or ()))
    harmless = {name for name, _ in model.named_buffers()}
    if _has_other_head(directory, model):
        # Files of the base model alone have names without its prefix.
        own = (model.base_model_prefix, *dict(model.base_model.named_children()))
        harmless |= {name for name in unused.values() if name.partition(".")[0] not in own}
    names = [
        key
        for key, name in unused.items()
        if name not in harmless and not any(re.search(pattern, name) for pattern in patterns)
    ]
    if not names:
        return ()
    note = f"no parameter of {type(model).__name__} takes these tensors of {directory}"
    return (f"{note}: {_some_of(names)}",)


def _some_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return f"{', '.join(names[:_NUM_SHOWN])}{more}"


def _has_other_head(directory: str, model: Any) -> bool:
    """Whether the files are of a class with the same base model and another head."""
    names = keys_on_disk(directory).get("architectures") or ()
    classes = [getattr(transformers, name, None) for name in names]
    return type(model) not in classes and any(
        getattr(each, "config_class", None) is type(model).config_class for each in classes
    )


def _natural(key: str) -> list[tuple[bool, int, str]]:
    """A name in the order of its numbers, in which experts are stacked."""
    return [
        (not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in key.split(".")
    ]


def _indexed_names(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        remedy = f"{index.name} cannot be read: {error!r}"
        raise ConfigError("model.path", str(index.parent), remedy) from error


def _weight_files(directory: Path) -> list[Path]:
    index, whole = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if whole.is_file():  # It comes first in transformers, too: an index may be an older save's.
        files = [whole]
    elif index.is_file():
        files = [directory / name for name in _indexed_names(index)]
    else:
        files = sorted(directory.glob("*.safetensors"))
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ConfigError("model.path", str(directory), f"lacks {', '.join(missing)}")
    others = () if files else sorted(p.name for form in _OTHER_FORMS for p in directory.glob(form))
    if others:
        remedy = (
            f"its weights are in {others[0]}, and only *.safetensors are read; load them with "
            "transformers, and write them with save_pretrained"
        )
        raise ConfigError("model.path", str(directory), remedy)
    return files
