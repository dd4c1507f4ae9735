"""Which axes of a sample are those of an image."""

from __future__ import annotations

from collections.abc import Sequence

_CHANNELS = (1, 3, 4)


def is_image(shape: Sequence[int]) -> bool:
    """Whether samples of a shape are [height, width], [channels, height, width] or [height, width, channels]."""
    return len(shape) in (2, 3)


def channels_last(shape: Sequence[int]) -> bool:
    """Whether the channels of an image come after its height and width."""
    return len(shape) == 3 and shape[-1] in _CHANNELS and shape[0] not in _CHANNELS
