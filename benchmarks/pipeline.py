"""Training steps through a pipeline against torch.distributed.pipelining over gloo; idle time against prediction.

Both run the same untied GPT (embedding, blocks, norm, head), divided into the same stages, with the same microbatches
and the same schedule, in the same processes:

    gpipe         ScheduleGPipe
    1f1b          Schedule1F1B
    interleaved   ScheduleInterleaved1F1B       two stages per rank
    zero-bubble   ScheduleZBVZeroBubble         two stages per rank, placed as a V

One forward and backward pass of a batch is timed, after the gradients were set to zero; there is no optimizer.
Microbatches are `small`, as in a pipeline with many of them, where overhead shows, or `large`.

The idle fraction is measured in separate batches in which each step is recorded. The prediction is a simulation of the
schedule with the median time of each stage's steps in those batches, and messages that take no time. The simulated time
is a lower bound for any runtime with the same blocks and schedule; the rest of a measured time is overhead. With more
ranks than cores, ranks take turns, which the simulation does not model; such predictions are left out of the report.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.runner.jobs import BenchmarkParser, run, summaries, timed
from benchmarks.runner.peers import gloo, require_equal
from benchmarks.runner.report import Report, ReportTable, milliseconds, ratio, target_of
from mpitrain.comm import Communicator
from mpitrain.errors import InputError
from mpitrain.layout.boxes import split
from mpitrain.models.gpt import TransformerBlock
from mpitrain.models.losses import cross_entropy
from mpitrain.pipe.pipeline import Pipeline
from mpitrain.pipe.schedule import Backward, BackwardInput, BackwardWeight, Compute, Forward, Schedule, make_schedule
from mpitrain.pipe.simulate import Costs, Simulation, TimedStep, simulate
from mpitrain.speeds.timing import Contender

VOCABULARY, WIDTH, HEADS = 256, 64, 4
SCHEDULES = {  # (stages per rank, torch's class)
    "gpipe": (1, "ScheduleGPipe"),
    "1f1b": (1, "Schedule1F1B"),
    "interleaved": (2, "ScheduleInterleaved1F1B"),
    "zero-bubble": (2, "ScheduleZBVZeroBubble"),
}
SIZES = {"small": (1, 32), "large": (4, 128)}  # (samples, tokens per sample) of a microbatch
_SETTLING, _RECORDED = 5, 3  # batches until halved passes are chosen; recorded ones, of which the median counts


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return its exit code."""
    what, of = "Compare pipeline schedules with torch.distributed.pipelining.", "one schedule and size"
    few = "a pipeline needs several ranks"
    parser = BenchmarkParser("pipeline", what, "2,4", repeats=15, seconds=20.0, of=of, quick=(3, 1.0), too_few=few)
    parser.number("layers", 14, "transformer blocks of the GPT, which has three other blocks")
    parser.number("microbatches", 8, "microbatches of a batch")
    return run(parser, measure, report, arguments)


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Time a batch with each schedule and size, and measure idle fractions. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        Seconds per batch by size, schedule and contender, with the idle fractions of `Case.idle`.
    """
    if options.layers + 3 < 2 * world.size or options.microbatches % world.size:
        raise InputError(
            f"pipeline on {world.size} ranks: two stages per rank need {2 * world.size - 3} layers or more, and "
            f"interleaved in torch a multiple of {world.size} microbatches; change --layers or --microbatches",
            agreed=True,
        )
    result: dict[str, Any] = {"nodes": world.num_nodes, "cores": os.cpu_count()}
    with gloo(world):
        for size, shape in SIZES.items():
            result[size] = {}
            for name in SCHEDULES:
                case = Case(world, name, options, shape)
                times = timed(world, f"{size}, {name}", case.contenders(), options)
                result[size][name] = summaries(times) | {"idle": case.idle()}
    return result


class Case:
    """One schedule with microbatches of one size, for both contenders.

    Args:
        world: Communicator of all ranks.
        name: Name of the schedule.
        options: Options of the command.
        shape: (samples, tokens per sample) of a microbatch.
    """

    def __init__(self, world: Communicator, name: str, options: argparse.Namespace, shape: tuple[int, int]) -> None:
        self.world, self.count, chunks = world, options.microbatches, SCHEDULES[name][0]
        self.schedule = make_schedule(name, world.size, self.count, chunks)
        torch.manual_seed(1)
        model = _gpt(options.layers)
        samples, sequence = shape
        self.x = torch.randint(VOCABULARY, (self.count * samples, sequence))
        self.y = torch.randint(VOCABULARY, (self.count * samples, sequence))
        self.parts = list(zip(self.x.chunk(self.count), self.y.chunk(self.count), strict=True))
        self.weights = [1 / self.count] * self.count
        bounds = split(len(model), self.schedule.stages)
        theirs = {s: deepcopy(model[bounds[s] : bounds[s + 1]]) for s in self.schedule.stages_of(world.rank)}
        self.pipeline = Pipeline(model, cross_entropy, world, schedule=name, chunks=chunks)
        self.recorded = Pipeline(model, cross_entropy, world, schedule=name, chunks=chunks)
        self.recorded.watched, self.times = self._timed, list[tuple[float, float]]()
        self.peer, self.peer_module = _peer(self.schedule, theirs, self.x, self.y)

    def contenders(self) -> dict[str, Contender]:
        """Return our pipeline and torch's as contenders, after a check that both compute the same loss. Collective."""
        expected = self.pipeline.forward_backward(self.parts, self.weights)
        peer_loss = torch.tensor([self.peer()], dtype=torch.float64)
        self.world.broadcast(peer_loss, root=self.schedule.rank_of[-1])
        require_equal({"mpitrain": [expected], "torch": [float(peer_loss)]}, 1e-4)
        ours = partial(self.pipeline.forward_backward, self.parts, self.weights)
        return {
            "mpitrain": Contender(ours, partial(self.pipeline.module.zero_grad, set_to_none=False), single=True),
            "torch": Contender(self.peer, partial(self.peer_module.zero_grad, set_to_none=False), single=True),
        }

    def idle(self) -> dict[str, float] | None:
        """Return the idle fraction as `measured` and `predicted`, and the simulated seconds per batch as `alone`.

        Collective. Ranks other than 0 get None.
        """
        measured = [self._recording() for _ in range(_SETTLING + _RECORDED)][_SETTLING:]
        if self.world.rank != 0:
            return None
        runs = [run for one in measured for of_rank in one.runs for run in of_rank]

        def of(kind: type) -> list[float]:
            times = [[r.end - r.begin for r in runs if type(r.step) is kind and r.step.stage == s] for s in stages]
            return [float(np.median(t)) if t else 0.0 for t in times]

        stages = range(self.schedule.stages)
        whole = of(Backward)
        inputs = [a + b for a, b in zip(whole, of(BackwardInput), strict=True)]
        predicted = simulate(self.schedule, Costs(of(Forward), inputs, of(BackwardWeight)))
        idle = float(np.median([one.idle for one in measured]))
        return {"measured": idle, "predicted": predicted.idle, "alone": predicted.makespan}

    def _recording(self) -> Simulation:
        """Run one batch and return the begin and end of its steps, complete on rank 0 only. Collective."""
        self.times.clear()
        self.world.barrier()
        start = time.perf_counter()
        self.recorded.forward_backward(self.parts, self.weights)
        times = self.world.gather_objects([(begin - start, end - start) for begin, end in self.times])
        runs = (
            tuple(TimedStep(step, *pair) for step, pair in zip(steps, of_rank, strict=True))
            for steps, of_rank in zip(self.schedule.steps, times, strict=False)  # only rank 0 has the times
        )
        return Simulation(self.schedule, tuple(runs), ())

    def _timed(self, step: object, call: Callable[[], None]) -> Callable[[], None]:
        """Return a call that runs a step and records its begin and end; waiting for the input is not included."""

        def run() -> None:
            begin = time.perf_counter()
            call()
            self.times.append((begin, time.perf_counter()))

        return run if isinstance(step, Compute) else call


