"""Tensors as messages between ranks: a head that says what they are, and their bytes.

The head is eight int64: the dtype, as an index, the number of dimensions, and the shape.
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from planaria.transport.links import Links, Tag

_HEAD_BYTES: Final = 64
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.int64)


def send_tensor(links: Links, target: int, tag: Tag, tensor: Tensor, *, virtual_bytes: int) -> None:
    """Sends a tensor of up to six dimensions; returns at once.

    Args:
        virtual_bytes: what it counts as where links are paced; 0: what it is.
    """
    tensor = tensor.detach().contiguous()
    head = np.zeros(_HEAD_BYTES // 8, dtype=np.int64)
    assert tensor.dim() <= len(head) - 2
    head[:2] = _DTYPES.index(tensor.dtype), tensor.dim()
    head[2 : 2 + tensor.dim()] = tensor.shape
    body = tensor.reshape(-1).view(torch.uint8).numpy()
    links.send(target, tag, head, body, virtual_bytes=virtual_bytes)


def receive_tensor(links: Links, source: int, tag: Tag, *, timeout_s: float) -> Tensor:
    """The tensor that `source` sends with this tag.

    Raises:
        PeerLostError: it will not come.
    """
    received = links.receive(source, tag, timeout_s=timeout_s)
    head = received[:_HEAD_BYTES].view(np.int64)
    shape = head[2 : 2 + int(head[1])].tolist()
    dtype = _DTYPES[int(head[0])]
    # A view of no bytes as another dtype has no length that torch could tell.
    body = torch.from_numpy(received[_HEAD_BYTES:])
    return body.view(dtype).view(shape) if len(body) else torch.empty(shape, dtype=dtype)
