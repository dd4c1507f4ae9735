"""Recomputation of activations: backward computes again what forward did not keep (the setting train.recompute).

    true          each block is a segment: it keeps its input                        Chen et al. 2016
    "selective"   ... and the outputs of matrix products, convolutions and           Korthikanti et al. 2022, section 5
                  fused attention, which take long to compute
    "every N"     N consecutive blocks are a segment: only the first keeps its input
    [0, 2]        only these blocks are segments

    blocks     0   1   2   3   4        "every 2": forward keeps the inputs x, backward of block 3 first runs 2 and 3
               x .... x ..... x         again, and keeps their activations until their own backward

Backward of a segment first runs its blocks again, from the same state of the random generators, and stops at the last
tensor that backward needs. The results are bitwise those of a run that keeps everything.

A block belongs to the segment of the block before it only if it is called with that block's output. Model code between
the two blocks, or the end of a pipeline stage, therefore ends a segment.

References:
    Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost.
    Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mpitrain.comm.memory import device as devices
from mpitrain.errors import refusal
from mpitrain.layers.sync_batchnorm import pause_statistics
from mpitrain.layout.boxes import split
from mpitrain.parallel.rules import without_blocks
from mpitrain.shard.flat import blocks_of

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

Recompute = bool | str | Sequence[int]  # values of train.recompute
_PRODUCTS = {"mm", "addmm", "convolution", "_scaled_mm"}  # bmm: scores of attention, large and quick to compute


def segments(recompute: Recompute, blocks: int) -> list[list[int]]:
    """Return the numbers of the blocks of each segment.

    Args:
        recompute: Value of train.recompute.
        blocks: Number of blocks of the model.

    Raises:
        InputError: The setting names a block that the model does not have.
    """
    if not recompute:
        return []
    if not isinstance(recompute, bool | str):
        if missing := [number for number in recompute if not 0 <= number < blocks]:
            raise refusal(
                f"train.recompute names block {missing[0]}, but the model has {blocks} blocks; use numbers from 0 to "
                f"{blocks - 1}"
            )
        return [[number] for number in sorted(set(recompute))]
    length = int(recompute.removeprefix("every ")) if isinstance(recompute, str) and recompute != "selective" else 1
    return [list(range(begin, min(begin + length, blocks))) for begin in range(0, blocks, length)]


def recompute_blocks(
    module: nn.Module,
    recompute: Recompute = True,
    blocks: Sequence[nn.Module] = (),
    partition: Communicator | None = None,
) -> int:
    """Let the blocks of a model be recomputed in backward. Changes the module.

    Args:
        module: The model, or a pipeline rank's part of it.
        recompute: Value of train.recompute.
        blocks: Blocks of the whole model. Default: the module's blocks, as defined by `mpitrain.shard.flat.blocks_of`.
        partition: Ranks that compute the same blocks with equal inputs, and divide the kept inputs among them; None to
            keep them whole.

    Returns:
        The number of the module's blocks that are recomputed.

    Raises:
        InputError: The model has no blocks, or not those that the setting names.
    """
    blocks, here = blocks or blocks_of(module), set(module.modules())
    if not blocks:
        raise refusal(without_blocks("train.recompute"))
    groups = [[blocks[n] for n in numbers if blocks[n] in here] for numbers in segments(recompute, len(blocks))]
    for group in groups:
        _RecomputedBlocks(group, selective=recompute == "selective", partition=partition)
    return sum(map(len, groups))


class _RecomputedBlocks:
    """Consecutive blocks that form one segment in each forward pass; replaces their `forward` and `forward_slice`.

    Args:
        blocks: The blocks.
        selective: If true, outputs of products are kept.
        partition: Ranks that divide the kept inputs; None to keep them whole.

    Attributes:
        modules: The blocks. `mpitrain.shard.sharded_parameters` gathers their parameters together in backward.
    """

    def __init__(self, blocks: Sequence[nn.Module], *, selective: bool, partition: Communicator | None) -> None:
        self.modules, self._selective, self._partition = tuple(blocks), selective, partition
        # the segment that the next block may continue, that block's number, and the output it must be called with;
        # the output refers to the segment, so the segment must not refer to it
        self._open: tuple[_Segment, int, Any] | None = None
        for number, block in enumerate(blocks):
            for name in ("forward", "forward_slice"):
                if hasattr(block, name):
                    setattr(block, name, partial(self._call, number, getattr(block, name)))
            block.recomputed_with = self.modules  # type: ignore[assignment]

    def _call(self, number: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a block's function, and save no activations in training."""
        if not (self.modules[number].training and torch.is_grad_enabled()):
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        (segment, following, before), self._open = self._open or (None, 0, None), None
        first = before[0] if isinstance(before, tuple) and before else before
        if segment is None or following != number or not args or not (args[0] is before or args[0] is first):
            segment, before = _Segment(self.modules, self._selective, self._partition), None
        output = segment.run(function, args, kwargs, of_first=before is not None and args[0] is not before)
        if number + 1 < len(self.modules):
            self._open = segment, number + 1, output
        return output


