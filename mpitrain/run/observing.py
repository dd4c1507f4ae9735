"""Observation of a module that runs on batches: whether it treats samples apart.

Operations are seen where they are dispatched (`ScriptRun.crossings`). What Python code of the module does with a batch
besides operations is seen here: it reads the number of rows, its address or its values, or registers hooks on it. The
number of rows is a `BatchCount`, which may be used as a size of a tensor and as nothing else, because a rank that runs
the module on its own rows reads a smaller number.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from mpitrain.run.boundaries import enter, leave
from mpitrain.run.parameters import ShardedParameter
from mpitrain.run.tensors import BatchTensor, WholeTensor

if TYPE_CHECKING:
    from mpitrain.run.session import ScriptRun

_SIZED = {
    "view", "reshape", "expand", "zeros", "ones", "empty", "new_zeros", "new_ones", "new_empty", "broadcast_to",
    "unflatten",
}  # fmt: skip
_PROPERTIES = {
    "shape", "dtype", "device", "ndim", "requires_grad", "T", "mT", "H", "mH", "layout", "is_cuda", "is_sparse",
    "is_quantized", "is_nested", "is_mps", "is_meta", "is_cpu", "real", "imag", "itemsize",
}  # fmt: skip
_READS = {
    "__len__", "stride", "data_ptr", "storage", "untyped_storage", "storage_offset", "register_hook", "retain_grad",
    "register_post_accumulate_grad_hook", "backward", "requires_grad_", "set_", "resize_", "numpy", "tolist", "item",
    "__format__", "__repr__", "__str__", "__array__", "__bool__", "__float__", "__int__", "__index__", "__contains__",
    "__deepcopy__", "__reduce_ex__", "data", "share_memory_", "vmap", "grad", "nelement", "numel", "equal", "allclose",
    "is_nonzero",
}  # fmt: skip


class BatchCount(int):
    """Number of rows of a whole batch, or a multiple of it, which reports uses other than as a size."""

    report: Callable[[], None]

    @staticmethod
    def of(value: int, report: Callable[[], None]) -> BatchCount:
        """Return a count.

        Args:
            value: The number.
            report: Function that is called when the count is used for anything but sizes.
        """
        self = BatchCount(value)
        self.report = report
        return self

    def _times(self, other: Any) -> Any:
        if type(other) is int:
            return BatchCount.of(int(self) * other, self.report)
        self.report()
        return int(self) * other

    __mul__ = __rmul__ = _times

    def __eq__(self, other: object) -> bool:
        if type(other) is not BatchCount:
            self.report()
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


def _reporting(name: str) -> Any:
    original = getattr(int, name)

    def method(self: BatchCount, *args: Any) -> Any:
        self.report()
        return original(self, *args)

    return method


_OPERATORS = (
    "add radd sub rsub floordiv rfloordiv truediv rtruediv mod rmod divmod rdivmod pow rpow neg abs lt le gt ge bool "
    "float str repr format and rand or ror xor rxor lshift rlshift rshift rrshift invert index int round"
)
for _name in re.findall(r"\w+", _OPERATORS):
    setattr(BatchCount, f"__{_name}__", _reporting(f"__{_name}__"))


class Observation(TorchFunctionMode):
    """Mode that sees what Python code calls with tensors, and counts in `session.crossings` what depends on rows.

    Args:
        session: Run of the script.
    """

    def __init__(self, session: ScriptRun) -> None:
        super().__init__()
        self._session = session

    def _report(self) -> None:
        self._session.crossings += 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__
            if name not in _PROPERTIES:
                self._report()
        elif name in _READS or name in ("__set__", "__delete__") or _drops_single_rows(name, args, kwargs):
            self._report()
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self._report()
        counts = [x for x in tree_flatten((args, kwargs))[0] if type(x) is BatchCount]
        if counts and name not in _SIZED:
            self._report()
        out = func(*args, **kwargs)
        if name == "shape" or name == "size":
            return self._sizes(args[0], out, args[1:], kwargs)
        if counts and type(out) in (torch.Tensor, torch.nn.Parameter, ShardedParameter):
            return self._cut(out, counts)
        if type(out) is tuple or not isinstance(out, WholeTensor):
            return out
        if type(out) is not BatchTensor and type(out) is not ShardedParameter:
            self._report()
        return out

    def _sizes(self, x: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if type(x) is not BatchTensor:
            return out
        at, report = x.division.at, self._report
        if isinstance(out, torch.Size):
            return torch.Size([BatchCount.of(n, report) if d == at else n for d, n in enumerate(out)])
        dim = args[0] if args else kwargs.get("dim")
        return BatchCount.of(out, report) if isinstance(dim, int) and dim % x.dim() == at else out

    def _cut(self, x: torch.Tensor, counts: list[BatchCount]) -> torch.Tensor:
        """Return a tensor that was made with as many rows as a batch as a batch, so that its operations are seen."""
        session, count = self._session, counts[0]
        places = [d for d, n in enumerate(x.shape) if n == int(count)]
        if len(counts) > 1 or len(places) != 1 or int(count) < session.size:
            self._report()
            return x
        place = [(places[0], session.layouts.share(int(count)))]
        out: torch.Tensor = leave(session, place, enter(session, place, [x]))[0]
        return out


def _drops_single_rows(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a call is `squeeze` and would drop the rows' dimension on a rank that has one row of a batch."""
    if name not in ("squeeze", "squeeze_"):
        return False
    values = [*args, *kwargs.values()]
    x, dims = values[0], values[1:]
    if type(x) is not BatchTensor or 1 not in x.division.rows.counts:
        return False
    return not dims or x.division.at in [d % x.dim() for d in tree_flatten(dims)[0]]


