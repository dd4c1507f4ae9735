"""A training step by DDP and ZeRO-1, 2, 3: ours against torch DDP, FSDP2 and DeepSpeed.

What is timed: gradients of this rank's batch, their reduction, and the update; not the drawing of the batch. All
contenders train the same GPT (about 20 M parameters, fp32) from the same weights on the same tokens with torch's
fused AdamW, one after the other in the same processes, and must come to the same loss, or nothing is reported.

    one process         every rank trains the whole model by itself, all at once: the same work, no communication
    DDP, ZeRO-1, 2, 3   this library; on a node the ranks share one copy of the parameters
    ZeRO-3 gathered     this library without that copy: each unit's parameters are gathered when it computes
    torch DDP           gradients as views of the buckets, over gloo
    FSDP2               `fully_shard` on each block and on the model, over gloo
    DeepSpeed           ZeRO-1, 2, 3 over gloo, where it is installed (extra `peers`)

Two batches a rank: one sample of 128 tokens, where communication and update weigh most, and four. Everything a step
touches lies in main memory when its turn comes: the contenders before it have moved hundreds of megabytes.

Ours sum the norm of the gradients in each step, to refuse one that is not finite; torch's contenders do not.

Memory is measured before time, of each contender by itself while it is made and takes a few steps. `--width`
chooses a larger or smaller GPT, with the number of whose parameters costs grow.

`--device` measures a step in bf16 on a device, in tokens a second:

    one process         plain torch, autocast to bf16; every rank trains the whole model by itself, all at once
    DDP, ZeRO-1, 3      this library in bf16, with an fp32 copy in the optimizer
    torch DDP           autocast to bf16; over the library of the device's maker where each rank has its own device,
                        else over this library's backend of torch.distributed

All use torch's fused AdamW and random tokens that are on the device already. One measurement is a few steps, until the
device has done them.

The share of the peak counts the operations that the model needs, as Chowdhery et al. (2022, PaLM, appendix B) do: for
each token 6 a parameter and 12 · layers · width · tokens for attention, which is not halved for being causal. The tied
embedding counts once, as the matrix of the scores.
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
from benchmarks.runner.peers import ALONE, Shape, Trainee, batches, contender, contenders, gloo, mean_losses, on_device
from benchmarks.runner.report import MIB, Cell, Panel, Report, ReportTable, ReportTarget, judged, ratio
from benchmarks.runner.training_runs import LARGE, PIECE, PeakMemory, give_back, take_from_system
from mpitrain.comm import Communicator
from mpitrain.comm.memory import device as hardware
from mpitrain.errors import InputError
from mpitrain.speeds.timing import Contender
from mpitrain.storage import proc

HEAVY, LIGHT = "communication-heavy", "compute-heavy"  # the batches
_CATEGORIES = ("parameters", "gradients", "states", "activations", "buffers", "padding")
# what a stage of ours is to be compared with in memory
_COUNTERPARTS = {
    "DDP": ("torch DDP",),
    "ZeRO-1": ("torch DDP", "DeepSpeed ZeRO-1"),
    "ZeRO-2": ("torch DDP", "DeepSpeed ZeRO-2"),
    "ZeRO-3": ("FSDP2", "DeepSpeed ZeRO-3"),
    "ZeRO-3 gathered": ("FSDP2", "DeepSpeed ZeRO-3"),
}

Result = dict[str, Any]  # of one rank count
Found = dict[str, dict[str, Any]]  # by contender, at one size and batch


def report(results: dict[int, Result], options: argparse.Namespace) -> Report:
    """Tables, targets and the plot of the results by rank count, of the CPU or of a device."""
    if asked_for_device(options):
        return report_on_device(results)
    tables = []
    for ranks, numel, batch, found in _each(results):
        tables += [_times(ranks, numel, batch, found), _memory_table(ranks, numel, batch, found)]
        if batch == HEAVY:
            tables.append(_accounts(ranks, numel, found))
    targets = [t for ranks, _, batch, found in _each(results) if batch == HEAVY for t in _targets(ranks, found)]
    return Report(
        "A training step", tables, targets, [_panels(ranks, b, found) for ranks, _, b, found in _each(results)]
    )


def _each(results: dict[int, Result]) -> list[tuple[int, int, str, Found]]:
    """(ranks, parameters, batch, what was found)."""
    return [
        (ranks, int(numel), batch, found)
        for ranks, result in results.items()
        for numel, batches in result["sizes"].items()
        for batch, found in batches.items()
    ]


# -- targets -----------------------------------------------------------------------------------------------


def _targets(ranks: int, found: Found) -> list[ReportTarget]:
    """Those for the communication-heavy batch; they were set for 2 ranks on 2 cores."""
    targets = []
    for name, most in (("ZeRO-1", 1.0), ("ZeRO-2", 1.0), ("ZeRO-3", 1.1), ("DDP", 1.1)):
        what = f"{ranks} ranks: a step by {name} / one process'"
        targets.append(judged(what, found.get(name, {}).get("relative"), most=most))
    pairs = [("torch DDP", name, 1.3) for name in ("DDP", "ZeRO-1", "ZeRO-2")]
    for theirs, ours, least in (*pairs, ("FSDP2", "ZeRO-3", 3.0), ("DeepSpeed ZeRO-3", "ZeRO-3", 3.0)):
        timed = all("median" in found.get(name, {}) for name in (theirs, ours))
        faster, absent = ratio(found, theirs, ours) if timed else None, found.get(theirs, {}).get("why", "not measured")
        targets.append(judged(f"{ranks} ranks: a step by {theirs} / {ours}", faster, least=least, absent=absent))
    for name, others in _COUNTERPARTS.items():
        targets += [_smaller(ranks, found, name, theirs, where) for theirs in others for where in ("rank", "node")]
    return targets


def _smaller(ranks: int, found: Found, ours: str, theirs: str, where: str) -> ReportTarget:
    what, absent = f"{ranks} ranks: memory per {where}, {ours} / {theirs}", found.get(theirs, {}).get("why")
    mine, other = (found.get(name, {}).get("memory") for name in (ours, theirs))
    if not mine or not other:
        return judged(what, None, most=1, absent=absent or "not measured")
    share = mine[where] / other[where]
    text = f"{share:.2f} ({mine[where] / MIB:.0f} of {other[where] / MIB:.0f} MiB)"
    return judged(what, share, most=1, text=text)


# -- tables ------------------------------------------------------------------------------------------------


def _title(ranks: int, numel: int, batch: str) -> str:
    return f"{ranks} ranks, {numel / 1e6:.1f} M parameters, {batch}"


def _rows(found: Found, cells: Callable[[dict[str, Any]], Sequence[Cell] | None]) -> list[list[Cell]]:
    """One row a contender. cells: None where it has nothing to tell, for which the row says why."""
    rows: list[list[Cell]] = []
    width = next((len(c) for values in found.values() if (c := cells(values)) is not None), 0)
    for name, values in found.items():
        told = cells(values)
        if told is None and "why" in values:
            rows.append([f"{name} ({values['why']})", *[None] * width])
        elif told is not None:
            rows.append([name, *told])
    return rows


def _times(ranks: int, numel: int, batch: str, found: Found) -> ReportTable:
    def cells(values: dict[str, Any]) -> Sequence[Cell] | None:
        if "median" not in values:
            return None
        ms = (values[key] * 1e3 for key in ("median", "best"))
        return (*ms, values["relative"], values["waiting"] * 1e3, values["repeats"], f"{values['loss']:.4f}")

    columns = ("contender", "step ms", "best ms", "/ one process", "not computing ms", "repetitions", "loss")
    note = (
        "Medians. Not computing: the step less one process' step, which computes the same and updates everything "
        "itself; below zero where a rank saves more by updating its share alone than communication costs. Loss: of "
        "the last step; all that communicate must agree."
    )
    return ReportTable(f"Step time, {_title(ranks, numel, batch)}", columns, _rows(found, cells), note)


def _memory_table(ranks: int, numel: int, batch: str, found: Found) -> ReportTable:
    def cells(values: dict[str, Any]) -> Sequence[Cell] | None:
        peaks = values.get("memory")
        return None if not peaks else [peaks[key] / MIB for key in ("rank", "node", "process")]

    columns = ("contender", "a rank, MiB", "a node, MiB", "a rank's process, MiB")
    note = (
        "Peak proportional set size, shared memory counted once per node; the first two less what the process took "
        "before the model was made."
    )
    return ReportTable(f"Memory, {_title(ranks, numel, batch)}", columns, _rows(found, cells), note)


def _accounts(ranks: int, numel: int, found: Found) -> ReportTable:
    accounts = {name: values["account"] for name, values in found.items() if values.get("account")}
    rows = [[name, *(account[c] / MIB for c in _CATEGORIES)] for name, account in accounts.items()]
    note = "MiB a rank by `engine.memory()`, counted from the tensors, of ours."
    return ReportTable(f"Bytes by category, {_title(ranks, numel, HEAVY)}", ("contender", *_CATEGORIES), rows, note)


# -- plots -------------------------------------------------------------------------------------------------


def _panels(ranks: int, batch: str, found: Found) -> list[Panel]:
    """Step time, of it not computing, and peak memory of a rank; one process grey, ours blue, theirs orange."""
    timed = {name: values for name, values in found.items() if "median" in values}
    seen = {name: values["memory"]["rank"] / MIB for name, values in found.items() if values.get("memory")}

    def panel(label: str, bars: dict[str, float], mark: float | None = None) -> Panel:
        colours = ["tab:gray" if n == ALONE else "tab:blue" if n in _COUNTERPARTS else "tab:orange" for n in bars]
        return Panel(f"{ranks} ranks, {batch}", label, bars, colours=colours, mark=mark)

    step, waiting = ({name: of[key] * 1e3 for name, of in timed.items()} for key in ("median", "waiting"))
    return [
        panel("step, ms", step, step[ALONE]),
        panel("not computing, ms", waiting),
        panel("peak of a rank, MiB", seen),
    ]


SHAPE = Shape(vocabulary=2048, layers=6, width=512, tokens=128)
DEVICE_SHAPE = Shape(vocabulary=50304, layers=24, width=1024, tokens=1024)  # 354 M parameters
QUICK_SHAPE = Shape(vocabulary=256, layers=2, width=64, tokens=32)
_AGREE = 2e-4  # relative: what sums in another order may change of a loss after the run's steps
_AGREE_BF16 = 0.03  # likewise, in bf16 on a device
_ON_DEVICE = (ALONE, "DDP", "ZeRO-1", "ZeRO-3", "torch DDP")
_STEPS = 4  # of one measurement on a device
_PEAK = 0.4  # share of a device's peak that is wanted
_ROOM = 0.7  # of the node's free memory that may be used
_WATCHED = 4  # steps whose memory is measured; the first makes the optimizer's states


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark, and give its exit code."""
    return run(parser(), measure, report, arguments)


