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

Memory is measured in jobs of their own, one for each contender: see `step_memory`. `--grow` measures how the step's
time grows with ranks and parameters instead, without the memory; `--device` a step in bf16 on a device (`step_device`).
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.collectives.device import asked_for
from benchmarks.runner.freed_memory import give_back
from benchmarks.runner.jobs import Benchmark, launched, parser, repeated, run
from benchmarks.runner.peers import gloo
from benchmarks.runner.report import Report
from benchmarks.step import device as step_device
from benchmarks.step.contenders import ALONE, Shape, Trainee, bytes_needed, contender, contenders
from benchmarks.step.memory import measured_apart, remembered
from benchmarks.step.report import HEAVY, LIGHT, report
from mpitrain.comm import Communicator
from mpitrain.errors import EXIT_DONE, CommunicationError, InputError
from mpitrain.speeds.timing import Contender, interleaved

SHAPE = Shape(vocabulary=2048, layers=6, width=512, tokens=128)
QUICK_SHAPE = Shape(vocabulary=256, layers=2, width=64, tokens=32)
WIDTHS = (256, 512, 1024)  # 5, 20 and 78 M parameters
QUICK_WIDTHS = (64, 128)
GROWING = (ALONE, "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3 gathered", "torch DDP", "FSDP2", "DeepSpeed ZeRO-3")
_AGREE = 2e-4  # relative: what sums in another order may change of a loss after the run's steps
_ROOM = 0.7  # of the node's free memory that may be used


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark, and give its exit code."""
    benchmark = Benchmark("step", _parser(), measure, shown)
    if launched():
        return run(benchmark, arguments)
    options = benchmark.parser.parse_args(list(arguments))
    if options.grow or asked_for(options):
        return run(benchmark, arguments)
    names = [name for name, made in contenders().items() if not isinstance(made, str) and _wanted(name, options)]
    shape = QUICK_SHAPE if options.quick else SHAPE
    with tempfile.TemporaryDirectory(prefix="mpitrain-bench-step-") as folder:
        code = measured_apart(shape, _batches(options), names, options.ranks, options.limit, Path(folder))
        return run(benchmark, arguments) if code == EXIT_DONE else code


def shown(results: dict[int, Any], options: argparse.Namespace) -> Report:
    """The report of the results by rank count, of the CPU or of a device."""
    return (step_device.report if asked_for(options) else report)(results, options)


def _parser() -> argparse.ArgumentParser:
    made = parser("step", "A training step by DDP and ZeRO-1, 2, 3 against torch and DeepSpeed.", ranks="2")
    repeated(made, 21, 300, "one batch, or one size")
    made.add_argument("--only", type=_names, metavar="A,B", help="these contenders, and one process")
    made.add_argument(
        "--grow", action="store_true", help="how the cost grows with parameters, and with --ranks 2,4,8 with ranks"
    )
    made.add_argument(
        "--device",
        default="cpu",
        metavar="KIND",
        help="in bf16 on a device: auto (an accelerator, where there is one), cuda, xpu and so on [cpu, in fp32]",
    )
    made.add_argument(
        "--samples",
        type=int,
        default=step_device.SAMPLES,
        metavar="N",
        help=f"of {step_device.SHAPE.tokens} tokens a rank, on a device [{step_device.SAMPLES}]",
    )
    return made


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Everything at this rank count. Collective."""
    if asked_for(options):
        return step_device.measure(world, options)
    if world.size == 1:
        raise InputError("one rank has nothing to reduce; start 2 ranks or more", agreed=True)
    shapes = [QUICK_SHAPE if options.quick else SHAPE]
    if options.grow:
        shapes = [replace(shapes[0], width=width) for width in (QUICK_WIDTHS if options.quick else WIDTHS)]
    names = [name for name in (GROWING if options.grow else contenders()) if _wanted(name, options)]
    sizes: dict[str, Any] = {}
    with gloo(world):
        for shape in shapes:
            batches = _batches(options).items()
            found = {batch: _measure(world, shape, samples, names, options) for batch, samples in batches}
            sizes[str(shape.numel)] = found
            if not options.grow:
                for batch, (name, values) in ((b, item) for b, of in found.items() for item in of.items()):
                    values["memory"] = remembered(world.size, name, batch)
    return {"nodes": world.num_nodes, "sizes": sizes}


