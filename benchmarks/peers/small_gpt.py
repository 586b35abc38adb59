"""The model and the data that all systems train: a small GPT-2 in plain torch, random tokens."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

# B microbatch, L sequence, D model, H heads, V vocabulary
NUM_BLOCKS = 8
WIDTH = 128
NUM_HEADS = 4
VOCABULARY_SIZE = 256
SEQUENCE_LENGTH = 64
MICROBATCH_SIZE = 2
GLOBAL_BATCH_SIZE = 24
LEARNING_RATE = 1e-3


class Embedding(nn.Module):
    """Tokens and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY_SIZE, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(SEQUENCE_LENGTH, WIDTH))

    def forward(self, tokens_BL: Tensor) -> Tensor:
        hidden_BLD: Tensor = self.tokens(tokens_BL) + self.positions
        return hidden_BLD


class Block(nn.Module):
    """Causal attention and a feed-forward network, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention_in, self.attention_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden_BLD: Tensor) -> Tensor:
        B, L, D = hidden_BLD.shape
        qkv = self.attention_in(self.attention_norm(hidden_BLD)).view(B, L, 3, NUM_HEADS, -1)
        query_BHLD, key_BHLD, value_BHLD = qkv.permute(2, 0, 3, 1, 4).unbind()
        attended_BHLD = functional.scaled_dot_product_attention(
            query_BHLD, key_BHLD, value_BHLD, is_causal=True
        )
        hidden_BLD = hidden_BLD + self.attention_out(attended_BHLD.transpose(1, 2).reshape(B, L, D))
        update_BLD: Tensor = self.narrow(functional.gelu(self.wide(self.norm(hidden_BLD))))
        return hidden_BLD + update_BLD


def layers() -> list[object]:
    """Layers of the model, in the form that planaria takes."""
    head = partial(nn.Linear, WIDTH, VOCABULARY_SIZE)
    return [Embedding, *[Block] * NUM_BLOCKS, head]


def model() -> nn.Sequential:
    """The same model as one module."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(NUM_BLOCKS)]
    return nn.Sequential(Embedding(), *blocks, nn.Linear(WIDTH, VOCABULARY_SIZE))


def loss(output_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens."""
    return functional.cross_entropy(output_BLV.flatten(0, 1), targets_BL.flatten())


class Tokens:
    """Random tokens and their successors; a sample is a function of its number."""

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY_SIZE, (SEQUENCE_LENGTH + 1,), generator=generator)
        return tokens[:-1], tokens[1:]


def local_batch(iteration: int, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """A rank's samples of an iteration."""
    data, size = Tokens(), GLOBAL_BATCH_SIZE // num_ranks
    first = iteration * GLOBAL_BATCH_SIZE + rank * size
    samples = [data[number % len(data)] for number in range(first, first + size)]
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