def parser() -> BenchmarkParser:
    """Return the options."""
    what = "A training step by DDP and ZeRO-1, 2, 3 against torch and DeepSpeed."
    made = BenchmarkParser("step", what, "2", repeats=21, seconds=300.0, of="one batch, or one size")
    made.names("only", contenders(), "these contenders, and one process")
    made.number("width", SHAPE.width, "model.width, on the CPU", quick=64)
    made.device("cpu: in fp32; else in bf16 on")
    made.number("samples", 8, f"of {DEVICE_SHAPE.tokens} tokens a rank, on a device", quick=2)
    return made


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Everything at this rank count. Collective."""
    if asked_for_device(options):
        return measure_on_device(world, options)
    if world.size == 1:
        raise InputError("one rank has nothing to reduce; start 2 ranks or more", agreed=True)
    shape = replace(QUICK_SHAPE if options.quick else SHAPE, width=options.width)
    sizes = {HEAVY: 1} if options.quick else {HEAVY: 1, LIGHT: 4}  # samples a rank
    with gloo(world):
        found = {batch: _measure(world, shape, samples, options) for batch, samples in sizes.items()}
    return {"nodes": world.num_nodes, "sizes": {str(shape.numel): found}}


def _measure(world: Communicator, shape: Shape, samples: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By contender: seconds, loss, bytes by category; or why there are none. Collective.

    Where not all fit into memory together they run in groups. One process is in each of them, to compare with.
    """
    every = contenders()
    names = _asked(every, options)
    found: dict[str, dict[str, Any]] = {name: {"why": why} for name, why in every.items() if isinstance(why, str)}
    groups, too_large = _groups(world, [name for name in names if name not in found], shape)
    found |= {name: {"why": "does not fit into memory"} for name in too_large}
    size = f"{shape.numel / 1e6:.1f} M parameters, {samples} x {shape.tokens} tokens"
    runnable = dict.fromkeys(name for group in groups for name in group)
    peaks = {name: _memory(world, name, shape, samples) for name in runnable}
    each = argparse.Namespace(repeats=options.repeats, seconds=options.seconds / max(1, len(groups)))
    for group in groups:
        with _alive(world, shape, samples, group) as trainees:
            turns = {name: Contender(t.step, t.prepare, single=True) for name, t in trainees.items()}
            times = timed(world, size, turns, each)
            losses = mean_losses(world, trainees, _AGREE)
            for name, trainee in trainees.items():
                took, alone = times[name], times[ALONE].median
                values: dict[str, Any] = {"median": took.median, "best": took.best, "repeats": len(took.all)}
                values |= {"relative": took.median / alone, "waiting": took.median - alone, "loss": losses[name]}
                values |= {"account": _largest(world, trainee), "memory": peaks.get(name)}
                found.setdefault(name, values)
    return {name: found[name] for name in names}


