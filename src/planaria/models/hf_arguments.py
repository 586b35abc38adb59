"""The arguments that a model's own forward passes to its blocks, besides the hidden states.

They are noted once for each shape of ids, dtype and padding mask, in a forward without weights, and
depend on nothing else; a model whose arguments depend on more is refused.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from planaria.models.hf_frame import (
    Call,
    ForwardStopped,
    Frame,
    ghost,
    parameters_of,
    refusal,
    set_tensor,
)
from planaria.models.hf_masks import MASK, mask_of

# Dimensions in names: B microbatch, L sequence, D model

# Arguments of blocks that are kept: masks mostly, one for each length to which samples are padded,
# or for each padding mask, of which hardly any comes twice.
_ARGUMENTS_BYTES: Final = 1 << 27
_NUM_MAX: Final = 256


class BlockArguments:
    """The arguments that the model's own forward passes to its blocks, by shape, dtype and mask.

    All layers of a process, and their copies, share one object.
    """

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self._shapes = {name: p.shape for name, p in parameters_of(frame.model).items()}
        self._calls: dict[object, tuple[Call, ...]] = {}
        self._num_bytes: dict[object, int] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlockArguments":
        return self

    def call(self, block: int, hidden_BLD: Tensor, mask: str) -> Call:
        """The arguments of a block for hidden states of this shape, dtype and device.

        Args:
            mask: the padding mask as text, see hf_masks.py; "": there is none.
        """
        key = (hidden_BLD.shape[:2], hidden_BLD.dtype, hidden_BLD.device, mask)
        if key not in self._calls:
            self._make_room()
            # A forward that a backward runs again must not count the operations of this one, which
            # runs in one of the two alone.
            with _disable_current_modes():
                inputs = {self.frame.inputs.name: self.frame.inputs.constant(key[0], 0, hidden_BLD)}
                if mask:
                    inputs[MASK] = mask_of(mask, hidden_BLD.device)
                calls = self.record_calls(inputs, hidden_BLD.dtype)
            self._calls[key] = calls
            self._num_bytes[key] = sum(tensor.nbytes for tensor in _tensors_of(calls))
        return self._calls[key][block]

    def _make_room(self) -> None:
        """Forgets the oldest arguments while all together are many or large."""
        num_bytes = sum(self._num_bytes.values())
        while self._calls and (num_bytes >= _ARGUMENTS_BYTES or len(self._calls) >= _NUM_MAX):
            oldest = next(iter(self._calls))
            del self._calls[oldest]
            num_bytes -= self._num_bytes.pop(oldest)

    @torch.no_grad()
    def record_calls(self, inputs: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Call, ...]:
        """The arguments of all blocks for these inputs, by name.

        Raises:
            ConfigError: the arguments depend on weights.
        """
        model, device = self.frame.model, inputs[self.frame.inputs.name].device
        for name, shape in self._shapes.items():
            set_tensor(model, name, ghost(shape, dtype=dtype, device=device))
        # Buffers (rotary frequencies) move to the device but stay in float32.
        model.to(device)
        calls: list[Call] = []

        def note(index: int, hidden_BLD: Tensor, call: Call) -> Tensor:
            calls.append(call)
            if index == len(self.frame.block_stubs) - 1:
                raise ForwardStopped(hidden_BLD)
            return hidden_BLD

        self.frame.hidden_states(inputs, note)
        if any(bool(tensor.isnan().any()) for tensor in _tensors_of(calls)):
            raise refusal(model, "its blocks take more inputs than hidden states")
        return tuple(calls)


def _tensors_of(calls: Iterable[Call]) -> list[Tensor]:
    """The tensors among the arguments, each once: most blocks get the same mask."""
    return list({id(tensor): tensor for call in calls for tensor in call.tensors()}.values())
