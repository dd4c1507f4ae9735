"""Every operation of the communicator across nodes; a wrong result raises an AssertionError.

Started by test_several_nodes.py on three hosts, or by hand: python tests/cluster/namespace_hosts.py python <this>
"""

from __future__ import annotations

import dataclasses
import sys
from itertools import product
from pathlib import Path

import torch

import mpitrain as mt
from mpitrain.comm.selection import ALL_REDUCE, algorithm_by_rules

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "comm"))
from reference import DTYPES, assert_equal, expected_reduction, is_defined, values

NUMELS = (1, 1001, 300_001)


def reductions(world: mt.Communicator, arena: mt.Arena) -> None:
    ranks = range(world.size)
    for dtype, op in product(DTYPES, ("sum", "avg", "max", "product")):
        if not is_defined(op, dtype):
            continue
        for numel in NUMELS[:2]:
            x = values(numel, dtype, world.rank)
            world.all_reduce(x, op)
            assert_equal(x, expected_reduction(op, [values(numel, dtype, r) for r in ranks]), world.size)
    for dtype, numel in product((torch.float32, torch.bfloat16, torch.int64), NUMELS):
        expected = expected_reduction("sum", [values(numel, dtype, r) for r in ranks])
        bits = []
        for algorithm, reproducible in product(("auto", "mpi", "ring", "tree", "halving", "two_level"), (False, True)):
            for x in (torch.empty(numel, dtype=dtype), arena.tensor.view(dtype)[:numel]):
                world.all_reduce(x.copy_(values(numel, dtype, world.rank)), "sum", algorithm, reproducible=reproducible)
                assert_equal(x, expected, world.size)
                bits += [x.clone()] if reproducible else []
        assert all(torch.equal(bits[0], other) for other in bits)
        root = world.size // 2
        for algorithm in ("auto", "mpi", "tree"):
            x = values(numel, dtype, world.rank)
            world.reduce(x, root, "sum", algorithm)
            assert_equal(x, expected if world.rank == root else values(numel, dtype, world.rank), world.size)
        everyone = [values(numel * world.size, dtype, r).chunk(world.size)[world.rank] for r in ranks]
        for algorithm in ("auto", "mpi", "ring", "halving", "pairwise", "two_level"):
            x, out = values(numel * world.size, dtype, world.rank), torch.empty(numel, dtype=dtype)
            world.reduce_scatter(out, x, "sum", algorithm)
            assert_equal(out, expected_reduction("sum", everyone), world.size)
            if numel < NUMELS[-1]:
                x = arena.tensor.view(dtype)[: numel * world.size].copy_(x)
                world.reduce_scatter(out, x, "sum", algorithm)
                assert_equal(out, expected_reduction("sum", everyone), world.size)
                assert_equal(x, values(numel * world.size, dtype, world.rank))  # unchanged


def movements(world: mt.Communicator, arena: mt.Arena) -> None:
    for dtype, numel in product((torch.float32, torch.bool, torch.complex64), NUMELS):
        everyone = [values(numel, dtype, r) for r in range(world.size)]
        mine = everyone[world.rank]
        for algorithm, root in product(("auto", "mpi", "tree"), (0, world.size - 1)):
            x = mine.clone()
            world.broadcast(x, root, algorithm)
            assert torch.equal(x, everyone[root])
        for algorithm in ("auto", "mpi", "ring", "halving", "two_level"):
            out = torch.empty(numel * world.size, dtype=dtype)
            world.all_gather(out, mine, algorithm)
            assert torch.equal(out, torch.cat(everyone))
            if numel < NUMELS[-1]:
                x = arena.tensor.view(dtype)[world.rank : world.rank + numel].copy_(mine)  # not the same place on all
                world.all_gather(out.zero_(), x, algorithm)
                assert torch.equal(out, torch.cat(everyone))
                out = arena.tensor.view(dtype)[: numel * world.size]
                out.chunk(world.size)[world.rank].copy_(mine)
                world.all_gather(out, out.chunk(world.size)[world.rank], algorithm)
                assert torch.equal(out, torch.cat(everyone))
        root = world.size - 1
        whole = torch.empty(numel * world.size, dtype=dtype) if world.rank == root else None
        world.gather(whole, mine, root)
        assert whole is None or torch.equal(whole, torch.cat(everyone))
        block = torch.empty(numel, dtype=dtype)
        world.scatter(block, whole, root)
        assert torch.equal(block, mine)
        x = values(numel * world.size, dtype, world.rank)
        out = torch.empty_like(x)
        world.all_to_all(out, x)
        blocks = [values(numel * world.size, dtype, r).chunk(world.size)[world.rank] for r in range(world.size)]
        assert torch.equal(out, torch.cat(blocks))
        y = torch.empty(numel, dtype=dtype)
        works = [world.irecv(y, (world.rank - 1) % world.size), world.isend(mine, (world.rank + 1) % world.size)]
        for work in works:
            work.wait(60)
        assert torch.equal(y, everyone[world.rank - 1])
    counts = [(7 * r + 3) % 5 for r in range(world.size)]
    out = torch.empty(sum(counts))
    world.all_gather(out, values(counts[world.rank], torch.float32, world.rank), counts=counts)
    assert torch.equal(out, torch.cat([values(n, torch.float32, r) for r, n in enumerate(counts)]))


def groups(world: mt.Communicator) -> None:
    """Check a group within each node, and one across the nodes."""
    for colors in (world.nodes, world.all_gather_object(world.local_rank)):
        group = world.split(colors[world.rank])
        members = [rank for rank in range(world.size) if colors[rank] == colors[world.rank]]
        assert group is not None and group.world_ranks == tuple(members)
        assert group.num_nodes == len({world.nodes[rank] for rank in members})
        x = torch.full((200_000,), float(world.rank))
        group.all_reduce(x)
        assert x.eq(sum(members)).all()
        group.free()


def main(nodes: int) -> None:
    world = mt.init(timeout=60, debug=True)
    assert world.num_nodes == nodes, f"{world.num_nodes} nodes, not {nodes}"
    assert world.process.cores.ranks == world.size, "these nodes are one machine, whose cores all ranks share"
    arena = world.arena(2 * NUMELS[-1])
    assert arena.kind == "shared" and len(arena.segments) == world.local_size
    reductions(world, arena)
    movements(world, arena)
    groups(world)
    setting = dataclasses.replace(world.binder.setting(arena.tensor), nbytes=16 << 20)
    chosen = algorithm_by_rules(ALL_REDUCE, setting, world.process.tuning)
    world.barrier()
    if world.rank == 0:
        print(f"{world.size} ranks on {world.num_nodes} nodes agree; 16 MiB by {chosen}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
