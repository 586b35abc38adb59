"""Measures the overhead of the engine: one node of planaria against the plain loop of
tests/helpers/oracle.py.

Both have the same model, microbatches and arithmetic and one thread, and take turns in one run. The
A/A ratio is that of the plain loop's odd turns over its even ones.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.oracle import train
from planaria.core.job import JobConfig
from planaria.core.samples import data_seed, sample_numbers
from planaria.data.batches import microbatch
from planaria.engine.prepare import load_data
from planaria.job.planning import cache_directory, fork_server
from planaria.job.training_job import Job
from planaria.nodes.forkserver import ForkServer

GOAL = 1.10
NUM_TURNS = 6
EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt2-text.toml"
OVERRIDES = (
    "cluster.nodes=1",
    "cluster.device_memory_bytes=0",
    "resilience.failures_tolerated=0",
    "training.iterations=3",
)


def main() -> int:
    """Prints the ratios; returns 1 if planaria takes more than the goal."""
    torch.set_num_threads(1)
    server = fork_server(Job.from_file(EXAMPLE).config)
    ours, plain = [], []
    for _ in range(NUM_TURNS):
        with tempfile.TemporaryDirectory() as directory:
            overrides = [*OVERRIDES, f'checkpoint.directory="{directory}"']
            job = Job.from_file(EXAMPLE, overrides=overrides)
            ours.append(_planaria_s(job, server))
            plain.append(_plain_s(job.config))
    server.close()
    ratio = statistics.median(a / b for a, b in zip(ours, plain, strict=True))
    same = statistics.median(plain[1::2]) / statistics.median(plain[0::2])
    print(f"planaria, one node    {statistics.median(ours):.3f} s an iteration")
    print(f"plain loop            {statistics.median(plain):.3f} s an iteration")
    print(f"ratio {ratio:.3f} (goal {GOAL:.2f}), A/A {same:.3f}")
    return 0 if ratio <= GOAL else 1


def _planaria_s(job: Job, server: ForkServer) -> float:
    report = job.train(server=server).report
    return statistics.median(record.seconds for record in report.iterations[1:])


def _plain_s(config: JobConfig) -> float:
    training = config.training
    dataset = load_data(config, objective="causal", cache_directory=Path(cache_directory()))
    hf = {key: value for key, value in config.model.config.items() if key != "model_type"}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", **hf, bos_token_id=0, eos_token_id=0),
        attn_implementation="eager",
    ).train()
    seconds = []
    for iteration in range(training.iterations):
        numbers = sample_numbers(
            iteration,
            seed=training.seed,
            num_samples=len(dataset),
            global_batch_size=training.global_batch_size,
        ).reshape(-1, training.microbatch_size)
        seed = data_seed(iteration, seed=training.seed)
        microbatches = [microbatch(dataset, samples, seed=seed) for samples in numbers]
        start_s = time.monotonic()
        train(
            model,
            [microbatches],
            loss_sum=_loss_sum,
            learning_rates=[1e-3],
            gradient_clip=training.gradient_clip,
        )
        seconds.append(time.monotonic() - start_s)
    return statistics.median(seconds[1:])


def _loss_sum(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        output.reshape(-1, output.shape[-1]), targets.reshape(-1), reduction="sum"
    )


if __name__ == "__main__":
    sys.exit(main())
