"""Measures what the restorer gains: it chooses the places of nodes, the senders of layers, and the
order of reductions.

    places      bytes that move after losses, and the seconds that the busiest link needs for them
                (links as profiled), with least bytes and with the naive strategy: nodes in order of
                their numbers, each layer whole from its first holder (Odyssey, figure 10)
    links       transfers measured between processes of this machine, on real links that are limited
                to 100 MB/s per rank and link direction, with layers scaled so that the bound is
                about a second. The bound of a strategy is the time that the most loaded link needs
                for the bytes that the strategy gives it
    reductions  gradients summed after losses, coloured and in layer order: rounds, predicted
                seconds of the sums alone and of an iteration, and the sums measured on links of
                100 MB/s (Odyssey, figure 11)

Odyssey reports for four pipelines of two that lose a node: least bytes save 32% of the transfer at
16 layers and next to nothing at 4 and 8; coloured reductions take 35% less.

An A/A ratio is that of the odd runs of the first strategy over its even ones. `python
benchmarks/restorer.py links` runs one part. Exits 1 if a transfer with least bytes takes more than
1.2 times its bound.
"""

import os
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers import exchanging, reducing
from helpers.ranks import PRELOAD, SEARCH_PATH
from planaria.core.cluster import NodesLost, survivors
from planaria.core.plan import (
    Transfer,
)
from planaria.nodes.forkserver import ForkServer
from planaria.papers.odyssey.transfers import (
    RestoreCase,
    answer,
    restored_job,
    sums,
    transfer_costs,
)
from planaria.policies.policy import profile_prices
from planaria.policies.reinstantiate import Reinstantiate
from planaria.restorer.strategies import LEAST_BYTES, NAIVE, RestoreStrategy
from planaria.schedule.buckets import ReductionOrder, buckets_of

BYTES_PER_S: Final = 100e6
RATIO_MAX: Final = 1.2
SEED: Final = 20_261_121
NUM_PAIRS: Final = 40  # Upper bound on the number of losses of two nodes that are tried.
NUM_RUNS: Final = 4
BOUND_S: Final = 1.0

CASES: Final[tuple[RestoreCase, ...]] = (
    ("llama2-7b", 4, (2, 2, 2, 2)),
    ("llama2-7b", 8, (2, 2, 2, 2)),
    ("llama2-7b", 16, (2, 2, 2, 2)),
    ("bert-large", 0, (3, 3, 3)),
    ("gpt2", 0, (3, 3, 3)),
    ("gpt3-2.7b", 0, (4, 4, 4)),
    ("gpt3-6.7b", 0, (3, 3, 3, 3)),
    ("llama2-7b", 0, (4, 4, 4, 4)),
)
MEASURED: Final[tuple[tuple[RestoreCase, tuple[int, ...]], ...]] = (
    (("llama2-7b", 8, (2, 2, 2)), (1,)),
    (("llama2-7b", 16, (2, 2, 2, 2)), (0,)),
    (("gpt2", 0, (2, 2, 2)), (3,)),
)


def places() -> Iterator[str]:
    """Prints bytes and seconds of transfers after all losses of a node, and some of two."""
    print("places: means over losses; least bytes, naive, and what least bytes save")
    print(f"{'':<34}{'moved, GB':>18}{'':>7}{'busiest link, ms':>20}{'':>7}")
    for case in CASES:
        nodes = restored_job(case)[1].nodes
        pairs = list(combinations(nodes, 2))
        some = random.Random(SEED).sample(pairs, min(NUM_PAIRS, len(pairs)))
        for losses in ([(node,) for node in nodes], some):
            figures = [transfer_costs(case, lost) for lost in losses]
            known = [both for both in figures if both is not None]
            columns = [statistics.mean(column) for column in zip(*known, strict=True)]
            least_bytes, naive_bytes, least_s, naive_s = columns
            saved = _saved(least_bytes, naive_bytes)
            print(
                f"{_name(case):<25} lose {len(losses[0])} x{len(known):3d}"
                f"{least_bytes / 1e9:9.2f}{naive_bytes / 1e9:9.2f}{saved}"
                f"{1e3 * least_s:10.1f}{1e3 * naive_s:10.1f}{_saved(least_s, naive_s)}"
            )
    yield from ()


