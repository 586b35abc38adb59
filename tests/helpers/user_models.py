"""Models and data as a user would give them, for jobs of kind "python"."""

import contextlib
import os
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 24


class _Residual(nn.Module):
    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self.dropout(torch.tanh(self.linear(self.norm(x))))
        return x + update


def sequential(dropout: float = 0.1) -> nn.Sequential:
    """A classifier of ten layers, built as plain torch builds it."""
    blocks = [_Residual(WIDTH, dropout) for _ in range(8)]
    return nn.Sequential(nn.Linear(8, WIDTH), *blocks, nn.Linear(WIDTH, 5))


def frozen_in_eval() -> nn.Sequential:
    """The same, whose first block is frozen as backbones are, and whose second is in eval alone."""
    whole = sequential()
    whole[1].requires_grad_(False).eval()
    whole[2].eval()
    return whole


def plain_sequential() -> nn.Sequential:
    """The same without dropout."""
    return sequential(dropout=0.0)


def partly_frozen() -> nn.Sequential:
    """Two layers: a weight of the first is frozen, and the second has a buffer."""
    first, last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 5)
    first.weight.requires_grad_(False)
    last.register_buffer("scale", torch.full((3,), 2.0))
    return nn.Sequential(first, last)


def frozen_blocks() -> nn.Sequential:
    """A classifier of six blocks of one size that are not trained, each with a buffer."""
    return nn.Sequential(*(_frozen_block() for _ in range(6)), nn.Linear(8, 5))


def frozen_factories() -> list[object]:
    """The same, each layer built alone where it is needed."""
    return [*[_frozen_block] * 6, partial(nn.Linear, 8, 5)]


def _frozen_block() -> nn.Linear:
    block = nn.Linear(8, 8).requires_grad_(False)
    block.register_buffer("scale", torch.full((8, 8), 2.0))
    return block


class _Twice(nn.Module):
    """Uses a weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.last(self.first(x))
        return hidden


def tied_within() -> nn.Sequential:
    """A layer that uses a weight twice, and a classifier."""
    return nn.Sequential(_Twice(), nn.Linear(8, 5))


def tied_and_frozen() -> nn.Sequential:
    """The same, where that weight is not trained."""
    module = tied_within()
    module.get_parameter("0.first.weight").requires_grad_(False)
    return module


def wide() -> nn.Sequential:
    """A classifier whose blocks have more than two MiB of state, so that two may send one."""
    width = 448
    blocks = [_Residual(width) for _ in range(6)]
    return nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 5))


def factories() -> list[object]:
    """The same, each layer built alone where it is needed."""
    first, last = partial(nn.Linear, 8, WIDTH), partial(nn.Linear, WIDTH, 5)
    return [first, *[partial(_Residual, WIDTH)] * 8, last]


class _Mixing(nn.Module):
    """Mixes the rows of a microbatch of 20, so the gradient of its input is a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(20)
        self.linear = nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.linear(self.norm(x.t())).t()
        return mixed


def mixing() -> nn.Sequential:
    """A classifier of ten layers, each of which has its input or its gradient transposed."""
    pairs = [(nn.Linear(WIDTH, WIDTH), _Mixing()) for _ in range(4)]
    blocks = [block for pair in pairs for block in pair]
    return nn.Sequential(nn.Linear(8, WIDTH), *blocks, nn.Linear(WIDTH, 5))


class _Points:
    """Random points with random classes; a sample is a function of its number."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=generator)
        return x, (x.sum() > 0).long() + 2 * (x[0] > 0).long()


def points() -> _Points:
    """The data for both."""
    return _Points()


def _loss_of_labels(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, targets[:, 0], reduction="sum")


def labelled() -> tuple[nn.Sequential, object]:
    """The classifier without dropout, of samples with a label or none (-100)."""
    return plain_sequential(), _loss_of_labels


class _Unlabelled(_Points):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return super().__getitem__(index)[0], torch.tensor([-100])


def unlabelled() -> _Unlabelled:
    """The data without a label."""
    return _Unlabelled()


class _Lengths(nn.Module):
    """Has no parameters, and passes on nothing that has a gradient."""

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return inputs["ids"], inputs["mask"], inputs["mask"].sum(1)


class _Words(nn.Module):
    """Passes on a tuple in a dict: hidden states, and what has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)

    def forward(self, inputs: tuple[Tensor, ...]) -> dict[str, object]:
        ids, *rest = inputs
        return {"hidden": self.embedding(ids), "rest": tuple(rest)}


class _MaskedAttention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)

    def forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        hidden, (mask, length) = inputs["hidden"], inputs["rest"]
        normed = self.norm(hidden)
        update, _ = self.attention(normed, normed, normed, key_padding_mask=~mask)
        return {"hidden": hidden + update, "rest": (mask, length)}


class _Classes(nn.Module):
    """Returns what the loss needs: logits, and lengths to weigh them by."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 5)

    def forward(self, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        mask, length = inputs["rest"]
        pooled = (inputs["hidden"] * mask[:, :, None]).sum(1) / length[:, None]
        return self.linear(pooled), length


def _weighted_loss(output: tuple[Tensor, Tensor], targets: dict[str, Tensor]) -> Tensor:
    logits, length = output
    losses = nn.functional.cross_entropy(logits, targets["classes"], reduction="none")
    return (losses * targets["weights"] / length).sum()


def encoder() -> tuple[list[nn.Module], object]:
    """An encoder of ten layers that pass several tensors, with a loss of several tensors."""
    blocks = [_MaskedAttention(0.1) for _ in range(7)]
    return [_Lengths(), _Words(), *blocks, _Classes()], _weighted_loss


class _Sentences:
    """Rows of unequal length with a class."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = [(index * 7 + place) % 31 + 1 for place in range(3 + index % 6)]
        return {"ids": ids, "class": ids[0] % 5}


def sentences() -> _Sentences:
    """The data for the encoder."""
    return _Sentences()


def padded_sentences(items: list[dict[str, Any]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs and targets of a microbatch of sentences."""
    rows = [torch.tensor(item["ids"]) for item in items]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    classes = torch.tensor([item["class"] for item in items])
    return {"ids": ids, "mask": ids > 0}, {"classes": classes, "weights": classes + 1.0}


class _Raising(nn.Module):
    """Raises in the forward of the microbatch in which the file named by RAISE_FILE exists."""

    def forward(self, x: Tensor) -> Tensor:
        if os.path.exists(os.environ["PLANARIA_TEST_RAISE"]):
            raise ValueError("a mistake in the user's model")
        return x


def raising() -> nn.Sequential:
    """A model that begins to raise while it trains."""
    return nn.Sequential(nn.Linear(8, WIDTH), _Raising(), nn.Linear(WIDTH, 5))


class _Hanging(nn.Module):
    """Hangs for ever in the first forward in which the file named by HANG_FILE exists."""

    def forward(self, x: Tensor) -> Tensor:
        path = os.environ.get("HANG_FILE", "")
        if path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # Of two ranks that are here at once one does.
                time.sleep(3600)
        return x


def hanging() -> nn.Sequential:
    """A classifier whose fifth layer hangs once."""
    layers = list(sequential())
    return nn.Sequential(*layers[:4], _Hanging(), *layers[4:])
