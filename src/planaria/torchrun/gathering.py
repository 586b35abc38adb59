"""Exchanges bytes and records among all ranks of the default process group.

Nothing is pickled, unlike in torch's own all_gather_object.
"""

from typing import Final, TypeVar

import msgspec
import torch
import torch.distributed as dist

Record = TypeVar("Record")
# A device has room for so many bytes beside a model, and the timeout of a group is for these alone.
_PART_BYTES: Final = 64 << 20


def gather_records(kind: type[Record], mine: Record) -> list[Record]:
    """The records of all ranks, by rank; all ranks must call it."""
    return [msgspec.json.decode(raw, type=kind) for raw in gather_bytes(msgspec.json.encode(mine))]


def gather_bytes(content: bytes) -> list[bytes]:
    """The bytes of all ranks, by rank; all ranks must call it."""
    device = _device()
    size = torch.tensor([len(content)], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    length_max = max(int(length) for length in sizes)
    padded = torch.zeros(length_max, dtype=torch.uint8, device="cpu")  # Not a script's default.
    padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    padded = padded.to(device)
    contents = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(contents, padded)
    return [
        padded[: int(length)].cpu().numpy().tobytes()
        for padded, length in zip(contents, sizes, strict=True)
    ]


def broadcast_bytes(content: bytes, *, source: int) -> bytes:
    """The bytes of one rank, on all ranks; all ranks must call it.

    Args:
        content: bytes of the source; those of other ranks do not matter.
        source: rank whose bytes they are.
    """
    device = _device()
    size = torch.tensor([len(content)], dtype=torch.int64, device=device)
    dist.broadcast(size, source)
    whole = memoryview(bytearray(content if dist.get_rank() == source else int(size)))
    for begin in range(0, len(whole), _PART_BYTES):
        part = torch.frombuffer(whole[begin : begin + _PART_BYTES], dtype=torch.uint8)
        there = part.to(device)
        dist.broadcast(there, source)
        part.copy_(there)
    return bytes(whole)


def true_on_all(*flags: bool) -> list[bool]:
    """Whether each flag is set on every rank, in order; all ranks must call it."""
    total = torch.tensor(flags, dtype=torch.int32, device=_device())
    dist.all_reduce(total, op=dist.ReduceOp.MIN)
    return [bool(flag) for flag in total.tolist()]


def backend_of(device_type: str) -> str:
    """The default group's backend for a type of device, by torch's names; "" if there is none."""
    # The name of the group's backend may be "undefined".
    return _backend_by_device().get(device_type, "")


def backends() -> frozenset[str]:
    """The backends of the default group for all types of devices, by torch's names."""
    return frozenset(_backend_by_device().values())


def _backend_by_device() -> dict[str, str]:
    # The configuration is "cpu:gloo,cuda:nccl", say, whatever backend the group was made with.
    return dict(pair.split(":") for pair in dist.get_backend_config().split(","))


def _device() -> torch.device:
    """A device whose tensors the default group can exchange; the CPU if possible."""
    if backend_of("cpu"):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return accelerator
