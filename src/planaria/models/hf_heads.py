"""How a head runs what its model's own forward does before the blocks, only to throw it away."""

import copy
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from planaria.models.hf_frame import (
    Frame,
    Inputs,
    ghost,
    initialise,
    move_ghosts,
    parameters_of,
    set_tensor,
)
from planaria.models.hf_masks import MASK, mask_of

logger = logging.getLogger(__name__)

# Dimensions in names: B microbatch, L sequence, D model


@dataclass(frozen=True, slots=True)
class HeadEntry:
    """How the head runs what the model's forward does before the blocks, only to throw it away.

    Computed for nothing, an embedding can take as long as the head itself.

    Attributes:
        place: device of the ghosts.
        inputs: function that returns the arguments of the model's forward for such hidden states.
        takes_mask: whether the head gets the padding mask.
    """

    place: torch.device
    inputs: Callable[[Tensor], dict[str, Tensor]]
    takes_mask: bool = False

    def logits(self, frame: Frame, hidden_BLD: Tensor, mask: str) -> Tensor:
        """The logits for the last block's output.

        Args:
            mask: the padding mask as text, see hf_masks.py.
        """
        inputs = self.inputs(hidden_BLD)
        if self.takes_mask:
            device = hidden_BLD.device
            move_ghosts(frame.model, device)
            frame.model.to(device)  # Its buffers.
            if mask:
                inputs[MASK] = mask_of(mask, device)
        return frame.logits(inputs, lambda _index, _hidden, _call: hidden_BLD)


def _ids(hidden_BLD: Tensor) -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(hidden_BLD.shape[:2], dtype=torch.int64)}


def _ids_beside(hidden_BLD: Tensor) -> dict[str, Tensor]:
    return {"input_ids": hidden_BLD.new_zeros(hidden_BLD.shape[:2], dtype=torch.int64)}


def _ids_with_positions(hidden_BLD: Tensor) -> dict[str, Tensor]:
    """Ids and positions that are not on the device of the ghosts: models look at their values."""
    return {**_ids(hidden_BLD), "position_ids": torch.arange(hidden_BLD.shape[1])[None]}


def _ghost_of_embeds(hidden_BLD: Tensor) -> dict[str, Tensor]:
    cpu = torch.device("cpu")
    return {"inputs_embeds": ghost(hidden_BLD.shape, dtype=hidden_BLD.dtype, device=cpu)}


def _images(inputs: Inputs, place: torch.device, hidden_BLD: Tensor) -> dict[str, Tensor]:
    like = torch.empty((), dtype=hidden_BLD.dtype, device=place)
    return {inputs.name: inputs.constant(hidden_BLD.shape, 0, like)}


# From the cheapest to the one that every model has. On the meta device nothing is computed; and a
# ghost in place of the embedding's output is not looked up.
_HEAD_ENTRIES = (
    HeadEntry(torch.device("meta"), _ids_with_positions),
    HeadEntry(torch.device("cpu"), _ghost_of_embeds),
    HeadEntry(torch.device("cpu"), _ids),
)


# For a head that reads the padding mask, as to take the mean of all tokens. The model's forward
# reads it before the blocks, too, so all is on the device of the hidden states.
MASKED_ENTRY = HeadEntry(torch.device("cpu"), _ids_beside, takes_mask=True)


def _head_entries(inputs: Inputs) -> tuple[HeadEntry, ...]:
    if not inputs.image:
        return _HEAD_ENTRIES
    places = torch.device("meta"), torch.device("cpu")
    return tuple(HeadEntry(place, partial(_images, inputs, place)) for place in places)


@torch.no_grad()
def cheapest_entry(frame: Frame, names: Collection[str]) -> HeadEntry:
    """The cheapest entry of the head that the model's forward can take.

    Args:
        names: parameters of the head.
    """
    *cheaper, last = _head_entries(frame.inputs)
    for entry in cheaper:
        probe = copy.deepcopy(frame)
        initialise(probe.model, seed=0)
        for name, parameter in parameters_of(probe.model).items():
            place = torch.device("cpu") if name in names else entry.place
            set_tensor(probe.model, name, ghost(parameter.shape, dtype=torch.float32, device=place))
        try:
            hidden_BLD = torch.zeros(1, 2, probe.model.config.hidden_size)
            if not entry.logits(probe, hidden_BLD, "").is_meta:
                return entry
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            logger.info("the head's entry %s fails: %s", entry.inputs, error)
    return last
