"""A process of a fork server that writes to a store until it is killed.

Its payload is the JSON list [directory, mode, number], its descriptors its input and output. It
writes to four keys in turn, always the revision that the write will have, and prints it once
it is acknowledged. With the name of a call of `os` as its mode it kills itself in
the middle of that call's NUMBERth use after the store was opened: what `write` had to write is
half written then, and the others are not done at all. In the mode "forking" it has a child that
outlives it until its input ends; in the mode "ready" it writes NUMBER times and waits.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planaria.nodes.head.journal import open_store

REWRITE_BYTES = 600


def fatal(call: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The call, which kills this process in its given use."""
    num_left = number

    def called(*arguments: Any) -> Any:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            if call.__name__ == "write":
                call(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)

    return called


async def write(directory: Path, mode: str, number: int) -> None:
    async with open_store(directory, now_s=time.monotonic, rewrite_bytes=REWRITE_BYTES) as store:
        if mode == "forking" and os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
        if hasattr(os, mode):
            setattr(os, mode, fatal(getattr(os, mode), number))
        is_endless = hasattr(os, mode) or mode == "endless"
        first = (await store.range("")).revision + 1
        for revision in range(first, first + (10**6 if is_endless else number)):
            assert revision == await store.put(f"key/{revision % 4}", b"%d" % revision)
            sys.stdout.write(f"{revision}\n")
            sys.stdout.flush()
        sys.stdin.read()


def main(payload: bytes, input_fd: int, output_fd: int) -> None:
    """Writes as the payload says."""
    os.dup2(input_fd, 0)
    os.dup2(output_fd, 1)
    os.close(input_fd)
    os.close(output_fd)
    directory, mode, number = json.loads(payload)
    asyncio.run(write(Path(directory), mode, number))