def links() -> Iterator[str]:
    """Measures transfers on limited links, strategies in turns; yields goals that are missed."""
    print(
        "links: medians of runs on links of 100 MB/s; the ratio is to the bound of the way at hand"
    )
    print(f"{'':<39}{'layers, MB':>12}{'moved':>8}{'bound':>8}{'took':>8}{'ratio':>7}{'best':>7}")
    with _server() as server:
        for case, lost in MEASURED:
            first = answer(case, lost, LEAST_BYTES)
            assert first is not None
            scale = BOUND_S / exchanging.bound_s(first.rounds, bytes_per_s=BYTES_PER_S)
            prices = profile_prices(restored_job(case)[0].problem.profile, regroup_s=0.0)
            layer_bytes = [round(scale * size / 256) * 256 for size in prices.layer_bytes]
            runs_s: dict[str, list[float]] = {"least": [], "naive": []}
            bounds_s = {}
            for run in range(NUM_RUNS):
                for name, restoring in (("least", LEAST_BYTES), ("naive", NAIVE)):
                    if name == "naive" and run % 2:
                        continue
                    rounds, held = _rounds(case, lost, restoring, layer_bytes)
                    bounds_s[name] = exchanging.bound_s(rounds, bytes_per_s=BYTES_PER_S)
                    found = exchanging.run_exchange(
                        server, held, rounds, layer_bytes=layer_bytes, bytes_per_s=BYTES_PER_S
                    )
                    runs_s[name].append(exchanging.seconds(found))
            yield from _print_runs(case, lost, layer_bytes, runs_s, bounds_s)


def _rounds(
    case: RestoreCase, lost: tuple[int, ...], restoring: RestoreStrategy, layer_bytes: Sequence[int]
) -> tuple[tuple[tuple[Transfer, ...], ...], dict[int, list[int]]]:
    catalog, plan = restored_job(case)
    cluster = survivors(plan, lost, epoch=1)
    prices = replace(
        profile_prices(catalog.problem.profile, regroup_s=0.0), layer_bytes=tuple(layer_bytes)
    )
    policy = Reinstantiate(catalog, restoring)
    found = policy.propose(plan, cluster, NodesLost(lost, 0), prices)[0]
    moved = [transfer for transfers in found.rounds for transfer in transfers]
    # A rank holds only the layers that it sends, to save memory.
    held = {node.node: {t.layer for t in moved if t.source == node.node} for node in cluster.nodes}
    return found.rounds, {rank: sorted(layers) for rank, layers in held.items()}


def _print_runs(
    case: RestoreCase,
    lost: tuple[int, ...],
    layer_bytes: Sequence[int],
    runs_s: dict[str, list[float]],
    bounds_s: dict[str, float],
) -> Iterator[str]:
    sizes = f"{min(layer_bytes) / 1e6:.0f}-{max(layer_bytes) / 1e6:.0f}"
    for name, seconds in runs_s.items():
        rounds, _ = _rounds(case, lost, LEAST_BYTES if name == "least" else NAIVE, layer_bytes)
        moved = sum(transfer.num_bytes for transfers in rounds for transfer in transfers)
        took_s, bound_s = statistics.median(seconds), bounds_s[name]
        print(
            f"{_name(case):<25} lose {lost[0]:<2d}{name:<7}{sizes:>12}{moved / 1e6:6.0f}MB"
            f"{bound_s:7.2f}s{took_s:7.2f}s{took_s / bound_s:7.2f}{min(seconds) / bound_s:7.2f}"
        )
        if name == "least" and took_s > RATIO_MAX * bound_s:
            yield f"{_name(case)}: {took_s / bound_s:.2f} times the bound"
    least_s, naive_s = runs_s["least"], runs_s["naive"]
    print(
        f"{'':<32}naive over least {statistics.median(naive_s) / statistics.median(least_s):.2f}, "
        f"A/A {statistics.median(least_s[1::2]) / statistics.median(least_s[0::2]):.2f}"
    )


