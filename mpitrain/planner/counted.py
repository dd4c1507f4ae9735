"""Operations and memory of each block of a model, from one pass through it, and estimated seconds on any machine.

The pass uses fake tensors, which have no values; if a block needs values (control flow that depends on data), the pass
uses real ones. The pass records each operation with its matrix products and its bytes, and the memory in use. An
operation takes the longer of the time for its products and the time for its bytes. (The roofline model: Williams et al.
2009.)
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from math import log
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from mpitrain.parallel.costs import AxisExchange
from mpitrain.parallel.recompute import is_product
from mpitrain.pipe.stage import _begins_in_place
from mpitrain.pipe.wire import as_tuple
from mpitrain.planner.machine import MachineProfile
from mpitrain.planner.subject import Cut, signature

_ATEN = torch.ops.aten
_FREE = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "_local_scalar_dense", "_unsafe_view")


class CountedOperation(NamedTuple):
    """An operation of PyTorch with the work that it does.

    Attributes:
        name: Name of the operation in ATen.
        flops: Floating-point operations of its matrix products; 0 if it has none.
        nbytes: Bytes read and written.
        products: Number of equal matrix products that it consists of.
        kept_bytes: Bytes of its results if `train.recompute "selective"` keeps them, else 0.
    """

    name: str
    flops: float
    nbytes: float
    products: float = 1.0
    kept_bytes: float = 0.0

    @property
    def size(self) -> float:
        """Geometric mean of the three dimensions of one of its matrix products."""
        return max(1.0, math.pow(self.flops / 2 / max(1.0, self.products), 1 / 3))


class OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that records every PyTorch operation, and the allocation and release of each result's memory.

    Args:
        guess: If true, an integer that a block reads from a tensor without values is 0.

    Attributes:
        operations: Operations recorded since this list was last replaced.
        calls: Number of calls, views included.
    """

    def __init__(self, *, guess: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[CountedOperation] = []
        self.calls = 0
        self._guess = guess
        self._changes: list[tuple[int, int]] = []  # (number of the memory, bytes), with negative bytes at its release
        self._numbers: dict[int, int] = {}  # number of each piece of memory in use, by the address of its storage
        self._references: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._guess and func is _ATEN._local_scalar_dense.default and not args[0].is_floating_point():
            return 0
        self.calls += 1
        out = func(*args, **kwargs)
        for result in tree_leaves(out):
            if isinstance(result, torch.Tensor):
                self._track(result)
        name = func._overloadpacket.__name__
        if func.namespace == "aten" and not func.is_view and name not in _FREE:
            results = sum(t.nbytes for t in tree_leaves(out) if isinstance(t, torch.Tensor))
            kept_bytes = results if is_product(func, args, kwargs) else 0
            touched = {id(t): t.nbytes for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)}
            flops, products = flops_of(func._overloadpacket, args, kwargs, out)
            self.operations.append(CountedOperation(name, flops, sum(touched.values()), products, kept_bytes))
        return out

    def mark(self) -> int:
        """Return a mark of the current time, for `peak`."""
        return len(self._changes)

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the memory of a tensor; None for memory that is older than the recording."""
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def peak(self, begin: int, end: int, without: Iterable[int | None] = ()) -> int:
        """Return the most bytes in use at once between two marks, counting memory that was allocated while recording.

        Args:
            begin: First mark.
            end: Second mark.
            without: Numbers of memory that is not counted.
        """
        excluded = set(without)
        sizes = [0 if number in excluded else nbytes for number, nbytes in self._changes[:end]]
        return max([0, *list(accumulate(sizes))[max(0, begin - 1) :]])

    def _track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        if address in self._numbers:
            return
        number = self._numbers[address] = len(self._changes)
        self._changes.append((number, nbytes))

        def on_release(_: object) -> None:
            self._changes.append((number, -nbytes))
            self._numbers.pop(address, None)
            self._references.pop(address, None)

        self._references[address] = weakref.ref(storage, on_release)


def flops_of(operation: Any, args: Any, kwargs: Any, out: Any) -> tuple[float, float]:
    """Return the floating-point operations of an operation's matrix products, and the number of these products.

    Args:
        operation: Operation of PyTorch, without the overload.
        args: Its arguments.
        kwargs: Its keyword arguments.
        out: Its result.
    """
    count = flop_registry.get(operation)
    if operation is _ATEN._scaled_dot_product_flash_attention_for_cpu:  # the registry has only the attention of devices
        flops = sdpa_flop_count(*(t.shape for t in args[:3]))  # type: ignore[no-untyped-call]
    elif operation is _ATEN._scaled_dot_product_flash_attention_for_cpu_backward:
        flops = sdpa_backward_flop_count(*(t.shape for t in args[:4]))  # type: ignore[no-untyped-call]
    elif count is not None:
        flops = count(*args, **kwargs, out_val=out)
    else:
        return 0.0, 1.0
    products = 1
    if "attention" in operation.__name__:
        query, passes = (args[1], 5) if "backward" in operation.__name__ else (args[0], 2)
        products = passes * query.shape[0] * query.shape[1]
    elif operation in (_ATEN.bmm, _ATEN.baddbmm):
        products = args[-1].shape[0]
    elif operation is _ATEN.convolution_backward:
        products = max(1, sum(args[-1][:2]))
    return float(flops), float(products)


_FALLBACK = 4e10  # operations per second of a core or device whose profile has no table
_START = 1.5e-5  # seconds until an operation begins, from Python or autograd, on one core
_SETUP_SECONDS = {  # further seconds of operations that reorder their tensors, or consist of several operations
    "convolution": 1.2e-4,
    "convolution_backward": 1.6e-4,
    "native_batch_norm": 5e-5,
    "native_batch_norm_backward": 5e-5,
}
_EFFICIENCY = {  # share of the speed of a product of cold matrices of that size, on one core
    "convolution": 0.75,
    "convolution_backward": 0.7,
    "_scaled_dot_product_flash_attention_for_cpu": 0.7,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 0.7,
    "addmm": 0.9,
    "mm": 0.9,
}
_LAUNCH = 6e-6  # seconds until an operation begins on a device
_COST_FACTORS = {  # seconds of an operation over those of moving its bytes, on one core; not listed: 1
    "gelu": 6.0,
    "gelu_backward": 6.0,
    "tanh": 4.0,
    "exp": 2.0,
    "log": 2.0,
    "_softmax": 2.0,
    "_log_softmax": 2.0,
    "polar": 4.0,
    "native_layer_norm": 1.5,
    "native_layer_norm_backward": 2.0,
    "native_batch_norm": 4.5,
    "native_batch_norm_backward": 3.5,
    "native_dropout": 4.0,
    "bernoulli_": 8.0,
}


def seconds(operations: Sequence[CountedOperation], machine: MachineProfile, precision: str, threads: int = 1) -> float:
    """Return the estimated seconds of a rank for some operations, while all other ranks of its node do the same.

    Args:
        operations: Operations that run one after the other.
        machine: Profile with the speeds: of its device if it has one, else of a core.
        precision: Precision of matrix products: fp32, bf16 or fp16.
        threads: Threads that the rank computes with on the CPU.
    """
    on_core = machine.device is None
    gain, start = _thread_speedup(machine, threads), _START if on_core else _LAUNCH
    factors, setup, efficiency = (_COST_FACTORS, _SETUP_SECONDS, _EFFICIENCY) if on_core else ({}, {}, {})
    rate = _memory_rate(machine)
    table = sorted((machine.device or machine).matrix.get(precision, ()))
    total = 0.0
    for each in operations:
        seconds_to_move = each.nbytes * factors.get(each.name, 1.0) / rate
        computing = each.flops / (efficiency.get(each.name, 1.0) * _speed(table, each.size)) if each.flops else 0.0
        total += start + setup.get(each.name, 0.0) + max(computing, seconds_to_move) / gain
    return total


def seconds_to_move(nbytes: float, machine: MachineProfile, threads: int = 1) -> float:
    """Return the seconds in which a rank reads or writes some bytes, without the time to start an operation.

    Args:
        nbytes: Bytes read and written together.
        machine: Profile with the speeds.
        threads: Threads that the rank computes with on the CPU.
    """
    return nbytes / _memory_rate(machine) / _thread_speedup(machine, threads)


def _thread_speedup(machine: MachineProfile, threads: int) -> float:
    return 1.0 + (threads - 1) * machine.threads if machine.device is None else 1.0


def _memory_rate(machine: MachineProfile) -> float:
    """Return the bytes per second, read and written together, of a device, or of a core while all cores are busy."""
    if machine.device is not None:
        return machine.device.memory_rate
    links = machine.links
    return 2.0 * min(links.copy_rate, links.memory_rate / max(1, machine.cores))  # a copy reads and writes


def _speed(table: Sequence[tuple[int, float]], size: float) -> float:
    """Return the speed of products of a size: linear in log(size) between entries of the table, constant beyond."""
    if not table:
        return _FALLBACK
    if size <= table[0][0]:
        return table[0][1]
    for (low, slow), (high, fast) in pairwise(table):
        if size <= high:
            return slow + (fast - slow) * (log(size) - log(low)) / (log(high) - log(low))
    return table[-1][1]


# -- blocks


@dataclass(frozen=True)
class BlockObservation:
    """Work and memory of a block for one microbatch. Sizes are in bytes, as in `costs.BlockCost`.

    Attributes:
        saved_bytes: Memory that autograd keeps for backward.
        input_bytes: Input of the block.
        output_bytes: Output of the block.
        shared_bytes: Input that an earlier block keeps.
        working_bytes: Largest temporary memory beside `saved_bytes`; gradients of parameters are not counted.
        forward: Operations of the forward pass.
        needed: Number of these operations up to the last tensor that backward needs.
        saved: Number of tensors that autograd keeps.
        calls: Number of calls in the forward pass, views included.
        input: Operations of a backward pass that computes the gradient of the input alone.
        backward: Operations of the whole backward pass.
        forwards: Exchanges in the forward pass.
        backwards: Exchanges in the backward pass.
    """

    saved_bytes: float
    input_bytes: float
    output_bytes: float
    shared_bytes: float
    working_bytes: float
    forward: tuple[CountedOperation, ...]
    needed: float
    saved: float
    calls: float
    input: tuple[CountedOperation, ...]
    backward: tuple[CountedOperation, ...]
    forwards: tuple[AxisExchange, ...]
    backwards: tuple[AxisExchange, ...]


@dataclass(frozen=True)
class _TensorForm:
    """Shape and type of a tensor that one block passes to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    counted: bool  # its memory was counted as kept by autograd in an earlier block


