"""Processes that the session's fork server forks, so that none imports torch, as ranks of it do."""

import json
import os
import runpy
import select
import socket
import sys
import time
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from helpers.command import wait_for
from planaria.nodes.forkserver import ForkServer

TIMEOUT_S = 110.0
NUM_RANKS = 2


def told_by_ranks(
    server: ForkServer,
    target: str,
    directory: Path,
    *,
    killed: Collection[int] = (),
    num_ranks: int = NUM_RANKS,
    **more: object,
) -> list[Any]:
    """What the ranks tell, in their order; all of them end well but for those that are killed.

    Args:
        target: is called with an order and a descriptor, see `order` and `tell`.
        killed: ranks that kill themselves, and tell nothing.
        more: of the order.
    """
    pids, answers = [], []
    with ExitStack() as stack:
        for number in range(num_ranks):
            ours, theirs = socket.socketpair()
            answers.append(stack.enter_context(ours).makefile())
            ours.settimeout(TIMEOUT_S)
            payload = json.dumps({"number": number, "directory": str(directory), **more})
            with theirs:
                pids.append(server.spawn(target, payload.encode(), (theirs.fileno(),)))
        told = [answer.read() for answer in answers]
    statuses: dict[int, int] = {}

    def have_ended() -> bool:
        statuses.update(server.exits())
        return statuses.keys() >= {*pids}

    wait_for(have_ended, what="all ranks have ended")
    ends = [-9 if number in killed else 0 for number in range(num_ranks)]
    assert [statuses[pid] for pid in pids] == ends  # Or they have printed why.
    return [json.loads(text) if text else None for text in told]


def wait_exit(server: ForkServer, pid: int) -> int:
    """The exit status of a child of the fork server."""
    end_s = time.monotonic() + TIMEOUT_S
    while (left_s := end_s - time.monotonic()) > 0:
        statuses = [status for child, status in server.exits() if child == pid]
        if statuses:
            return statuses[0]
        select.select([server], [], [], left_s)
    raise AssertionError("the process does not end")


def order(payload: bytes) -> Any:
    """What a rank is called for: its `number`, a `directory` that all have, and more."""
    return json.loads(payload)


def tell(answer_fd: int, answer: object) -> None:
    """Tells the test something that JSON can hold."""
    with socket.socket(fileno=answer_fd) as sock:
        sock.sendall(json.dumps(answer).encode())


def run_script(payload: bytes, answer_fd: int) -> None:
    """Runs a `script` with `words` in a rank that is told its place as torchrun tells it."""
    called = order(payload)
    number = str(called["number"])
    os.environ |= {
        "RANK": number,
        "LOCAL_RANK": number,
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(NUM_RANKS),
        "LOCAL_WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(called["port"]),
    }
    sys.argv = [called["script"], *called["words"]]
    runpy.run_path(called["script"], run_name="__main__")
    tell(answer_fd, number)
