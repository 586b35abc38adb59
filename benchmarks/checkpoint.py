"""Compares checkpoints in memory with others: how long training stalls, and how fast copies are.

Stall: a process with 512 MiB of state, on all cores of this machine, saves it in turn with each of

    plain copy       parameter by parameter into allocated memory, with the same threads
    planaria         MemoryCheckpointer.save, then the wait before the next optimizer step
    lm-resiliency    save_tensors, then maybe_wait, which is its wait before the next step
    DCP async_save   until it returns; torch copies the state before that
    torch.save       to the same disk, whole

Only the time in which training waits is counted; each save ends before the next one begins. The
first save, which allocates memory, has a column of its own. Ratios are to the median of all plain
copies, at the beginning and at the end of rounds; the difference of those two is the A/A ratio.

Streaming and retrieval: a process sends 512 MiB to another in turn through a plain socket, as a
copy that is to be kept (hashed at both ends, acknowledged piece by piece), and as a copy that goes
back to its node. All receive into memory whose pages are allocated. Both ends share this machine,
so hashes have a larger share here than where the network is slower.

Exchange: two ranks send each other 512 MiB of state at once, with MemoryCheckpointer and with
lm-resiliency; the time ends when both have the other's state.

Goals: a stall of at most 1.1 times a plain copy; 80% of a socket's rate. If lm-resiliency is not
installed, it is skipped with a message.
"""

import argparse
import importlib.util
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from planaria.checkpoint.memory.arena import Arena
from planaria.checkpoint.memory.arena_file import arena_fd
from planaria.checkpoint.memory.filling import HostCopy, fill_alone, no_device
from planaria.checkpoint.memory.retrieval import receive_copy, send_copy
from planaria.checkpoint.memory.stream import Copier, CopyPlan
from planaria.checkpoint.memory.turns import AtOnce, Buffers, FlowControl
from planaria.core.copies import Label, LayerCopy
from planaria.torchrun.memory_checkpointer import MemoryCheckpointer
from planaria.transport.links import Channel, Links, Tag

STALL_GOAL: Final = 1.1
RATE_GOAL: Final = 0.8
NUM_BYTES: Final = 512 << 20
NUM_TENSORS: Final = 32
TIMEOUT_S: Final = 120.0
PEER: Final = "lm_resiliency"
_BUFFERS: Final = Buffers(64 << 20, 4)


def main() -> int:
    """Prints a table for each part; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="of all ways, the first left out")
    arguments = parser.parse_args()
    if importlib.util.find_spec(PEER) is None:
        print(f"{PEER} is not installed, and left out")
    is_met = _report_stalls(_in_processes(_stalls, 1, arguments.rounds)[0])
    is_met &= _report_rates(_in_processes(_streamed, 2, arguments.rounds)[0])
    _report_exchanges(_in_processes(_exchanged, 2, arguments.rounds)[0])
    return 0 if is_met else 1


Times = dict[str, list[float]]


def _in_processes(function: Callable[[str, int], Times], number: int, rounds: int) -> list[Times]:
    """The times that each rank measures."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="planaria-") as directory:
        ends = [context.Pipe() for _ in range(number)]
        processes = [
            context.Process(target=_rank, args=(function, rank, number, theirs, rounds, directory))
            for rank, (_, theirs) in enumerate(ends)
        ]
        for process in processes:
            process.start()
        for _, theirs in ends:
            theirs.close()  # So a rank that dies ends the wait for its answer.
        found = [ours.recv() for ours, _ in ends]
        for process in processes:
            process.join()
    return found


def _rank(
    function: Callable[[str, int], Times],
    rank: int,
    number: int,
    answers: Connection,
    rounds: int,
    directory: str,
) -> None:
    os.chdir(directory)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=number)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // number))
    answers.send(function(directory, rounds))
    dist.destroy_process_group()


# -- stall ----------------------------------------------------------------------------------------


