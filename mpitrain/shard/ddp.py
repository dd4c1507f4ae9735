"""DistributedDataParallel: data parallelism with replicated parameters, with the interface of torch's class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import nn

from mpitrain.comm import Communicator, init
from mpitrain.comm.compression import Compression, from_name
from mpitrain.comm.memory.device import is_accelerator
from mpitrain.shard.bucket_reduction import BucketReduction
from mpitrain.shard.flat import flat_groups, in_backward_order
from mpitrain.shard.gradients import WholeGradients
from mpitrain.shard.norm import rank_parts, sum_squares
from mpitrain.shard.reducer import Reducer

_PACK = 1 << 20  # most bytes of tensors that are broadcast together


class DistributedDataParallel(nn.Module):
    """A module whose gradients are averaged over the ranks of `comm` in backward. The constructor is collective.

    Parameters and buffers start with the values of rank 0. The class can be used like
    torch.nn.parallel.DistributedDataParallel (Li et al. 2020, PyTorch Distributed). Attributes and methods that it
    lacks are those of the module (`model.config`, `model.generate(...)`). Gradients are reduced for calls of `model`
    itself, not for calls of the module's other methods.

    Args:
        module: Module to train; available as `.module`.
        comm: One communicator, or several over the same ranks, which buckets use in turn; None for all ranks.
        bucket_mb: MiB of gradients that are reduced together.
        find_unused_parameters: Treat a missing gradient as zero instead of raising an error; a parameter that no rank
            used gets no gradient.
        static_graph: Assume that every backward pass uses the same parameters, the same number of times, as the first
            one.
        broadcast_buffers: Copy rank 0's buffers (running statistics) to all ranks before each forward pass in training.
        compression: fp16, bf16, int8, int4, topk, powersgd, or an object of `mpitrain.comm.compression`.
        algorithm: Algorithm of the all-reduce; "auto" to choose it by size and memory.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Communicator | Sequence[Communicator] | None = None,
        bucket_mb: float = 25.0,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        compression: Compression | str | None = None,
        algorithm: str = "auto",
    ) -> None:
        super().__init__()
        comms = [init()] if comm is None else [comm] if isinstance(comm, Communicator) else list(comm)
        self.module, self.comm, self.broadcast_buffers = module, comms[0], broadcast_buffers
        broadcast_state(module, self.comm)
        self._bucket_mb, self._unused, self._static = bucket_mb, find_unused_parameters, static_graph
        if isinstance(compression, str):
            compression = from_name(compression)
        self._reduction = BucketReduction(comms, "avg", algorithm=algorithm, compression=compression)
        self._names = {p: name for name, p in module.named_parameters()}
        self.reducer = self._make_reducer(in_backward_order(module))
        self._rebuilt = not self._reduction.overlaps  # the order matters only if communication overlaps backward
        self._join_state: JoinState | None = None
        self._squares: torch.Tensor | None = None  # sum of the squares of the gradients, for `clip_grad_norm_`

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module if this class has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)

    def _make_reducer(self, order: Sequence[nn.Parameter]) -> Reducer:
        """Lay gradients out in the given order, and return a reducer that watches them. Collective."""
        groups = flat_groups(order, self._bucket_mb)
        self._gradients = WholeGradients(groups, self._reduction, sharded=False, dtype=None)
        return Reducer(self._gradients, self._names, self.module, unused_allowed=self._unused, static=self._static)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and self.reducer.enabled and torch.is_grad_enabled():
            if self._join_state is not None:
                self._join_state.exchange(training=True)
            self._before_forward()
        output = self.module(*args, **kwargs)
        self.reducer.announce(output)
        return output

    def _before_forward(self) -> None:
        """Rebuild the buckets if due, and broadcast buffers, before a forward pass in training. Collective."""
        if self.reducer.passes and not self._rebuilt:
            self._rebuild()
        if self._join_state is not None:
            self.reducer.factor = self._join_state.factor
        if self.broadcast_buffers and self.comm.size > 1:
            source = self._join_state.source if self._join_state is not None else 0
            broadcast_tensors(self.module.buffers(), self.comm, source)

    def _rebuild(self) -> None:
        """Lay gradients out in the order in which they arrived on rank 0, so that the first buckets fill first.
        Collective.
        """
        self._rebuilt = True
        old = self.reducer
        old.close()
        order = dict.fromkeys((*old.order, *in_backward_order(self.module)))
        self.reducer = self._make_reducer([p for p in order if p.requires_grad])
        self.reducer.replace(old)
        if self._reduction.compression is not None:
            self._reduction.compression.reset()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them; the first backward pass after the context reduces all of them."""
        before, self.reducer.enabled = self.reducer.enabled, False
        try:
            yield
        finally:
            self.reducer.enabled = before

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients so that their norm is at most `max_norm`, and return the norm before. Collective.

        It has the effect of `torch.nn.utils.clip_grad_norm_`, which reads all gradients on every rank. Here each rank
        reads its part, and gradients are scaled only if they must be. Norms other than the 2-norm, gradients that have
        not been reduced, and steps within `join` are left to torch's function.

        Args:
            max_norm: Largest norm of all gradients together.
            norm_type: Exponent of the norm; may be infinity.
            error_if_nonfinite: Raise an error if the norm is not finite, instead of scaling with it.

        Returns:
            Scalar in the dtype of the gradients.

        Raises:
            RuntimeError: The norm is not finite, and `error_if_nonfinite` is true.
        """
        gradients, parameters = self._gradients, list(self.module.parameters())
        alone = norm_type != 2.0 or self._join_state is not None or not self.reducer.is_reduced
        if alone or not gradients.holds_all(parameters):
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        comm = self._reduction.comm
        if self._squares is None:
            self._squares = torch.zeros(1, dtype=torch.float64, device=gradients.flat[0].device)
        comm.all_reduce(sum_squares(rank_parts(gradients, comm), self._squares))
        norm = self._squares[0].sqrt().to(reduce(torch.promote_types, (flat.dtype for flat in gradients.flat)))
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of the gradients is {float(norm)}; find the cause, or clip with "
                "error_if_nonfinite=False"
            )
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grads_with_norm_
        if is_accelerator(factor.device) or factor != 1.0:  # a device is not waited for; NaN spreads, as in torch
            gradients.scale(factor)
        return norm

    @contextmanager
    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True) -> Iterator[None]:
        """Train with unequal numbers of batches per rank: a rank without batches joins the others' steps with zeros.

        At the end all ranks get the parameters of a rank that trained until the last step.

        Args:
            divide_by_initial_world_size: Average over all ranks; if false, over the ranks that still have batches.
            enable: If false, do nothing.
        """
        if not enable or self.comm.size == 1:
            yield
            return
        self._join_state = JoinState(self.comm, divide_by_initial_world_size)
        try:
            yield
            while self._join_state.exchange(training=False):  # steps of the other ranks, while this rank has no batch
                self._before_forward()
                self._gradients.zero()
                self.reducer.finish()
            broadcast_state(self.module, self.comm, self._join_state.source)
        finally:
            self._join_state, self.reducer.factor = None, 1.0