@dataclass
class _Call:
    """A call of a block in a segment, without its first argument, which is the output of the call before it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generators: list[tuple[torch.device, torch.Tensor]]  # states before the call
    of_first: bool  # the first argument is the first element of the output before it


class _Segment:
    """One forward pass through consecutive blocks, of which only the first input is kept.

    Args:
        modules: The blocks.
        selective: If true, outputs of products are kept.
        partition: Ranks that divide the kept input; None to keep it whole.

    Attributes:
        calls: Calls of the blocks so far, in order.
        keep: Function set by `record_recomputed`.
    """

    keep: ClassVar[Callable[[torch.Tensor], Any] | None] = None

    def __init__(self, modules: Sequence[nn.Module], selective: bool, partition: Communicator | None) -> None:
        self.calls: list[_Call] = []
        self._partition = partition
        self._modules = modules
        self._places: list[ref[_Place]] = []  # of the tensors that autograd saves, in order
        self._values: WeakKeyDictionary[_Place, Any] = WeakKeyDictionary()  # recomputed
        contexts: Any = create_selective_checkpoint_contexts if selective else lambda _: (nullcontext(), nullcontext())
        self._keeping, self._restoring = contexts(_policy)

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, of_first: bool
    ) -> Any:
        """Call a function of a block, and save places for its activations."""
        if not self.calls:
            leaves, self._structure = tree_flatten(args[:1])
            self._others = [None if torch.is_tensor(leaf) else leaf for leaf in leaves]
            tensors = [leaf for leaf in leaves if torch.is_tensor(leaf)]
            if self._partition is not None:
                self._forms = [(t.dtype, t.shape) for t in tensors]
            self._input = _save([_own_part(t, self._partition) for t in tensors] if self._partition else tensors)
            self._device = next((t.device for t in tensors if devices.is_accelerator(t.device)), devices.CPU)
            kinds = {"cpu", self._device.type}
            self._autocast = [
                torch.autocast(kind, torch.get_autocast_dtype(kind))
                for kind in kinds
                if torch.is_autocast_enabled(kind)
            ]
        states = [(device, devices.generator_state(device)) for device in dict.fromkeys((devices.CPU, self._device))]
        self.calls.append(_Call(function, args[1:], kwargs, states, of_first))
        with saved_tensors_hooks(self._pack, self._unpack), self._keeping:
            output = function(*args, **kwargs)
        values = (getattr(leaf, "val", None) for leaf in tree_leaves(getattr(self._keeping, "storage", ())))
        self._products = [tensor for tensor in values if torch.is_tensor(tensor)]
        self._saved_products = _save([tensor.detach() for tensor in self._products])  # counted or moved by hooks, too
        for tensor in self._products:
            tensor.data = tensor.new_empty(0)  # PyTorch keeps the tensor, and with it the version of its values
        return output

    def _pack(self, tensor: torch.Tensor) -> _Place:
        place = _Place(tensor)
        self._places.append(ref(place))
        return place

    def _unpack(self, place: _Place) -> torch.Tensor:
        if place not in self._values:
            self._recompute()
        value = self._values.get(place)
        if value is not None and not torch.is_tensor(value):
            value = value()
        if value is None or (value.shape, value.dtype) != (place.shape, place.dtype):
            raise refusal(
                f"{type(self._modules[0]).__name__} saved other tensors when it was recomputed than in forward, so its "
                "gradients would be wrong; let its forward depend on its input alone, or set train.recompute to false"
            )
        return value

    def _recompute(self) -> None:
        """Run the blocks again, up to the last tensor that backward needs."""
        places = iter(self._places)
        last = self._places[-1]

        def fill(tensor: torch.Tensor) -> None:
            reference = next(places, last)
            place = reference()
            if place is not None:
                value = tensor.detach()
                self._values[place] = value if _Segment.keep is None else _Segment.keep(value)
            if reference is last:
                raise _CompleteError

        if self._products:
            for tensor, values in zip(self._products, self._saved_products.grad_fn.saved_tensors, strict=True):
                tensor.data = values
            self._products, self._saved_products = [], None
        inputs = self._input.grad_fn.saved_tensors
        if self._partition is not None:
            inputs = [_gather(t, *form, self._partition) for t, form in zip(inputs, self._forms, strict=True)]
        tensors = iter(inputs)
        leaves = [next(tensors) if other is None else other for other in self._others]
        output: Any = tree_unflatten(leaves, self._structure)
        with ExitStack() as stack:
            contexts = (torch.enable_grad(), devices.preserve_generators(self._device), *self._autocast)
            hooks = saved_tensors_hooks(fill, lambda nothing: nothing)
            for context in (*contexts, pause_statistics(self._modules), hooks, self._restoring):
                stack.enter_context(context)
            try:
                for number, call in enumerate(self.calls):
                    for device, state in call.generators:
                        devices.set_generator_state(device, state)
                    first = output if number == 0 else (output[0] if call.of_first else output,)
                    output = call.function(*first, *call.args, **call.kwargs)
            except _CompleteError:
                pass


def record_recomputed(keep: Callable[[torch.Tensor], Any] | None) -> None:
    """Record the activations that are recomputed from now on.

    Args:
        keep: Function of each of them. It returns the object to keep: the tensor, or an object that returns the tensor
            when it is called and is freed with it. None to record no more.
    """
    _Segment.keep = keep


class _Place:
    """Stands for a saved tensor in autograd's graph; when the graph frees it, its recomputed value is freed."""

    __slots__ = ("__weakref__", "dtype", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype


class _CompleteError(Exception):
    """Ends a recomputation; all tensors that backward needs have been computed."""


def _own_part(tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Return a copy of this rank's part of the bytes of a tensor that is equal on all ranks."""
    lo, hi = split(tensor.nbytes, comm.size)[comm.rank :][:2]
    return tensor.detach().contiguous().view(-1).view(torch.uint8)[lo:hi].clone()


def _gather(part: torch.Tensor, dtype: torch.dtype, shape: torch.Size, comm: Communicator) -> torch.Tensor:
    """Return the whole tensor of which every rank has a part. Collective.

    Args:
        part: This rank's part, by `_own_part`.
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
        comm: Ranks that have the parts.
    """
    bounds = split(shape.numel() * dtype.itemsize, comm.size)
    whole = part.new_empty(bounds[-1])
    comm.all_gather(whole, part, counts=[hi - lo for lo, hi in pairwise(bounds)])
    return whole.view(dtype).view(shape)


def _save(tensors: Sequence[torch.Tensor]) -> Any:
    """Save tensors as autograd does; they are the result's `grad_fn.saved_tensors`."""
    apply: Any = _Saved.apply
    return apply(torch.empty(0, requires_grad=True), *tensors)


class _Saved(torch.autograd.Function):
    """A node outside the graph, which saves tensors as autograd does, so that hooks that count them do so."""

    @staticmethod
    def forward(ctx: Any, nothing: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return nothing.clone()


def is_product(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if "selective" keeps an operation's output.

    It does for products, and for fused attention without dropout, which would have to be drawn again.

    Args:
        function: Operation of PyTorch, with the overload.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    name = function._schema.name.removeprefix("aten::")
    attention = name.startswith("_scaled_dot_product")
    if attention:
        names = [argument.name for argument in function._schema.arguments]
        attention = not (dict(zip(names, args, strict=False)) | dict(kwargs)).get("dropout_p", 0.0)
    return attention or name in _PRODUCTS


def _policy(ctx: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_product(function, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE
