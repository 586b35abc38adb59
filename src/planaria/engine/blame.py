"""Decides whether an exception in a worker is the fault of the job's own code or of the node.

A mistake in a model or a data set raises on every node and ends the job. A fault of the node
strikes that node alone: its memory is full, its devices or their libraries fail, or it cannot read
what other nodes can read. An exception that was raised from such a fault, or while one was being
handled, counts as a fault of the node too. For the job's own mistakes it makes the text that the
user reads.
"""

import errno
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import torch
import torch.distributed as dist

from planaria.core.messages import Blame, Raised, WorkerFailed
from planaria.core.specs import NodeSpec
from planaria.errors import ConfigError, DivergedError

# Torch raises these as plain RuntimeErrors.
_NO_MEMORY: Final = ("can't allocate memory", "out of memory")
_DEVICE_FAULTS: Final = ("CUDA error", "cuDNN error", "CUBLAS_STATUS", "NCCL error", "HIP error")
_MESSAGE_MAX: Final = 500


def blame_of(error: BaseException) -> Blame:
    """The blame for an exception: "memory" or "node" (faults of the node), or "job"."""
    for link in _chain(error):
        if is_of_memory(link):
            return "memory"
        if isinstance(link, OSError | torch.AcceleratorError | dist.DistError):
            return "node"
        if isinstance(link, RuntimeError) and any(text in text_of(link) for text in _DEVICE_FAULTS):
            return "node"
    return "job"


def failure_of(
    error: BaseException,
    spec: NodeSpec,
    *,
    epoch: int,
    layers: tuple[int, int],
    is_noticed: bool = False,
) -> WorkerFailed:
    """The message that reports an exception in this process to the coordinator.

    Args:
        layers: first and end of the layers that were being computed; both 0: none.
        is_noticed: whether the node will be taken away. What the job's code says then may come of
            that, and is no mistake of the job; that training diverges is found by all ranks.
    """
    has_diverged, blame = isinstance(error, DivergedError), blame_of(error)
    if is_noticed and blame == "job" and not has_diverged:
        blame = "node"
    first_layer, end_layer = layers
    message = " ".join(text_of(error).split())[:_MESSAGE_MAX]
    return WorkerFailed(
        node=spec.node,
        rank=spec.rank,
        traceback=user_traceback(error),
        pid=os.getpid(),
        epoch=epoch,
        blame=blame,
        raised=Raised(
            error=_name(error), message=message, first_layer=first_layer, end_layer=end_layer
        ),
        mistake=mistake_of(error) if isinstance(error, ConfigError) else None,
        has_diverged=has_diverged,
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, then those from which, or during whose handling, it was raised."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def is_of_memory(error: BaseException) -> bool:
    """Whether the exception itself, regardless of its causes, says that memory is full."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    is_named = isinstance(error, RuntimeError) and any(
        text in text_of(error) for text in _NO_MEMORY
    )
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or is_named


def _name(error: BaseException) -> str:
    """The type's name as users write it: with its module, unless it is a builtin."""
    kind = type(error)
    is_builtin = kind.__module__ == "builtins"
    return kind.__qualname__ if is_builtin else f"{kind.__module__}.{kind.__qualname__}"


def mistake_of(error: ConfigError) -> tuple[str, str, str]:
    """Field, value and remedy of a user's mistake; the value is JSON, of its text if need be."""
    try:
        value = msgspec.json.encode(error.value)
    except (TypeError, UnicodeEncodeError):
        value = msgspec.json.encode(_sendable(str(error.value)))
    return _sendable(error.field), value.decode(), _sendable(error.remedy)


def text_of(error: BaseException) -> str:
    """The exception's own text, as a message can carry it; some raise when they are asked."""
    try:
        return _sendable(str(error))
    except Exception:
        return "<exception str() failed>"  # As the module traceback has it.


def _sendable(text: str) -> str:
    """The text with escapes for what UTF-8 cannot encode: parts of a file name in another code."""
    return text.encode("utf-8", "backslashreplace").decode()


# -- tracebacks of exceptions in the user's code, without the frames that called that code ---------
# The frames of planaria, and those of torch that only lead from it into the user's module, say
# nothing about the mistake. If planaria itself raised the exception, all frames are kept.

_OURS = str(Path(__file__).parent.parent)
_CHARACTERS_MAX = 1 << 20  # An exception's message may be the text of a whole tensor.
_CALLING = str(Path(torch.__file__).parent / "nn" / "modules" / "module.py")


def user_traceback(error: BaseException) -> str:
    """The formatted traceback of an exception and of the exceptions that led to it.

    Its middle is left out if it is longer than a message to the coordinator may be.
    """
    whole = traceback.TracebackException.from_exception(error)
    link: traceback.TracebackException | None = whole
    while link is not None:
        _shorten(link.stack)
        link = link.__cause__ or link.__context__
    text = _sendable("".join(whole.format()))
    if len(text) <= _CHARACTERS_MAX:
        return text
    half = _CHARACTERS_MAX // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters are left out ...\n{text[-half:]}"


def _shorten(stack: traceback.StackSummary) -> None:
    """Drops the frames up to the last one of planaria, and torch's module frames after that.

    Drops nothing if the last frame is planaria's.
    """
    ours = [index for index, frame in enumerate(stack) if frame.filename.startswith(_OURS)]
    first = ours[-1] + 1 if ours else 0
    if first == len(stack):
        return
    while first < len(stack) - 1 and stack[first].filename == _CALLING:
        first += 1
    del stack[:first]
