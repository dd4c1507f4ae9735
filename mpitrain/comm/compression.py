"""Compressed all-reduce: fewer bytes between the ranks, for an approximate sum.

    world.all_reduce(gradient, "avg", compression=mt.compression.PowerSGD(rank=2))

| class    | data sent                                            | result                                        |
|----------|------------------------------------------------------|-----------------------------------------------|
| FP16     | 2 bytes per element                                  | fp32 sum of the rounded values, rounded again |
| BF16     | 2 bytes per element                                  | fp32 sum of the rounded values, rounded again |
| TopK     | k largest elements of each rank, with their indices  | sum of the elements that were sent            |
| PowerSGD | rank * (rows + columns) elements for each matrix     | approximation of the sum by a matrix of `rank`|

TopK and PowerSGD remember what they left out of each buffer and add it in the next call (error feedback), so that
nothing is lost permanently. The memory belongs to the object: use one object for one set of buffers, with the same
options on all ranks.
"""

from __future__ import annotations

import inspect
import math
import threading
import zlib
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
    """Methods of a `Communicator` that a compression uses; `Channel` also has them."""

    size: int

    def all_reduce(self, x: Any, op: str = "sum", algorithm: str = "auto", *, reproducible: bool = False) -> object: ...

    def all_gather(self, out: Any, x: Any) -> object: ...


class Compression(ABC):
    """A way to all-reduce with fewer bytes; `name` is its name in `from_name` and in the configuration."""

    name: ClassVar[str]

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

        Raises:
            InputError: x or op cannot be compressed.
        """
        tensor = as_tensor(x)
        self.check(tensor.dtype, op)
        if comm.size > 1 and tensor.numel() > 0:
            with torch.no_grad():
                self._reduce(comm, tensor, op, algorithm, Bucket(self, key, shapes))

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

        On N ranks, each rank sends 2(N-1)/N times this in reductions, and N-1 times this in gathers (topk).

        Args:
            numel, dtype: Length and type of the buffer.
            shapes: (offset, shape) of each parameter in the buffer.
        """

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
    """A compression, and the buffer it is for: its key in the memory (None for its address) and the shapes in it."""

    compression: Compression
    key: Hashable
    shapes: Shapes | None

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
    def _new_memory(self, x: torch.Tensor, shapes: Shapes | None, name: str) -> Memory:
        """Return a new memory for a buffer."""

    def _memory(self, x: torch.Tensor, bucket: Bucket) -> Memory:
        """Return the memory of a buffer; create it in the first call."""
        key, shapes = bucket.key, bucket.shapes
        place = (x.data_ptr(), x.numel()) if key is None else key
        memory = self._memories.get(place)
        if memory is None:
            # addresses differ between runs
            name = f"buffer {len(self._memories)}" if key is None else str(key)
            if any(other.name == name for other in self._memories.values()):
                raise InputError(f"compression {self.name} already has a buffer named {name!r}; use another key")
            memory = self._new_memory(x, shapes, name)
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


class _Rounded(Compression):
    """Compression that sends values rounded to 16 bits and sums them in fp32.

    Each rank rounds its values. They are then added in fp32, in the order of the fixed binary tree over the ranks, and
    the sum is rounded once. Partial sums are never sent, so all messages are 16-bit, whatever the algorithm. avg
    divides the fp32 sum before it is rounded, so it overflows only if a value does.
    """

    wire: ClassVar[torch.dtype]

    def _reduce(self, comm: Collectives, x: torch.Tensor, op: str, algorithm: str, bucket: Bucket) -> None:
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
    """Compression to fp16: 11 significant bits; values (and, with op sum, sums) above 65504 become infinite."""

    name = "fp16"
    wire = torch.float16


class BF16(_Rounded):
    """Compression to bf16: 8 significant bits, and the range of fp32."""

    name = "bf16"
    wire = torch.bfloat16


_ALIGNMENT = 8  # bytes: messages are contiguous, and each number in them is aligned to its size