def _gpt(layers: int) -> nn.Sequential:
    blocks = [TransformerBlock(WIDTH, HEADS, 0.0) for _ in range(layers)]
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.LayerNorm(WIDTH), head)


def _peer(
    schedule: Schedule, modules: dict[int, nn.Module], x: torch.Tensor, y: torch.Tensor
) -> tuple[Callable[[], float], nn.Module]:
    """Return torch's pipeline with the same stages, as (function that runs one batch, module of this rank).

    The function returns the mean loss on the rank with the last stage, and 0 on all others.

    Args:
        schedule: Our schedule.
        modules: This rank's modules by number of the stage.
        x: Input tokens of the whole batch, [samples, tokens].
        y: Target tokens, in the same shape.
    """
    from torch.distributed import pipelining

    device = torch.device("cpu")
    stages = [pipelining.PipelineStage(module, number, schedule.stages, device) for number, module in modules.items()]
    stage_or_stages = stages if schedule.chunks > 1 else stages[0]
    kind = getattr(pipelining, SCHEDULES[schedule.name][1])
    runner = kind(stage_or_stages, n_microbatches=schedule.microbatches, loss_fn=cross_entropy)
    rank = dist.get_rank()
    first, last = schedule.rank_of[0] == rank, schedule.rank_of[-1] == rank

    def step() -> float:
        losses: list[torch.Tensor] = []
        runner.step(*((x,) if first else ()), **({"target": y, "losses": losses} if last else {}))
        return sum(float(loss.detach()) for loss in losses) / len(losses) if losses else 0.0

    return step, nn.ModuleList(modules.values())


