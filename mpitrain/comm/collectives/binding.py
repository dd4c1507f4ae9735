"""Binding of collective programs to memory: arenas, staging memory, 16-bit data, and agreement between ranks.

A `Binder` binds programs for one MPI communicator and is used by one thread. A `CollectiveOperation` describes an
operation, such as all_reduce. An `Invocation` is one call of an operation, with arguments that have been checked.
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
from mpitrain.comm.job.traffic import Volume
from mpitrain.comm.memory.arena import Arena, ArenaIndex, allocate
from mpitrain.comm.memory.buffers import tensor_at
from mpitrain.comm.memory.device import synchronize
from mpitrain.comm.programs.program import Program, chunk_bounds, even_bounds
from mpitrain.comm.programs.verify import Proofs
from mpitrain.comm.runtime import agreement, executor
from mpitrain.comm.runtime.agreement import LINE, ROW, Board, Call, Register, Signature, describe_call, make_row
from mpitrain.comm.runtime.compiling import Plan
from mpitrain.comm.runtime.executor import Compiled, Layout, Reduction
from mpitrain.comm.runtime.remote import Neighbours, probe
from mpitrain.comm.runtime.waiting import make_barrier
from mpitrain.comm.selection import Algorithm, Algorithms, Setting, fastest
from mpitrain.comm.tuning import Tuning
from mpitrain.errors import InputError

_ORDERED = platform.machine() in ("x86_64", "AMD64")  # other ranks see stores in order; elsewhere MPI must sync them
CACHE_LINE = 64  # bytes: boundaries between slices of different ranks are multiples of it
WINDOW = 8 << 20  # bytes of staging memory per rank
_MIN_NBYTES_FOR_NAPS = 1 << 20  # waits for shorter messages are faster in MPI, even if ranks share cores
NOTHING = Compiled(())
_CPU = torch.device("cpu")
T = TypeVar("T")

_MAX_ENTRIES = 512  # largest number of entries in a cache


class BoundCache:
    """Cache of the programs that one `Binder` has bound, looked up by address, length and dtype of their tensors.

    It is used from the binder's thread. A training loop binds each operation once. Plans are cached by length and dtype
    alone, so that tensors at new addresses only need binding, not compiling.

    A bound program is dropped when the memory of its tensors is freed. Otherwise a loop that allocates its tensors anew
    in each iteration would grow by one tensor per operation: the small objects of old entries would keep the C library
    from reusing the memory between them (glibc's aligned allocations ask for more than they finally use).

    Attributes:
        ready: For some of the keys, a function that performs the whole operation.
        bound: Bound programs by key.
        plans: Programs and plans they were bound from, by length and dtype.
    """

    def __init__(self, arenas: ArenaIndex) -> None:
        self.ready: dict[Hashable, Call] = {}
        self._followers: weakref.WeakSet[Any] = weakref.WeakSet()  # persistent calls that use functions of `ready`
        self.bound: OrderedDict[Hashable, Compiled] = OrderedDict()
        self.plans: OrderedDict[Hashable, tuple[Program, Plan]] = OrderedDict()
        self._references: dict[Hashable, list[weakref.ref[torch.UntypedStorage]]] = {}  # for the keys of `bound`
        self._expired: list[Compiled] = []  # programs whose tensors were freed; the binder's thread releases them
        self._arenas = arenas
        self._generation = arenas.generation  # the generation in which the entries were bound
        arenas.changed.add(self.forget_ready)  # a ready function would not look at the arenas again

    def find(self, key: Hashable) -> Compiled | None:
        """Return the program bound under the key; None if there is none or the arenas have changed since.

        This also releases the programs whose tensors were freed.
        """
        if self._generation != self._arenas.generation:
            self.drop_all()
        while self._expired:
            self._expired.pop().free()
        return self.bound.get(key)

    def keep(self, key: Hashable, compiled: Compiled, tensors: Sequence[torch.Tensor]) -> None:
        """Cache a bound program while its tensors' memory exists; drop the oldest entry if there are too many."""
        self.bound[key] = compiled
        self._generation = self._arenas.generation  # binding may have made the staging arena
        storages = [tensor.untyped_storage() for tensor in tensors]  # torch's own are resizable
        references = [weakref.ref(storage, partial(self._expire, key)) for storage in storages if storage.resizable()]
        if references:
            self._references[key] = references
        if len(self.bound) > _MAX_ENTRIES:
            oldest, dropped = self.bound.popitem(last=False)
            self.forget_ready()
            self._references.pop(oldest, None)
            dropped.free()

    def drop_all(self) -> None:
        """Drop and release all entries."""
        bound, self.bound = self.bound, OrderedDict()
        self.forget_ready()
        self._references.clear()
        for compiled in (*bound.values(), *self._expired):
            compiled.free()
        self._expired.clear()
        self.plans.clear()
        self._generation = self._arenas.generation

    def forget_ready(self) -> None:
        """Clear `ready`; called in whichever thread makes or frees an arena."""
        self.ready.clear()
        for follower in list(self._followers):
            follower.forget()

    def follow(self, key: Hashable, follower: Any) -> Compiled | None:
        """Return the program of a key if it may be repeated; `follower.forget()` is called when it becomes invalid."""
        self._followers.add(follower)
        return self.bound.get(key) if key in self.ready else None

    def _expire(self, key: Hashable, _: object) -> None:
        """Drop a program whose tensors were freed; called in whichever thread freed them."""
        self._references.pop(key, None)
        self.ready.pop(key, None)
        compiled = self.bound.pop(key, None)
        if compiled is not None and compiled.has_requests:
            self._expired.append(compiled)


def get_or_make(cache: OrderedDict[Hashable, T], key: Hashable, make: Callable[[], T]) -> T:
    """Return the value cached under the key, made on first use; the oldest value is dropped if there are too many."""
    value = cache.get(key)
    if value is None:
        value = cache[key] = make()
        if len(cache) > _MAX_ENTRIES:
            cache.popitem(last=False)
    return value


class Binder:
    """Binds the programs of collective operations to memory, for one MPI communicator and one thread."""

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
        """Start with nothing bound.

        Args:
            comm, node: MPI communicators of all ranks, and of those on this node.
            topology: Placement of the ranks of `comm`.
            arenas: Arenas of this process.
            tuning: Table of the fastest algorithms on this machine.
            oversubscribed: True if some machine has more ranks than cores.
            proofs: In debug mode, proves every program before its first use.
        """
        self.oversubscribed, self.proofs = oversubscribed, proofs
        self.comm, self.node, self.topology, self.arenas, self.tuning = comm, node, topology, arenas, tuning
        self.meet = make_barrier(node, naps=oversubscribed)
        self.nodes_shared = len(set(topology.nodes)) < topology.size  # some node has several ranks
        self.cache = BoundCache(arenas)
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()
        self._staging: Arena | None = None
        self._board: Arena | None = None  # the memory of `_rows`
        self._rows: Board | None = None
        self._register: Register | None = None
        self._signatures: OrderedDict[Hashable, Signature] = OrderedDict()
        self._neighbours: Neighbours | None = None
        self.volume: list[Volume] | None = None  # traffic of what `run` performed, while somebody counts

    def run(self, operation: Call) -> None:
        """Perform a bound operation, or a part of one, and count the bytes it moves."""
        if self.volume is not None and isinstance(operation, Compiled):
            self.volume.append(operation.volume)
        operation()

    def free(self) -> None:
        """Release the bound programs and the staging memory. Collective over the communicator."""
        self.cache.drop_all()
        for arena in (self._staging, self._board):
            if arena is not None:
                arena.free()
        self._staging = self._board = self._rows = self._register = None
        self._signatures.clear()

    def bind_cached(
        self,
        key: Hashable,
        bind: Callable[[], Compiled],
        *tensors: torch.Tensor | None,
        describe: Callable[[], str] | None = None,
        synchronizes: bool = True,
    ) -> Compiled:
        """Return the program cached under the key; bind it first if needed.

        Args:
            key: Key of the program in the cache.
            bind: Binds the program.
            tensors: Tensors whose memory it uses; the program is kept for as long as that memory.
            describe: Describes the operation and its arguments; None for a part of another operation.
            synchronizes: If true, no rank with elements can complete the operation before all have begun it.
        """
        compiled = self.cache.find(key)
        if compiled is None:
            compiled = bind()
            present = [tensor for tensor in tensors if tensor is not None]
            if describe is not None and self.nodes_shared:
                elements = any(tensor.numel() for tensor in present)
                compiled = self.with_signature(describe(), compiled, synchronizes=synchronizes and elements)
            self.cache.keep(key, compiled, present)
        return compiled

    # -- choice of the program

    def choose(self, algorithms: Algorithms, name: str, setting: Setting) -> str:
        """Return the name of the algorithm to use; "auto" selects the fastest possible one by the tuning table."""
        if name != "auto":
            return name
        return fastest(algorithms, setting, self.tuning, lambda: self.neighbours() is not None)

    def program(self, algorithm: Algorithm, setting: Setting) -> Program:
        """Return the algorithm's program; equal settings give the same object."""
        make, proofs = algorithm.program, self.proofs
        assert make is not None

        def make_proved() -> Program:
            program = make(setting)
            if proofs is not None:
                proofs.prove(program)
            return program

        return get_or_make(self._programs, (make, setting), make_proved)

    # -- location of the data

    def arena_of(self, x: torch.Tensor) -> Arena | None:
        """Return the shared arena that contains x; None if some rank of this communicator on the node lacks it."""
        arena, world = self.arenas.find(x.data_ptr(), x.numel() * x.element_size()), self.topology.world_ranks
        reachable = arena is not None and all(world[r] in arena.segments for r in self.topology.neighbours)
        return arena if reachable else None

    def setting(self, x: torch.Tensor, **more: Any) -> Setting:
        """Return the setting of a call on x; `more` are the fields of `Setting` besides size and location."""
        arena = self.arena_of(x)
        memory = "private" if arena is None else "device" if arena.mapped is not None else "arena"
        nbytes = x.numel() * x.element_size()
        return Setting(nbytes, x.numel(), self.topology.nodes, memory, self.oversubscribed, **more)

    def reach(self, x: torch.Tensor) -> tuple[Arena | None, Neighbours | None]:
        """Return how ranks of a node access each other's x: (arena, None), (None, neighbours), or (None, None)."""
        arena = self.arena_of(x)
        return arena, None if arena is not None else self.neighbours()

    def require_reach(
        self, x: torch.Tensor, algorithms: Algorithms, name: str
    ) -> tuple[Arena | None, Neighbours | None]:
        """Return how ranks access each other's x, as `reach` does, for an algorithm that needs it.

        Raises:
            InputError: The ranks are on several nodes, or cannot access each other's x.
        """
        one_node = algorithms[name].one_node
        arena, neighbours = self.reach(x) if self.topology.num_nodes == 1 or not one_node else (None, None)
        if arena is None and neighbours is None:
            raise InputError(
                f"algorithm {name} of {algorithms.operation} needs all ranks on one node and the tensor in an arena; "
                f"use {algorithms[name].instead}",
                agreed=True,
            )
        return arena, neighbours

    def describe_place(self, x: torch.Tensor) -> str:
        """Describe the place of x in its arena, which must be equal on all ranks of the node; "" outside an arena."""
        arena = self.arena_of(x)
        return f"byte {x.data_ptr() - arena.start} of arena {arena.name}" if arena is not None else ""

    def peers(self, x: torch.Tensor, arena: Arena) -> Callable[[int], int]:
        """Return a function from a rank to the address of that rank's tensor, at the same offset in the arena as x."""
        offset, world = x.data_ptr() - arena.start, self.topology.world_ranks
        return lambda rank: arena.segments[world[rank]] + offset

    def neighbours(self) -> Neighbours | None:
        """Return the processes of the node whose private memory can be accessed; None where the system forbids it.

        The first call is collective; it occurs in the same operation on all ranks.
        """
        self.board()
        return self._neighbours

    def board(self) -> Board:
        """Return the board on which ranks of the node announce their operations. The first call is collective."""
        if self._rows is None:
            end = self.node.size * (ROW + LINE)
            self._board = self.allocate(end + agreement.NBYTES, for_tensors=False)
            agreed = self.topology.num_nodes == 1 and self.topology.size == MPI.COMM_WORLD.size
            self._rows = Board(self.node, self.topology.neighbours, self._board, agreed)
            if self._rows.shared:
                self._neighbours = probe(self.comm, self.node, self.topology.neighbours, self._rows)
                words = self.peers(self._board.tensor[end:], self._board)
                self._register = Register(self.topology.neighbours, self.topology.rank, words, sync_calls(self._board))
        return self._rows

    def with_signature(self, description: str, compiled: Compiled, *, synchronizes: bool = True) -> Compiled:
        """Return the operation preceded by this rank's signature (see `Register`). The first call is collective.

        Args:
            description: The operation and its arguments, in words.
            compiled: The operation.
            synchronizes: If true, no rank can complete it before all have begun it.
        """
        if not self.nodes_shared:
            return compiled
        self.board()  # collective: also on ranks that are alone on their node
        if self._register is None or self.node.size == 1:
            return compiled
        meets = compiled.meets
        make = partial(self._register.signature, description, meets=meets, synchronizing=synchronizes)
        return compiled.after(get_or_make(self._signatures, (description, meets, synchronizes), make))

    def staging(self, description: str) -> Arena | None:
        """Return shared memory of WINDOW bytes per rank, for data outside arenas; None if memory cannot be shared.

        The first call is collective. Ranks that call another operation than `description` instead get an error.
        """
        if self._staging is None:
            board, first = self.board(), f"{description}, the first through shared memory"
            meet = board.make_meeting_call(make_row(0, first), [*sync_calls(self._board), self.meet])
            self.with_signature(first, Compiled([meet], meets=True))()
            self._staging = self.allocate(WINDOW)
        return self._staging if self._staging.kind == "shared" else None

    def allocate(
        self, numel: int, dtype: torch.dtype = torch.uint8, device: torch.device = _CPU, *, for_tensors: bool = True
    ) -> Arena:
        """Allocate an arena of `numel` elements per rank; see `mpitrain.comm.memory.arena.allocate`. Collective."""
        world = [self.topology.world_ranks[r] for r in self.topology.neighbours]
        return allocate(self.comm, self.node, world, numel, dtype, device, self.arenas, for_tensors=for_tensors)

    # -- binding

    def layout_in_place(
        self, program: Program, x: torch.Tensor, neighbours: Neighbours | None = None, bounds: Sequence[int] = ()
    ) -> Layout:
        """Return a layout in which x is the program's WORK, read and written in place.

        Args:
            program, x: The program, and a contiguous tensor.
            neighbours: Processes of the node, where their x is accessed by system calls.
            bounds: Offsets of the blocks in elements; by default blocks of nearly equal length that end at cache lines.
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
            exposed_address=x.data_ptr(),
            slots=(lambda rank: staging.segments[world[rank]]) if staging is not None else None,
            inbox_bounds=self._inbox_bounds(program, bounds),
        )

    def _inbox_bounds(self, program: Program, bounds: Sequence[int]) -> Sequence[int]:
        """Return the inbox bounds for one contribution per rank to this rank's block; () if there is no such inbox."""
        if not program.inbox or program.segments > 1 or program.blocks != self.topology.size:
            return ()
        block = bounds[self.topology.rank + 1] - bounds[self.topology.rank]
        return [i * block for i in range(program.inbox + 1)]

    def compile(
        self,
        program: Program,
        layout: Layout,
        reduction: Reduction | None = None,
        arena: Arena | None = None,
        *,
        description: str = "",
    ) -> Compiled:
        """Compile a program and bind it to a layout.

        Args:
            program, layout: The program, and the addresses and sizes of its memory.
            reduction: Arithmetic of the program; None if it combines nothing.
            arena: Arena whose memory the ranks access in each other; by default the memory of this binder.
            description: The operation and its arguments, which must be equal on ranks that access each other's memory.
        """
        if program.compares and self.nodes_shared:
            board = self.board()
            row = f"{description}, {program.name.split()[0]}", f"{program.blocks} x {program.segments}"
            layout = replace(layout, board=board if self.node.size > 1 else None, descriptions=row)
        return self.plan(program, layout, reduction, arena).bind(layout)

    def plan(self, program: Program, layout: Layout, reduction: Reduction | None, arena: Arena | None) -> Plan:
        """Return the plan of the program for memory of the layout's shape; the arguments are those of `compile`."""
        owner = arena or self._board or self._staging
        reduces = (reduction.op, reduction.dtype) if reduction is not None else None
        key = id(program), layout.shape, reduces, id(owner)

        def make() -> tuple[Program, Plan]:  # keeps the program, so that its id is not reused
            naps = self.oversubscribed and layout.bounds[-1] * layout.dtype.itemsize >= _MIN_NBYTES_FOR_NAPS
            return program, Plan(program, self.comm, layout, reduction, self.meet, sync_calls(owner), naps)

        return get_or_make(self.cache.plans, key, make)[1]

    def bind_widened(self, x: torch.Tensor, bind: Callable[[torch.Tensor], Compiled], *, back: bool = True) -> Compiled:
        """Bind an operation on a 16-bit x to an fp32 copy; the result is rounded once and, if `back`, copied into x."""
        wide = torch.empty(x.numel(), dtype=torch.float32)
        inner = bind(wide)
        return Compiled([make_copy(wide, x), inner, *([make_copy(x, wide)] if back else [])], [inner, wide])

    def bind_through_staging(self, x: torch.Tensor, bind: Callable[[torch.Tensor], Compiled]) -> Compiled:
        """Bind an in-place operation on a vector outside an arena; it passes through the staging memory in windows."""
        stage = self._staging
        assert stage is not None
        whole, numel = at_address(x), WINDOW // x.element_size()
        calls: list[Call] = []
        inners: list[Compiled] = []
        for lo in range(0, x.numel(), numel):
            piece = whole[lo : lo + numel]
            staged = stage.tensor[: piece.numel() * x.element_size()].view(x.dtype)
            inner = bind(staged)
            calls += [make_copy(staged, piece), inner, make_copy(piece, staged)]
            inners.append(inner)
        return Compiled(calls, inners)


class Levels(NamedTuple):
    """Binders of two groups of ranks: those of this node, and those with this rank's local rank on all nodes."""

    node: Binder
    across: Binder


def sync_calls(arena: Arena | None) -> list[Call]:
    """Return the calls that make writes in the arena visible; they go before and after a rank meets the others."""
    if arena is not None and arena.mapped is not None:
        return [partial(synchronize, arena.tensor.device)]
    return [] if _ORDERED or arena is None or arena.window is None else [arena.window.Sync]


def at_address(x: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor at x's address that does not keep x alive, since bound programs outlive their arguments."""
    return tensor_at(x.data_ptr(), x.numel(), x.dtype)


def make_copy(into: torch.Tensor, source: torch.Tensor) -> Call:
    """Return a call that copies between the addresses of two tensors, and converts the dtype if they differ."""
    return executor.make_copy(at_address(into), at_address(source))


def make_scaling(x: torch.Tensor, reduction: Reduction) -> list[Call]:
    """Return the calls that divide the library's sum at x's address, for an average."""
    return executor.make_scaling(at_address(x), reduction.scale)


def offsets(counts: Sequence[int]) -> list[int]:
    """Return the offset of each block and the total, for blocks of the given lengths."""
    return list(accumulate(counts, initial=0))


Tensors = Sequence["torch.Tensor | None"]


class Invocation(NamedTuple):
    """One call of an operation, with checked arguments.

    Attributes:
        name: Name of the operation, for messages.
        bind: Binds the call, given a binder and the tensors.
        tensors: Tensors of the call; the first has the operation's size.
        written: For each tensor, True if the operation changes it.
        key: Key under which the binder caches the bound call; None if it is not cached.
        compared_values: Other values that must be equal on all ranks; dtype, and size unless `uneven`, always must.
        uneven: True if sizes may differ between ranks.
        placed: Tensor that other ranks find at the same offset in the arena.
        operation, arguments: The operation and its non-tensor arguments; None if there is only `bind`.
        on_device: True if `bind` accepts tensors on a device.
        counts: True if the traffic counters count the call; otherwise the caller adds it.
        algorithm: Algorithm name in the traffic counters, where the parts of the operation do not give it.
    """

    name: str
    bind: Callable[..., Call]
    tensors: Tensors = ()
    written: Sequence[bool] = ()
    key: Hashable = None
    compared_values: object = None
    uneven: bool = False
    placed: torch.Tensor | None = None
    operation: CollectiveOperation | None = None
    arguments: Sequence[Any] = ()
    on_device: bool = False
    counts: bool = True
    algorithm: str = ""

    @property
    def first(self) -> torch.Tensor | None:
        """Tensor that has the operation's size; None if the operation has no tensors."""
        return self.tensors[0] if self.tensors else None


@dataclass(frozen=True)
class CollectiveOperation:
    """A collective operation, such as all_reduce: everything that its calls have in common.

    Its arguments are one or two tensors, of which the first has the operation's size, then values that must be equal on
    all ranks.

    Attributes:
        name: Name for messages.
        bind: Binds a call, given a binder and the arguments.
        parameters: Names of the arguments that are not tensors.
        by_rank: For each tensor, True if it has one block per rank, False if it is a single block. Empty if the
            operation has one tensor that must not be cut into pieces.
        synchronizes: True if no rank with elements can complete a call before all have begun it.
        in_place: True if a tensor that is changed is also read.
        placed: Returns the tensor that other ranks find at the same offset in the arena, given the topology and
            the arguments.
    """

    name: str
    bind: Callable[..., Compiled]
    parameters: tuple[str, ...] = ()
    by_rank: tuple[bool, ...] = ()
    synchronizes: bool = True
    in_place: bool = False
    placed: Callable[..., torch.Tensor | None] | None = None

    @property
    def tensors(self) -> int:
        """Number of tensor arguments."""
        return len(self.by_rank) or 1

    def describe(self, binder: Binder, *arguments: Any, place: str = "") -> str:
        """Describe a call in words that must be the same on the ranks of a node.

        Args:
            binder: Binder of the ranks.
            arguments: Tensors and other arguments of the operation.
            place: Place in an arena of the tensor that other ranks access; "" if there is none.
        """
        first, rest = arguments[0], arguments[self.tensors :]
        root, counts = self.value(rest, "root"), self.value(rest, "counts")
        name = self.name
        if root is not None:
            name += f" {'from' if name in ('broadcast', 'scatter') else 'to'} rank {root}"
        numel = first.numel() * (binder.topology.size if self.by_rank == (False, True) else 1)  # of all blocks
        reproducible = "reproducible" * self.value(rest, "reproducible", False)
        blocks = f"in blocks of {list(counts)}" if counts and min(counts) != max(counts) else ""
        return describe_call(name, numel, first.dtype, self.value(rest, "op", ""), reproducible, place, blocks)

    def key(self, *arguments: Any) -> tuple[Hashable, ...]:
        """Return the cache key of a call; the operation's public function looks up the same key in `ready`."""
        first, rest = arguments[0], arguments[self.tensors :]
        others = (None if x is None else (x.data_ptr(), x.numel(), x.dtype) for x in arguments[1 : self.tensors])
        return (self.name, first.data_ptr(), first.numel(), first.dtype, *others, *rest)

    def bind_cached(self, binder: Binder, *arguments: Any) -> Compiled:
        """Return the bound program of a call, cached or new."""
        bind, describe = partial(self.bind, binder, *arguments), partial(self.describe, binder, *arguments)
        tensors, counts = arguments[: self.tensors], self.value(arguments[self.tensors :], "counts")
        synchronizes = self.synchronizes and (not counts or min(counts) > 0)
        return binder.bind_cached(self.key(*arguments), bind, *tensors, describe=describe, synchronizes=synchronizes)

    def invocation(self, tensors: Tensors, written: Sequence[bool], *arguments: Any, **more: Any) -> Invocation:
        """Return one call of the operation.

        Args:
            tensors: Tensor arguments in order.
            written: For each tensor, True if the operation changes it.
            arguments: Other arguments in order.
            more: Further fields of `Invocation`.
        """

        def bind(binder: Binder, *tensors: torch.Tensor) -> Compiled:
            return self.bind_cached(binder, *tensors, *arguments)

        fields = {"key": self.key(*tensors, *arguments), "compared_values": arguments, **more}
        return Invocation(self.name, bind, tensors, written, operation=self, arguments=arguments, **fields)

    def replace_arguments(self, arguments: Sequence[Any], **values: Any) -> tuple[Any, ...]:
        """Return the non-tensor `arguments`, with those named in `values` replaced; other names are ignored."""
        return tuple(values.get(name, value) for name, value in zip(self.parameters, arguments, strict=True))

    def value(self, arguments: Sequence[Any], name: str, default: Any = None) -> Any:
        """Return the value of a parameter among `arguments`; `default` if there is no such parameter."""
        return arguments[self.parameters.index(name)] if name in self.parameters else default
