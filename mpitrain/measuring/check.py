"""Check that every collective, by every algorithm, gives correct results on this machine. It takes seconds.

Ranks contribute small whole numbers, different on every rank and at every place, so that every dtype's sums are exact
and any other number is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mpitrain.comm import Communicator, init
from mpitrain.comm.selection import TABLES, Algorithms
from mpitrain.errors import EXIT_DONE, EXIT_FAILED, MpitrainError
from mpitrain.inference.commands import parse
from mpitrain.measuring.self_start import is_launched, make_parser, start

ELEMENTS = {  # numbers of elements of a rank's vector, or of its block
    torch.float32: (1, 1001, 100_001),
    torch.bfloat16: (1001,),
    torch.int64: (1001,),
}
_PERIOD = 13

Result = tuple[torch.Tensor, torch.Tensor]  # result of a rank, and the expected result
Case = Callable[[Communicator, int, torch.dtype, str], Result]


def main(arguments: Sequence[str]) -> int:
    """Run `mpitrain.doctor --check` with the arguments after it, and return the exit code."""
    options = parse(make_parser("mpitrain.doctor --check", __doc__ or "", "2,3", 600), arguments)
    if is_launched():
        return check(init())
    return max(start(["-m", "mpitrain.doctor", "--check"], ranks, options.limit) for ranks in options.ranks)


def check(world: Communicator) -> int:
    """Test every collective, print a line for each, and return the exit code. Collective."""
    width = max(map(len, _CASES))
    if world.rank == 0:
        nodes = f", {world.num_nodes} nodes" if world.num_nodes > 1 else ""
        print(f"collectives of {world.size} ranks{nodes}: correct results, without timing", flush=True)
    failed = 0
    for name, case in _CASES.items():
        right, verdict = check_case(world, case, TABLES.get(name))
        failed += not right
        if world.rank == 0:
            print(f"  {name:{width}}  {verdict}", flush=True)
    if world.rank == 0:
        print(f"{failed} of {len(_CASES)} failed" if failed else f"all {len(_CASES)} work", flush=True)
    return EXIT_FAILED if failed else EXIT_DONE


def check_case(world: Communicator, case: Case, table: Algorithms | None) -> tuple[bool, str]:
    """Test an operation with all of its algorithms that can run here. Collective.

    Args:
        world: All ranks.
        case: Test of the operation.
        table: Algorithms of the operation; None if it has no choice.

    Returns:
        True if all results are right, and the algorithms; else False and the first error of the first rank that has
        one.
    """
    names = tuple(n for n in table if world.num_nodes == 1 or not table[n].one_node) if table else ()
    wrong = ""
    for dtype, lengths in ELEMENTS.items():
        for elements in lengths:
            for algorithm in ("auto", *names) if table else ("",):
                fault = _try_once(world, case, elements, dtype, algorithm)
                by = f"algorithm {algorithm}, " if algorithm else ""
                wrong = wrong or (f"{by}{elements:,} x {str(dtype)[6:]}: {fault}" if fault else "")
    for rank, text in enumerate(world.all_gather_object(wrong)):
        if text:
            return False, f"failed: rank {rank}, {text}"
    return True, f"ok ({', '.join(names)})" if names else "ok"


def _try_once(world: Communicator, case: Case, elements: int, dtype: torch.dtype, algorithm: str) -> str:
    """Return what is wrong with one call on this rank; "" if nothing is."""
    try:
        got, expected = case(world, elements, dtype, algorithm)
    except MpitrainError as error:
        if not error.agreed:
            raise
        return str(error)
    if torch.equal(got, expected):
        return ""
    at = int((got != expected).reshape(-1).int().argmax())
    return f"element {at} is {got.reshape(-1)[at].item()} instead of {expected.reshape(-1)[at].item()}"


def _contribution(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a rank's contribution."""
    return ((torch.arange(elements) + 3 * rank) % _PERIOD).to(dtype)


