"""Training in plain torch, one process, no planaria: what every engine test is held against.

Gradients of fixed microbatches are summed in float64 and rounded to float32 once.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from planaria.core.job import JobConfig
from planaria.core.samples import data_seed, microbatch_samples
from planaria.data.batches import microbatch
from planaria.data.datasets import Dataset

Microbatch = tuple[Tensor | dict[str, Tensor], Tensor]
LossSum = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Trained:
    """The mean loss of each iteration, and the model's own parameters after the last one."""

    losses: tuple[float, ...]
    parameters: dict[str, Tensor]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a job that names none, one parameter after another."""
    return torch.optim.AdamW(parameters, foreach=False)


def train(
    model: nn.Module,
    iterations: Sequence[Sequence[Microbatch]],
    *,
    loss_sum: LossSum,
    learning_rates: Sequence[float],
    make_optimizer: MakeOptimizer = adamw,
    gradient_clip: float = 0.0,
) -> Trained:
    """The model trained in place on the microbatches (inputs, targets) of each iteration.

    Args:
        loss_sum: the loss of a microbatch, summed over its targets.
        learning_rates: by iteration.
        gradient_clip: largest global gradient norm, taken in float64; 0 for none.
    """
    optimizer, losses = make_optimizer(model.parameters()), []
    for microbatches, learning_rate in zip(iterations, learning_rates, strict=True):
        losses.append(_set_gradients(model, microbatches, loss_sum=loss_sum))
        if gradient_clip > 0.0:
            gradients = [p.grad.double() for p in model.parameters() if p.grad is not None]
            norm = nn.utils.get_total_norm(gradients, foreach=False)
            nn.utils.clip_grads_with_norm_(model.parameters(), gradient_clip, norm, foreach=False)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    return Trained(tuple(losses), dict(model.named_parameters()))


def _set_gradients(
    model: nn.Module, microbatches: Sequence[Microbatch], *, loss_sum: LossSum
) -> float:
    count = sum(_num_targets(targets) for _, targets in microbatches)
    sums = {p: torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()}
    loss = 0.0
    for inputs, targets in microbatches:
        model.zero_grad(set_to_none=True)
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        mean = loss_sum(getattr(output, "logits", output), targets) / count
        mean.backward()  # type: ignore[no-untyped-call]
        loss += mean.item()
        for parameter, total in sums.items():
            if parameter.grad is not None:
                total += parameter.grad
    for parameter, total in sums.items():
        parameter.grad = total.to(parameter.dtype)
    return loss


def _num_targets(targets: Tensor) -> int:
    return len(targets) if targets.is_floating_point() else int((targets != -100).sum())


def microbatches_of(job: JobConfig, dataset: Dataset) -> list[list[Microbatch]]:
    """A job's microbatches, by iteration, fixed before any engine runs."""
    training = job.training
    return [
        [
            microbatch(
                dataset,
                microbatch_samples(
                    iteration,
                    index,
                    seed=training.seed,
                    num_samples=len(dataset),
                    global_batch_size=training.global_batch_size,
                    microbatch_size=training.microbatch_size,
                ),
                seed=data_seed(iteration, seed=training.seed),
            )
            for index in range(job.num_microbatches)
        ]
        for iteration in range(training.iterations)
    ]
