"""DistributedOptimizer: an optimizer that reduces gradients over the ranks before it updates parameters.

A hook on each parameter submits its gradient in backward. `step`, or `synchronize` before it, carries out the
reductions of all gradients, fused in shared memory, and puts the results into `.grad`.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from mpitrain.horovod.torch.compression import Compressions, Compressor
from mpitrain.horovod.torch.handles import synchronize
from mpitrain.horovod.torch.moving import sparse_allreduce_async
from mpitrain.horovod.torch.reducing import allreduce_async_, grouped_allreduce_async_
from mpitrain.horovod.torch.session import ProcessSet, global_process_set, size
from mpitrain.horovod.torch.submission import HorovodArgumentError, ReduceOp, Submission, UnsupportedError


class _Wrapped:
    """Base class of wrapped optimizers, put before the optimizer's own class. It shares the optimizer's attributes."""

    param_groups: list[dict[str, Any]]
    state: Any

    def _begin(self, named_parameters: Any, compression: type[Compressor], op: ReduceOp, passes: int) -> None:
        self.backward_passes_per_step, self.op, self._compression = passes, op, compression
        self._parameter_names = _names(self.param_groups, named_parameters)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes add to the gradients before each step."""
        self.backward_passes_per_step = passes

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (p for group in self.param_groups for p in group["params"])


