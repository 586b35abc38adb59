"""Ranks in processes of their own, linked over a network that is limited."""

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from helpers.limited_network import TIMEOUT_S, LimitedNetwork
from planaria.nodes.forkserver import ForkServer
from planaria.transport.links import Address, Links

SEARCH_PATH = (str(Path(__file__).parents[1]),)
OURS = ("helpers.ranks", "helpers.exchanging", "helpers.reducing")
PRELOAD = ("torch", "torch._dynamo", "torch.optim", *OURS)

_TOKEN = b"the job's token"

Joined = tuple[Links, dict[int, Address], Callable[[str], None]]


def results(
    server: ForkServer,
    target: str,
    orders: Mapping[int, bytes],
    *,
    bytes_per_s: float,
    late_s: Mapping[int, float] | None = None,
) -> dict[int, str]:
    """What `target` tells when it is called with its order, by rank.

    Args:
        server: has this directory on its path.
        late_s: by rank, how long links from lower ranks to it take to come about.
    """
    with ExitStack() as stack:
        talks: dict[int, TextIO] = {}
        for rank, order in orders.items():
            ours, theirs = socket.socketpair()
            ours.settimeout(TIMEOUT_S)
            server.spawn(target, order, (theirs.fileno(),))
            theirs.close()
            talks[rank] = stack.enter_context(stack.enter_context(ours).makefile("rw"))
        addresses: dict[int, Address] = {}
        for rank, talk in talks.items():
            host, port = json.loads(talk.readline())
            addresses[rank] = (host, port)
        network = LimitedNetwork(addresses, bytes_per_s=bytes_per_s, late_s=late_s or {})
        stack.callback(network.close)
        for rank, talk in talks.items():
            print(json.dumps(network.addresses_for(rank)), file=talk, flush=True)
        found = {rank: talk.readline() for rank, talk in talks.items()}
        assert all(found.values()), [rank for rank, line in found.items() if not line]
        return found


@contextmanager
def join_ranks(rank: int, talk_fd: int) -> Iterator[Joined]:
    """A rank's links, where all ranks are found once all are there, and what tells the result.

    At the end it is waited until every rank has told its own: till then others may need this one.
    """
    links = Links(rank, token=_TOKEN)
    with socket.socket(fileno=talk_fd) as sock, sock.makefile("rw") as talk:
        print(json.dumps(links.address), file=talk, flush=True)
        places = json.loads(talk.readline())
        addresses = {int(other): (host, port) for other, (host, port) in places.items()}
        yield links, addresses, lambda result: print(result, file=talk, flush=True)
        talk.readline()
    links.close()
