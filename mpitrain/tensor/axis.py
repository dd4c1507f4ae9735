"""The tensor axis: exchange of activations between its ranks, and their random number streams.

**Exchange.** Activations are at new addresses in every step, and messages or reads of another process's private memory
cost several times as much as adding the numbers. Activations are therefore exchanged through memory that the node
shares, in two slots per rank, used in turns (see `mpitrain.comm.communicator`):

    header | tensor        an exchange: write header and tensor into one's slot, wait for all, read the others'

The headers describe each rank's tensor. Ranks that get different samples, or that run their layers in another order,
therefore raise an error instead of hanging or returning a wrong sum. The operations of
the communicator are used if the axis spans nodes, if the tensor is on a device, or if there is no shared memory.

**Functions** convert between tensors that all ranks of the axis have and tensors of which each rank has a part, and
they define the gradients:

                        forward                       backward
    copy                the same tensor               sum over the ranks          f of Shoeybi et al. (2019), fig. 3
    reduce              sum over the ranks            the same tensor             g
    gather              all parts along a dimension   this rank's part
    scatter             this rank's part              all parts
    all_gather          all parts                     this rank's part of the sum    g of Korthikanti et al. (2022)
    reduce_scatter      this rank's part of the sum   all parts                      g-bar, section 4.2.2

Use `gather` if all ranks then do the same with the result, and `all_gather` if each rank uses it in its own way. Parts
are those of `layout.split` and may differ in length. On one rank every function is the identity.

**RNG tracker** (Megatron-LM's name): it selects the stream of random numbers that dropout draws from. Dropout of
activations that all ranks of the tensor axis have must draw the same numbers on all of them. Dropout of activations of
which each rank has a part must draw different numbers.

The replicated stream is that of the default generators of the CPU and the device, which the trainer seeds identically
on all ranks of the axis at each step. Between a column-parallel layer and the row-parallel layer after it, activations
are divided. There the generators use a seed that is drawn from the replicated stream and increased by the rank;
afterwards they return to their earlier state. No state is therefore kept between steps, the seed of the step determines
all its masks, and a recomputed forward pass, which restores the generators, draws the same numbers as the first one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from mpitrain.comm.memory import device as devices
from mpitrain.errors import CommunicationError
from mpitrain.layout.boxes import split

if TYPE_CHECKING:
    from mpitrain.comm import Communicator
    from mpitrain.comm.communicator import Alternating

_HEADER = struct.Struct("6q")  # operation, dtype, tag, elements per index of the dimension, indices, bytes
_HEADER_BYTES = 64
_FIRST_CAPACITY = 1 << 20  # bytes of a slot at first
# bytes up to which each of more than two ranks sums the whole tensor: one barrier instead of three
_MAX_DIRECT = 16 << 10
_MAX_VIEWS = 1024
_SUM, _GATHER, _SCATTER = 1, 2, 3
_NAMES = {_SUM: "all-reduce", _GATHER: "all-gather", _SCATTER: "reduce-scatter"}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32)


def sums_directly(ranks: int, nbytes: int) -> bool:
    """Return whether each rank of an axis sums whole vectors, instead of one part that it then shares with the others.

    Args:
        ranks: Number of ranks of the axis.
        nbytes: Bytes of the vector.
    """
    return ranks == 2 or nbytes <= _MAX_DIRECT


class Axis:
    """A tensor axis. Its constructor and every method that communicates are collective over `comm`.

    Args:
        comm: Ranks of the axis.
        names: Names of the mesh axes that form it, by which divided parameters are marked.

    Attributes:
        rng: Switch between the random number streams of dropout.
        column_input: Input that column layers have just used; None after the row layer that follows them.
    """

    names: tuple[str, ...] = ("tensor",)

    def __init__(self, comm: Communicator, names: Sequence[str] = names) -> None:
        self.comm, self.rank, self.size, self.names = comm, comm.rank, comm.size, tuple(names)
        self.rng = RngTracker(comm.rank)
        self.column_input: object = None
        self._tags = 0
        self._slots = _Slots.of(comm, _FIRST_CAPACITY) if comm.size > 1 else None

    def free(self) -> None:
        """Release the shared memory. The axis can still be used."""
        if self._slots is not None:
            self._slots.alternating.free()
            self._slots = None

    def bounds(self, length: int) -> list[int]:
        """Return the bounds of the ranks' parts of `length` indices: rank r has [bounds[r], bounds[r + 1])."""
        return split(length, self.size)

    def new_tag(self) -> int:
        """Return a new tag for exchanges in backward, the same on all ranks that call this method equally often."""
        self._tags += 1
        return self._tags

    def own(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of a tensor along a dimension as a view.

        Args:
            x: Tensor that all ranks have.
            dim: Dimension that is divided; `bounds(x.shape[dim])` are the bounds of the parts.
        """
        bounds = self.bounds(x.shape[dim])
        return x.narrow(dim, bounds[self.rank], bounds[self.rank + 1] - bounds[self.rank])

    def all_reduce(self, x: torch.Tensor, tag: int = 0) -> torch.Tensor:
        """Return the sum of every rank's x, with the same bits on all ranks. Collective.

        Args:
            x: Tensor of the same shape and dtype on all ranks.
            tag: Tag that must be the same on all ranks (see `new_tag`).

        Returns:
            A new tensor like x.

        Raises:
            CommunicationError: The ranks pass different shapes, dtypes, operations or tags.
        """
        # with two ranks each sum is one pass anyway, and nothing has to be copied out
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
        """Return this rank's part, along a dimension, of the sum of every rank's x. Collective.

        Args:
            x: Tensor of the same shape and dtype on all ranks.
            dim: Dimension that is divided.
            lengths: Length of each rank's part along `dim`; None for those of `bounds`.
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
        """Concatenate every rank's x along a dimension. Collective.

        Args:
            x: Tensor of the same shape and dtype on all ranks, except for its length along `dim`.
            dim: Dimension.
            tag: Tag that must be the same on all ranks (see `new_tag`).
            lengths: Length of each rank's part along `dim`, if the caller knows it; this saves an exchange between the
                ranks.

        Returns:
            The concatenation, a new tensor, and the length of each rank's part along `dim`. On one rank, x itself.

        Raises:
            CommunicationError: The ranks pass different shapes, dtypes, operations or tags.
        """
        if self.size == 1:
            return x, [x.shape[dim]]
        views = self._exchange(_GATHER, x, dim, tag, (self.size - 1) * x.nbytes)
        if views is not None:
            return torch.cat(views, dim), [view.shape[dim] for view in views]
        if lengths is None and self.comm.played:
            lengths = [x.shape[dim]] * self.size
        elif lengths is None:
            all_lengths = torch.empty(self.size, dtype=torch.int64)
            self.comm.all_gather(all_lengths, torch.tensor([x.shape[dim]]))
            lengths = all_lengths.tolist()
        shapes = [_with_length(x.shape, dim, length) for length in lengths]
        counts = [torch.Size(shape).numel() for shape in shapes]
        flat = x.new_empty(sum(counts))
        self.comm.all_gather(flat, x.contiguous(), counts=counts)
        parts = [part.view(shape) for part, shape in zip(flat.split(counts), shapes, strict=True)]
        return torch.cat(parts, dim), list(lengths)

    def _exchange(
        self, operation: int, x: torch.Tensor, dim: int, tag: int, read_bytes: int
    ) -> list[torch.Tensor] | None:
        """Show this rank's x to all ranks in shared memory, and return views of every rank's x. Collective.

        Args:
            operation: Number of the operation; only for an all-gather may lengths along `dim` differ.
            x: Tensor of this rank.
            dim: Dimension.
            tag: Tag that must be the same on all ranks.
            read_bytes: Bytes that the caller then reads from the others' memory; for an all-gather, that the others
                read from this.

        Returns:
            Views that are valid until the exchange after the next one; None if the ranks share no memory.

        Raises:
            CommunicationError: On every rank, if the ranks' tensors, operations or tags do not match.
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
            slots.alternating.meet(read_bytes * (nbytes <= slots.capacity))
            raw_headers = [bytes(header) for header in slots.headers[turn]]
            if all(header == mine for header in raw_headers) and nbytes <= slots.capacity:
                return [slots.view(turn, rank, x.shape, x.dtype) for rank in range(self.size)]
            headers = [_HEADER.unpack(header) for header in raw_headers]
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
        """Raise CommunicationError on every rank unless the headers of all ranks match."""
        first = headers[0]
        for rank, header in enumerate(headers):
            of_any_length = first[0] == _GATHER
            fits = header[:3] == first[:3] and (of_any_length or header[4:] == first[4:])
            # a rank with length 0 along the dimension does not know the elements per index
            if not fits or (header[3] != first[3] and not (of_any_length and 0 in (header[4], first[4]))):
                raise CommunicationError(
                    f"tensor axis {self.comm.label}: rank {rank} passes {_describe(header)}, but rank 0 passes "
                    f"{_describe(first)}; give all ranks of the tensor axis the same samples, and run the same layers "
                    "in the same order",
                    agreed=True,
                )


class _Slots:
    """Slots in shared memory, each with a header and `capacity` bytes, and a cache of tensor views of them."""

    def __init__(self, alternating: Alternating, capacity: int) -> None:
        self.alternating, self.capacity = alternating, capacity
        self.headers = [[slot[: _HEADER.size].numpy().data for slot in slots] for slots in alternating.slots]
        self._views: dict[tuple[object, ...], torch.Tensor] = {}

    @staticmethod
    def of(comm: Communicator, capacity: int) -> _Slots | None:
        """Return new slots; None if the ranks cannot share memory, with a warning on one node. Collective.

        Args:
            comm: Ranks of the axis.
            capacity: Bytes of a slot without its header.
        """
        alternating = comm.alternating(_HEADER_BYTES + capacity)
        return _Slots(alternating, capacity) if alternating is not None else None

    def view(self, turn: int, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the slot of a rank as a tensor.

        Args:
            turn: Number of the turn, which selects one of the rank's two slots.
            rank: Rank whose slot it is.
            shape: Shape of the tensor.
            dtype: Dtype of the tensor.
        """
        key = (turn, rank, shape, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            area = self.alternating.slots[turn][rank][_HEADER_BYTES : _HEADER_BYTES + nbytes]
            view = self._views[key] = area.view(dtype).view(shape)
        return view


def _with_length(shape: Sequence[int], dim: int, length: int) -> torch.Size:
    """Return a shape with another length along one dimension."""
    changed = list(shape)
    changed[dim] = length
    return torch.Size(changed)


def _describe(header: tuple[int, ...]) -> str:
    """Return the description of a rank's header, for messages."""
    operation, dtype, tag, rest, length, _ = header
    name = str(_DTYPES[dtype]).removeprefix("torch.")
    return f"{rest * length if length else 0} elements of {name} for {_NAMES[operation]}" + (
        f" number {tag}" if tag else ""
    )


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum in rank order, computed in at least fp32 and rounded once to the dtype of the parts."""
    dtype = parts[0].dtype
    if len(parts) == 2:
        return torch.add(parts[0], parts[1])
    total = parts[0].to(torch.promote_types(dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total.to(dtype)


Map = Callable[[torch.Tensor], torch.Tensor]  # in backward, maps the gradient of the output to that of the input


def copy(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return x itself; backward sums its gradient over the ranks.

    Args:
        x: Tensor that all ranks have.
        axis: Ranks of the tensor axis.
    """
    return _apply_exchange(x, axis, lambda x: (x.view_as(x), axis.all_reduce))


def reduce(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the sum of every rank's x; backward passes the gradient to each rank unchanged. Collective.

    Args:
        x: Tensor of the same shape and dtype on all ranks.
        axis: Ranks of the tensor axis.
    """
    return _apply_exchange(x, axis, lambda x: (axis.all_reduce(x), lambda grad: grad))


def gather(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Concatenate every rank's x along a dimension; backward returns this rank's part of the gradient. Collective.

    Args:
        x: Part of this rank.
        axis: Ranks of the tensor axis.
        dim: Dimension that is divided.
    """

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, Map]:
        whole, lengths = axis.all_gather(x, dim)
        return whole, lambda grad: grad.narrow(dim, sum(lengths[: axis.rank]), lengths[axis.rank])

    return _apply_exchange(x, axis, forward)


def scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return this rank's part of x along a dimension; backward concatenates the gradients of all parts.

    Args:
        x: Tensor that all ranks have.
        axis: Ranks of the tensor axis.
        dim: Dimension that is divided.
    """
    return _apply_scatter(x, axis, dim, lambda x: axis.own(x, dim).contiguous())


def all_gather(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Concatenate every rank's x along a dimension; backward returns this rank's part of the summed gradient.

    Collective.

    Args:
        x: Part of this rank.
        axis: Ranks of the tensor axis.
        dim: Dimension that is divided.
    """

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, Map]:
        whole, lengths = axis.all_gather(x, dim)
        return whole, lambda grad: axis.reduce_scatter(grad, dim, lengths)

    return _apply_exchange(x, axis, forward)


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return this rank's part of the sum of every rank's x; backward concatenates the gradients of all parts.

    Collective.

    Args:
        x: Tensor of the same shape and dtype on all ranks.
        axis: Ranks of the tensor axis.
        dim: Dimension that is divided.
    """
    return _apply_scatter(x, axis, dim, lambda x: axis.reduce_scatter(x, dim))


def _apply_scatter(x: torch.Tensor, axis: Axis, dim: int, part: Map) -> torch.Tensor:
    """Return `part(x)`, this rank's part along `dim`; backward concatenates the gradients of all parts."""
    lengths = [hi - lo for lo, hi in pairwise(axis.bounds(x.shape[dim]))]
    return _apply_exchange(x, axis, lambda x: (part(x), lambda grad: axis.all_gather(grad, dim, lengths=lengths)[0]))


def _apply_exchange(
    x: torch.Tensor, axis: Axis, forward: Callable[[torch.Tensor], tuple[torch.Tensor, Map]]
) -> torch.Tensor:
    """Return the output of `forward`, which also returns the function for backward; on one rank, return x itself."""
    return _Exchange.apply(x, forward) if axis.size > 1 else x


class _Exchange(torch.autograd.Function):
    """Autograd node of a function that returns its output and the function of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[[torch.Tensor], tuple[torch.Tensor, Map]]) -> Any:
        out, ctx.of_gradient = function(x)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return ctx.of_gradient(grad), None


class RngTracker:
    """Switches the default generators between the replicated stream and the rank's own stream.

    Args:
        rank: This rank's number on the tensor axis.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._opener: object = None
        self._seed = 0
        self._saved_states: list[tuple[torch.device, torch.Tensor]] = []  # (device, state to restore)

    @property
    def _is_switched(self) -> bool:
        """True if the generators are on the rank's own stream and no step or recompute has seeded them again.

        Only the CPU's generator is checked, because code that seeds or restores the device's generator also does so
        with that of the CPU.
        """
        return bool(self._saved_states) and torch.default_generator.initial_seed() == self._seed

    def enter(self, opener: object, device: torch.device) -> None:
        """Switch to the rank's own stream, unless the generators are already on it.

        Args:
            opener: Module that switches the stream (see `leave`).
            device: Device whose generator is switched in addition to that of the CPU.
        """
        if self._is_switched:
            return
        random = torch.empty((), dtype=torch.int64).random_()
        if isinstance(random, FakeTensor):  # in a pass without values
            return
        drawn = int(random)
        self._opener = opener
        ours = [devices.CPU, device] if devices.is_accelerator(device) else [devices.CPU]
        self._saved_states = [(of, devices.generator_state(of)) for of in ours]
        self._seed = (drawn + self._rank) & ((1 << 63) - 1)
        for of in ours:
            devices.seed_generator(of, self._seed)

    def leave(self, opener: object = None) -> None:
        """Switch back to the replicated stream.

        Args:
            opener: Module that calls; the stream is only switched back if this module left it. None to switch back in
                any case.
        """
        if opener is None or opener is self._opener:
            for device, state in self._saved_states if self._is_switched else ():
                devices.set_generator_state(device, state)
            self._opener, self._saved_states = None, []
