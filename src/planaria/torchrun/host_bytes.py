"""Brings the tensors of a user's own loop to the host's memory, as bytes, while training goes on.

Tensors of an accelerator are copied to pinned buffers on a stream of their own; the loop does not
wait for them. The optimizer's next step is ordered after these copies on the device. Tensors that
are in the host's memory already are views, so the step has to wait until somebody has copied them.

Source: Gemini (SOSP '23), section 5.3.
"""

from collections import ChainMap
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from planaria.checkpoint.memory.wire import State
from planaria.engine.devices import Device
from planaria.engine.staging import StateMirror
from planaria.torchrun.shards import HEAD, bytes_now

_SMALL_BYTES: Final = 1 << 16  # The counts of steps, say: they lie on the host in any case.


class HostBytes:
    """The host's copies of a rank's tensors, one after the other in the same buffers.

    Args:
        device: device on which the model computes.

    Attributes:
        has_views: whether the newest bytes are in part those of the tensors themselves, which must
            not change before somebody has copied them.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._mirror = StateMirror(device)
        self._number = 0
        self.has_views = False

    def read(self, tensors: Mapping[str, Tensor]) -> State:
        """The bytes of the tensors as they are now.

        Whoever reads the bytes of one waits until it has come. They stay valid until the next call.
        """
        if self._device.is_host:
            self.has_views = True
            return bytes_now(tensors)
        away = {name: tensor for name, tensor in tensors.items() if self._is_away(tensor)}
        here = {name: tensor for name, tensor in tensors.items() if name not in away}
        small = {name: t.clone() for name, t in here.items() if t.nbytes <= _SMALL_BYTES}
        # The description of the shard is made for this version alone, so nobody changes it.
        self.has_views = bool(here.keys() - small.keys() - {HEAD})
        self._number += 1
        flat = {name: _flat_bytes(tensor) for name, tensor in away.items()}
        mirrored: Any = self._mirror.state(flat, age=self._number) if flat else {}
        host: Any = bytes_now(here | small)
        return ChainMap(host, mirrored)

    def order(self) -> None:
        """Must be called before the tensors change; does not block the host."""
        self._mirror.order()

    def _is_away(self, tensor: Tensor) -> bool:
        # Its streams, and so its copies, are those of one device. Others are copied at once.
        return tensor.device == self._device.place


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
