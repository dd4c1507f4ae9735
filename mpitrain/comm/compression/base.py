"""Bases of the compressions: the interface, the buffers they are used for, and the memory of what was left out."""

from __future__ import annotations

import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from mpitrain.comm.memory.buffers import as_tensor
from mpitrain.comm.memory.elements import HALVES
from mpitrain.errors import InputError

Shapes = Sequence[tuple[int, Sequence[int]]]  # (offset in elements, shape) of the parameters in a flat bucket


class Collectives(Protocol):
    """Collectives that a compression uses: methods of a `Communicator`, performed as parts of one operation.

    Attributes:
        size, rank: Number of ranks, and this rank.
        nodes: Node number of each rank.
        levels: The ranks of this node, and the ranks with this local rank on all nodes; None unless there are several
            nodes with the same number of ranks, more than one, and the compression distinguishes these levels.
    """

    size: int
    rank: int
    nodes: tuple[int, ...]
    levels: tuple[Collectives, Collectives] | None

    def all_reduce(self, x: Any, op: str = "sum", algorithm: str = "auto", *, reproducible: bool = False) -> object: ...

    def reduce_scatter(self, out: Any, x: Any, op: str, counts: Sequence[int]) -> object: ...

    def all_gather(self, out: Any, x: Any, counts: Sequence[int] | None = None) -> object: ...

    def all_to_all(self, out: Any, x: Any) -> object: ...