def _asked(names: Iterable[str], options: argparse.Namespace) -> list[str]:
    """Return the contenders that `--only` names, and one process."""
    return [name for name in names if name == ALONE or not options.only or name in options.only]


def _memory(world: Communicator, name: str, shape: Shape, samples: int) -> dict[str, int]:
    """Of a contender that nothing else runs beside. Collective; the same on every rank.

    Returns:
        rank, node: bytes more than before the model was made, of the rank that takes most, and of a node. process: of
        the whole process of the rank that takes most.
    """
    first = contender(name, world, Shape(vocabulary=16, layers=1, width=64, tokens=8), 1)
    first.step()  # loads the libraries that a step uses
    first.close()
    take_from_system(PIECE)
    memory = PeakMemory(world)
    with memory.making():
        trainee = contender(name, world, shape, samples)
    with memory.training():
        for _ in range(_WATCHED):
            trainee.prepare()
            trainee.step()
        world.barrier()
    told = world.all_gather_object((world.node, memory.taken, memory.process()))
    trainee.close()
    take_from_system(LARGE)
    nodes = [sum(taken for node, taken, _ in told if node == number) for number in range(world.num_nodes)]
    return {"rank": max(taken for _, taken, _ in told), "node": max(nodes), "process": max(of for *_, of in told)}