class _DistributedOptimizer(_Wrapped):
    """An optimizer whose gradients are reduced by hooks and `synchronize`."""

    def _begin_reducing(self, predivide: float, groups: Any, sparse_as_dense: bool, process_set: ProcessSet) -> None:
        self.gradient_predivide_factor, self.sparse_as_dense, self.process_set = predivide, sparse_as_dense, process_set
        self._passes = Counter[torch.Tensor]()  # backward passes since the last reduction
        self._handles: dict[tuple[torch.Tensor, ...], Callable[[], None]] = {}  # what completes each group
        self._is_synchronized, self._must_synchronize = False, True
        self._requires_update = {p for p in self._parameters() if p.requires_grad}
        self._group_of = self._form_groups(groups)
        if process_set.included() and (size() > 1 or os.environ.get("HOROVOD_ELASTIC") == "1"):
            for p in self._requires_update:
                p.register_post_accumulate_grad_hook(self._gradient_is_ready)
        else:
            self._requires_update = set()

    def _form_groups(self, groups: Any) -> dict[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the group of each parameter: those that are reduced together."""
        parameters = [p for p in self._parameters() if p.requires_grad]
        if groups is None:
            return {p: (p,) for p in parameters}
        if isinstance(groups, int):
            if groups < 0:
                raise HorovodArgumentError(f"groups={groups}: pass a number of groups, or lists of parameters")
            parameters.sort(key=lambda p: self._parameter_names[p])  # equal on all ranks
            count = min(groups, len(parameters)) or 1
            ends = [len(parameters) * n // count for n in range(count + 1)]
            listed = [parameters[begin:end] for begin, end in pairwise(ends)]
        else:
            listed = [[p for p in group if getattr(p, "requires_grad", True)] for group in groups]
        members = [p for group in listed for p in group]
        if not all(isinstance(p, torch.Tensor) for p in members):
            raise HorovodArgumentError("groups must be lists of parameters")
        if len(set(members)) < len(members):
            raise HorovodArgumentError("groups: a parameter may be in one group only")
        formed = {p: tuple(group) for group in listed for p in group}
        return {p: formed.get(p, (p,)) for p in parameters}

    def _gradient_is_ready(self, p: torch.Tensor) -> None:
        """Submit the gradient of p, or of its group, after the last backward pass before a step."""
        group = self._group_of[p]
        if group in self._handles:
            raise HorovodArgumentError(
                f"the gradient of {self._parameter_names[p]} was computed more than backward_passes_per_step="
                f"{self.backward_passes_per_step} times before step(); increase backward_passes_per_step"
            )
        self._passes[p] += 1
        if all(self._passes[member] >= self.backward_passes_per_step for member in group):
            self._handles[group] = self._submit(group)

    def _submit(self, group: tuple[torch.Tensor, ...]) -> Callable[[], None]:
        """Submit the gradients of a group, and return a function that waits and stores the results."""
        for p in group:
            if p.grad is None:  # another rank may have used it
                p.grad = torch.zeros_like(p)
        name = self._parameter_names[group[0]]
        gradients = [p.grad for p in group if p.grad is not None]
        if gradients[0].is_sparse and not self.sparse_as_dense:
            result = sparse_allreduce_async(gradients[0], name, self.op, self.process_set)
            return lambda: _store_sparse(group[0], result())
        dense = [g.to_dense() if g.is_sparse else g for g in gradients]
        sent, contexts = zip(*(self._compression.compress(g) for g in dense), strict=True)
        factor = self.gradient_predivide_factor
        handle = grouped_allreduce_async_(list(sent), None, name, self.op, 1.0 / factor, factor, self.process_set)
        return lambda: self._store(group, dense, handle, contexts)

    def _store(
        self, group: Sequence[torch.Tensor], dense: Sequence[torch.Tensor], handle: Submission, contexts: Sequence[Any]
    ) -> None:
        for p, gradient, out, context in zip(group, dense, synchronize(handle), contexts, strict=True):
            reduced = self._compression.decompress(out, context)
            if p.grad is not None and p.grad.is_sparse:
                _store_sparse(p, reduced.to_sparse(p.grad.sparse_dim()))
            elif reduced.data_ptr() != gradient.data_ptr():
                gradient.copy_(reduced)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Reduce the gradients, those that no backward pass has computed as zeros. Collective over the process set."""
        for p in self._parameters():
            group = self._group_of.get(p)
            if p in self._requires_update and group is not None and group not in self._handles:
                self._handles[group] = self._submit(group)
        handles, self._handles = self._handles, {}
        self._passes.clear()
        for complete in handles.values():
            complete()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` update without reducing gradients, after a call of `synchronize`."""
        self._must_synchronize = False
        try:
            yield
        finally:
            self._must_synchronize = True

    def step(self, closure: Any = None) -> Any:
        """Reduce the gradients, and update the parameters. Collective over the process set.

        Args:
            closure: Passed to the optimizer.
        """
        if self._must_synchronize:
            if self._is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): the "
                    "gradients are reduced twice; call step() within skip_synchronize()",
                    stacklevel=2,
                )
            self.synchronize()
        self._is_synchronized = False
        return super().step(closure)  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients.

        Raises:
            AssertionError: Gradients were computed, and neither `step` nor `synchronize` was called.
        """
        if self._handles:
            raise AssertionError(
                "optimizer.zero_grad() was called after backward() but before optimizer.step() or "
                "optimizer.synchronize(): the reductions of these gradients are pending"
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state, and forget gradients that were submitted."""
        self._handles.clear()
        self._passes.clear()
        self._is_synchronized, self._must_synchronize = False, True
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]


class _AdasumOptimizer(_Wrapped):
    """An optimizer that updates with its own gradients, and combines the changes of parameters by Adasum."""

    def synchronize(self) -> None:
        """Do nothing: `step` combines the changes."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Refuse.

        Raises:
            AssertionError: Always, because a step of this optimizer includes the reduction.
        """
        raise AssertionError("skip_synchronize is impossible with op=hvd.Adasum; call step() alone")
        yield

    def step(self, closure: Any = None) -> Any:
        """Update the parameters with this rank's gradients, and combine the changes of all ranks. Collective.

        Args:
            closure: Passed to the optimizer.
        """
        parameters = [p for p in self._parameters() if p.requires_grad]
        before = [p.detach().clone() for p in parameters]
        result = super().step(closure)  # type: ignore[misc]
        with torch.no_grad():
            handles = []
            for p, start in zip(parameters, before, strict=True):
                sent, context = self._compression.compress(p - start)
                name = self._parameter_names[p]
                handles.append((allreduce_async_(sent, name=name, op=ReduceOp.Adasum), context))
            for p, start, (handle, context) in zip(parameters, before, handles, strict=True):
                p.copy_(start + self._compression.decompress(synchronize(handle), context))
        return result


def _store_sparse(p: torch.Tensor, gradient: torch.Tensor) -> None:
    p.grad = gradient.coalesce()


def _names(param_groups: Sequence[dict[str, Any]], named_parameters: Any) -> dict[torch.Tensor, str]:
    """Return the name of each parameter, by which ranks find the reductions of the same gradient.

    Args:
        param_groups: Groups of the optimizer.
        named_parameters: Pairs of names and parameters; None to number them.
    """
    if named_parameters is None:
        named_parameters = [
            (f"noname.{i}.{j}", p) for i, group in enumerate(param_groups) for j, p in enumerate(group["params"])
        ]
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) for pair in pairs):
        raise HorovodArgumentError(
            "named_parameters must be pairs of names and parameters, as model.named_parameters() gives"
        )
    doubled = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if doubled:
        raise HorovodArgumentError(
            f"named_parameters: the names {', '.join(sorted(doubled))} occur twice; make them different"
        )
    names = {p: name for name, p in pairs}
    lacking = sum(p not in names for group in param_groups for p in group["params"])
    if lacking:
        raise HorovodArgumentError(f"named_parameters lacks {lacking} of the optimizer's parameters; name all of them")
    return names


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compressions.none,
    backward_passes_per_step: int = 1,
    op: int = ReduceOp.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of the same class, with the same parameters and state, that reduces gradients over the ranks.

    Use the returned optimizer instead of the one that was passed. To change reduced gradients before the update, call
    `synchronize()`, and then `step()` within `skip_synchronize()`.

    Args:
        optimizer: Optimizer to wrap.
        named_parameters: Names of the parameters, such as `model.named_parameters()`.
        compression: Form in which gradients are sent.
        backward_passes_per_step: Backward passes that add to the gradients before each step.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: With Average, gradients are divided by it before the sum, and multiplied afterwards.
        num_groups: Older form of groups.
        groups: Number of groups of gradients that are reduced together, or lists of parameters; None for no groups.
        sparse_as_dense: Reduce sparse gradients as dense tensors.
        process_set: Ranks over which gradients are reduced.

    Raises:
        HorovodArgumentError: Names are missing or doubled, or arguments do not go together.
    """
    reduction = ReduceOp(op)
    if gradient_predivide_factor != 1.0 and reduction != ReduceOp.Average:
        raise HorovodArgumentError("gradient_predivide_factor is for op=hvd.Average only")
    if backward_passes_per_step <= 0:
        raise HorovodArgumentError(f"backward_passes_per_step={backward_passes_per_step}: pass 1 or more")
    if num_groups:
        warnings.warn("num_groups is called groups now", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    by_changes = reduction == ReduceOp.Adasum and size() > 1
    if by_changes and process_set.process_set_id != 0:
        raise UnsupportedError("Adasum works with the global process set only; leave out process_set")
    base, mixin = type(optimizer), _AdasumOptimizer if by_changes else _DistributedOptimizer
    wrapped: Any = object.__new__(type(base.__name__, (mixin, base), {"__module__": mixin.__module__}))
    # a scheduler made before has put its own `step` into the instance
    wrapped.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    wrapped._begin(named_parameters, compression, reduction, backward_passes_per_step)
    if not by_changes:
        wrapped._begin_reducing(gradient_predivide_factor, groups, sparse_as_dense, process_set)
    return wrapped
