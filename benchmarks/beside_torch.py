"""Measures what the engine costs beside torch: plain loop, DDP and 1F1B of torch's pipelining.

All train the small GPT-2 of peers/small_gpt.py, one thread a rank. Each rank is a process that
holds a rank of planaria and one of torch. They train iterations in turn, each behind a barrier, in
an order drawn anew for each round: planaria, torch, and torch once more for the A/A ratio. So what
else the machine does meets all alike.

    costs       CPU seconds of a dispatched action and of a hop over a link (beside/costs.py)
    one         one rank beside the plain loop
    data        two ranks beside DDP that accumulates four microbatches
    pipeline    two stages beside Schedule1F1B
    four, six, eight    so many ranks beside DDP of two microbatches

A ratio is the median over rounds of planaria's time in a round over torch's, with its 95% interval.
It is of seconds (from the first rank's begin to the last one's end) and of CPU seconds (of all
threads of all ranks); on a busy machine, and with more ranks than processors, the CPU seconds say
more. Goals, for the end of the interval: 1.03 in fast mode (`training.deterministic = false`) and
1.10 in deterministic mode; for four and eight ranks 1.05 of CPU seconds in fast mode. `--profile`
prints where rank 0's main thread spends its time in planaria.
"""

import argparse
import cProfile
import math
import multiprocessing
import pstats
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import distributed
from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.spawn import start_processes

from beside.costs import DISPATCH_GOAL_US, HOP_GOAL_US, costs_us
from beside.engine_rank import EngineRank, job_of, open_links, plan_of
from beside.shape import Shape
from beside.torch_rank import join_group, torch_rank

SHAPES: Final = {
    "one": Shape(1, 1, 4),
    "data": Shape(2, 1, 4),
    "pipeline": Shape(1, 2, 8),
    "four": Shape(4, 1, 2),
    "six": Shape(6, 1, 2),
    "eight": Shape(8, 1, 2),
}
PARTS: Final = ("costs", *SHAPES)
GOALS: Final = {"fast": 1.03, "deterministic": 1.10}
CPU_GOAL: Final = 1.05
BY_CPU: Final = ("four", "eight")
NUM_WARMUPS: Final = 5
_SYSTEMS: Final = ("planaria", "torch", "again")


def main() -> int:
    """Prints the ratios; returns 1 if one misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--mode", nargs="+", choices=GOALS, default=list(GOALS))
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    is_met = _show_costs() if "costs" in options.only else True
    for name in [name for name in SHAPES if name in options.only]:
        for mode in options.mode:
            is_met &= _compare(name, mode, options.iterations, options.profile)
    return 0 if is_met else 1


def _show_costs() -> bool:
    """Measures and prints what an action and a hop cost; returns whether both meet their goals."""
    dispatch_us, hop_us = costs_us()
    print(f"an action takes {dispatch_us:.1f} us of CPU (goal {DISPATCH_GOAL_US:.0f})")
    print(f"a hop takes {hop_us:.1f} us of CPU (goal {HOP_GOAL_US:.0f})", flush=True)
    return dispatch_us <= DISPATCH_GOAL_US and hop_us <= HOP_GOAL_US


def _compare(name: str, mode: str, num_iterations: int, is_profiled: bool) -> bool:
    """Measures and prints a shape in a mode; returns whether it meets its goal."""
    shape = SHAPES[name]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = multiprocessing.get_context("spawn").SimpleQueue()
    arguments = (shape, mode, num_iterations, is_profiled, store.port, results)
    context = start_processes(  # type: ignore[no-untyped-call]
        _serve, args=arguments, nprocs=shape.num_ranks, join=False, start_method="spawn"
    )
    measured = results.get()
    context.join()
    rows = measured["rows"]
    print(f"{name}, {mode}: {shape.num_ranks} ranks, {num_iterations} iterations", flush=True)
    ends = {}
    for index, unit in enumerate(("s", "CPU s")):
        taken = {system: [row[system][index] for row in rows] for system in _SYSTEMS}
        ours, again = (_interval(taken[system], taken["torch"]) for system in ("planaria", "again"))
        ends[unit] = ours[2]
        medians = ", ".join(f"{s} {statistics.median(taken[s]):.4f}" for s in _SYSTEMS)
        print(f"  {unit:<5}  {medians}; ratio {_text(ours)}, A/A {_text(again)}", flush=True)
    if measured["reduce_s"]:
        share = measured["hidden_s"] / measured["reduce_s"]
        print(f"  {share:.0%} of the reductions' time passes before the last backward has ended")
    goal, unit = GOALS[mode], "s"
    if name in BY_CPU:
        goal, unit = CPU_GOAL if mode == "fast" else math.inf, "CPU s"
    is_met = ends[unit] <= goal
    verdict = "met" if is_met else "MISSED"
    print(f"  goal {goal:.2f} of {unit}: {verdict}", flush=True)
    return is_met


def _interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """The median of paired ratios, and both ends of its 95% interval, from order statistics."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    half = 0.98 * math.sqrt(len(ratios))
    first = max(0, math.floor(len(ratios) / 2 - half))
    last = min(len(ratios) - 1, math.ceil(len(ratios) / 2 + half))
    return statistics.median(ratios), ratios[first], ratios[last]


