"""A training step by DDP and ZeRO-1, 2, 3: ours against torch DDP, FSDP2 and DeepSpeed.

A measurement is one training step: the gradients of this rank's batch, their reduction, and the update. Drawing the
batch is not timed. All contenders train the same GPT (about 20 M parameters, fp32) from the same weights on the same
tokens with torch's fused AdamW, in turns in the same processes. If their losses differ, the benchmark fails.

    one process         every rank trains the whole model alone, all ranks at once: equal work without communication
    DDP, ZeRO-1, 2, 3   mpitrain; the ranks of a node share one copy of the parameters
    ZeRO-3 gathered     mpitrain without that copy: the parameters of each unit are gathered when it computes
    torch DDP           over gloo, with gradients as views of the buckets
    FSDP2               `fully_shard` on each block and on the model, over gloo
    DeepSpeed           ZeRO-1, 2, 3 over gloo, if it is installed (extra `peers`)

There are two batches: one sample of 128 tokens per rank, where communication and update matter most, and four samples.
All data of a step is in main memory when its turn comes, because the other contenders have moved hundreds of megabytes
through the caches.

mpitrain computes the norm of the gradients in each step, to skip an update that is not finite; torch's contenders do
not.

Memory is measured before time, for each contender alone, while its model is created and takes a few steps. `--width`
makes the GPT larger or smaller; time and memory grow with the number of parameters.

`--device` measures a step in bf16 on a device, in tokens per second:

    one process         plain torch with autocast to bf16; every rank trains the whole model alone, all ranks at once
    DDP, ZeRO-1, 3      mpitrain in bf16, with an fp32 copy of the parameters in the optimizer
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
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch

from benchmarks.runner.jobs import BenchmarkParser, asked_for_device, run, timed
from benchmarks.runner.peers import SINGLE, Shape, Trainee, batches, contender, contenders, gloo, mean_losses, on_device
from benchmarks.runner.report import MIB, Cell, Panel, Report, ReportTable, ReportTarget, ratio, target_of
from benchmarks.runner.training_runs import LARGE, PIECE, PeakMemory, allocate, trim
from mpitrain.comm import Communicator
from mpitrain.comm.memory import device as hardware
from mpitrain.errors import InputError
from mpitrain.speeds.timing import Contender
from mpitrain.storage import proc

HEAVY, LIGHT = "communication-heavy", "compute-heavy"  # names of the two batches
_CATEGORIES = ("parameters", "gradients", "states", "activations", "buffers", "padding")
# peers whose memory each of our contenders is compared with
_COUNTERPARTS = {
    "DDP": ("torch DDP",),
    "ZeRO-1": ("torch DDP", "DeepSpeed ZeRO-1"),
    "ZeRO-2": ("torch DDP", "DeepSpeed ZeRO-2"),
    "ZeRO-3": ("FSDP2", "DeepSpeed ZeRO-3"),
    "ZeRO-3 gathered": ("FSDP2", "DeepSpeed ZeRO-3"),
}

Result = dict[str, Any]  # result of `measure` at one rank count
Stats = dict[str, dict[str, Any]]  # measured values by contender, for one model size and batch


def report(results: dict[int, Result], options: argparse.Namespace) -> Report:
    """Return the report with tables, targets and plots, for the CPU or for a device.

    Args:
        results: Results of `measure`, by number of ranks.
        options: Options of the command.
    """
    if asked_for_device(options):
        return report_on_device(results)
    tables = []
    for ranks, numel, batch, stats in _each(results):
        tables += [_times(ranks, numel, batch, stats), _memory_table(ranks, numel, batch, stats)]
        if batch == HEAVY:
            tables.append(_accounts(ranks, numel, stats))
    targets = [t for ranks, _, batch, stats in _each(results) if batch == HEAVY for t in _targets(ranks, stats)]
    return Report(
        "A training step", tables, targets, [_panels(ranks, b, stats) for ranks, _, b, stats in _each(results)]
    )


def _each(results: dict[int, Result]) -> list[tuple[int, int, str, Stats]]:
    """Return one (ranks, number of parameters, batch, values by contender) per measured case."""
    return [
        (ranks, int(numel), batch, stats)
        for ranks, result in results.items()
        for numel, batches in result["sizes"].items()
        for batch, stats in batches.items()
    ]


# -- targets -----------------------------------------------------------------------------------------------


def _targets(ranks: int, stats: Stats) -> list[ReportTarget]:
    """Return the targets for the communication-heavy batch, which are meant for 2 ranks on 2 cores."""
    targets = []
    for name, most in (("ZeRO-1", 1.0), ("ZeRO-2", 1.0), ("ZeRO-3", 1.1), ("DDP", 1.1)):
        what = f"{ranks} ranks: step time, {name} / one process"
        targets.append(target_of(what, stats.get(name, {}).get("relative"), most=most))
    pairs = [("torch DDP", name, 1.3) for name in ("DDP", "ZeRO-1", "ZeRO-2")]
    for theirs, ours, least in (*pairs, ("FSDP2", "ZeRO-3", 3.0), ("DeepSpeed ZeRO-3", "ZeRO-3", 3.0)):
        timed = all("median" in stats.get(name, {}) for name in (theirs, ours))
        faster, absent = ratio(stats, theirs, ours) if timed else None, stats.get(theirs, {}).get("why", "not measured")
        targets.append(target_of(f"{ranks} ranks: step time, {theirs} / {ours}", faster, least=least, absent=absent))
    for name, others in _COUNTERPARTS.items():
        targets += [_memory_ratio(ranks, stats, name, peer, where) for peer in others for where in ("rank", "node")]
    return targets


def _memory_ratio(ranks: int, stats: Stats, ours: str, theirs: str, where: str) -> ReportTarget:
    what, absent = f"{ranks} ranks: memory per {where}, {ours} / {theirs}", stats.get(theirs, {}).get("why")
    mine, other = (stats.get(name, {}).get("memory") for name in (ours, theirs))
    if not mine or not other:
        return target_of(what, None, most=1, absent=absent or "not measured")
    share = mine[where] / other[where]
    text = f"{share:.2f} ({mine[where] / MIB:.0f} of {other[where] / MIB:.0f} MiB)"
    return target_of(what, share, most=1, text=text)


# -- tables ------------------------------------------------------------------------------------------------


def _title(ranks: int, numel: int, batch: str) -> str:
    return f"{ranks} ranks, {numel / 1e6:.1f} M parameters, {batch}"


def _rows(stats: Stats, cells: Callable[[dict[str, Any]], Sequence[Cell] | None]) -> list[list[Cell]]:
    """Return one row per contender.

    Args:
        stats: Measured values by contender.
        cells: Function that returns the cells of a contender, or None if it has no values; the row then gives the
            reason, and is left out if there is none.
    """
    rows: list[list[Cell]] = []
    width = next((len(c) for values in stats.values() if (c := cells(values)) is not None), 0)
    for name, values in stats.items():
        row = cells(values)
        if row is None and "why" in values:
            rows.append([f"{name} ({values['why']})", *[None] * width])
        elif row is not None:
            rows.append([name, *row])
    return rows


def _times(ranks: int, numel: int, batch: str, stats: Stats) -> ReportTable:
    def cells(values: dict[str, Any]) -> Sequence[Cell] | None:
        if "median" not in values:
            return None
        ms = (values[key] * 1e3 for key in ("median", "best"))
        return (*ms, values["relative"], values["waiting"] * 1e3, values["repeats"], f"{values['loss']:.4f}")

    columns = ("contender", "step ms", "best ms", "/ one process", "not computing ms", "repetitions", "loss")
    note = (
        "Medians. Not computing: the step time minus that of one process, which computes the same and updates all "
        "parameters; it is negative if updating only a share saves more time than communication takes. Loss: of the "
        "last step; all contenders that communicate must agree."
    )
    return ReportTable(f"Step time, {_title(ranks, numel, batch)}", columns, _rows(stats, cells), note)


def _memory_table(ranks: int, numel: int, batch: str, stats: Stats) -> ReportTable:
    def cells(values: dict[str, Any]) -> Sequence[Cell] | None:
        peaks = values.get("memory")
        return None if not peaks else [peaks[key] / MIB for key in ("rank", "node", "process")]

    columns = ("contender", "rank, MiB", "node, MiB", "process of a rank, MiB")
    note = (
        "Peak proportional set size; shared memory counts once per node. The first two columns do not include the "
        "memory of the process before the model was created."
    )
    return ReportTable(f"Memory, {_title(ranks, numel, batch)}", columns, _rows(stats, cells), note)


def _accounts(ranks: int, numel: int, stats: Stats) -> ReportTable:
    accounts = {name: values["account"] for name, values in stats.items() if values.get("account")}
    rows = [[name, *(account[c] / MIB for c in _CATEGORIES)] for name, account in accounts.items()]
    note = "MiB per rank reported by `engine.memory()`, which counts tensors; only for our contenders."
    return ReportTable(f"Bytes by category, {_title(ranks, numel, HEAVY)}", ("contender", *_CATEGORIES), rows, note)


# -- plots -------------------------------------------------------------------------------------------------


def _panels(ranks: int, batch: str, stats: Stats) -> list[Panel]:
    """Return plots of step time, time not computing, and peak memory; one process is grey, ours blue, peers orange."""
    timed = {name: values for name, values in stats.items() if "median" in values}
    seen = {name: values["memory"]["rank"] / MIB for name, values in stats.items() if values.get("memory")}

    def panel(label: str, bars: dict[str, float], mark: float | None = None) -> Panel:
        colours = ["tab:gray" if n == SINGLE else "tab:blue" if n in _COUNTERPARTS else "tab:orange" for n in bars]
        return Panel(f"{ranks} ranks, {batch}", label, bars, colours=colours, mark=mark)

    step, waiting = ({name: of[key] * 1e3 for name, of in timed.items()} for key in ("median", "waiting"))
    return [
        panel("step, ms", step, step[SINGLE]),
        panel("not computing, ms", waiting),
        panel("peak per rank, MiB", seen),
    ]


SHAPE = Shape(vocabulary=2048, layers=6, width=512, tokens=128)
DEVICE_SHAPE = Shape(vocabulary=50304, layers=24, width=1024, tokens=1024)  # 354 M parameters
QUICK_SHAPE = Shape(vocabulary=256, layers=2, width=64, tokens=32)
_AGREE = 2e-4  # largest relative difference of final losses, from another order of sums
_AGREE_BF16 = 0.03  # largest relative difference of final losses in bf16 on a device
_ON_DEVICE = (SINGLE, "DDP", "ZeRO-1", "ZeRO-3", "torch DDP")
_STEPS = 4  # per measurement on a device
_PEAK = 0.4  # target: share of a device's peak
_ROOM = 0.7  # largest share of the node's free memory to use
_WATCHED = 4  # steps whose memory is measured; the first one allocates the optimizer states


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return its exit code."""
    return run(parser(), measure, report, arguments)


