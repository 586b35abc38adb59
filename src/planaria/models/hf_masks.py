"""Padding masks of models of transformers, which travel beside the hidden states.

A microbatch whose samples differ in length is {"input_ids": ..., "attention_mask": ...}, as
tokenizers and collators of transformers write it. The embedding gives both to the model's forward,
and returns (hidden states, mask); each block gets the arguments that the model's forward passes to
it for this mask, and passes the mask on. So a rank needs no more than what the rank before it sent.

On its way the mask is a text: the lengths of the runs of ones and zeros of each sample, such as
"5,3;8;0,2,6" for five tokens and three of padding, for eight tokens, and for padding on the left.
It is part of the description of a packed tensor (packing.py), which the host reads in any case, so
that looking up the arguments of a mask that has come before makes no device wait. A mask of ones is
no mask.
"""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from planaria.errors import ConfigError
from planaria.models.hf_frame import Call, Frame, Inputs, move_ghosts
from planaria.models.packing import describe, unpack

# Dimensions in names: B microbatch, L sequence, D model

IDS: Final = "input_ids"
MASK: Final = "attention_mask"


@dataclass(frozen=True, slots=True)
class MaskUse:
    """What a model does with a padding mask.

    Attributes:
        problem: why the model can be given none; empty: it can.
        is_for_head: whether the part after the blocks reads it, as to take the mean of all tokens.
    """

    problem: str
    is_for_head: bool = False


class _Marked(Tensor):
    """A tensor that marks all tensors that are computed from it: they are of this class, too."""


class Masks:
    """Finds what a model does with a padding mask when a layer or a data set first asks.

    That may take seconds, which models without padding never spend. All layers of a process, and
    their copies, share one object.
    """

    def __init__(self, frame: Frame, *, sequence_length: int, problem: str) -> None:
        """Keeps what the search needs.

        Args:
            frame: a frame whose parameters are ghosts.
            problem: why the model can be given no mask, if that is known; else empty.
        """
        self._frame = frame
        self._sequence_length = sequence_length
        self._use = MaskUse(problem) if problem else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Masks":
        return self

    def use(self) -> MaskUse:
        """What the model does with a padding mask."""
        if self._use is None:
            # A forward that a backward runs again must not count the operations of these.
            with _disable_current_modes(), torch.no_grad():
                self._use = _mask_use(self._frame, sequence_length=self._sequence_length)
        return self._use

    def refusal(self) -> str:
        """The sentence why the model cannot be given samples of unequal length; "": it can."""
        problem = self.use().problem
        return _refusal(problem) if problem else ""


def _mask_use(frame: Frame, *, sequence_length: int) -> MaskUse:
    """What a model does with a padding mask, found by two forwards without weights."""
    if MASK not in inspect.signature(frame.model.forward).parameters:
        return MaskUse(f"its forward takes no {MASK}")
    try:
        # With a head over a large vocabulary a whole forward of many tokens would take seconds.
        is_read = _reach(frame, num_tokens=sequence_length, stops_at_head=True)
        is_for_head = _reach(frame, num_tokens=2, stops_at_head=False)
    except _PaddedByModelError:
        return MaskUse("it pads samples itself")
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        return MaskUse(f"its code cannot be run with an {MASK} ({error})")
    if not (is_read or is_for_head):
        return MaskUse(f"nothing in it reads the {MASK}")
    return MaskUse("", is_for_head)


class _PaddedByModelError(Exception):
    """Raised where the model's forward has padded the samples itself."""


class _BlocksPassed(Exception):
    """Raised to leave the model's forward after its last block."""


