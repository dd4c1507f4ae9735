"""Image axes of a sample: which ones are height, width and channels."""

from __future__ import annotations

from collections.abc import Sequence

_CHANNELS = (1, 3, 4)


def is_image(shape: Sequence[int]) -> bool:
    """Return True if a shape may be [height, width], [channels, height, width] or [height, width, channels]."""
    return len(shape) in (2, 3)


def image_form(shape: Sequence[int]) -> tuple[int, tuple[int, ...], bool]:
    """Return (channels, (height, width), True if the channels are the last axis) of an image shape."""
    last = channels_last(shape)
    return 1 if len(shape) == 2 else shape[-1] if last else shape[0], tuple(shape[:2] if last else shape[-2:]), last


def channels_last(shape: Sequence[int]) -> bool:
    """Return True if the channels of an image shape come after its height and width."""
    return len(shape) == 3 and shape[-1] in _CHANNELS and shape[0] not in _CHANNELS