def parser() -> BenchmarkParser:
    """Return the options of the benchmark."""
    what = "Compare a training step of DDP and ZeRO-1, 2, 3 with torch and DeepSpeed."
    options_parser = BenchmarkParser("step", what, "2", repeats=21, seconds=300.0, of="one batch, or one size")
    options_parser.names("only", contenders(), "only these contenders, and one process")
    options_parser.number("width", SHAPE.width, "model.width, on the CPU", quick=64)
    options_parser.device("cpu: in fp32; else in bf16 on")
    options_parser.number("samples", 8, f"of {DEVICE_SHAPE.tokens} tokens a rank, on a device", quick=2)
    return options_parser


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Measure step time and memory of all contenders, on the CPU or on a device. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        Measured values, by number of parameters, batch and contender; for a device, see `measure_on_device`.
    """
    if asked_for_device(options):
        return measure_on_device(world, options)
    if world.size == 1:
        raise InputError("one rank has nothing to reduce; use at least 2 ranks", agreed=True)
    shape = replace(QUICK_SHAPE if options.quick else SHAPE, width=options.width)
    sizes = {HEAVY: 1} if options.quick else {HEAVY: 1, LIGHT: 4}  # samples a rank
    with gloo(world):
        by_batch = {batch: _measure(world, shape, samples, options) for batch, samples in sizes.items()}
    return {"nodes": world.num_nodes, "sizes": {str(shape.numel): by_batch}}


def _measure(world: Communicator, shape: Shape, samples: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure all contenders with one batch. Collective.

    If they do not fit into memory together, they run in groups. Each group contains one process, for comparison.

    Args:
        world: Communicator of all ranks.
        shape: Sizes of the model.
        samples: Samples per rank.
        options: Options of the command.

    Returns:
        For each contender its seconds, loss and bytes by category, or {"why": reason that there are none}.
    """
    every = contenders()
    names = _selected(every, options)
    results: dict[str, dict[str, Any]] = {name: {"why": why} for name, why in every.items() if isinstance(why, str)}
    groups, too_large = _groups(world, [name for name in names if name not in results], shape)
    results |= {name: {"why": "does not fit into memory"} for name in too_large}
    size = f"{shape.numel / 1e6:.1f} M parameters, {samples} x {shape.tokens} tokens"
    runnable = dict.fromkeys(name for group in groups for name in group)
    peaks = {name: _memory(world, name, shape, samples) for name in runnable}
    each = argparse.Namespace(repeats=options.repeats, seconds=options.seconds / max(1, len(groups)))
    for group in groups:
        with _fits(world, shape, samples, group) as trainees:
            turns = {name: Contender(t.step, t.prepare, single=True) for name, t in trainees.items()}
            times = timed(world, size, turns, each)
            losses = mean_losses(world, trainees, _AGREE)
            for name, trainee in trainees.items():
                took, alone = times[name], times[SINGLE].median
                values: dict[str, Any] = {"median": took.median, "best": took.best, "repeats": len(took.all)}
                values |= {"relative": took.median / alone, "waiting": took.median - alone, "loss": losses[name]}
                values |= {"account": _largest(world, trainee), "memory": peaks.get(name)}
                results.setdefault(name, values)
    return {name: results[name] for name in names}


