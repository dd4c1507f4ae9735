"""torch's reduction operations by the communicator's, and those it lacks by gathering.

PREMUL_SUM is a sum of scaled values. Bitwise operations and sparse sums gather every rank's values and combine them
on the spot: they are for masks and embeddings, not for large dense data.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from mpitrain.backend.arguments import Written, detached, known
from mpitrain.backend.failures import ArgumentError, translation
from mpitrain.backend.versions import premultiplier
from mpitrain.comm import Communicator
from mpitrain.comm.memory.elements import DTYPES
from mpitrain.comm.runtime.executor import Reduction, scaling
from mpitrain.errors import InputError

_Ops: Any = dist.ReduceOp.RedOpType
_NAMES: dict[Any, str] = {_Ops.SUM: "sum", _Ops.PRODUCT: "product", _Ops.MIN: "min", _Ops.MAX: "max", _Ops.AVG: "avg"}
_BITWISE: dict[Any, Callable[..., torch.Tensor]] = {
    _Ops.BAND: torch.bitwise_and,
    _Ops.BOR: torch.bitwise_or,
    _Ops.BXOR: torch.bitwise_xor,
}


class Reducing:
    """One reduction of one dtype over one communicator.

    Attributes:
        comm: The communicator.
        name: The communicator's operation.
        factor: What each rank's values are multiplied with first.
        bitwise: What combines two ranks' values where the communicator has no such operation.
    """

    def __init__(self, op: Any, dtype: torch.dtype, comm: Communicator) -> None:
        """Find out how it is done.

        Args:
            op: Torch's operation.
            dtype: The tensors' type.
            comm: The communicator.

        Raises:
            ArgumentError: We lack the operation, or it has no meaning for the dtype.
        """
        kind = getattr(op, "op", op)
        self.comm = comm
        self.factor: float | torch.Tensor | None = None
        self.bitwise = _BITWISE.get(kind)
        self.name = _NAMES.get(kind, "sum")
        if kind == _Ops.PREMUL_SUM:
            self.factor = premultiplier(op)
        elif self.bitwise is None and kind not in _NAMES:
            raise ArgumentError(f"reduction {kind} is not one of ours; use {', '.join(map(str, _NAMES))}")
        if self.bitwise is not None and (dtype.is_floating_point or dtype.is_complex):
            raise ArgumentError(f"{kind} has no meaning for {dtype}; use an integer type, or .view() the bits as one")
        if self.bitwise is None and dtype not in DTYPES:
            raise ArgumentError(f"{dtype} cannot be reduced, only moved; convert to float32 or a signed integer first")
        if self.bitwise is None:
            try:
                Reduction.of(self.name, dtype, comm.size)
            except InputError as error:  # here, in the caller's thread, and not where the operation is carried out
                raise translation(error) from None

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """The tensor becomes the reduction of all ranks'; in place."""
        if tensor.is_sparse:
            _all_reduce_sparse(tensor, self)
            return
        into = Written(tensor, keep=True)
        if self.bitwise is not None:
            into.whole.copy_(self._gathered(into.whole))
        else:
            self._scale(into.whole)
            self.comm.all_reduce(into.whole, self.name)
        into.land()

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        """The root's tensor becomes the reduction; the others' stay as they were."""
        at_root, into = self.comm.rank == root, Written(tensor, keep=True)
        if self.bitwise is not None:
            result = self._gathered(into.whole)
            if at_root:
                into.whole.copy_(result)
        else:
            x = into.whole if at_root or self.factor is None else into.whole.clone()
            self._scale(x)
            self.comm.reduce(x, root, self.name)
        if at_root:
            into.land()

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, counts: list[int] | None = None) -> None:
        """Out becomes this rank's block of the reduction of all x.

        Args:
            out: Where the block goes.
            x: One block a rank, in order.
            counts: The elements of each rank's block; without them all are equal.
        """
        into, of = Written(out), detached(x).contiguous()
        if self.bitwise is not None:
            blocks = counts or [of.numel() // self.comm.size] * self.comm.size
            whole = self._gathered(of).reshape(-1)
            into.whole.copy_(torch.split(whole, blocks)[self.comm.rank].view(into.whole.shape))
        else:
            if self.factor is not None:
                of = of.clone()
                self._scale(of)
            self.comm.reduce_scatter(into.whole, of, self.name, counts=counts)
        into.land()

    def _scale(self, tensor: torch.Tensor) -> None:
        if self.factor is not None:
            tensor.mul_(self.factor)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        everyone = torch.empty((self.comm.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        self.comm.all_gather(known(everyone), known(tensor))
        result = everyone[0].clone()
        assert self.bitwise is not None
        for other in everyone[1:]:
            self.bitwise(result, other, out=result)
        return result


def _all_reduce_sparse(tensor: torch.Tensor, reducing: Reducing) -> None:
    """The COO tensor becomes the sum (or average) of all ranks', whose entries may differ; in place."""
    comm = reducing.comm
    if reducing.name not in ("sum", "avg") or reducing.bitwise is not None:
        raise ArgumentError("sparse tensors can be summed and averaged only; call .to_dense() first")
    mine = tensor.detach().coalesce()
    indices, values = mine.indices().contiguous(), mine.values().contiguous()
    reducing._scale(values)
    entries = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(entries, torch.tensor([values.shape[0]]))
    counts = [int(n) for n in entries]
    total, width = sum(counts), prod(values.shape[1:])
    # ranks' indices have mine.sparse_dim() rows of different lengths: gathered transposed
    every_index = torch.empty((total, mine.sparse_dim()), dtype=torch.int64, device=indices.device)
    every_value = torch.empty((total, *values.shape[1:]), dtype=values.dtype, device=values.device)
    rows = mine.sparse_dim()
    comm.all_gather(every_index, indices.t().contiguous(), counts=[n * rows for n in counts])
    comm.all_gather(every_value, values, counts=[n * width for n in counts])
    combined = torch.sparse_coo_tensor(every_index.t(), every_value, mine.shape).coalesce()
    if reducing.name == "avg":
        for call in scaling(combined.values(), Reduction.of("avg", combined.dtype, comm.size).scale):
            call()
    with torch.no_grad():  # a detached tensor would not hand new entries on
        tensor.copy_(combined)
