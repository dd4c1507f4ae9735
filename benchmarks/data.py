"""Loading samples: against a plain memory-mapped NumPy loader, and how much of a training step it takes

Samples a second: all ranks together read one epoch of a token set in the same shuffled order, each its share of every
batch, as int64 tensors. The files are in the page cache; what is compared is what the loaders do themselves.

    plain         slices of an np.memmap of the same tokens in one raw file, with the whole order in memory; it checks
                  nothing and reads no shards, and a damaged file goes unnoticed
    mpitrain      the Loader; workers 0 reads in the calling thread, 1 (the default) ahead in a thread
    first epoch   the set is opened anew, so every extent is hashed; later epochs trust what was found right

Share of a step: the time in `next(loader)` over that of the whole step, on the rank where it is largest, for the
default model and for a GPT of 20 M parameters; the set is new to the process, so hashing counts. With workers 0 that
is all that loading costs; with 1 it is what the step waits for it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.runner.jobs import BenchmarkParser, maxima, run, timed
from benchmarks.runner.peers import Shape, contender
from benchmarks.runner.report import Report, ReportTable, target_of
from mpitrain.comm import Communicator
from mpitrain.config.training import ModelSection
from mpitrain.data import Dataset, Loader, SampleOrder, open_dataset
from mpitrain.data.prepare import prepare
from mpitrain.errors import InputError
from mpitrain.measuring.self_start import temporary_folder
from mpitrain.speeds.timing import Contender

SEQUENCE = 128  # tokens of a sample
MOST = 0.02  # target: largest share of a step
_PLAIN = "plain"
_DEFAULT = ModelSection()
MODELS = {  # (shape, samples per rank and batch)
    "default GPT": (Shape(256, _DEFAULT.layers, _DEFAULT.width, SEQUENCE), 8),
    "GPT of 20 M parameters": (Shape(2048, 6, 512, SEQUENCE), 4),
}

Batches = Generator[tuple[torch.Tensor, torch.Tensor], None, None]


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return its exit code."""
    parser = BenchmarkParser("data", __doc__ or "", "1,2,4", repeats=9)
    parser.number("mb", 8, "MiB of tokens of one byte", quick=1, metavar="MB")
    parser.number("batch", 8, "samples of a batch on each rank")
    parser.number("steps", 30, "training steps", quick=4)
    return run(parser, measure, report, arguments)


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Time the loaders by themselves and within training steps. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        Under "loading" the samples and seconds of epochs by loader; under "steps" the times by model.
    """
    with temporary_folder(world, options.out) as folder:
        world.on_root(lambda: _make(folder, options.mb << 20))
        result = {"loading": _loading(world, folder, options)}
        models = list(MODELS)[:1] if options.quick else MODELS
        result["steps"] = {name: _steps(world, folder, *MODELS[name], options.steps) for name in models}
    return result


def _make(folder: Path, tokens: int) -> None:
    """Write raw.txt with random tokens, and the data set of the same tokens.

    Args:
        folder: Folder for both.
        tokens: Number of tokens, one byte each.
    """
    drawn = np.random.default_rng(1).integers(ord("a"), ord("z"), tokens, dtype=np.uint8)
    drawn[::80] = ord("\n")
    (folder / "raw.txt").write_bytes(drawn.tobytes())
    prepare([str(folder / "raw.txt")], folder / "set", held_out=0.0)


# -- samples a second ----------------------------------------------------------------------------------------


def _loading(world: Communicator, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    batch = options.batch
    order = SampleOrder(len(_opened(folder)), seed=1)
    count = order.samples // (batch * world.size)
    if not count:
        raise InputError(
            f"an epoch of {order.samples} samples is too small for a batch of {batch} on each rank; use a larger --mb"
        )
    whole = order.ids(0, order.samples)

    plain = partial(_plain, folder, whole, batch, world)
    _compare(plain(), _ours(_opened(folder), order, batch, world, 0), count)

    def ours(workers: int, anew: bool) -> Contender:
        """Return a contender that reads one epoch per call.

        Args:
            workers: Reader threads of the loader.
            anew: If true, reopen the data set for each epoch, so that its extents are hashed again.
        """
        opened = [_opened(folder)]

        def open_anew() -> None:
            opened[0] = _opened(folder)

        def epoch() -> None:
            _take(_ours(opened[0], order, batch, world, workers), count)

        return Contender(epoch, open_anew if anew else None, single=True)

    contenders: dict[str, Contender | Callable[[], object]] = {_PLAIN: lambda: _take(plain(), count)}
    for workers in (0, 1):
        for name in ("first epoch", "later epochs"):
            contenders[f"mpitrain, workers {workers}, {name}"] = ours(workers, name == "first epoch")
    times = timed(world, f"epochs of {count} batches", contenders, options)
    samples = count * batch * world.size
    return {"samples": samples, "seconds": {name: list(of.all) for name, of in times.items()}}


def _opened(folder: Path) -> Dataset:
    return open_dataset(folder / "set", sequence=SEQUENCE)


def _ours(data: Dataset, order: SampleOrder, batch: int, world: Communicator, workers: int) -> Batches:
    lo = batch * world.rank
    share = (lo, lo + batch)
    with Loader(data, order, batch=batch * world.size, share=lambda size: share, workers=workers) as loader:
        for each in loader:
            yield each.x, each.y


def _plain(folder: Path, order: np.ndarray, batch: int, world: Communicator) -> Batches:
    tokens = np.memmap(folder / "raw.txt", dtype=np.uint8, mode="r")
    for first in range(batch * world.rank, len(order), batch * world.size):
        ids = order[first : first + batch].tolist()
        rows = np.stack([tokens[i * SEQUENCE : i * SEQUENCE + SEQUENCE + 1] for i in ids])
        yield torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))


def _take(batches: Batches, count: int) -> None:
    for _ in range(count):
        next(batches)
    batches.close()


def _compare(a: Batches, b: Batches, count: int) -> None:
    for number in range(min(count, 100)):
        if not all(map(torch.equal, next(a), next(b))):
            raise RuntimeError(f"batch {number}: the two loaders return different samples")
    a.close()
    b.close()


# -- share of a step -----------------------------------------------------------------------------------------


def _steps(world: Communicator, folder: Path, shape: Shape, batch: int, steps: int) -> dict[str, dict[str, float]]:
    """Train with workers 0 and 1. Returns seconds of a step, seconds of waiting in it, and the largest share of a rank.

    Collective.

    Args:
        world: Communicator of all ranks.
        folder: Folder of the data set.
        shape: Sizes of the model.
        batch: Samples per rank.
        steps: Number of steps.
    """
    trainee = contender("ZeRO-0", world, shape, batch)
    order = SampleOrder(len(_opened(folder)), seed=1)

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        trainee.forward_backward(x, y)
        trainee.update()

    nothing = torch.zeros(batch, SEQUENCE, dtype=torch.int64)
    train(nothing, nothing)  # warms up the memory and code that later steps use
    seconds = {}
    for workers in (0, 1):
        batches, waited = _ours(_opened(folder), order, batch, world, workers), 0.0
        world.barrier()
        began = time.perf_counter()
        for _ in range(steps):  # the first batch counts, too
            before = time.perf_counter()
            x, y = next(batches)
            waited += time.perf_counter() - before
            train(x, y)
        elapsed = time.perf_counter() - began
        batches.close()
        [share] = maxima(world, [waited / elapsed])
        seconds[f"workers {workers}"] = {"step": elapsed / steps, "waiting": waited / steps, "share": share}
    trainee.close()
    return seconds


# -- the report ----------------------------------------------------------------------------------------------


def report(results: dict[int, Any], options: argparse.Namespace) -> Report:
    """Return the report with tables and targets.

    Args:
        results: Results of `measure`, by number of ranks.
        options: Options of the command.
    """
    tables, targets = [], []
    for ranks, result in results.items():
        loading = result["loading"]
        speed = {name: loading["samples"] / float(np.median(of)) for name, of in loading["seconds"].items()}
        rows = [(name, of, of / speed[_PLAIN]) for name, of in speed.items()]
        title = f"{ranks} rank(s): samples per second, all ranks together"
        note = f"Samples of {SEQUENCE} tokens, {options.batch} per rank and batch; median over the epochs."
        tables.append(ReportTable(title, ("loader", "samples/s", "of plain"), rows, note))
        shares = [(model, how, of) for model, hows in result["steps"].items() for how, of in hows.items()]
        columns = ("model", "loader", "step ms", "loading ms", "loading %")
        cells = [(m, how, of["step"] * 1e3, of["waiting"] * 1e3, of["share"] * 100) for m, how, of in shares]
        tables.append(ReportTable(f"{ranks} rank(s): share of a training step", columns, cells))
        for model, how, of in shares:
            what = f"{ranks} rank(s), {model}, {how}: share of a step"
            targets.append(target_of(what, of["share"], most=MOST, percent=True))
        for name, _, ratio in rows[1:]:
            targets.append(target_of(f"{ranks} rank(s), {name}: samples/s of plain", ratio, least=1, where=" times"))
    return Report("Loading data", tables, targets)