def broadcast_state(module: nn.Module, comm: Communicator, root: int = 0) -> None:
    """Copy the root's parameters and buffers to every rank. Collective.

    Args:
        module: Module of the same structure on all ranks.
        comm: Ranks that get the values.
        root: Rank whose values are copied.
    """
    broadcast_tensors((*module.parameters(), *module.buffers()), comm, root)


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[torch.Tensor], comm: Communicator, root: int) -> None:
    """Copy the root's values of some tensors to every rank, in place, small ones together. Collective.

    Args:
        tensors: Tensors of the same shapes and dtypes on all ranks.
        comm: Ranks that get the values.
        root: Rank whose values are copied.
    """
    tensors = list(tensors)
    for packed in ([tensors[i] for i in positions] for positions in pack(tensors, _PACK)):
        flats = [tensor.contiguous().view(-1) for tensor in packed]  # the tensor's own memory if it is contiguous
        flat = flats[0] if len(flats) == 1 else torch.cat(flats)
        comm.broadcast(flat, root)
        if flat.data_ptr() != packed[0].data_ptr():
            for tensor, piece in zip(packed, flat.split([tensor.numel() for tensor in packed]), strict=True):
                tensor.copy_(piece.view(tensor.shape))


def pack(tensors: Sequence[torch.Tensor], most: int) -> Iterator[list[int]]:
    """Yield the positions of tensors that are sent together: of one dtype and device.

    Args:
        tensors: The tensors.
        most: Most bytes sent together, unless a single tensor is larger.
    """
    packs, sizes = dict[tuple[torch.dtype, torch.device], list[int]](), Counter[Any]()
    for position, tensor in enumerate(tensors):
        kind = tensor.dtype, tensor.device
        packed = packs.setdefault(kind, [])
        if packed and sizes[kind] + tensor.nbytes > most:
            yield packed
            packs[kind] = packed = []
            sizes[kind] = 0
        packed.append(position)
        sizes[kind] += tensor.nbytes
    yield from packs.values()


# -- Ranks with unequal numbers of batches: a rank without batches takes part in the others' steps with zeros
# (see `DistributedDataParallel.join`, as in torch)


class JoinState:
    """Coordination of ranks with unequal numbers of batches: before each step they exchange whether they have one.

    Args:
        comm: Ranks that train together.
        divide_by_all: Average over all ranks; if false, over the ranks that have a batch.

    Attributes:
        source: First rank that had a batch at the last exchange.
        factor: Factor that turns an average over all ranks into the requested average.
    """

    def __init__(self, comm: Communicator, divide_by_all: bool) -> None:
        self._comm, self._divide_by_all = comm, divide_by_all
        self._training = np.zeros(comm.size, dtype=np.uint8)
        self.source = 0
        self.factor = 1.0

    def exchange(self, training: bool) -> bool:
        """Exchange whether each rank has a batch, and return whether any rank has one. Collective."""
        self._comm.all_gather(self._training, np.array([training], dtype=np.uint8))
        count = int(self._training.sum())
        if count:
            self.source = int(self._training.argmax())
            self.factor = 1.0 if self._divide_by_all else self._comm.size / count
        return count > 0
