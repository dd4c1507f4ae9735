"""The collectives: for each, what its ranks start from and what they must end with."""

from __future__ import annotations

from mpitrain.comm.programs.program import CALLER, INBOX, WORK, Collective, Goal


def _everywhere(rank: int, block: int) -> bool:
    return True


def all_reduce_of(size: int, blocks: int) -> Collective:
    """An all-reduce: every rank ends with every block, reduced over all ranks."""
    ends = [Goal(WORK, b, b, range(size)) for b in range(blocks)]
    return Collective("all_reduce", _everywhere, lambda r: ends, reduces=True)


def reduce_of(size: int, blocks: int, root: int) -> Collective:
    """A reduce: the root ends with every block, reduced over all ranks."""
    ends = [Goal(WORK, b, b, range(size)) for b in range(blocks)]
    return Collective("reduce", _everywhere, lambda r: ends if r == root else [], reduces=True)


def reduce_scatter_of(size: int) -> Collective:
    """A reduce-scatter: rank r ends with block r, reduced over all ranks."""
    return Collective("reduce_scatter", _everywhere, lambda r: [Goal(WORK, r, r, range(size))], reduces=True)


def all_gather_of(size: int) -> Collective:
    """An all-gather: rank r starts with block r, and every rank ends with every block."""
    ends = [Goal(WORK, b, b, (b,)) for b in range(size)]
    return Collective("all_gather", lambda r, b: r == b, lambda r: ends)


def broadcast_of(size: int, root: int) -> Collective:
    """A broadcast: the root starts with the only block, and every rank ends with it."""
    return Collective("broadcast", lambda r, b: r == root, lambda r: [Goal(WORK, 0, 0, (root,))])


def gather_of(size: int, root: int) -> Collective:
    """A gather: the one block of WORK that rank r starts with ends in cell r of the root's inbox."""
    ends = [Goal(INBOX, r, 0, (r,)) for r in range(size)]
    return Collective("gather", _everywhere, lambda r: ends if r == root else [])


def scatter_of(size: int, root: int) -> Collective:
    """A scatter: block r of the root's WORK ends in the inbox of rank r."""
    return Collective("scatter", lambda r, b: r == root, lambda r: [Goal(INBOX, 0, r, (root,))])


def all_to_all_of(size: int) -> Collective:
    """An all-to-all: block r of the WORK of rank s ends in cell s of the inbox of rank r."""
    return Collective("all_to_all", _everywhere, lambda r: [Goal(INBOX, s, r, (s,)) for s in range(size)])


def all_gather_to_caller_of(size: int) -> Collective:
    """An all-gather whose result the caller reads where it is."""
    ends = [Goal(CALLER, b, b, (b,)) for b in range(size)]
    return Collective("all_gather", all_gather_of(size).holds, lambda r: ends)
