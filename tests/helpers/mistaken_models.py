"""Models and data with a mistake in them, each as a user would make it.

Those that go wrong in training let some passes of their process go by first. Layers do so in no
profile, in which processes that only keep processors busy make as many passes as there is time for.
"""

import inspect
import os
import signal
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from helpers.user_models import WIDTH, points
from planaria.core.samples import sample_numbers
from planaria.engine import profiler

NUM_GOOD_PASSES = 40
LATE_ITERATION = 3
# A sample of that iteration, of jobs with this seed and batch.
LATE_SAMPLE = int(sample_numbers(LATE_ITERATION, seed=0, num_samples=500, global_batch_size=8)[0])


class _After(nn.Module):
    """Fine for a while, then it does what it is told to."""

    def __init__(self, go_wrong: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._go_wrong = go_wrong
        self._num_passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self._num_passes += not _is_profiled()
        return self._go_wrong(x) if self._num_passes > NUM_GOOD_PASSES else x


def _is_profiled() -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals["__name__"] == profiler.__name__:
            return True
        frame = frame.f_back
    return False


def _raise(_: Tensor) -> Tensor:
    raise ValueError("a mistake in the user's model")


def _leave(_: Tensor) -> Tensor:
    raise SystemExit(5)


def _interrupt(_: Tensor) -> Tensor:
    raise KeyboardInterrupt


class _Unspeakable(nn.Module):
    """Raises an error whose text cannot be had."""

    class Error(RuntimeError):
        def __str__(self) -> str:
            raise ValueError("no text")

    def forward(self, x: Tensor) -> Tensor:
        raise self.Error(x.shape)


class _Unrepeatable(nn.Module):
    """Raises word for word what torch says of an operator on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError(
            "cumsum_cuda_kernel does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for "
            "this operation, or you can use the 'warn_only=True' option, if that's acceptable "
            f"for you. {x.shape}"
        )


def _kill(pid: int, x: Tensor) -> Tensor:
    os.kill(pid, signal.SIGKILL)
    return x


def _around(module: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, WIDTH), module, nn.Linear(WIDTH, 5))


def raises() -> nn.Sequential:
    """Raises in a forward of its own."""
    return _around(_After(_raise))


def multiplies_wrongly() -> nn.Sequential:
    """Has torch raise."""
    return _around(_After(lambda x: x @ torch.zeros(3, 3)))


def overflows() -> nn.Sequential:
    """Its loss becomes NaN."""
    return _around(_After(lambda x: x * float("inf")))


def leaves() -> nn.Sequential:
    """Calls sys.exit."""
    return _around(_After(_leave))


def interrupts() -> nn.Sequential:
    """Raises what Ctrl-C raises."""
    return _around(_After(_interrupt))


def unspeakable() -> nn.Sequential:
    """Raises an error that raises another one when it is shown."""
    return _around(_Unspeakable())


def repeats_not() -> nn.Sequential:
    """Has an operator of which a GPU gives other bits each time."""
    return _around(_Unrepeatable())


def killed() -> nn.Sequential:
    """Its worker is killed, as the kernel does where memory runs out."""
    return _around(_After(lambda x: _kill(os.getpid(), x)))


def killed_with_its_node() -> nn.Sequential:
    """Its worker's agent is killed."""
    return _around(_After(lambda x: _kill(os.getppid(), x)))


def killed_at_once() -> nn.Sequential:
    """The process that looks at it is killed."""
    os.kill(os.getpid(), signal.SIGKILL)
    return raises()


def raises_at_once() -> nn.Sequential:
    """Cannot be built."""
    raise ValueError("a mistake in the user's constructor")


def with_batch_norm() -> nn.Sequential:
    """Couples the samples of a batch."""
    return _around(nn.BatchNorm1d(WIDTH))


class _Counter(nn.Module):
    """Counts its forwards in a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x


def with_counter() -> nn.Sequential:
    """Keeps something of its batches that is no class of torch."""
    return _around(_Counter())


def returns_nothing() -> None:
    """No layers."""


_num_losses = 0


def _raising_loss(output: Tensor, targets: Tensor) -> Tensor:
    global _num_losses
    _num_losses += 1
    if _num_losses > NUM_GOOD_PASSES:
        raise ValueError("a mistake in the user's loss")
    return nn.functional.cross_entropy(output, targets, reduction="sum")


def with_raising_loss() -> tuple[nn.Sequential, object]:
    """Its loss function raises after a while."""
    return _around(nn.Tanh()), _raising_loss


def _mean_loss(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, targets)


def with_mean_loss() -> tuple[nn.Sequential, object]:
    """Its loss has the reduction that torch takes if none is named."""
    return _around(nn.Tanh()), _mean_loss


def _detached_loss(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, targets, reduction="sum").detach()


def with_detached_loss() -> tuple[nn.Sequential, object]:
    """Nothing can be learned from its loss."""
    return _around(nn.Tanh()), _detached_loss


def _loss_of_attribute(output: Tensor, targets: Tensor) -> Tensor:
    logits = output.logits  # type: ignore[attr-defined]
    return nn.functional.cross_entropy(logits, targets, reduction="sum")


def with_loss_of_attribute() -> tuple[nn.Sequential, object]:
    """Its loss takes the output for that of a whole model of transformers."""
    return _around(nn.Tanh()), _loss_of_attribute


class _Detached(nn.Linear):
    """A layer from which no gradient comes back."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


def detaches() -> nn.Sequential:
    """Its first two layers would never learn; `helpers.mistaken_models:detaches`."""
    return nn.Sequential(nn.Linear(8, WIDTH), _Detached(WIDTH, WIDTH), nn.Linear(WIDTH, 5))


def detaches_what_is_frozen() -> nn.Sequential:
    """The same, but those are not to learn."""
    model = detaches()
    model[:2].requires_grad_(False)
    return model


def changes_its_input() -> nn.Sequential:
    """Its second layer does; `helpers.mistaken_models:changes_its_input`."""
    return nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 5))


