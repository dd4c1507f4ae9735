"""Embedding and cross-entropy whose vocabulary is divided over the ranks of the tensor axis.

The vocabulary may have any size: the parts are those of `layout.split`, without padding. The cross-entropy is computed
from each rank's part of the scores (Shoeybi et al. 2019, section 3): the ranks exchange four numbers per token instead
of its scores. `evaluate_scores` works in the same way. If the number of classes above the right one is requested, it
exchanges one more number per token.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mpitrain.comm.memory.device import is_accelerator
from mpitrain.errors import InputError
from mpitrain.tensor.axis import Axis, reduce, reduce_scatter
from mpitrain.tensor.linear import SEQUENCE, Features, part_of

IGNORED = -100  # torch's default


class VocabularyParallelEmbedding(nn.Module):
    """An embedding whose rows are divided over the ranks of the tensor axis.

    Args:
        embedding: Whole layer, the same on all ranks; this rank's part of it is kept.
        axis: Ranks of the tensor axis.
        sequence: If true, leave the output divided along the sequence.

    Raises:
        IndexError: In forward on the CPU, as in torch, for a token outside the vocabulary. On other devices, where this
            check would make the host wait, the row of such a token is NaN.

    Shape:
        Input [...], int64, tokens of the whole vocabulary.
        Output [..., width], the same on all ranks; with `sequence` [..., part of sequence, width].
    """

    def __init__(self, embedding: nn.Embedding, axis: Axis, *, sequence: bool = False) -> None:
        super().__init__()
        self.axis, self.sequence = axis, sequence
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        bounds = axis.bounds(embedding.num_embeddings)
        self.start, self.stop = bounds[axis.rank], bounds[axis.rank + 1]
        padding = embedding.padding_idx
        inside = padding is not None and self.start <= padding < self.stop
        self.padding_idx = padding - self.start if padding is not None and inside else None
        self.weight = part_of(embedding.weight, 0, Features((embedding.num_embeddings,)), axis)
        self.training = embedding.training

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.axis.size == 1:
            return functional.embedding(tokens, self.weight, self.padding_idx)
        _check_range(tokens, self.num_embeddings, "token")
        elsewhere = (tokens < self.start) | (tokens >= self.stop)
        if self.stop > self.start:
            local = (tokens - self.start).masked_fill_(elsewhere, 0)
            rows = functional.embedding(local, self.weight, self.padding_idx)
            part = _mask_invalid(rows.masked_fill(elsewhere.unsqueeze(-1), 0), tokens, self.num_embeddings)
        else:  # fewer tokens than ranks
            part = self.weight.new_zeros(*tokens.shape, self.embedding_dim) + self.weight.sum()
        return reduce_scatter(part, self.axis, SEQUENCE) if self.sequence else reduce(part, self.axis)

    def extra_repr(self) -> str:
        return f"{self.stop - self.start} of {self.num_embeddings}, {self.embedding_dim}"


def cross_entropy(
    scores: torch.Tensor,
    y: torch.Tensor,
    axis: Axis,
    classes: int,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    *,
    by_sample: bool = False,
) -> torch.Tensor:
    """Return the cross-entropy of torch.nn.functional for scores that are divided over the tensor axis. Collective.

    Args:
        scores: Scores [..., part], this rank's part, any float dtype; computed in at least fp32.
        y: Right classes [...], int64.
        axis: Ranks of the tensor axis.
        classes: Number of classes of all ranks together.
        ignore_index: Value of y that is not counted.
        label_smoothing: Label smoothing, as in torch.nn.functional.cross_entropy.
        by_sample: If true, take the mean over the counted tokens of each sample (the first dimension of y; 0 if there
            are none), and then the mean over samples.

    Returns:
        The mean over the counted tokens in nats, a scalar, the same on all ranks.

    Raises:
        IndexError: A y is not one of the classes, on the CPU. On other devices the result is then NaN.
    """
    return _CrossEntropy.apply(scores, y, axis, classes, ignore_index, label_smoothing, by_sample)


class VocabularyCrossEntropy(nn.Module):
    """A criterion(scores, y) that applies `cross_entropy` with a fixed axis and number of classes.

    Args:
        axis: Ranks of the tensor axis.
        classes: Number of classes of all ranks together.
        options: Options of `cross_entropy`: ignore_index, label_smoothing, by_sample.
    """

    def __init__(self, axis: Axis, classes: int, **options: Any) -> None:
        super().__init__()
        self.axis, self.classes, self._options = axis, classes, options
        self.ignore_index = options.get("ignore_index", IGNORED)
        self.counted = len if options.get("by_sample") else None  # see `layers.loss_terms`

    def forward(self, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(scores, y, self.axis, self.classes, **self._options)


class _CrossEntropy(torch.autograd.Function):
    """Autograd node of the loss, which saves the data that its gradient needs for this rank's part of the scores."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: torch.Tensor,
        y: torch.Tensor,
        axis: Axis,
        classes: int,
        ignore_index: int,
        label_smoothing: float,
        by_sample: bool,
    ) -> torch.Tensor:
        bounds = axis.bounds(classes)
        start, stop = bounds[axis.rank], bounds[axis.rank + 1]
        if scores.shape[-1] != stop - start:
            raise InputError(
                f"rank {axis.rank} has {stop - start} of the {classes} classes, but got scores of "
                f"{scores.shape[-1]}; pass the output of a head that is divided by vocabulary"
            )
        mask = y != ignore_index  # in the shape of y, whose first dimension is that of samples
        y = y.reshape(-1)
        counted = y != ignore_index
        targets = y.where(counted, 0)
        _check_range(targets, classes, "target")
        dtype = torch.promote_types(scores.dtype, torch.float32)
        each = mask.flatten(1 if by_sample else 0).to(dtype)
        counts = each.sum(1, keepdim=True).clamp(min=1) * len(each) if by_sample else mask.sum()
        share = (each / counts).flatten()  # weight of each token's loss in the mean
        wide = scores.reshape(len(y), stop - start).to(dtype)
        here = (y >= start) & (y < stop) & counted
        column = (y - start).clamp_(0, max(0, stop - start - 1)).unsqueeze(-1)  # any column if y is another rank's

        # per token: the largest score here, the sum of exp(score - largest), the score of y, the sum of all scores
        numbers = wide.new_zeros(4, len(y))
        if stop > start:
            torch.amax(wide, -1, out=numbers[0])
            shares = (wide - numbers[0].unsqueeze(-1)).exp_()
            torch.sum(shares, -1, out=numbers[1])
            numbers[2] = wide.gather(-1, column).squeeze(-1).masked_fill_(~here, 0)
        else:
            shares = wide
            numbers[0].fill_(float("-inf"))
        if label_smoothing:
            torch.sum(wide, -1, out=numbers[3])
        all_numbers = axis.all_gather(numbers, 0, lengths=[4] * axis.size)[0].view(axis.size, 4, len(y))

        largest = all_numbers[:, 0].amax(0)
        total = ((all_numbers[:, 0] - largest).exp_() * all_numbers[:, 1]).sum(0)
        loss = total.log() + largest - (1 - label_smoothing) * all_numbers[:, 2].sum(0)
        if label_smoothing:
            loss -= label_smoothing / classes * all_numbers[:, 3].sum(0)
        # the exponentials here times this are the probabilities
        weight = (numbers[0] - largest).exp_() / total
        ctx.save_for_backward(shares, weight, share, here, column)
        ctx.smoothing, ctx.classes = label_smoothing, classes
        ctx.shape, ctx.dtype = scores.shape, scores.dtype
        return (_mask_invalid(loss.masked_fill_(~counted, 0), targets, classes) * share).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        shares, weight, share, here, column = ctx.saved_tensors
        each = grad.to(shares.dtype) * share
        into = shares * (weight * each).unsqueeze(-1)
        if ctx.smoothing:
            into -= (each * (ctx.smoothing / ctx.classes)).unsqueeze(-1)
        if into.shape[-1]:
            right = (each * (1 - ctx.smoothing)).masked_fill_(~here, 0).unsqueeze(-1)
            into.scatter_(-1, column, into.gather(-1, column) - right)
        return into.view(ctx.shape).to(ctx.dtype), None, None, None, None, None, None


