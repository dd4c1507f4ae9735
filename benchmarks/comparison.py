"""ResNets and a GPT by every strategy, beside torch and DeepSpeed: the comparison of DDP and DeepSpeed, redone.

For each model, the strategies of the benchmark `strategies` take turns, and these:

    DDP, ZeRO-2, 4 checkpoints    activations are recomputed in backward, from the inputs of 4 groups of blocks
    ZeRO-2, states in files       optimizer states are in memory-mapped files (`parallel.offload`)
    DDP, activations in files     activations are in such files until backward (`train.offload_activations`)

In addition to time, bytes sent and joules, the report has the memory by category within a step, as `monitor.timeline`
records it. Without layers or ranks for it, a strategy is left out. The images are random. BatchNorm has the mean and
variance of a rank's own samples, as under torch's DDP; by default, the trainer has those of the global batch.
`--layers`, `--width`, `--heads` and `--sequence` change the GPT, `--channels` and `--pixels` the ResNets.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.runner.jobs import BenchmarkParser, gpt, run
from benchmarks.runner.peers import gloo
from benchmarks.runner.report import MIB, Panel, Report, ReportTable
from benchmarks.runner.training_runs import UNENDING, Curve, Values, merged, step_seconds
from benchmarks.strategies import DDP, Stats, make_parser, measured_strategies, strategies, table
from mpitrain.comm import Communicator
from mpitrain.data import Description
from mpitrain.data.prepare import prepare
from mpitrain.measuring.self_start import temporary_folder
from mpitrain.models.losses import cross_entropy
from mpitrain.models.resnet import STAGES, ResNet

MODELS = {"ResNet-18": 18, "ResNet-50": 50, "ResNet-101": 101, "GPT": 0}  # layers of the ResNets
_QUICK = ("ResNet-101", "GPT")
CHECKPOINTS = 4
SHOWN = (DDP, f"ZeRO-2, {CHECKPOINTS} checkpoints")  # strategies whose curves are drawn side by side
KINDS = ("parameters", "states", "gradients", "buffers", "activations")  # from the bottom of a picture


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return its exit code."""
    return run(_parser(), measure, report, arguments)