def reductions() -> Iterator[str]:
    """Prints times of the sums of gradients after losses of a node, in both orders."""
    print("reductions: means over losses of a node that leave pipelines cut differently")
    print(f"{'':<25}{'rounds':>12}{'sums alone, ms':>22}{'':>7}{'iteration, ms':>22}{'':>7}")
    for case in CASES:
        rows = [
            row for node in restored_job(case)[1].nodes if (row := sums(case, node)) is not None
        ]
        if not rows:
            print(f"{_name(case):<25} all pipelines are cut alike")
            continue
        columns = [statistics.mean(column) for column in zip(*rows, strict=True)]
        rounds, rounds_without, sums_s, sums_s_without, whole_s, whole_s_without = columns
        print(
            f"{_name(case):<25}{rounds:6.1f}{rounds_without:6.1f}"
            f"{1e3 * sums_s:11.1f}{1e3 * sums_s_without:11.1f}{_saved(sums_s, sums_s_without)}"
            f"{1e3 * whole_s:11.1f}{1e3 * whole_s_without:11.1f}{_saved(whole_s, whole_s_without)}"
        )
    with _server() as server:
        for case, lost in MEASURED:
            _measure_reductions(server, case, lost)
    yield from ()


def _measure_reductions(server: ForkServer, case: RestoreCase, lost: tuple[int, ...]) -> None:
    """Prints the measured times of reductions in both orders.

    Layers' gradients are scaled so that the fullest rank has a quarter of what a link carries in
    BOUND_S.
    """
    catalog, _ = restored_job(case)
    found = answer(case, lost, LEAST_BYTES)
    assert found is not None
    sizes = [layer.parameter_bytes for layer in catalog.problem.profile.layers]
    held = [sum(sizes[n] for n in layers) for layers in found.after.layers_by_rank.values()]
    scale = BOUND_S * BYTES_PER_S / 4 / max(held)
    gradients = [round(scale * size / 256) * 256 for size in sizes]
    runs_s: dict[ReductionOrder, list[float]] = {order: [] for order in ReductionOrder}
    hashes = set()
    for _ in range(NUM_RUNS):
        for order in ReductionOrder:
            measured = reducing.reduce_buckets(
                server,
                buckets_of(found.after, order=order),
                layer_bytes=gradients,
                bytes_per_s=BYTES_PER_S,
            )
            runs_s[order].append(reducing.seconds(measured))
            hashes.add(str([sorted(measured[rank].digests.items()) for rank in sorted(measured)]))
    coloured_s, without_s = (statistics.median(runs_s[order]) for order in ReductionOrder)
    same = statistics.median(runs_s[ReductionOrder.COLOURED][1::2]) / statistics.median(
        runs_s[ReductionOrder.COLOURED][0::2]
    )
    print(
        f"measured, {_name(case)} lose {lost[0]}: sums coloured {coloured_s:.2f} s, uncoloured "
        f"{without_s:.2f} s, saved{_saved(coloured_s, without_s)}, A/A {same:.2f}; "
        f"{'the same bits' if len(hashes) == 1 else 'OTHER BITS'}"
    )


def _server() -> closing[ForkServer]:
    return closing(ForkServer(PRELOAD, path=SEARCH_PATH))


def _name(case: RestoreCase) -> str:
    name, num_blocks, sizes = case
    return f"{name}{f' x{num_blocks}' if num_blocks else ''} {'+'.join(map(str, sizes))}"


def _saved(with_it: float, without: float) -> str:
    """The share that one number saves of another, in percent."""
    return f"{100 * (1 - with_it / without):6.0f}%" if without else f"{'-':>7}"


PARTS: Final = {"places": places, "links": links, "reductions": reductions}


def main(names: list[str]) -> int:
    """Runs the parts; returns the exit code."""
    missed = [goal for name in names or PARTS for goal in PARTS[name]()]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} in the last minute")
    for goal in missed:
        print(f"MISSED {goal}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
