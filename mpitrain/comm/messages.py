"""Messages between two ranks of a communicator."""

from __future__ import annotations

from typing import Any

import torch
from mpi4py import MPI

from mpitrain.comm.arguments import check_rank
from mpitrain.comm.buffers import LARGEST_COUNT, as_tensor, bytes_at
from mpitrain.comm.device import synchronize
from mpitrain.comm.member import Member
from mpitrain.comm.watchdog import Record
from mpitrain.comm.work import Messages
from mpitrain.errors import CommunicationError

ANY_SOURCE = MPI.ANY_SOURCE


class PointToPoint(Member):
    """Sends and receives, on an MPI communicator of their own: the caller's tags must not meet those of programs."""

    _messages: MPI.Intracomm
    _message_record: Record

    def send(self, x: Any, dest: int, tag: int = 0) -> None:
        """Send x to rank dest; may return before it is received."""
        self.isend(x, dest, tag).wait()

    def recv(self, x: Any, source: int, tag: int = 0) -> None:
        """Receive a message of exactly x's length from rank source (or ANY_SOURCE) into x."""
        self.irecv(x, source, tag).wait()

    def isend(self, x: Any, dest: int, tag: int = 0) -> Messages:
        """Begin to send x, which must not change until the work is done."""
        check_rank(self, dest)
        tensor = self._near(as_tensor(x, written=False))
        requests = [self._messages.Isend(spec, dest, tag) for spec in _specs(tensor)]
        awaited = (self.world_ranks[dest],)
        return Messages(f"send to rank {dest}", tensor, requests, lambda statuses: None, self._message_record, awaited)

    def irecv(self, x: Any, source: int, tag: int = 0) -> Messages:
        """Begin to receive a message of exactly x's length from rank source (or ANY_SOURCE) into x."""
        if source != ANY_SOURCE:
            check_rank(self, source)
        tensor = as_tensor(x)
        near = self._near(tensor, filled=False)
        name = "receive from any rank" if source == ANY_SOURCE else f"receive from rank {source}"
        specs = _specs(near)

        def complete(statuses: list[MPI.Status]) -> None:
            for status, spec in zip(statuses, specs, strict=True):
                if status.Get_count(MPI.BYTE) != spec[1]:
                    raise CommunicationError(
                        f"{self.label}: {name}: a message of {status.Get_count(MPI.BYTE)} bytes arrived where "
                        f"{spec[1]} were expected; send and receive tensors of one size and type"
                    )
            if near is not tensor:
                tensor.copy_(near)

        requests = [self._messages.Irecv(spec, source, tag) for spec in specs]
        ranks = self.world_ranks
        awaited = [r for r in ranks if r != ranks[self.rank]] if source == ANY_SOURCE else [ranks[source]]
        return Messages(name, tensor, requests, complete, self._message_record, awaited)

    def _near(self, tensor: torch.Tensor, *, filled: bool = True) -> torch.Tensor:
        """The tensor, or a host copy of a CUDA tensor for an MPI that cannot read it."""
        if not tensor.is_cuda:
            return tensor
        synchronize(tensor)
        if self.process.cuda_aware:
            return tensor
        return tensor.cpu() if filled else torch.empty_like(tensor, device="cpu", pin_memory=True)


def _specs(tensor: torch.Tensor) -> list[list[Any]]:
    """The tensor's bytes as messages; an empty tensor is one empty message."""
    address, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    starts = range(0, nbytes, LARGEST_COUNT) if nbytes else [0]
    return [bytes_at(address + lo, min(LARGEST_COUNT, nbytes - lo)) for lo in starts]
