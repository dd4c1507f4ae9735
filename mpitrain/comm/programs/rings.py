"""What a rank sends in an operation whose algorithm is not known: in a ring, or straight to whom it is for.

The MPI library does not tell what it sends. What it sends is reckoned as if it took the algorithm that moves the fewest
bytes of all: for N ranks and a vector of X bytes

    all_reduce                  2(N-1)/N X    a ring: to the next rank, whatever is sent
    reduce_scatter, all_gather   (N-1)/N X    likewise; every block but one
    broadcast, reduce                    X    a chain from or to the root; the last rank sends nothing
    gather, scatter, all_to_all               each block from the rank that has it straight to the one that gets it

Rank r's next rank is r + 1, so that all that a ring sends is sent inside a node, or all of it between two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from mpitrain.comm.programs.program import even_bounds


def blocks_sent(operation: str, rank: int, blocks: Sequence[int], root: int = 0) -> list[tuple[int, int]]:
    """What a rank sends to whom.

    Args:
        operation: Name of the collective operation.
        rank: The rank that sends.
        blocks: Bytes of the block of each rank. Of all_to_all: of those that leave this rank, by whom they are for. For
            all_reduce, reduce and broadcast, whose vector has no blocks, any division of it: see `even_shares`.
        root: Of broadcast, reduce, gather and scatter.

    Returns:
        (receiving rank, bytes) of all that leaves.
    """
    size, whole, after = len(blocks), sum(blocks), (rank + 1) % len(blocks)
    if size == 1:
        return []
    if operation == "all_reduce":
        return [(after, whole - blocks[rank] + whole - blocks[after])]
    if operation == "reduce_scatter":
        return [(after, whole - blocks[rank])]
    if operation == "all_gather":
        return [(after, whole - blocks[after])]
    if operation == "broadcast":
        return [] if after == root else [(after, whole)]
    if operation == "reduce":
        return [] if rank == root else [(after, whole)]
    if operation == "gather":
        return [] if rank == root else [(root, blocks[rank])]
    if operation == "scatter":
        return [(other, blocks[other]) for other in range(size) if other != rank] if rank == root else []
    if operation == "all_to_all":
        return [(other, blocks[other]) for other in range(size) if other != rank]
    return []  # a barrier


def even_shares(nbytes: int, size: int) -> list[int]:
    """A vector's bytes, divided evenly over so many ranks."""
    bounds = even_bounds(nbytes, size)
    return [hi - lo for lo, hi in pairwise(bounds)]


def bytes_sent(operation: str, nbytes: float, size: int) -> float:
    """What a rank sends in an operation on average over its ranks, by the formulas above.

    Args:
        operation: all_reduce, reduce_scatter, all_gather or broadcast.
        nbytes: Of the whole vector, which reduce_scatter takes and all_gather gives.
        size: Number of ranks.
    """
    return (2 if operation == "all_reduce" else 1) * (size - 1) / size * nbytes
