"""A backward in two parts: the gradient of the input first, those of the parameters later.

autograd runs only the nodes that are needed for the gradients it is asked for. The first part asks
for the gradient of the input alone. A join is a node on a path from the input to the output at
which a branch that starts at parameters meets the path; the first part notes the gradients that
reach each join. The second part starts from these and runs the branches that lead to parameters
only. No gradient is computed twice, and every node computes what it would in a whole backward, so
the bits are the same. (The gradients of a parameter that a module uses three times or more are
summed in another order.)

Joins with a parameter in common run together, from the last to the first. The gradients that one of
them would pass to another are replaced by those noted there, which already include them.

Source: torch.distributed.pipelining, stage_backward_input and stage_backward_weight; Zero Bubble
(ICLR '24) for the idea.
Differs: no bookkeeping for several inputs and outputs, which are packed as one.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

_Gradients = tuple[Tensor | None, ...]


class _Join:
    """A node on a path from input to output that parameters join, and the gradients it gets."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.gradients: _Gradients = ()

    def keep_gradients(self, gradients: _Gradients) -> None:
        """Keeps the gradients that reach the node in the first part."""
        self.gradients = gradients

    def first_part_gradients(self, _: _Gradients) -> _Gradients:
        """The gradients of the first part, which replace those that reach the node now."""
        return self.gradients


class WeightGradients:
    """The second part of a backward, still to be run.

    Args:
        groups: joins with the parameters that join there; no parameter is in two groups.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[_Join], Sequence[nn.Parameter]]]) -> None:
        self._groups = groups

    def gradients(self) -> Iterator[Tensor]:
        """The gradients that were kept in the first part."""
        for joins, _ in self._groups:
            for join in joins:
                yield from (gradient for gradient in join.gradients if gradient is not None)

    def run(self) -> None:
        """Adds to `.grad` of each parameter, and releases the graph."""
        for joins, parameters in self._groups:
            edges, gradients = [], []
            for join in joins:
                for index, gradient in enumerate(join.gradients):
                    if gradient is not None:
                        edges.append(GradientEdge(join.node, index))
                        gradients.append(gradient)
            if not edges:
                continue
            with ExitStack() as hooks:
                # A single join needs them, too: torch runs hooks of its tensors again before these.
                for join in joins:
                    hooks.callback(join.node.register_prehook(join.first_part_gradients).remove)
                # Groups may share nodes, so none may free the tensors that the nodes have saved. A
                # function of the user's may return None as a gradient.
                gradients_found = torch.autograd.grad(
                    edges, parameters, gradients, retain_graph=True, allow_unused=True
                )
            for parameter, gradient in zip(parameters, gradients_found, strict=True):
                if gradient is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = gradient
                else:  # It may be memory in which gradients are summed.
                    parameter.grad.add_(gradient)
        self._groups = ()


def input_gradient(
    output: Tensor, gradient: Tensor | None, source: Tensor, parameters: Iterable[nn.Parameter]
) -> tuple[Tensor | None, WeightGradients]:
    """The gradient of `source`, and the second part of the backward, for the parameters.

    The whole backward is run if `output` does not depend on `source`, whose gradient is None then,
    or is `source`.

    Args:
        gradient: gradient of `output`; None if `output` is a scalar.
        source: leaf that requires a gradient.
    """
    groups = _groups(output.grad_fn, source, set(parameters)) if output.grad_fn else None
    if groups is None:
        torch.autograd.backward(output, gradient)
        return source.grad, WeightGradients(())
    with ExitStack() as hooks:
        for joins, _ in groups:
            for join in joins:
                hooks.callback(join.node.register_prehook(join.keep_gradients).remove)
        (source_gradient,) = torch.autograd.grad(
            output, source, gradient, retain_graph=True, allow_unused=True
        )
    return source_gradient, WeightGradients(groups)


def _groups(
    root: Node, source: Tensor, parameters: set[nn.Parameter]
) -> list[tuple[list[_Join], list[nn.Parameter]]] | None:
    """The joins below root with their parameters; joins with a common parameter form one group.

    None if no path leads from root to the source.
    """
    order = _parents_last(root)
    on_path: set[Node] = set()
    reached: dict[Node, set[nn.Parameter]] = {}
    joins: list[tuple[_Join, set[nn.Parameter]]] = []
    for node in order:
        variable = getattr(node, "variable", None)
        children = [child for child, _ in node.next_functions if child is not None]
        if variable is source or any(child in on_path for child in children):
            on_path.add(node)
        off_path = [reached[child] for child in children if child not in on_path]
        below = set[nn.Parameter]().union(*off_path)
        if variable is not None and variable in parameters:
            below.add(variable)
        reached[node] = below
        if node in on_path and below:
            joins.append((_Join(node), below))
    if root not in on_path:
        return None
    groups: list[tuple[list[_Join], set[nn.Parameter]]] = []
    for join, below in joins:
        touched = [group for group in groups if not group[1].isdisjoint(below)]
        groups = [group for group in groups if group[1].isdisjoint(below)]
        together = [join, *(other for group in touched for other in group[0])]
        groups.append((together, below.union(*(group[1] for group in touched))))
    return [(together, list(below)) for together, below in groups]


def _parents_last(root: Node) -> list[Node]:
    """Root and all nodes below it, each after the nodes that its edges lead to."""
    order: list[Node] = []
    seen = {root}
    stack = [(root, iter(root.next_functions))]
    while stack:
        node, children = stack[-1]
        for child, _ in children:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append((child, iter(child.next_functions)))
                break
        else:
            order.append(node)
            stack.pop()
    return order