class _ChangedWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.clamp_(-1, 1)
        return super().forward(x)


def changes_its_weight() -> nn.Sequential:
    """Its second layer does; `helpers.mistaken_models:changes_its_weight`."""
    return nn.Sequential(nn.Linear(8, WIDTH), _ChangedWeight(WIDTH, 5))


def _loss_of_next_classes(output: Tensor, targets: Tensor) -> Tensor:
    targets += 1
    return nn.functional.cross_entropy(output, targets, reduction="sum")


def changes_its_targets() -> tuple[nn.Sequential, object]:
    """Its loss does, which is no mistake where it gets each target once: four of five classes."""
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Linear(WIDTH, 5)), _loss_of_next_classes


def _hooked(register: str) -> nn.Sequential:
    last = nn.Linear(WIDTH, 5)
    getattr(last.weight, register)(lambda gradient: gradient)
    return nn.Sequential(nn.Linear(8, WIDTH), last)


def hooks_a_gradient() -> nn.Sequential:
    """Its last layer's weight has a hook; `helpers.mistaken_models:hooks_a_gradient`."""
    return _hooked("register_hook")


def hooks_a_sum() -> list[Callable[[], nn.Module]]:
    """The same after the gradient was added, in layers that functions build."""
    return [partial(nn.Linear, 8, WIDTH), lambda: _hooked("register_post_accumulate_grad_hook")[1]]


def hooks_what_is_frozen() -> nn.Sequential:
    """The hook does nothing."""
    model = hooks_a_gradient()
    model[1].weight.requires_grad_(False)
    return model


