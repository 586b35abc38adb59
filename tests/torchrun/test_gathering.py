"""What ranks tell each other, over whatever backends the default group has."""

from pathlib import Path

import pytest
import torch.distributed as dist

from planaria.torchrun import gathering
from planaria.torchrun.gathering import (
    backend_of,
    broadcast_bytes,
    gather_bytes,
    true_on_all,
)


def test_a_group_without_a_named_backend_gathers(tmp_path: Path) -> None:
    """Torch finds one then, and calls it undefined."""
    dist.init_process_group(init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert gather_bytes(b"told") == [b"told"]
        assert true_on_all(True, False) == [True, False]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("content", [b"", b"told", b"told to all"])
def test_bytes_of_any_length_are_broadcast_in_parts(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one rank; others get what it has."""
    monkeypatch.setattr(gathering, "_PART_BYTES", 4)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert broadcast_bytes(content, source=0) == content
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("config", "cpu", "cuda"),
    [
        ("cpu:gloo,cuda:gloo,mps:gloo", "gloo", "gloo"),
        ("cpu:gloo,cuda:nccl", "gloo", "nccl"),
        ("cuda:nccl", "", "nccl"),
        ("cpu:gloo", "gloo", ""),
    ],
)
def test_each_device_has_a_backend_of_its_own(
    config: str, cpu: str, cuda: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As groups of several backends write them."""
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)

    assert (cpu, cuda) == (backend_of("cpu"), backend_of("cuda"))
