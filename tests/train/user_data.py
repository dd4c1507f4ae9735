"""Data sets and augmentations of a user, which tests name in data.factory and data.augment."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

SAMPLES, HELD_OUT = 23, 8


class Points(Dataset):
    """Points with their quadrant; with `noise`, random numbers of three libraries are added, as transforms do."""

    classes = ("a", "b", "c", "d")

    def __init__(self, samples: int, noise: float) -> None:
        self.points = torch.randn(samples, 6, generator=torch.Generator().manual_seed(samples))
        self.noise = noise

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index):
        x = self.points[index].clone()
        if self.noise:
            x += self.noise * torch.randn(6) + self.noise * random.random() + self.noise * np.random.rand()
        return x, int(self.points[index, 0] > 0) + 2 * int(self.points[index, 1] > 0)


class Stream(IterableDataset):
    """Stream of the same points, whose order depends on the epoch."""

    classes = 4

    def __init__(self, samples: int) -> None:
        self.data, self.epoch = Points(samples, 0.0), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        for index in np.random.default_rng(self.epoch).permutation(len(self.data)):
            yield self.data[int(index)]


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.data)


def points(split: str, noise: float = 0.0) -> Points:
    return Points(SAMPLES if split == "train" else HELD_OUT, noise)


def stream(split: str):
    return Stream(SAMPLES) if split == "train" else SizedStream(HELD_OUT)


def collated(split: str):
    """Return a loader with a collate function of dictionaries, as Hugging Face's data sets need one."""

    class Records(Points):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return {"points": x.tolist(), "label": y}

    def collate(records):
        return torch.tensor([r["points"] for r in records]), torch.tensor([r["label"] for r in records])

    samples = SAMPLES if split == "train" else HELD_OUT
    return DataLoader(Records(samples, 0.0), batch_size=3, shuffle=True, collate_fn=collate)


def noisy(x: torch.Tensor, y: torch.Tensor, generator: torch.Generator):
    return x + 0.1 * torch.randn(x.shape, generator=generator), y


def noisy_by_rank(x: torch.Tensor, y: torch.Tensor, generator: torch.Generator):
    return x + 0.1 * torch.randn(x.shape), y


def noisy_by_call(x: torch.Tensor, y: torch.Tensor, generator: torch.Generator):
    return x + Restless.generator.random(), y


def only_train(split: str):
    return points(split) if split == "train" else None


def by_rank(split: str):
    from mpitrain.comm import init

    return Points(SAMPLES + init().rank, 0.0)


def wrong(split: str, how: str):
    if how == "raises":
        raise ValueError("no such disk")
    if how == "sample":
        return [(torch.zeros(2), 0), (torch.zeros(3), 1)] * 4
    if how == "broken":
        return Broken(8, 0.0)
    if how == "own generator":
        return Restless(8, 0.0)
    return {"none": None, "number": 3, "single": [torch.zeros(2)] * 4, "words": [("a", "b")] * 4, "empty": []}[how]


class Broken(Points):
    def __getitem__(self, index):
        if index == 5:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


class Restless(Points):
    generator = np.random.default_rng(1)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + self.generator.random(), y
