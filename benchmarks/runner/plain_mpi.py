"""The MPI library's collectives and windows as a user of mpi4py would call them: nothing of ours in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.memory.buffers import MPI_TYPES
from mpitrain.comm.plain_mpi import PlainMPI
from mpitrain.comm.runtime.kernels import Call


class PlainCollectives(PlainMPI):
    """Collectives and windows on the ranks of a communicator, for CPU tensors, which the calls keep alive."""

    def all_reduce(self, x: torch.Tensor) -> Call:
        """Sum in place. For fp32 mpi4py is given the array itself, and looks at it at each call."""
        if x.dtype == torch.float16:
            return partial(self._comm.Allreduce, MPI.IN_PLACE, [x.numpy(), x.numel(), MPI.FLOAT16_T], MPI.SUM)
        return partial(self._comm.Allreduce, MPI.IN_PLACE, x.numpy(), MPI.SUM)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> Call:
        """Sum x; out becomes this rank's block of the sum."""
        return partial(self._comm.Reduce_scatter_block, x.numpy(), out.numpy(), MPI.SUM)

    def all_gather(self, out: torch.Tensor) -> Call:
        """Gather in place: this rank's block lies in out."""
        count = out.numel() // self._comm.size
        return partial(self._comm.Allgather, MPI.IN_PLACE, [out.numpy(), count, MPI_TYPES[out.dtype]])

    def window(self, place: torch.Tensor, allocated: bool) -> Window:
        """A window over memory of every rank. Collective.

        Args:
            place: This rank's memory.
            allocated: Whether MPI allocates memory of that size instead.
        """
        return Window(self._comm, place, allocated)

    @property
    def adds_fp16(self) -> bool:
        """Whether the library can sum fp16 at all. Collective: it is tried."""
        if MPI.FLOAT16_T == MPI.DATATYPE_NULL:
            return False
        x = torch.full((4,), 1.5, dtype=torch.float16)
        try:
            self.all_reduce(x)()
        except MPI.Exception:
            return False
        return bool((x == 1.5 * self._comm.size).all())


class Window:
    """Memory of every rank that the others put into and get from while it does nothing for that (passive target)."""

    def __init__(self, comm: MPI.Intracomm, place: torch.Tensor, allocated: bool) -> None:
        if allocated:
            self._window = MPI.Win.Allocate(place.nbytes, place.element_size(), comm=comm)
            place = torch.frombuffer(self._window.tomemory(), dtype=place.dtype, count=place.numel())
        else:
            self._window = MPI.Win.Create(place.numpy(), place.element_size(), comm=comm)
        self.place = place  # this rank's memory
        self._window.Lock_all()

    def put(self, x: torch.Tensor, target: int, offset: int) -> Call:
        """Write x into a rank's memory, from an element on; it is there when the call returns."""
        return partial(self._move, self._window.Put, x, target, offset)

    def get(self, x: torch.Tensor, target: int, offset: int) -> Call:
        """Read a rank's memory, from an element on, into x."""
        return partial(self._move, self._window.Get, x, target, offset)

    def _move(self, move: Callable[..., None], x: torch.Tensor, target: int, offset: int) -> None:
        move([x.numpy(), x.numel(), MPI_TYPES[x.dtype]], target, [offset, x.numel(), MPI_TYPES[x.dtype]])
        self._window.Flush(target)

    def see(self) -> None:
        """Let this rank see what others have put into its memory."""
        self._window.Sync()

    def free(self) -> None:
        """Release it. Collective."""
        self._window.Unlock_all()
        self._window.Free()
