"""The backward pass of a stage in two: first the gradients of its inputs, later those of its parameters.

In the graph of a stage, `path` nodes are those from which an input is reached; a parameter hangs on path nodes by
nodes from which no input is reached:

    output <- Addmm <- Gelu <- Addmm <- input         path
                \\ T <- weight    \\ T <- weight         beside it

The input half runs the engine from the outputs to the inputs; the engine then leaves out what only parameters need
(Addmm computes one product instead of two). On the way it keeps the gradient that arrives at every path node that
parameters hang on. The weight half runs each of those nodes once more from that gradient, to its parameters alone.

A parameter that hangs on several path nodes (used twice) can't be had from one of them without going through the
others again; its gradient is complete in the input half already, and taken there. So are those of one dimension
(biases, norms): they cost little, and running a node once more would cost more.
(The idea of splitting: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = list[torch.Tensor | None]


def backward_inputs(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[Gradients, Callable[[], None]]:
    """The first half of a backward pass. No hooks of parameters run in either half.

    Args:
        outputs: Roots of the graph.
        gradients: Of the outputs.
        inputs: Leaves of the graph whose gradients are wanted at once.

    Returns:
        The gradients of the inputs (None where nothing depends on one), and what to call later to add the gradients
        of most parameters to their `.grad`; those of the others have been added.
    """
    late, early, arriving = _walk(outputs, inputs)
    edges = [GradientEdge(node, number) for node, numbers in arriving.items() for number in sorted(numbers)]
    targets: Any = [*inputs, *edges, *early]
    found = torch.autograd.grad(outputs, targets, gradients, retain_graph=True, allow_unused=True)
    of_inputs: Gradients = list(found[: len(inputs)])
    arrived = found[len(inputs) : len(inputs) + len(edges)]
    for parameter, gradient in zip(early, found[len(inputs) + len(edges) :], strict=True):
        _accumulate(parameter, gradient)
    at_node: dict[Node, list[tuple[GradientEdge, torch.Tensor]]] = {}
    for edge, gradient in zip(edges, arrived, strict=True):
        if gradient is not None:
            at_node.setdefault(edge.node, []).append((edge, gradient))

    def weights() -> None:
        for node, parameters in late.items():
            if node in at_node:
                roots, values = zip(*at_node[node], strict=True)
                gradients = torch.autograd.grad(roots, parameters, values, retain_graph=True, allow_unused=True)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    _accumulate(parameter, gradient)

    return of_inputs, weights


def _walk(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[dict[Node, list[torch.Tensor]], list[torch.Tensor], dict[Node, set[int]]]:
    """Find the path nodes, and the parameters that hang on them.

    Returns:
        late: The parameters of the weight half, by the path node they hang on.
        early: The parameters of the input half.
        arriving: Of each of those nodes, the numbers of its outputs at which gradients arrive.
    """
    roots = [get_gradient_edge(t).node for t in outputs]
    children, parents = _below(roots)
    path: dict[Node, None] = {}  # a set in order of the graph: ranks of a tensor axis must go through it alike
    above = [node for t in inputs if (node := get_gradient_edge(t).node) in children]
    while above:
        node = above.pop()
        if node not in path:
            path[node] = None
            above += parents.get(node, ())
    owners: dict[Any, Node] = {}  # parameter's node -> a path node it hangs on
    early: set[Any] = set()
    for node in path:
        for child, _ in children[node]:
            if child is not None and child not in path:
                for leaf in _leaves(child, children):
                    if owners.setdefault(leaf, node) is not node or leaf.variable.dim() < 2:
                        early.add(leaf)
    for node in roots:
        if node not in path:
            early.update(_leaves(node, children))
    late: dict[Node, list[torch.Tensor]] = {}
    for leaf, node in owners.items():
        if leaf not in early:
            late.setdefault(node, []).append(leaf.variable)
    arriving = {
        node: {number for parent in parents.get(node, ()) for child, number in children[parent] if child is node}
        for node in late
    }
    for t in outputs:
        edge = get_gradient_edge(t)
        if edge.node in arriving:
            arriving[edge.node].add(edge.output_nr)
    return late, [leaf.variable for leaf in early], arriving


def _below(roots: Sequence[Node]) -> tuple[dict[Node, Any], dict[Node, list[Node]]]:
    """Of all nodes reached from the roots: their edges as torch gives them, and the nodes above them."""
    children: dict[Node, Any] = {}
    parents: dict[Node, list[Node]] = {}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node in children:
            continue
        children[node] = below = node.next_functions
        for child, _ in below:
            if child is not None:
                if child in parents:
                    parents[child].append(node)
                else:
                    parents[child] = [node]
                    waiting.append(child)
    return children, parents


def _leaves(node: Node, children: dict[Node, Any]) -> set[Any]:
    """The AccumulateGrad nodes below a node: the only ones with nothing below them."""
    found: set[Any] = set()
    seen: set[Node] = set()
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            below = [child for child, _ in children[node] if child is not None]
            waiting += below
            if not below:
                found.add(node)
    return found


def _accumulate(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Add to .grad in place, as the engine does: it may be a view of an arena."""
    if gradient is None:
        return
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
