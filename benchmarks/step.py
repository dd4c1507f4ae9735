"""A training step by DDP and ZeRO-0, 1, 2, 3, beside torch DDP, FSDP2 and DeepSpeed.

A measurement is one training step: the gradients of this rank's batch, their reduction, and the update. Drawing the
batch is not timed. All contenders train the same GPT (about 20 M parameters, fp32) from the same weights on the same
tokens with torch's fused AdamW, in turns in the same processes. If their losses differ, the benchmark fails.

    one process              every rank trains the whole model alone, all ranks at once: equal work, no communication
    ZeRO-0, 1, 2, 3          mpitrain's engine; the ranks of a node share one copy of the parameters
    ZeRO-3 gathered          the same without that copy: the parameters of each unit are gathered when it computes
    DistributedDataParallel  `mpitrain.DistributedDataParallel` in a loop of its own
    torch DDP                over gloo, with gradients as views of the buckets
    FSDP2                    `fully_shard` on each block and on the model, over gloo
    DeepSpeed                ZeRO-1, 2, 3 over gloo, if it is installed (extra `peers`)

There are two batches: one sample of 128 tokens per rank, where communication and update matter most, and four samples.
All data of a step is in main memory when its turn comes, because the other contenders have moved hundreds of megabytes
through the caches.

mpitrain computes the norm of the gradients in each step, to skip an update that is not finite; torch's contenders do
not.

`--width` makes the GPT larger or smaller. All contenders are in memory at the same time; where that is too much, choose
some with `--only`. Their memory is measured by the benchmark `strategies`.

`--device` measures a step in bf16 on a device, in tokens per second:

    one process         plain torch with autocast to bf16; every rank trains the whole model alone, all ranks at once
    ZeRO-0, 1, 3        mpitrain in bf16, with an fp32 copy of the parameters in the optimizer
    torch DDP           autocast to bf16; over the vendor's library if each rank has its own device, else over
                        mpitrain's backend for torch.distributed

All of them use torch's fused AdamW, and random tokens that are already on the device. A measurement is a few steps, and
ends when the device has completed them.

The share of the device's peak counts the operations that the model needs. For each token these are 6 per parameter,
and 12 · layers · width · tokens for attention, not halved for the causal mask. The tied embedding counts once, as the
output matrix.

Reference:
    Chowdhery et al. 2022, PaLM, appendix B.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch

from benchmarks.runner import peers
from benchmarks.runner.jobs import BenchmarkParser, asked_for_device, run, timed
from benchmarks.runner.peers import OUR_DDP, SINGLE, Batch, Shape, Trainee
from benchmarks.runner.report import Report, ReportTable, ReportTarget, ratio, target_of
from benchmarks.runner.training_runs import trim
from mpitrain.comm import Communicator
from mpitrain.comm.memory import device as hardware
from mpitrain.errors import InputError
from mpitrain.speeds.timing import Contender

# targets for the communication-heavy batch: most of the time of one process, and least speed relative to a peer
_MOST = {"ZeRO-1": 1.06, "ZeRO-0": 1.2, OUR_DDP: 1.2, "ZeRO-2": 1.06, "ZeRO-3": 1.06, "ZeRO-3 gathered": 1.1}
_LEAST = {
    ("torch DDP", "ZeRO-0"): 1.3,
    ("torch DDP", "ZeRO-1"): 1.3,
    ("torch DDP", OUR_DDP): 1.3,
    ("FSDP2", "ZeRO-3"): 3.0,
}
HEAVY, LIGHT = "communication-heavy", "compute-heavy"  # names of the two batches
Result = dict[str, Any]  # result of `measure` at one rank count
Stats = dict[str, dict[str, Any]]  # measured values by contender, for one model size and batch


def report(results: dict[int, Result], options: argparse.Namespace) -> Report:
    """Return the report with tables and targets, for the CPU or for a device.

    Args:
        results: Results of `measure`, by number of ranks.
        options: Options of the command.
    """
    if asked_for_device(options):
        return report_on_device(results)
    tables, targets = [], []
    for ranks, result in results.items():
        tables += [_times(ranks, result["parameters"], *each) for each in result["batches"].items()]
        targets += _targets(ranks, result["batches"][HEAVY])
    return Report("A training step", tables, targets)


# -- targets -----------------------------------------------------------------------------------------------


def _targets(ranks: int, stats: Stats) -> list[ReportTarget]:
    """Return the targets for the communication-heavy batch; `_MOST` and `_LEAST` are meant for 2 ranks on 2 cores."""
    targets = []
    for name, most in _MOST.items():
        what = f"{ranks} ranks: step time, {name} / one process"
        targets.append(target_of(what, stats.get(name, {}).get("relative"), most=most))
    for (theirs, ours), least in _LEAST.items():
        faster = ratio(stats, theirs, ours) if {theirs, ours} <= set(stats) else None
        targets.append(target_of(f"{ranks} ranks: step time, {theirs} / {ours}", faster, least=least))
    return targets


# -- tables ------------------------------------------------------------------------------------------------


def _times(ranks: int, numel: int, batch: str, stats: Stats) -> ReportTable:
    rows = [
        [name, values["median"] * 1e3, values["relative"], values["waiting"] * 1e3] for name, values in stats.items()
    ]
    note = (
        "Medians. Not computing: the step time minus that of one process, which computes the same and updates all "
        "parameters; it is negative if updating only a share saves more time than communication takes."
    )
    title = f"Step time, {ranks} ranks, {batch}, {numel / 1e6:.1f} M parameters"
    return ReportTable(title, ("contender", "step ms", "/ one process", "not computing ms"), rows, note)


SHAPE = Shape(vocabulary=2048, layers=6, width=512, tokens=128)
DEVICE_SHAPE = Shape(vocabulary=50304, layers=24, width=1024, tokens=1024)  # 354 M parameters
QUICK_SHAPE = Shape(vocabulary=256, layers=2, width=64, tokens=32)
_AGREE = 2e-4  # largest relative difference of final losses, from another order of sums
_AGREE_BF16 = 0.03  # largest relative difference of final losses in bf16 on a device
_ON_DEVICE = (SINGLE, "ZeRO-0", "ZeRO-1", "ZeRO-3", "torch DDP")
_STEPS = 4  # per measurement on a device
_PEAK = 0.4  # target: share of a device's peak


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return its exit code."""
    return run(parser(), measure, report, arguments)