def _sum(ranks: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([_contribution(r, elements, torch.int64) for r in range(ranks)]).sum(0).to(dtype)


def _local_chunk(world: Communicator, whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(world.size)[world.rank]


def _all_reduce(world: Communicator, elements: int, dtype: torch.dtype, algorithm: str) -> Result:
    x = _contribution(world.rank, elements, dtype)
    world.all_reduce(x, "sum", algorithm)
    return x, _sum(world.size, elements, dtype)


def _all_reduce_in_arena(world: Communicator, elements: int, dtype: torch.dtype, algorithm: str) -> Result:
    arena = world.arena(elements, dtype)
    arena.tensor.copy_(_contribution(world.rank, elements, dtype))
    world.all_reduce(arena.tensor, "sum", algorithm or "auto")
    got = arena.tensor.clone()
    arena.free()
    return got, _sum(world.size, elements, dtype)


def _reduce(world: Communicator, elements: int, dtype: torch.dtype, algorithm: str) -> Result:
    x, root = _contribution(world.rank, elements, dtype), world.size - 1
    world.reduce(x, root, "sum", algorithm)
    return x, _sum(world.size, elements, dtype) if world.rank == root else _contribution(world.rank, elements, dtype)


def _broadcast(world: Communicator, elements: int, dtype: torch.dtype, algorithm: str) -> Result:
    x = _contribution(world.rank, elements, dtype)
    world.broadcast(x, world.size - 1, algorithm)
    return x, _contribution(world.size - 1, elements, dtype)


def _reduce_scatter(world: Communicator, elements: int, dtype: torch.dtype, algorithm: str) -> Result:
    whole, out = elements * world.size, torch.empty(elements, dtype=dtype)
    world.reduce_scatter(out, _contribution(world.rank, whole, dtype), "sum", algorithm)
    return out, _local_chunk(world, _sum(world.size, whole, dtype))


def _all_contributions(world: Communicator, elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([_contribution(r, elements, dtype) for r in range(world.size)])


def _all_gather(world: Communicator, elements: int, dtype: torch.dtype, algorithm: str) -> Result:
    out = torch.empty(elements * world.size, dtype=dtype)
    world.all_gather(out, _contribution(world.rank, elements, dtype), algorithm)
    return out, _all_contributions(world, elements, dtype)


def _gather(world: Communicator, elements: int, dtype: torch.dtype, _: str) -> Result:
    x, at_root = _contribution(world.rank, elements, dtype), world.rank == 0
    out = torch.empty(elements * world.size, dtype=dtype) if at_root else None
    world.gather(out, x, 0)
    return (x, x) if out is None else (out, _all_contributions(world, elements, dtype))


def _scatter(world: Communicator, elements: int, dtype: torch.dtype, _: str) -> Result:
    whole, out = _contribution(0, elements * world.size, dtype), torch.empty(elements, dtype=dtype)
    world.scatter(out, whole if world.rank == 0 else None, 0)
    return out, _local_chunk(world, whole)


def _all_to_all(world: Communicator, elements: int, dtype: torch.dtype, _: str) -> Result:
    x = _contribution(world.rank, elements * world.size, dtype)
    out = torch.empty_like(x)
    world.all_to_all(out, x)
    return out, torch.cat(
        [_local_chunk(world, _contribution(r, elements * world.size, dtype)) for r in range(world.size)]
    )


def _send(world: Communicator, elements: int, dtype: torch.dtype, _: str) -> Result:
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    got = torch.empty(elements, dtype=dtype)
    coming = world.irecv(got, left)
    world.send(_contribution(world.rank, elements, dtype), right)
    coming.wait()
    return got, _contribution(left, elements, dtype)


def _barrier(world: Communicator, elements: int, dtype: torch.dtype, _: str) -> Result:
    world.barrier()
    return torch.ones(1), torch.ones(1)


_CASES: dict[str, Case] = {
    "all_reduce": _all_reduce,
    "all_reduce in an arena": _all_reduce_in_arena,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "send and recv": _send,
    "barrier": _barrier,
}
