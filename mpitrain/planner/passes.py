"""Sizes and operations of every block, from one pass of tensors without values through them.

Where a block asks for values (control flow that depends on data), the pass is one of real tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from mpitrain.pipe.stage import _begins_in_place
from mpitrain.pipe.wire import as_tuple
from mpitrain.planner.counted import CountedOperation, OperationRecorder
from mpitrain.planner.model import AxisExchange
from mpitrain.planner.subject import Cut, signature


@dataclass(frozen=True)
class Observed:
    """What a block does for one microbatch. Sizes are in bytes, as those of `model.Block`.

    Attributes:
        kept: What autograd keeps.
        taken: Its input.
        given: Its output.
        working: What is needed beside what is kept, at most; gradients of parameters not counted.
        forward: Operations of the forward pass.
        input: Operations of a backward pass to its input alone.
        backward: Operations of the backward pass.
        forwards: Exchanges in the forward pass.
        backwards: Those in the backward pass.
    """

    kept: float
    taken: float
    given: float
    working: float
    forward: tuple[CountedOperation, ...]
    input: tuple[CountedOperation, ...]
    backward: tuple[CountedOperation, ...]
    forwards: tuple[AxisExchange, ...]
    backwards: tuple[AxisExchange, ...]


@dataclass(frozen=True)
class _Passed:
    """A tensor between two blocks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    counted: bool  # autograd keeps its memory already


def observe(cut: Cut, samples: int) -> list[Observed]:
    """Let a microbatch go through all blocks, forward and backward; blocks that are alike do so once.

    Args:
        cut: The model; afterwards it is as it was.
        samples: Of the microbatch.
    """
    found: list[Observed] = []
    known: dict[Any, tuple[Observed, tuple[_Passed, ...], bool]] = {}
    with cut.mode():
        x, y = cut.samples(samples)
        inputs: tuple[_Passed, ...] = (_Passed(tuple(x.shape), x.dtype, False, False),)
        single = True
        values: tuple[Any, ...] = (x,)
        last = len(cut.blocks) - 1
        same = {block: signature(block) for _, block in cut.blocks}
        for number, (_, block) in enumerate(cut.blocks):
            key = (same[block], inputs, single, number == last)
            if key in known and (cut.fake is not None or number < last):
                observed, outputs, single = known[key]
                if cut.fake is None:
                    with torch.no_grad():
                        given = values[0] if single else values
                        values = as_tuple(cut.call(number, given, cut.past(number, given)))
            else:
                once = _Once(cut, number, inputs, values if cut.fake is None or number == 0 else ())
                observed, outputs, single = once.run(single, y if number == last else None)
                values = once.values
                known[key] = observed, outputs, single
            found.append(observed)
            inputs = outputs
    return found


