"""Tracebacks of exceptions in the user's code, without the frames that called that code.

The frames of planaria, and those of torch that only lead from planaria into the user's module, say
nothing about the mistake. If planaria itself raised the exception, all frames are kept.
"""

import traceback
from pathlib import Path

import torch

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
    text = "".join(whole.format())
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
