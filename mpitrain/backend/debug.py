"""TORCH_DISTRIBUTED_DEBUG=DETAIL: before each collective the ranks compare what they are about to do.

Different operations, shapes, types, roots or reductions are an error that shows every rank's, where MPI would answer
with a hang or wrong data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpitrain.backend.failures import GroupError
from mpitrain.comm import Communicator

_MOST = 400  # characters of a description


class Comparison:
    """The comparisons of one process group."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._count = 0

    def compare(self, name: str, alike: Sequence[object]) -> None:
        """Make sure that all ranks are about to do the same. Collective.

        Args:
            name: The operation's name.
            alike: What must be the same: lists of tensors (their types and shapes), reductions, ranks.

        Raises:
            GroupError: They are not; on every rank.
        """
        self._count += 1
        text = " ".join(_shapes(part) if isinstance(part, list) else str(part) for part in alike)
        texts = self._comm.all_gather_object(f"{name} #{self._count} {text}"[:_MOST])
        if len(set(texts)) > 1:
            table = "".join(f"\n  rank {rank}  {text}" for rank, text in enumerate(texts))
            raise GroupError(
                f"ranks of {self._comm.label} call different collectives, or with different shapes; every rank must "
                f"make the same call:{table}",
                agreed=True,
            )


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return " ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