def _selected(names: Iterable[str], options: argparse.Namespace) -> list[str]:
    """Return the contenders in `names` that `--only` selects, by default all, and always `SINGLE`."""
    return [name for name in names if name == SINGLE or not options.only or name in options.only]


def _memory(world: Communicator, name: str, shape: Shape, samples: int) -> dict[str, int]:
    """Measure the memory of one contender while no other one exists. Collective.

    Returns:
        Peak bytes, equal on every rank. "rank" and "node": bytes above those before the model was created, of the rank
        and of the node with most; "process": bytes of the whole process of the rank with most.
    """
    first = contender(name, world, Shape(vocabulary=16, layers=1, width=64, tokens=8), 1)
    first.step()  # loads the libraries that a step uses
    first.close()
    allocate(PIECE)
    memory = PeakMemory(world)
    with memory.making():
        trainee = contender(name, world, shape, samples)
    with memory.training():
        for _ in range(_WATCHED):
            trainee.prepare()
            trainee.step()
        world.barrier()
    sizes = world.all_gather_object((world.node, memory.peak, memory.process()))
    trainee.close()
    allocate(LARGE)
    nodes = [sum(taken for node, taken, _ in sizes if node == number) for number in range(world.num_nodes)]
    return {"rank": max(taken for _, taken, _ in sizes), "node": max(nodes), "process": max(of for *_, of in sizes)}