class Witness:
    """State before a module runs, for comparison with the state after it.

    Args:
        session: Run of the script.
        module: Module that is observed.
        batches: Batches that it gets.
    """

    def __init__(self, session: ScriptRun, module: torch.nn.Module, batches: list[Any]) -> None:
        assert session.results is not None
        self._session, self._module, self._batches = session, module, batches
        self._start = len(session.results)
        self._crossings = session.crossings
        self._attributes = _attributes(module)
        self._random = random.getstate(), _numpy_state()
        self._versions = [x.memory.version for x in batches]
        self._references = _references(batches)

    @property
    def operations(self) -> int:
        """Number of batches that operations have made since."""
        return len(self._session.results or ()) - self._start

    def is_local(self, outputs: list[Any]) -> bool:
        """Return whether the module treated samples apart, drew nothing and kept nothing.

        Args:
            outputs: Leaves of what it returned, of which each is referred to once more.
        """
        session, batches = self._session, self._batches
        if session.crossings != self._crossings or not outputs or any(type(x) is not BatchTensor for x in outputs):
            return False
        memories = [x.memory for x in outputs]
        if len({id(m) for m in (*memories, *(x.memory for x in batches))}) < len(memories) + len(
            {id(x.memory) for x in batches}
        ):
            return False  # an output shares memory with an input or another output
        if self._versions != [x.memory.version for x in batches]:
            return False
        numpy_state = _numpy_state()
        same_numpy = self._random[1][1] == numpy_state[1] and (self._random[1][0] == numpy_state[0]).all()
        if random.getstate() != self._random[0] or not same_numpy:
            return False
        if any(map(int.__gt__, _references(batches), self._references)):
            return False  # somebody keeps an input
        return _same(self._attributes, _attributes(self._module)) and not self._keeps(outputs)

    def _keeps(self, outputs: list[Any]) -> bool:
        """Return whether anything but its outputs refers to a batch that the module made."""
        results = (self._session.results or [])[self._start :]
        outside = Counter(map(id, outputs))
        # `ScriptRun.results` and this list refer to each; the list of leaves and what the module returned, to outputs
        allowed = [2 + 2 * outside[id(x)] for x in results]
        return any(map(int.__gt__, _references(results), allowed))


def _references(tensors: list[Any]) -> list[int]:
    """Return how many Python objects refer to each tensor, the list of these among them; autograd's do not count."""
    return [sys.getrefcount(x) - (x._use_count() > 1) - 2 for x in tensors]  # 2: the variable and the argument


def _numpy_state() -> Any:
    state: Any = np.random.get_state()
    return state[1:3]


def _attributes(module: torch.nn.Module) -> list[tuple[str, Any, int]]:
    """Return what a module that counts, caches or keeps something changes when it is called."""
    out: list[tuple[str, Any, int]] = []
    for each in module.modules():
        for name, value in (*vars(each).items(), *each._buffers.items()):
            out.append((name, value, len(value) if isinstance(value, (list, dict, set)) else 0))
    return out


def _same(a: list[tuple[str, Any, int]], b: list[tuple[str, Any, int]]) -> bool:
    return len(a) == len(b) and all(
        one[1] is other[1] and one[0] == other[0] and one[2] == other[2] for one, other in zip(a, b, strict=True)
    )
