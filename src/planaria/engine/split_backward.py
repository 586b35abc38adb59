"""A backward in two parts: the gradient of the input first, those of the parameters later.

autograd runs only what the gradients that it is asked for need. So the first part asks for that of
the input, and notes what comes to each node of the graph at which parameters join the way from the
input to the output. The second part goes on from there, along what leads to parameters alone.
Nothing is computed twice, and every node computes what it would in a whole backward: the bits are
the same. (A parameter that a module uses three times or more is summed in another order.)

Nodes at which the same parameter joins are run together, from the last to the first. What one of
them would hand on to another is replaced by what was noted there, which has it already.

Source: torch.distributed.pipelining, stage_backward_input and stage_backward_weight; Zero Bubble
(ICLR '24) for the idea.
Differs: without its bookkeeping for several inputs and outputs.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

_Gradients = tuple[Tensor | None, ...]


class _Join:
    """A node of the way from input to output at which parameters join; what comes to it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.gradients: _Gradients = ()

    def note(self, gradients: _Gradients) -> None:
        """Keeps what comes to the node in the first part."""
        self.gradients = gradients

    def noted(self, _: _Gradients) -> _Gradients:
        """What came to it in the first part, whatever comes now."""
        return self.gradients


class WeightGradients:
    """The second part of a backward, still to be run.

    Args:
        groups: joins with the parameters that join there, no two groups with one in common.
    """

    def __init__(self, groups: Sequence[tuple[Sequence[_Join], Sequence[nn.Parameter]]]) -> None:
        self._groups = groups

    def gradients(self) -> Iterator[Tensor]:
        """What was noted in the first part."""
        for joins, _ in self._groups:
            for join in joins:
                yield from (one for one in join.gradients if one is not None)

    def run(self) -> None:
        """Adds to `.grad` of each parameter; lets go of the graph."""
        for joins, parameters in self._groups:
            edges, gradients = [], []
            for join in joins:
                for index, gradient in enumerate(join.gradients):
                    if gradient is not None:
                        edges.append(GradientEdge(join.node, index))
                        gradients.append(gradient)
            with ExitStack() as hooks:
                for join in joins if len(joins) > 1 else ():
                    hooks.callback(join.node.register_prehook(join.noted).remove)
                # Groups may share nodes, so none may free what these have saved.
                found = torch.autograd.grad(edges, parameters, gradients, retain_graph=True)
            for parameter, gradient in zip(parameters, found, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._groups = ()


def input_gradient(
    output: Tensor, gradient: Tensor | None, source: Tensor, parameters: Iterable[nn.Parameter]
) -> tuple[Tensor, WeightGradients]:
    """The gradient of `source`, and what is left to be done for the parameters.

    Args:
        output: that depends on source, a leaf that requires a gradient.
        gradient: of output; None if that is a scalar.
    """
    assert output.grad_fn is not None
    groups = _groups(output.grad_fn, source, set(parameters))
    with ExitStack() as hooks:
        for joins, _ in groups:
            for join in joins:
                hooks.callback(join.node.register_prehook(join.note).remove)
        (found,) = torch.autograd.grad(output, source, gradient, retain_graph=True)
    return found, WeightGradients(groups)


def _groups(
    root: Node, source: Tensor, parameters: set[nn.Parameter]
) -> list[tuple[list[_Join], list[nn.Parameter]]]:
    """The joins below root, those with parameters in common together."""
    order = _parents_last(root)
    on_way: set[Node] = set()
    reached: dict[Node, set[nn.Parameter]] = {}
    joins: list[tuple[_Join, set[nn.Parameter]]] = []
    for node in order:
        variable = getattr(node, "variable", None)
        children = [child for child, _ in node.next_functions if child is not None]
        if variable is source or any(child in on_way for child in children):
            on_way.add(node)
        off_way = [reached[child] for child in children if child not in on_way]
        below = set[nn.Parameter]().union(*off_way)
        if variable is not None and variable in parameters:
            below.add(variable)
        reached[node] = below
        if node in on_way and below:
            joins.append((_Join(node), below))
    groups: list[tuple[list[_Join], set[nn.Parameter]]] = []
    for join, below in joins:
        touched = [group for group in groups if not group[1].isdisjoint(below)]
        groups = [group for group in groups if group[1].isdisjoint(below)]
        together = [join, *(other for group in touched for other in group[0])]
        groups.append((together, below.union(*(group[1] for group in touched))))
    return [(together, list(below)) for together, below in groups]


def _parents_last(root: Node) -> list[Node]:
    """All nodes below root, each behind those that it leads to."""
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
