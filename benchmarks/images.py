"""Decoding images: samples a second beside torchvision's ImageFolder with torch's DataLoader

One process on all cores reads epochs of JPEG files of 500 x 375 pixels, scaled and cropped to 224 x 224, as float32
batches in shuffled order. The files are in the page cache.

    torchvision    ImageFolder, Resize, CenterCrop, ToTensor; DataLoader with 0 and 2 worker processes, which persist.
                   If it cannot be imported, a torch Dataset takes its place that does the same with Pillow
    mpitrain       images in place: 1 thread decodes when the batch is requested, or the default, a reader thread with
                   one decoding thread per core
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader

from benchmarks.runner.jobs import BenchmarkParser, run, say, timed
from benchmarks.runner.report import Report, ReportTable, target_of
from mpitrain.comm import Communicator
from mpitrain.data import Loader, SampleOrder, open_dataset
from mpitrain.data.prepare import PrepareOptions, prepare
from mpitrain.measuring.self_start import temporary_folder
from mpitrain.speeds.cores import all_cores

SIZE = 224
_WORKERS = 2  # processes of the DataLoader


class PillowFolder(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Images of a folder with one folder per class, decoded and scaled by Pillow."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.rglob("*.jpg"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        with Image.open(self._paths[number]) as file:
            image = ImageOps.fit(file.convert("RGB"), (SIZE, SIZE), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels.float().div(255), int(self._paths[number].parent.name)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return its exit code."""
    parser = BenchmarkParser("images", __doc__ or "", "1", repeats=5)
    parser.number("images", 384, "images of an epoch", quick=64)
    parser.number("batch", 32, "images of a batch")
    return run(parser, measure, report, arguments)


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Time epochs of the loaders. Collective, but each rank reads all images.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        Name of the peer, images of an epoch, and seconds of the epochs by loader.
    """
    with temporary_folder(world, options.out) as folder, all_cores():
        world.on_root(lambda: _make(folder, options.images))
        peer, dataset = _peer(world, folder / "photos")
        batches = options.images // options.batch
        contenders: dict[str, Any] = {}
        for workers in (0, _WORKERS):
            how = {"batch_size": options.batch, "shuffle": True, "drop_last": True, "num_workers": workers}
            loader = DataLoader(dataset, persistent_workers=workers > 0, **how)
            contenders[f"{peer}, num_workers {workers}"] = partial(_read_epoch, loader)
        for workers, threads in ((0, 1), (1, None)):
            name = "1 thread" if threads else "a thread per core"
            contenders[f"mpitrain, {name}"] = partial(_read_ours, folder, options.batch, batches, workers, threads)
        times = timed(world, f"epochs of {batches} batches", contenders, options)
    return {"images": batches * options.batch, "seconds": {name: list(of.all) for name, of in times.items()}}


def _make(folder: Path, count: int) -> None:
    """Write JPEG files in two classes, and the data set of the same images in place."""
    for number in range(count):
        coarse = np.random.default_rng(number).integers(0, 256, (24, 32, 3), dtype=np.uint8)
        path = folder / "photos" / str(number % 2) / f"{number:05}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=90)
    options = PrepareOptions(size=(SIZE, SIZE), in_place=True)
    prepare([str(folder / "photos")], folder / "set", held_out=0.0, options=options)


def _peer(world: Communicator, folder: Path) -> tuple[str, Any]:
    """Return the name of the peer and its data set."""
    try:
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import CenterCrop, Compose, Resize, ToTensor
    except (ImportError, RuntimeError) as error:  # RuntimeError: made for another build of torch
        say(world, f"torchvision cannot be imported ({str(error).splitlines()[0]}); a Dataset of Pillow replaces it")
        return "Pillow", PillowFolder(folder)
    return "torchvision", ImageFolder(str(folder), Compose([Resize(SIZE), CenterCrop(SIZE), ToTensor()]))


def _read_epoch(loader: Any) -> None:
    for x, _ in loader:
        assert x.shape[1:] == (3, SIZE, SIZE)


def _read_ours(folder: Path, batch: int, batches: int, workers: int, threads: int | None) -> None:
    data = open_dataset(folder / "set", threads=threads)
    order = SampleOrder(len(data), seed=1)
    with Loader(data, order, batch=batch, share=lambda size: (0, size), workers=workers) as loader:
        for _ in range(batches):
            assert next(loader).x.shape[1:] == (3, SIZE, SIZE)


def report(results: dict[int, Any], options: argparse.Namespace) -> Report:
    """Return the report with a table and a target.

    Args:
        results: Results of `measure`, by number of ranks.
        options: Options of the command.
    """
    tables, targets = [], []
    for result in results.values():
        speed = {name: result["images"] / float(np.median(of)) for name, of in result["seconds"].items()}
        alone, parallel, one_thread, ours = speed
        rows = [(name, of, of / speed[alone], of / speed[parallel]) for name, of in speed.items()]
        note = f"JPEG files of 500 x 375 to {SIZE} x {SIZE}, batches of {options.batch}; median of the epochs."
        columns = ("loader", "images/s", "of num_workers 0", f"of num_workers {_WORKERS}")
        tables.append(ReportTable("Images per second, one process", columns, rows, note))
        targets.append(target_of(f"{one_thread}: images/s of {alone}", speed[one_thread] / speed[alone], least=1))
        targets.append(target_of(f"{ours}: images/s of {parallel}", speed[ours] / speed[parallel], least=1))
    return Report("Decoding images", tables, targets)
