"""`make sim`: runs of many seeds, in several processes; the first that fails is told whole."""

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from multiprocessing import get_context

from planaria.simulator.simulation import SimulatedRun, run, run_text

# A spawned process unpickles it from the module simulation; this module is its own __main__.
_RUN = partial(run, keeps_log=False)
_CHUNK = 20
_PROGRESS_EVERY = 5000  # Runs.


def runs(seeds: range, *, num_processes: int) -> Iterator[SimulatedRun]:
    """The runs of these seeds in order; only those with violations have logs."""
    if num_processes == 1:
        yield from map(_RUN, seeds)
        return
    # Not forked: garbage collection in a forked process may wait for ever for a thread that only
    # the parent has.
    with get_context("spawn").Pool(num_processes) as pool:
        yield from pool.imap(_RUN, seeds, chunksize=_CHUNK)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.runs)
    endings: Counter[str] = Counter()
    begin_s = time.monotonic()
    for result in runs(seeds, num_processes=min(arguments.processes, len(seeds))):
        endings[result.ending] += 1
        if result.violations:
            print(run_text(run(result.seed)))
            print(f"make sim SEED={result.seed} RUNS=1 replays it")
            raise SystemExit(1)
        if len(seeds) == 1:
            print(run_text(run(result.seed)))
        if endings.total() % _PROGRESS_EVERY == 0:
            print(f"{endings.total()} runs", flush=True)
    seconds = time.monotonic() - begin_s
    counts = ", ".join(f"{count} {ending}" for ending, count in endings.most_common())
    print(
        f"{len(seeds)} runs from seed {arguments.seed}: {counts}; "
        f"{len(seeds) / seconds:.0f} runs a second"
    )
