"""Measurement of the algorithms of an operation when it is first used on ordinary tensors.

The built-in rules of `selection` come from other machines. When a communicator first performs an operation on 8 KiB or
more outside arenas, and the tuning table of this machine has no rules for its number of ranks, the ranks time the
algorithms on scratch memory at a few sizes, for some tenths of a second, and rank 0 adds the rules to the table. Later
jobs on such machines find them there and do not measure.

A measurement must never change a sum, because a restart may choose differently. Two ranks get the same bits from every
algorithm, because a + b = b + a. Of more ranks, only algorithms that add in the same order (`Algorithm.order`) replace
each other, at the sizes at which the built-in rules use one of them.

Nothing is measured in debug mode, for reproducible sums, across nodes, or for vectors in arenas.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from mpitrain.comm.collectives.binding import Binder, CollectiveOperation
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import all_gather_bytes, this_machine
from mpitrain.comm.runtime.executor import Compiled
from mpitrain.comm.selection import TABLES, Algorithms
from mpitrain.comm.tuning import Rule, Tuning, load_tuning, rules_from, rules_key, save_tuning

MEASURED_FROM = 1 << 13  # bytes of a vector; below, MPI's own algorithms win
SIZES = tuple(MEASURED_FROM << 2 * i for i in range(7))  # bytes of a whole vector: 8 KiB to 32 MiB
_SECONDS = 0.08  # for one size, once every algorithm has run; no larger size is measured if one round takes longer
_MOST_ROUNDS, _LEAST_ROUNDS = 25, 4  # of two rounds, other programs may disturb both
_MOVING = ("broadcast", "all_gather")  # operations that add nothing
_BUILT_IN = {operation: tuple(table) for operation, table in TABLES.items()}  # without algorithms that users register


class TunedOperation(CollectiveOperation):
    """Collective operation whose algorithms are measured when it is first used; see the module's docstring."""

    def bind_cached(self, binder: Binder, *arguments: Any) -> Compiled:
        """Return the bound program of a call, cached or new. The first call on enough bytes is collective."""
        tensors, rest = arguments[: self.tensors], arguments[self.tensors :]
        if (
            self.value(rest, "algorithm") == "auto"
            and max(tensor.nbytes for tensor in tensors) >= MEASURED_FROM
            and not self.value(rest, "reproducible", False)
            and not self.value(rest, "counts")
            and binder.proofs is None
            and binder.topology.size > 1
            and binder.topology.num_nodes == 1
            and all(binder.arena_of(tensor) is None for tensor in tensors)
        ):
            place = binder.setting(tensors[0]).place
            if not binder.tuning.is_measured(self.name, place, binder.topology.size):
                self._learn(binder, place, rest)
        return super().bind_cached(binder, *arguments)

    def _learn(self, binder: Binder, place: str, arguments: Sequence[Any]) -> None:
        """Give the binder rules for this operation: those in the table, or measured ones. Collective."""
        size, machine, comm = binder.topology.size, this_machine(), binder.comm
        key, rules = rules_key(self.name, place, size), Tuning().rules(self.name, place, size)
        # ranks that call something else instead, such as a smaller operation, get an error instead of hanging
        binder.with_signature(f"first {self.name} of {MEASURED_FROM} bytes or more", Compiled(()), synchronizes=False)()
        mine = load_tuning(machine) if comm.rank == 0 else Tuning()
        known = Tuning.from_json(all_gather_bytes(comm, mine.to_json().encode())[0].decode()).measured.get(key)
        if known is not None:
            rules = known
        elif any(others for _, _, others in candidates(self.name, place, size)):
            plans = set(binder.cache.plans)
            rules = self._measure(binder, place, arguments)
            for plan in set(binder.cache.plans) - plans:  # they keep scratch memory
                del binder.cache.plans[plan]
            if comm.rank == 0:
                with suppress(OSError):  # a home that cannot be written: the next start measures again
                    save_tuning(machine, {key: rules}, f"measured {time.strftime('%Y-%m-%d')}")
        binder.tuning = Tuning({**binder.tuning.measured, key: rules}, binder.tuning.origin)

    def _measure(self, binder: Binder, place: str, arguments: Sequence[Any]) -> Sequence[Rule]:
        """Return measured rules of this operation. Collective."""
        table, begin, rules = TABLES[self.name], 0, list[Rule]()
        for limit, name, others in candidates(self.name, place, binder.topology.size):
            names = [other for other in others if _is_usable(table, other, binder)]
            times = dict[int, Mapping[str, float]]()
            for nbytes in [nbytes for nbytes in SIZES if begin <= nbytes < limit and len(names) > 1]:
                times[nbytes] = self._times(binder, nbytes, names, arguments)
                if sum(times[nbytes].values()) > _SECONDS:
                    break
            *changes, (_, name) = rules_from(times) if times else [(limit, name)]
            rules += [*changes, (limit, name)]
            begin = limit
        return [rule for rule, after in zip(rules, [*rules[1:], (0, "")], strict=True) if rule[1] != after[1]]

    def _times(
        self, binder: Binder, nbytes: int, names: Sequence[str], arguments: Sequence[Any]
    ) -> Mapping[str, float]:
        """Return the least seconds of each algorithm, measured in turns; equal on all ranks. Collective.

        The least, because rules stay in the table when other programs that disturb the measurement have ended.
        """
        each = nbytes // 4 // binder.topology.size
        whole = each * binder.topology.size
        single = len(self.by_rank) == 1
        # written, because a page that was only reserved is the system's shared zero page
        scratch = [torch.empty(whole if single or by_rank else each).zero_() for by_rank in self.by_rank]
        plain = self.replace_arguments(arguments, op="sum")
        calls = [self.bind(binder, *scratch, *self.replace_arguments(plain, algorithm=name)) for name in names]
        first = np.array(list(_round(binder, calls)))
        binder.comm.Allreduce(MPI.IN_PLACE, first, MPI.MAX)
        rounds = int(np.clip(_SECONDS / max(first.sum(), 1e-9), _LEAST_ROUNDS, _MOST_ROUNDS))
        seconds = np.array([list(_round(binder, calls)) for _ in range(rounds)])
        binder.comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
        for call in calls:
            call.free()
        return dict(zip(names, seconds.min(axis=0).tolist(), strict=True))


