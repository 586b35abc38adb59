"""What is saved of a loop beside its tensors: rates, schedulers, samplers.

It is written by torch.save, for JSON makes strings of keys that are numbers, lists of tuples, and
nothing of inf. It is read by torch.load with weights_only=True, which runs no code of what it
reads, and refuses what it does not know; so what is written is read back before the first version.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final

import numpy as np
import torch

from planaria.errors import CheckpointError, ConfigError

# Rates are numpy's where a schedule computes them so, and generators have states of its arrays.
_NUMPY: Final[tuple[Any, ...]] = (
    *(np.float64().__reduce__()[0], np.empty(0).__reduce__()[0]),
    *(np.ndarray, np.dtype),
    *{type(np.dtype(code)) for code in f"?{np.typecodes['AllInteger']}{np.typecodes['AllFloat']}"},
)
_REMEDY: Final = (
    "torch.load with weights_only=True does not read it back: make it of numbers, strings, tensors,"
    " lists and dicts, or tell torch.serialization.add_safe_globals of its type"
)


@dataclass(frozen=True, slots=True)
class Beside:
    """What is no tensor of a model or its optimizer.

    Attributes:
        numbers: of the optimizer's state, by name.
        groups: the optimizer's param_groups; "params" is how many there are.
        others: by name, the state of what is saved beside.
    """

    numbers: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    others: Mapping[str, Any]


def written(beside: Beside) -> bytes:
    """Its bytes.

    Raises:
        ConfigError: something cannot be written.
    """
    try:
        return _bytes_of((beside.numbers, beside.groups, beside.others))
    except Exception as error:  # Every type has its own ways not to be written.
        raise _refusal(beside) from error


def read(raw: bytes) -> Beside:
    """What was written.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        numbers, groups, others = _value_of(raw)
    except Exception as error:  # As above.
        raise CheckpointError(f"what was saved beside tensors cannot be read: {error}") from error
    return Beside(numbers, groups, others)


def check(beside: Beside) -> None:
    """Refuses what would not come back, as it was on each rank.

    Raises:
        ConfigError: naming it.
    """
    for name, value in beside.numbers.items():
        if not isinstance(value, float | int | str | None):
            remedy = (
                "of an optimizer's state tensors and numbers are saved, and nothing that has parts"
            )
            raise ConfigError(name, type(value).__name__, remedy)
    try:
        read(written(beside))
    except CheckpointError as error:
        raise _refusal(beside) from error


def _refusal(beside: Beside) -> ConfigError:
    refused = (pair for pair in _named(beside) if not _comes_back(pair[1]))
    name, value = _innermost(*next(refused, ("others", beside.others)))
    return ConfigError(name, type(value).__name__, _REMEDY)


def _named(beside: Beside) -> Iterator[tuple[str, Any]]:
    yield from beside.numbers.items()
    for group in beside.groups:
        yield from ((f"optimizer.{key}", value) for key, value in group.items())
    yield from ((f"others.{name}", value) for name, value in beside.others.items())


def _innermost(name: str, value: Any) -> tuple[str, Any]:
    """Of what does not come back, what is the reason, as far as dicts tell."""
    if isinstance(value, dict):
        for key, one in value.items():
            if not _comes_back(one):
                return _innermost(f"{name}.{key}", one)
    return name, value


def _comes_back(value: Any) -> bool:
    try:
        _value_of(_bytes_of(value))
    except Exception:  # As above.
        return False
    return True


def _bytes_of(value: Any) -> bytes:
    file = BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _value_of(raw: bytes) -> Any:
    with torch.serialization.safe_globals(list(_NUMPY)):
        # Whoever wrote it may have had other devices.
        return torch.load(BytesIO(raw), map_location="cpu", weights_only=True)
