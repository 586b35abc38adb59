"""A Hugging Face architecture: its config, and its model on the meta device.

No parameter stays in memory here: the model is built on the meta device.
"""

import copy
import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from torch.overrides import TorchFunctionMode
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from planaria.core.job import ModelConfig
from planaria.errors import ConfigError
from planaria.models.hf_frame import Inputs
from planaria.models.layers import OWN_LAYERS

# Attributes of a config with the kernels of attention, and of a mixture of experts, which older
# releases lack; None: transformers chooses.
_ATTENTION: Final = "_attn_implementation"
_EXPERTS: Final = "_experts_implementation"

QUANTISATION: Final = "quantization_config"  # Key of config.json of a model in which codes are.

# In place of floats that JSON lacks, config.json of transformers has objects with this key alone.
_FLOAT_TAG: Final = "__float__"
_TAGGED_FLOATS: Final = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}

_OF_IMAGES: Final = "ForImageClassification"
# By the end of the architecture's name: the class of transformers, and a word for people.
_CLASSIFIERS: Final = {
    _OF_IMAGES: (AutoModelForImageClassification, "classifiers of images"),
    "ForSequenceClassification": (AutoModelForSequenceClassification, "classifiers of texts"),
    "ForTokenClassification": (AutoModelForTokenClassification, "classifiers of tokens"),
}

# Keys that transformers reads but does not store under the same name.
_FURTHER_KEYS = frozenset(
    {
        *("model_type", "attn_implementation", "experts_implementation", "rope_theta"),
        *("rope_scaling", "head_dim", "architectures", "num_labels", "id2label", "label2id"),
        "is_causal",
    }
)

_PADDING: Final = "pad_token_id"
# Types whose positions are counted over all tokens that are not padding, from the number after its
# id, so that it must have one.
_COUNTS_FROM_PADDING: Final = frozenset(
    {
        *("camembert", "data2vec-text", "esm", "ibert", "luke", "roberta", "roberta-prelayernorm"),
        *("xlm-roberta", "xlm-roberta-xl", "xmod"),
    }
)
_PADS_INPUTS: Final = "longformer"  # This type needs a token for it.

_UNLESS_DECODER: Final = frozenset({"bert-generation"})  # Causal types that are encoders otherwise.
# By key of a config: the values with which a token sees those after it, and the way out.
_SEES_LATER: Final = {
    "is_causal": ((False, None), "set it to true"),
    "use_bidirectional_attention": ((True, "all"), "set it to false"),
    "attn_type": (("bi",), OWN_LAYERS),  # Of XLNet.
}

# Keys of configs: the end of those of layers that are left out at random, and one of Bamba.
_LAYER_DROP: Final = "layerdrop"
_Z_LOSS: Final = "z_loss_coefficient"


def hf_config(
    model: ModelConfig,
    *,
    vocabulary_size: int,
    sequence_length: int,
    has_learned_tokens: bool = False,
) -> Any:
    """The transformers config of a job's model, checked against the job's data.

    The keys of `model.config` override those of config.json in `model.path`.

    Args:
        has_learned_tokens: whether planaria has learned the tokens of the data. All ids are then
            tokens of text, so that padding has none of them, unless `model.config` names it. Of
            bytes, the ids that models have for padding are those of control characters.

    Raises:
        ConfigError: a key is unknown, or a value is impossible or too small for the data.
    """
    keys = {**keys_on_disk(model.path), **model.config}
    keys.pop(QUANTISATION, None)  # No weights are read in that form (`weights_on_disk`).
    model_type = keys.get("model_type", "")
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            "model.config.model_type", model_type, _nearest(model_type, CONFIG_MAPPING)
        )
    config_class = CONFIG_MAPPING[model_type]
    defaults = vars(config_class())
    has_no_token = False
    if has_learned_tokens and _has_padding_in_text(keys, config_class, model, vocabulary_size):
        has_no_token = _needs_padding(config_class)
        if has_no_token:  # Its id is -1, which torch takes for the last row.
            keys.setdefault("vocab_size", vocabulary_size + 1)
        else:
            keys[_PADDING] = None
    # Data that do not say how many token ids they have leave the model its own number.
    if vocabulary_size and "vocab_size" in {*defaults, *config_class.attribute_map}:
        keys.setdefault("vocab_size", vocabulary_size)
    known = {*defaults, *config_class.attribute_map, *_FURTHER_KEYS}
    for key in model.config:
        if key not in known:
            raise ConfigError(f"model.config.{key}", model.config[key], _nearest(key, known))
    keys = _unknown_tokens(keys, defaults) | keys
    try:
        config = config_class.from_dict(keys)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ConfigError("model.config", dict(model.config), str(error)) from error
    config.use_cache = False
    if has_no_token:
        config.pad_token_id = -1  # Transformers warns of it only where it reads a config.
    if not getattr(config, "vocab_size", 1):
        remedy = "must be more than 0; without it the data set or the model says how many there are"
        raise ConfigError("model.config.vocab_size", 0, remedy)
    _check_architecture(model.config)
    _check_sizes(config, vocabulary_size=vocabulary_size, sequence_length=sequence_length)
    _refuse_what_no_chain_does(config)
    return config


