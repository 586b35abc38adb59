"""Whose fault an exception is, however it came about."""

import errno
from collections.abc import Callable

import msgspec
import pytest
import torch
import torch.distributed as dist

from planaria.core.job import JobConfig
from planaria.core.messages import Blame, WorkerFailed
from planaria.core.specs import NodeSpec
from planaria.engine.blame import blame_of, failure_of
from planaria.errors import ConfigError
from planaria.transport.frames import FROM_NODE_BYTES_MAX


def fails_to_read() -> None:
    raise OSError(errno.EIO, "Input/output error")


def raises_from() -> None:
    try:
        fails_to_read()
    except OSError as error:
        raise ValueError("bad sample") from error


def raises_while_it_handles() -> None:
    try:
        fails_to_read()
    except OSError:
        raise ValueError("bad sample")  # noqa: B904


def raises_from_none() -> None:
    try:
        fails_to_read()
    except OSError:
        raise ValueError("bad sample") from None


def raises_of_its_own() -> None:
    raise ValueError("bad sample")


def fills_memory() -> None:
    try:
        raise MemoryError
    except MemoryError:
        raise RuntimeError("no batch")  # noqa: B904


@pytest.mark.parametrize(
    ("act", "blame"),
    [
        (fails_to_read, "node"),
        (raises_from, "node"),
        (raises_while_it_handles, "node"),
        (raises_from_none, "job"),
        (raises_of_its_own, "job"),
        (fills_memory, "memory"),
    ],
)
def test_what_the_world_began_is_no_mistake_of_the_job(
    act: Callable[[], None], blame: Blame
) -> None:
    """A data set that says of a sample that cannot be read that it is bad ended the job, though one
    node alone could not read it."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        act()

    assert blame_of(caught.value) == blame


@pytest.mark.parametrize(
    ("error", "blame"),
    [
        (torch.AcceleratorError("an illegal memory access was encountered"), "node"),
        (dist.DistBackendError("NCCL communicator was aborted"), "node"),
        (dist.DistNetworkError("the peer has closed the connection"), "node"),
        (dist.DistStoreError("the store does not answer"), "node"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "node"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "node"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            "node",
        ),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"), "node"),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp, remote process exited"), "node"),
        (RuntimeError("HIP error: unspecified launch failure"), "node"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "memory"),
        (RuntimeError("CUDA error: out of memory"), "memory"),
        (ValueError("CUDA error is what the user's text says"), "job"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "job"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_faults_of_devices_and_of_their_libraries_are_the_node_s(
    error: Exception, blame: Blame
) -> None:
    """By the types that torch has for them, or by the texts of its plain errors."""
    assert blame_of(error) == blame


def test_an_error_of_any_length_can_be_reported() -> None:
    """The coordinator cuts off a node that says more than 16 MiB at once, and would so again."""
    spec = NodeSpec(
        job=JobConfig(), node=0, token=b"", coordinator=("", 0), worker="", cache_directory=""
    )
    error = ValueError("first" + "\u00e9" * (1 << 24) + "last")
    failure = failure_of(error, spec, epoch=0, layers=(0, 0))

    assert len(msgspec.json.encode(failure)) < FROM_NODE_BYTES_MAX
    assert "ValueError: first" in failure.traceback
    assert "characters are left out" in failure.traceback
    assert failure.traceback.endswith("last\n")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("it has no text")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("no image: caf\udce9.jpg"), "no image: caf\\udce9.jpg"),
        (ConfigError("data.path", "caf\udce9.jpg", "is no image"), "caf\\udce9.jpg"),
        (Unspeakable(), "<exception str() failed>"),
    ],
)
def test_an_error_of_any_text_can_be_reported(error: Exception, told: str) -> None:
    """Python names a file whose name is not UTF-8 by characters that JSON does not have. A worker
    that could not report its error ended, with the layers that it held, and nothing was saved."""
    spec = NodeSpec(
        job=JobConfig(), node=0, token=b"", coordinator=("", 0), worker="", cache_directory=""
    )
    failure = failure_of(error, spec, epoch=0, layers=(0, 0))
    received = msgspec.json.decode(msgspec.json.encode(failure), type=WorkerFailed)

    assert received == failure
    assert failure.blame == "job"
    assert failure.raised is not None
    assert told in failure.raised.message
    assert told in failure.traceback
