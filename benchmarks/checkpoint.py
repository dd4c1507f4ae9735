"""Saving and loading a sharded state, beside raw writes and torch.distributed.checkpoint.

Every rank holds a slice of every tensor, as under ZeRO. Saves go to new files and end with fsync (raw: one file per
rank, written tensor by tensor; torch.distributed.checkpoint: its file-system writer over gloo, which fsyncs). The loads
read what was just written, out of the page cache, cut along the other dimension. Peers get their state as DTensors, and
hash nothing when they load.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.runner.jobs import BenchmarkParser, run, timed
from benchmarks.runner.peers import gloo
from benchmarks.runner.report import Report, ReportTable, target_of
from mpitrain.checkpoint import Part, Store, TensorSpec
from mpitrain.comm import Communicator
from mpitrain.layout.boxes import Box, Piece
from mpitrain.measuring.self_start import temporary_folder
from mpitrain.speeds.timing import Contender
from mpitrain.storage.hdf5 import crc32

_COLUMNS = 1024
_ROWS = 1024  # of each tensor, 4 MiB of float32
_RAW, OURS, DCP = "raw write", "mpitrain", "torch.distributed.checkpoint"
_COPY, _STALL = "one memory copy", "mpitrain in the background: stall"
_SAVES = (_RAW, OURS, DCP)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return its exit code."""
    parser = BenchmarkParser("checkpoint", __doc__ or "", "1,2", repeats=9, quick=(2, math.inf))
    parser.number("mb", 256, "MiB of state of all ranks together", quick=16, metavar="MB")
    return run(parser, measure, report, arguments)


