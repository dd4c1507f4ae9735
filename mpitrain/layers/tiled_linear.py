"""A linear layer that is too large to be gathered at once, split into a grid of smaller ones.

This is the memory-centric tiling of ZeRO-Infinity (Rajbhandari et al. 2021, section 5.1.3). If parameters are sharded,
each tile is gathered separately, so that only one tile at a time is whole. With x [..., in], weight [out, in] and 2 x 2
tiles:

    y0 = x0 W00' + x1 W01' + b0        x = [x0 x1]  along in
    y1 = x0 W10' + x1 W11' + b1        y = [y0 y1]  along out
"""

from __future__ import annotations

from itertools import pairwise, product

import torch
from torch import nn

from mpitrain.errors import InputError
from mpitrain.layout.boxes import split


class TiledLinear(nn.Module):
    """An nn.Linear split into in_tiles x out_tiles tiles; the sizes need not be divisible.

    Args:
        in_features: Size of an input.
        out_features: Size of an output.
        bias: If true, add a bias to the output.
        in_tiles: Number of tiles along the inputs.
        out_tiles: Number of tiles along the outputs.

    Shape:
        Input [..., in_features], output [..., out_features].

    Raises:
        InputError: There are more tiles than features.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, in_tiles: int = 1, out_tiles: int = 1
    ) -> None:
        super().__init__()
        if not (1 <= in_tiles <= in_features and 1 <= out_tiles <= out_features):
            raise InputError(
                f"a linear layer of {in_features} x {out_features} cannot have {in_tiles} x {out_tiles} tiles; use at "
                "least 1, and at most as many as there are features"
            )
        self.in_features, self.out_features = in_features, out_features
        self._columns = [hi - lo for lo, hi in pairwise(split(in_features, in_tiles))]
        rows = [hi - lo for lo, hi in pairwise(split(out_features, out_tiles))]
        # the bias of an output is added once, by its first tile
        self.tiles = nn.ModuleList(
            nn.Linear(width, height, bias=bias and number == 0)
            for height in rows
            for number, width in enumerate(self._columns)
        )

    @staticmethod
    def of(linear: nn.Linear, *, in_tiles: int = 1, out_tiles: int = 1) -> TiledLinear:
        """Return a tiled layer with the values of a plain one.

        Args:
            linear: Layer to copy.
            in_tiles: Number of tiles along the inputs.
            out_tiles: Number of tiles along the outputs.
        """
        width, height = linear.in_features, linear.out_features
        with torch.random.fork_rng(devices=[]):  # the first values of the tiles are not used
            layer = TiledLinear(width, height, linear.bias is not None, in_tiles=in_tiles, out_tiles=out_tiles)
        layer.to(linear.weight.device, linear.weight.dtype).train(linear.training)
        places = product(pairwise(split(height, out_tiles)), pairwise(split(width, in_tiles)))
        with torch.no_grad():
            for tile, ((top, bottom), (left, right)) in zip(layer.tiles, places, strict=True):
                assert isinstance(tile, nn.Linear)
                tile.weight.copy_(linear.weight[top:bottom, left:right]).requires_grad_(linear.weight.requires_grad)
                if tile.bias is not None:
                    tile.bias.copy_(linear.bias[top:bottom])
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.split(self._columns, dim=-1)
        outputs, tiles = [], iter(self.tiles)
        for _ in range(len(self.tiles) // len(parts)):
            total = next(tiles)(parts[0])
            for part in parts[1:]:
                total = total + next(tiles)(part)
            outputs.append(total)
        return torch.cat(outputs, dim=-1) if len(outputs) > 1 else outputs[0]
