"""The debug mode: before each collective the ranks compare what they are about to do.

On by default in tests; MPITRAIN_DEBUG=1 or `mpitrain.init(debug=True)` elsewhere. It costs one small
all-gather per operation, and turns a mismatch, which MPI answers with a hang or wrong data, into an error
that shows every rank's operation and line.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from mpi4py import MPI

from mpitrain.comm.watchdog import line_of
from mpitrain.errors import CommunicationError

_BYTES = 200  # of a signature on the wire


class Checks:
    """Comparisons on one communicator. `comm`: a duplicate of it for them alone."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def compare(
        self, name: str, typed: torch.Tensor | None, alike: object, sized: torch.Tensor | None, sequence: int
    ) -> None:
        """Raise CommunicationError on every rank unless all are about to do the same. Collective.

        typed, sized: tensors whose type and whose size must be the same on all ranks; alike: what else must.
        """
        what = name if typed is None else f"{name} of {sized.numel() if sized is not None else '?'} {_name(typed)}"
        texts = self._exchange(what if alike is None else f"{what} {alike}")
        if len(set(texts)) == 1:
            return
        lines = self._exchange(line_of(sys._getframe(2)))
        table = "".join(f"\n  rank {r}  #{sequence} {text}  at {lines[r]}" for r, text in enumerate(texts))
        raise CommunicationError(
            f"ranks call different operations; every rank must make the same call with the same sizes:{table}",
            agreed=True,
        )

    def _exchange(self, text: str) -> list[str]:
        mine = np.zeros(_BYTES, dtype=np.uint8)
        raw = text.encode()[:_BYTES]
        mine[: len(raw)] = np.frombuffer(raw, dtype=np.uint8)
        everyone = np.empty((self._comm.size, _BYTES), dtype=np.uint8)
        self._comm.Allgather(mine, everyone)
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in everyone]


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