def candidates(operation: str, place: str, ranks: int) -> list[tuple[int, str, Sequence[str]]]:
    """Return the built-in rules in order of size, each with the algorithms that may replace its own: (limit, own, all).

    Args:
        operation: Name of the operation.
        place: Place, see `Setting.place`.
        ranks: Number of ranks.
    """
    table, rules = TABLES[operation], Tuning().rules(operation, place, ranks)
    if ranks > 2 and operation not in _MOVING:
        same = {
            name: [x for x in _BUILT_IN[operation] if table[x].order == table[name].order != ""] for _, name in rules
        }
        return [(limit, name, same[name]) for limit, name in rules]
    small = [rule for rule in rules if rule[0] < MEASURED_FROM]
    below = rules[len(small)][1]  # the algorithm just below MEASURED_FROM
    limit, last = rules[-1]
    return [*((n, name, ()) for n, name in small), (MEASURED_FROM, below, ()), (limit, last, _BUILT_IN[operation])]


def _round(binder: Binder, calls: Sequence[Compiled]) -> Iterator[float]:
    """Yield this rank's seconds of each call. Collective."""
    for call in calls:
        binder.comm.Barrier()
        begin = time.perf_counter()
        call()
        yield time.perf_counter() - begin


def _is_usable(table: Algorithms, name: str, binder: Binder) -> bool:
    """Return True if ranks of one node can use an algorithm outside arenas. Collective at the first call."""
    algorithm = table[name]
    return not algorithm.reach or (name != "two_level" and binder.neighbours() is not None)