def report(results: dict[int, dict[str, Any]], options: argparse.Namespace) -> Report:
    """Return the report with tables and targets.

    Args:
        results: Results of `measure`, by number of ranks.
        options: Options of the command.
    """
    rows: list[dict[str, Any]] = []
    targets = []
    for ranks, result in results.items():
        fits = ranks <= (result["cores"] or 1) * result["nodes"]
        for size in SIZES:
            ratios = []
            for name in SCHEDULES:
                times = dict(result[size][name])
                idle = times.pop("idle")
                ratios.append(ratio(times, "torch", "mpitrain"))
                row = {"ranks": ranks, "microbatch": size, "schedule": name}
                row |= {f"{who} ms": ms for who, ms in milliseconds(times).items()}
                row |= {"computing alone ms": 1e3 * idle["alone"] if fits else None, "times as fast": ratios[-1]}
                row |= {"idle %": 100 * idle["measured"], "predicted idle %": 100 * idle["predicted"] if fits else None}
                rows.append(row)
            least, target = min(ratios), 1.4 if size == "small" else 1.1
            what = f"{ranks} ranks, {size} microbatches, speed relative to torch's pipelining, slowest schedule"
            text = f"{least:.2f} (geometric mean {geometric_mean(ratios):.2f})"
            targets.append(target_of(what, least, least=target, text=text, where=" times as fast"))
    shapes = "; ".join(f"{size}: {samples} x {sequence} tokens" for size, (samples, sequence) in SIZES.items())
    table = ReportTable(
        "One batch forward and backward",
        tuple(rows[0]),
        [tuple(row.values()) for row in rows],
        f"{options.microbatches} microbatches ({shapes}) through a GPT of {options.layers} blocks, {WIDTH} wide. "
        "Computing alone: the schedule simulated with the median time of each step, and messages that take none. "
        "It and the predicted idle time are left out where ranks share cores.",
    )
    return Report("Pipelines", (table,), targets)
