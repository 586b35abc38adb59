"""Tries the transport nccl on a machine with two GPUs: nobody has run it on two yet.

First the conformance tests of the comm between ranks, which each have a GPU of their own; then a
small GPT-2 on two nodes, of which one is killed and another one joins; and the same with copies in
memory that go from GPU to GPU. Hashes are compared with those of one process. Exits 2 where there
are not two NVIDIA GPUs or torch has no NCCL, 1 if something failed. Logs are in reports/gpu2.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from gpu.jobs import Runner, Started, merged, write_text
from gpu.running import ROOT, machine_facts, run_command, say

TESTS: Final = "tests/engine/comm/test_device_comm.py"
# A node that is lost gives its GPU to the one that joins: ranks are dealt to GPUs in turn.
FAULTS: Final = ("kill:0@3.reduce", "join:1@5")
COPIES: Final = {"copies": 2, "every": 1, "profile_iterations": 0, "path": "device"}


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
    command = [sys.executable, "-m", "pytest", "-q", "-k", "nccl", str(ROOT / TESTS)]
    tests = run_command(command, log=directory / "tests" / "log", timeout_s=timeout_s)
    say(f"conformance: {tests.problem or 'passed'}")
    write_text(directory / "text", num_bytes=1 << 18)
    runner = Runner(directory, "cuda", directory / "saves")
    two = merged(_tables(directory), {"cluster": {"nodes": 2, "transport": "nccl"}})
    copies = merged(two, {"checkpoint": COPIES})
    runs = [
        runner.run(started, timeout_s=timeout_s)
        for started in (
            Started("one", _tables(directory)),
            Started("two", two, FAULTS),
            Started("copies", copies, FAULTS),
        )
    ]
    for run in runs:
        say(f"{run.name}: {run.problem or run.hashes}; not injected: {run.unfired or 'none'}")
    is_equal = bool(runs[0].hashes[0]) and all(run.hashes == runs[0].hashes for run in runs)
    say(f"hashes {'equal' if is_equal else 'DIFFER'}")
    is_injected = not any(run.unfired for run in runs)
    return 0 if is_equal and not tests.problem and is_injected else 1


def _tables(directory: Path) -> dict[str, Any]:
    """The job file of one process."""
    config = {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 2, "n_positions": 64}
    return {
        "model": {"kind": "hf", "config": {**config, "vocab_size": 256}},
        "data": {"kind": "text", "path": str(directory / "text"), "sequence_length": 64},
        "training": {"iterations": 10, "global_batch_size": 16, "microbatch_size": 2},
        "cluster": {"nodes": 1},
        "resilience": {"failures_tolerated": 0},
    }


if __name__ == "__main__":
    sys.exit(main())
