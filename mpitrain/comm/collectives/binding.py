"""What every operation needs to bind a program to memory: arenas, staging, 16-bit data, and what ranks tell each other.

A `Binder` works on one MPI communicator from one thread. A `CollectiveOperation` is what is the same in all calls of an
operation, an `Invocation` a call of it whose arguments have been checked.
"""

from __future__ import annotations

import platform
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch

from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.job.topology import Topology
from mpitrain.comm.job.traffic import Moved, blocks_sent, even_shares
from mpitrain.comm.memory.arena import Arena, ArenaIndex, allocate
from mpitrain.comm.memory.buffers import tensor_at
from mpitrain.comm.memory.device import synchronize
from mpitrain.comm.programs.program import Program, chunk_bounds, even_bounds
from mpitrain.comm.programs.verify import Proofs
from mpitrain.comm.runtime import agreement, executor
from mpitrain.comm.runtime.agreement import LINE, ROW, Board, Call, Register, Signature, described
from mpitrain.comm.runtime.compiling import Plan
from mpitrain.comm.runtime.executor import Compiled, Layout, Reduction
from mpitrain.comm.runtime.remote import Neighbours, probe
from mpitrain.comm.selection import Algorithm, Algorithms, Setting, Tuning, fastest
from mpitrain.errors import InputError

_ORDERED = platform.machine() in ("x86_64", "AMD64")  # stores are seen in order; elsewhere MPI must see to that
CACHE_LINE = 64  # bytes: slices of different ranks meet at multiples of it
WINDOW = 8 << 20  # bytes of staging memory per rank
NOTHING = Compiled(())
_CPU = torch.device("cpu")


T = TypeVar("T")

_KEPT = 512  # bound programs, and plans

Ready = Callable[[torch.Tensor | None], object]


class BoundCache:
    """The bound programs of one `Binder`, used from its thread, found by the address, length and type of their tensors.

    A training loop binds each of its operations once; plans are kept by length and type alone, so that tensors at new
    addresses only have to be bound.

    What was bound goes with the tensors' memory. If it stayed, its small objects would keep the C library from giving
    the place between them out again (glibc's aligned allocations ask for more than they leave): a loop that allocates
    its tensors anew each time would grow by one tensor at each operation.

    Attributes:
        ready: For the keys of some of them, functions that perform the whole operation, given its tensor.
        bound: The programs by their keys.
        plans: What they were bound from, by lengths and types.
    """

    def __init__(self, arenas: ArenaIndex) -> None:
        self.ready: dict[Hashable, Ready] = {}
        self.bound: OrderedDict[Hashable, Compiled] = OrderedDict()
        self.plans: OrderedDict[Hashable, tuple[Program, Plan]] = OrderedDict()
        self._ends: dict[Hashable, list[weakref.ref[torch.UntypedStorage]]] = {}  # for the keys of `bound`
        self._ended: list[Compiled] = []  # whose memory is gone, to be released by the binder's thread
        self._arenas = arenas
        self._generation = arenas.generation  # when the oldest entry was bound
        arenas.changed.add(self.forget_ready)  # it would not look at the arenas again

    def find(self, key: Hashable) -> Compiled | None:
        """Return what was bound under the key; None where one of its addresses may belong to other memory by now."""
        if self._generation != self._arenas.generation:
            self.drop_all()
        while self._ended:
            self._ended.pop().free()
        return self.bound.get(key)

    def keep(self, key: Hashable, compiled: Compiled, tensors: Sequence[torch.Tensor]) -> None:
        """Keep what was bound as long as the tensors' memory; the oldest goes when there are too many."""
        self.bound[key] = compiled
        self._generation = self._arenas.generation  # binding may have made the staging arena
        storages = [tensor.untyped_storage() for tensor in tensors]  # those of torch tell when they end
        ends = [weakref.ref(storage, partial(self._end, key)) for storage in storages if storage.resizable()]
        if ends:
            self._ends[key] = ends
        if len(self.bound) > _KEPT:
            oldest, dropped = self.bound.popitem(last=False)
            self.ready.pop(oldest, None)
            self._ends.pop(oldest, None)
            dropped.free()

    def drop_all(self) -> None:
        """Forget everything."""
        bound, self.bound = self.bound, OrderedDict()
        self.ready.clear()
        self._ends.clear()
        for compiled in (*bound.values(), *self._ended):
            compiled.free()
        self._ended.clear()
        self.plans.clear()
        self._generation = self._arenas.generation

    def forget_ready(self) -> None:
        """Have operations looked for among the bound ones again. Called in whichever thread makes or frees an arena."""
        self.ready.clear()

    def _end(self, key: Hashable, _: object) -> None:
        """Called in whichever thread lets go of the memory, which no operation uses any more."""
        self._ends.pop(key, None)
        self.ready.pop(key, None)
        compiled = self.bound.pop(key, None)
        if compiled is not None and compiled.has_requests:
            self._ended.append(compiled)


