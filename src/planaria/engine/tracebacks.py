"""What the user's own code raised, as its author would see it: without the frames above it.

The frames of planaria, and those of torch that only lead from there into the user's module, say
nothing about the mistake. Where planaria itself raised, everything is kept.
"""

import traceback
from pathlib import Path

import torch

_OURS = str(Path(__file__).parent.parent)
_CALLING = str(Path(torch.__file__).parent / "nn" / "modules" / "module.py")


def user_traceback(error: BaseException) -> str:
    """The formatted traceback of an exception, and of those that led to it."""
    whole = traceback.TracebackException.from_exception(error)
    link: traceback.TracebackException | None = whole
    while link is not None:
        _shorten(link.stack)
        link = link.__cause__ or link.__context__
    return "".join(whole.format())


def _shorten(stack: traceback.StackSummary) -> None:
    """Drops the frames up to the last of ours, unless that one raised, and torch's after it."""
    ours = [index for index, frame in enumerate(stack) if frame.filename.startswith(_OURS)]
    first = ours[-1] + 1 if ours else 0
    if first == len(stack):
        return
    while first < len(stack) - 1 and stack[first].filename == _CALLING:
        first += 1
    del stack[:first]
