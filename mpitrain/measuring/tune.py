"""Measurement of the fastest algorithm of each collective at each size, stored for later jobs on such machines."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product

import torch

from mpitrain.comm import Arena, Communicator
from mpitrain.comm.inspection import reads_neighbours
from mpitrain.comm.job.topology import this_machine
from mpitrain.comm.selection import TABLES, Algorithms, Setting
from mpitrain.comm.tuning import describe_rules, rules_from, rules_key, save_tuning
from mpitrain.errors import InputError
from mpitrain.inference.commands import parse
from mpitrain.measuring.self_start import byte_sizes, make_parser, run_measurement
from mpitrain.speeds.timing import Contender, measure_in_turns

SIZES = [16 << 2 * i for i in range(12)]  # bytes: 16 B to 64 MiB
_QUICK_SIZES = [64, 64 << 10, 1 << 20, 4 << 20]
MEMORIES = ("arena", "private")
_SINGLE_FROM = (
    1 << 20
)  # bytes from which a measurement is a single call, because repeated calls would find data in the cache


class AlgorithmContenders:
    """Contenders for the algorithms that these ranks can use; their vectors are freed when the context of `of` ends."""

    def __init__(self, world: Communicator) -> None:
        """Check which memory the ranks can read. Collective. world: all ranks."""
        self.world = world
        self._reads_neighbours = reads_neighbours(world)

    @contextmanager
    def of(self, table: Algorithms, memory: str, size: int) -> Iterator[dict[str, Contender]]:
        """Yield contenders by algorithm. Collective.

        Args:
            table: Algorithms of the operation.
            memory: Memory of the vectors, "arena" or "private".
            size: Bytes of a rank's whole vector.
        """
        each = max(1, size // 4 // self.world.size)
        numel = size // 4 if table.operation == "all_reduce" else each * self.world.size
        if memory == "arena":
            with in_arena(self.world, numel) as arena:
                x = arena.tensor
                yield self._all(table, memory, size, x, x[self.world.rank * each : (self.world.rank + 1) * each])
        else:
            yield self._all(table, memory, size, zeros(numel), zeros(each))

    def _all(
        self, table: Algorithms, memory: str, size: int, x: torch.Tensor, block: torch.Tensor
    ) -> dict[str, Contender]:
        world = self.world
        calls: dict[str, Callable[[str], Callable[[], object]]] = {
            "all_reduce": lambda name: partial(world.all_reduce, x, "sum", name),
            "reduce": lambda name: partial(world.reduce, x, 0, "sum", name),
            "broadcast": lambda name: partial(world.broadcast, x, 0, name),
            "reduce_scatter": lambda name: partial(world.reduce_scatter, block, x, "sum", name),
            "all_gather": lambda name: partial(world.all_gather, x, block, name),
        }
        one_node, reached = world.num_nodes == 1, memory == "arena" or self._reads_neighbours
        known = {name: a for name, a in table.items() if not (one_node and name == "two_level")}
        usable = [n for n, a in known.items() if (one_node or not a.one_node) and (reached or a.stages or not a.reach)]
        return make_contenders(size, **{name: calls[table.operation](name) for name in usable})


@contextmanager
def in_arena(world: Communicator, numel: int, dtype: torch.dtype = torch.float32) -> Iterator[Arena]:
    """Yield an arena of `numel` elements, which is freed afterwards. Collective.

    Args:
        world: All ranks.
        numel: Number of elements.
        dtype: Dtype of the elements.
    """
    arena = world.arena(numel, dtype)
    try:
        yield arena
    finally:
        arena.free()


def make_contenders(size: int, **calls: Callable[[], object]) -> dict[str, Contender]:
    """Return contenders by name.

    Args:
        size: Bytes of a rank's vector.
        calls: Operations by name.
    """
    return {name: Contender(call, single=size >= _SINGLE_FROM) for name, call in calls.items()}


def zeros(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return zeros in memory that has been written; a page that was only reserved is the system's shared zero page.

    Args:
        numel: Number of elements.
        dtype: Dtype of the elements.
    """
    return torch.empty(numel, dtype=dtype).zero_()


def main(arguments: Sequence[str]) -> int:
    """Run `mpitrain.doctor --tune` with the arguments after it, and return the exit code."""
    options_parser = make_parser("mpitrain.doctor --tune", __doc__ or "", "2,4,8", 1800)
    options_parser.add_argument(
        "--sizes", type=byte_sizes, metavar="S,S", help="bytes of a vector, such as 16,64Ki,4Mi [16 to 64Mi]"
    )
    options = parse(options_parser, arguments)
    command = ["-m", "mpitrain.doctor", "--tune", *arguments]
    return run_measurement(command, options, "algorithms", lambda world: _tune(world, options), _print_rules)


def _tune(world: Communicator, options: argparse.Namespace) -> str:
    """Measure with this number of ranks, and write the machine's tuning table. Returns its path. Collective."""
    if world.size == 1:
        raise InputError("collectives of one rank do nothing; start 2 ranks or more", agreed=True)
    repeats, seconds = (5, 0.3) if options.quick else (21, 8.0)
    bench, origin, rules = AlgorithmContenders(world), f"measured {time.strftime('%Y-%m-%d')}", {}
    for table, memory in product(TABLES.values(), MEMORIES):
        medians = {}
        for size in options.sizes or (_QUICK_SIZES if options.quick else SIZES):
            with bench.of(table, memory, size) as contenders:
                times = measure_in_turns(world, contenders, repeats, seconds)
            medians[size] = {name: took.median for name, took in times.items()}
        place = Setting(0, 0, world.nodes, memory, world.process.spare_cores < 0).place
        key = rules_key(table.operation, place, world.size)
        rules[key] = rules_from(medians)
        if world.rank == 0:
            print(f"  {key.rpartition('/')[0]}: {describe_rules(rules[key])}", flush=True)
    return str(world.on_root(lambda: str(save_tuning(this_machine(), rules, origin))))


def _print_rules(paths: dict[int, str]) -> None:
    path = next(iter(paths.values()))
    print(
        f"The rules are in {path}; jobs on this machine with this MPI use them from now on (python -m mpitrain.doctor "
        "shows them; delete the file to go back to the built-in ones)."
    )