def cached(among: OrderedDict[Hashable, T], key: Hashable, make: Callable[[], T]) -> T:
    """Return what is kept under the key, or else is made now; the oldest is dropped when there are too many."""
    found = among.get(key)
    if found is None:
        found = among[key] = make()
        if len(among) > _KEPT:
            among.popitem(last=False)
    return found


class Binder:
    def __init__(
        self,
        comm: MPI.Intracomm,
        node: MPI.Intracomm,
        topology: Topology,
        arenas: ArenaIndex,
        tuning: Tuning,
        oversubscribed: bool,
        proofs: Proofs | None = None,
    ) -> None:
        """node: the communicator of this node's ranks of comm. oversubscribed: some node has more ranks than cores.

        proofs: has every program proved before it is used first; for the debug mode.
        """
        self.oversubscribed, self.proofs = oversubscribed, proofs
        self.comm, self.node, self.topology, self.arenas, self.tuning = comm, node, topology, arenas, tuning
        self.nodes_shared = len(set(topology.nodes)) < topology.size  # whether some node has several ranks
        self.cache = BoundCache(arenas)
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()
        self._staging: Arena | None = None
        self._board: Arena | None = None  # the memory of `_rows`
        self._rows: Board | None = None
        self._register: Register | None = None
        self._signatures: OrderedDict[Hashable, Signature] = OrderedDict()
        self._neighbours: Neighbours | None = None
        self.moved: list[Moved] | None = None  # by what has run, while somebody counts

    def run(self, operation: Call) -> None:
        """Perform what was bound, a whole operation or a part of one, and have it counted."""
        if self.moved is not None and isinstance(operation, Compiled):
            self.moved.append(operation.moved)
        operation()

    def free(self) -> None:
        """Release what was bound, and the staging memory. Collective over the communicator."""
        self.cache.drop_all()
        for arena in (self._staging, self._board):
            if arena is not None:
                arena.free()
        self._staging = self._board = self._rows = self._register = None
        self._signatures.clear()

    def bound(
        self,
        key: Hashable,
        bind: Callable[[], Compiled],
        *tensors: torch.Tensor | None,
        said: Callable[[], str] | None = None,
        together: bool = True,
    ) -> Compiled:
        """What was bound under the key, or else is now; kept as long as the tensors' memory.

        said: the arguments of an operation that is to be signed for (`signed`), unless it is part of another.
        together: whether its ranks wait for each other, where there are any elements.
        """
        compiled = self.cache.find(key)
        if compiled is None:
            compiled = bind()
            present = [tensor for tensor in tensors if tensor is not None]
            if said is not None and self.nodes_shared:
                elements = any(tensor.numel() for tensor in present)
                compiled = self.signed(said(), compiled, together=together and elements)
            self.cache.keep(key, compiled, present)
        return compiled

    # -- which program

    def choose(self, algorithms: Algorithms, name: str, setting: Setting) -> str:
        """The name of an algorithm; of "auto", the fastest by the tuning table that these ranks and data allow."""
        if name != "auto":
            return name
        return fastest(algorithms, setting, self.tuning, lambda: self.neighbours() is not None)

    def program(self, algorithm: Algorithm, setting: Setting) -> Program:
        """The algorithm's program; the same object for the same setting."""
        make, proofs = algorithm.program, self.proofs
        assert make is not None

        def proved() -> Program:
            program = make(setting)
            if proofs is not None:
                proofs.require(program)
            return program

        return cached(self._programs, (make, setting), proved)

    # -- where the data are

    def arena_of(self, x: torch.Tensor) -> Arena | None:
        """The shared arena x lies in, if all ranks of this node that take part can reach it."""
        arena, world = self.arenas.find(x.data_ptr(), x.numel() * x.element_size()), self.topology.world_ranks
        reachable = arena is not None and all(world[r] in arena.segments for r in self.topology.neighbours)
        return arena if reachable else None

    def setting(self, x: torch.Tensor, **more: Any) -> Setting:
        """more: fields of the setting besides where x is and how large."""
        arena = self.arena_of(x)
        memory = "private" if arena is None else "device" if arena.mapped is not None else "arena"
        nbytes = x.numel() * x.element_size()
        return Setting(nbytes, x.numel(), self.topology.nodes, memory, self.oversubscribed, **more)

    def reach(self, x: torch.Tensor) -> tuple[Arena | None, Neighbours | None]:
        """How neighbours get at each other's x: in an arena, else by the system, else (None, None) not at all."""
        arena = self.arena_of(x)
        return arena, None if arena is not None else self.neighbours()

    def require_reach(
        self, x: torch.Tensor, algorithms: Algorithms, name: str
    ) -> tuple[Arena | None, Neighbours | None]:
        """How neighbours get at each other's x, or an InputError where they do not."""
        arena, neighbours = self.reach(x) if self.topology.num_nodes == 1 else (None, None)
        if arena is None and neighbours is None:
            raise InputError(
                f"algorithm {name} of {algorithms.operation} needs all ranks on one node and the tensor in an arena; "
                f"use {algorithms[name].instead}",
                agreed=True,
            )
        return arena, neighbours

    def place(self, x: torch.Tensor) -> str:
        """Where x lies as far as it must lie there on all ranks of the node."""
        arena = self.arena_of(x)
        return f"byte {x.data_ptr() - arena.start} of arena {arena.name}" if arena is not None else ""

    def peers(self, x: torch.Tensor, arena: Arena) -> Callable[[int], int]:
        """Where a neighbour's tensor lies that has x's place in the arena."""
        offset, world = x.data_ptr() - arena.start, self.topology.world_ranks
        return lambda rank: arena.segments[world[rank]] + offset

    def neighbours(self) -> Neighbours | None:
        """The processes of the node whose private memory can be reached; None where the system forbids it.

        Collective the first time, which is in the same operation on all ranks.
        """
        self.board()
        return self._neighbours

    def board(self) -> Board:
        """Where the ranks of the node tell each other what they do. Collective the first time, as `neighbours`."""
        if self._rows is None:
            end = self.node.size * (ROW + LINE)
            self._board = self.allocate(end + agreement.NBYTES, for_tensors=False)
            agreed = self.topology.num_nodes == 1 and self.topology.size == MPI.COMM_WORLD.size
            self._rows = Board(self.node, self.topology.neighbours, self._board, agreed)
            if self._rows.shared:
                self._neighbours = probe(self.comm, self.node, self.topology.neighbours, self._rows)
                words = self.peers(self._board.tensor[end:], self._board)
                self._register = Register(self.topology.neighbours, self.topology.rank, words, syncs(self._board))
        return self._rows

    def signed(self, said: str, compiled: Compiled, *, together: bool = True) -> Compiled:
        """The operation, for which this rank signs first, see `register`. Collective the first time."""
        if not self.nodes_shared:
            return compiled
        self.board()  # on all ranks, also on those that have their node for themselves
        if self._register is None or self.node.size == 1:
            return compiled
        meets = compiled.meets
        make = partial(self._register.signature, said, meets=meets, together=together)
        return compiled.after(cached(self._signatures, (said, meets, together), make))

    def staging(self) -> Arena | None:
        """Shared memory of WINDOW bytes a rank for data outside arenas; None where no memory can be shared.

        Collective the first time, which is in the same operation on all ranks.
        """
        if self._staging is None:
            self._staging = self.allocate(WINDOW)
        return self._staging if self._staging.kind == "shared" else None

    def allocate(
        self, numel: int, dtype: torch.dtype = torch.uint8, device: torch.device = _CPU, *, for_tensors: bool = True
    ) -> Arena:
        """An arena of numel elements a rank, see `mpitrain.comm.memory.arena.allocate`. Collective."""
        world = [self.topology.world_ranks[r] for r in self.topology.neighbours]
        return allocate(self.comm, self.node, world, numel, dtype, device, self.arenas, for_tensors=for_tensors)

    # -- binding

    def in_place(
        self, program: Program, x: torch.Tensor, neighbours: Neighbours | None = None, bounds: Sequence[int] = ()
    ) -> Layout:
        """x as the WORK of a program.

        bounds: offsets of the blocks; without them these are of nearly equal length, and meet at cache lines.
        """
        arena, staging = self.arena_of(x), self._staging
        world = self.topology.world_ranks
        if not bounds:
            bounds = even_bounds(x.numel(), program.blocks, max(1, CACHE_LINE // x.element_size()))
        return Layout(
            x.dtype,
            chunk_bounds(bounds, program.segments),
            x.data_ptr(),
            x.data_ptr(),
            peers=self.peers(x, arena) if arena is not None else None,
            neighbours=neighbours,
            seen=x.data_ptr(),
            slots=(lambda rank: staging.segments[world[rank]]) if staging is not None else None,
            inbox_bounds=self._cells(program, bounds),
        )

    def _cells(self, program: Program, bounds: Sequence[int]) -> Sequence[int]:
        """Bounds of an inbox of contributions to this rank's own block, where there is one block a rank."""
        if not program.inbox or program.segments > 1 or program.blocks != self.topology.size:
            return ()
        own = bounds[self.topology.rank + 1] - bounds[self.topology.rank]
        return [i * own for i in range(program.inbox + 1)]

    def compile(
        self,
        program: Program,
        layout: Layout,
        reduction: Reduction | None = None,
        arena: Arena | None = None,
        *,
        said: str = "",
    ) -> Compiled:
        """arena: the one whose memory neighbours touch, where it is not memory of this instance.

        said: the operation and its arguments, which must be the same on the ranks that touch each other's memory.
        """
        if program.compares and self.nodes_shared:
            board = self.board()
            told = f"{said}, {program.name.split()[0]}", f"{program.blocks} x {program.segments}"
            layout = replace(layout, board=board if self.node.size > 1 else None, said=told)
        return self.plan(program, layout, reduction, arena).bind(layout)

    def plan(self, program: Program, layout: Layout, reduction: Reduction | None, arena: Arena | None) -> Plan:
        """Return the program compiled for this rank and memory of the layout's shape; arena: see `compile`."""
        owner = arena or self._board or self._staging
        reduces = (reduction.op, reduction.dtype) if reduction is not None else None
        key = id(program), layout.shape, reduces, id(owner)

        def make() -> tuple[Program, Plan]:  # with the program, whose id stays its own
            return program, Plan(program, self.comm, layout, reduction, self.node.Barrier, syncs(owner))

        return cached(self.cache.plans, key, make)[1]

    def widened(self, x: torch.Tensor, bind: Callable[[torch.Tensor], Compiled], *, back: bool = True) -> Compiled:
        """A 16-bit operation in place as one on an fp32 copy, rounded once at the end.

        back: whether this rank gets a result.
        """
        wide = torch.empty(x.numel(), dtype=torch.float32)
        inner = bind(wide)
        return Compiled([copying(wide, x), inner, *([copying(x, wide)] if back else [])], [inner, wide])

    def through_staging(self, x: torch.Tensor, bind: Callable[[torch.Tensor], Compiled]) -> Compiled:
        """An operation in place on a vector outside an arena, a window of it at a time in the staging memory."""
        stage = self.staging()
        assert stage is not None
        whole, numel = at_address(x), WINDOW // x.element_size()
        calls: list[Call] = []
        inners: list[Compiled] = []
        for lo in range(0, x.numel(), numel):
            piece = whole[lo : lo + numel]
            staged = stage.tensor[: piece.numel() * x.element_size()].view(x.dtype)
            inner = bind(staged)
            calls += [copying(staged, piece), inner, copying(piece, staged)]
            inners.append(inner)
        return Compiled(calls, inners)


def syncs(arena: Arena | None) -> list[Call]:
    """What a rank calls before and after it meets others, for what was written in the arena to be seen."""
    if arena is not None and arena.mapped is not None:
        return [partial(synchronize, arena.tensor.device)]
    return [] if _ORDERED or arena is None or arena.window is None else [arena.window.Sync]


def at_address(x: torch.Tensor) -> torch.Tensor:
    """The flat tensor over x's memory, which it does not keep alive: bound programs outlive their arguments."""
    return tensor_at(x.data_ptr(), x.numel(), x.dtype)


def copying(into: torch.Tensor, of: torch.Tensor) -> Call:
    """A call that copies, converting the type where they differ, by address."""
    return executor.copying(at_address(into), at_address(of))


def scaling(x: torch.Tensor, reduction: Reduction) -> list[Call]:
    """The division of an average, after the library has summed, by address."""
    return executor.scaling(at_address(x), reduction.scale)


def offsets(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))


def moved_by_library(topology: Topology, operation: str, blocks: Sequence[int] | int, root: int = 0) -> Moved:
    """Return the bytes that the MPI library moves on this rank, as far as they can be known; see `blocks_sent`.

    Args:
        topology: The ranks.
        operation: Name of the operation.
        blocks: Bytes of each rank's block, or of a whole vector that has no blocks.
        root: Of an operation that has one.
    """
    inside = between = 0
    shares = even_shares(blocks, topology.size) if isinstance(blocks, int) else blocks
    for other, nbytes in blocks_sent(operation, topology.rank, shares, root):
        here = topology.nodes[other] == topology.nodes[topology.rank]
        inside, between = inside + nbytes * here, between + nbytes * (not here)
    return Moved("mpi", inside, between)


Tensors = Sequence["torch.Tensor | None"]


class Invocation(NamedTuple):
    """One call of an operation, whose arguments have been checked.

    Attributes:
        name: The operation's name in messages.
        bind: Makes what performs it on a rank's memory, of a binder and the tensors.
        tensors: What it works on; the first has the operation's size.
        written: Which of them it changes.
        key: Under which `bind` has the binder keep what it makes; None where nothing is kept.
        alike: What must be the same on all ranks besides the type, and, unless uneven, the size.
        uneven: Whether the sizes of ranks may differ.
        operation, given: The operation, and what it is given besides tensors; None where bind is all there is.
        on_device: Whether bind takes tensors on a device as they are.
        counts: Whether the journal counts it; else whoever makes it enters it.
        algorithm: By which it is to be known in the journal, where what it is made of does not tell.
        placed: The tensor that neighbours find in an arena by its offset.
    """

    name: str
    bind: Callable[..., Call]
    tensors: Tensors = ()
    written: Sequence[bool] = ()
    key: Hashable = None
    alike: object = None
    uneven: bool = False
    placed: torch.Tensor | None = None
    operation: CollectiveOperation | None = None
    given: Sequence[Any] = ()
    on_device: bool = False
    counts: bool = True
    algorithm: str = ""

    @property
    def first(self) -> torch.Tensor | None:
        """The tensor that has the operation's size, if it is on any."""
        return self.tensors[0] if self.tensors else None


@dataclass(frozen=True)
class CollectiveOperation:
    """A collective operation: what all of its calls have in common.

    It is given one tensor or two, of which the first has its size, and then what else must be the same on all ranks.

    Attributes:
        name: Its name in messages.
        bind: Makes what performs it on a rank's memory, of a binder and what is given.
        parameters: The names of what it is given besides tensors.
        by_rank: For each tensor, whether it is one block a rank; else it is one block. Empty where its one tensor may
            not be cut.
        together: Whether its ranks wait for each other where all of them have elements.
        in_place: Whether a tensor that it changes is read as well.
        placed: The tensor that neighbours find in an arena by its offset, of the rank and what is given.
    """

    name: str
    bind: Callable[..., Compiled]
    parameters: tuple[str, ...] = ()
    by_rank: tuple[bool, ...] = ()
    together: bool = True
    in_place: bool = False
    placed: Callable[..., torch.Tensor | None] | None = None

    @property
    def tensors(self) -> int:
        """Number of tensors among what it is given."""
        return len(self.by_rank) or 1

    def said(self, binder: Binder, *given: Any, place: str = "") -> str:
        """Return in words what must be the same on the ranks of a node.

        Args:
            binder: Binder of the ranks.
            given: Tensors and other arguments of the operation.
            place: Where the tensor that neighbours reach lies in an arena; empty in none, or if they reach none.
        """
        first, rest = given[0], given[self.tensors :]
        root, counts = self.value(rest, "root"), self.value(rest, "counts")
        name = self.name
        if root is not None:
            name += f" {'from' if name in ('broadcast', 'scatter') else 'to'} rank {root}"
        numel = first.numel() * (binder.topology.size if self.by_rank == (False, True) else 1)  # of all blocks
        reproducible = "reproducible" * self.value(rest, "reproducible", False)
        blocks = f"in blocks of {list(counts)}" if counts and min(counts) != max(counts) else ""
        return described(name, numel, first.dtype, self.value(rest, "op", ""), reproducible, place, blocks)

    def key(self, *given: Any) -> tuple[Hashable, ...]:
        """Under which what performs it is kept; the operation's function looks for the same in `ready`."""
        first, rest = given[0], given[self.tensors :]
        others = (None if x is None else (x.data_ptr(), x.numel(), x.dtype) for x in given[1 : self.tensors])
        return (self.name, first.data_ptr(), first.numel(), first.dtype, *others, *rest)

    def bound(self, binder: Binder, *given: Any) -> Compiled:
        """The operation on a rank's memory, as it was bound before or is now."""
        bind, said = partial(self.bind, binder, *given), partial(self.said, binder, *given)
        counts = self.value(given[self.tensors :], "counts")
        together = self.together and (not counts or min(counts) > 0)
        return binder.bound(self.key(*given), bind, *given[: self.tensors], said=said, together=together)

    def on(self, tensors: Tensors, written: Sequence[bool], *arguments: Any, **more: Any) -> Invocation:
        """One call of it.

        Args:
            tensors: The tensors that it is given, in their order.
            written: Which of them it changes.
            arguments: What else it is given.
            more: Further fields of the invocation.
        """

        def bind(binder: Binder, *tensors: torch.Tensor) -> Compiled:
            return self.bound(binder, *tensors, *arguments)

        fields = {"key": self.key(*tensors, *arguments), "alike": arguments, **more}
        return Invocation(self.name, bind, tensors, written, operation=self, given=arguments, **fields)

    def replaced(self, given: Sequence[Any], **values: Any) -> tuple[Any, ...]:
        """Return the arguments besides tensors, with `values` in place of those of the same name."""
        return tuple(values.get(name, value) for name, value in zip(self.parameters, given, strict=True))

    def value(self, given: Sequence[Any], name: str, otherwise: Any = None) -> Any:
        """Return the argument for a parameter, or `otherwise` if the operation has no parameter of that name."""
        return given[self.parameters.index(name)] if name in self.parameters else otherwise
