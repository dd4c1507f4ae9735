"""Compressed all-reduce: fewer bytes between the ranks for a result that is not quite the sum.

    world.all_reduce(gradient, "avg", compression=mt.compression.PowerSGD(rank=2))

| object   | what travels                                      | the result                                  |
|----------|---------------------------------------------------|---------------------------------------------|
| FP16     | 2 bytes an element                                | sum of the rounded values in fp32, rounded  |
| BF16     | 2 bytes an element                                | likewise                                    |
| TopK     | each rank's k largest elements and their places   | their sum; the rest waits in the memory     |
| PowerSGD | rank * (rows + columns) elements for each matrix  | nearest found matrix of that rank; likewise |

The last two keep what was left out of each buffer and add it the next time (error feedback), so that nothing
is lost for good. An object holds that memory: use one object for one set of buffers, alike on all ranks.
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

    def __repr__(self) -> str:
        """Return the constructor's call; ranks compare it."""
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
                self._reduce(comm, tensor, op, algorithm, Bucket(self, key, shapes))

    def check(self, dtype: torch.dtype, op: str) -> None:
        """Raise InputError for what cannot be compressed."""
        if op not in ("sum", "avg"):
            raise InputError(f"compression {self.name} cannot do op {op!r}; use sum or avg, or no compression")
        if not dtype.is_floating_point:
            kind = str(dtype).removeprefix("torch.")
            raise InputError(f"compression {self.name} is for floating-point numbers, not {kind}; leave it out")

    @abstractmethod
    def _reduce(self, comm: Collectives, x: torch.Tensor, op: str, algorithm: str, bucket: Bucket) -> None:
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
    """A compression, and the buffer it is for: its key in the memory, None for one without, and the shapes in it."""

    compression: Compression
    key: Hashable
    shapes: Shapes | None

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

    def _memory(self, x: torch.Tensor, bucket: Bucket) -> Memory:
        key, shapes = bucket.key, bucket.shapes
        place = (x.data_ptr(), x.numel()) if key is None else key
        memory = self._memories.get(place)
        if memory is None:
            # an address means nothing to another run
            name = f"buffer {len(self._memories)}" if key is None else str(key)
            if any(other.name == name for other in self._memories.values()):
                raise InputError(f"compression {self.name} has another buffer of the name {name!r}; use another key")
            memory = self._remember(x, shapes, name)
            self._fill(memory)
            self._memories[place] = memory
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


class _Rounded(Compression):
    """Values rounded to 16 bits on the wire, sums in fp32.

    Each rank rounds its values; where they meet they are added in fp32, in the order of the fixed binary tree over the
    ranks, and the sum is rounded once. Partial sums never travel, so 16 bits are all that any message carries, whatever
    the algorithm. avg divides the fp32 sum before it is rounded: it overflows only where a value does.
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
    """11 significant bits, up to 65504 in size: values (and with op sum, sums) beyond become infinite."""

    name = "fp16"
    wire = torch.float16


class BF16(_Rounded):
    """8 significant bits, fp32's range."""

    name = "bf16"
    wire = torch.bfloat16


_ALIGNMENT = 8  # bytes: messages lie end to end, and every number in them at a multiple of its size


