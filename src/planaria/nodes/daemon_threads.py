"""Calls that may block for ever, on a file system that hangs, without holding up the event loop."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

Answer = TypeVar("Answer")


async def answer_of_thread(function: Callable[[], Answer], *, name: str) -> Answer:
    """What a function returns or raises, called in a thread of its own.

    The thread is left behind if this is cancelled; the process does not wait for it at its end.

    Raises:
        OSError: no thread can be started, or the function raised it.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Answer] = loop.create_future()

    def finish(act: Callable[[], None]) -> None:
        if not answer.done():  # Else it was cancelled.
            act()

    def call() -> None:
        try:
            act = partial(answer.set_result, function())
        except Exception as error:
            act = partial(answer.set_exception, error)
        with suppress(RuntimeError):  # The loop has been closed meanwhile.
            loop.call_soon_threadsafe(finish, act)

    try:
        threading.Thread(target=call, name=name, daemon=True).start()
    except RuntimeError as error:
        raise OSError(f"no thread can be started: {error}") from error
    return await answer