def parser() -> BenchmarkParser:
    """Return the options of the benchmark."""
    what = "Compare a training step of DDP and ZeRO with torch DDP, FSDP2 and DeepSpeed."
    options_parser = BenchmarkParser("step", what, "2", repeats=21, seconds=300.0, of="one batch, or one size")
    options_parser.names("only", peers.contenders(), "only these contenders, and one process")
    options_parser.number("width", SHAPE.width, "model.width, on the CPU", quick=64)
    options_parser.device("cpu: in fp32; else in bf16 on")
    options_parser.number("samples", 8, f"of {DEVICE_SHAPE.tokens} tokens a rank, on a device", quick=2)
    return options_parser


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the step time of all contenders, on the CPU or on a device. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        Number of parameters, and measured values by batch and contender; for a device, see `measure_on_device`.
    """
    if asked_for_device(options):
        return measure_on_device(world, options)
    if world.size == 1:
        raise InputError("one rank has nothing to reduce; use at least 2 ranks", agreed=True)
    shape = replace(QUICK_SHAPE if options.quick else SHAPE, width=options.width)
    sizes = {HEAVY: 1} if options.quick else {HEAVY: 1, LIGHT: 4}  # samples a rank
    with peers.gloo(world):
        by_batch = {batch: _measure(world, shape, samples, options) for batch, samples in sizes.items()}
    return {"nodes": world.num_nodes, "parameters": shape.numel, "batches": by_batch}


def _measure(world: Communicator, shape: Shape, samples: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the seconds and the loss of each contender with one batch. Collective.

    Args:
        world: Communicator of all ranks.
        shape: Sizes of the model.
        samples: Samples per rank.
        options: Options of the command.
    """
    size = f"{shape.numel / 1e6:.1f} M parameters, {samples} x {shape.tokens} tokens"
    with created(world, shape, samples, _selected(peers.contenders(), options)) as trainees:
        times = timed(world, size, {n: Contender(t.step, t.prepare, single=True) for n, t in trainees.items()}, options)
        losses = peers.mean_losses(world, trainees, _AGREE)
    results, alone = {}, times[SINGLE].median
    for name, took in times.items():
        values: dict[str, Any] = {"median": took.median, "best": took.best, "repeats": len(took.all)}
        results[name] = values | {"relative": took.median / alone, "waiting": took.median - alone, "loss": losses[name]}
    return results


def _selected(names: Iterable[str], options: argparse.Namespace) -> list[str]:
    """Return the contenders in `names` that `--only` selects, by default all, and always `SINGLE`."""
    return [name for name in names if name == SINGLE or not options.only or name in options.only]


