"""Residual networks of 18, 34, 50 and 101 layers (He et al. 2015, "Deep Residual Learning for Image Recognition").

Two details follow common practice since then: the stride of a bottleneck is on its 3x3 convolution ("v1.5"), and the
last BatchNorm of each block starts at zero, so that a new block is the identity (Goyal et al. 2017).

    images -> stem -> stage 1 (w) -> stage 2 (2w, half size) -> stage 3 (4w) -> stage 4 (8w) -> mean -> head

w is the width of the stem; the paper uses 64. Images up to 64 pixels get the stem that the paper uses for CIFAR (3x3,
no stride, no pooling); larger images get 7x7 with stride 2 and a 3x3 max-pool with stride 2.

Weights are drawn from torch's default generator: after the same `torch.manual_seed` they are equal on every rank.
"""

from __future__ import annotations

import torch
from torch import nn

from mpitrain.models.task import BlockModel, Criterion

SMALL_IMAGE = 64  # largest longer side, in pixels
WIDER = 4  # output channels of a bottleneck, in multiples of its width


class ResidualBlock(nn.Module):
    """Convolutions with a shortcut: two of 3x3; or, as a bottleneck, 1x1, 3x3 and 1x1 with `WIDER` times the width.

    A BatchNorm follows each convolution, and a ReLU follows all but the last.
    """

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        convolutions = [(inputs, width, 3, stride), (width, width, 3, 1)]  # inputs, outputs, kernel and stride
        if bottleneck:
            convolutions = [(inputs, width, 1, 1), (width, width, 3, stride), (width, WIDER * width, 1, 1)]
        layers: list[nn.Module] = []
        for channels, outputs, kernel, own_stride in convolutions:
            layers += [convolution(channels, outputs, kernel, own_stride), nn.BatchNorm2d(outputs)]
            layers.append(nn.ReLU(inplace=True))
        self.residual = nn.Sequential(*layers[:-1])
        self.shortcut = shortcut(inputs, convolutions[-1][1], stride)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.residual(x) + self.shortcut(x))


# for each number of layers: (True if blocks are bottlenecks, number of blocks in each stage)
STAGES = {
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
}


class ResNet(BlockModel):
    """A residual network for images.

    Images without a channel axis, [batch, height, width], have one channel.

    Args:
        layers: 18, 34, 50 or 101.
        width: Channels after the stem.
        channels: Channels of an image.
        outputs: Numbers in an output.
        criterion: Loss function of (output, y).
        small: If true, use the stem without strides.
        channels_last: If true, images are [batch, height, width, channels].

    Shape:
        Images [batch, channels, height, width] of any real dtype, output [batch, outputs].
    """

    undivided = (
        "model.name resnet cannot be divided over tensor ranks: its layers are convolutions, whose activations are "
        "larger than their weights, so the ranks would wait for sums of them; set parallel.tensor to 1 and use "
        "parallel.data or parallel.pipeline"
    )

    def __init__(
        self,
        layers: int,
        width: int,
        channels: int,
        outputs: int,
        criterion: Criterion,
        *,
        small: bool,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        bottleneck, depths = STAGES[layers]
        self.stem = Stem(channels, width, small, channels_last)
        stages, inputs = [], width
        for index, depth in enumerate(depths):
            stage_width = width * 2**index
            first = ResidualBlock(inputs, stage_width, 2 if index > 0 else 1, bottleneck)
            inputs = WIDER * stage_width if bottleneck else stage_width
            more_blocks = (ResidualBlock(inputs, stage_width, 1, bottleneck) for _ in range(depth - 1))
            stages.append(nn.Sequential(first, *more_blocks))
        self.stages = nn.ModuleList(stages)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(inputs, outputs)
        self.criterion = criterion
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, ResidualBlock):
                nn.init.zeros_(module.residual[-1].weight)  # type: ignore[arg-type]

    def pipeline_blocks(self) -> list[tuple[str, nn.Module]]:
        """Return (name, module) in order; applying them to images one after the other equals `model(images)`."""
        blocks = [
            (f"stages.{index}.{name}", block)
            for index, stage in enumerate(self.stages)
            for name, block in stage.named_children()
        ]
        return [("stem", self.stem), *blocks, ("pool", self.pool), ("head", self.head)]


class Stem(nn.Module):
    """First layers of a residual network: images to [batch, width, H, W].

    H and W are the sides of the image if small, else a quarter of them.
    """

    def __init__(self, channels: int, width: int, small: bool, channels_last: bool) -> None:
        super().__init__()
        self.channels_last = channels_last
        self.convolution = convolution(channels, width, 3) if small else convolution(channels, width, 7, 2)
        self.norm = nn.BatchNorm2d(width)
        self.activation = nn.ReLU(inplace=True)
        self.pool = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images.to(self.convolution.weight.dtype)
        if x.dim() == 3:
            x = x.unsqueeze(1)
        elif self.channels_last:
            x = x.movedim(-1, 1)
        return self.pool(self.activation(self.norm(self.convolution(x))))


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution with padding that keeps the size, and without bias, because a BatchNorm follows.

    Args:
        inputs: Input channels.
        outputs: Output channels.
        kernel: Side of the kernel, an odd number of pixels.
        stride: Stride in pixels.
    """
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Return the identity, or a 1x1 projection if the shape changes (the paper's option B).

    Args:
        inputs: Input channels.
        outputs: Output channels.
        stride: Stride of the block.
    """
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
