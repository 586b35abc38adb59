"""Connections to the first of several heads that answers.

All addresses are tried at nearly the same time, so one at which nothing answers costs no more time
than one that answers. But only one head is told who connects: two addresses may be those of one
head, and to a coordinator a connection that closes is a lost node.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

from planaria.errors import AuthenticationError, StrangerError
from planaria.transport.acceptor import Purpose, Streams, connect
from planaria.transport.credentials import Credentials
from planaria.transport.sockets import Address, Resolve, endpoints_by_thread

_HEAD_START_S: Final = 0.25  # Of an address before the next one, as by RFC 8305.


async def connect_first(
    addresses: Sequence[Address],
    purpose: Purpose,
    credentials: Credentials,
    *,
    timeout_s: float,
    identity: int = 0,
    key: bytes = b"",
    resolve: Resolve = endpoints_by_thread,
) -> tuple[Address, Streams]:
    """The address of the first head that has proved itself, and streams to it; see `connect`.

    Args:
        addresses: addresses of heads, the most probable first.
        timeout_s: time for all of them; each has at least half of it.

    Raises:
        StrangerError: something that is no head answers at each address.
        AuthenticationError: something answers at each address, and no head of this token file.
        ConnectionError: no head can be reached, and not each address has refused for good.
    """
    loop = asyncio.get_running_loop()
    end_s, turn = loop.time() + timeout_s, asyncio.Lock() if len(addresses) > 1 else None
    begin = partial(connect, identity=identity, key=key, turn=turn, resolve=resolve)
    head_start_s = min(_HEAD_START_S, timeout_s / (2 * len(addresses)))
    waiting = list(enumerate(addresses))
    errors: dict[int, AuthenticationError | OSError] = {}  # Why each address did not do.
    tries: dict[asyncio.Task[Streams], int] = {}
    try:
        while waiting or tries:
            if waiting:
                left_s = end_s - loop.time()
                index, address = waiting.pop(0)
                work = begin(address, purpose, credentials, timeout_s=left_s)
                tries[asyncio.create_task(work)] = index
            pause_s = head_start_s if waiting else None
            done, _ = await asyncio.wait(
                tries, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                index = tries.pop(task)
                try:
                    return addresses[index], task.result()
                except (AuthenticationError, OSError) as error:
                    errors[index] = error
    finally:
        await _end(tries)
    problems = [errors[index] for index in sorted(errors)]  # The same text, whichever failed first.
    text = "; and ".join(map(str, problems))
    if all(isinstance(problem, StrangerError) for problem in problems):
        raise StrangerError(text)
    if all(isinstance(problem, AuthenticationError) for problem in problems):
        raise AuthenticationError(text)
    raise ConnectionError(text)


async def _end(tries: dict[asyncio.Task[Streams], int]) -> None:
    """Ends the tries that are under way, and closes a connection that nobody takes any more."""
    for task in tries:
        task.cancel()
    for result in await asyncio.gather(*tries, return_exceptions=True):
        if not isinstance(result, BaseException):
            result[1].transport.abort()
