"""The ranks of the tensor axis, their exchange of activations, and the streams of random numbers they draw from.

Activations come at ever new addresses, and messages or reads of private memory cost several times what their sum
does. So they pass through memory that the node shares, two slots a rank, used in turns (see
`mpitrain.comm.communicator`):

    header | tensor        an exchange: write the own header and tensor into the slot, meet, read the others'

The headers tell what each rank brought: ranks that were fed different samples, or run their layers in another order,
get an error, not a hang or a wrong sum.

Where the axis spans nodes, on a device, or without shared memory, the communicator's own operations do it.

The functions between what all ranks of the tensor axis have and what each has its part of, with their gradients.

                        forward                       backward
    copy                the same tensor               sum over the ranks          f of Shoeybi et al. (2019), fig. 3
    reduce              sum over the ranks            the same tensor             g
    gather              all parts along a dimension   this rank's part
    scatter             this rank's part              all parts
    all_gather          all parts                     this rank's part of the sum    g of Korthikanti et al. (2022)
    reduce_scatter      this rank's part of the sum   all parts                      g-bar, section 4.2.2

`gather` is for what all ranks then use alike, `all_gather` for what each then uses in its own way. Parts are those
of `layout.split`, any length. On one rank all of them are the identity.

The RNG tracker: which stream of random numbers dropout draws from (Megatron-LM's name for it).

Dropout of activations that all ranks of the tensor axis have must draw the same numbers on all of them; dropout of
activations of which each has its own part must draw different ones.

The default generators of the CPU and of the device, which the trainer seeds alike on all ranks of the axis at each
step, are the replicated stream. Between a column-parallel layer and the row-parallel one after it, activations are
split: there they go on from a seed that is drawn from the replicated stream and increased by the rank, and afterwards
from where they were before. So nothing is kept from step to step, the step's seed gives all masks of the step, and a
recomputed forward pass, which restores the generators, draws what the first one drew.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from mpitrain.comm.memory import device as devices
from mpitrain.errors import CommunicationError
from mpitrain.layout.boxes import split

if TYPE_CHECKING:
    from mpitrain.comm import Communicator
    from mpitrain.comm.communicator import Alternating

_HEADER = struct.Struct("6q")  # operation, dtype, tag, elements per index of the dimension, indices, bytes
_HEADER_BYTES = 64
_FIRST_CAPACITY = 1 << 20  # bytes of a slot to begin with
_DIRECT = 16 << 10  # bytes up to which each of more than two ranks sums everything: one barrier instead of three
_MOST_VIEWS = 1024
_SUM, _GATHER, _SCATTER = 1, 2, 3
_NAMES = {_SUM: "all-reduce", _GATHER: "all-gather", _SCATTER: "reduce-scatter"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32)


def sums_directly(ranks: int, nbytes: int) -> bool:
    """Whether each rank of an axis sums a whole vector, rather than a part of it that it then shows the others."""
    return ranks == 2 or nbytes <= _DIRECT


class Axis:
    """A tensor axis. Every method that communicates is collective over `comm`, and so is making one.

    Args:
        comm: The ranks of the axis.
        names: Of the axes of the mesh that it is, by which parameters are marked as divided.

    Attributes:
        rng: Which stream of random numbers dropout draws from.
        column_input: The input that column layers have just taken, until their row layer comes.
    """

    names: tuple[str, ...] = ("tensor",)

    def __init__(self, comm: Communicator, names: Sequence[str] = names) -> None:
        self.comm, self.rank, self.size, self.names = comm, comm.rank, comm.size, tuple(names)
        self.rng = RngTracker(comm.rank)
        self.column_input: object = None
        self._tags = 0
        self._slots = _Slots.of(comm, _FIRST_CAPACITY) if comm.size > 1 else None

    def free(self) -> None:
        """Release the shared memory; the axis still works."""
        if self._slots is not None:
            self._slots.alternating.free()
            self._slots = None

    def bounds(self, length: int) -> list[int]:
        """Where each rank's part of `length` indices begins."""
        return split(length, self.size)

    def new_tag(self) -> int:
        """A number that no exchange has had, the same on all ranks that ask alike: for exchanges in backward."""
        self._tags += 1
        return self._tags

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of x along a dimension, as a view: bounds(x.shape[dim]) says which indices."""
        bounds = self.bounds(x.shape[dim])
        return x.narrow(dim, bounds[self.rank], bounds[self.rank + 1] - bounds[self.rank])

    def all_reduce(self, x: torch.Tensor, tag: int = 0) -> torch.Tensor:
        """The sum of every rank's x, the same bits on all ranks.

        Args:
            x: A tensor of the same shape and dtype on all ranks.
            tag: Must be the same on all ranks, or they get an error: see `new_tag`.

        Returns:
            A new tensor like x.

        Raises:
            CommunicationError: The ranks bring different shapes, dtypes, operations or tags.
        """
        # of two ranks each sum is one pass anyway, and nothing is to be copied out
        direct = sums_directly(self.size, x.nbytes)
        views = self._exchange(_SUM, x, 0, tag, (self.size - 1) * x.nbytes * direct)
        if views is None:
            total = x.clone(memory_format=torch.contiguous_format)
            self.comm.all_reduce(total)
            return total
        if direct:
            return _sum(views)
        self.comm.all_reduce(views[self.rank])
        return views[self.rank].clone()

    def reduce_scatter(self, x: torch.Tensor, dim: int, lengths: Sequence[int] | None = None) -> torch.Tensor:
        """This rank's part along a dimension of the sum of every rank's x.

        Args:
            x: A tensor of the same shape and dtype on all ranks.
            dim: The dimension that is divided.
            lengths: Indices of each rank's part; None for those of `bounds`.
        """
        bounds = self.bounds(x.shape[dim]) if lengths is None else [0, *accumulate(lengths)]
        start, length = bounds[self.rank], bounds[self.rank + 1] - bounds[self.rank]
        views = self._exchange(_SCATTER, x, dim, 0, (self.size - 1) * x.nbytes * length // max(1, x.shape[dim]))
        if views is not None:
            return _sum([view.narrow(dim, start, length) for view in views])
        parts = x.split([hi - lo for lo, hi in pairwise(bounds)], dim)
        packed = torch.cat([part.reshape(-1) for part in parts])
        out = torch.empty_like(parts[self.rank], memory_format=torch.contiguous_format)
        self.comm.reduce_scatter(out, packed, counts=[part.numel() for part in parts])
        return out

    def all_gather(
        self, x: torch.Tensor, dim: int, tag: int = 0, lengths: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """Every rank's x, put together along a dimension.

        Args:
            x: Of the same shape and dtype on all ranks, but for its length along `dim`.
            dim: The dimension.
            tag: Must be the same on all ranks, or they get an error: see `new_tag`.
            lengths: Of each rank's part along `dim`, where the caller knows them: the ranks need not tell each other.

        Returns:
            The whole, a new tensor, and the length of each rank's part along `dim`.
        """
        if self.size == 1:
            return x, [x.shape[dim]]
        views = self._exchange(_GATHER, x, dim, tag, (self.size - 1) * x.nbytes)
        if views is not None:
            return torch.cat(views, dim), [view.shape[dim] for view in views]
        if lengths is None:
            told = torch.empty(self.size, dtype=torch.int64)
            self.comm.all_gather(told, torch.tensor([x.shape[dim]]))
            lengths = told.tolist()
        shapes = [_with_length(x.shape, dim, length) for length in lengths]
        counts = [torch.Size(shape).numel() for shape in shapes]
        flat = x.new_empty(sum(counts))
        self.comm.all_gather(flat, x.contiguous(), counts=counts)
        parts = [part.view(shape) for part, shape in zip(flat.split(counts), shapes, strict=True)]
        return torch.cat(parts, dim), list(lengths)

    def _exchange(self, operation: int, x: torch.Tensor, dim: int, tag: int, taken: int) -> list[torch.Tensor] | None:
        """Show all ranks this rank's x, in shared memory; their lengths along `dim` may differ in an all-gather.

        taken: bytes that the caller then takes out of the others' memory (of a gather: that they take out of this).

        Returns:
            Every rank's x, as views that hold it until the exchange after the next one; None where the ranks share no
            memory.

        Raises:
            CommunicationError: On every rank, when they bring what does not fit together.
        """
        if self._slots is None or devices.is_accelerator(x.device) or x.dtype not in _DTYPES:
            return None
        length = x.shape[dim] if x.dim() else 1
        nbytes = x.numel() * x.element_size()
        mine = _HEADER.pack(operation, _DTYPES.index(x.dtype), tag, x.numel() // max(1, length), length, nbytes)
        while True:
            slots, turn = self._slots, self._slots.alternating.turn
            if nbytes <= slots.capacity:
                slots.view(turn, self.rank, x.shape, x.dtype).copy_(x)
            slots.headers[turn][self.rank][:] = mine
            slots.alternating.meet(taken * (nbytes <= slots.capacity))
            told = [bytes(header) for header in slots.headers[turn]]
            if all(header == mine for header in told) and nbytes <= slots.capacity:
                return [slots.view(turn, rank, x.shape, x.dtype) for rank in range(self.size)]
            headers = [_HEADER.unpack(header) for header in told]
            self._compare(headers)
            largest = max(header[5] for header in headers)
            if largest <= slots.capacity:
                lengths = [header[4] for header in headers]
                return [slots.view(turn, r, _with_length(x.shape, dim, n), x.dtype) for r, n in enumerate(lengths)]
            self.comm.barrier()  # nobody reads the headers any more
            slots.alternating.free()
            self._slots = _Slots.of(self.comm, 1 << (largest - 1).bit_length())
            if self._slots is None:
                return None

    def _compare(self, headers: Sequence[tuple[int, ...]]) -> None:
        """Raise CommunicationError, on every rank alike, unless all ranks bring what fits together."""
        first = headers[0]
        for rank, header in enumerate(headers):
            of_any_length = first[0] == _GATHER
            fits = header[:3] == first[:3] and (of_any_length or header[4:] == first[4:])
            # where a rank has no index along the dimension it cannot tell how much one holds
            if not fits or (header[3] != first[3] and not (of_any_length and 0 in (header[4], first[4]))):
                raise CommunicationError(
                    f"tensor axis {self.comm.label}: rank {rank} brings {_told(header)}, rank 0 {_told(first)}; feed "
                    "all ranks of the tensor axis the same samples, and run the same layers in the same order",
                    agreed=True,
                )


class _Slots:
    """A header and `capacity` bytes in every slot, and the tensors over them made so far."""

    def __init__(self, alternating: Alternating, capacity: int) -> None:
        self.alternating, self.capacity = alternating, capacity
        self.headers = [[slot[: _HEADER.size].numpy().data for slot in slots] for slots in alternating.slots]
        self._views: dict[tuple[object, ...], torch.Tensor] = {}

    @staticmethod
    def of(comm: Communicator, capacity: int) -> _Slots | None:
        """New slots; None where the ranks cannot share memory, with a warning on one node. Collective."""
        alternating = comm.alternating(_HEADER_BYTES + capacity)
        return _Slots(alternating, capacity) if alternating is not None else None

    def view(self, turn: int, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A rank's slot of a turn as a tensor."""
        key = (turn, rank, shape, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            area = self.alternating.slots[turn][rank][_HEADER_BYTES : _HEADER_BYTES + nbytes]
            view = self._views[key] = area.view(dtype).view(shape)
        return view


def _with_length(shape: Sequence[int], dim: int, length: int) -> torch.Size:
    """The shape with another length along one dimension."""
    changed = list(shape)
    changed[dim] = length
    return torch.Size(changed)


def _told(header: tuple[int, ...]) -> str:
    """What a rank's header says, for messages."""
    operation, dtype, tag, rest, length, _ = header
    name = str(_DTYPES[dtype]).removeprefix("torch.")
    return f"{rest * length if length else 0} elements of {name} for {_NAMES[operation]}" + (
        f" number {tag}" if tag else ""
    )


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in order of rank, in at least fp32, rounded once to the parts' dtype."""
    dtype = parts[0].dtype
    if len(parts) == 2:
        return torch.add(parts[0], parts[1])
    total = parts[0].to(torch.promote_types(dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total.to(dtype)


Map = Callable[[torch.Tensor], torch.Tensor]  # the backward one from the gradient of the output to that of the input


def copy(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """x itself; backward sums its gradient over the ranks."""
    return _exchanged(x, axis, lambda x: (x.view_as(x), axis.all_reduce))


def reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum of every rank's x; backward gives each rank the gradient as it is."""
    return _exchanged(x, axis, lambda x: (axis.all_reduce(x), lambda grad: grad))


def gather(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Every rank's x put together along a dimension; backward gives each rank its part of the gradient."""

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, Map]:
        whole, lengths = axis.all_gather(x, dim)
        return whole, lambda grad: grad.narrow(dim, sum(lengths[: axis.rank]), lengths[axis.rank])

    return _exchanged(x, axis, forward)


def scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's part of x along a dimension; backward puts the gradients of all parts together."""
    return _divided(x, axis, dim, lambda x: axis.own(x, dim).contiguous())


def all_gather(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Every rank's x put together along a dimension; backward sums the gradients and gives each rank its part."""

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, Map]:
        whole, lengths = axis.all_gather(x, dim)
        return whole, lambda grad: axis.reduce_scatter(grad, dim, lengths)

    return _exchanged(x, axis, forward)


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's part of the sum of every rank's x; backward puts the gradients of all parts together."""
    return _divided(x, axis, dim, lambda x: axis.reduce_scatter(x, dim))


def _divided(x: torch.Tensor, axis: Axis, dim: int, part: Map) -> torch.Tensor:
    """Return what `part` makes of x for this rank; backward puts the gradients of all parts together."""
    lengths = [hi - lo for lo, hi in pairwise(axis.bounds(x.shape[dim]))]
    return _exchanged(x, axis, lambda x: (part(x), lambda grad: axis.all_gather(grad, dim, lengths=lengths)[0]))


def _exchanged(
    x: torch.Tensor, axis: Axis, forward: Callable[[torch.Tensor], tuple[torch.Tensor, Map]]
) -> torch.Tensor:
    """What `forward` makes of x, which also gives what backward makes of the gradient; x itself on one rank."""
    return _Exchange.apply(x, forward) if axis.size > 1 else x


class _Exchange(torch.autograd.Function):
    """One of these functions and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[[torch.Tensor], tuple[torch.Tensor, Map]]) -> Any:
        out, ctx.of_gradient = function(x)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return ctx.of_gradient(grad), None


class RngTracker:
    """Switches the default generators between the replicated stream and the rank's own.

    Args:
        rank: This rank's number on the tensor axis.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._opener: object = None
        self._seed = 0
        self._before: list[tuple[torch.device, torch.Tensor]] = []  # of each generator, the state it is put back to

    @property
    def _inside(self) -> bool:
        """Whether the generators are on the rank's own stream still, and were not seeded anew by a step or recompute.

        That of the CPU tells for both: whoever seeds or restores that of a device does so with the CPU's.
        """
        return bool(self._before) and torch.default_generator.initial_seed() == self._seed

    def enter(self, opener: object, device: torch.device) -> None:
        """Go to the rank's own stream, unless the generators are on it already.

        Args:
            opener: The module that goes there; see `leave`.
            device: Whose generator is meant, beside the CPU's.
        """
        if self._inside:
            return
        drawn = int(torch.empty((), dtype=torch.int64).random_())
        self._opener = opener
        ours = [devices.CPU, device] if devices.is_accelerator(device) else [devices.CPU]
        self._before = [(of, devices.generator_state(of)) for of in ours]
        self._seed = (drawn + self._rank) & ((1 << 63) - 1)
        for of in ours:
            devices.seed_generator(of, self._seed)

    def leave(self, opener: object = None) -> None:
        """Go back to the replicated stream; with an opener, only if it was the one that left that stream."""
        if opener is None or opener is self._opener:
            for device, state in self._before if self._inside else ():
                devices.set_generator_state(device, state)
            self._opener, self._before = None, []
