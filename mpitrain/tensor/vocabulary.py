"""Embedding and cross-entropy whose vocabulary is divided over the ranks of the tensor axis.

Any vocabulary size: the parts are those of `layout.split`, and no padding is ever seen. Cross-entropy is taken from
each rank's part of the scores (Shoeybi et al. 2019, section 3): of every token the ranks exchange four numbers, not
its scores. `judge` tells in the same way how good divided scores are; one more number of every token is exchanged where
it is asked how many classes are above the right one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
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
        embedding: The whole layer, the same on all ranks, of which this rank's part is kept.
        axis: The ranks.
        sequence: Leave the output divided along the sequence.

    Raises:
        IndexError: In forward on the CPU, as torch does, for a token outside the vocabulary. On other devices, where
            the host would have to wait to find that out, such a token's row is NaN.

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
            part = _marked(rows.masked_fill(elsewhere.unsqueeze(-1), 0), tokens, self.num_embeddings)
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
    """The cross-entropy of torch.nn.functional, from scores that are divided over the ranks of the tensor axis.

    Args:
        scores: [..., part], this rank's part of the scores, of any float dtype; computed with in at least fp32.
        y: [...], int64, the right classes.
        axis: The ranks.
        classes: Of all ranks together.
        ignore_index: The y that does not count.
        label_smoothing: As of torch.nn.functional.cross_entropy.
        by_sample: Take the mean over the tokens that count of each sample (the first dimension of y), 0 where none
            does, and of these the mean.

    Returns:
        The mean over the tokens that count, in nats, a scalar, the same on all ranks.

    Raises:
        IndexError: A y is none of the classes, on the CPU. On other devices the mean is NaN then.
    """
    return _CrossEntropy.apply(scores, y, axis, classes, ignore_index, label_smoothing, by_sample)


class VocabularyCrossEntropy(nn.Module):
    """`cross_entropy` of an axis and a number of classes, in place of a model's own criterion(scores, y).

    Args:
        axis: The ranks.
        classes: Of all ranks together.
        options: Of `cross_entropy`: ignore_index, label_smoothing, by_sample.
    """

    def __init__(self, axis: Axis, classes: int, **options: Any) -> None:
        super().__init__()
        self.axis, self.classes, self._options = axis, classes, options
        self.ignore_index = options.get("ignore_index", IGNORED)
        self.counted = len if options.get("by_sample") else None  # see `layers.loss_terms`

    def forward(self, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(scores, y, self.axis, self.classes, **self._options)


class _CrossEntropy(torch.autograd.Function):
    """Computes the loss, and keeps what its gradient needs of this rank's part of the scores."""

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
                f"rank {axis.rank} has {stop - start} of the {classes} classes, but was given scores of "
                f"{scores.shape[-1]}; pass the output of a head that is divided by vocabulary"
            )
        own = y != ignore_index  # in the shape of y, whose first dimension is that of samples
        y = y.reshape(-1)
        counted = y != ignore_index
        targets = y.where(counted, 0)
        _check_range(targets, classes, "target")
        dtype = torch.promote_types(scores.dtype, torch.float32)
        each = own.flatten(1 if by_sample else 0).to(dtype)
        counts = each.sum(1, keepdim=True).clamp(min=1) * len(each) if by_sample else own.sum()
        share = (each / counts).flatten()  # what each token's loss counts for in the mean
        wide = scores.reshape(len(y), stop - start).to(dtype)
        here = (y >= start) & (y < stop) & counted
        column = (y - start).clamp_(0, max(0, stop - start - 1)).unsqueeze(-1)  # any one, where y is another rank's

        # of each token: the largest score here, the sum of exponentials of the scores less it, y's score, all scores
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
        told = axis.all_gather(numbers, 0, lengths=[4] * axis.size)[0].view(axis.size, 4, len(y))

        largest = told[:, 0].amax(0)
        total = ((told[:, 0] - largest).exp_() * told[:, 1]).sum(0)
        loss = total.log() + largest - (1 - label_smoothing) * told[:, 2].sum(0)
        if label_smoothing:
            loss -= label_smoothing / classes * told[:, 3].sum(0)
        # exponentials here times this are the probabilities, already weighed for the mean
        weight = (numbers[0] - largest).exp_() / total
        ctx.save_for_backward(shares, weight, share, here, column)
        ctx.smoothing, ctx.classes = label_smoothing, classes
        ctx.shape, ctx.dtype = scores.shape, scores.dtype
        return (_marked(loss.masked_fill_(~counted, 0), targets, classes) * share).sum()

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
    """On the CPU, where it costs next to nothing; a rank that has no such row would take it for another's.

    On a device it would make the host wait for all that the device has been asked: see `_marked`.
    """
    if not is_accelerator(numbers.device) and numbers.numel():
        low, high = numbers.aminmax()
        if int(low) < 0 or int(high) >= size:
            raise IndexError(f"{name} {int(low) if int(low) < 0 else int(high)} is not between 0 and {size - 1}")


