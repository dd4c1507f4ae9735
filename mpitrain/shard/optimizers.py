"""Optimizers that need whole parameters, for parameters that are divided over several ranks: Muon, LAMB and LARS.

A rank may have a slice of a bucket (ZeRO), some rows or columns of a parameter (tensor parallel), or a slice of
those.

Muon makes the momentum of a matrix orthogonal with five Newton-Schulz iterations (Jordan et al. 2024, "Muon: An
optimizer for hidden layers"), for which it needs the whole matrix:

    momentum, in shares     each rank updates its own           element by element
    all-gather, by bucket   over the ranks of the shard         the rank's part of the matrices is whole
    all-gather, by matrix   over the axis that divides it       the matrices are whole
    Newton-Schulz           by each rank that has some of it    twice for a matrix on a boundary of shares
    update                  each rank its own share

No rank keeps more of the state than its share, and only one bucket at a time is gathered. The results are those of
torch.optim.Muon, in bfloat16 between the first and the last product.

LAMB and LARS compute learning rates from norms over whole parameters:

    squares, in shares        each rank sums those of its own elements, in float64
    sum over the shard        one small vector for all parameters
    sum over the axis         only for the parameters that it divides (tensor parallel)
    update                    each rank its own share
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from mpitrain.comm import Communicator
from mpitrain.errors import refusal
from mpitrain.layout.boxes import Box, Slice, logical_of
from mpitrain.shard.flat import bucket_indices
from mpitrain.shard.flat_parameters import FlatParameter
from mpitrain.shard.sharding import Sharding

Parts = list[tuple[torch.Tensor, int, int, int]]  # (updated tensor, first, last, number of the parameter)


@dataclass(frozen=True)
class MatrixPart:
    """This rank's part of a matrix: elements [first, last) of its tensor, at `place` in a flat parameter.

    Attributes:
        value: Flat parameter that contains the elements.
        place: Index of the first element in the flat parameter.
        first, last: Range of the elements in the rank's tensor.
        parameter: Tensor of this rank, in its own shape.
    """

    value: torch.Tensor
    place: int
    first: int
    last: int
    parameter: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the whole matrix, (rows, columns)."""
        rows, columns = logical_of(self.parameter).shape
        return rows, columns

    def slice_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the elements of this part in a tensor laid out like the flat parameter; a view."""
        return flat.view(-1)[self.place : self.place + self.last - self.first]


MatrixFunction = Callable[[MatrixPart, torch.Tensor], torch.Tensor]  # maps (part, whole matrix) to a matrix


class Muon(torch.optim.Muon):
    """torch.optim.Muon for parameters that may also be slices of several matrices, once `gather` is set.

    Args:
        params: Matrices, or groups of them.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps: Options of torch.optim.Muon.
        adjust_lr_fn: Factor of the learning rate for a matrix of m rows and n columns: "original" for sqrt(max(1, m /
            n)); "match_rms_adamw" or None for 0.2 sqrt(max(m, n)), with which AdamW's learning rate is suitable.

    Attributes:
        gather: Object that gathers whole matrices; None if the parameters are whole matrices.

    Raises:
        ValueError: An option is out of its range, or a parameter is not a matrix.
    """

    needs_whole = True
    gather: MatrixGather | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters once. Collective over the ranks that have parts of the matrices."""
        groups = {value: group for group in self.param_groups for value in group["params"]}
        updates = {value: self._momentum(value, groups[value]) for value in groups if value.grad is not None}
        for value in updates:
            value.mul_(1 - groups[value]["lr"] * groups[value]["weight_decay"])
        for part, update in self._orthogonalize(updates, groups):
            group = groups[part.value]
            rows, columns = part.shape
            original = group["adjust_lr_fn"] == "original"
            factor = math.sqrt(max(1, rows / columns)) if original else 0.2 * math.sqrt(max(rows, columns))
            part.slice_of(part.value).add_(update, alpha=-group["lr"] * factor)

    def _momentum(self, value: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        """Add the gradient to the momentum, and return the tensor that is to be made orthogonal."""
        gradient, state, momentum = value.grad, self.state[value], group["momentum"]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer: torch.Tensor = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum) if group["nesterov"] else buffer

    def _orthogonalize(
        self, updates: Mapping[torch.Tensor, torch.Tensor], groups: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> Iterator[tuple[MatrixPart, torch.Tensor]]:
        """Yield each part of a matrix with its elements of the orthogonal update. Collective if `gather` is set."""

        def whole(part: MatrixPart, matrix: torch.Tensor) -> torch.Tensor:
            group = groups[part.value]
            return orthogonal(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

        if self.gather is not None:
            yield from self.gather.apply(updates, whole)
            return
        for value, update in updates.items():
            part = MatrixPart(value, 0, 0, value.numel(), value)
            yield part, whole(part, update).reshape(-1)


def orthogonal(matrix: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float) -> torch.Tensor:
    """Return approximately U V' for a matrix U S V', computed in bfloat16 by Newton-Schulz iterations.

    One iteration is X <- a X + (b X X' + c (X X')^2) X. The singular values of the result are between 0.5 and 1.5. The
    result is bitwise equal to that of torch.optim.Muon.

    Args:
        matrix: Matrix [m, n], any float dtype.
        coefficients: The numbers a, b and c.
        steps: Number of iterations.
        eps: Lower bound of the norm that the matrix is divided by.
    """
    a, b, c = coefficients
    x = matrix.bfloat16()
    tall = matrix.shape[0] > matrix.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class MatrixGather:
    """Gathers the matrices of a sharding, one bucket at a time. The constructor is collective.

    Args:
        sharding: Sharding of the matrices.
        flat_parameters: Flat parameters that are such matrices, or slices of them.
        axis: Ranks of the axis that divides parameters; None if there is none.
    """

    def __init__(self, sharding: Sharding, flat_parameters: Sequence[FlatParameter], axis: Communicator | None) -> None:
        self._sharding, self._axis = sharding, axis
        self._whole = not sharding.stage.states or sharding.shard.size == 1
        self._scratch: dict[str, torch.Tensor] = {}
        self.set_flat_parameters(flat_parameters)
        self._buckets = self._list_buckets()

    def set_flat_parameters(self, flat_parameters: Sequence[FlatParameter]) -> None:
        """Use the matrices in these flat parameters from now on, in place of the earlier ones."""
        self._local_parts: dict[nn.Parameter, MatrixPart] = {}
        for flat in flat_parameters:
            for parameter, first, last, place in flat.contents:
                self._local_parts[parameter] = MatrixPart(flat.value, place, first, last, parameter)

    def _list_buckets(self) -> list[tuple[int, int, list[tuple[int, DividedMatrix]]]]:
        """Return (group, bucket, [(number of the parameter, its division)]) for every bucket with matrices. Collective.

        The result is the same on all ranks of the shard.
        """
        groups, buckets = self._sharding.groups, []
        # (group, number) of every matrix of which some rank of the shard, or of the axis, updates a part
        mine = [
            [g, n] for g, group in enumerate(groups) for n, p in enumerate(group.parameters) if p in self._local_parts
        ]
        if not self._whole:
            mine = [key for keys in self._sharding.shard.all_gather_object(mine) for key in keys]
        matrices = {(g, n) for g, n in mine}
        for g, b in bucket_indices(groups):
            group = groups[g]
            numbers = [n for n, p in enumerate(group.layout.places) if p.bucket == b and (g, n) in matrices]
            if numbers:
                buckets.append((g, b, [(n, self._division_of(group.parameters[n], (g, n))) for n in numbers]))
        return buckets

    def _division_of(self, parameter: nn.Parameter, key: tuple[int, int]) -> DividedMatrix:
        part = logical_of(parameter)
        if self._axis is None:
            return DividedMatrix(parameter in self._local_parts, None, ())
        boxes = [[box.shape, box.start, box.stop] for box in part.boxes]
        answers = self._axis.all_gather_object([*key, list(part.shape), boxes, parameter in self._local_parts])
        if len({tuple(shape) for _, _, shape, _, _ in answers}) > 1 or len({(g, n) for g, n, *_ in answers}) > 1:
            raise refusal("muon needs the same layout of matrices on all tensor ranks; set parallel.tensor to 1")
        slices = tuple(Slice(tuple(shape), tuple(Box(*box) for box in boxes)) for _, _, shape, boxes, _ in answers)
        undivided = all(s.numel == math.prod(s.shape) for s in slices)
        return DividedMatrix(any(needed for *_, needed in answers), None if undivided else self._axis, slices)

    def apply(
        self, updates: Mapping[torch.Tensor, torch.Tensor], whole: MatrixFunction
    ) -> Iterator[tuple[MatrixPart, torch.Tensor]]:
        """Yield each part of a matrix on this rank with its elements of `whole(part, matrix)`. Collective.

        Args:
            updates: Tensor to be gathered, for each flat parameter.
            whole: Operation on a whole matrix.
        """
        for g, b, matrices in self._buckets:
            bucket = self._bucket(g, b, updates) if not self._whole else None
            for number, divided in matrices:
                parameter = self._sharding.groups[g].parameters[number]
                part = self._local_parts.get(parameter)
                if not divided.needed:
                    continue
                place = self._sharding.groups[g].layout.places[number]
                begin = place.offset - self._sharding.groups[g].layout.bounds[b]
                if bucket is not None:
                    mine = bucket[begin : begin + place.numel]
                else:
                    update = updates.get(part.value) if part is not None else None
                    if update is None and divided.axis is None:
                        continue
                    mine = parameter.new_zeros(place.numel, dtype=torch.float32) if update is None else update.view(-1)
                matrix = divided.gather(mine, self._memory) if divided.axis is not None else mine
                if part is not None and part.value in updates:
                    result = whole(part, matrix.view(part.shape))
                    flat = divided.local_part(result).reshape(-1) if divided.axis is not None else result.reshape(-1)
                    yield part, flat[part.first : part.last]

    def _bucket(self, g: int, b: int, updates: Mapping[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return a bucket of all updates, gathered from the ranks' shares. Collective."""
        sharding = self._sharding
        group, shard = sharding.groups[g], sharding.shard
        lo, hi = group.layout.share(b, shard.rank)
        dtype = next((u.dtype for u in updates.values()), torch.float32)
        share = self._memory("share", hi - lo, dtype)
        for number, first, last, offset in group.layout.within(lo, hi):
            part = self._local_parts.get(group.parameters[number])
            if part is not None and part.value in updates:
                share[offset - lo : offset - lo + last - first].copy_(part.slice_of(updates[part.value]))
        everything = self._memory("bucket", (hi - lo) * shard.size, dtype)
        shard.all_gather(everything, share)
        return everything

    def _memory(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return scratch memory, at the same address in every call where it is large enough.

        Communication buffers are bound to the address of the exchanged memory.
        """
        scratch = self._scratch.get(name)
        if scratch is None or scratch.numel() < numel or scratch.dtype != dtype:
            device = (
                next(iter(self._local_parts.values())).value.device
                if self._local_parts
                else self._sharding.groups[0].device
            )
            scratch = self._scratch[name] = torch.zeros(numel, dtype=dtype, device=device)
        return scratch[:numel]


@dataclass(frozen=True)
class DividedMatrix:
    """Division of a matrix over the ranks of an axis.

    Attributes:
        needed: If true, this rank, or another rank of the axis, updates a part of the matrix.
        axis: Ranks of the axis; None if each of them has the whole matrix.
        slices: Part of each rank.
    """

    needed: bool
    axis: Communicator | None
    slices: tuple[Slice, ...]

    def gather(self, mine: torch.Tensor, memory: Callable[[str, int, torch.dtype], torch.Tensor]) -> torch.Tensor:
        """Return the whole matrix, flat, gathered from the ranks' parts. Collective over the axis.

        Args:
            mine: This rank's part, flat.
            memory: Function (name, numel, dtype) that returns scratch memory.
        """
        assert self.axis is not None
        counts = [part.numel for part in self.slices]
        everything = memory("parts", sum(counts), mine.dtype)
        self.axis.all_gather(everything, memory("part", mine.numel(), mine.dtype).copy_(mine), counts=counts)
        matrix = torch.empty(math.prod(self.slices[0].shape), dtype=mine.dtype, device=mine.device)
        for part, end in zip(self.slices, accumulate(counts), strict=True):
            for view, lo, box in _views(matrix, part):
                begin = end - part.numel + lo
                view.copy_(everything[begin : begin + box.numel].view(view.shape))
        return matrix

    def local_part(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole matrix, flat."""
        assert self.axis is not None
        part = self.slices[self.axis.rank]
        return torch.cat([view.reshape(-1) for view, _, _ in _views(matrix.contiguous(), part)])


def _views(matrix: torch.Tensor, part: Slice) -> Iterator[tuple[torch.Tensor, int, Box]]:
    """Yield, for each box of a part, its view of the matrix, its begin in the rank's tensor, and the box."""
    begin = 0
    for box in part.boxes:
        yield box.of(matrix), begin, box
        begin += box.numel


class TrustRatios(torch.optim.Optimizer):
    """Base of optimizers that scale each parameter's update by a ratio of norms; the ratio is 1 if a norm is 0.

    Attributes:
        gather: Object that sums squares over the ranks; None if the updated tensors are whole parameters.
    """

    needs_whole = True
    gather: SquaresSum | None = None
    # maps (value, group) to the tensor whose norm is compared with the parameter's
    _norm_tensor: Callable[..., torch.Tensor]
    _ratio: Callable[..., torch.Tensor]  # maps (norm of the parameter, norm of `_norm_tensor`, group)
    _apply: Callable[..., None]  # updates `value`; takes (value, scaled update, group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters once. Collective over the ranks that have parts of the parameters."""
        listed = [(v, group) for group in self.param_groups for v in group["params"] if v.grad is not None]
        groups = dict(listed)
        measured = {value: self._norm_tensor(value, group) for value, group in listed}
        parts, squares = self._begin(measured)
        for column, tensors in enumerate(({v: v for v in measured}, measured)):
            views = [_slice(tensors[value], first, last) for value, first, last, _ in parts]
            if views:
                norms = torch.stack(torch._foreach_norm(views, 2, dtype=torch.float64))
                squares[[number for *_, number in parts], column] = norms.square_()
        if self.gather is not None:
            self.gather.reduce_squares()
        norms = squares.sqrt()
        updates = {value: self._update(value, measured[value], group) for value, group in listed}
        for value, first, last, number in parts:
            weight, other = norms[number].unbind()
            ratio = torch.where((weight > 0) & (other > 0), self._ratio(weight, other, groups[value]), 1.0)
            view = _slice(updates[value], first, last)
            view.mul_(ratio.to(view.dtype))
        for value, group in listed:
            self._apply(value, updates[value], group)

    def _begin(self, measured: Mapping[torch.Tensor, torch.Tensor]) -> tuple[Parts, torch.Tensor]:
        """Return the parts of parameters that are updated, and zeros for the squares of all parameters."""
        if self.gather is not None:
            return [part for part in self.gather.parts if part[0] in measured], self.gather.squares.zero_()
        device = next((value.device for value in measured), torch.device("cpu"))
        parts = [(value, 0, value.numel(), number) for number, value in enumerate(measured)]
        return parts, torch.zeros(len(parts), 2, dtype=torch.float64, device=device)

    def _update(self, value: torch.Tensor, measured: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        """Return the tensor that the ratio scales; the caller may overwrite it."""
        return measured


def check_betas(betas: Sequence[float]) -> tuple[float, float]:
    """Return the decay factors of Adam's averages. Raises ValueError unless they are two numbers in [0, 1)."""
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), not {list(betas)}")
    return betas[0], betas[1]


class Lamb(TrustRatios):
    """Adam whose step for each parameter has a length proportional to the parameter's norm.

    Args:
        params, lr, betas, eps, weight_decay: Options of torch.optim.AdamW.
        least, most: Bounds of the ratio of norms, as in other implementations.
        correct: If true, correct the bias of the averages in the first steps.

    Reference:
        You et al. 2020, "Large batch optimization for deep learning", algorithm 2, whose function of the norm is the
        norm itself.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        least: float = 0.0,
        most: float = math.inf,
        correct: bool = True,
    ) -> None:
        if not 0.0 <= least <= most:
            raise ValueError(f"least and most must satisfy 0 <= least <= most, but they are {least} and {most}")
        defaults = {"lr": lr, "betas": check_betas(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"least": least, "most": most, "correct": correct})

    def _norm_tensor(self, value: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        gradient, state, (first, second) = value.grad, self.state[value], group["betas"]
        assert gradient is not None
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(value), torch.zeros_like(value)
        state["step"] += 1
        steps = float(state["step"]) if group["correct"] else math.inf
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        divisor = (state["exp_avg_sq"] / (1 - second**steps)).sqrt_().add_(group["eps"])
        return (state["exp_avg"] / (1 - first**steps)).div_(divisor).add_(value, alpha=group["weight_decay"])

    def _ratio(self, weight: torch.Tensor, other: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        return (weight / other).clamp(group["least"], group["most"])

    def _apply(self, value: torch.Tensor, update: torch.Tensor, group: Mapping[str, Any]) -> None:
        value.add_(update, alpha=-group["lr"])


class Lars(TrustRatios):
    """SGD with momentum whose gradient for each parameter is scaled to the parameter's norm.

    Args:
        params, lr, momentum, weight_decay: Options of torch.optim.SGD.
        trust_coefficient: Length of a step divided by the learning rate times the norm of the parameter.

    Reference:
        You et al. 2017, "Large batch training of convolutional networks", algorithm 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
    ) -> None:
        if not 0.0 <= momentum < 1.0 or trust_coefficient <= 0.0:
            raise ValueError(
                f"momentum must be in [0, 1) and trust_coefficient above 0, not {momentum} and {trust_coefficient}"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
        }
        super().__init__(params, defaults)

    def _norm_tensor(self, value: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        assert value.grad is not None
        return value.grad

    def _ratio(self, weight: torch.Tensor, other: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        return group["trust_coefficient"] * weight / (other + group["weight_decay"] * weight)

    def _update(self, value: torch.Tensor, measured: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        return measured.add(value, alpha=group["weight_decay"])

    def _apply(self, value: torch.Tensor, update: torch.Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[value]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(value)
        value.sub_(state["momentum_buffer"].mul_(group["momentum"]).add_(update, alpha=group["lr"]))


def _slice(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return elements [first, last) of a flat tensor as a view; the tensor itself, of any shape, if these are all."""
    return tensor if last - first == tensor.numel() else tensor.view(-1)[first:last]


class SquaresSum:
    """Sums the squares of every parameter over the ranks that have parts of it. The constructor is collective.

    Args:
        sharding: Sharding of the parameters.
        flat_parameters: Flat parameters whose norms are needed.
        axis: Ranks of the axis that divides parameters; None if there is none.

    Attributes:
        parts: This rank's parts of the parameters.
        squares: Sums of squares, float64 [parameters, 2]: two numbers to be summed for each parameter.

    Raises:
        InputError: Training must be reproducible and the sums would depend on the number of ranks, or the tensor ranks
            have different layouts.
    """

    def __init__(self, sharding: Sharding, flat_parameters: Sequence[FlatParameter], axis: Communicator | None) -> None:
        parameters = [p for group in sharding.groups for p in group.parameters]
        self._numbers = {p: number for number, p in enumerate(parameters)}
        self.set_flat_parameters(flat_parameters)
        device = flat_parameters[0].value.device if flat_parameters else sharding.groups[0].device
        self.squares = torch.zeros(len(parameters), 2, dtype=torch.float64, device=device)
        self._shard = sharding.shard if sharding.stage.states and sharding.shard.size > 1 else None
        self._axis, self._divided = axis, torch.tensor(_find_divided(parameters, axis), device=device)[:, None]
        if sharding.config.run.reproducible and (self._shard is not None or bool(self._divided.any())):
            raise refusal(
                "lamb and lars add up squares in an order that depends on the number of ranks, which run.reproducible "
                "forbids; use another optim.name, or parallel.zero 0 without parallel.tensor"
            )

    def set_flat_parameters(self, flat_parameters: Sequence[FlatParameter]) -> None:
        """Use these flat parameters from now on, in place of the earlier ones."""
        self.parts: Parts = [
            (flat.value, at, at + last - first, self._numbers[p])
            for flat in flat_parameters
            for p, first, last, at in flat.contents
        ]

    def reduce_squares(self) -> None:
        """Sum `squares` over the ranks, in place. Collective."""
        if self._shard is not None:
            self._shard.all_reduce(self.squares)
        if self._axis is not None:
            shared = torch.where(self._divided, self.squares, 0.0)
            self._axis.all_reduce(shared)
            self.squares.copy_(torch.where(self._divided, shared, self.squares))


def _find_divided(parameters: Sequence[nn.Parameter], axis: Communicator | None) -> list[bool]:
    """Return for each parameter whether the ranks of an axis divide it. Collective over these ranks."""
    whole = [math.prod(logical_of(p).shape) for p in parameters]
    mine = [p.numel() for p in parameters]
    divided = [numel < all_of_it for numel, all_of_it in zip(mine, whole, strict=True)]
    if axis is None:
        return [False] * len(parameters)
    answers = axis.all_gather_object([whole, divided, mine])
    sums = [sum(numels) for numels in zip(*(numels for _, _, numels in answers), strict=False)]
    if any(other[:2] != [whole, divided] for other in answers) or any(
        cut and total != all_of_it for cut, total, all_of_it in zip(divided, sums, whole, strict=True)
    ):
        raise refusal(
            "lamb and lars need each parameter to be either divided over the tensor ranks without overlap or whole on "
            "each of them; set parallel.tensor to 1"
        )
    return divided