@contextmanager
def created(
    world: Communicator, shape: Shape, samples: int, names: Iterable[str], of: Sequence[Batch] = (), device: Any = None
) -> Iterator[dict[str, Trainee]]:
    """Create contenders, yield them by name, and free their memory at the end. Collective.

    Args:
        world: Communicator of all ranks.
        shape: Sizes of the model.
        samples: Samples per rank.
        names: Names of the contenders.
        of: Batches that each contender gets again and again; empty: always new ones.
        device: Device on which to train in bf16; None: the CPU, in fp32.
    """
    trainees = {n: peers.contender(n, world, shape, samples, cycle(of) if of else None, device) for n in names}
    yield trainees
    for trainee in trainees.values():
        trainee.close()
    trim()  # before the next batch


# -- on a device -------------------------------------------------------------------------------------------


def measure_on_device(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Time a step of each contender on a device. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        Facts about devices, model and batch, the peak memory of the rank with most, and under "found", by contender:
        seconds of a step, tokens per second, share of the peak (None if the peak is unknown), and loss.

    Raises:
        InputError: The device does not exist.
        CommunicationError: The losses of the contenders differ.
    """
    device = hardware.of_rank(options.device, world.local_rank)
    hardware.use(device)
    shape, samples = QUICK_SHAPE if options.quick else DEVICE_SHAPE, options.samples
    places = world.all_gather_object([world.node, _place(world, device)])
    devices = len({(node, place) for node, place in places})
    with peers.on_device(world, device, devices == world.size) as backend:
        of = [(x.to(device), y.to(device)) for x, y in islice(peers.batches(shape, samples, world.rank), _STEPS)]
        names = [n for n in _selected(_ON_DEVICE, options) if backend or n != "torch DDP"]
        with created(world, shape, samples, names, of, device) as trainees:
            calls = {name: partial(_repeat, trainee, device) for name, trainee in trainees.items()}
            times = timed(world, f"on {device.type}", calls, options)
            losses = peers.mean_losses(world, trainees, _AGREE_BF16)
    tokens = samples * shape.tokens * world.size
    peak = hardware.matrix_peak(device)
    results: dict[str, Any] = {}
    for name, took in times.items():
        step = took.median / _STEPS
        share = None if peak is None else tokens / step * flops_of_a_token(shape) / (devices * peak)
        results[name] = {"step": step, "tokens": tokens / step, "share": share, "loss": losses[name]}
    memory = world.all_gather_object(hardware.peak_memory_bytes(device))
    facts = {"device": hardware.name(device), "devices": devices, "backend": backend, "memory": max(memory)}
    return {**facts, "parameters": shape.numel, "samples": samples, "tokens": shape.tokens, "found": results}


def flops_of_a_token(shape: Shape) -> float:
    """Return the floating-point operations that the forward and backward pass of one token need."""
    return 6.0 * shape.numel + 12.0 * shape.layers * shape.width * shape.tokens


def _place(world: Communicator, device: torch.device) -> str:
    """Return a name of this rank's device, equal on ranks that share it.

    A single device without an identity counts as not shared.
    """
    identity = hardware.identity(device)
    return f"rank {world.rank}" if identity == str(device) and hardware.count(device.type) == 1 else identity


def _repeat(trainee: Trainee, device: torch.device) -> None:
    """Take a few steps, and wait until the device has completed them."""
    for _ in range(_STEPS):
        trainee.step()
        trainee.prepare()
    hardware.synchronize(device)


def report_on_device(results: dict[int, Result]) -> Report:
    """Return the report on a device, with tables and targets; `results` are by number of ranks."""
    targets = [
        target_of(
            f"{ranks} rank(s): ZeRO-0 in bf16, share of the peak of matrix products",
            result["found"].get("ZeRO-0", {}).get("share"),
            least=_PEAK,
            percent=True,
            absent="the peak speed of this device is not known",
        )
        for ranks, result in results.items()
    ]
    return Report("A training step on a device", [_device_table(*item) for item in results.items()], targets)


def _device_table(ranks: int, result: dict[str, Any]) -> ReportTable:
    alone = result["found"][SINGLE]["step"]
    rows = []
    for name, of in result["found"].items():
        share = None if of["share"] is None else 100 * of["share"]
        rows.append([name, of["step"] * 1e3, of["tokens"], share, of["step"] / alone, of["loss"]])
    note = (
        f"{result['device']}, {result['devices']} for all ranks; {result['parameters'] / 1e6:.1f} M parameters, "
        f"{result['samples']} x {result['tokens']} tokens per rank, bf16. Peak of the most loaded rank, all contenders "
        f"together: {result['memory'] / 2**20:,.0f} MiB. torch DDP over {result['backend'] or 'nothing: one rank'}."
    )
    columns = ("contender", "step ms", "tokens/s", "% of the peak", "/ one process", "loss")
    return ReportTable(f"{ranks} rank(s)", columns, rows, note)