class TopK(Remembering):
    """The k = ratio * numel largest elements of each rank (at least one), with error feedback.

    Each rank sends its k elements of largest magnitude with their places; every rank adds up what it gets (Stich,
    Cordonnier and Jaggi 2018, "Sparsified SGD with memory"):

        acc = x + error;  S = places of the k largest abs(acc);  error = acc outside S, 0 in S
            x = sum over ranks of acc[S]

    error_feedback: remember what was not sent and add it the next time. Worth it where ratio * ranks is well
    below 1: the messages of all ranks go to every rank.
    A buffer with an infinite or NaN element on any rank becomes NaN everywhere and leaves the memory alone, so that
    a step that is skipped for it can be repeated.
    """

    name = "topk"

    def __init__(self, ratio: float = 0.01, error_feedback: bool = True) -> None:
        super().__init__()
        if not 0 < ratio <= 1:
            raise InputError(f"compression topk: ratio {ratio} must be above 0 and at most 1")
        self.ratio, self.error_feedback = ratio, error_feedback

    def kept(self, numel: int) -> int:
        """How many of numel elements are sent."""
        return min(numel, max(1, math.ceil(self.ratio * numel)))

    def bytes_on_wire(self, numel: int, dtype: torch.dtype, shapes: Shapes | None = None) -> int:
        each = self.kept(numel) * (_index_type(numel, dtype).itemsize + dtype.itemsize) if numel else 0
        return -(-each // _ALIGNMENT) * _ALIGNMENT

    def _remember(self, x: torch.Tensor, shapes: Shapes | None, name: str) -> Memory:
        error = torch.zeros(x.numel(), dtype=wide_type(x.dtype), device=x.device)
        return Memory(name, x.numel(), x.dtype, shapes, {"error": error})

    def _reduce(self, comm: Collectives, x: torch.Tensor, op: str, algorithm: str, bucket: Bucket) -> None:
        numel, k, places = x.numel(), self.kept(x.numel()), _index_type(x.numel(), x.dtype)
        total = self._wide(x)
        error = self._memory(x, bucket).tensors["error"] if self.error_feedback else None
        if error is not None:
            total.add_(error)
        magnitude = self._buffer("magnitude", numel, total.dtype, x.device)
        torch.abs(total, out=magnitude)
        found = self._buffer("found", k, torch.int64, x.device)
        torch.topk(magnitude, k, sorted=False, out=(self._buffer("largest", k, total.dtype, x.device), found))

        nbytes = self.bytes_on_wire(numel, x.dtype)
        message = self._buffer("message", nbytes, torch.uint8, x.device)
        where, values = _parts(message, k, places, x.dtype)
        where.copy_(found)
        chosen = torch.index_select(total, 0, found, out=self._buffer("largest", k, total.dtype, x.device))
        values.copy_(chosen)  # rounded to x's type: what that changes stays in the memory
        messages = self._buffer("messages", nbytes * comm.size, torch.uint8, x.device)
        comm.all_gather(messages, message)

        received = [_parts(part, k, places, x.dtype) for part in torch.split(messages, nbytes)]
        if not all(torch.isfinite(theirs).all() for _, theirs in received):
            x.fill_(math.nan)
            return
        if error is not None:
            error.copy_(total)
            error.index_add_(0, found, values.to(error.dtype), alpha=-1)
        total.zero_()
        for where, theirs in received:  # in order of rank: the same bits everywhere
            total.index_add_(0, where, theirs.to(total.dtype))
        if op == "avg":
            total.mul_(1.0 / comm.size)
        if total.data_ptr() != x.data_ptr():
            x.view(-1).copy_(total)


def _index_type(numel: int, dtype: torch.dtype) -> torch.dtype:
    """32 bits where they reach and the values behind them stay aligned."""
    return torch.int64 if numel > 2**31 - 1 or dtype.itemsize == 8 else torch.int32


def _parts(message: torch.Tensor, k: int, places: torch.dtype, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The k places and the k values in a message of bytes."""
    middle = k * places.itemsize
    return message[:middle].view(places), message[middle : middle + k * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class Matrix:
    """A matrix in a flat bucket that is worth compressing. offset: elements. rank: of its approximation."""

    offset: int
    rows: int
    columns: int
    rank: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.offset : self.offset + self.rows * self.columns].view(self.rows, self.columns)


@dataclass(frozen=True)
class MatrixPlan:
    """How a bucket is compressed. rest: [lo, hi) of the elements outside the matrices."""

    matrices: tuple[Matrix, ...]
    rest: tuple[tuple[int, int], ...]

    @property
    def left(self) -> int:
        """Elements of all P."""
        return sum(m.rows * m.rank for m in self.matrices)

    @property
    def right(self) -> int:
        """Elements of all Q."""
        return sum(m.columns * m.rank for m in self.matrices)

    @property
    def uncompressed(self) -> int:
        return sum(hi - lo for lo, hi in self.rest)


def plan(numel: int, shapes: Shapes, rank: int, min_compression: float) -> MatrixPlan:
    """Which parameters of a bucket of numel elements are compressed.

    A parameter of shape (a, b, c, ...) counts as a matrix of a rows; it is compressed where that makes it at least
    min_compression times smaller. What no parameter covers belongs to the rest.
    Raises InputError for parameters that overlap or lie outside.
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
                f"{numel} elements or on another one; give each parameter's own (offset, shape)"
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
    """A bucket's memory. sent: all P, then the rest. ps, qs, errors: views of the matrices' parts."""

    plan: MatrixPlan
    sent: torch.Tensor
    right: torch.Tensor
    ps: Sequence[torch.Tensor]
    qs: Sequence[torch.Tensor]
    errors: Sequence[torch.Tensor]


class PowerSGD(Remembering):
    """Gradient matrices as products of two thin ones (Vogels, Karimireddy and Jaggi 2019).

    Of each matrix M (rows x columns) of a bucket, with R = rank, one step of subspace iteration (algorithm 1):

        P = M Q                rows x R         summed over ranks
        P = orthonormal basis of P's columns    (QR, the same on every rank)
        Q = M' P               columns x R      summed over ranks
        result = P Q'

    and of the rest (vectors, small matrices) the plain sum, in the same message as P. With error feedback (algorithm 2)
    M is the gradient plus what this rank's own P Q' missed of M the last time. Q is the start of the next step's
    iteration (warm start), so that P and Q approach the leading singular vectors over the steps.

    warm_start: begin each step with the last step's Q, else with a random one. error_feedback: remember what the
    approximation missed. min_compression: how many times smaller a matrix must become; others travel as they are.
    seed: of the random start matrices, which are alike on all ranks.
    Of a flat buffer the parameters' shapes must be given (`bucket`); else x is one matrix, or a vector that is not
    compressed. All ranks' processors must be of one kind: each computes the basis for itself.
    A buffer with an infinite or NaN element on any rank becomes NaN everywhere and leaves the memory alone, so that
    a step that is skipped for it can be repeated.
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
        """Without shapes a vector, which is not compressed."""
        made = plan(numel, [(0, (numel,))] if shapes is None else shapes, self.rank, self.min_compression)
        if not made.matrices:
            return numel * dtype.itemsize
        return (made.left + made.right + made.uncompressed) * wide_type(dtype).itemsize

    def _remember(self, x: torch.Tensor, shapes: Shapes | None, name: str) -> Memory:
        made = plan(x.numel(), [(0, x.shape)] if shapes is None else shapes, self.rank, self.min_compression)
        dtype = wide_type(x.dtype)
        sent = torch.empty(made.left + made.uncompressed, dtype=dtype, device=x.device)
        right = torch.empty(made.right, dtype=dtype, device=x.device)
        error = torch.zeros(x.numel() if made.matrices else 0, dtype=dtype, device=x.device)
        steps = torch.zeros(1, dtype=torch.int64)
        tensors = {"right": right, "steps": steps} if made.matrices else {}
        if self.error_feedback and made.matrices:
            tensors["error"] = error
        ps = _pieces(sent, [(m.rows, m.rank) for m in made.matrices])
        qs = _pieces(right, [(m.columns, m.rank) for m in made.matrices])
        errors = [m.of(error) for m in made.matrices]
        return _Factors(name, x.numel(), x.dtype, shapes, tensors, made, sent, right, ps, qs, errors)

    def _reduce(self, comm: Collectives, x: torch.Tensor, op: str, algorithm: str, bucket: Bucket) -> None:
        memory = self._memory(x, bucket)
        assert isinstance(memory, _Factors)
        if not memory.plan.matrices:
            comm.all_reduce(x, op, algorithm)
            return
        self._start(memory)
        total = self._wide(x)
        rest = [total[lo:hi] for lo, hi in memory.plan.rest]
        sent_rest = memory.sent[memory.plan.left :]
        if rest:
            torch.cat(rest, out=sent_rest)
        matrices = [m.of(total) for m in memory.plan.matrices]
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

    def _start(self, memory: _Factors) -> None:
        """Random start matrices, alike on all ranks: the first time, and without warm start each time."""
        step = int(memory.tensors["steps"])
        if step and self.warm_start:
            return
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {memory.name} {step}".encode()))
        memory.right.copy_(torch.randn(memory.right.numel(), generator=generator))


def _pieces(flat: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Views of the given shapes one after the other from the start of a flat tensor."""
    sizes = [rows * columns for rows, columns in shapes]
    return [piece.view(shape) for piece, shape in zip(torch.split(flat[: sum(sizes)], sizes), shapes, strict=True)]


__all__ = ["BF16", "FP16", "Bucket", "Collectives", "Compression", "PowerSGD", "Shapes", "TopK", "from_name"]


def from_name(name: str, **options: Any) -> Compression:
    """The compression of a name (fp16, bf16, topk, powersgd) with its constructor's options."""
    kinds: dict[str, type[Compression]] = {kind.name: kind for kind in (FP16, BF16, TopK, PowerSGD)}
    if name not in kinds:
        raise InputError(f"there is no compression {name!r}; use one of {', '.join(kinds)}")
    known = list(inspect.signature(kinds[name]).parameters)
    for option in options:
        if option not in known:
            raise InputError(f"compression {name} has no option {option!r}; it has {', '.join(known) or 'none'}")
    return kinds[name](**options)