def _batches(options: argparse.Namespace) -> dict[str, int]:
    """By name, samples a rank."""
    return {HEAVY: 1} if options.grow or options.quick else {HEAVY: 1, LIGHT: 4}


def _wanted(name: str, options: argparse.Namespace) -> bool:
    return name == ALONE or not options.only or name in options.only


def _measure(
    world: Communicator, shape: Shape, samples: int, names: Sequence[str], options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """By contender: seconds, loss, bytes by category; or why there are none. Collective.

    Where not all fit into memory together they run in groups. One process is in each of them, to compare with.
    """
    repeats, seconds = (3, 20.0) if options.quick else (options.repeats, options.seconds)
    missing = {name: why for name, why in contenders().items() if isinstance(why, str)}
    found: dict[str, dict[str, Any]] = {name: {"why": why} for name, why in missing.items()}
    groups, too_large = _groups(world, [name for name in names if name not in missing], shape)
    found |= {name: {"why": "does not fit into memory"} for name in too_large}
    for group in groups:
        with _alive(world, shape, samples, group) as trainees:
            turns = {name: Contender(t.step, t.prepare, single=True) for name, t in trainees.items()}
            times = interleaved(world, turns, repeats, seconds / len(groups))
            losses = _losses(world, trainees)
            for name, trainee in trainees.items():
                took, alone = times[name], times[ALONE].median
                values = {"median": took.median, "best": took.best, "repeats": len(took.all)}
                values |= {"relative": took.median / alone, "waiting": took.median - alone}
                found.setdefault(name, values | {"loss": losses[name], "account": _largest(world, trainee)})
        if world.rank == 0:
            size = f"{shape.numel / 1e6:.1f} M parameters, {samples} x {shape.tokens} tokens"
            print(f"  {world.size} ranks, {size}: {', '.join(group)}", flush=True)
    return {name: found[name] for name in names}


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


def _available() -> float:
    """Bytes of memory that this node can still give, by proc(5)."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


@contextmanager
def _alive(world: Communicator, shape: Shape, samples: int, names: Sequence[str]) -> Iterator[dict[str, Trainee]]:
    """Contenders by name, all of them ready; their memory is given back at the end. Collective."""
    trainees = {name: contender(name, world, shape, samples) for name in names}
    yield trainees
    for trainee in trainees.values():
        trainee.close()
    give_back()  # before the next groups are made


def _losses(world: Communicator, trainees: Mapping[str, Trainee]) -> dict[str, float]:
    """The last loss of each, over all ranks. Collective. Raises CommunicationError where two of them disagree."""
    losses = np.array([trainee.loss for trainee in trainees.values()])
    world.all_reduce(losses)
    found = dict(zip(trainees, losses.tolist(), strict=True))
    shared = {name: loss for name, loss in found.items() if name != ALONE}
    for name, loss in shared.items():
        expected = next(iter(shared.values()))
        if not abs(loss - expected) <= _AGREE * expected:
            told = ", ".join(f"{name} {loss:.5f}" for name, loss in shared.items())
            raise CommunicationError(f"the contenders do not train the same: losses {told}; {name} differs")
    return found


def _largest(world: Communicator, trainee: Trainee) -> dict[str, int] | None:
    """Bytes by category on the rank that has most of each. Collective."""
    if trainee.account is None:
        return None
    values = trainee.account()
    most = np.array(list(values.values()), dtype=np.int64)
    world.all_reduce(most, "max")
    return dict(zip(values, most.tolist(), strict=True))


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in contenders()]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no contender {unknown[0]!r}; there are {', '.join(contenders())}")
    return names