class Compression(ABC):
    """A way to communicate with fewer bytes.

    Attributes:
        name: Name in `from_name` and in the configuration.
        two_level: If true, only data between nodes is compressed, where `Collectives.levels` distinguishes them.
    """

    name: ClassVar[str]
    two_level: ClassVar[bool] = False

    def __init__(self) -> None:
        self._scratch: dict[Hashable, torch.Tensor] = {}

    def __repr__(self) -> str:
        """Return the constructor call, which ranks compare."""
        options = ", ".join(f"{name}={getattr(self, name)}" for name in inspect.signature(type(self)).parameters)
        return f"{type(self).__name__}({options})"

    def all_reduce(
        self,
        comm: Collectives,
        x: Any,
        op: str = "sum",
        algorithm: str = "auto",
        *,
        key: Hashable | None = None,
        shapes: Shapes | None = None,
        whole: bool = True,
    ) -> None:
        """Replace every rank's x by the approximate sum (or avg) over all ranks; all get the same bits. Collective.

        With a single rank, x does not change.

        Args:
            comm: The communicator.
            x: Contiguous floating-point tensor.
            op: sum or avg.
            algorithm: Algorithm of the reductions inside, as in `Communicator.all_reduce`.
            key: Name of the buffer in the memory. Without it, a buffer is identified by its address and length, so a
                loop must pass the same memory each time.
            shapes: (offset, shape) of each parameter in a flat x, for compressions that work on matrices.
            whole: If false, and x can be divided equally between the ranks, this rank's block of x may be all of the
                result that it gets.

        Raises:
            InputError: x or op cannot be compressed.
        """
        tensor = as_tensor(x)
        self.check(tensor.dtype, op)
        if comm.size > 1 and tensor.numel() > 0:
            with torch.no_grad():
                self._reduce(comm, tensor, op, algorithm, Bucket(self, key, shapes, whole))

    def all_gather(self, comm: Collectives, out: Any, x: Any) -> None:
        """Gather every rank's x, approximately, into every rank's out; all get the same bits. Collective.

        A rank's own block of out is approximate too. With a single rank, it is exact.

        Args:
            comm: The communicator.
            out: Contiguous tensor for all blocks, in order of rank.
            x: Contiguous floating-point tensor, with the same size and dtype on all ranks.

        Raises:
            InputError: x cannot be compressed, or this compression is for sums alone.
        """
        raise InputError(f"compression {self.name} is for sums; gather with int8 or int4, or without compression")

    def check(self, dtype: torch.dtype, op: str) -> None:
        """Raise InputError unless tensors of this dtype can be compressed with this op."""
        if op not in ("sum", "avg"):
            raise InputError(f"compression {self.name} cannot do op {op!r}; use sum or avg, or no compression")
        if not dtype.is_floating_point:
            kind = str(dtype).removeprefix("torch.")
            raise InputError(f"compression {self.name} is for floating-point numbers, not {kind}; use no compression")

    @abstractmethod
    def _reduce(self, comm: Collectives, x: torch.Tensor, op: str, algorithm: str, bucket: Bucket) -> None:
        """Perform `all_reduce` on at least one element and at least two ranks."""

    @abstractmethod
    def bytes_on_wire(self, numel: int, dtype: torch.dtype, shapes: Shapes | None = None) -> int:
        """Return the bytes that one rank passes to the collectives, instead of numel * itemsize.

        Args:
            numel, dtype: Length and type of the buffer.
            shapes: (offset, shape) of each parameter in the buffer.
        """

    def bytes_sent(
        self,
        nodes: Sequence[int],
        numel: int,
        dtype: torch.dtype,
        shapes: Shapes | None = None,
        *,
        whole: bool = True,
    ) -> float:
        """Return the bytes that one rank sends for an all-reduce, to its own node and to others.

        Args:
            nodes: Node number of each rank.
            numel, dtype: Length and type of the buffer.
            shapes: (offset, shape) of each parameter in the buffer.
            whole: If false, the rank needs only its own block of the result.
        """
        return self.messages_sent(len(nodes)) * self.bytes_on_wire(numel, dtype, shapes)

    def messages_sent(self, ranks: int) -> float:
        """Return how many times `bytes_on_wire` one rank sends for an all-reduce; by default that of a ring."""
        return 2 * (ranks - 1) / ranks

    def bucket(self, key: Hashable, shapes: Shapes | None = None) -> Bucket:
        """Return this compression for one buffer, as an argument of `Communicator.all_reduce`.

        Args:
            key, shapes: Name of the buffer in the memory, and (offset, shape) of each parameter in it.
        """
        return Bucket(self, key, None if shapes is None else tuple((lo, tuple(shape)) for lo, shape in shapes))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's memory as tensors by name; loading it continues exactly."""
        return {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the `state_dict()` of the same rank, from a run with the same number of ranks."""
        if state:
            raise InputError(f"compression {self.name} has no state, but the state to load has {sorted(state)[0]!r}")

    def reset(self) -> None:
        """Drop all memory, to start again or with other buffers."""
        self._scratch.clear()

    def _buffer(self, role: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return scratch memory for one call; it is reused by later calls of the same thread."""
        key = (threading.get_ident(), role, dtype, device)
        scratch = self._scratch.get(key)
        if scratch is None or scratch.numel() < numel:
            scratch = self._scratch[key] = torch.empty(numel, dtype=dtype, device=device)
        return scratch[:numel]


@dataclass(frozen=True)
class Bucket:
    """A compression, and the buffer it is for.

    Attributes:
        compression: The compression.
        key: Name of the buffer in the memory; None for its address.
        shapes: (offset, shape) of each parameter in the buffer.
        whole: If false, a rank needs only its own block of the result.
    """

    compression: Compression
    key: Hashable
    shapes: Shapes | None
    whole: bool = True

    def __str__(self) -> str:
        return f"{self.compression} {self.key}"


@dataclass
class Memory:
    """Memory of a compression for one buffer; `tensors` are saved in a checkpoint."""

    name: str
    numel: int
    dtype: torch.dtype
    shapes: Shapes | None
    tensors: dict[str, torch.Tensor]


class StatefulCompression(Compression):
    """A compression with a memory for each buffer, in fp32 for 16-bit buffers."""

    def __init__(self) -> None:
        super().__init__()
        self._memories: dict[Hashable, Memory] = {}
        self._loaded: dict[str, torch.Tensor] = {}

    @abstractmethod
    def _new_memory(self, x: torch.Tensor, shapes: Shapes | None, name: str, ranks: int) -> Memory:
        """Return a new memory for a buffer that is summed over `ranks` ranks."""

    def _memory(self, x: torch.Tensor, bucket: Bucket, ranks: int) -> Memory:
        """Return the memory of a buffer; create it in the first call."""
        key, shapes = bucket.key, bucket.shapes
        place = (x.data_ptr(), x.numel()) if key is None else key
        memory = self._memories.get(place)
        if memory is None:
            # addresses differ between runs
            name = f"buffer {len(self._memories)}" if key is None else str(key)
            if any(other.name == name for other in self._memories.values()):
                raise InputError(f"compression {self.name} already has a buffer named {name!r}; use another key")
            memory = self._new_memory(x, shapes, name, ranks)
            self._fill(memory)
            self._memories[place] = memory
        elif (memory.numel, memory.dtype, memory.shapes) != (x.numel(), x.dtype, shapes):
            raise InputError(
                f"compression {self.name} knows the buffer {memory.name!r} with {memory.numel} elements of "
                f"{memory.dtype}, and now gets {x.numel()} of {x.dtype}, or other shapes; call reset() first"
            )
        return memory

    def _fill(self, memory: Memory) -> None:
        """Copy loaded tensors into a new memory."""
        for part, tensor in memory.tensors.items():
            loaded = self._loaded.pop(f"{memory.name}/{part}", None)
            if loaded is None:
                continue
            if loaded.shape != tensor.shape or loaded.dtype != tensor.dtype:
                raise InputError(
                    f"compression {self.name}: {memory.name}/{part} was saved as {loaded.dtype} of {loaded.numel()} "
                    f"elements and is needed as {tensor.dtype} of {tensor.numel()}; resume with the same buckets and "
                    "options, or call reset()"
                )
            tensor.copy_(loaded)

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = dict(self._loaded)
        for memory in self._memories.values():
            state |= {f"{memory.name}/{part}": tensor for part, tensor in memory.tensors.items()}
        return state

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.reset()
        self._loaded = {name: tensor.detach().clone() for name, tensor in state.items()}

    def reset(self) -> None:
        super().reset()
        self._memories.clear()
        self._loaded.clear()

    def _as_wide(self, x: torch.Tensor) -> torch.Tensor:
        """Return x flat and in a dtype for long sums: x itself, or an fp32 copy of a 16-bit x."""
        if x.dtype not in HALVES:
            return x.view(-1)
        return self._buffer("wide", x.numel(), torch.float32, x.device).copy_(x.view(-1))


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed: fp32 for 16-bit types."""
    return torch.float32 if dtype in HALVES else dtype