def _groups(world: Communicator, names: Sequence[str], shape: Shape) -> tuple[list[list[str]], list[str]]:
    """Return (groups of contenders that fit into memory together, contenders that never fit). Collective."""
    free = np.array([_available() * _ROOM / world.local_size])
    world.all_reduce(free, "min")
    alone = bytes_needed(SINGLE, shape.numel, world.size)
    groups: list[list[str]] = []
    too_large, used = [], math.inf
    for name in names:
        needed = bytes_needed(name, shape.numel, world.size)
        if alone + (needed if name != SINGLE else 0) > free[0]:
            too_large.append(name)
        elif name != SINGLE:
            if used + needed > free[0]:
                groups.append([SINGLE])
                used = alone
            groups[-1].append(name)
            used += needed
    return groups or ([] if SINGLE in too_large else [[SINGLE]]), too_large


def bytes_needed(name: str, numel: int, ranks: int) -> float:
    """Return an estimate of the bytes of a contender on each rank: fp32 parameters, gradients, moments and buffers.

    Args:
        name: Name of the contender.
        numel: Number of parameters.
        ranks: Number of ranks.
    """
    whole = 16.0 * numel
    if name == SINGLE or "DDP" in name:
        return whole + 4.0 * numel  # torch's buckets, or gradients being reduced
    return whole / ranks + 12.0 * numel  # parameters, gradients and buckets that are not sharded


def _available() -> float:
    """Return the available memory of this node in bytes, MemAvailable of proc(5)."""
    return float(proc.nbytes_of("meminfo", "MemAvailable") or math.inf)


@contextmanager
def _fits(world: Communicator, shape: Shape, samples: int, names: Sequence[str]) -> Iterator[dict[str, Trainee]]:
    """Create contenders, yield them by name, and free their memory at the end. Collective."""
    trainees = {name: contender(name, world, shape, samples) for name in names}
    yield trainees
    for trainee in trainees.values():
        trainee.close()
    trim()  # before the next group is created


def _largest(world: Communicator, trainee: Trainee) -> dict[str, int] | None:
    """Return the bytes by category, each the maximum over the ranks; None if the peer does not count. Collective."""
    if trainee.account is None:
        return None
    values = trainee.account()
    most = np.array(list(values.values()), dtype=np.int64)
    world.all_reduce(most, "max")
    return dict(zip(values, most.tolist(), strict=True))


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
    with on_device(world, device, devices == world.size) as backend:
        of = [(x.to(device), y.to(device)) for x, y in islice(batches(shape, samples, world.rank), _STEPS)]
        names = [n for n in _selected(_ON_DEVICE, options) if backend or n != "torch DDP"]
        trainees = {name: contender(name, world, shape, samples, cycle(of), device) for name in names}
        calls = {name: partial(_repeat, trainee, device) for name, trainee in trainees.items()}
        times = timed(world, f"on {device.type}", calls, options)
        losses = mean_losses(world, trainees, _AGREE_BF16)
        for trainee in trainees.values():
            trainee.close()
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
            f"{ranks} rank(s): DDP in bf16, share of the peak of matrix products",
            result["found"].get("DDP", {}).get("share"),
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