class BenchState:
    """A state of float32 tensors of 4 MiB, of which each rank saves some rows and loads some columns.

    Args:
        world: Communicator of all ranks.
        mb: Size of the whole state in MiB.
    """

    def __init__(self, world: Communicator, mb: int) -> None:
        self.world = world
        self.names = [f"model/block.{number}.weight" for number in range(max(1, mb // 4))]
        self.rows = _bounds(_ROWS, world)
        self.columns = _bounds(_COLUMNS, world)
        generator = torch.Generator().manual_seed(world.rank)
        self.slices = [torch.rand(self.rows[1] - self.rows[0], _COLUMNS, generator=generator) for _ in self.names]

    def parts(self) -> list[Part]:
        """Return the parts that this rank saves: its rows of each tensor."""
        lo, hi = (row * _COLUMNS for row in self.rows)
        whole = Box.whole(_ROWS * _COLUMNS)
        return [
            Part(_spec(name), Piece(name, whole, lo, hi), of.view(-1))
            for name, of in zip(self.names, self.slices, strict=True)
        ]

    def empty_parts(self) -> list[Part]:
        """Return zero-filled parts into which this rank loads: its columns of each tensor."""
        box = Box.along((_ROWS, _COLUMNS), 1, *self.columns)
        return [Part(_spec(n), Piece(n, box, 0, box.numel), torch.zeros(box.numel)) for n in self.names]

    def distributed(self, axis: int) -> dict[str, Any]:
        """Return the state as DTensors, by name.

        Args:
            axis: 0: the rows that this rank saves; 1: its columns, filled with zeros, for loading.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (self.world.size,))
        width = self.columns[1] - self.columns[0]
        locals_ = self.slices if axis == 0 else [torch.zeros(_ROWS, width) for _ in self.names]
        shape = torch.Size((_ROWS, _COLUMNS))
        return {
            name: DTensor.from_local(of, mesh, [Shard(axis)], run_check=False, shape=shape, stride=(_COLUMNS, 1))
            for name, of in zip(self.names, locals_, strict=True)
        }


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Time saving and loading by each contender. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        Bytes of the state, module that computes the hashes, and seconds of each repetition by contender.
    """
    with gloo(world), contenders(world, options.mb, options.out) as every:
        times = timed(world, f"{options.mb} MiB", every, options)
    seconds = {name: list(of.all) for name, of in times.items()}
    return {"bytes": max(1, options.mb // 4) * _ROWS * _COLUMNS * 4, "hashes": crc32.__module__, "seconds": seconds}


@contextmanager
def contenders(world: Communicator, mb: int, parent: Path) -> Iterator[dict[str, Contender]]:
    """Yield all contenders by name; at the end, check that the two loads agree. Collective.

    Args:
        world: Communicator of all ranks, and of the default group of torch.distributed.
        mb: Size of the whole state in MiB.
        parent: Folder for a temporary folder.
    """
    import torch.distributed.checkpoint as dcp

    warnings.filterwarnings("ignore", module="torch.distributed")
    state = BenchState(world, mb)
    parts, to_fill = state.parts(), state.empty_parts()
    with temporary_folder(world, parent) as folder, Store(folder / "ours", world, 1) as store:
        store.prepare(set_aside=False)
        store.save(0, parts, {})
        our_state, their_state = state.distributed(0), state.distributed(1)
        dcp.save(our_state, checkpoint_id=folder / "dcp-load")
        step = iter(range(1, 1 << 30))
        buffers = [torch.zeros_like(of) for of in state.slices]
        fresh = partial(_fresh, store, world, folder)
        calls: dict[str, Callable[[], object]] = {
            _RAW: lambda: _raw(folder / f"peer-raw-{world.rank}", state.slices),
            OURS: lambda: store.save(next(step), parts, {}),
            DCP: lambda: dcp.save(our_state, checkpoint_id=folder / "peer-dcp"),
            _COPY: lambda: [b.copy_(s) for b, s in zip(buffers, state.slices, strict=True)],
            _STALL: lambda: store.save(next(step), parts, {}, background=True),
            f"load {OURS}": lambda: store.load(store.newest_first()[0], lambda manifest: to_fill),
            f"load {DCP}": lambda: dcp.load(their_state, checkpoint_id=folder / "dcp-load"),
        }
        yield {name: Contender(call, fresh, single=True) for name, call in calls.items()}
        for part, name in zip(to_fill, state.names, strict=True):
            if not torch.equal(part.data.view(_ROWS, -1), their_state[name].to_local()):
                raise RuntimeError(f"{name}: the two loads differ")
        store.finish()


def _fresh(store: Store, world: Communicator, folder: Path) -> None:
    """Wait until all writes are finished, and delete the files that peers wrote. Collective."""
    store.finish()
    world.barrier()
    if world.rank == 0:
        for path in folder.glob("peer-*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    world.barrier()


def _raw(path: Path, slices: Sequence[torch.Tensor]) -> None:
    with open(path, "wb", buffering=0) as file:
        for data in slices:
            file.write(data.view(-1).view(torch.uint8).numpy().data)
        os.fsync(file.fileno())


def report(results: dict[int, Any], options: argparse.Namespace) -> Report:
    """Return the report with tables and targets.

    Args:
        results: Results of `measure`, by number of ranks.
        options: Options of the command.
    """
    tables, targets = [], []
    for ranks, result in results.items():
        median = {name: sorted(seconds)[len(seconds) // 2] for name, seconds in result["seconds"].items()}
        mib = result["bytes"] / 2**20
        rows = [
            (f"save {name}", median[name] * 1e3, mib / median[name], median[_RAW] / median[name]) for name in _SAVES
        ]
        rows += [(name, of * 1e3, mib / of, None) for name, of in median.items() if name not in _SAVES]
        columns, title = ("what", "ms (median)", "MiB/s", "of raw"), f"{ranks} rank(s), {mib:.0f} MiB"
        tables.append(ReportTable(title, columns, rows, f"Our files are hashed with {result['hashes']}."))
        for what, over, under, target in (
            ("saving speed relative to raw writing", _RAW, OURS, 0.95),
            ("saving speed relative to torch.distributed.checkpoint", DCP, OURS, 2),
            ("loading speed relative to torch.distributed.checkpoint", f"load {DCP}", f"load {OURS}", 2),
        ):
            targets.append(target_of(f"{what}, {ranks} rank(s)", median[over] / median[under], least=target))
        what = f"stall of a background save relative to one memory copy, {ranks} rank(s)"
        targets.append(target_of(what, median[_STALL] / median[_COPY], most=1.5))
    return Report("Checkpoints", tables, targets)


def _spec(name: str) -> TensorSpec:
    return TensorSpec(name, (_ROWS, _COLUMNS), "float32")


def _bounds(length: int, world: Communicator) -> tuple[int, int]:
    """Return the bounds of this rank's chunk of a dimension, divided as torch does it."""
    each = -(-length // world.size)
    return min(length, each * world.rank), min(length, each * (world.rank + 1))