def _groups(world: Communicator, names: Sequence[str], shape: Shape) -> tuple[list[list[str]], list[str]]:
    """Contenders that fit into memory together, one process in each group; and those that fit into none. Collective."""
    free = np.array([_available() * _ROOM / world.local_size])
    world.all_reduce(free, "min")
    alone = bytes_needed(ALONE, shape.numel, world.size)
    groups: list[list[str]] = []
    too_large, used = [], math.inf
    for name in names:
        needed = bytes_needed(name, shape.numel, world.size)
        if alone + (needed if name != ALONE else 0) > free[0]:
            too_large.append(name)
        elif name != ALONE:
            if used + needed > free[0]:
                groups.append([ALONE])
                used = alone
            groups[-1].append(name)
            used += needed
    return groups or ([] if ALONE in too_large else [[ALONE]]), too_large


def bytes_needed(name: str, numel: int, ranks: int) -> float:
    """About what a contender takes on each rank: fp32 parameters, gradients, two moments, and some room."""
    whole = 16.0 * numel
    if name == ALONE or "DDP" in name:
        return whole + 4.0 * numel  # torch's buckets, or gradients on their way
    return whole / ranks + 12.0 * numel  # parameters, gradients and buckets that a stage keeps whole


def _available() -> float:
    """Bytes of memory that this node can still give, by proc(5)."""
    return float(proc.nbytes_of("meminfo", "MemAvailable") or math.inf)


@contextmanager
def _alive(world: Communicator, shape: Shape, samples: int, names: Sequence[str]) -> Iterator[dict[str, Trainee]]:
    """Contenders by name, all of them ready; their memory is given back at the end. Collective."""
    trainees = {name: contender(name, world, shape, samples) for name in names}
    yield trainees
    for trainee in trainees.values():
        trainee.close()
    give_back()  # before the next groups are made


