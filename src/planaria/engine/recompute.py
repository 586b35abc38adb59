"""Activation checkpointing: how much of a layer its backward computes again.

- full: the forward keeps the layer's input alone.
- selective: it also keeps the results of matrix products, convolutions and attention, which take
  long to compute. All else (norms, activation functions, softmax, dropout) is computed again.

The bits are those of a forward that keeps everything. The forward that runs again must therefore
draw the same random numbers: the caller's function seeds the generators before it calls the layer.
An attention kernel with dropout draws numbers, and would draw none if its result was kept. So it is
computed again; otherwise a later dropout would draw what that kernel has drawn the first time.

Source: Korthikanti et al. (MLSys '23), selective activation recomputation.
Differs: they compute only attention again, while attention kernels do that by themselves now.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from planaria.core.plan import Recomputation

_KEPT: Final = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "linear", "convolution"),
        *("_addmm_activation", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "flex_attention",
    }
)


def forward_that_keeps(
    function: Callable[..., Tensor], *arguments: Any, recomputation: Recomputation
) -> Tensor:
    """The result of a function whose backward computes that much of it again."""
    if recomputation == "none":
        return function(*arguments)
    selective = partial(create_selective_checkpoint_contexts, _policy)
    output: Tensor = checkpoint(
        function,
        *arguments,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=selective if recomputation == "selective" else noop_context_fn,
    )
    return output


def selective_bytes(module: nn.Module, hidden: Tensor) -> int:
    """Bytes that a layer keeps with "selective": its input and the results that are not computed
    again, each storage once."""
    kept = _KeptResults()
    with kept:
        module(hidden)
    storages = {storage.data_ptr(): storage for storage in (*kept.storages, _storage(hidden))}
    return sum(storage.nbytes() for storage in storages.values())


def refuse_changed_results(module: nn.Module, hidden: Tensor) -> None:
    """Refuses a layer whose backward with "selective" takes a result that was changed in place.

    torch sees most of these itself, but none where the result was given another shape before. Adds
    gradients to those of the layer and of `hidden`.

    Raises:
        RuntimeError: the backward takes such a result, or torch has seen one.
    """
    kept = _KeptResults()
    selective = partial(create_selective_checkpoint_contexts, _policy)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        forward, again = selective()
        return _both(forward, kept), _both(again, _TakenResults(kept))

    output: Tensor = checkpoint(
        module, hidden, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )
    if output.requires_grad:
        torch.autograd.backward(output, torch.ones_like(output))


@contextmanager
def _both(
    first: AbstractContextManager[Any], second: AbstractContextManager[Any]
) -> Iterator[None]:
    with first, second:
        yield


class _KeptResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages of the results that are kept; holds them, so that no two are at one
    address.

    Attributes:
        changed: numbers of the operators whose results another one has changed since, where those
            whose results are kept have numbers from 0 on.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: list[torch.UntypedStorage] = []
        self.changed: set[int] = set()
        self._numbers: dict[int, int] = {}  # By address of the storage.
        self._num_kept = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        addresses = (_storage(t).data_ptr() for t in _tensors_to_change(func, args, kwargs or {}))
        self.changed |= {self._numbers[each] for each in addresses if each in self._numbers}
        output = func(*args, **(kwargs or {}))
        if _is_kept(func, args, kwargs or {}):
            results = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
            storages = list(map(_storage, results))
            self._numbers |= {storage.data_ptr(): self._num_kept for storage in storages}
            self._num_kept += 1
            self.storages += storages
        return output


class _TakenResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses, while a layer is computed again, results that have changed since they were kept."""

    def __init__(self, kept: _KeptResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._num_taken = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if _is_kept(func, args, kwargs or {}):
            if self._num_taken in self._kept.changed:
                raise RuntimeError(
                    f"the layer has mutated in place what {func.name()} returned, which "
                    'activation_checkpointing = "selective" keeps; choose "full" or "none"'
                )
            self._num_taken += 1
        return func(*args, **(kwargs or {}))


def _tensors_to_change(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Tensor]:
    """The arguments that an operator will change."""
    schema = getattr(operator, "_schema", None)
    for index, argument in enumerate(schema.arguments) if schema is not None else ():
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _policy(
    _: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if _is_kept(operator, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    name = operator.name().removeprefix("aten::").split(".")[0]
    return name in _KEPT and not _draws_numbers(operator, args, kwargs)


def _draws_numbers(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator advances a random generator with these arguments."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    for index, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            value = args[index] if index < len(args) else argument.default_value
            return bool(kwargs.get("dropout_p", value))
    return True