def _parser() -> BenchmarkParser:
    parser = make_parser(
        "comparison", "Train ResNets and a GPT with every strategy, and with torch.", "2", 2, 5, "strategies"
    )
    parser.names("models", MODELS, "only these models", noun="model")
    parser.number("channels", 64, "channels after the stem of a ResNet", quick=8)
    parser.number("pixels", 32, "side of an image", quick=16)
    return parser


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Measure each model with each strategy. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        Results of `measured_strategies`, by model.
    """
    results = {}
    with temporary_folder(world, options.out) as folder, gloo(world):  # DeepSpeed needs one group for all models
        world.on_root(lambda: _make_images(folder, options.pixels))
        train = {"batch": options.samples * world.size, "microbatch": options.samples, "clip": 0.0}
        optim = {"schedule": "constant", "warmup": 0, "lr": 1e-4, "name": "adamw"}
        for name in options.models or (_QUICK if options.quick else MODELS):
            if world.rank == 0:
                print(f" {name}:", flush=True)
            sections = {"model": gpt(options)} if not MODELS[name] else _resnet(MODELS[name], folder, options)
            base = merged(merged(UNENDING, {"train": train, "optim": optim}), sections)
            ours = contenders(world.size, base["model"], folder)
            results[name] = measured_strategies(world, base, ours, options)
    return results


def _make_images(folder: Path, pixels: int) -> None:
    """Write a data set of random images of ten classes into the folder `images`."""
    source = np.random.default_rng(1)
    x = source.normal(size=(256, 3, pixels, pixels)).astype(np.float32)
    np.savez(folder / "images.npz", x=x, y=source.integers(10, size=len(x)))
    prepare([str(folder / "images.npz")], folder / "images", held_out=0.0)


def _resnet(layers: int, folder: Path, options: argparse.Namespace) -> Values:
    factory = {"factory": f"{__name__}:make_resnet", "options": {"layers": layers, "width": options.channels}}
    return {"model": factory, "data": {"path": str(folder / "images")}}


class LocalNorm(nn.Module):
    """BatchNorm with the mean and variance of the samples of one rank and microbatch, and without running ones.

    Args:
        norm: BatchNorm whose parameters it has.
    """

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.batch_norm(x, None, None, self.weight, self.bias, training=True)


def make_resnet(description: Description, layers: int, width: int) -> nn.Module:
    """Create a ResNet for small images with `LocalNorm`; a setting `model.factory`.

    Args:
        description: Description of the images.
        layers: Number of layers.
        width: Channels after the stem.
    """
    model = ResNet(layers, width, 3, 10, cross_entropy, small=True)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, LocalNorm(child))
    return model


def contenders(ranks: int, model: Mapping[str, Any], folder: Path) -> dict[str, Values]:
    """Return the settings of each of our strategies, by name.

    Args:
        ranks: Number of ranks.
        model: Section [model].
        folder: Folder for the files of offloaded states and activations.
    """
    blocks = model["layers"] if "layers" in model else sum(STAGES[model["options"]["layers"]][1])
    by_name = strategies(ranks, {"layers": blocks, "heads": model.get("heads", 1)})
    named = {name: of for name, of in by_name.items() if "recompute" not in name and "host" not in name}
    fewer = {"train": {"recompute": f"every {-(-blocks // CHECKPOINTS)}"}}
    named |= {f"{name}, {CHECKPOINTS} checkpoints": merged(by_name[name], fewer) for name in (DDP, "ZeRO-2")}
    named["ZeRO-2, states in files"] = {"parallel": {"zero": 2, "offload": str(folder / "states")}}
    in_files = {"train": {"offload_activations": str(folder / "activations")}}
    return named | {f"{DDP}, activations in files": merged(by_name[DDP], in_files)}


# -- the report --------------------------------------------------------------------------------------------


def report(results: dict[int, dict[str, Any]], options: argparse.Namespace) -> Report:
    """Return the report with tables and plots.

    Args:
        results: Results of `measure`, by number of ranks.
        options: Options of the command.
    """
    tables, panels = list[ReportTable](), list[Panel]()
    for ranks, models in results.items():
        for name, result in models.items():
            tables += [table(ranks, result, name), _within_step(ranks, result["results"], name)]
        resnets = [name for name in models if MODELS[name]]
        if resnets:
            panels += _curves(models[resnets[-1]]["results"], f"{resnets[-1]}, {ranks} ranks")
        for name, result in models.items():
            panels += _bars(result["results"], f"{name}, {ranks} ranks")
    return Report("DDP, ZeRO, pipelines and tensors beside torch and DeepSpeed", tables, panels=panels)


def peak(curve: Curve) -> Mapping[str, float]:
    """Return the bytes by category at the peak of a step, by the sum of `KINDS`."""
    return max((nbytes for _, nbytes in curve), key=lambda nbytes: sum(map(nbytes.__getitem__, KINDS)))


def _within_step(ranks: int, results: Stats, model: str) -> ReportTable:
    rows = []
    for name, of in results.items():
        totals = [sum(map(nbytes.__getitem__, KINDS)) / MIB for _, nbytes in of["curve"]]
        kinds = [peak(of["curve"])[kind] / MIB for kind in KINDS] if totals else [None] * len(KINDS)
        rows.append([name, min(totals, default=None), max(totals, default=None), *kinds])
    note = (
        "MiB on rank 0, counted from the tensors when a module begins or ends, and before autograd frees one: the "
        "least and the most within a step, and the categories when it is most. Without gradients of activations and "
        "other intermediate results. DeepSpeed hides its tensors."
    )
    columns = ("strategy", "least", "most", *(f"{kind} then" for kind in KINDS))
    return ReportTable(f"{ranks} ranks: memory within a step of {model}", columns, rows, note)


def _curves(results: Stats, title: str) -> list[Panel]:
    """Return plots of the memory within a step: of the strategies in `SHOWN`, side by side, and of all as lines."""
    lines: dict[str, dict[str, tuple[list[float], list[float]]]] = {"": {}}
    for name, of in results.items():
        if not (curve := of["curve"]):
            continue
        share = [100 * at / curve[-1][0] for at, _ in curve]
        mib = {kind: [nbytes[kind] / MIB for _, nbytes in curve] for kind in KINDS}
        lines[""][name] = share, list(map(sum, zip(*mib.values(), strict=True)))
        lines[name] = {kind: (share, of_kind) for kind, of_kind in mib.items()}
    top = 1.1 * max((max(total) for _, total in lines[""].values()), default=1.0)
    across, label = "% of the step", "MiB of rank 0"
    shown = [Panel(label, across, lines[name], {}, f"{title}: {name}", kind="areas", top=top) for name in SHOWN]
    plain = {name: {"marker": ""} for name in lines[""]}
    every = Panel(label, across, lines[""], plain, f"{title}: sum", top=top)
    return [*shown, every]


def _bars(results: Stats, title: str) -> list[Panel]:
    """Return plots of a model's strategies: time, memory by category at its peak, and bytes sent."""
    counted = {name: peak(of["curve"]) for name, of in results.items() if of["curve"]}
    memory = {kind: (list(counted), [of[kind] / MIB for of in counted.values()]) for kind in KINDS}
    through = {name: of["sent"]["inside"] for name, of in results.items()}
    sent = list(through), [(nbytes or 0.0) / 1e6 for nbytes in through.values()]
    seconds = list(results), [step_seconds(of) for of in results.values()]
    return [
        Panel("", "seconds of a step", {"": seconds}, {}, title, kind="bars"),
        Panel("", "MiB of rank 0, when it has most", memory, {}, title, kind="bars"),
        Panel("", "MB that a rank sends per step, inside its node", {"": sent}, {}, title, kind="bars"),
    ]
