"""The debug mode: before each collective the ranks compare what they are about to do.

On by default in tests; MPITRAIN_DEBUG=1 or `mpitrain.init(debug=True)` elsewhere. It costs one small
all-gather per operation, and turns a mismatch, which MPI answers with a hang or wrong data, into an error
that shows every rank's operation and line.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence

import torch

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.memory.arena import Arena
from mpitrain.comm.memory.board import exchanged
from mpitrain.comm.runtime.watchdog import line_of
from mpitrain.errors import CommunicationError

_BYTES = 200  # of a text on the wire
_DIGEST = 8  # bytes: long texts, such as the block sizes of many ranks, may differ where they were cut off


class Checks:
    """What the ranks of one communicator compare in debug mode.

    Args:
        comm: A duplicate of the communicator, for the comparisons alone.
        nodes: The node of each of its ranks.
    """

    def __init__(self, comm: MPI.Intracomm, nodes: Sequence[int]) -> None:
        self._comm, self._nodes = comm, nodes

    def compare(
        self,
        name: str,
        typed: torch.Tensor | None,
        alike: object,
        sized: torch.Tensor | None,
        sequence: int,
        place: str = "",
    ) -> None:
        """Compare what all ranks are about to do. Collective.

        Args:
            name: Of the operation.
            typed: A tensor whose type must be the same on all ranks; None if there is none.
            alike: What else must be the same; None if there is nothing.
            sized: A tensor whose size must be the same; None if it may differ.
            sequence: Number of the operation on this rank, for the message.
            place: What must be the same on the ranks of a node.

        Raises:
            CommunicationError: They are not about to do the same; raised on every rank.
        """
        what = name if typed is None else f"{name} of {sized.numel() if sized is not None else '?'} {_name(typed)}"
        if alike is not None:
            what = f"{what} {alike}"
        digests = exchanged(self._comm, _digest(what) + _digest(place), 2 * _DIGEST)
        calls = {digest[:_DIGEST] for digest in digests}
        places = {(node, digest[_DIGEST:]) for node, digest in zip(self._nodes, digests, strict=True)}
        if len(calls) == 1 and len(places) == len(set(self._nodes)):
            return
        shown = f"#{sequence} {what[: _BYTES // 2]}{place}".encode()
        texts, lines = (exchanged(self._comm, text, _BYTES) for text in (shown, line_of(sys._getframe(2)).encode()))
        table = "".join(f"\n  rank {r}  {_text(texts[r])}  at {_text(lines[r])}" for r in range(self._comm.size))
        wrong = (
            "ranks call different operations; every rank must make the same call with the same sizes"
            if len(calls) > 1
            else "ranks pass different parts of an arena; on a node they must lie at the same offset"
        )
        raise CommunicationError(f"{wrong}:{table}", agreed=True)


def place_of(x: torch.Tensor | None, arena: Arena | None) -> str:
    """Where a tensor lies in an arena, in words; empty for a tensor outside of one, or of no elements."""
    if x is None or arena is None or x.numel() == 0:
        return ""
    return f" at byte {x.data_ptr() - arena.start} of an arena of {arena.nbytes}"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST).digest()


def _text(row: bytes) -> str:
    return row.rstrip(b"\0").decode(errors="replace")


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
