"""What ranks of a default process group tell each other, as bytes and as records.

Nothing is pickled: torch's own gathering of objects would be.
"""

from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

Said = TypeVar("Said")


def gathered_as(kind: type[Said], mine: Said) -> list[Said]:
    """What all ranks say, by rank."""
    return [msgspec.json.decode(raw, type=kind) for raw in gathered(msgspec.json.encode(mine))]


def gathered(content: bytes) -> list[bytes]:
    """The bytes of all ranks, by rank."""
    device = _device()
    size = torch.tensor([len(content)], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    most = max(int(one) for one in sizes)
    padded = torch.zeros(most, dtype=torch.uint8)
    padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    padded = padded.to(device)
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded)
    return [
        one[: int(length)].cpu().numpy().tobytes() for one, length in zip(found, sizes, strict=True)
    ]


def on_all(*flags: bool) -> list[bool]:
    """Each flag, whether it is set on every rank."""
    told = torch.tensor(flags, dtype=torch.int32, device=_device())
    dist.all_reduce(told, op=dist.ReduceOp.MIN)
    return [bool(one) for one in told.tolist()]


def backend_of(device_type: str) -> str:
    """What serves a type of device in the default group, by torch's names; "" if nothing does."""
    # "cpu:gloo,cuda:nccl", whatever the group was asked for; its own name may be "undefined".
    served = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
    return served.get(device_type, "")


def _device() -> torch.device:
    """Where the default group's tensors are."""
    if backend_of("cpu"):
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found