def _text(interval: tuple[float, float, float]) -> str:
    return "{:.3f} ({:.3f} to {:.3f})".format(*interval)


def _serve(
    rank: int,
    shape: Shape,
    mode: str,
    num_iterations: int,
    is_profiled: bool,
    port: int,
    results: Any,
) -> None:
    """A rank's process; rank 0 puts what all have measured into `results`."""
    torch.set_num_threads(1)
    join_group(port, rank, shape.num_ranks)
    links = open_links(rank)
    engine = EngineRank(
        job_of(shape, is_deterministic=mode == "deterministic"), plan_of(shape), links
    )
    addresses = _from_all(links.address)
    engine.enter(dict(enumerate(addresses)))
    theirs = torch_rank(shape, rank)
    trains = {"planaria": engine.train, "torch": theirs.train, "again": theirs.train}
    profile = cProfile.Profile()
    order = random.Random(0)  # The same order on all ranks.
    rows: list[dict[str, tuple[float, float, float]]] = []
    for iteration in range(NUM_WARMUPS + num_iterations):
        row = {}
        for system in order.sample(_SYSTEMS, len(_SYSTEMS)):
            distributed.barrier()
            cpu_s, begin_s = time.process_time(), time.monotonic()
            if is_profiled and rank == 0 and system == "planaria" and iteration >= NUM_WARMUPS:
                profile.runcall(trains[system], iteration)
            else:
                trains[system](iteration)
            end_s = time.monotonic()
            distributed.barrier()
            row[system] = begin_s, end_s, time.process_time() - cpu_s
        rows.append(row)
    all_rows = _from_all(rows[NUM_WARMUPS:])
    if rank == 0:
        found = {"rows": [_over_ranks(row) for row in zip(*all_rows, strict=True)]}
        results.put({**found, "reduce_s": engine.reduce_s, "hidden_s": engine.hidden_s})
        if is_profiled:
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
    distributed.barrier()
    engine.close()
    distributed.destroy_process_group()


def _over_ranks(
    rows: Sequence[dict[str, tuple[float, float, float]]],
) -> dict[str, tuple[float, float]]:
    """Seconds and CPU seconds of a round, by system."""
    return {
        system: (
            max(row[system][1] for row in rows) - min(row[system][0] for row in rows),
            sum(row[system][2] for row in rows),
        )
        for system in _SYSTEMS
    }


def _from_all(value: Any) -> list[Any]:
    """The values that all ranks give, by rank."""
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


if __name__ == "__main__":
    sys.exit(main())
