"""What all compressions share: the interface, the buckets, and the memory of what was left out; and the simplest two.

Half the bytes of fp32: values rounded to 16 bits on the wire, sums in fp32. Each rank rounds its values; where they
meet they are added in fp32, in the order of the fixed binary tree over the ranks, and the sum is rounded once. Partial
sums never travel, so 16 bits are all that any message carries, whatever the algorithm. avg divides the fp32 sum before
it is rounded: it overflows only where a value does.
"""

from __future__ import annotations

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
    """What a compression needs of a `Communicator`, or of what stands for it in the background."""

    size: int

    def all_reduce(self, x: Any, op: str = "sum", algorithm: str = "auto", *, reproducible: bool = False) -> object: ...

    def all_gather(self, out: Any, x: Any) -> object: ...


class Compression(ABC):
    """One way to all-reduce with fewer bytes.

    name: what `from_name` and the configuration call it.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._scratch: dict[Hashable, torch.Tensor] = {}

    def all_reduce(
        self,
        comm: Collectives,
        x: Any,
        op: str = "sum",
        algorithm: str = "auto",
        *,
        key: Hashable | None = None,
        shapes: Shapes | None = None,
    ) -> None:
        """Every rank's x becomes about the sum (or avg) of all, in place; the same bits on every rank.

        x: contiguous floating tensor. algorithm: of the reductions it is made of, as in `Communicator.all_reduce`.
        key: the buffer's name in the memory; without one, a buffer is known by its address and length, so a
        loop must then pass the same memory each time. shapes: (offset, shape) of the parameters in a flat x, for
        what works on matrices. Where there is one rank nothing travels and x stays as it is.
        """
        tensor = as_tensor(x)
        self.check(tensor.dtype, op)
        if comm.size > 1 and tensor.numel() > 0:
            with torch.no_grad():
                self._reduce(comm, tensor, op, algorithm, key, shapes)

    def check(self, dtype: torch.dtype, op: str) -> None:
        """Raise InputError for what cannot be compressed."""
        if op not in ("sum", "avg"):
            raise InputError(f"compression {self.name} cannot do op {op!r}; use sum or avg, or no compression")
        if not dtype.is_floating_point:
            kind = str(dtype).removeprefix("torch.")
            raise InputError(f"compression {self.name} is for floating-point numbers, not {kind}; leave it out")

    @abstractmethod
    def _reduce(
        self, comm: Collectives, x: torch.Tensor, op: str, algorithm: str, key: Hashable | None, shapes: Shapes | None
    ) -> None:
        """`all_reduce` of at least one element on at least two ranks."""

    @abstractmethod
    def bytes_on_wire(self, numel: int, dtype: torch.dtype, shapes: Shapes | None = None) -> int:
        """Bytes one rank hands to the collectives in place of numel * itemsize.

        What is reduced then costs each rank 2(N-1)/N times as much in messages, what is gathered (topk) N-1 times.
        """

    def bucket(self, key: Hashable, shapes: Shapes | None = None) -> Bucket:
        """This compression for one buffer, to be given to `Communicator.all_reduce`."""
        return Bucket(self, key, None if shapes is None else tuple((lo, tuple(shape)) for lo, shape in shapes))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's memory: tensors by name, to go on with exactly."""
        return {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from `state_dict()` of the same rank of as many ranks."""
        if state:
            raise InputError(f"compression {self.name} keeps no memory, but {sorted(state)[0]!r} is to be loaded")

    def reset(self) -> None:
        """Forget everything: start anew, or with other buffers."""
        self._scratch.clear()

    def _buffer(self, role: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the time of a call, kept for later ones; each thread has its own."""
        key = (threading.get_ident(), role, dtype, device)
        kept = self._scratch.get(key)
        if kept is None or kept.numel() < numel:
            kept = self._scratch[key] = torch.empty(numel, dtype=dtype, device=device)
        return kept[:numel]


@dataclass(frozen=True)
class Bucket:
    """A compression, and the buffer it is for: its key in the memory and the shapes in it."""

    compression: Compression
    key: Hashable
    shapes: Shapes | None

    def check(self, dtype: torch.dtype, op: str) -> None:
        self.compression.check(dtype, op)

    def all_reduce(self, comm: Collectives, x: Any, op: str = "sum", algorithm: str = "auto") -> None:
        self.compression.all_reduce(comm, x, op, algorithm, key=self.key, shapes=self.shapes)

    def __str__(self) -> str:
        return f"{self.compression} {self.key}"


@dataclass
class Memory:
    """What is remembered of one buffer. tensors: what a checkpoint holds of it."""

    name: str
    numel: int
    dtype: torch.dtype
    shapes: Shapes | None
    tensors: dict[str, torch.Tensor]


class Remembering(Compression):
    """A compression with a memory for each buffer, in fp32 for 16-bit buffers."""

    def __init__(self) -> None:
        super().__init__()
        self._memories: dict[Hashable, Memory] = {}
        self._loaded: dict[str, torch.Tensor] = {}

    @abstractmethod
    def _remember(self, x: torch.Tensor, shapes: Shapes | None, name: str) -> Memory:
        """The memory of a buffer that was not seen before."""

    def _memory(self, x: torch.Tensor, key: Hashable | None, shapes: Shapes | None) -> Memory:
        unnamed = key is None
        if key is None:
            key = (x.data_ptr(), x.numel())
        memory = self._memories.get(key)
        if memory is None:
            name = f"buffer {len(self._memories)}" if unnamed else str(key)  # an address means nothing to another run
            if any(other.name == name for other in self._memories.values()):
                raise InputError(f"compression {self.name} has another buffer of the name {name!r}; use another key")
            memory = self._remember(x, shapes, name)
            self._fill(memory)
            self._memories[key] = memory
        elif (memory.numel, memory.dtype, memory.shapes) != (x.numel(), x.dtype, shapes):
            raise InputError(
                f"compression {self.name} remembers {memory.name!r} as {memory.numel} elements of "
                f"{memory.dtype} and now gets {x.numel()} of {x.dtype}, or other shapes; call reset() first"
            )
        return memory

    def _fill(self, memory: Memory) -> None:
        """Put what was loaded into a new memory."""
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

    def _wide(self, x: torch.Tensor) -> torch.Tensor:
        """x flat, in a type in which sums of many steps can be kept: x itself but for 16-bit types."""
        if x.dtype not in HALVES:
            return x.view(-1)
        return self._buffer("wide", x.numel(), torch.float32, x.device).copy_(x.view(-1))


def wide_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALVES else dtype


def all_finite(x: torch.Tensor) -> bool:
    """Whether no element is infinite or NaN."""
    return bool(torch.isfinite(x).all())


class _Rounded(Compression):
    wire: ClassVar[torch.dtype]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def _reduce(
        self, comm: Collectives, x: torch.Tensor, op: str, algorithm: str, key: Hashable | None, shapes: Shapes | None
    ) -> None:
        if x.dtype == self.wire:
            comm.all_reduce(x, op, algorithm, reproducible=True)
            return
        flat = x.view(-1)
        rounded = self._buffer("wire", flat.numel(), self.wire, x.device).copy_(flat)
        comm.all_reduce(rounded, op, algorithm, reproducible=True)
        flat.copy_(rounded)

    def bytes_on_wire(self, numel: int, dtype: torch.dtype, shapes: Shapes | None = None) -> int:
        return numel * self.wire.itemsize


class FP16(_Rounded):
    """11 significant bits, up to 65504 in size: values (and with op sum, sums) beyond become infinite."""

    name = "fp16"
    wire = torch.float16


class BF16(_Rounded):
    """8 significant bits, fp32's range."""

    name = "bf16"
    wire = torch.bfloat16