def _marked(rows: torch.Tensor, numbers: torch.Tensor, size: int) -> torch.Tensor:
    """On a device, the rows with NaN for each number that is none of the first `size`; the CPU has refused these."""
    if not is_accelerator(numbers.device):
        return rows
    strange = (numbers < 0) | (numbers >= size)
    return rows.masked_fill(strange.unsqueeze(-1) if rows.dim() > strange.dim() else strange, float("nan"))


@torch.no_grad()
def judge(
    scores: torch.Tensor, y: torch.Tensor, axis: Axis, classes: int, *, top: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What divided scores of targets come to. Collective over the axis.

    Args:
        scores: [..., part], this rank's part of the scores.
        y: [...], int64, the right classes; what is none of them has no meaning in the results.
        axis: The ranks.
        classes: Of all ranks together.
        top: Whether it is asked how many classes are above the right one.

    Returns:
        Of each target, [targets] and the same on all ranks: the cross-entropy in nats, the class with the largest
        score, and how many other classes have a score that is not smaller than the right one's (None if not asked).
    """
    bounds = axis.bounds(classes)
    start, stop = bounds[axis.rank], bounds[axis.rank + 1]
    y = y.reshape(-1)
    wide = scores.reshape(len(y), stop - start).to(torch.promote_types(scores.dtype, torch.float32))
    here = (y >= start) & (y < stop)

    # of each target: the largest score here, whose it is, the sum of exponentials of the scores less it, y's score
    numbers = wide.new_zeros(4, len(y), dtype=torch.float64)
    numbers[0].fill_(float("-inf"))
    if stop > start:
        largest, at = wide.max(-1)
        numbers[0], numbers[1] = largest, at + start
        numbers[2] = (wide - largest.unsqueeze(-1)).exp_().sum(-1)
        column = (y - start).clamp(0, stop - start - 1).unsqueeze(-1)
        numbers[3] = wide.gather(-1, column).squeeze(-1).masked_fill_(~here, 0)
    told = axis.all_gather(numbers, 0, lengths=[4] * axis.size)[0].view(axis.size, 4, len(y))
    most, whose = told[:, 0].max(0)
    right = told[:, 3].sum(0)
    logarithm = ((told[:, 0] - most).exp_() * told[:, 2]).sum(0).log_() + most
    guess = told[:, 1].gather(0, whose.unsqueeze(0)).squeeze(0).long()
    if not top:
        return logarithm - right, guess, None
    above = (~(wide.double() < right.unsqueeze(-1))).sum(-1).double().unsqueeze(0)
    total = axis.all_gather(above, 0, lengths=[1] * axis.size)[0].view(axis.size, len(y)).sum(0)
    return logarithm - right, guess, total.long() - 1


@torch.no_grad()
def whole(scores: torch.Tensor, axis: Axis, classes: int) -> torch.Tensor:
    """The scores [..., classes] of which each rank has a part [..., part]. Collective over the axis."""
    lengths = [hi - lo for lo, hi in pairwise(axis.bounds(classes))]
    return axis.all_gather(scores, scores.dim() - 1, lengths=lengths)[0]