def _check_range(numbers: torch.Tensor, size: int, name: str) -> None:
    """Raise IndexError on the CPU for numbers outside [0, size), which would otherwise be taken for another rank's.

    On a device the check would make the host wait for all queued work; `_mask_invalid` is used there instead. Fake
    tensors have no numbers.
    """
    if not is_accelerator(numbers.device) and numbers.numel() and not isinstance(numbers, FakeTensor):
        low, high = numbers.aminmax()
        if int(low) < 0 or int(high) >= size:
            raise IndexError(f"{name} {int(low) if int(low) < 0 else int(high)} is not between 0 and {size - 1}")


def _mask_invalid(rows: torch.Tensor, numbers: torch.Tensor, size: int) -> torch.Tensor:
    """Return the rows, with NaN for each number outside [0, size) if they are on a device.

    On the CPU `_check_range` has already raised an error for such numbers.
    """
    if not is_accelerator(numbers.device):
        return rows
    strange = (numbers < 0) | (numbers >= size)
    return rows.masked_fill(strange.unsqueeze(-1) if rows.dim() > strange.dim() else strange, float("nan"))


@torch.no_grad()
def evaluate_scores(
    scores: torch.Tensor, y: torch.Tensor, axis: Axis, classes: int, *, top: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Evaluate divided scores against the right classes. Collective over the axis.

    Args:
        scores: Scores [..., part], this rank's part.
        y: Right classes [...], int64; the results for a y that is not a class have no meaning.
        axis: Ranks of the tensor axis.
        classes: Number of classes of all ranks together.
        top: If true, also count the classes whose score is not below that of the right class.

    Returns:
        Three tensors [targets], the same on all ranks: the cross-entropy in nats, the class with the largest score, and
        the number of other classes whose score is not smaller than that of the right class (None without `top`).
    """
    bounds = axis.bounds(classes)
    start, stop = bounds[axis.rank], bounds[axis.rank + 1]
    y = y.reshape(-1)
    wide = scores.reshape(len(y), stop - start).to(torch.promote_types(scores.dtype, torch.float32))
    here = (y >= start) & (y < stop)

    # per target: the largest score here, its class, the sum of exp(score - largest), the score of y
    numbers = wide.new_zeros(4, len(y), dtype=torch.float64)
    numbers[0].fill_(float("-inf"))
    if stop > start:
        largest, at = wide.max(-1)
        numbers[0], numbers[1] = largest, at + start
        numbers[2] = (wide - largest.unsqueeze(-1)).exp_().sum(-1)
        column = (y - start).clamp(0, stop - start - 1).unsqueeze(-1)
        numbers[3] = wide.gather(-1, column).squeeze(-1).masked_fill_(~here, 0)
    all_numbers = axis.all_gather(numbers, 0, lengths=[4] * axis.size)[0].view(axis.size, 4, len(y))
    most, whose = all_numbers[:, 0].max(0)
    right = all_numbers[:, 3].sum(0)
    logarithm = ((all_numbers[:, 0] - most).exp_() * all_numbers[:, 2]).sum(0).log_() + most
    guess = all_numbers[:, 1].gather(0, whose.unsqueeze(0)).squeeze(0).long()
    if not top:
        return logarithm - right, guess, None
    above = (~(wide.double() < right.unsqueeze(-1))).sum(-1).double().unsqueeze(0)
    total = axis.all_gather(above, 0, lengths=[1] * axis.size)[0].view(axis.size, len(y)).sum(0)
    return logarithm - right, guess, total.long() - 1


@torch.no_grad()
def gather_scores(scores: torch.Tensor, axis: Axis, classes: int) -> torch.Tensor:
    """Return whole scores [..., classes], gathered from each rank's part. Collective over the axis.

    Args:
        scores: Scores [..., part], this rank's part.
        axis: Ranks of the tensor axis.
        classes: Number of classes of all ranks together.
    """
    lengths = [hi - lo for lo, hi in pairwise(axis.bounds(classes))]
    return axis.all_gather(scores, scores.dim() - 1, lengths=lengths)[0]