class TopK(StatefulCompression):
    """Compression that sends the k = ratio * numel largest elements of each rank (at least one), with error feedback.

    Each rank sends its k elements of largest magnitude with their indices, and every rank adds up what it receives
    (Stich, Cordonnier and Jaggi 2018, "Sparsified SGD with memory"):

        acc = x + error;  S = indices of the k largest abs(acc);  error = acc outside S, 0 in S
            x = sum over ranks of acc[S]

    It pays if ratio * ranks is well below 1, because the messages of all ranks go to every rank. If a buffer has an
    infinite or NaN element on any rank, the result is NaN everywhere and the memory does not change, so that a skipped
    step can be repeated.

    Args:
        ratio: Fraction of the elements to send, above 0 and at most 1.
        error_feedback: If true, remember what was not sent and add it in the next call.
    """

    name = "topk"

    def __init__(self, ratio: float = 0.01, error_feedback: bool = True) -> None:
        super().__init__()
        if not 0 < ratio <= 1:
            raise InputError(f"compression topk: ratio {ratio} must be above 0 and at most 1")
        self.ratio, self.error_feedback = ratio, error_feedback

    def kept(self, numel: int) -> int:
        """Return how many of `numel` elements are sent."""
        return min(numel, max(1, math.ceil(self.ratio * numel)))

    def bytes_on_wire(self, numel: int, dtype: torch.dtype, shapes: Shapes | None = None) -> int:
        each = self.kept(numel) * (_index_type(numel, dtype).itemsize + dtype.itemsize) if numel else 0
        return -(-each // _ALIGNMENT) * _ALIGNMENT

    def _new_memory(self, x: torch.Tensor, shapes: Shapes | None, name: str) -> Memory:
        error = torch.zeros(x.numel(), dtype=wide_type(x.dtype), device=x.device)
        return Memory(name, x.numel(), x.dtype, shapes, {"error": error})

    def _reduce(self, comm: Collectives, x: torch.Tensor, op: str, algorithm: str, bucket: Bucket) -> None:
        numel, k, places = x.numel(), self.kept(x.numel()), _index_type(x.numel(), x.dtype)
        total = self._as_wide(x)
        error = self._memory(x, bucket).tensors["error"] if self.error_feedback else None
        if error is not None:
            total.add_(error)
        magnitude = self._buffer("magnitude", numel, total.dtype, x.device)
        torch.abs(total, out=magnitude)
        indices = self._buffer("indices", k, torch.int64, x.device)
        torch.topk(magnitude, k, sorted=False, out=(self._buffer("largest", k, total.dtype, x.device), indices))

        nbytes = self.bytes_on_wire(numel, x.dtype)
        message = self._buffer("message", nbytes, torch.uint8, x.device)
        where, values = _parts(message, k, places, x.dtype)
        where.copy_(indices)
        chosen = torch.index_select(total, 0, indices, out=self._buffer("largest", k, total.dtype, x.device))
        values.copy_(chosen)  # rounded to x's type; the rounding error stays in the memory
        messages = self._buffer("messages", nbytes * comm.size, torch.uint8, x.device)
        comm.all_gather(messages, message)

        received = [_parts(part, k, places, x.dtype) for part in torch.split(messages, nbytes)]
        if not all(torch.isfinite(theirs).all() for _, theirs in received):
            x.fill_(math.nan)
            return
        if error is not None:
            error.copy_(total)
            error.index_add_(0, indices, values.to(error.dtype), alpha=-1)
        total.zero_()
        for where, theirs in received:  # in order of rank, so that all ranks get the same bits
            total.index_add_(0, where, theirs.to(total.dtype))
        if op == "avg":
            total.mul_(1.0 / comm.size)
        if total.data_ptr() != x.data_ptr():
            x.view(-1).copy_(total)


def _index_type(numel: int, dtype: torch.dtype) -> torch.dtype:
    """Return the type of the indices: 32 bits if they suffice and keep 64-bit values aligned."""
    return torch.int64 if numel > 2**31 - 1 or dtype.itemsize == 8 else torch.int32


def _parts(message: torch.Tensor, k: int, places: torch.dtype, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the k indices and the k values in a message of bytes."""
    middle = k * places.itemsize
    return message[:middle].view(places), message[middle : middle + k * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class Matrix:
    """A compressed matrix in a flat bucket: offset of its first element, shape, and rank of its approximation."""

    offset: int
    rows: int
    columns: int
    rank: int

    def view_in(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the view of this matrix in the bucket `flat`."""
        return flat[self.offset : self.offset + self.rows * self.columns].view(self.rows, self.columns)


@dataclass(frozen=True)
class MatrixPlan:
    """Division of a bucket into compressed matrices and the rest, which are [lo, hi) ranges of elements."""

    matrices: tuple[Matrix, ...]
    rest: tuple[tuple[int, int], ...]

    @property
    def left(self) -> int:
        """Number of elements of all P."""
        return sum(m.rows * m.rank for m in self.matrices)

    @property
    def right(self) -> int:
        """Number of elements of all Q."""
        return sum(m.columns * m.rank for m in self.matrices)

    @property
    def uncompressed(self) -> int:
        """Number of elements that are not compressed."""
        return sum(hi - lo for lo, hi in self.rest)


def plan(numel: int, shapes: Shapes, rank: int, min_compression: float) -> MatrixPlan:
    """Choose the parameters of a bucket that are compressed.

    A parameter of shape (a, b, c, ...) is treated as a matrix of a rows.

    Args:
        numel: Number of elements of the bucket; those outside all parameters are not compressed.
        shapes: (offset, shape) of each parameter.
        rank: Largest rank of an approximation.
        min_compression: Compress a parameter only if it becomes at least this many times smaller.

    Raises:
        InputError: Parameters overlap or lie outside the bucket.
    """
    matrices: list[Matrix] = []
    rest: list[tuple[int, int]] = []

    def uncompressed(lo: int, hi: int) -> None:
        if lo < hi:
            before = rest.pop()[0] if rest and rest[-1][1] == lo else lo
            rest.append((before, hi))

    end = 0
    for offset, shape in sorted((lo, tuple(shape)) for lo, shape in shapes):
        size = math.prod(shape)
        if offset < end or offset + size > numel:
            raise InputError(
                f"compression powersgd: the parameter of shape {shape} at offset {offset} lies outside the bucket of "
                f"{numel} elements or overlaps another parameter; pass the (offset, shape) of each"
            )
        uncompressed(end, offset)
        rows = shape[0] if shape else 1
        columns = size // rows if rows else 0
        limited = min(rank, rows, columns)
        if min(rows, columns) > 1 and (rows + columns) * limited * min_compression <= size:
            matrices.append(Matrix(offset, rows, columns, limited))
        else:
            uncompressed(offset, offset + size)
        end = offset + size
    uncompressed(end, numel)
    return MatrixPlan(tuple(matrices), tuple(rest))


@dataclass
class _Factors(Memory):
    """Memory of PowerSGD for one bucket.

    Attributes:
        sent: All P, then the elements that are not compressed.
        right: All Q.
        ps, qs, errors: Views of the P, Q and error of each matrix.
    """

    plan: MatrixPlan
    sent: torch.Tensor
    right: torch.Tensor
    ps: Sequence[torch.Tensor]
    qs: Sequence[torch.Tensor]
    errors: Sequence[torch.Tensor]


class PowerSGD(StatefulCompression):
    """Compression of gradient matrices to products of two thin matrices (Vogels, Karimireddy and Jaggi 2019).

    For each matrix M (rows x columns) of a bucket, with R = rank, one step of subspace iteration (algorithm 1):

        P = M Q                rows x R         summed over ranks
        P = orthonormal basis of P's columns    (QR, the same on every rank)
        Q = M' P               columns x R      summed over ranks
        result = P Q'

    The rest (vectors, small matrices) is summed exactly, in the same message as P. With error feedback (algorithm 2), M
    is the gradient plus what this rank's own P Q' missed of M in the last call. Each call starts from the last Q (warm
    start), so P and Q approach the leading singular vectors over the steps.

    Pass the shapes of the parameters in a flat buffer (`bucket`); otherwise x counts as one matrix, or as a vector,
    which is not compressed. All ranks need the same kind of processor, because each computes the basis itself. If a
    buffer has an infinite or NaN element on any rank, the result is NaN everywhere and the memory does not change, so
    that a skipped step can be repeated.

    Args:
        rank: Rank R of the approximations.
        warm_start: If true, start each call with the last Q; otherwise with a random Q.
        error_feedback: If true, remember what the approximation missed and add it in the next call.
        min_compression: Compress a matrix only if it becomes at least this many times smaller.
        seed: Seed of the random matrices, which are equal on all ranks.
    """

    name = "powersgd"

    def __init__(
        self,
        rank: int = 4,
        warm_start: bool = True,
        error_feedback: bool = True,
        min_compression: float = 2.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if rank < 1:
            raise InputError(f"compression powersgd: rank {rank} must be at least 1")
        if min_compression < 0:
            raise InputError(f"compression powersgd: min_compression {min_compression} must not be negative")
        self.rank, self.warm_start, self.error_feedback = rank, warm_start, error_feedback
        self.min_compression, self.seed = min_compression, seed

    def bytes_on_wire(self, numel: int, dtype: torch.dtype, shapes: Shapes | None = None) -> int:
        """Return the bytes as `Compression.bytes_on_wire` does; without shapes, the buffer is a vector."""
        matrix_plan = plan(numel, [(0, (numel,))] if shapes is None else shapes, self.rank, self.min_compression)
        if not matrix_plan.matrices:
            return numel * dtype.itemsize
        return (matrix_plan.left + matrix_plan.right + matrix_plan.uncompressed) * wide_type(dtype).itemsize

    def _new_memory(self, x: torch.Tensor, shapes: Shapes | None, name: str) -> Memory:
        matrix_plan = plan(x.numel(), [(0, x.shape)] if shapes is None else shapes, self.rank, self.min_compression)
        dtype = wide_type(x.dtype)
        sent = torch.empty(matrix_plan.left + matrix_plan.uncompressed, dtype=dtype, device=x.device)
        right = torch.empty(matrix_plan.right, dtype=dtype, device=x.device)
        error = torch.zeros(x.numel() if matrix_plan.matrices else 0, dtype=dtype, device=x.device)
        steps = torch.zeros(1, dtype=torch.int64)
        tensors = {"right": right, "steps": steps} if matrix_plan.matrices else {}
        if self.error_feedback and matrix_plan.matrices:
            tensors["error"] = error
        ps = _pieces(sent, [(m.rows, m.rank) for m in matrix_plan.matrices])
        qs = _pieces(right, [(m.columns, m.rank) for m in matrix_plan.matrices])
        errors = [m.view_in(error) for m in matrix_plan.matrices]
        return _Factors(name, x.numel(), x.dtype, shapes, tensors, matrix_plan, sent, right, ps, qs, errors)

    def _reduce(self, comm: Collectives, x: torch.Tensor, op: str, algorithm: str, bucket: Bucket) -> None:
        memory = self._memory(x, bucket)
        assert isinstance(memory, _Factors)
        if not memory.plan.matrices:
            comm.all_reduce(x, op, algorithm)
            return
        self._init_factors(memory)
        total = self._as_wide(x)
        rest = [total[lo:hi] for lo, hi in memory.plan.rest]
        sent_rest = memory.sent[memory.plan.left :]
        if rest:
            torch.cat(rest, out=sent_rest)
        matrices = [m.view_in(total) for m in memory.plan.matrices]
        if self.error_feedback:
            for matrix, error in zip(matrices, memory.errors, strict=True):
                matrix.add_(error)
        for matrix, p, q in zip(matrices, memory.ps, memory.qs, strict=True):
            torch.mm(matrix, q, out=p)
        comm.all_reduce(memory.sent, op, algorithm)
        if not torch.isfinite(memory.sent).all():
            x.fill_(math.nan)
            return
        memory.tensors["steps"] += 1
        for matrix, p, q, error in zip(matrices, memory.ps, memory.qs, memory.errors, strict=True):
            p.copy_(torch.linalg.qr(p).Q)
            torch.mm(matrix.t(), p, out=q)
            if self.error_feedback:
                torch.addmm(matrix, p, q.t(), alpha=-1, out=error)
        comm.all_reduce(memory.right, op, algorithm)
        for matrix, p, q in zip(matrices, memory.ps, memory.qs, strict=True):
            torch.mm(p, q.t(), out=matrix)
        for piece, reduced in zip(rest, torch.split(sent_rest, [hi - lo for lo, hi in memory.plan.rest]), strict=True):
            piece.copy_(reduced)
        if total.data_ptr() != x.data_ptr():
            x.view(-1).copy_(total)

    def _init_factors(self, memory: _Factors) -> None:
        """Set random Q, equal on all ranks, in the first call, and without warm start in each call."""
        step = int(memory.tensors["steps"])
        if step and self.warm_start:
            return
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {memory.name} {step}".encode()))
        memory.right.copy_(torch.randn(memory.right.numel(), generator=generator))


def _pieces(flat: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Return consecutive views of the given shapes, from the start of a flat tensor."""
    sizes = [rows * columns for rows, columns in shapes]
    return [piece.view(shape) for piece, shape in zip(torch.split(flat[: sum(sizes)], sizes), shapes, strict=True)]


__all__ = ["BF16", "FP16", "Bucket", "Collectives", "Compression", "PowerSGD", "Shapes", "TopK", "from_name"]


def from_name(name: str, **options: Any) -> Compression:
    """Return the compression of a name (fp16, bf16, topk, powersgd), with `options` for its constructor.

    Raises:
        InputError: There is no such compression or option.
    """
    kinds: dict[str, type[Compression]] = {kind.name: kind for kind in (FP16, BF16, TopK, PowerSGD)}
    if name not in kinds:
        raise InputError(f"there is no compression {name!r}; use one of {', '.join(kinds)}")
    known = list(inspect.signature(kinds[name]).parameters)
    for option in options:
        if option not in known:
            raise InputError(f"compression {name} has no option {option!r}; it has {', '.join(known) or 'none'}")
    return kinds[name](**options)