class _Once:
    """One block's forward and backward pass."""

    def __init__(self, cut: Cut, number: int, inputs: Sequence[_Passed], values: Sequence[torch.Tensor]) -> None:
        self.cut, self.number, self.inputs = cut, number, inputs
        block = cut.blocks[number][1]
        if not values:
            values = [torch.empty(each.shape, dtype=each.dtype) for each in inputs]
        self.leaves = [v.detach().requires_grad_(e.gradient) for v, e in zip(values, inputs, strict=True)]
        in_place = _begins_in_place(block) and any(e.gradient for e in inputs)
        self.given = [_ended(v) if v.requires_grad else v for v in self.leaves]
        if in_place:
            self.given = [v.clone() for v in self.given]
        self.parameters = [p for p in block.parameters() if p.requires_grad]
        self.recorder = OperationRecorder(guess=cut.axis is not None and cut.fake is not None)
        self.values: tuple[Any, ...] = ()

    def run(self, single: bool, y: torch.Tensor | None) -> tuple[Observed, tuple[_Passed, ...], bool]:
        """Observe it; also what it gives, and whether that is one tensor. y: of the last block."""
        cut, recorder = self.cut, self.recorder
        of_input = [t.untyped_storage()._cdata for t in self.given]
        seen = {p.untyped_storage()._cdata for p in cut.module.parameters()}
        seen.update(at for at, each in zip(of_input, self.inputs, strict=True) if each.counted)
        made = _Kept(seen, recorder)
        x = self.given[0] if single else tuple(self.given)
        with cut.autocast():
            past = cut.past(self.number, x)
        with recorder:
            with saved_tensors_hooks(made.add, lambda kept: kept), cut.autocast():
                out = cut.call(self.number, x, past)
                single = isinstance(out, torch.Tensor)
                if y is not None:
                    out = cut.loss(out, y)
            forward, forwards = self._taken()
            outputs = tuple(
                _Passed(tuple(t.shape), t.dtype, t.requires_grad, t.untyped_storage()._cdata in seen)
                for t in as_tuple(out)
            )
            given = sum(t.nbytes for t in as_tuple(out))
            if cut.fake is None:
                self.values = tuple(t.detach() for t in as_tuple(out))
            held = sum(
                each.nbytes
                for each, at, passed in zip(self.given, of_input, self.inputs, strict=True)
                if at not in seen and not passed.counted
            )
            peak = recorder.peak(0, recorder.mark()) + held
            roots = [get_gradient_edge(t) for t in as_tuple(out) if t.requires_grad]
            gradients = [torch.ones_like(t) for t in as_tuple(out) if t.requires_grad]
            del out
            halves, backwards, peak_back = self._backward(roots, gradients) if roots else (((), ()), (), 0)
        observed = Observed(
            kept=made.nbytes,
            taken=sum(t.nbytes for t in self.given),
            given=given,
            working=max(0, peak - made.new, peak_back - made.new),
            forward=forward,
            input=halves[0],
            backward=halves[1],
            forwards=forwards,
            backwards=backwards,
        )
        return observed, outputs, single

    def _backward(
        self, roots: list[Any], gradients: list[torch.Tensor]
    ) -> tuple[tuple[tuple[CountedOperation, ...], tuple[CountedOperation, ...]], tuple[AxisExchange, ...], int]:
        """Operations of both halves, exchanges, and the most bytes alive."""
        recorder = self.recorder
        wanted = [t for t in self.leaves if t.requires_grad]
        of_input: tuple[CountedOperation, ...] = ()
        self._taken()
        if wanted and self.parameters:
            torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True)
            of_input, _ = self._taken()
        begin = recorder.mark()
        torch.autograd.backward(roots, gradients)
        end = recorder.mark()
        whole, backwards = self._taken()
        numbers = [recorder.number(p.grad) for p in self.parameters if p.grad is not None]
        peak = recorder.peak(begin, end, numbers)
        for parameter in self.parameters:
            parameter.grad = None
        if not self.parameters:
            of_input = whole
        return (of_input, whole), backwards, peak

    def _taken(self) -> tuple[tuple[CountedOperation, ...], tuple[AxisExchange, ...]]:
        """What has been noted since this was last asked."""
        operations, self.recorder.operations = tuple(self.recorder.operations), []
        return operations, self.cut.exchanged()


def _ended(x: torch.Tensor) -> torch.Tensor:
    """x, whose gradient ends here."""
    sunk: torch.Tensor = _Sink.apply(x)  # type: ignore[no-untyped-call]
    return sunk


class _Sink(torch.autograd.Function):
    """Where the gradient of a block's input ends: the block before would use it up, nobody collects it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


class _Kept:
    """Counts what autograd keeps, as `trainer.memory.ActivationMeter` does."""

    def __init__(self, seen: set[int], recorder: OperationRecorder) -> None:
        self._seen, self._recorder = seen, recorder
        self.nbytes = self.new = 0  # new: of it, made in the block

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            nbytes = min(storage.nbytes(), tensor.nbytes)
            self.nbytes += nbytes
            self.new += nbytes if self._recorder.number(tensor) is not None else 0
        return tensor


def between(a: Any, b: Any, along: float) -> Any:
    """Return what lies on the straight line from a (0) to b (1), or beyond.

    Args:
        a: Observed, or a part of it: a number, or some operations or exchanges.
        b: As much for another number of samples; where this did other operations, it is what is returned.
        along: Where.
    """
    if isinstance(a, int | float):
        return max(0.0, a + (b - a) * along)
    if isinstance(a, CountedOperation):
        return CountedOperation(b.name, *(between(x, y, along) for x, y in zip(a[1:], b[1:], strict=True)))
    if isinstance(a, AxisExchange):
        return replace(b, nbytes=round(between(a.nbytes, b.nbytes, along)))
    if isinstance(a, tuple):
        alike = [getattr(each, "name", "") for each in a] == [getattr(each, "name", "") for each in b]
        return tuple(between(x, y, along) for x, y in zip(a, b, strict=True)) if alike else b
    return replace(b, **{each.name: between(getattr(a, each.name), getattr(b, each.name), along) for each in fields(a)})
