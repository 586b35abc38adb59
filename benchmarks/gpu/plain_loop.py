"""Trains a job's model in a plain loop on a device, with the kernels of planaria's fast mode.

The modules of transformers in bfloat16, float32 masters, gradients summed in float32, fused AdamW;
microbatches, their order and activation checkpointing as the job file says. The first iteration
warms up. Prints one line of JSON: the seconds of the other iterations, and the peak of the memory
of tensors.
"""

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from planaria.core.job import JobConfig
from planaria.data.batches import Batches
from planaria.data.datasets import Dataset
from planaria.engine.prepare import load_data
from planaria.job.config import load_job
from planaria.job.planning import cache_directory
from planaria.models.hf_model import hf_config
from planaria.models.layers import cross_entropy_sum


def main() -> int:
    """Trains and prints the figures; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("job", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="compile each block")
    options = parser.parse_args()
    job = load_job(options.job)
    dataset = load_data(job, objective="causal", cache_directory=Path(cache_directory()))
    loop = _Loop(job, dataset, torch.device(options.device))
    if options.compile:
        loop.compile()
    seconds, losses = [], []
    for iteration in range(options.iterations):
        began_s = time.perf_counter()
        losses.append(loop.train(iteration))
        seconds.append(time.perf_counter() - began_s)
        print(f"iteration {iteration}  loss {losses[-1]:.4f}  {seconds[-1]:.3f} s", flush=True)
    is_host = options.device == "cpu"
    peak_bytes = 0 if is_host else torch.cuda.max_memory_allocated()
    found = {"seconds": seconds[1:], "first_s": seconds[0], "losses": losses}
    print(json.dumps({**found, "peak_bytes": peak_bytes, "parameters": loop.num_parameters}))
    return 0


class _Loop:
    """The model and its optimizer.

    Attributes:
        num_parameters: number of elements of all parameters, tied ones once.
    """

    def __init__(self, job: JobConfig, dataset: Dataset, device: torch.device) -> None:
        self._job = job
        self._dataset = dataset
        self._device = device
        torch.manual_seed(job.training.seed)
        self._model = _model(job, dataset, device)
        self._parameters: list[Tensor] = list(self._model.parameters())
        self.num_parameters = sum(parameter.numel() for parameter in self._parameters)
        self._masters = [parameter.detach().float() for parameter in self._parameters]
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = torch.zeros_like(master)
            hook = partial(_add_gradient, master.grad)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        settings = {key: v for key, v in job.training.optimizer.items() if key != "name"}
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=job.training.learning_rate, fused=True, **settings
        )

    def compile(self) -> None:
        """Compiles each block when it first runs."""
        blocks = max((m for m in self._model.modules() if isinstance(m, nn.ModuleList)), key=len)
        for block in blocks:
            block.compile()

    def train(self, iteration: int) -> float:
        """Trains one iteration and waits for its end; returns the loss."""
        batches = Batches(self._dataset, self._job.training, iteration=iteration)
        num_targets = batches.num_targets()
        total = torch.zeros((), device=self._device)
        for index in range(self._job.num_microbatches):
            inputs = batches.inputs(index).to(self._device, non_blocking=True)
            targets = batches.targets(index).to(self._device, non_blocking=True)
            loss = cross_entropy_sum(self._model(inputs).logits, targets) / num_targets
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._masters)
        torch._foreach_zero_([master.grad for master in self._masters if master.grad is not None])
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        return float(total)


def _model(job: JobConfig, dataset: Dataset, device: torch.device) -> nn.Module:
    config = hf_config(
        job.model,
        vocabulary_size=dataset.vocabulary_size,
        sequence_length=job.data.sequence_length,
    )
    with device:
        model = AutoModelForCausalLM.from_config(
            config,
            attn_implementation=config._attn_implementation,
            dtype=getattr(torch, job.training.dtype),
        )
    if job.training.recomputation != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trained: nn.Module = model.to(device).train()
    return trained


def _add_gradient(total: Tensor, parameter: Tensor) -> None:
    assert parameter.grad is not None
    total.add_(parameter.grad)
    parameter.grad = None


if __name__ == "__main__":
    sys.exit(main())