def _unknown_tokens(keys: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """None for each special token whose default is no token id, as the vocabulary is smaller."""
    return {
        key: None
        for key, value in defaults.items()
        if key.endswith("_token_id")
        and isinstance(value, int)
        and value >= keys.get("vocab_size", value + 1)
    }


def _has_padding_in_text(
    keys: Mapping[str, Any], config_class: Any, model: ModelConfig, vocabulary_size: int
) -> bool:
    """Whether a token of the data has the id of padding, and the job does not name that."""
    padding = keys.get(_PADDING, getattr(config_class(), _PADDING, None))
    is_token = isinstance(padding, int) and 0 <= padding < vocabulary_size
    return is_token and _PADDING not in model.config and config_class.model_type != _PADS_INPUTS


def _needs_padding(config_class: Any) -> bool:
    """Whether a type cannot be without an id of padding."""
    try:
        config_class(**{_PADDING: None})
    except StrictDataclassError:
        return True
    return config_class.model_type in _COUNTS_FROM_PADDING


def meta_model(config: Any, *, is_deterministic: bool) -> tuple[Any, str]:
    """The model of a config, in float32 on the meta device, and its objective.

    The objective is "supervised" for a classifier, which `architectures` of the config names, or if
    the type is one of images; "masked" for another type that can fill in hidden tokens, unless the
    config makes it a decoder; and "causal" (predict the next token) for other types. Without
    `is_deterministic`, transformers chooses the kernels of attention and experts that the config
    does not name.

    Raises:
        ConfigError: the type is none of these, a causal model's tokens see those after them, or
            transformers refuses the config.
    """
    auto_class, objective = _auto_class(config)
    config.architectures = config.architectures or []  # Some auto classes expect a list.
    if is_deterministic:
        for name in (_ATTENTION, _EXPERTS):
            if getattr(config, name, "") is None:
                setattr(config, name, "eager")
    try:
        with torch.device("meta"), _Undrawn():
            model = auto_class.from_config(config, dtype=torch.float32)
    except AttributeError as error:  # Its class does not fit its config in this release.
        remedy = f"transformers cannot build it ({error}); {OWN_LAYERS}"
        raise ConfigError("model.config.model_type", config.model_type, remedy) from error
    except (AssertionError, TypeError, ValueError, ImportError) as error:
        raise ConfigError("model.config", config.model_type, str(error)) from error
    return model, objective


def _check_architecture(given: Mapping[str, Any]) -> None:
    """Refuses an architecture that the user names and that would not be what is trained."""
    names = given.get("architectures", [])
    if not isinstance(names, list | tuple) or len(names) > 1:
        raise ConfigError("model.config.architectures", names, "must be a list of one name")
    known = (*_CLASSIFIERS, "ForCausalLM", "ForMaskedLM", "LMHeadModel")
    if names and not str(names[0]).endswith(known):
        remedy = f"planaria trains those that end in {', '.join(known)}; {OWN_LAYERS}"
        raise ConfigError("model.config.architectures", names, remedy)
    problem = given.get("problem_type") or "single_label_classification"
    if problem != "single_label_classification":
        remedy = f"planaria trains classifiers with one class for each target; {OWN_LAYERS}"
        raise ConfigError("model.config.problem_type", problem, remedy)


def _auto_class(config: Any) -> tuple[Any, str]:
    """The class of transformers that builds the model, and the model's objective."""
    model_type = config.model_type
    is_encoder = model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    is_encoder = is_encoder and not getattr(config, "is_decoder", False)
    architecture = next(iter(config.architectures or ()), "")
    for ending, (auto_class, name) in _CLASSIFIERS.items():
        if architecture.endswith(ending):
            # A decoder's classifier looks for the last token that is no padding.
            if is_encoder or ending == _OF_IMAGES:
                return auto_class, "supervised"
            remedy = f"{name} are trained from encoders only; {OWN_LAYERS}"
            raise ConfigError("model.config.architectures", architecture, remedy)
    if is_encoder:
        return AutoModelForMaskedLM, "masked"
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        _refuse_what_sees_later_tokens(config)
        return AutoModelForCausalLM, "causal"
    if model_type in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return AutoModelForImageClassification, "supervised"
    what = "it is no language model, and classifies no images"
    if hasattr(config, "text_config"):
        what = "it takes more than token ids, such as images beside text"
    remedy = f"{what}; {OWN_LAYERS}"
    raise ConfigError("model.config.model_type", model_type, remedy)


def _refuse_what_sees_later_tokens(config: Any) -> None:
    """Raises ConfigError for a language model whose tokens see what they are to predict."""
    why = "each token sees those after it, which it is to predict"
    if config.model_type in _UNLESS_DECODER and not config.is_decoder:
        raise ConfigError("model.config.is_decoder", False, f"{why}; set it to true")
    for key, (values, way_out) in _SEES_LATER.items():
        if (value := getattr(config, key, "")) in values:
            raise ConfigError(f"model.config.{key}", value, f"{why}; {way_out}")


def inputs_of(model: Any) -> Inputs:
    """The inputs that a model's forward takes.

    Raises:
        ConfigError: they are images of any size.
    """
    if model.main_input_name != "pixel_values":
        return Inputs()
    config = model.config
    size = getattr(config, "image_size", None)
    if size is None:
        remedy = f"its config has no image_size, so it is no chain of blocks; {OWN_LAYERS}"
        raise ConfigError("model.config.model_type", config.model_type, remedy)
    rows, columns = (size, size) if isinstance(size, int) else size
    return Inputs((config.num_channels, rows, columns))


class _Undrawn(TorchFunctionMode):
    """Skips the functions of torch.nn.init while modules are made.

    On the meta device they have no effect, but they run torch's decompositions in Python and took
    three quarters of the time.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See TorchFunctionMode."""
        del types
        named = dict(kwargs or {})
        if getattr(func, "__module__", "") == torch.nn.init.__name__:
            return named["tensor"] if "tensor" in named else args[0]
        return func(*args, **named)


def float32_names(model: Any) -> frozenset[str]:
    """Names of the tensors that transformers keeps in float32 where the model is in bfloat16.

    Its class lists some (`_keep_in_fp32_modules_strict`), and its modules make others in float32
    whatever the dtype of the model.
    """
    patterns = [part.replace("*", ".*") for part in model._keep_in_fp32_modules_strict or ()]
    with torch.device("meta"), _Undrawn():
        same = type(model)._from_config(copy.deepcopy(model.config), dtype=torch.bfloat16)
    named = (*same.named_parameters(remove_duplicate=False), *same.named_buffers())
    return frozenset(
        name
        for name, tensor in named
        if tensor.dtype is torch.float32 or any(re.search(part, name) for part in patterns)
    )


def config_values(model: Any) -> dict[str, Any]:
    """The content of config.json from which transformers can build the same model."""
    values: dict[str, Any] = json.loads(model.config.to_json_string())
    return values | {"architectures": [type(model).__name__], "use_cache": True}


def keys_on_disk(path: str) -> dict[str, Any]:
    """The content of config.json in `model.path`; empty if that is "".

    Raises:
        ConfigError: there is no such file, or it is not JSON.
    """
    if not path:
        return {}
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError("model.path", path, "it is not a directory with a config.json")
    try:
        keys: dict[str, Any] = json.loads(file.read_text(), object_hook=_without_tag)
    except ValueError as error:
        raise ConfigError("model.path", path, f"config.json is not JSON: {error}") from error
    return keys


def _without_tag(value: dict[str, Any]) -> Any:
    """The float that an object of config.json stands for, or else the object."""
    tag = value.get(_FLOAT_TAG)
    if len(value) == 1 and isinstance(tag, str):
        return _TAGGED_FLOATS.get(tag, value)
    return value


def _nearest(key: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(known), n=3, cutoff=0.5)
    return (
        f"transformers does not know it; similar names are {', '.join(close)}"
        if close
        else "transformers does not know it"
    )


def _check_sizes(config: Any, *, vocabulary_size: int, sequence_length: int) -> None:
    if getattr(config, "vocab_size", vocabulary_size) < vocabulary_size:
        remedy = (
            f"the data has {vocabulary_size} different tokens; set it to this number, or leave "
            "the key out"
        )
        raise ConfigError("model.config.vocab_size", config.vocab_size, remedy)
    num_positions = getattr(config, "max_position_embeddings", None)
    # Below 0 there is no bound (XLNet).
    if isinstance(num_positions, int) and 0 <= num_positions < sequence_length:
        raise too_few_positions(config, sequence_length)


def too_few_positions(config: Any, sequence_length: int) -> ConfigError:
    """The error for a model with fewer positions than a sample has tokens."""
    key = "max_position_embeddings"
    return ConfigError(
        f"model.config.{config.attribute_map.get(key, key)}",  # n_positions in GPT-2, for example.
        getattr(config, key, None),
        f"it is too small for data.sequence_length = {sequence_length}; raise it, or make "
        "the samples shorter",
    )


def _refuse_what_no_chain_does(config: Any) -> None:
    if config.is_encoder_decoder:
        remedy = f"a model with an encoder and a decoder is not a chain of layers; {OWN_LAYERS}"
        raise ConfigError("model.config.model_type", config.model_type, remedy)
    for key, value in vars(config).items():
        if key.endswith(_LAYER_DROP) and value:
            remedy = "planaria runs every layer for every microbatch; set it to 0.0"
            raise ConfigError(f"model.config.{key}", value, remedy)
    if value := getattr(config, _Z_LOSS, None):
        remedy = "planaria's loss is the cross entropy alone; set it to 0.0"
        raise ConfigError(f"model.config.{_Z_LOSS}", value, remedy)
