"""A mesh axis defined outside the package: it divides images along their height, and its ranks exchange rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import conv2d, pad

from mpitrain.comm import Communicator
from mpitrain.layout.boxes import split
from mpitrain.layout.mesh import PARTS, MeshAxis


class Height(MeshAxis):
    """A mesh axis along the height of images, set by parallel.axes = {"train.height_axis:Height" = 2}."""

    name = "height"
    divides = PARTS
    near = 15

    def take(self, x: torch.Tensor, y: Any, number: int, ranks: int) -> tuple[torch.Tensor, Any]:
        lo, hi = split(x.shape[-2], ranks)[number : number + 2]
        return x[..., lo:hi, :], y

    def divide(self, part: Any, group: Communicator) -> None:
        if group.size == 1:
            return
        for module in list(part.module.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Conv2d):
                    setattr(module, name, HaloConvolution(child, group))
                elif isinstance(child, MeanOfImage):
                    child.group = group


class HaloConvolution(nn.Module):
    """A convolution of stride 1 that receives the rows beyond its part from the ranks above and below."""

    def __init__(self, whole: nn.Conv2d, group: Communicator) -> None:
        super().__init__()
        self.weight, self.bias, self._group = whole.weight, whole.bias, group
        self._rows, self._columns = whole.padding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return conv2d(_Halo.apply(x, self._rows, self._group), self.weight, self.bias, padding=(0, self._columns))


class _Halo(torch.autograd.Function):
    """Pad x [batch, channels, height, width] with `rows` rows of each neighbour, or with zeros at the border."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: int, group: Communicator) -> torch.Tensor:
        ctx.rows, ctx.group = rows, group
        above, below = _neighbours(x[:, :, :rows], x[:, :, -rows:], group)
        return torch.cat([above, x, below], 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        rows, inner = ctx.rows, grad[:, :, ctx.rows : -ctx.rows].clone()
        above, below = _neighbours(grad[:, :, :rows], grad[:, :, -rows:], ctx.group)
        inner[:, :, :rows] += above
        inner[:, :, -rows:] += below
        return inner, None, None


def _neighbours(top: torch.Tensor, bottom: torch.Tensor, group: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bottom rows of the rank above and the top rows of the rank below; zeros at the border."""
    local_edges = torch.stack([top, bottom])
    edges = torch.empty(group.size, *local_edges.shape)
    group.all_gather(edges.view(-1), local_edges.reshape(-1), algorithm="ring")  # which sends what the formula says
    edges = pad(edges, [0] * (2 * local_edges.dim()) + [1, 1])
    return edges[group.rank, 1], edges[group.rank + 2, 0]


class MeanOfImage(nn.Module):
    """The mean [batch, channels] of x [batch, channels, height, width] over the parts of all ranks."""

    group: Communicator | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return x.mean((2, 3))
        sums = torch.cat([x.sum((2, 3)), x.new_full((len(x), 1), float(x.shape[2] * x.shape[3]))], 1)
        sums = _Sum.apply(sums, self.group)
        return sums[:, :-1] / sums[:, -1:]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Communicator) -> torch.Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(grad, ctx.group), None


def _summed(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    x = x.clone()
    group.all_reduce(x, algorithm="ring")
    return x


def network(description: Any) -> tuple[nn.Module, nn.Module]:
    """Return two convolutions with batch norms and their loss, for `model.factory`."""
    layers = [nn.Unflatten(1, (1, -1)), nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 8, 5, padding=2), nn.BatchNorm2d(8), nn.ReLU(), MeanOfImage(), nn.Linear(8, 3)]
    return nn.Sequential(*layers), nn.CrossEntropyLoss()
