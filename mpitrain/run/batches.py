"""Batches of a script: those of its DataLoaders, and tensors that it hands to a model itself.

A batch is divided by rows where it arises. If the samples of a data set are stacked by torch's default, draw no random
numbers and leave the data set as it was, each rank reads its own rows only; else every rank reads all.
"""

from __future__ import annotations

import random
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.utils import _device
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import Dataset, _utils, dataloader

from mpitrain.run.checks import sum_of_bits
from mpitrain.run.layouts import BatchMemory, Rows
from mpitrain.run.regions import Regions, keep_scriptable
from mpitrain.run.session import ScriptRun
from mpitrain.run.tensors import BatchTensor, WholeTensor
from mpitrain.run.workers import use_in_every_loader

CHECK_EVERY = 10  # batches between two comparisons of what ranks cut


@dataclass(frozen=True)
class _OwnRows:
    """Batch of which this rank has read its rows only."""

    content: Any
    total: int

    def pin_memory(self) -> _OwnRows:
        """Return the rows in pinned memory, for a DataLoader that pins its batches."""
        return _OwnRows(_utils.pin_memory.pin_memory(self.content), self.total)


class Batches:
    """Division of batches by rows; `install` makes it take effect.

    Args:
        session: Run of the script.
    """

    def __init__(self, session: ScriptRun) -> None:
        self._session = session
        self._number = 0
        self._batch_dims: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._inside = 0
        self._regions = Regions(session)

    def install(self) -> None:
        """Replace torch's functions that make batches, and the call of a module."""
        fetch = _utils.fetch._MapDatasetFetcher.fetch
        following = dataloader._BaseDataLoaderIter.__next__
        call = torch.nn.Module.__call__
        batches = self

        def fetch_rows(self: Any, index: Any) -> Any:
            return batches._fetch(fetch, self, index)

        def next_batch(self: Any) -> Any:
            return batches._next(following, self)

        regions = self._regions
        regions.install()

        def call_module(self: Any, *args: Any, **kwargs: Any) -> Any:
            if regions.region is not None:
                return call(self, *args, **kwargs)
            return batches._call(call, self, args, kwargs)

        _utils.fetch._MapDatasetFetcher.fetch = fetch_rows  # type: ignore[method-assign]
        dataloader._BaseDataLoaderIter.__next__ = next_batch  # type: ignore[method-assign]
        use_in_every_loader()
        _device._device_constructors()  # remembers torch's functions
        for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (torch.Tensor, "new_tensor")):
            setattr(owner, name, _reading_elements(getattr(owner, name)))
        torch.nn.Module.__call__ = call_module  # type: ignore[method-assign]

    def forget(self) -> None:
        """Observe all modules again."""
        self._regions.forget()

    # -- DataLoaders

    def _fetch(self, fetch: Any, fetcher: Any, index: Any) -> Any:
        """Read samples: this rank's alone, if earlier ones showed that this makes no difference."""
        session = self._session
        if session.alone or not fetcher.auto_collation or fetcher.collate_fn is not _utils.collate.default_collate:
            return fetch(fetcher, index)
        before, attributes = _random_states(), _attributes(fetcher.dataset)
        if not getattr(fetcher, "reads_own_rows", False) or len(index) < session.size:
            out = fetch(fetcher, index)
            unchanged = _same(before, _random_states()) and attributes == _attributes(fetcher.dataset)
            fetcher.reads_own_rows = unchanged and all(_is_read(x, len(index)) for x in tree_flatten(out)[0])
            return out
        rows = session.layouts.share(len(index))
        try:
            with session.without_meetings():
                out = fetch(fetcher, index[rows.start : rows.start + rows.length])
            failed = not all(_is_read(x, rows.length) for x in tree_flatten(out)[0])
        except Exception:  # every rank reads all again, and then all get the error that one process gets
            failed = True
        changed = not _same(before, _random_states()) or attributes != _attributes(fetcher.dataset)
        if session.meet("samples that were read", failed or changed):
            fetcher.reads_own_rows = False
            _restore(before)
            return fetch(fetcher, index)
        return _OwnRows(out, len(index))

    def _next(self, following: Any, iterator: Any) -> Any:
        session = self._session
        if session.alone:
            return following(iterator)
        session.meet("the next batch of a DataLoader")
        content = following(iterator)
        if isinstance(content, _OwnRows):
            rows = session.layouts.share(content.total)
            return tree_map(lambda x: self._batch(x, rows), content.content)
        first = next((x for x in tree_flatten(content)[0] if isinstance(x, torch.Tensor) and x.dim()), None)
        if first is None or first.shape[0] < session.size:
            return content
        rows = session.layouts.share(first.shape[0])
        self._compare(content)
        return tree_map(lambda x: self._batch(rows.cut(x, 0).clone(), rows) if _has_rows(x, rows.total) else x, content)

    def _batch(self, local: torch.Tensor, rows: Rows) -> BatchTensor:
        return BatchTensor(self._session, local, self._session.layouts.of(local, 0, rows))

    def _compare(self, content: Any) -> None:
        """Compare now and then what every rank is about to cut, which must be equal."""
        if self._number % CHECK_EVERY == 0:
            code = 0
            for x in tree_flatten(content)[0]:
                if _is_dense(x) and not x.is_cpu and x.numel():
                    code = zlib.crc32(str(sum_of_bits(x)).encode(), code)
                elif _is_dense(x) and x.numel():
                    code = zlib.crc32(x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), code)
            self._session.meet(f"a batch with checksum {code:08x}")
        self._number += 1

    # -- tensors that a script hands to a model

    def _call(self, call: Any, module: Any, args: Any, kwargs: Any) -> Any:
        """Call a module; cut whole tensors where they enter the outermost one that has parameters."""
        if (
            self._session.alone
            or torch._C._functorch.peek_interpreter_stack() is not None
            or not self._session.is_main()
        ):
            return call(module, *args, **kwargs)
        if not self._inside and torch._C._current_graph_task_id() == -1:
            args, kwargs = self._cut(module, args, kwargs)
        self._inside += 1
        try:
            return self._regions.call(call, module, args, kwargs)
        finally:
            self._inside -= 1

    def _cut(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a module with the rows of this rank in place of whole tensors."""
        first = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
        if type(first) is BatchTensor:
            dim, rows = first.division.at, first.division.rows
        elif _is_dense(first) and first.dim() > 1 and next(module.parameters(), None) is not None:
            if module not in self._batch_dims:
                sequence_first = any(getattr(m, "batch_first", True) is False for m in module.modules())
                self._batch_dims[module] = int(sequence_first)
            dim = self._batch_dims[module]
            rows = self._session.layouts.share(first.shape[dim])
            if rows.total < self._session.size:
                return args, kwargs
            self._compare((args, kwargs))
        else:
            return args, kwargs

        def cut(x: Any) -> Any:
            fits = _is_dense(x) and x.dim() > dim and x.shape[dim] == rows.total
            return _CutRows.apply(x, self._session, dim, rows) if fits else x

        return [cut(x) for x in args], {name: cut(x) for name, x in kwargs.items()}


def _reading_elements(original: Any) -> Any:
    """Return a function that makes a tensor of data, such as a list with elements of a batch."""

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except RuntimeError:  # torch reads elements from memory
            leaves, spec = tree_flatten((args, kwargs))
            if not any(isinstance(x, WholeTensor) for x in leaves):
                raise
            args, kwargs = tree_unflatten([x.whole() if isinstance(x, WholeTensor) else x for x in leaves], spec)
            return original(*args, **kwargs)

    keep_scriptable(function, original)
    return function


def _is_dense(x: Any) -> TypeGuard[torch.Tensor]:
    return type(x) is torch.Tensor and x.layout == torch.strided


class _CutRows(torch.autograd.Function):
    """Division of a whole tensor by rows. Its gradient is a batch, which is whole to autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, session: ScriptRun, dim: int, rows: Rows) -> BatchTensor:
        local = rows.cut(x.detach(), dim).clone()
        return BatchTensor(session, local, session.layouts.of(local, dim, rows), BatchMemory(x))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradient, None, None, None