def _reach(frame: Frame, *, num_tokens: int, stops_at_head: bool) -> bool:
    """Whether the mask reaches the blocks, or else (not `stops_at_head`) what is after them."""
    ids = torch.zeros((1, num_tokens), dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    frame = copy.deepcopy(frame)  # Some models note that samples are short.
    frame.model.to("cpu")
    move_ghosts(frame.model, torch.device("cpu"))
    num_blocks = len(frame.block_stubs)
    marks: list[bool] = []

    def pass_by(index: int, hidden_BLD: Tensor, call: Call) -> Tensor:
        if hidden_BLD.shape[1] != num_tokens:
            raise _PaddedByModelError
        marks.extend(isinstance(t, _Marked) for t in (hidden_BLD, *call.tensors()))
        if stops_at_head and index == num_blocks - 1:
            raise _BlocksPassed
        return torch.zeros(tuple(hidden_BLD.shape), dtype=hidden_BLD.dtype)

    inputs = {IDS: ids, MASK: mask.as_subclass(_Marked)}
    try:
        logits = frame.logits(inputs, pass_by)
    except _BlocksPassed:
        return any(marks)
    return isinstance(logits, _Marked)


def masked_inputs(value: object, *, masks: Masks, inputs: Inputs) -> tuple[Mapping[str, Any], str]:
    """The arguments of the model's forward, and the mask as text; "" if it hides nothing.

    Args:
        value: inputs of a microbatch that are more than one tensor.

    Raises:
        ConfigError: they are something else than token ids and their mask, or have a mask that the
            model cannot be given.
    """
    if inputs.image or not isinstance(value, dict) or set(value) != {IDS, MASK}:
        with_mask = "" if inputs.image else f", or a dict of it and its {MASK} alone"
        remedy = f"a model of transformers takes one tensor, {inputs.name}{with_mask}"
        raise ConfigError("data", describe(value), f"{remedy}; return that as the inputs")
    ids_BL, mask_BL = value[IDS], value[MASK]
    text = mask_text(mask_BL) if mask_BL.dim() == 2 and mask_BL.shape == ids_BL.shape else None
    if text is None:
        remedy = f"{MASK} must be of the shape of {IDS}, 1 for each token and 0 for padding"
        raise ConfigError("data", describe(value), remedy)
    if text and (refusal := masks.refusal()):
        raise ConfigError("data", describe(value), refusal)
    return {IDS: ids_BL, MASK: mask_BL.to(torch.int64)} if text else {IDS: ids_BL}, text


def _refusal(problem: str) -> str:
    return (
        f"this model would see padding, because it can be given no mask: {problem}; give samples "
        "of one length"
    )


def refuse_own_padding(num_ids: int, num_tokens: int) -> None:
    """Refuses a model that pads samples to a length of its own, which no mask of theirs has.

    Args:
        num_ids: number of token ids of a sample.
        num_tokens: number of hidden states that the first block gets of it.
    """
    if num_tokens != num_ids:
        remedy = (
            f"the model itself pads such samples to {num_tokens} tokens, which planaria does not "
            "hide; pad them to a length that it leaves alone, by a function named as data.collate"
        )
        raise ConfigError("data", f"{num_ids} tokens", remedy)


def hidden_and_mask(x: Tensor) -> tuple[Tensor, str]:
    """The hidden states that a layer gets, and the mask as text; "": there is none."""
    value = unpack(x)
    if isinstance(value, Tensor):
        return value, ""
    hidden_BLD, text = value
    return hidden_BLD, text


def with_mask(hidden_BLD: Tensor, text: str) -> object:
    """What a layer returns, for the next one to take apart by `hidden_and_mask`."""
    return (hidden_BLD, text) if text else hidden_BLD


def mask_text(mask_BL: Tensor) -> str | None:
    """A mask as text, "" if it is one everywhere; None if it has other numbers than 0 and 1."""
    values = mask_BL.cpu()
    mask = values != 0
    if not torch.equal(mask.to(values.dtype), values):
        return None
    if mask.all():
        return ""
    return ";".join(",".join(map(str, _runs(row))) for row in mask.numpy())


def _runs(row: np.ndarray) -> list[int]:
    """Lengths of the runs of ones, zeros, ones, ... of a row; the first may be 0."""
    ends = [*(np.flatnonzero(row[1:] != row[:-1]) + 1), len(row)]
    begins = [0, *ends[:-1]]
    runs = [int(end - begin) for begin, end in zip(begins, ends, strict=True)]
    return runs if row[0] else [0, *runs]


def mask_of(text: str, device: torch.device) -> Tensor:
    """The mask of a text: int64 [B, L], 1 for each token."""
    rows = []
    for part in text.split(";"):
        runs = [int(length) for length in part.split(",")]
        rows.append(np.repeat(1 - np.arange(len(runs)) % 2, runs))
    return torch.from_numpy(np.stack(rows)).to(device, torch.int64)
