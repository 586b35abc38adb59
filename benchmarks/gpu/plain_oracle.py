"""Trains a job's model in plain torch on a device, and compares it with the job's newest save.

The loop is that of tests/helpers/oracle.py, which imports nothing of the engine: the whole model,
loss.backward(), sums in float64, AdamW. The job must draw no dropout. Prints one line of JSON:
the number of parameters, how many of them differ in any bit, and the largest relative difference of
a layer.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from helpers.oracle import Microbatch, train
from planaria.checkpoint.disk.tiers import tier_of
from planaria.core.job import JobConfig
from planaria.data.batches import Batches
from planaria.data.datasets import Dataset
from planaria.engine.optimizer import learning_rate
from planaria.engine.prepare import load_data, load_model
from planaria.job.config import load_job
from planaria.job.planning import cache_directory
from planaria.models.hf_model import hf_config
from planaria.models.layers import SplitModel
from planaria.transport.timekeeping import Timekeeper


def main() -> int:
    """Trains and compares; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("job", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--saves", required=True, help="directory of the job's saves")
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    job = load_job(options.job)
    cache = Path(cache_directory())
    split = load_model(job, cache_directory=cache, profile=None, timekeeper=Timekeeper())
    dataset = load_data(job, objective=split.objective, cache_directory=cache)
    training = job.training
    trained = train(
        _whole(job, split, dataset).to(options.device),
        _iterations(job, dataset, device=options.device),
        loss_sum=_cross_entropy_sum,
        learning_rates=[learning_rate(training, index) for index in range(training.iterations)],
        gradient_clip=training.gradient_clip,
    )
    print(json.dumps(_differences(split, trained.parameters, saves=options.saves)))
    return 0


def _whole(job: JobConfig, split: SplitModel, dataset: Dataset) -> nn.Module:
    """The whole model in plain transformers, with the first weights of the layers."""
    from transformers import AutoModelForCausalLM

    config = hf_config(
        job.model,
        vocabulary_size=dataset.vocabulary_size,
        sequence_length=job.data.sequence_length,
    )
    config._attn_implementation = "eager"
    whole: nn.Module = AutoModelForCausalLM.from_config(config).train()
    named = dict(whole.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for layer in range(split.num_layers):
            for name, parameter in split.materialise(layer).named_parameters():
                named[name].copy_(parameter)
    return whole


def _iterations(job: JobConfig, dataset: Dataset, *, device: str) -> list[list[Microbatch]]:
    found = []
    for iteration in range(job.training.iterations):
        batches = Batches(dataset, job.training, iteration=iteration)
        found.append(
            [
                (batches.inputs(index).to(device), batches.targets(index).to(device))
                for index in range(job.num_microbatches)
            ]
        )
    return found


def _cross_entropy_sum(output: Tensor, targets: Tensor) -> Tensor:
    logits = output.reshape(-1, output.shape[-1]).float()
    return functional.cross_entropy(logits, targets.reshape(-1), reduction="sum")


def _differences(split: SplitModel, expected: dict[str, Tensor], *, saves: str) -> dict[str, Any]:
    tier = tier_of(saves)
    manifest = tier.newest()
    assert manifest is not None, saves
    num_parameters = num_different = 0
    worst = 0.0
    for layer in range(split.num_layers):
        state = tier.read_layer(manifest, layer)
        # The second use of a tied parameter goes by the first one's name in the whole model.
        names = [name for name in split.parameter_shapes(layer) if name in expected]
        if not names:
            continue
        theirs = torch.cat([expected[name].detach().cpu().flatten() for name in names])
        ours = torch.cat([torch.from_numpy(state[f"parameter/{n}"]).flatten() for n in names])
        num_parameters += theirs.numel()
        num_different += int((ours != theirs).sum())
        worst = max(worst, float((ours - theirs).norm() / theirs.norm()))
    return {"parameters": num_parameters, "different": num_different, "relative": worst}


if __name__ == "__main__":
    sys.exit(main())
