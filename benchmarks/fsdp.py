"""Measures what copies in memory cost an FSDP2 loop that sends them over its own links.

Two ranks keep checkpoints in each other's memory after every iteration (MemoryCheckpointer), as if
each were a node of its own. All their traffic goes over one link of limited bandwidth: the script
runs itself in a network namespace in which tc limits the loopback device. Layers sleep instead of
computing, so that copying has the machine's cores to itself. Turns of iterations alternate: without
copies, with copies that are sent at once, with copies between the loop's collectives, and without
copies again. The A/A ratio compares the two without. The script prints the measured idle spans of
an iteration, and the share of iterations in which a version began.

The goal is that the median with copies between collectives is within 1% of that without copies.

Source: Gemini (SOSP '23), figure 16, whose jobs are data parallel with ZeRO-3.
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from planaria.core.copies import IdleSpan
from planaria.torchrun.memory_checkpointer import MemoryCheckpointer

GOAL: Final = 0.01
WIDTH, NUM_BLOCKS = 1024, 4
FORWARD_S, BACKWARD_S = 0.05, 0.1
WATCHED: Final = 6  # Iterations in which idle spans are measured.
INSIDE: Final = "PLANARIA_LIMITED"
MODES: Final = ("none", "at once", "interleaved", "none again")

Seconds = dict[str, list[float]]
Spans = dict[int, tuple[IdleSpan, ...]]


def main() -> int:
    """Prints a line for each mode; returns 1 if the goal is missed, 2 if no link can be limited."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabits", type=float, default=1.0, help="a second, of the link")
    parser.add_argument("--iterations", type=int, default=10, help="of each turn")
    parser.add_argument("--rounds", type=int, default=2, help="of turns of all modes")
    arguments = parser.parse_args()
    if INSIDE not in os.environ:
        return _in_own_network(arguments.gigabits)
    seconds, shares, spans = _run(arguments.rounds, arguments.iterations)
    return 0 if _report(seconds, shares, spans, arguments.gigabits) else 1


def _in_own_network(gigabits: float) -> int:
    """Runs this script again in a network namespace whose loopback is the limited link."""
    missing = [name for name in ("unshare", "tc", "ip") if shutil.which(name) is None]
    limit = f"tc qdisc add dev lo root tbf rate {gigabits}gbit burst 256kb latency 20ms"
    probe = f"ip link set lo up && {limit}"
    enter = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c"]
    if missing or subprocess.run([*enter, probe], capture_output=True, check=False).returncode:
        print(f"no link can be limited here ({', '.join(missing) or 'not allowed'}): skipped")
        return 2
    again = f'{probe} && exec "$0" "$@"'
    command = [*enter, again, sys.executable, *sys.argv]
    inside = {INSIDE: "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, env=os.environ | inside, check=False).returncode


def _run(rounds: int, iterations: int) -> tuple[Seconds, Mapping[str, float], Spans]:
    """The measurements of rank 0: seconds of iterations by mode, the share of iterations in which a
    version began by mode, and idle spans by target."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="planaria-") as directory:
        ours, theirs = context.Pipe()
        processes = [
            context.Process(target=_rank, args=(rank, theirs, directory, rounds, iterations))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        theirs.close()
        found: tuple[Seconds, Mapping[str, float], Spans] = ours.recv()
        for process in processes:
            process.join()
    return found


class _Sleep(torch.autograd.Function):
    """Sleeps as long as a layer would compute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        del ctx
        time.sleep(BACKWARD_S)
        return gradients[0]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = _Sleep.apply(x)  # type: ignore[no-untyped-call]
        found: Tensor = slept + self.linear(slept)
        return found


def _rank(rank: int, answers: Connection, directory: str, rounds: int, iterations: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2
    )
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(*(_Block() for _ in range(NUM_BLOCKS)))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    savers = {
        mode: MemoryCheckpointer(
            model,
            optimizer,
            directory=f"{directory}/{rank}/{mode}",
            buffer_bytes=8 << 20,
            is_interleaved=mode == "interleaved",
            profile_iterations=WATCHED,
        )
        for mode in ("at once", "interleaved")
    }
    seconds: Seconds = {mode: [] for mode in MODES}
    begun: dict[str, list[bool]] = {mode: [] for mode in MODES}
    number = 0
    # The first turn has enough iterations to measure the idle spans.
    first = dict.fromkeys(MODES, 1) | {"interleaved": 2 * WATCHED + 3}
    for turn in range(rounds + 1):
        for mode in MODES:
            for index in range(iterations if turn else first[mode]):
                dist.barrier()
                begun_s = time.monotonic()
                _iterate(model, optimizer)
                begins = False
                if mode in savers:
                    number += 1
                    begins = savers[mode].save(number)
                if turn and index:  # Copies of the previous mode may disturb the first iteration.
                    seconds[mode].append(time.monotonic() - begun_s)
                    begun[mode].append(begins)
            if mode in savers:
                savers[mode].wait_ended()
    if rank == 0:
        shares = {mode: statistics.fmean(those) for mode, those in begun.items()}
        answers.send((seconds, shares, savers["interleaved"].idle_spans))
    for saver in savers.values():
        saver.close()
    dist.destroy_process_group()


def _iterate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = model(torch.ones(2, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _report(seconds: Seconds, shares: Mapping[str, float], spans: Spans, gigabits: float) -> bool:
    print(f"a link of {gigabits:g} Gb/s; idle spans of rank 0, as measured:")
    for target, those in spans.items():
        for span in those:
            after = f"{span.after} collectives + {1e3 * span.offset_s:.0f} ms"
            print(f"    to rank {target}: after {after:<26} {1e3 * span.lasts_s:7.1f} ms")
    plain_s = statistics.median(seconds["none"])
    print(f"{'copies':<12} {'median':>9} {'cost':>7} {'least':>9} {'most':>9} {'versions':>9}")
    for mode, measured in seconds.items():
        median_s = statistics.median(measured)
        cost = 100 * (median_s / plain_s - 1.0)
        ends = f"{min(measured):8.3f}s {max(measured):8.3f}s"
        print(f"{mode:<12} {median_s:8.3f}s {cost:+6.2f}% {ends} {shares[mode]:9.2f}")
    both_s = statistics.median([*seconds["none"], *seconds["none again"]])
    cost = statistics.median(seconds["interleaved"]) / both_s - 1.0
    is_met = cost <= GOAL
    print(f"interleaved {100 * cost:+.2f}%: {'met' if is_met else 'MISSED'} the goal of {GOAL:.0%}")
    return is_met


if __name__ == "__main__":
    sys.exit(main())
