"""Measures how exact sums of gradients are, for the claim of docs/ASSUMPTIONS.md on equal bits.

It sums float32 gradients of the microbatches of a real GPT-2 in float32 and in float64, in several
orders, and counts the elements that depend on the order, before and after rounding to float32. It
does the same with lognormal numbers, whose magnitudes differ far more than those of gradients.
"""

import sys

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

NUM_MICROBATCHES = 12
NUM_ORDERS = 6
SEED = 7


def main() -> int:
    """Prints a line for each kind of numbers.

    Returns:
        1 if a rounded sum of gradients depends on the order.
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(SEED)
    print(f"{NUM_MICROBATCHES} addends, {NUM_ORDERS} orders, seed {SEED}")
    print(f"{'numbers':>22} {'sums':>10} {'float32':>9} {'float64':>9} {'rounded':>8}")
    gradients = _differing(_gpt2_gradients(generator), generator)
    print(f"{'GPT-2 gradients':>22} {_row(gradients)}")
    for sigma in (1.0, 4.0):
        values = torch.empty(NUM_MICROBATCHES, 1_000_000).log_normal_(
            0.0, sigma, generator=generator
        )
        signs = torch.randint(0, 2, values.shape, generator=generator) * 2 - 1
        print(
            f"{f'lognormal, sigma {sigma:.0f}':>22} {_row(_differing(values * signs, generator))}"
        )
    return 1 if gradients[3] else 0


def _row(counts: tuple[int, int, int, int]) -> str:
    size, single, double, rounded = counts
    return f"{size:10d} {100 * single / size:8.2f}% {100 * double / size:8.4f}% {rounded:8d}"


def _gpt2_gradients(generator: torch.Generator) -> Tensor:
    """The gradients of each microbatch, [microbatch, parameter element]."""
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(
        "gpt2", n_layer=4, n_embd=192, n_head=4, vocab_size=256, bos_token_id=0, eos_token_id=0
    )
    model = AutoModelForCausalLM.from_config(config).train()
    rows = []
    for _ in range(NUM_MICROBATCHES):
        tokens = torch.randint(0, 256, (4, 64), generator=generator)
        model.zero_grad(set_to_none=True)
        model(tokens, labels=tokens).loss.backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return torch.stack(rows)


def _differing(values: Tensor, generator: torch.Generator) -> tuple[int, int, int, int]:
    """Number of sums, and how many depend on the order: in float32, in float64, and in float64
    after rounding to float32."""
    single = torch.zeros(values.shape[1], dtype=torch.bool)
    double, rounded = single.clone(), single.clone()
    first32 = first64 = None
    for _ in range(NUM_ORDERS):
        total32 = torch.zeros(values.shape[1])
        total64 = torch.zeros(values.shape[1], dtype=torch.float64)
        for index in torch.randperm(len(values), generator=generator):
            total32 += values[index]
            total64 += values[index]
        if first32 is None or first64 is None:
            first32, first64 = total32, total64
        single |= total32 != first32
        double |= total64 != first64
        rounded |= total64.float() != first64.float()
    return len(single), int(single.sum()), int(double.sum()), int(rounded.sum())


if __name__ == "__main__":
    sys.exit(main())
