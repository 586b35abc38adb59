"""A GPT as nanoGPT's users write one: one module, tied embeddings, sizes in a dataclass.

The lines below "For planaria" are all that was added to train it as layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass
class GPTConfig:
    """Sizes of the model."""

    block_size: int = 64
    vocab_size: int = 256
    n_layer: int = 6
    n_head: int = 4
    n_embd: int = 64
    dropout: float = 0.1


class CausalSelfAttention(nn.Module):
    """Attention of each token to those before it."""

    mask: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        mask = torch.ones(config.block_size, config.block_size).tril()
        self.register_buffer("mask", mask.bool())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.n_head, -1).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        scores = q @ k.transpose(-2, -1) / (width // self.n_head) ** 0.5
        scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
        weights = functional.dropout(functional.softmax(scores, -1), self.dropout, self.training)
        projected: Tensor = self.c_proj((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return functional.dropout(projected, self.dropout, self.training)


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and around it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        update: Tensor = self.mlp(self.ln_2(x))
        return x + update


class GPT(nn.Module):
    """The whole model."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # Tied, as in GPT-2.
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, idx: Tensor) -> Tensor:
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


# -- For planaria: the same modules as a list of layers -------------------------------------------


class Embedding(nn.Module):
    """What the model does before its blocks."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = gpt.wte, gpt.wpe, gpt.drop

    def forward(self, idx: Tensor) -> Tensor:
        positions = torch.arange(idx.shape[1], device=idx.device)
        hidden: Tensor = self.drop(self.wte(idx) + self.wpe(positions))
        return hidden


def layers() -> list[nn.Module]:
    """The model's layers: a rank keeps those that it needs."""
    gpt = GPT(GPTConfig())
    return [Embedding(gpt), *gpt.h, nn.Sequential(gpt.ln_f, gpt.lm_head)]
