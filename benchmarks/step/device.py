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
from functools import partial
from itertools import cycle
from typing import Any

import torch

from benchmarks.runner.jobs import timed
from benchmarks.runner.peers import on_device
from benchmarks.runner.report import Report, ReportTable, judged
from benchmarks.step.contenders import ALONE, Batch, Shape, Trainee, TraineePlace, contender, mean_losses
from mpitrain.comm import Communicator
from mpitrain.comm.memory import device as hardware

SHAPE = Shape(vocabulary=50304, layers=24, width=1024, tokens=1024)  # 354 M parameters
QUICK_SHAPE = Shape(vocabulary=256, layers=2, width=64, tokens=32)
SAMPLES, QUICK_SAMPLES = 8, 2  # of a rank
_CONTENDERS = (ALONE, "DDP", "ZeRO-1", "ZeRO-3", "torch DDP")
_STEPS = 4  # of one measurement
_WANTED = 0.4  # share of the peak
_AGREE = 0.03  # relative: what bf16 may change of a loss after the run's steps


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Everything at this rank count. Collective.

    Raises:
        InputError: There is no such device.
        CommunicationError: The contenders do not train the same.
    """
    device = hardware.of_rank(options.device, world.local_rank)
    hardware.use(device)
    shape, samples = QUICK_SHAPE if options.quick else SHAPE, options.samples
    places = world.all_gather_object([world.node, _place(world, device)])
    devices = len({(node, place) for node, place in places})
    with on_device(world, device, devices == world.size) as backend:
        of = _batches(world.rank, device, shape, samples)
        trainees = {
            name: contender(name, world, shape, samples, cycle(of), TraineePlace(device, "bf16"))
            for name in _CONTENDERS
            if (name == ALONE or not options.only or name in options.only) and (backend or name != "torch DDP")
        }
        calls = {name: partial(_several, trainee, device) for name, trainee in trainees.items()}
        times = timed(world, f"on {device.type}", calls, options)
        losses = mean_losses(world, trainees, _AGREE)
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
    """What is the same for ranks that share a device; one that has no name and is a rank's only one is not shared."""
    found = hardware.identity(device)
    return f"rank {world.rank}" if found == str(device) and hardware.count(device.type) == 1 else found


def _batches(rank: int, device: torch.device, shape: Shape, samples: int) -> list[Batch]:
    """Tokens and the token after each, on the device."""
    source = torch.Generator().manual_seed(rank)
    drawn = torch.randint(shape.vocabulary, (_STEPS, samples, shape.tokens + 1), generator=source).to(device)
    return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in drawn]


def _several(trainee: Trainee, device: torch.device) -> None:
    """What is measured: a few steps, until the device has done them."""
    for _ in range(_STEPS):
        trainee.step()
        trainee.prepare()
    hardware.synchronize(device)


# -- the report


def report(results: dict[int, dict[str, Any]], options: argparse.Namespace) -> Report:
    """Tables and targets of the results by rank count."""
    targets = [
        judged(
            f"{ranks} rank(s): DDP in bf16, share of the peak of matrix products",
            result["found"].get("DDP", {}).get("share"),
            least=_WANTED,
            percent=True,
            absent="the peak of this device is not known",
        )
        for ranks, result in results.items()
    ]
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
