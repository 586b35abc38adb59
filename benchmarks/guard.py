"""Measures the corruption guard: an iteration of the example job with the guard and without.

The job has two nodes, so that every layer has two holders, and runs alternate between with and
without. The A/A ratio is that of odd runs without the guard over even ones. This cannot show less
than the machine's noise, so the hashes of a node are also timed alone, in CPU seconds of their
thread, with parameters that are in no cache.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from planaria.core.agreement import SAMPLE_BYTES
from planaria.core.job import ResilienceConfig
from planaria.engine.iteration.guard import sampled_hashes
from planaria.engine.prepare import load_model
from planaria.engine.stage import RankStage
from planaria.job.planning import cache_directory, fork_server
from planaria.job.training_job import Job
from planaria.nodes.forkserver import ForkServer
from planaria.transport.timekeeping import Timekeeper

GOAL = 0.01
NUM_TURNS = 6
EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt2-text.toml"
OVERRIDES = (
    "cluster.nodes=2",
    "cluster.device_memory_bytes=0",
    "training.iterations=6",
)
CACHE_BYTES = 256 << 20  # More than the caches of a machine hold.


def main() -> int:
    """Prints the times and their ratios; returns 1 if the hashes take more than the goal."""
    torch.set_num_threads(1)
    server = fork_server(Job.from_file(EXAMPLE).config)
    with_guard, without = [], []
    for _ in range(NUM_TURNS):
        with_guard.append(_iteration_s(server, "true"))
        without.append(_iteration_s(server, "false"))
    server.close()
    iteration_s = statistics.median(without)
    num_layers, hashes_s = _hashes_s()
    ratio = statistics.median(a / b for a, b in zip(with_guard, without, strict=True))
    same = statistics.median(without[1::2]) / statistics.median(without[0::2])
    share = hashes_s / iteration_s
    print(f"an iteration with the guard  {statistics.median(with_guard) * 1e3:8.1f} ms")
    print(f"                    without  {iteration_s * 1e3:8.1f} ms")
    print(f"ratio {ratio:.3f}, A/A {same:.3f}")
    print(f"hashes of {num_layers} layers, up to {SAMPLE_BYTES >> 10} KiB each: ", end="")
    print(f"{hashes_s * 1e3:.2f} ms, {share:.2%} of an iteration (goal {GOAL:.0%})")
    return 0 if share < GOAL else 1


def _iteration_s(server: ForkServer, guard: str) -> float:
    with tempfile.TemporaryDirectory() as directory:
        overrides = [
            *OVERRIDES,
            f"resilience.corruption_guard={guard}",
            f'checkpoint.directory="{directory}"',
        ]
        report = Job.from_file(EXAMPLE, overrides=overrides).train(server=server).report
    return statistics.median(record.seconds for record in report.iterations[1:])


def _hashes_s() -> tuple[int, float]:
    """The number of layers of the model, and the seconds of hashing them, a median of 20 times."""
    job = Job.from_file(EXAMPLE).config
    model = load_model(
        job, cache_directory=Path(cache_directory()), profile=None, timekeeper=Timekeeper()
    )
    stage = RankStage(model, training=job.training)
    stage.hold(range(model.num_layers), states={}, age=0)
    flush = torch.zeros(CACHE_BYTES // 4)
    times_s = []
    for age in range(20):
        for held in stage.layers.values():
            held.age = age
        flush.add_(1.0)
        start_s = time.thread_time()
        sampled_hashes(stage.layers.values(), ResilienceConfig())
        times_s.append(time.thread_time() - start_s)
    return model.num_layers, statistics.median(times_s)


if __name__ == "__main__":
    sys.exit(main())
