"""Stage of a pipeline: consecutive blocks of a model, and the data kept between a microbatch's forward and backward.

Recompute: forward keeps only the stage's input, and backward first runs forward again, from the same state of the
random generators. (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", with a stage as the segment.)

Slices of a sequence (TeraPipe, Li et al. 2021): a block that uses earlier positions has
`forward_slice(x, past) -> (y, state)`, where `past` lists the states of earlier slices in order. Each state is detached
from its slice's graph. Its `.grad` collects the gradients from later slices until its own slice's backward step.

Backward in halves, in the graphs that `pipe.deferral` chooses: first the gradients of a stage's inputs, later those of
its parameters. The weight half runs autograd's engine many times, and the engine visits all of a graph each time. The
stage's graph is therefore divided every few blocks. In each graph, `path` nodes are the nodes from which an input can
be reached. A parameter hangs on a path node if all nodes between the two are nodes from which no input can be reached:

    output <- Addmm <- Gelu <- Addmm <- input         path
                \\ T <- weight    \\ T <- weight         beside it

The input half runs the engine from the outputs to the inputs. The engine then skips the work that only parameters need
(Addmm computes one product instead of two). The input half also keeps the gradient that arrives at every path node that
parameters hang on. The weight half runs each of those nodes once more from that gradient, to its parameters alone.

A parameter that hangs on several path nodes (used twice) cannot be reached from one of them without going through the
others again. Its gradient is complete in the input half, and is taken there. So are the gradients of one-dimensional
parameters (biases, norms): they are cheap, and running a node once more would cost more.
(The idea of splitting: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from mpitrain.comm.memory import device as devices
from mpitrain.layers.loss_terms import terms_in
from mpitrain.layers.sync_batchnorm import pause_statistics
from mpitrain.pipe.deferral import StageSeconds, StageTimes, timed
from mpitrain.pipe.wire import as_tuple, map_tensors

State = tuple[torch.Tensor, ...]
_BLOCKS_PER_GRAPH = 4  # blocks in one graph, with backward in halves
Past = dict[int, list[State]]  # states of the earlier slices by block, for one microbatch and stage
Gradients = list[torch.Tensor | None]
Joint = list[tuple[torch.Tensor, torch.Tensor]]  # tensors that end one graph, and the leaves that begin the next


@dataclass
class SavedForward:
    """Data that a stage keeps of one microbatch (or slice) between forward and backward."""

    inputs: tuple[Any, ...]
    single: bool  # the input is a tensor, not a tuple
    outputs: tuple[torch.Tensor, ...] = ()  # the tensors of the output, or the loss
    needs_gradient: tuple[bool, ...] = ()  # for each output, whether it gets a gradient
    states: list[tuple[State, State]] = field(default_factory=list)  # pairs: state in the graph, its detached copy
    past: Past = field(default_factory=dict)
    # before forward, with recompute: states of the generators of the CPU and of the device, if there is one
    random: list[tuple[torch.device, torch.Tensor]] | None = None
    compute_loss: Callable[[Any], torch.Tensor] | None = None  # the loss of the output, on the last stage
    joints: list[Joint] = field(default_factory=list)  # where the graph is divided between blocks, in order
    weights: list[Callable[[], object]] = field(default_factory=list)  # functions that run the weight half
    share: float = 1.0  # the microbatch's share in the loss terms that the stage adds


class Stage:
    """One stage of a pipeline, which computes one microbatch at a time.

    Args:
        blocks: Blocks of the stage, in order.
        first: True for the first stage, whose input needs no gradient.
        recompute: If true, keep only the input, and run forward again before backward.
        halves: If true, backward runs in two halves, the inputs' gradients first.

    Attributes:
        times: Times of the passes while they are measured for `defer`; None to measure nothing.
        choosable: For each graph, whether its weight half need not be deferred; see `graph_parameters`.
    """

    def __init__(self, blocks: Sequence[nn.Module], *, first: bool, recompute: bool, halves: bool = False) -> None:
        self.blocks, self.first, self.recompute = list(blocks), first, recompute
        self._breaks_before = [
            halves and not first and number > 0 and number % _BLOCKS_PER_GRAPH == 0 and not _begins_in_place(block)
            for number, block in enumerate(self.blocks)
        ]
        self.deferred = (True,) * (1 + sum(self._breaks_before))  # for each graph, whether its weight half is deferred
        self.choosable = [True] * len(self.deferred)
        self.times: StageTimes | None = None
        self._terms = terms_in(self.blocks)
        self._copies_input = not first and bool(self.blocks) and _begins_in_place(self.blocks[0])

    def graph_parameters(self) -> list[set[nn.Parameter]]:
        """Return the parameters of each graph into which backward in halves divides the stage."""
        graphs = [set[nn.Parameter]()]
        for block, begins_graph in zip(self.blocks, self._breaks_before, strict=True):
            graphs += [set()] if begins_graph else []
            graphs[-1].update(block.parameters())
        return graphs

    def defer(self, deferred: tuple[bool, ...]) -> None:
        """Set for each graph whether `backward_input` leaves its weight half to `backward_weight`; end measuring."""
        self.times = None
        if not any(deferred):
            self._breaks_before, deferred = [False] * len(self.blocks), (False,)
        self.deferred = deferred

    def shortest_times(self) -> StageSeconds | None:
        """Return the shortest measured times; None if a time is missing."""
        return None if self.times is None else self.times.shortest(self.choosable, self.recompute)

    def forward(
        self,
        x: Any,
        compute_loss: Callable[[Any], torch.Tensor] | None = None,
        past: Past | None = None,
        share: float = 1.0,
    ) -> tuple[Any, SavedForward]:
        """Compute the stage's output.

        Args:
            x: Input of the stage, a tensor or a tuple; tensors from another stage are leaves of their graph.
            compute_loss: Function that computes the loss from the output, on the last stage.
            past: States of earlier slices, to which this slice's states are added; None for a whole sequence.
            share: Share of the microbatch in the terms that a `LossTerm` adds to the loss.

        Returns:
            The output, or the result of `compute_loss`, and the data that backward needs.
        """
        saved = SavedForward(as_tuple(x), not isinstance(x, tuple | list), compute_loss=compute_loss, share=share)
        if past is not None:
            saved.past = {number: list(states) for number, states in past.items()}
        run = partial(self._run, x, saved, past is not None)
        if self.times is not None and torch.is_grad_enabled():
            run = partial(timed, self.times.forward, run)
        if self.recompute and torch.is_grad_enabled():
            on = {t.device for t in saved.inputs if isinstance(t, torch.Tensor) and devices.is_accelerator(t.device)}
            saved.random = [(device, devices.generator_state(device)) for device in (devices.CPU, *on)]
            with torch.no_grad():
                output, states = run()
            # the output has no graph, but requires gradients if the recomputed one will
            if self._inputs(saved) or any(p.requires_grad for block in self.blocks for p in block.parameters()):
                output = map_tensors(lambda t: t.detach().requires_grad_(t.is_floating_point()), output)
        else:
            output, states = run()
            saved.outputs = as_tuple(output)
        saved.needs_gradient = tuple(isinstance(t, torch.Tensor) and t.requires_grad for t in as_tuple(output))
        if past is not None:
            for number, state in states.items():
                detached = tuple(t.detach().requires_grad_(torch.is_grad_enabled()) for t in state)
                saved.states.append((state, detached))
                past.setdefault(number, []).append(detached)
        return output, saved

    def backward(self, saved: SavedForward, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Add the parameters' gradients to `.grad`, and return the gradients of the inputs.

        Args:
            saved: Data that `forward` returned.
            gradients: Gradients of the outputs that require one; unused on the last stage, whose output is the loss.
        """
        roots, values = self._roots(saved, gradients)
        if roots:
            torch.autograd.backward(roots, values)
        return [_complete(t.grad, t) for t in self._inputs(saved)]

    def backward_input(self, saved: SavedForward, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of the inputs, and leave those of most parameters to `backward_weight`; see `defer`.

        Args:
            saved: Data that `forward` returned.
            gradients: Gradients of the outputs that require one; unused on the last stage, whose output is the loss.
        """
        roots, values = self._roots(saved, gradients)
        for graph in range(len(saved.joints), 0, -1):
            joint = saved.joints[graph - 1]
            input_gradients = self._backward_graph(saved, graph, roots, values, [leaf for _, leaf in joint])
            reached = [(t, g) for (t, _), g in zip(joint, input_gradients, strict=True) if g is not None]
            roots, values = [t for t, _ in reached], [g for _, g in reached]
        inputs = self._inputs(saved)
        input_gradients = self._backward_graph(saved, 0, roots, values, inputs)
        return [_complete(g, t) for g, t in zip(input_gradients, inputs, strict=True)]

    def _backward_graph(
        self,
        saved: SavedForward,
        graph: int,
        roots: list[torch.Tensor],
        values: list[torch.Tensor],
        inputs: list[torch.Tensor],
    ) -> Gradients:
        """Run the backward pass of one graph, or its input half if its weight half is deferred.

        Args:
            saved: Data that `forward` returned; the weight half is added to it.
            graph: Number of the graph in the stage.
            roots: Tensors that the backward pass starts from.
            values: Their gradients.
            inputs: Leaves of the graph whose gradients are needed.

        Returns:
            Gradient of each input; None if no root depends on it.
        """
        if not roots:
            return [None] * len(inputs)

        def whole() -> Gradients:
            torch.autograd.backward(roots, values)
            gradients = [t.grad for t in inputs]
            for t in inputs:
                t.grad = None
            return gradients

        def input_half() -> tuple[Gradients, Callable[[], object]]:
            return backward_inputs(roots, values, inputs) if inputs else ([], whole)  # no rank waits without inputs

        times = self.times
        if not self.deferred[graph] or (times is not None and not times.halves and self.choosable[graph]):
            return whole() if times is None else times.timed(graph, "whole", whole)
        gradients, weights = input_half() if times is None else times.timed(graph, "input", input_half)
        saved.weights.append(weights if times is None else partial(times.timed, graph, "weight", weights))
        return gradients

    def backward_weight(self, saved: SavedForward) -> None:
        """Add the gradients that `backward_input` deferred to the parameters' `.grad`."""
        for weights in saved.weights:
            weights()

    def _run(self, x: Any, saved: SavedForward, sliced: bool) -> tuple[Any, dict[int, State]]:
        """Run the blocks. Returns the output (or the loss), and the states of the blocks that use earlier positions."""
        states: dict[int, State] = {}
        for term in self._terms:
            term.share = saved.share
        if self._copies_input and torch.is_grad_enabled():
            x = map_tensors(torch.clone, x)
        for number, block in enumerate(self.blocks):
            if self._breaks_before[number] and torch.is_grad_enabled():
                joint = [(t, t.detach().requires_grad_(t.requires_grad)) for t in as_tuple(x)]
                saved.joints.append([(t, leaf) for t, leaf in joint if t.requires_grad])
                x = joint[0][1] if isinstance(x, torch.Tensor) else tuple(leaf for _, leaf in joint)
            look_back = getattr(block, "forward_slice", None) if sliced else None
            if look_back is None:
                x = block(x)
            else:
                x, states[number] = look_back(x, saved.past.get(number, []))
        return (x if saved.compute_loss is None else saved.compute_loss(x)), states

    def _roots(
        self, saved: SavedForward, gradients: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors that backward starts from (outputs and states), and their gradients."""
        if saved.random is not None:
            self._recompute(saved)
        outputs = [t for t, wants in zip(saved.outputs, saved.needs_gradient, strict=True) if wants]
        if saved.compute_loss is not None:
            gradients = [torch.ones_like(t) for t in outputs]
        reached = [(t, g) for t, g in zip(outputs, gradients, strict=True) if t.requires_grad]
        roots, values = [t for t, _ in reached], [g for _, g in reached]
        for state, detached in saved.states:
            for t, leaf in zip(state, detached, strict=True):
                if leaf.grad is not None and t.requires_grad:
                    roots.append(t)
                    values.append(leaf.grad)
        return roots, values

    def _recompute(self, saved: SavedForward) -> None:
        """Run forward again with a graph, from the same state of the random generators."""
        assert saved.random is not None
        generators = devices.preserve_generators(saved.random[-1][0])
        with generators, torch.enable_grad(), pause_statistics(self.blocks):
            for device, state in saved.random:
                devices.set_generator_state(device, state)
            x = saved.inputs[0] if saved.single else saved.inputs
            output, states = self._run(x, saved, bool(saved.states))
        saved.outputs, saved.random = as_tuple(output), None
        saved.states = list(zip(states.values(), (leaves for _, leaves in saved.states), strict=True))

    def _inputs(self, saved: SavedForward) -> list[torch.Tensor]:
        """Return the inputs whose gradients the previous stage waits for."""
        return [] if self.first else [t for t in saved.inputs if t.requires_grad]


def _complete(gradient: torch.Tensor | None, of: torch.Tensor) -> torch.Tensor:
    """Return the gradient, or zeros for an input that no output depends on."""
    return torch.zeros_like(of) if gradient is None else gradient


def _begins_in_place(block: nn.Module) -> bool:
    """Return whether the block overwrites its input, which must then not be a leaf of a graph."""
    while (child := next(block.children(), None)) is not None:
        block = child
    return bool(getattr(block, "inplace", False))


def backward_inputs(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[Gradients, Callable[[], None]]:
    """Run the first half of a backward pass. Hooks of parameters run in neither half.

    Args:
        outputs: Roots of the graph.
        gradients: Gradient of each output.
        inputs: Leaves of the graph whose gradients are needed at once.

    Returns:
        The gradients of the inputs (None if no output depends on one), and a function to call later, which adds the
        gradients of most parameters to their `.grad`. Those of the other parameters have been added already.
    """
    late, early, arriving = _walk(outputs, inputs)
    edges = [GradientEdge(node, number) for node, numbers in arriving.items() for number in sorted(numbers)]
    targets: Any = [*inputs, *edges, *early]
    results = torch.autograd.grad(outputs, targets, gradients, retain_graph=True, allow_unused=True)
    of_inputs: Gradients = list(results[: len(inputs)])
    arrived = results[len(inputs) : len(inputs) + len(edges)]
    for parameter, gradient in zip(early, results[len(inputs) + len(edges) :], strict=True):
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
        arriving: For each of those nodes, the numbers of its outputs at which gradients arrive.
    """
    roots = [get_gradient_edge(t).node for t in outputs]
    children, parents = _below(roots)
    path: dict[Node, None] = {}  # an ordered set: all ranks of a tensor axis must use the same order
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
    """Return the edges of all nodes reached from the roots, as torch gives them, and the parents of each node."""
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
    """Return the AccumulateGrad nodes below a node: the only nodes with nothing below them."""
    leaves: set[Any] = set()
    seen: set[Node] = set()
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            below = [child for child, _ in children[node] if child is not None]
            waiting += below
            if not below:
                leaves.add(node)
    return leaves


def _accumulate(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Add to `.grad` in place, as autograd does, because `.grad` may be a view of an arena."""
    if parameter.grad is None:
        parameter.grad = gradient
    elif gradient is not None:
        parameter.grad.add_(gradient)