def observe(cut: Cut, samples: int) -> list[BlockObservation]:
    """Return the work and memory of every block, from a forward and a backward pass of one microbatch.

    Equal blocks are run only once.

    Args:
        cut: Model as one rank has it; unchanged afterwards.
        samples: Samples of the microbatch.
    """
    observations: list[BlockObservation] = []
    known: dict[Any, tuple[BlockObservation, tuple[_TensorForm, ...], bool]] = {}
    with cut.mode():
        x, y = cut.samples(samples)
        inputs: tuple[_TensorForm, ...] = (_TensorForm(tuple(x.shape), x.dtype, False, False),)
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
                        block_input = values[0] if single else values
                        values = as_tuple(cut.call(number, block_input, cut.past(number, block_input)))
            else:
                block_pass = _BlockPass(cut, number, inputs, values if cut.fake is None or number == 0 else ())
                observed, outputs, single = block_pass.run(single, y if number == last else None)
                values = block_pass.values
                known[key] = observed, outputs, single
            observations.append(observed)
            inputs = outputs
    return observations


class _BlockPass:
    """One forward and backward pass through one block."""

    def __init__(self, cut: Cut, number: int, inputs: Sequence[_TensorForm], values: Sequence[torch.Tensor]) -> None:
        self.cut, self.number, self.inputs = cut, number, inputs
        block = cut.blocks[number][1]
        if not values:
            values = [torch.empty(each.shape, dtype=each.dtype) for each in inputs]
        self.leaves = [v.detach().requires_grad_(e.gradient) for v, e in zip(values, inputs, strict=True)]
        self.block_inputs = [
            _Sink.apply(v) if v.requires_grad else v  # type: ignore[no-untyped-call]
            for v in self.leaves
        ]
        if _begins_in_place(block) and any(e.gradient for e in inputs):
            self.block_inputs = [v.clone() for v in self.block_inputs]
        self.parameters = [p for p in block.parameters() if p.requires_grad]
        self.recorder = OperationRecorder(
            guess=any(group.size > 1 for group in cut.groups[:-1]) and cut.fake is not None
        )
        self.values: tuple[Any, ...] = ()

    def run(self, single: bool, y: torch.Tensor | None) -> tuple[BlockObservation, tuple[_TensorForm, ...], bool]:
        """Run the block and observe it.

        Args:
            single: If true, the block takes one tensor, else a tuple of tensors.
            y: Target, for the last block only.

        Returns:
            The observation, the tensors that the block outputs, and whether the output is one tensor.
        """
        cut, recorder = self.cut, self.recorder
        input_storages = [t.untyped_storage()._cdata for t in self.block_inputs]
        counted_storages = {p.untyped_storage()._cdata for p in cut.module.parameters()}
        counted_storages.update(at for at, each in zip(input_storages, self.inputs, strict=True) if each.counted)
        counter = _SavedTensors(counted_storages, recorder)
        x = self.block_inputs[0] if single else tuple(self.block_inputs)
        with cut.autocast():
            past = cut.past(self.number, x)
        with recorder:
            with saved_tensors_hooks(counter.add, lambda saved: saved), cut.autocast():
                out = cut.call(self.number, x, past)
                single = isinstance(out, torch.Tensor)
                if y is not None:
                    out = cut.loss(out, y)
            calls = recorder.calls
            forward, forwards = self._take_records()
            outputs = tuple(
                _TensorForm(tuple(t.shape), t.dtype, t.requires_grad, t.untyped_storage()._cdata in counted_storages)
                for t in as_tuple(out)
            )
            output_bytes = sum(t.nbytes for t in as_tuple(out))
            if cut.fake is None:
                self.values = tuple(t.detach() for t in as_tuple(out))
            input_bytes = sum(
                each.nbytes
                for each, at in zip(self.block_inputs, input_storages, strict=True)
                if at not in counted_storages
            )
            peak = recorder.peak(0, recorder.mark()) + input_bytes
            roots = [get_gradient_edge(t) for t in as_tuple(out) if t.requires_grad]
            gradients = [torch.ones_like(t) for t in as_tuple(out) if t.requires_grad]
            del out
            halves, backwards, peak_back = self._backward(roots, gradients) if roots else (((), ()), (), 0)
        observed = BlockObservation(
            saved_bytes=counter.nbytes,
            input_bytes=sum(t.nbytes for t in self.block_inputs),
            output_bytes=output_bytes,
            shared_bytes=sum(t.nbytes for t, each in zip(self.block_inputs, self.inputs, strict=True) if each.counted),
            working_bytes=max(0, peak - counter.new, peak_back - counter.new),
            forward=forward,
            needed=counter.needed,
            saved=counter.count,
            calls=calls,
            input=halves[0],
            backward=halves[1],
            forwards=forwards,
            backwards=backwards,
        )
        return observed, outputs, single

    def _backward(
        self, roots: list[Any], gradients: list[torch.Tensor]
    ) -> tuple[tuple[tuple[CountedOperation, ...], tuple[CountedOperation, ...]], tuple[AxisExchange, ...], int]:
        """Return the operations of (backward to the input, whole backward), the exchanges, and the peak bytes."""
        recorder = self.recorder
        inputs = [t for t in self.leaves if t.requires_grad]
        input_operations: tuple[CountedOperation, ...] = ()
        self._take_records()
        if inputs and self.parameters:
            torch.autograd.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True)
            input_operations, _ = self._take_records()
        begin = recorder.mark()
        torch.autograd.backward(roots, gradients)
        end = recorder.mark()
        whole, backwards = self._take_records()
        numbers = [recorder.number(p.grad) for p in self.parameters if p.grad is not None]
        peak = recorder.peak(begin, end, numbers)
        for parameter in self.parameters:
            parameter.grad = None
        if not self.parameters:
            input_operations = whole
        return (input_operations, whole), backwards, peak

    def _take_records(self) -> tuple[tuple[CountedOperation, ...], tuple[AxisExchange, ...]]:
        """Return the operations and exchanges recorded since the last call."""
        operations, self.recorder.operations = tuple(self.recorder.operations), []
        return operations, self.cut.take_exchanges()