class _State(nn.Module):
    """512 MiB of parameters on each rank."""

    def __init__(self, num_ranks: int = 1) -> None:
        super().__init__()
        size = NUM_BYTES * num_ranks // NUM_TENSORS // 4
        tensors = (torch.rand(num_ranks, size // num_ranks) for _ in range(NUM_TENSORS))
        self.parts = nn.ParameterList(tensors)


def _stalls(directory: str, rounds: int) -> Times:
    """The seconds that training waits in each round, by kind of save."""
    model = _State()
    tensors = [parameter.detach() for parameter in model.parts]
    room = [torch.zeros_like(tensor) for tensor in tensors]
    with _ours(model, directory) as save, _theirs(tensors, directory) as peer:
        ways: dict[str, Callable[[int], float]] = {
            "plain copy": lambda _: _timed(lambda: _copy(room, tensors)),
            "planaria": save,
            **({"lm-resiliency": peer} if peer else {}),
            "DCP async_save": lambda n: _dcp(model, f"{directory}/dcp-{n}"),
            "torch.save": lambda _: _timed(
                lambda: torch.save(model.state_dict(), f"{directory}/state")
            ),
            "plain copy again": lambda _: _timed(lambda: _copy(room, tensors)),
        }
        return _by_turns(ways, rounds)


def _by_turns(ways: Mapping[str, Callable[[int], float]], rounds: int) -> Times:
    times: Times = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            times[name].append(way(number + 1))
    return times


def _timed(call: Callable[[], Any], *, then: Callable[[], Any] = lambda: None) -> float:
    """The seconds of a call, without what follows it."""
    begun_s = time.perf_counter()
    call()
    seconds = time.perf_counter() - begun_s
    then()
    return seconds


def _copy(room: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    for into, tensor in zip(room, tensors, strict=True):
        into.copy_(tensor)


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of a parameter."""
    found = parameter.detach()
    return found.to_local() if isinstance(found, DTensor) else found


@contextmanager
def _ours(model: nn.Module, directory: str) -> Iterator[Callable[[int], float]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = MemoryCheckpointer(model, optimizer, directory=f"{directory}/{dist.get_rank()}")

    first = next(_local(parameter) for parameter in model.parameters())

    def save(number: int) -> None:
        first.view(-1)[0] = number  # Unchanged layers would not be sent again.
        assert checkpointer.save(number)
        checkpointer.wait_copied()

    try:
        yield lambda number: _timed(partial(save, number), then=checkpointer.wait_ended)
    finally:
        checkpointer.close()


@contextmanager
def _theirs(tensors: list[torch.Tensor], directory: str) -> Iterator[Callable[[int], float] | None]:
    """The saves of lm-resiliency; None if it is not installed."""
    if importlib.util.find_spec(PEER) is None:
        yield None
        return
    checkpointing = importlib.import_module(f"{PEER}.checkpointing")
    config = checkpointing.InMemoryCkptConfig(
        interval=1, disk_flush_interval=0, disk_folder=f"{directory}/peer", pin_memory=False
    )
    manager = checkpointing.InMemoryCheckpointManager(config)

    def save(number: int) -> None:
        manager.save_tensors(tensors, number)
        manager.maybe_wait()

    try:
        yield lambda number: _timed(partial(save, number), then=manager.finalize_replication)
    finally:
        manager.close()


def _dcp(model: nn.Module, directory: str) -> float:
    begun_s = time.perf_counter()
    saving = async_save(model.state_dict(), checkpoint_id=directory)
    stall_s = time.perf_counter() - begun_s
    assert isinstance(saving, Future)
    saving.result()
    for path in Path(directory).iterdir():
        path.unlink()
    return stall_s


def _report_stalls(times: Times) -> bool:
    plain_s = statistics.median([*times["plain copy"][1:], *times["plain copy again"][1:]])
    print(f"{'512 MiB, what training waits':<28} {'first':>9} {'median':>9} {'of a copy':>9}")
    ratios = {}
    for name, (first_s, *later_s) in times.items():
        median_s = statistics.median(later_s)
        ratios[name] = median_s / plain_s
        print(f"{name:<28} {1e3 * first_s:7.1f}ms {1e3 * median_s:7.1f}ms {ratios[name]:9.2f}")
    is_met = ratios["planaria"] <= STALL_GOAL
    print(f"stall: {_verdict(is_met)} the goal of {STALL_GOAL} plain copies")
    return is_met


# -- streaming and retrieval ----------------------------------------------------------------------


def _streamed(_directory: str, rounds: int) -> Times:
    """The seconds of 512 MiB from rank 0 to rank 1 in each round, by means of transport."""
    rank = dist.get_rank()
    content = np.random.default_rng(rank).integers(0, 256, NUM_BYTES, dtype=np.uint8)
    room = np.ones(NUM_BYTES + (1 << 20), dtype=np.uint8)  # Ones, so that pages are allocated.
    links = _linked(rank)
    arena = Arena(arena_fd())
    copies = (LayerCopy(0, 0, (1,)),)
    copier = Copier(
        links,
        CopyPlan(
            own=(0,) if rank == 0 else (), copies=copies, since=1, epoch=0, complete_label=None
        ),
        host_copy=HostCopy(arena, fill_alone, lambda _: 0, no_device),
        flow=FlowControl(_BUFFERS, AtOnce(), TIMEOUT_S),
        on_failure=print,
    )

    def stream(number: int) -> float:
        content[0] = number  # An unchanged layer would not be sent again.
        dist.barrier()
        copier.begin(number, {0: {"state": content}} if rank == 0 else {})
        if rank == 0:
            copier.wait_copied(0)
        seconds = _timed(copier.wait_ended)
        copier.complete()
        return seconds

    def retrieve(number: int) -> float:
        label = Label(1, 0, number)
        version = arena.read(0, label)  # Rank 1 sends its copy as if rank 0 had lost the layer.
        dist.barrier()
        begun_s = time.perf_counter()
        if rank:
            send_copy(links, 0, version)
            links.receive(0, Tag(Channel.AGE, number, 0), timeout_s=TIMEOUT_S)
        else:
            state = receive_copy(links, 1, 0, label, timeout_s=TIMEOUT_S, memory=room)
            links.send(1, Tag(Channel.AGE, number, 0))
            assert state["state"].nbytes == NUM_BYTES
        return time.perf_counter() - begun_s

    with _socket_to_rank_1(rank) as plain:
        ways = {
            "a socket": lambda _: _through(plain, content, rank),
            "streaming": stream,
            "retrieval": retrieve,
            "a socket again": lambda _: _through(plain, content, rank),
        }
        times = _by_turns(ways, rounds)
    links.abort("it is over", first_epoch=1)
    copier.close()
    links.close()
    return times


def _linked(rank: int) -> Links:
    links = Links(rank, token=b"a benchmark's")
    told: list[Any] = [None] * 2
    dist.all_gather_object(told, links.address)
    links.begin(0, addresses=dict(enumerate(told)), peers={1 - rank}, timeout_s=TIMEOUT_S)
    return links


@contextmanager
def _socket_to_rank_1(rank: int) -> Iterator[socket.socket]:
    """A plain connection between the two ranks."""
    told: list[Any] = [None]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        told = [listener.getsockname()]
        dist.broadcast_object_list(told, src=1)
        sock = listener.accept()[0] if rank else socket.create_connection(told[0])
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with sock:
        yield sock


def _through(sock: socket.socket, content: np.ndarray, rank: int) -> float:
    """The seconds of the content from rank 0 to rank 1, and of a byte back."""
    dist.barrier()
    begun_s = time.perf_counter()
    if rank == 0:
        sock.sendall(content.data)
        sock.recv(1)
    else:
        view = content.data
        while view:
            view = view[sock.recv_into(view) :]
        sock.sendall(b".")
    return time.perf_counter() - begun_s


def _report_rates(times: Times) -> bool:
    plain_s = statistics.median(times["a socket"][1:])
    print(f"\n{'512 MiB, to another process':<28} {'median':>9} {'rate':>10} {'of a socket':>11}")
    shares = {}
    for name, (_, *later_s) in times.items():
        median_s = statistics.median(later_s)
        shares[name] = plain_s / median_s
        rate = NUM_BYTES / median_s / 1e9
        print(f"{name:<28} {1e3 * median_s:7.1f}ms {rate:6.2f} GB/s {shares[name]:11.2f}")
    is_met = min(shares["streaming"], shares["retrieval"]) >= RATE_GOAL
    print(f"rates: {_verdict(is_met)} the goal of {RATE_GOAL:.0%} of a socket's")
    return is_met


# -- exchange -------------------------------------------------------------------------------------


def _exchanged(directory: str, rounds: int) -> Times:
    """The seconds until two ranks have each other's state in each round, by checkpointer."""
    model = _State(num_ranks=2)
    fully_shard(model)
    local = [_local(parameter) for parameter in model.parts]
    with _ours(model, directory) as save, _theirs(local, directory) as peer:
        ways = {"planaria": save, **({"lm-resiliency": peer} if peer else {})}
        return _by_turns({name: _whole(way) for name, way in ways.items()}, rounds)


def _whole(way: Callable[[int], float]) -> Callable[[int], float]:
    """A function that measures a save until it has finished on all ranks."""

    def timed(number: int) -> float:
        dist.barrier()
        begun_s = time.perf_counter()
        way(number)
        dist.barrier()
        return time.perf_counter() - begun_s

    return timed


def _report_exchanges(times: Times) -> None:
    print(f"\n{'512 MiB each way, until kept':<28} {'first':>9} {'median':>9}")
    for name, (first_s, *later_s) in times.items():
        print(f"{name:<28} {1e3 * first_s:7.1f}ms {1e3 * statistics.median(later_s):7.1f}ms")


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


if __name__ == "__main__":
    sys.exit(main())