def _largest(world: Communicator, trainee: Trainee) -> dict[str, int] | None:
    """Bytes by category on the rank that has most of each. Collective."""
    if trainee.account is None:
        return None
    values = trainee.account()
    most = np.array(list(values.values()), dtype=np.int64)
    world.all_reduce(most, "max")
    return dict(zip(values, most.tolist(), strict=True))


# -- on a device -------------------------------------------------------------------------------------------


def measure_on_device(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Everything at this rank count. Collective.

    Raises:
        InputError: There is no such device.
        CommunicationError: The contenders do not train the same.
    """
    device = hardware.of_rank(options.device, world.local_rank)
    hardware.use(device)
    shape, samples = QUICK_SHAPE if options.quick else DEVICE_SHAPE, options.samples
    places = world.all_gather_object([world.node, _place(world, device)])
    devices = len({(node, place) for node, place in places})
    with on_device(world, device, devices == world.size) as backend:
        of = [(x.to(device), y.to(device)) for x, y in islice(batches(shape, samples, world.rank), _STEPS)]
        names = [n for n in _asked(_ON_DEVICE, options) if backend or n != "torch DDP"]
        trainees = {name: contender(name, world, shape, samples, cycle(of), device) for name in names}
        calls = {name: partial(_several, trainee, device) for name, trainee in trainees.items()}
        times = timed(world, f"on {device.type}", calls, options)
        losses = mean_losses(world, trainees, _AGREE_BF16)
        for trainee in trainees.values():
            trainee.close()
    tokens = samples * shape.tokens * world.size
    peak = hardware.matrix_peak(device)
    found: dict[str, Any] = {}
    for name, took in times.items():
        step = took.median / _STEPS
        share = None if peak is None else tokens / step * flops_of_a_token(shape) / (devices * peak)
        found[name] = {"step": step, "tokens": tokens / step, "share": share, "loss": losses[name]}
    memory = world.all_gather_object(hardware.peak_memory_bytes(device))
    facts = {"device": hardware.name(device), "devices": devices, "backend": backend, "memory": max(memory)}
    return {**facts, "parameters": shape.numel, "samples": samples, "tokens": shape.tokens, "found": found}


def flops_of_a_token(shape: Shape) -> float:
    """Floating-point operations that the gradients of one token need."""
    return 6.0 * shape.numel + 12.0 * shape.layers * shape.width * shape.tokens


def _place(world: Communicator, device: torch.device) -> str:
    """Return a name of the rank's device, equal for ranks that share it; an unnamed only device counts as unshared."""
    found = hardware.identity(device)
    return f"rank {world.rank}" if found == str(device) and hardware.count(device.type) == 1 else found


def _several(trainee: Trainee, device: torch.device) -> None:
    """Take a few steps, and wait until the device has done them."""
    for _ in range(_STEPS):
        trainee.step()
        trainee.prepare()
    hardware.synchronize(device)


def report_on_device(results: dict[int, Result]) -> Report:
    """Tables and targets of the results by rank count."""
    targets = [
        judged(
            f"{ranks} rank(s): DDP in bf16, share of the peak of matrix products",
            result["found"].get("DDP", {}).get("share"),
            least=_PEAK,
            percent=True,
            absent="the peak of this device is not known",
        )
        for ranks, result in results.items()
    ]
    return Report("A training step on a device", [_device_table(*item) for item in results.items()], targets)


def _device_table(ranks: int, result: dict[str, Any]) -> ReportTable:
    alone = result["found"][ALONE]["step"]
    rows = []
    for name, of in result["found"].items():
        share = None if of["share"] is None else 100 * of["share"]
        rows.append([name, of["step"] * 1e3, of["tokens"], share, of["step"] / alone, of["loss"]])
    note = (
        f"{result['device']}, {result['devices']} for all ranks; {result['parameters'] / 1e6:.1f} M parameters, "
        f"{result['samples']} x {result['tokens']} tokens a rank, bf16. Peak of the most loaded rank, all contenders "
        f"together: {result['memory'] / 2**20:,.0f} MiB. torch DDP over {result['backend'] or 'nothing: one rank'}."
    )
    columns = ("contender", "step ms", "tokens/s", "% of the peak", "/ one process", "loss")
    return ReportTable(f"{ranks} rank(s)", columns, rows, note)