def _has_rows(x: Any, n: int) -> bool:
    return _is_dense(x) and x.dim() > 0 and x.shape[0] == n


def _is_read(x: Any, n: int) -> bool:
    """Return True for rows of samples on the host; on a device, samples might draw random numbers unnoticed."""
    return _has_rows(x, n) and x.is_cpu


def _random_states() -> tuple[torch.Tensor, Any, Any]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    same_numpy = a[2][2:] == b[2][2:] and bool((a[2][1] == b[2][1]).all())
    return torch.equal(a[0], b[0]) and a[1] == b[1] and same_numpy


def _restore(states: Sequence[Any]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def _attributes(dataset: Any) -> Any:
    """Return what a data set that counts, caches or draws with a generator of its own changes when it is read."""
    out = []
    for name, value in vars(dataset).items() if hasattr(dataset, "__dict__") else ():
        size = len(value) if isinstance(value, (list, dict, set)) else 0
        state: Any = None
        if isinstance(value, torch.Generator):
            state = value.get_state().numpy().tobytes()
        elif isinstance(value, np.random.Generator):
            state = str(value.bit_generator.state)
        elif isinstance(value, np.random.RandomState):
            state = str(value.get_state())
        elif isinstance(value, random.Random):
            state = value.getstate()
        elif isinstance(value, Dataset):
            state = _attributes(value)
        out.append((name, id(value), size, state))
    return out
