"""A training step of a GPT in bf16 on a device: ours against plain torch and torch DDP, in tokens a second.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.runner.peers import on_device
from benchmarks.runner.report import Report, ReportTable, ReportTarget
from benchmarks.step.contenders import ALONE, RATE, Shape
from mpitrain.comm import Communicator
from mpitrain.comm.memory import device as hardware
from mpitrain.errors import CommunicationError
from mpitrain.models.gpt import GPT
from mpitrain.shard.sharding import Options
from mpitrain.speeds.timing import Contender, interleaved
from mpitrain.trainer.engine import Engine

SHAPE = Shape(vocabulary=50304, layers=24, width=1024, tokens=1024)  # 354 M parameters
QUICK_SHAPE = Shape(vocabulary=256, layers=2, width=64, tokens=32)
SAMPLES, QUICK_SAMPLES = 8, 2  # of a rank
_STEPS = 4  # of one measurement
_WANTED = 0.4  # share of the peak
_AGREE = 0.03  # relative: what bf16 may change of a loss after the run's steps

Step = Callable[[], torch.Tensor]
Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Everything at this rank count. Collective.

    Raises:
        InputError: There is no such device.
        CommunicationError: The contenders do not train the same.
    """
    device = hardware.of_rank(options.device, world.local_rank)
    hardware.use(device)
    shape, samples = (QUICK_SHAPE, QUICK_SAMPLES) if options.quick else (SHAPE, options.samples)
    repeats, seconds = (3, 20.0) if options.quick else (options.repeats, options.seconds)
    places = world.all_gather_object([world.node, _place(world, device)])
    devices = len({(node, place) for node, place in places})
    own = devices == world.size
    found: dict[str, Any] = {}
    with on_device(world, device, own) as backend:
        made = _contenders(world, device, shape, samples, backend)
        wanted = {name: one for name, one in made.items() if name == ALONE or not options.only or name in options.only}
        losses: dict[str, float] = {}

        def several(name: str, step: Step) -> None:
            for _ in range(_STEPS):
                loss = step()
            hardware.synchronize(device)
            losses[name] = float(loss)

        with _built(wanted) as steps:
            turns = {name: Contender(partial(several, name, step), single=True) for name, step in steps.items()}
            times = interleaved(world, turns, repeats, seconds)
    tokens = _STEPS * samples * shape.tokens * world.size
    for name, took in times.items():
        rate = tokens / took.median
        peak = hardware.matrix_peak(device)
        share = rate * flops_of_a_token(shape) / (devices * peak) if peak is not None else None
        found[name] = {"step": took.median / _STEPS, "tokens": rate, "share": share, "loss": losses[name]}
    _check(world, found)
    memory = world.all_gather_object(hardware.peak_memory_bytes(device))
    facts = {"device": hardware.name(device), "devices": devices, "backend": backend, "memory": max(memory)}
    return {**facts, "parameters": shape.numel, "samples": samples, "tokens": shape.tokens, "found": found}


def flops_of_a_token(shape: Shape) -> float:
    """Floating-point operations that the gradients of one token need."""
    return 6.0 * shape.numel + 12.0 * shape.layers * shape.width * shape.tokens


def _place(world: Communicator, device: torch.device) -> str:
    """What is the same for ranks that share a device; one that has no name and is a rank's only one is not shared."""
    found = hardware.identity(device)
    return f"rank {world.rank}" if found == str(device) and hardware.count(device.type) == 1 else found


def _contenders(
    world: Communicator, device: torch.device, shape: Shape, samples: int, backend: str
) -> dict[str, Callable[[], tuple[Step, Callable[[], object]]]]:
    """By name: what makes a contender, that is its step and what ends it."""
    batches = _batches(world.rank, device, shape, samples)
    ours = {"DDP": Options(zero=0), "ZeRO-1": Options(zero=1), "ZeRO-3": Options(zero=3)}
    made: dict[str, Any] = {ALONE: partial(_of_torch, device, shape, batches, 1, lambda model: model)}
    made |= {name: partial(_ours, world, device, shape, batches, options) for name, options in ours.items()}
    if backend:
        made["torch DDP"] = partial(_of_torch, device, shape, batches, world.size, _torch_ddp)
    return made


@contextmanager
def _built(made: dict[str, Callable[[], tuple[Step, Callable[[], object]]]]) -> Iterator[dict[str, Step]]:
    built = {name: make() for name, make in made.items()}
    yield {name: step for name, (step, _) in built.items()}
    for _, end in built.values():
        end()


def _batches(rank: int, device: torch.device, shape: Shape, samples: int) -> Batches:
    """Tokens and the token after each, on the device."""
    source = torch.Generator().manual_seed(rank)
    drawn = torch.randint(shape.vocabulary, (_STEPS, samples, shape.tokens + 1), generator=source).to(device)
    return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in drawn]


def _of_torch(
    device: torch.device, shape: Shape, batches: Batches, ranks: int, wrap: Callable[[GPT], nn.Module]
) -> tuple[Step, Callable[[], object]]:
    model = shape.build().to(device)
    wrapped = wrap(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=RATE, fused=True)
    turn = iter(_endless(batches))

    def step() -> torch.Tensor:
        x, y = next(turn)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model.loss(wrapped(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach() / ranks

    return step, lambda: None


def _torch_ddp(model: GPT) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def _ours(
    world: Communicator, device: torch.device, shape: Shape, batches: Batches, options: Options
) -> tuple[Step, Callable[[], object]]:
    model = shape.build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    engine = Engine(model, model.loss, optimizer, world, options, precision="bf16")
    turn = iter(_endless(batches))

    def step() -> torch.Tensor:
        x, y = next(turn)
        loss = engine.forward_backward([[(x, y)]], len(x) * world.size)[0]
        engine.step()
        return loss

    return step, engine.close


def _endless(batches: Batches) -> Iterator[Any]:
    while True:
        yield from batches


def _check(world: Communicator, found: dict[str, Any]) -> None:
    """Make sure that all but one process alone have come to the same loss. Collective."""
    names = [name for name in found if name != ALONE]
    everyone = world.all_gather_object([found[name]["loss"] for name in names])
    sums = [math.fsum(of_ranks) for of_ranks in zip(*everyone, strict=True)]
    for name, loss in zip(names, sums, strict=True):
        found[name]["loss"] = loss
        if not abs(loss - sums[0]) <= _AGREE * abs(sums[0]):
            told = ", ".join(f"{name} {loss:.4f}" for name, loss in zip(names, sums, strict=True))
            raise CommunicationError(f"the contenders do not train the same: losses {told}; {name} differs")


# -- the report


def report(results: dict[int, dict[str, Any]], options: argparse.Namespace) -> Report:
    """Tables and targets of the results by rank count."""
    targets = [_target(ranks, result) for ranks, result in results.items()]
    return Report("A training step on a device", [_table(*item) for item in results.items()], targets)


def _table(ranks: int, result: dict[str, Any]) -> ReportTable:
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


def _target(ranks: int, result: dict[str, Any]) -> ReportTarget:
    share = result["found"].get("DDP", {}).get("share")
    measured = "the peak of this device is not known" if share is None else f"{100 * share:.1f} %"
    what = f"{ranks} rank(s): DDP in bf16, share of the peak of matrix products"
    return ReportTarget(what, f"≥ {100 * _WANTED:.0f} %", measured, None if share is None else share >= _WANTED)
