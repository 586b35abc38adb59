"""Waiting in tests that run on an event loop: for a condition, for what is ready, for events."""

import asyncio
import select
from collections.abc import Callable

from planaria.store.store import Event, Store

TIMEOUT_S = 20.0


async def wait_until(is_so: Callable[[], bool]) -> None:
    """Lets every task go on until the condition holds; TimeoutError if it does not."""
    async with asyncio.timeout(TIMEOUT_S):
        while not is_so():
            await asyncio.sleep(0)


async def settle() -> None:
    """Lets every task go on until it waits for something that is not ready."""
    for _ in range(20):
        await asyncio.sleep(0)


def is_readable(fd: int) -> bool:
    """Whether a descriptor can be read without waiting."""
    return bool(select.select([fd], [], [], 0)[0])


async def first_events(store: Store, *, first_revision: int, num: int) -> list[Event]:
    """The first events of a watch of everything."""
    found: list[Event] = []
    async for event in store.watch("", first_revision=first_revision):
        found.append(event)
        if len(found) == num:
            break
    return found
