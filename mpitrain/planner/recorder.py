"""What a piece of code does, operation by operation: products, bytes, and the memory that lives meanwhile."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_ATEN = torch.ops.aten
_NOTHING = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "_local_scalar_dense", "_unsafe_view")


@dataclass(frozen=True)
class CountedOperation:
    """An operation of PyTorch.

    Attributes:
        name: As ATen has it.
        flops: Floating-point operations of its matrix products; 0 where it is none.
        nbytes: Read and written.
        products: How many matrix products of one size it is.
    """

    name: str
    flops: float
    nbytes: float
    products: float = 1.0

    @property
    def size(self) -> float:
        """The geometric mean of a product's three dimensions."""
        return max(1.0, math.pow(self.flops / 2 / max(1.0, self.products), 1 / 3))


class OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, notes every operation, and the beginning and end of the memory of each result.

    Args:
        guess: Take integers that are asked of tensors without values to be 0.

    Attributes:
        operations: Noted since somebody last put another list here.
    """

    def __init__(self, *, guess: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[CountedOperation] = []
        self._guess = guess
        self._changes: list[tuple[int, int]] = []  # number of the memory, bytes more or less
        self._numbers: dict[int, int] = {}  # of the memory that lives, by its storage's address
        self._references: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._guess and func is _ATEN._local_scalar_dense.default and not args[0].is_floating_point():
            return 0
        out = func(*args, **kwargs)
        for result in tree_leaves(out):
            if isinstance(result, torch.Tensor):
                self._see(result)
        name = func._overloadpacket.__name__
        if func.namespace == "aten" and not func.is_view and name not in _NOTHING:
            touched = {id(t): t.nbytes for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)}
            flops, products = _flops(func._overloadpacket, args, kwargs, out)
            self.operations.append(CountedOperation(name, flops, sum(touched.values()), products))
        return out

    def mark(self) -> int:
        """Now, for `peak`."""
        return len(self._changes)

    def number(self, tensor: torch.Tensor) -> int | None:
        """Of the memory of a tensor; None for what was there before."""
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def peak(self, begin: int, end: int, without: Iterable[int | None] = ()) -> int:
        """The most bytes that live at once between two marks, of what was made inside.

        Args:
            begin: A mark.
            end: A later one.
            without: Numbers of memory that does not count.
        """
        excluded = set(without)
        sizes = [0 if number in excluded else nbytes for number, nbytes in self._changes[:end]]
        return max([0, *list(accumulate(sizes))[max(0, begin - 1) :]])

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        if address in self._numbers:
            return
        number = self._numbers[address] = len(self._changes)
        self._changes.append((number, nbytes))

        def ended(_: object) -> None:
            self._changes.append((number, -nbytes))
            self._numbers.pop(address, None)
            self._references.pop(address, None)

        self._references[address] = weakref.ref(storage, ended)


def _flops(operation: Any, args: Any, kwargs: Any, out: Any) -> tuple[float, float]:
    """Floating-point operations, and how many products of one size they are."""
    if operation is _ATEN._scaled_dot_product_flash_attention_for_cpu:  # the registry has those of devices alone
        q, k, v = args[:3]
        flops = sdpa_flop_count(q.shape, k.shape, v.shape)  # type: ignore[no-untyped-call]
        return float(flops), 2.0 * q.shape[0] * q.shape[1]
    if operation is _ATEN._scaled_dot_product_flash_attention_for_cpu_backward:
        gradient, q, k, v = args[:4]
        flops = sdpa_backward_flop_count(gradient.shape, q.shape, k.shape, v.shape)  # type: ignore[no-untyped-call]
        return float(flops), 5.0 * q.shape[0] * q.shape[1]
    count = flop_registry.get(operation)
    if count is None:
        return 0.0, 1.0
    flops = float(count(*args, **kwargs, out_val=out))
    if operation in (_ATEN.bmm, _ATEN.baddbmm):
        return flops, float(args[-1].shape[0])
    if operation is _ATEN.convolution_backward:
        return flops, float(max(1, sum(args[-1][:2])))
    name = operation.__name__
    if "attention" in name:
        query = args[1] if "backward" in name else args[0]
        return flops, (5.0 if "backward" in name else 2.0) * query.shape[0] * query.shape[1]
    return flops, 1.0
