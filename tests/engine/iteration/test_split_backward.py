"""A backward in two parts has the bits of a whole one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from planaria.engine.iteration.split_backward import input_gradient
from planaria.models.packing import pack, unpack

WIDTH = 12


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Uses(nn.Module):
    """A parameter that is used twice, the first use on the way to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.weight + self.bias) * self.frozen
        return hidden @ (self.weight * self.bias.exp()).T + x


class Several(nn.Module):
    """Takes and returns several tensors, which are packed; they meet twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, ids, b = unpack(pack((x[0], torch.arange(3), x[1:]), "layer"))
        hidden = unpack(pack({"a": self.first(a) * b, "ids": ids, "b": self.second(b)}, "layer"))
        return pack((hidden["b"] + hidden["ids"].sum(), hidden["a"]), "layer")


def mlp() -> nn.Module:
    layers = (nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
    return nn.Sequential(*layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False))


def gpt2_block() -> nn.Module:
    config = GPT2Config(n_embd=WIDTH, n_head=2, attn_pdrop=0.0, resid_pdrop=0.0)
    config._attn_implementation = "eager"
    block: nn.Module = GPT2Block(config, layer_idx=0)
    return block


def llama_parts() -> nn.Module:
    config = LlamaConfig(hidden_size=WIDTH, intermediate_size=20, num_attention_heads=2)
    return nn.Sequential(LlamaRMSNorm(WIDTH), LlamaMLP(config), LlamaRMSNorm(WIDTH))


class Quantise(torch.autograd.Function):
    """Rounds to multiples of a scale; the scale gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:  # noqa: ARG004
        return torch.round(x / scale) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        return gradient, None


class Quantised(nn.Module):
    """A scale without a gradient, alone where it joins, and beside a layer that has one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        quantise: Callable[[Tensor, Tensor], Tensor] = Quantise.apply
        return quantise(quantise(self.linear(x), self.scale) + x, self.scale)


class Hooked(nn.Module):
    """A tensor with a hook that changes its gradient, where one layer's parameters join."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(x)
        hidden.register_hook(lambda gradient: 0.5 * gradient)  # type: ignore[no-untyped-call]
        output: Tensor = self.linear(hidden)
        return output


def run(module: nn.Module, x: Tensor) -> Tensor:
    output = module(x)
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


@pytest.mark.parametrize("make", [mlp, Uses, Several, gpt2_block, llama_parts, Quantised, Hooked])
@pytest.mark.parametrize("ends_in_loss", [False, True])
def test_the_bits_are_those_of_a_whole_backward(
    make: Callable[[], nn.Module], ends_in_loss: bool
) -> None:
    """Of the input at once, of all parameters afterwards, and of no other."""
    torch.manual_seed(5)
    module = make()
    x = torch.randn(2, 7, WIDTH, requires_grad=True)
    output = run(module, x)
    gradient = None if ends_in_loss else torch.randn(output.shape)
    loss = output.square().sum() if ends_in_loss else output
    torch.autograd.backward(loss, gradient)
    expected = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    assert x.grad is not None
    again = run(module, source := x.detach().requires_grad_())
    loss = again.square().sum() if ends_in_loss else again

    found, rest = input_gradient(loss, gradient, source, module.parameters())

    assert found is not None
    assert torch.equal(x.grad, found)
    assert all(parameter.grad is None for parameter in module.parameters())
    rest.run()
    for name, parameter in module.named_parameters():
        if (whole := expected[name]) is None:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            assert torch.equal(whole, parameter.grad), name


@pytest.mark.parametrize("is_leaf", [False, True])
def test_an_output_that_does_not_depend_on_the_input_has_a_whole_backward(is_leaf: bool) -> None:
    """A layer may take only token ids of what it is passed, and may have no parameters."""
    linear = nn.Linear(WIDTH, 1)
    x = torch.randn(3, WIDTH, requires_grad=True)
    output = linear(x.detach())
    if is_leaf:
        output = output.detach().requires_grad_()

    found, rest = input_gradient(output, torch.ones_like(output), x, linear.parameters())
    rest.run()

    assert found is None
    for parameter in linear.parameters():
        assert (parameter.grad is None) == is_leaf


@pytest.mark.parametrize("make", [nn.Identity, nn.Flatten, lambda: nn.Dropout(0.0)])
def test_a_hop_that_returns_its_input_passes_the_gradient_on(
    make: Callable[[], nn.Module],
) -> None:
    """The layers before it got none, in silence: a block that is dropped returns its input."""
    x = torch.randn(3, WIDTH, requires_grad=True)
    output = make()(x)
    gradient = torch.randn(3, WIDTH)

    found, rest = input_gradient(output, gradient, x, [])
    rest.run()

    assert found is not None
    assert torch.equal(found, gradient)


def test_microbatches_may_be_put_off_together() -> None:
    """Their second parts run in any order, each with what its own first part noted."""
    torch.manual_seed(5)
    module = mlp()
    inputs = [torch.randn(2, WIDTH, requires_grad=True) for _ in range(3)]
    expected: list[list[Tensor]] = []
    for x in inputs:
        module(x).square().sum().backward()
        expected.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
        module.zero_grad(set_to_none=True)

    rests = [
        input_gradient(module(x).square().sum(), None, x, module.parameters())[1] for x in inputs
    ]

    for index in (1, 2, 0):
        rests[index].run()
        found = [p.grad for p in module.parameters()]
        assert all(
            torch.equal(a, b) for a, b in zip(expected[index], found, strict=True) if b is not None
        )
        module.zero_grad(set_to_none=True)


def test_the_first_part_computes_no_gradient_of_a_parameter() -> None:
    """Or nothing would be won by putting off the second."""
    ran: list[str] = []

    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight)
            return weight.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            ran.append(str(ctx.needs_input_grad))
            return gradients[0]

    weight = nn.Parameter(torch.randn(WIDTH))
    x = torch.randn(3, WIDTH, requires_grad=True)
    marked: Tensor = Marked.apply(weight)  # type: ignore[no-untyped-call]
    output = x * marked

    _, rest = input_gradient(output, torch.ones_like(output), x, [weight])

    assert not ran
    rest.run()
    assert len(ran) == 1
