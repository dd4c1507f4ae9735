"""Every operation: which program it uses, and how the program's memory maps to the caller's tensors.

Arguments were checked by `communicator.py`. Each method returns a call that performs the operation once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from mpitrain.comm.algorithms.direct import direct_all_to_all, direct_gather, direct_scatter
from mpitrain.comm.algorithms.halving import doubling_all_gather, halving_reduce_scatter
from mpitrain.comm.algorithms.pairwise import pairwise_reduce_scatter
from mpitrain.comm.algorithms.ring import ring_all_gather, ring_reduce_scatter
from mpitrain.comm.algorithms.shared import shared_all_gather, shared_broadcast, shared_reduce, shared_reduce_scatter
from mpitrain.comm.algorithms.tree import tree_broadcast, tree_reduce
from mpitrain.comm.collectives import library
from mpitrain.comm.collectives.binding import Binder, copying, offsets, scaling
from mpitrain.comm.collectives.selection import RING_SEGMENT, SHARED_CHUNK, all_reduce_program, segments_of
from mpitrain.comm.memory.arena import Arena
from mpitrain.comm.memory.board import described
from mpitrain.comm.memory.buffers import HALVES, LARGEST_COUNT, tensor_at
from mpitrain.comm.memory.remote import Neighbours
from mpitrain.comm.programs.program import Program, chunk_bounds, even_bounds
from mpitrain.comm.runtime.executor import Compiled, Layout
from mpitrain.comm.runtime.kernels import Reduction
from mpitrain.errors import InputError

_CACHE_LINE = 64  # bytes: slices of different ranks meet at multiples of it
_ARENA_FROM = 8 << 10  # bytes from which operations other than all_reduce use the arena they are in
_REACH_FROM = 1 << 20  # bytes from which they read other processes' private memory
_NOTHING = Compiled(())


class Operations(Binder):
    # -- reductions

    def all_reduce(self, x: torch.Tensor, op: str, algorithm: str, reproducible: bool) -> Compiled:
        key = ("all_reduce", x.data_ptr(), x.numel(), x.dtype, op, algorithm, reproducible)
        said = partial(described, "all_reduce", x.numel(), x.dtype, op, "reproducible" * reproducible)
        return self.bound(key, lambda: self._all_reduce(x, op, algorithm, reproducible), x, said=said)

    def bound_all_reduce(self, x: torch.Tensor, op: str, algorithm: str, reproducible: bool) -> Compiled | None:
        """What `all_reduce` bound before for this very call; None if nothing, or if x must be looked at again."""
        if self._generation != self.arenas.generation or not x.is_contiguous() or x.is_conj() or x.is_neg():
            return None
        return self._bound.get(("all_reduce", x.data_ptr(), x.numel(), x.dtype, op, algorithm, reproducible))

    def _all_reduce(
        self, x: torch.Tensor, op: str, algorithm: str, reproducible: bool, said: str | None = None
    ) -> Compiled:
        """said: the caller's arguments, where x is not the caller's."""
        reduction = Reduction.of(op, x.dtype, self.topology.size)
        if self.topology.size == 1 or x.numel() == 0:
            return _NOTHING
        setting = self.setting(x, reproducible)
        if said is None:
            said = described("all_reduce", x.numel(), x.dtype, op, "reproducible" * reproducible, self.place(x))
        if algorithm == "auto":
            algorithm = self.tuning.algorithm(setting.place, setting.size, setting.nbytes)
        if algorithm == "mpi" and not reproducible:
            if x.dtype in HALVES:
                return self.widened(x, lambda wide: self._all_reduce(wide, op, algorithm, False))
            calls = library.all_reduce(self.comm, x.data_ptr(), x.numel(), reduction)
            return Compiled([*calls, *scaling(x, reduction)])
        neighbours = None
        if algorithm in ("shared", "two_level") and not (reproducible and algorithm == "two_level"):
            arena, neighbours = self.reach(x)
            if neighbours is not None:
                setting = replace(setting, memory="reachable")
            elif arena is None and self.staging() is None:
                return self._all_reduce(x, op, "ring", reproducible)
        program = self.program(all_reduce_program, algorithm, setting)
        if x.dtype in HALVES and program.sends_partial_sums:
            return self.widened(x, lambda wide: self._all_reduce(wide, op, algorithm, reproducible, said))
        if algorithm == "two_level" and setting.memory == "private" and not reproducible:
            return self.through_staging(x, lambda piece: self._all_reduce(piece, op, algorithm, False, said))
        bounds = even_bounds(x.numel(), program.blocks, max(1, _CACHE_LINE // x.element_size()))
        layout = self.in_place(x, chunk_bounds(bounds, program.segments), neighbours)
        if program.inbox:
            layout = replace(layout, inbox_bounds=self._cells(program, bounds))
        return self.compile(program, layout, reduction, self.arena_of(x), said=said)

    def reduce(self, x: torch.Tensor, root: int, op: str, algorithm: str) -> Compiled:
        key = ("reduce", x.data_ptr(), x.numel(), x.dtype, op, algorithm, root)
        said = partial(described, f"reduce to rank {root}", x.numel(), x.dtype, op)
        return self.bound(key, lambda: self._reduce(x, root, op, algorithm), x, said=said, together=False)

    def _reduce(self, x: torch.Tensor, root: int, op: str, algorithm: str) -> Compiled:
        reduction = Reduction.of(op, x.dtype, self.topology.size)
        if self.topology.size == 1 or x.numel() == 0:
            return _NOTHING
        setting, at_root = self.setting(x), self.topology.rank == root
        if algorithm == "auto":
            algorithm = self._shared_or("mpi", x)
        if x.dtype in HALVES and algorithm != "shared":
            return self.widened(x, lambda wide: self._reduce(wide, root, op, algorithm), back=at_root)
        if algorithm == "mpi":
            calls = library.reduce(self.comm, x.data_ptr(), x.numel(), root, reduction)
            return Compiled([*calls, *(scaling(x, reduction) if at_root else ())])
        if algorithm == "shared":
            arena, neighbours = self._require_reach(x, "reduce")
            program = self.program(shared_reduce, setting.size, root, _cache_chunks(setting.nbytes // setting.size))
            bounds = chunk_bounds(even_bounds(x.numel(), program.blocks), program.segments)
            said = described(f"reduce to rank {root}", x.numel(), x.dtype, op, self.place(x))
            return self.compile(program, self.in_place(x, bounds, neighbours), reduction, arena, said=said)
        if algorithm != "tree":
            raise _no_algorithm("reduce", algorithm, "mpi, shared or tree")
        program = self.program(
            tree_reduce, setting.size, root, segments_of(setting.nbytes, RING_SEGMENT), setting.nodes
        )
        layout = self.in_place(x, chunk_bounds([0, x.numel()], program.segments))
        if at_root:
            return self.compile(program, layout, reduction)
        sums = torch.empty(x.numel(), dtype=x.dtype)  # partial sums of other ranks than the root: their x stays
        return self.compile(program, replace(layout, target=sums.data_ptr()), reduction, keeps=[sums])

    def reduce_scatter(
        self, out: torch.Tensor, x: torch.Tensor, counts: Sequence[int], op: str, algorithm: str, reproducible: bool
    ) -> Compiled:
        key = ("reduce_scatter", out.data_ptr(), x.data_ptr(), x.dtype, tuple(counts), op, algorithm, reproducible)
        said = partial(described, "reduce_scatter", x.numel(), x.dtype, op, _unequal(counts))
        bind = partial(self._reduce_scatter, out, x, counts, op, algorithm, reproducible)
        return self.bound(key, bind, out, x, said=said, together=min(counts) > 0)

    def body_of_reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: str) -> Compiled | None:
        """What lies between the two fences of a reduce_scatter in an arena, of blocks as long as `out`.

        None, on all ranks, where x is not in the memory of one node.
        """
        if self.topology.size == 1 or self.topology.num_nodes > 1 or x.numel() == 0 or self.arena_of(x) is None:
            return None
        counts = [out.numel()] * self.topology.size
        key = ("body of reduce_scatter", out.data_ptr(), x.data_ptr(), x.dtype, x.numel(), op)
        bind = partial(self._reduce_scatter, out, x, counts, op, "shared", False, fenced=False)
        return self.bound(key, bind, out, x)

    def _reduce_scatter(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        counts: Sequence[int],
        op: str,
        algorithm: str,
        reproducible: bool,
        *,
        fenced: bool = True,
    ) -> Compiled:
        reduction = Reduction.of(op, x.dtype, self.topology.size)
        setting, rank, bounds = self.setting(x, reproducible), self.topology.rank, offsets(counts)
        size, largest = setting.size, max(counts) * x.element_size()
        if x.numel() == 0:
            return _NOTHING
        if size == 1:
            return Compiled([copying(out, x)])
        if algorithm == "auto":  # 16-bit: summed in fp32 where they arrive, from 16-bit messages
            algorithm = self._shared_or("pairwise" if x.dtype in HALVES else "mpi", x)
        if algorithm == "mpi" and x.numel() > LARGEST_COUNT:
            algorithm = "ring"
        arena, neighbours = None, None
        if algorithm == "shared":
            arena, neighbours = self._require_reach(x, "reduce_scatter")
            program = self.program(shared_reduce_scatter, size, _cache_chunks(largest), tree=reproducible)
        elif reproducible or algorithm == "pairwise":
            program = self.program(pairwise_reduce_scatter, size, setting.nodes)
        elif x.dtype in HALVES:
            wide, sums = torch.empty(x.numel(), dtype=torch.float32), torch.empty(out.numel(), dtype=torch.float32)
            inner = self._reduce_scatter(sums, wide, counts, op, algorithm, False)
            return Compiled([copying(wide, x), inner, copying(out, sums)], [inner, wide, sums])
        elif algorithm == "mpi":
            result = torch.empty_like(out) if _overlap(out, x) else out
            calls = library.reduce_scatter(self.comm, result.data_ptr(), x.data_ptr(), counts, reduction)
            back = [] if result is out else [copying(out, result)]
            return Compiled([*calls, *scaling(result, reduction), *back], [] if result is out else [result])
        elif algorithm == "ring":
            program = self.program(ring_reduce_scatter, size, segments_of(largest, RING_SEGMENT), setting.nodes)
        elif algorithm == "halving":
            program = self.program(halving_reduce_scatter, size, setting.nodes)
        else:
            raise _no_algorithm("reduce_scatter", algorithm, "mpi, ring, halving, pairwise or shared")
        layout = Layout(
            x.dtype,
            chunk_bounds(bounds, program.segments),
            source=x.data_ptr(),
            target=out.data_ptr() - bounds[rank] * x.element_size(),  # where the own block is the only one written
            peers=self.peers(x, arena) if arena is not None else None,
            neighbours=neighbours,
            seen=x.data_ptr(),
            inbox_bounds=self._cells(program, bounds),
        )
        if not program.sends_partial_sums:
            said = self.said_of_reduce_scatter(x, counts, op)
            return self.compile(program, layout, reduction, arena, said=said, fenced=fenced)
        whole = torch.empty(x.numel(), dtype=x.dtype)
        inner = self.compile(program, replace(layout, target=whole.data_ptr()), reduction)
        return Compiled([inner, copying(out, whole[bounds[rank] : bounds[rank + 1]])], [inner, whole])

    def said_of_reduce_scatter(self, x: torch.Tensor, counts: Sequence[int], op: str) -> str:
        return described("reduce_scatter", x.numel(), x.dtype, op, self.place(x), _unequal(counts))

    # -- movements

    def broadcast(self, x: torch.Tensor, root: int, algorithm: str) -> Compiled:
        key = ("broadcast", x.data_ptr(), x.numel(), x.dtype, algorithm, root)
        said = partial(described, f"broadcast from rank {root}", x.numel(), x.dtype)
        return self.bound(key, lambda: self._broadcast(x, root, algorithm), x, said=said, together=False)

    def _broadcast(self, x: torch.Tensor, root: int, algorithm: str) -> Compiled:
        if self.topology.size == 1 or x.numel() == 0:
            return _NOTHING
        setting = self.setting(x)
        if algorithm == "auto":
            algorithm = self._shared_or("mpi", x)
        if algorithm == "mpi":
            return Compiled(library.broadcast(self.comm, x.data_ptr(), setting.nbytes, root))
        if algorithm == "shared":
            arena, neighbours = self._require_reach(x, "broadcast")
            layout = self.in_place(x, [0, x.numel()], neighbours)
            said = described(f"broadcast from rank {root}", x.numel(), x.dtype, self.place(x))
            return self.compile(self.program(shared_broadcast, setting.size, root), layout, None, arena, said=said)
        if algorithm != "tree":
            raise _no_algorithm("broadcast", algorithm, "mpi, shared or tree")
        program = self.program(
            tree_broadcast, setting.size, root, segments_of(setting.nbytes, RING_SEGMENT), setting.nodes
        )
        return self.compile(program, self.in_place(x, chunk_bounds([0, x.numel()], program.segments)))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, counts: Sequence[int], algorithm: str) -> Compiled:
        key = ("all_gather", out.data_ptr(), x.data_ptr(), x.dtype, tuple(counts), algorithm)
        said = partial(described, "all_gather", out.numel(), x.dtype, _unequal(counts))
        bind = partial(self._all_gather, out, x, counts, algorithm)
        return self.bound(key, bind, out, x, said=said, together=min(counts) > 0)

    def _all_gather(self, out: torch.Tensor, x: torch.Tensor, counts: Sequence[int], algorithm: str) -> Compiled:
        size, rank, item = self.topology.size, self.topology.rank, x.element_size()
        bounds, largest = offsets(counts), max(counts) * item
        if bounds[-1] == 0:
            return _NOTHING
        own = tensor_at(out.data_ptr() + bounds[rank] * item, counts[rank], x.dtype)
        place = [] if own.data_ptr() == x.data_ptr() or not counts[rank] else [copying(own, x)]
        if size == 1:
            return Compiled(place)
        if algorithm == "auto":
            equal = min(counts) == max(counts)  # else a rank with nothing would not find its x in the arena
            algorithm = self._shared_or("mpi", x if place else out, bounds[-1] * item) if equal else "mpi"
        if algorithm == "mpi" and bounds[-1] * item > LARGEST_COUNT:
            algorithm = "ring"
        if algorithm == "mpi":
            return Compiled([*place, *library.all_gather(self.comm, out.data_ptr(), counts, item)])
        layout = Layout(x.dtype, bounds, out.data_ptr(), out.data_ptr())
        if algorithm == "shared":
            # a neighbour's x is its block alone: its WORK begins as far before it as the block lies in out
            read, before = (x, lambda r: bounds[r] * item) if place else (out, lambda r: 0)
            arena, neighbours = self._require_reach(read, "all_gather")
            layout = replace(layout, neighbours=neighbours, seen=read.data_ptr() - before(rank))
            if arena is not None:
                find = self.peers(read, arena)
                layout = replace(layout, peers=lambda r: find(r) - before(r))
            where = self.place(read) + " in place" * (read is out and arena is not None)
            said = described("all_gather", bounds[-1], x.dtype, where, _unequal(counts))
            inner = self.compile(self.program(shared_all_gather, size), layout, None, arena, said=said)
        elif algorithm == "ring":
            program = self.program(ring_all_gather, size, segments_of(largest, RING_SEGMENT), self.topology.nodes)
            inner = self.compile(program, replace(layout, bounds=chunk_bounds(bounds, program.segments)))
        elif algorithm == "halving":
            inner = self.compile(self.program(doubling_all_gather, size, self.topology.nodes), layout)
        else:
            raise _no_algorithm("all_gather", algorithm, "mpi, ring, halving or shared")
        return Compiled([*place, inner], [inner])

    def gather(self, out: torch.Tensor | None, x: torch.Tensor, root: int) -> Compiled:
        said = described(f"gather to rank {root}", x.numel() * self.topology.size, x.dtype)
        return self.signed(said, self._gather(out, x, root), together=False)

    def _gather(self, out: torch.Tensor | None, x: torch.Tensor, root: int) -> Compiled:
        size, numel, item = self.topology.size, x.numel(), x.element_size()
        into = out.data_ptr() if out is not None else 0
        if numel * item * size <= LARGEST_COUNT:
            return Compiled(library.gather(self.comm, into, x.data_ptr(), numel, item, root))
        cells = [r * numel if out is not None else 0 for r in range(size + 1)]
        layout = Layout(x.dtype, [0, numel], x.data_ptr(), x.data_ptr(), inbox=into, inbox_bounds=cells)
        return self.compile(self.program(direct_gather, size, root), layout)

    def scatter(self, out: torch.Tensor, x: torch.Tensor | None, root: int) -> Compiled:
        said = described(f"scatter from rank {root}", out.numel() * self.topology.size, out.dtype)
        return self.signed(said, self._scatter(out, x, root), together=False)

    def _scatter(self, out: torch.Tensor, x: torch.Tensor | None, root: int) -> Compiled:
        size, numel, item = self.topology.size, out.numel(), out.element_size()
        source = x.data_ptr() if x is not None else 0
        if numel * item * size <= LARGEST_COUNT:
            return Compiled(library.scatter(self.comm, out.data_ptr(), source, numel, item, root))
        blocks = [r * numel for r in range(size + 1)]
        layout = Layout(out.dtype, blocks, source, source, inbox=out.data_ptr(), inbox_bounds=[0, numel])
        return self.compile(self.program(direct_scatter, size, root), layout)

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        received: Sequence[int],
        sent: Sequence[int],
        by_library: bool,
        even: bool,
    ) -> Compiled:
        """by_library, even: the same on all ranks. by_library: False when some rank's data are too large for the
        library; even: whether all blocks of all ranks are equal.
        """
        said = described("all_to_all", x.numel(), x.dtype) if even else f"uneven all_to_all of {x.dtype}"
        compiled = self._all_to_all(out, x, received, sent, by_library)
        return self.signed(said, compiled, together=even and x.numel() > 0)

    def _all_to_all(
        self, out: torch.Tensor, x: torch.Tensor, received: Sequence[int], sent: Sequence[int], by_library: bool
    ) -> Compiled:
        if by_library:
            item = x.element_size()
            return Compiled(library.all_to_all(self.comm, out.data_ptr(), x.data_ptr(), received, sent, item))
        source, into = x.data_ptr(), out.data_ptr()
        layout = Layout(x.dtype, offsets(sent), source, source, inbox=into, inbox_bounds=offsets(received))
        return self.compile(self.program(direct_all_to_all, self.topology.size), layout)

    def _cells(self, program: Program, bounds: Sequence[int]) -> list[int]:
        """Bounds of an inbox of contributions to this rank's own block."""
        own = bounds[self.topology.rank + 1] - bounds[self.topology.rank] if program.inbox else 0
        return [i * own for i in range(program.inbox + 1)]

    def _shared_or(self, otherwise: str, x: torch.Tensor, nbytes: int | None = None) -> str:
        """`shared` on one node where it is worth it: sooner in an arena than for memory reached by the system."""
        setting = self.setting(x)
        size = setting.nbytes if nbytes is None else nbytes
        if not setting.one_node or setting.size == 1:
            return otherwise
        if setting.memory == "arena":
            return "shared" if size >= _ARENA_FROM else otherwise
        return "shared" if size >= _REACH_FROM and self.neighbours() is not None else otherwise

    def _require_reach(self, x: torch.Tensor, operation: str) -> tuple[Arena | None, Neighbours | None]:
        """How neighbours reach each other's x, or an InputError where they do not."""
        arena, neighbours = self.reach(x) if self.topology.num_nodes == 1 else (None, None)
        if arena is None and neighbours is None:
            raise InputError(
                f"algorithm shared of {operation} needs all ranks on one node and the tensor in an arena; use auto",
                agreed=True,
            )
        return arena, neighbours


def _cache_chunks(nbytes: int) -> int:
    return segments_of(nbytes, SHARED_CHUNK, most=1 << 20)


def _unequal(counts: Sequence[int]) -> str:
    """Block sizes in words, where the number of all elements does not tell them."""
    return f"in blocks of {list(counts)}" if min(counts) != max(counts) else ""


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    a_end, b_end = a.data_ptr() + a.numel() * a.element_size(), b.data_ptr() + b.numel() * b.element_size()
    return a.data_ptr() < b_end and b.data_ptr() < a_end


def _no_algorithm(operation: str, algorithm: str, known: str) -> InputError:
    return InputError(f"{operation} has no algorithm {algorithm!r}; use auto, {known}", agreed=True)
