"""The routers' loss of a mixture of experts, whose layers may be on several ranks.

transformers computes it after the last block from all routers' logits: how many tokens each expert
got, times how probable each was, over all layers. Both are sums over layers, so each block adds its
own to those of the blocks before it and passes them on beside the hidden states. The order is the
model's, so the bits are those of the whole model.

Over a microbatch it is a mean, so it counts as often as the microbatch has targets.

Source: Fedus et al., Switch Transformers (JMLR '22), equations 4 to 6, as in
`load_balancing_loss_func` of transformers.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from planaria.models.layers import cross_entropy_sum

# Dimensions in names: T tokens of a microbatch, E experts

_PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass(frozen=True, slots=True)
class RouterSums:
    """Sums over the layers so far.

    Attributes:
        tokens: number of tokens that each expert got, float32 [E].
        probabilities: probability of each expert, summed over tokens, float32 [E].
        num_rows: number of tokens, float32 [].
    """

    tokens: Tensor
    probabilities: Tensor
    num_rows: Tensor

    def parts(self) -> tuple[Tensor, ...]:
        """The sums as a block passes them on."""
        return self.tokens, self.probabilities, self.num_rows


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a model, and their loss.

    Attributes:
        kind: class of the modules that route.
        output: index of the logits among a router's outputs.
        top_k: number of experts that a token goes to.
        coefficient: weight of the routers' loss.
    """

    kind: type[nn.Module]
    output: int
    num_experts: int
    top_k: int
    coefficient: float

    @contextmanager
    def note_logits(self, block: nn.Module) -> Iterator[list[Tensor]]:
        """Notes the logits of all routers of a block that run in the body of the `with`."""
        noted: list[Tensor] = []

        def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
            noted.append(output[self.output] if isinstance(output, tuple | list) else output)

        routers = [module for module in block.modules() if isinstance(module, self.kind)]
        hooks = [router.register_forward_hook(note) for router in routers]
        try:
            yield noted
        finally:
            for hook in hooks:
                hook.remove()

    def no_sums(self, device: torch.device) -> RouterSums:
        """The sums before the first block."""
        zeros_E = torch.zeros(self.num_experts, dtype=torch.float32, device=device)
        return RouterSums(zeros_E, zeros_E, torch.zeros((), dtype=torch.float32, device=device))

    def add(self, sums: RouterSums, logits_TE: Tensor) -> RouterSums:
        """The sums with one more router."""
        weights_TE = functional.softmax(logits_TE, dim=-1)
        _, selected = torch.topk(weights_TE, self.top_k, dim=-1)
        # histc takes floats on the processor, and is deterministic on a GPU for integers alone.
        counted = selected.reshape(-1).to(torch.float32 if selected.is_cpu else torch.int32)
        tokens_E = torch.histc(counted, bins=self.num_experts, min=0, max=self.num_experts)
        return RouterSums(
            sums.tokens + tokens_E,
            sums.probabilities + weights_TE.float().sum(dim=0),
            sums.num_rows + len(weights_TE),
        )

    def loss(self, sums: RouterSums) -> Tensor:
        """The routers' loss of a microbatch, a float32 scalar."""
        tokens_E = sums.tokens / sums.num_rows
        probabilities_E = sums.probabilities / sums.num_rows
        return torch.sum(tokens_E * probabilities_E.unsqueeze(0)) * self.num_experts

    def loss_sum(self, output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        """The loss of the model's output, the logits and the routers' loss, over a microbatch."""
        logits, router_loss = output
        weight = self.coefficient * torch.count_nonzero(targets != -100)
        return cross_entropy_sum(logits, targets) + weight * router_loss


def routers_of(model: Any) -> Routers | None:
    """The routers of a model of transformers; None if it has no loss of this kind."""
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    names = ("num_experts", "num_experts_per_tok")
    if function is None or not all(hasattr(model, name) for name in names):
        return None
    if isinstance(recorder, list) or list(inspect.signature(function).parameters) != _PARAMETERS:
        return None
    coefficient = getattr(model, "router_aux_loss_coef", getattr(model, "aux_loss_coef", None))
    if coefficient is None or recorder is None:
        return None
    kind, index = recorder.target_class, recorder.index
    return Routers(kind, index, model.num_experts, model.num_experts_per_tok, coefficient)
