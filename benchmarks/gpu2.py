"""Tries the transport nccl on a machine with two GPUs: nobody has run it on two yet.

First the conformance tests of the comm between ranks, which each have a GPU of their own; then a
small GPT-2 on two nodes. Each has a pipeline of its own, and sums with the other; or each has half
of the model, messages pass between them, and copies in memory go from GPU to GPU. Nodes are killed
and others join. Hashes are compared with those of one process. Exits 2 where there are not two
NVIDIA GPUs or torch has no NCCL, 1 if something failed. Logs are in reports/gpu2.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from gpu.jobs import Runner, Started, Tables, merged, write_text
from gpu.running import ROOT, comm_tests, machine_facts, run_command, say

TESTS: Final = comm_tests("nccl")
# Device memory that holds half of the model, but not all of it: half takes 13 MB, all of it 20.
STAGE_BYTES: Final = 16_500_000
CLUSTER: Final = {"nodes": 2, "transport": "nccl"}
COPIES: Final = {
    "copies": 2,
    "every": 1,
    "profile_iterations": 0,
    "path": "device",
    "buffer_bytes": 1 << 17,
}
JOBS: Final[Mapping[str, Tables]] = {
    "one": {},
    "pipelines": {"cluster": CLUSTER, "resilience": {"failures_tolerated": 1}},
    # The node that is left cannot hold the model, and waits for the next one.
    "stages": {
        "cluster": {**CLUSTER, "device_memory_bytes": STAGE_BYTES, "grant_s": 1.0},
        "checkpoint": COPIES,
    },
}
# A node that is lost gives its GPU to the one that joins: ranks are dealt to GPUs in turn.
FAULTS: Final[Mapping[str, tuple[str, ...]]] = {
    "one": (),
    "pipelines": ("kill:0@3.reduce", "join:1@5"),
    "stages": ("kill:0@3.reduce", "kill:1@6.backward"),
}
# The nodes of each pipeline that a job begins with.
SHAPES: Final = {"one": "1", "pipelines": "1+1", "stages": "2"}


def main() -> int:
    """Runs tests and job; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=ROOT / "reports" / "gpu2")
    parser.add_argument("--timeout-seconds", type=float, default=200.0, help="of each command")
    options = parser.parse_args()
    if torch.cuda.device_count() < 2 or not dist.is_nccl_available():
        found = f"{torch.cuda.device_count()} and {'a' if dist.is_nccl_available() else 'no'} NCCL"
        say(f"gpu2: skipped, it needs two NVIDIA GPUs and torch with NCCL; there are {found}")
        return 2
    say(", ".join(f"{key} {value}" for key, value in machine_facts("cuda").items()))
    timeout_s, directory = options.timeout_seconds, options.directory
    directory.mkdir(parents=True, exist_ok=True)
    tests = run_command(TESTS, log=directory / "tests" / "log", timeout_s=timeout_s)
    say(f"conformance: {tests.problem or 'passed'}")
    write_text(directory / "text", num_bytes=1 << 18)
    runner = Runner(directory, "cuda", directory / "saves")
    runs = [
        runner.run(Started(name, tables_of(name, directory), FAULTS[name]), timeout_s=timeout_s)
        for name in JOBS
    ]
    for run in runs:
        shape, unfired = run.pipelines, run.unfired or "none"
        say(f"{run.name} on {shape}: {run.problem or run.hashes}; not injected: {unfired}")
    is_equal = bool(runs[0].hashes[0]) and all(run.hashes == runs[0].hashes for run in runs)
    say(f"hashes {'equal' if is_equal else 'DIFFER'}")
    is_tried = all(run.pipelines == SHAPES[run.name] and not run.unfired for run in runs)
    return 0 if is_equal and not tests.problem and is_tried else 1


def tables_of(name: str, directory: Path) -> dict[str, Any]:
    """The job file of a job."""
    config = {"model_type": "gpt2", "n_layer": 8, "n_embd": 64, "n_head": 2, "n_positions": 64}
    tables = {
        "model": {"kind": "hf", "config": {**config, "vocab_size": 256}},
        "data": {"kind": "text", "path": str(directory / "text"), "sequence_length": 64},
        "training": {"iterations": 10, "global_batch_size": 16, "microbatch_size": 2},
        "cluster": {"nodes": 1},
        "resilience": {"failures_tolerated": 0},
    }
    return merged(tables, JOBS[name])


if __name__ == "__main__":
    sys.exit(main())
