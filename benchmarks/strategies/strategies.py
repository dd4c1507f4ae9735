"""One model by every strategy: DDP, ZeRO, offload, recompute, pipeline, tensor, their mixes; and torch and DeepSpeed.

The same GPT is trained on the same batches from the same weights, one strategy after the other in the same processes,
several times over in turns, and must come to the same losses, or nothing is reported:

    DDP                          every rank has the whole model; gradients are averaged
    ZeRO-1, 2, 3                 shares of optimizer states, gradients, parameters; a node keeps one copy of parameters
    ZeRO-3 gathered              likewise without that copy: blocks are gathered when they compute
    ZeRO-2, states on the host   `parallel.offload host`; on the CPU they are there anyway
    DDP, ZeRO-3, recompute       activations of blocks are computed again in backward
    pipeline, tensor             stages, and layers divided over ranks; and with data parallel ranks beside them
    torch DDP, FSDP2, DeepSpeed  over gloo; DeepSpeed where it is installed (extra `peers`)

Told of each: a step's time and a rank's memory as measured, its memory by category as counted from the tensors (of the
rank that has most of each), and the bytes that a rank sends a step. `--layers`, `--width`, `--heads`, `--sequence` and
`--batch` choose another GPT.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.runner.jobs import Benchmark, parser, run
from benchmarks.runner.peers import gloo
from benchmarks.runner.training_runs import TrainerRun, TrainingRun, Values, measured_runs, merged
from benchmarks.strategies.peers import peers
from benchmarks.strategies.report import report
from mpitrain.comm import Communicator
from mpitrain.config.settings import Config
from mpitrain.errors import CommunicationError, InputError

ROUNDS, STEPS, SECONDS = 3, 10, 5.0
DDP = "DDP"  # with which the others are compared
_AGREE = 2e-4  # relative: what sums in another order may change of a loss
_MODEL = {"layers": 4, "width": 256, "heads": 4, "sequence": 64}
_QUICK = {"layers": 2, "width": 64, "heads": 4, "sequence": 32}
_BATCH = 4  # samples for each rank


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark, and give its exit code."""
    return run(Benchmark("strategies", _parser(), measure, report), arguments)


def _parser() -> argparse.ArgumentParser:
    made = parser("strategies", "One model by every strategy, and by torch's and DeepSpeed's.", ranks="4")
    for key, value in _MODEL.items():
        made.add_argument(f"--{key}", type=int, metavar="N", help=f"model.{key} [{value}]")
    made.add_argument("--batch", type=int, metavar="N", help=f"train.batch [{_BATCH} a rank]")
    made.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"measurements of each [{ROUNDS}]")
    made.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"of a measurement [{STEPS}]")
    made.add_argument("--only", metavar="'A;B'", help="these strategies, and DDP")
    return made


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """What the steps of each strategy take at this rank count. Collective."""
    if world.size == 1:
        raise InputError("one rank has nothing to divide; start 2 ranks or more", agreed=True)
    base = _base(world, options)
    ours = strategies(world.size, base["model"])
    theirs, missing = peers()
    wanted = _wanted(options, [*ours, *theirs, *missing])
    makes: dict[str, Callable[[], TrainingRun]] = {
        name: partial(TrainerRun, world, merged(base, values)) for name, values in ours.items() if name in wanted
    }
    makes |= {name: partial(make, world, base) for name, make in theirs.items() if name in wanted}
    rounds, steps, seconds = (1, 3, 2.0) if options.quick else (options.rounds, options.steps, SECONDS)
    with gloo(world):
        found = measured_runs(world, makes, rounds, steps, seconds)
    _require_the_same(found)
    found |= {name: {"why": why} for name, why in missing.items() if name in wanted}
    return {"nodes": world.num_nodes, "model": base["model"], "batch": base["train"]["batch"], "found": found}


def strategies(ranks: int, model: Mapping[str, int]) -> dict[str, Values]:
    """By name, what each strategy sets, of those that so many ranks and this model allow."""
    parallel: dict[str, dict[str, Any]] = {
        DDP: {},
        **{f"ZeRO-{stage}": {"zero": stage} for stage in (1, 2, 3)},
        "ZeRO-3 gathered": {"zero": 3, "share_node": False},
        "ZeRO-2, states on the host": {"zero": 2, "offload": "host"},
    }
    found: dict[str, Values] = {name: {"parallel": values} for name, values in parallel.items()}
    recompute = {"train": {"recompute": True}}
    found |= {f"{name}, recompute": {"parallel": parallel[name], **recompute} for name in (DDP, "ZeRO-3")}
    for stages, tensor in _shapes(ranks):
        data = ranks // (stages * tensor)
        if stages > model["layers"] or model["heads"] % tensor:
            continue
        words = (
            [f"data {data}"] * (data > 1) + [f"pipeline {stages}"] * (stages > 1) + [f"tensor {tensor}"] * (tensor > 1)
        )
        found[" x ".join(words)] = {"parallel": {"pipeline": stages, "tensor": tensor, "zero": int(data > 1)}}
    return found


def _shapes(ranks: int) -> list[tuple[int, int]]:
    """(pipeline, tensor): all ranks along one axis; two of them beside data parallel ranks; two along each."""
    found = [(ranks, 1), (1, ranks)]
    if ranks % 2 == 0:
        found += [(2, 1), (1, 2)]
    if ranks % 4 == 0:
        found += [(2, 2)]
    return list(dict.fromkeys(found))


def _base(world: Communicator, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What all strategies have in common."""
    usual = _QUICK if options.quick else _MODEL
    model = {key: getattr(options, key) or value for key, value in usual.items()}
    base: dict[str, dict[str, Any]] = {
        "run": {"device": "cpu", "dir": "unused"},
        "model": {"name": "gpt", **model},
        "train": {"batch": options.batch or _BATCH * world.size, "steps": 1000, "evaluate_every": 0, "clip": 0.0},
        "optim": {"schedule": "constant", "warmup": 0, "lr": 1e-3},
    }
    Config.from_dict(base)
    if base["train"]["batch"] % world.size:
        raise InputError(
            f"--batch {base['train']['batch']} is no multiple of {world.size} ranks, which peers of ours need; give "
            f"{base['train']['batch'] // world.size * world.size or world.size}",
            agreed=True,
        )
    return base


def _wanted(options: argparse.Namespace, names: Sequence[str]) -> set[str]:
    if options.only is None:
        return set(names)
    asked = [name.strip() for name in options.only.split(";")]
    unknown = [name for name in asked if name not in names]
    if unknown:
        raise InputError(f"there is no strategy {unknown[0]!r} here; there are {'; '.join(names)}", agreed=True)
    return {DDP, *asked}


def _require_the_same(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise CommunicationError where a strategy comes to other losses than DDP."""
    for name, of in found.items():
        for step, (loss, expected) in enumerate(zip(of["losses"], found[DDP]["losses"], strict=True), 1):
            if not abs(loss - expected) <= _AGREE * expected:
                raise CommunicationError(
                    f"the strategies do not train the same: step {step} of {name} has loss {loss:.6f}, of {DDP} "
                    f"{expected:.6f}"
                )