class _Sink(torch.autograd.Function):
    """Identity that discards the gradient of a block's input, as if the block before had consumed that gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


class _SavedTensors:
    """Counter of the bytes that autograd keeps, equivalent to `trainer.memory.ActivationMeter`."""

    def __init__(self, seen: set[int], recorder: OperationRecorder) -> None:
        self._seen, self._recorder = seen, recorder
        self.nbytes = self.new = 0  # new: the bytes of it that were allocated in the block
        self.needed = self.count = 0  # operations until the last of these tensors; their number

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that autograd keeps, and return it."""
        self.needed = len(self._recorder.operations)
        self.count += 1
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            nbytes = min(storage.nbytes(), tensor.nbytes)
            self.nbytes += nbytes
            self.new += nbytes if self._recorder.number(tensor) is not None else 0
        return tensor


def interpolate(a: Any, b: Any, along: float) -> Any:
    """Return the value at `along` on the straight line from a (at 0) to b (at 1); `along` may lie beyond 1.

    Args:
        a: `BlockObservation` for one number of samples, or a part of it: a number, operations or exchanges.
        b: `BlockObservation`, or the same part of it, for another number of samples. It is returned unchanged if its
            operations are not those of a.
        along: Position on the line.
    """
    if isinstance(a, int | float):
        return max(0.0, a + (b - a) * along)
    if isinstance(a, CountedOperation):
        return CountedOperation(b.name, *(interpolate(x, y, along) for x, y in zip(a[1:], b[1:], strict=True)))
    if isinstance(a, AxisExchange):
        return replace(b, nbytes=round(interpolate(a.nbytes, b.nbytes, along)))
    if isinstance(a, tuple):
        same_operations = [getattr(each, "name", "") for each in a] == [getattr(each, "name", "") for each in b]
        return tuple(interpolate(x, y, along) for x, y in zip(a, b, strict=True)) if same_operations else b
    return replace(
        b, **{each.name: interpolate(getattr(a, each.name), getattr(b, each.name), along) for each in fields(a)}
    )
