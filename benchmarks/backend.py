"""PyTorch over our torch.distributed backend against PyTorch over gloo, in the same processes and the same run.

Two things are timed: `torch.distributed.all_reduce` of float32 at 1 to 64 MiB, and whole training steps (forward,
backward, AdamW) of a GPT with 19 million parameters under DistributedDataParallel and FSDP2 (`fully_shard`). "FSDP2
kept" calls `set_allocate_memory_from_process_group_for_comm`, which has no effect over gloo. Everything except the
process group is torch's own code. Both backends train copies of one model on the same samples; if their losses differ,
the benchmark fails. The batch of each rank is fixed, so more ranks do more work. A third step trains the whole model on
each rank without a group. No backend makes DDP faster than that.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from benchmarks.runner.jobs import BenchmarkParser, run, summaries, timed
from benchmarks.runner.peers import fully_sharded, gloo, require_equal, torch_training
from benchmarks.runner.report import MIB, Report, ReportTable, milliseconds, ratio, target_of
from mpitrain.comm import Communicator
from mpitrain.models.gpt import GPT
from mpitrain.models.losses import cross_entropy
from mpitrain.speeds.timing import Contender

SIZES = (1, 4, 16, 64)  # MiB
TOKENS = ((1, 128), (4, 128))  # (samples per rank, tokens per sample)
VOCABULARY, LAYERS, WIDTH, HEADS = 512, 6, 512, 8
Groups = dict[str, Any]  # process groups of torch.distributed by backend
TARGET = {"all_reduce": 3.0, "DDP": 1.25, "FSDP2": 1.5}  # target: speed relative to gloo
ALONE = "without a group"  # a step of the model that is not wrapped
_CHECKED = 3  # steps whose losses are compared
_AGREE = 1e-3  # largest relative difference of losses


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return its exit code."""
    what = "Compare PyTorch's DDP, FSDP2 and all_reduce over our backend with gloo."
    parser = BenchmarkParser("backend", what, "2,4", repeats=21, seconds=60.0, of="one comparison", quick=(5, 60.0))
    return run(parser, measure, report, arguments)


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Time all operations and training steps over both backends. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        Median and best seconds, by operation or step, then by backend.
    """
    result: dict[str, Any] = {}

    def compare(name: str, calls: dict[str, Callable[[], object]]) -> None:
        contenders = {backend: Contender(call) for backend, call in calls.items()}
        result[name] = summaries(timed(world, name, contenders, options))

    with gloo(world):
        groups = both_groups()
        for mib in SIZES[:2] if options.quick else SIZES:
            compare(f"all_reduce {mib} MiB", {b: _all_reduce(group, mib) for b, group in groups.items()})
        for samples, tokens in TOKENS[:1] if options.quick else TOKENS:
            for kind in WRAPS:
                compare(f"{kind} {samples} x {tokens}", dict(steps(groups, kind, samples, tokens)))
    return result


def both_groups() -> Groups:
    """Return the process group over our backend, and the default group, which is over gloo. Collective."""
    import mpitrain.backend

    return {"mpitrain": dist.new_group(backend=mpitrain.backend.NAME), "gloo": dist.group.WORLD}


def steps(groups: Groups, kind: str, samples: int, tokens: int) -> dict[str, Callable[[], float]]:
    """Return functions that take one training step: one for each backend, whose losses must agree, and `ALONE`.

    Collective.

    Args:
        groups: Process group of each backend.
        kind: Name of the wrapper, a key of `WRAPS`.
        samples: Samples per rank.
        tokens: Tokens per sample.
    """
    torch.manual_seed(1)
    model, wrap = GPT(VOCABULARY, LAYERS, WIDTH, HEADS), WRAPS[kind]
    every = {b: _step(wrap(copy.deepcopy(model), group), samples, tokens) for b, group in groups.items()}
    require_equal({b: [step() for _ in range(_CHECKED)] for b, step in every.items()}, _AGREE)
    return every | {ALONE: _step(model, samples, tokens)}


def _all_reduce(group: dist.ProcessGroup | None, mib: int) -> Callable[[], object]:
    x = torch.zeros(mib * MIB // 4)
    return lambda: dist.all_reduce(x, group=group)


def _fsdp_kept(model: Any, group: Any) -> nn.Module:
    wrapped = fully_sharded(model, group)
    for module in wrapped.modules():
        if isinstance(module, FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)
    return wrapped


WRAPS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "DDP": lambda model, group: DistributedDataParallel(model, process_group=group),
    "FSDP2": fully_sharded,
    "FSDP2 kept": _fsdp_kept,
}


def _step(model: nn.Module, samples: int, tokens: int) -> Callable[[], float]:
    """Return a function that takes one training step on this rank's own samples and returns the loss."""
    source = torch.Generator().manual_seed(dist.get_rank())
    data = torch.randint(VOCABULARY, (samples, tokens + 1), generator=source)
    training = torch_training(model, cross_entropy, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4))

    def step() -> float:
        loss = training.gradients(data[:, :-1], data[:, 1:])
        training.update()
        return float(loss)

    return step


# -- the report --------------------------------------------------------------------------------------------


def report(results: dict[int, Any], options: argparse.Namespace) -> Report:
    """Return the report with tables and targets.

    Args:
        results: Results of `measure`, by number of ranks.
        options: Options of the command.
    """
    tables, targets = [], []
    for ranks, result in results.items():
        rows = []
        for name, times in result.items():
            most = ratio(times, "gloo", ALONE) if ALONE in times else None
            ms = map(milliseconds(times).get, ("mpitrain", "gloo", ALONE))
            rows.append((name, *ms, most, ratio(times, "gloo", "mpitrain")))
        columns = ("operation or step", "mpitrain", "gloo", ALONE, f"gloo / {ALONE}", "gloo / mpitrain")
        note = f"Median milliseconds; steps are named by samples x tokens per rank. {ALONE.capitalize()}: not reduced."
        tables.append(ReportTable(f"{ranks} ranks", columns, rows, note))
        for kind, least_factor in TARGET.items():
            least = min(faster for name, *_, faster in rows if name.split()[0] == kind)
            what = f"{ranks} ranks: {kind}, speed relative to gloo, worst case"
            targets.append(target_of(what, least, least=least_factor, where=" times"))
    return Report("PyTorch over our backend and over gloo", tables, targets)
