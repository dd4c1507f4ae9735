"""Batches on their way to a device: augmented, and copied while the device computes earlier ones.

    host thread      batch k is read into pinned memory
    side stream      batch k+1 is copied      batch k+2 is copied       at most `ahead` batches before their use
    current stream   batch k is computed, after the event of its copy

Copies from pinned memory overlap with computation. A pinned tensor is kept until its copy is complete. A batch's
memory on the device is not reused before the consumer's stream has finished the work that uses it.

For training, images are shifted and mirrored at random, as set by data.augment.

    crop   shifted by up to `padding` pixels vertically and horizontally; pixels that enter at the border are 0
           (as in CIFAR training, He et al. 2015, section 4.2: padded, then cropped at a random place)
    flip   mirrored left to right with probability 1/2

The random numbers of a sample are a function of (seed, epoch, sample id): they are the same for any number of ranks,
any batch and any thread, and after a resume.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from mpitrain.choices import Augmentation
from mpitrain.comm.memory import device
from mpitrain.data.dataset import Description, Ids
from mpitrain.data.order import mix64
from mpitrain.errors import InputError
from mpitrain.layers.images import channels_last, is_image

T = TypeVar("T")


def on_device(batches: Iterable[T], to: torch.device, ahead: int = 2) -> Iterator[T]:
    """Yield the batches of an iterable with their tensors copied to a device.

    Args:
        batches: Tensors, or tuples, lists, mappings and dataclasses of them; other values in them are kept unchanged.
        to: Device. For the CPU, the batches are yielded unchanged.
        ahead: Number of batches that are copied before they are requested.

    Raises:
        BaseException: An error raised by `batches`, when the batch is requested that would have come there.
    """
    if not device.is_accelerator(to):
        yield from batches
        return
    stream, source = device.new_stream(to), iter(batches)
    coming: deque[tuple[T, torch.Event]] = deque()
    copying: deque[tuple[T, torch.Event]] = deque()  # pinned batches, each until its copy is complete
    end: BaseException | None = None
    while True:
        while end is None and len(coming) <= ahead:
            try:
                host = pin(next(source), to)
            except BaseException as error:  # raised below, in its turn
                end = error
                break
            with stream:
                there = map_tensors(lambda t: t.to(to, non_blocking=True), host)
            copied = device.record_event(to, stream)
            coming.append((there, copied))
            copying.append((host, copied))
        if not coming:
            if isinstance(end, StopIteration):
                return
            assert end is not None
            raise end
        batch, copied = coming.popleft()
        device.current_stream(to).wait_event(copied)
        map_tensors(_record_use, batch)
        while copying and copying[0][1].query():
            copying.popleft()
        yield batch
        del batch


def pin(batch: T, to: torch.device) -> T:
    """Return a copy of a batch in pinned memory, from which a device copies while the host goes on.

    Any thread may call it. For the CPU, the batch is returned unchanged.

    Args:
        batch: Batch, as in `on_device`.
        to: Device that the batch will be copied to.
    """
    if not device.is_accelerator(to):
        return batch
    device.use(to)  # otherwise a new thread uses device 0 and allocates memory there

    def pin_tensor(tensor: torch.Tensor) -> torch.Tensor:
        if device.is_accelerator(tensor.device) or tensor.is_pinned():
            return tensor
        return device.empty_pinned(tensor.shape, tensor.dtype, to).copy_(tensor)

    return map_tensors(pin_tensor, batch)


def _record_use(tensor: torch.Tensor) -> torch.Tensor:
    tensor.record_stream(device.current_stream(tensor.device))  # torch's annotation names the older stream class
    return tensor


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Return a batch with a function applied to every tensor in it, in tuples, lists, mappings and dataclasses.

    Args:
        change: Function of a tensor that returns its replacement.
        batch: Batch, as in `on_device`.
    """
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(change, each) for key, each in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = (map_tensors(change, each) for each in batch)
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        values = {f.name: map_tensors(change, getattr(batch, f.name)) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **values)
    return batch


_STEP = np.uint64(0x9E3779B97F4A7C15)
_NOT_THE_ORDER = np.uint64(0x6175676D656E7421)  # makes these numbers independent of `order`


@dataclass(frozen=True)
class Augment:
    """Random augmentation of the images of a batch.

    Attributes:
        names: Augmentations: "crop", "flip", or both.
        padding: Largest shift of "crop", in pixels.
        seed: Seed of the random numbers.
    """

    names: tuple[Augmentation, ...]
    padding: int
    seed: int

    def check(self, data: Description) -> None:
        """Raise InputError if the data is not images, or the images are too small for the shifts."""
        if not self.names:
            return
        if data.kind != "arrays" or not is_image(data.x_shape) or data.x_dtype != np.float32:
            shape = "tokens" if data.kind == "tokens" else f"{data.x_dtype} of shape {tuple(data.x_shape)}"
            raise InputError(f"data.augment is for images, but the data are {shape}; remove it")
        sides = data.x_shape[:2] if channels_last(data.x_shape) else data.x_shape[-2:]
        if "crop" in self.names and self.padding >= min(sides):
            raise InputError(
                f"data.augment_padding {self.padding} moves images of {sides[0]}x{sides[1]} out of view; set it "
                f"to less than {min(sides)}"
            )

    def __call__(self, x: torch.Tensor, ids: Ids, epochs: Ids) -> torch.Tensor:
        """Return the images of a batch, augmented for training.

        Args:
            x: Images [n, *shape] in host memory.
            ids: Sample ids, int64 [n].
            epochs: Epoch of each sample, int64 [n].

        Returns:
            Images [n, *shape] in new memory; x itself if there is nothing to do.
        """
        if not self.names or not len(x):
            return x
        last, out = channels_last(x.shape[1:]), torch.zeros(x.shape, dtype=x.dtype)
        images, moved = (  # [n, channels, height, width]
            (t.movedim(-1, 1) if last else t.reshape(len(x), -1, *x.shape[-2:])).numpy() for t in (x, out)
        )
        for image, into, down, right, mirrored in zip(images, moved, *self._draw(ids, epochs), strict=True):
            rows, from_rows = _overlap(down, image.shape[1])
            columns, from_columns = _overlap(right, image.shape[2])
            shown = into[..., ::-1] if mirrored else into
            shown[:, rows, columns] = image[:, from_rows, from_columns]
        return out

    def _draw(self, ids: Ids, epochs: Ids) -> tuple[list[int], list[int], list[bool]]:
        """Draw the random numbers of each sample.

        Returns:
            (pixels that each image moves down, pixels that it moves to the right, True where it is mirrored).
        """
        seed = mix64(np.array([self.seed], np.uint64) ^ _NOT_THE_ORDER)
        key = mix64(mix64(seed + epochs.astype(np.uint64) * _STEP) ^ mix64(ids.astype(np.uint64) + _STEP))
        words = [mix64(key + step) for step in _STEP * np.arange(1, 4, dtype=np.uint64)]
        reach = self.padding if "crop" in self.names else 0
        down, right = ((word % np.uint64(2 * reach + 1)).astype(np.int64) - reach for word in words[:2])
        mirrored = (words[2] >> np.uint64(63)).astype(np.bool_) & ("flip" in self.names)
        return down.tolist(), right.tolist(), mirrored.tolist()


def _overlap(shift: int, length: int) -> tuple[slice, slice]:
    """Return (target slice, source slice) of an axis whose pixels are moved by `shift`."""
    return slice(max(0, shift), length + min(0, shift)), slice(max(0, -shift), length - max(0, shift))