class _ListedHead(nn.Module):
    """Has another layer's module in a list, where torch does not see it."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.other = [other]

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale) @ self.other[0].weight


class _LambdaHead(nn.Module):
    """Has a lambda, of which a copy still calls the first module's part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 5)
        self.act: Callable[[Tensor], Tensor] = lambda x: self.linear(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class _Force(nn.Linear):
    """Derives by its input, for which its forward makes a leaf."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = super().forward(x).square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


def lists_a_module() -> nn.Sequential:
    """Its last layer's list has the first; `helpers.mistaken_models:lists_a_module`."""
    first = nn.Linear(8, WIDTH)
    return nn.Sequential(first, nn.Tanh(), _ListedHead(first))


def keeps_a_lambda() -> list[Callable[[], nn.Module]]:
    """Its last layer does; `helpers.mistaken_models:keeps_a_lambda`."""
    return [partial(nn.Linear, 8, WIDTH), _LambdaHead]


def makes_a_leaf() -> nn.Sequential:
    """Nothing is wrong with it: the leaf is no state."""
    return nn.Sequential(_Force(8, WIDTH), nn.Linear(8, 5))


def ties_in_a_layer() -> nn.Sequential:
    """Nothing is wrong with it: the last layer has the first one's weight under two names."""
    first, last = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for part in last:
        part.weight = first.weight
    return nn.Sequential(first, _TwoTensors(), _Sum(), last)


class _Sum(nn.Module):
    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return x[0] + x[1]


class _TwoTensors(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.exp()


class _TwoArguments(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale


def takes_two_arguments() -> nn.Sequential:
    """Its fifth layer expects that a tuple is unpacked."""
    return nn.Sequential(
        *(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), _TwoTensors()),
        *(_TwoArguments(), nn.Linear(WIDTH, 5)),
    )


class _MissingKey(nn.Module):
    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return inputs["hidden"]


class _OneKey(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"state": x}


def misses_a_key() -> nn.Sequential:
    """Its third layer looks for a key that the second does not return."""
    return nn.Sequential(nn.Linear(8, WIDTH), _OneKey(), _MissingKey(), nn.Linear(WIDTH, 5))


class _RaisingData:
    num_reads = 0

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.num_reads += 1
        if self.num_reads > NUM_GOOD_PASSES:
            raise ValueError("a mistake in the user's data")
        sample: tuple[Tensor, Tensor] = points()[index]
        return sample


def raising_data() -> _RaisingData:
    """Data that cannot be read after a while."""
    return _RaisingData()


class _KeptGenerator:
    """Adds noise from a generator of its own."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = points()[index]
        return x + torch.randn(8, generator=self._generator), y


def kept_generator() -> _KeptGenerator:
    """Data whose samples depend on what was read before."""
    return _KeptGenerator()


def unshifted() -> list[tuple[Tensor, Tensor]]:
    """Targets as a model of transformers takes them, which shifts them itself."""
    return [(torch.arange(i, i + 16),) * 2 for i in range(50)]


def reads_tokens() -> nn.Sequential:
    """Layers for such data."""
    return nn.Sequential(nn.Embedding(128, WIDTH), nn.Linear(WIDTH, 128))


class _OneIsWrong:
    """The points, one of which is changed."""

    def __init__(self, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._change = change

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = points()[index]
        return self._change(x, y) if index == LATE_SAMPLE else (x, y)


def one_label() -> _OneIsWrong:
    """One label that is no class."""
    return _OneIsWrong(lambda x, y: (x, y + 9))


def one_shape() -> _OneIsWrong:
    """One sample that is shorter than the others."""
    return _OneIsWrong(lambda x, y: (x[:7], y))


def one_raises() -> _OneIsWrong:
    """One sample that cannot be read."""
    return _OneIsWrong(lambda x, y: (_raise(x), y))


def other_labels() -> list[tuple[Tensor, Tensor]]:
    """Labels that are no classes of the model."""
    return [(x, y + 9) for x, y in (points()[index] for index in range(8))]


def other_shapes() -> list[tuple[Tensor, Tensor]]:
    """Samples with fewer numbers than the first layer takes."""
    return [(x[:7], y) for x, y in (points()[index] for index in range(8))]


def misspelt(output: Tensor, targets: Tensor) -> Tensor:
    """A metric that calls what is not there."""
    hits: Tensor = output.armgax(-1) == targets  # type: ignore[attr-defined]
    return hits.sum()


def two_numbers(output: Tensor, _: Tensor) -> Tensor:
    """A metric that returns more than one number."""
    return output.new_zeros(2)
