"""PyTorch over our torch.distributed backend against PyTorch over gloo, in the same processes and the same run.

`torch.distributed.all_reduce` of float32 at 1 to 64 MiB, and whole training steps (forward, backward, AdamW) of a
GPT of 19 million parameters under DistributedDataParallel and FSDP2 (`fully_shard`; "kept": after its
`set_allocate_memory_from_process_group_for_comm`, which does nothing over gloo). Everything but the process
group is torch's own, and both train copies of one model on the same samples: their losses must agree, or nothing is
reported. Each rank's batch is fixed, so more ranks do more work.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.runner.jobs import Benchmark, parser, repeated, run
from benchmarks.runner.peers import fully_sharded, gloo
from benchmarks.runner.report import Report, ReportTable, ReportTarget
from benchmarks.runner.statistics import plain
from mpitrain.errors import CommunicationError
from mpitrain.models.gpt import GPT
from mpitrain.speeds.timing import Contender, interleaved

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

SIZES = (1, 4, 16, 64)  # MiB
TOKENS = ((1, 128), (4, 128))  # samples and tokens of each on a rank
VOCABULARY, LAYERS, WIDTH, HEADS = 512, 6, 512, 8
WANTED = {"all_reduce": 3.0, "DDP": 1.0, "FSDP2": 1.5}  # times as fast as over gloo
_CHECKED = 3  # steps whose losses are compared
_MIB = 1 << 20


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark, and give its exit code."""
    options = parser("backend", "PyTorch's DDP, FSDP2 and all_reduce over our backend against gloo.", ranks="2,4")
    repeated(options, 21, 60, "one comparison")
    return run(Benchmark("backend", options, measure, report), arguments)


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """What is measured at this rank count. Collective."""
    import mpitrain.backend

    repeats = 5 if options.quick else options.repeats
    result: dict[str, Any] = {}

    def compare(name: str, contenders: dict[str, Contender]) -> None:
        result[name] = plain(interleaved(world, contenders, repeats, options.seconds))
        if world.rank == 0:
            print(f"  {world.size} ranks, {name}", flush=True)

    with gloo(world):
        groups = {"mpitrain": dist.new_group(backend=mpitrain.backend.NAME), "gloo": dist.group.WORLD}
        for mib in SIZES[:2] if options.quick else SIZES:
            compare(f"all_reduce {mib} MiB", {b: _all_reduce(group, mib) for b, group in groups.items()})
        for samples, tokens in TOKENS[:1] if options.quick else TOKENS:
            for kind, wrap in (("DDP", _ddp), ("FSDP2", fully_sharded), ("FSDP2 kept", _fsdp_kept)):
                torch.manual_seed(1)
                model = GPT(VOCABULARY, LAYERS, WIDTH, HEADS)
                steps = {b: _step(wrap(copy.deepcopy(model), group), samples, tokens) for b, group in groups.items()}
                _agree(kind, {backend: [step() for _ in range(_CHECKED)] for backend, step in steps.items()})
                compare(f"{kind} {samples} x {tokens}", {b: Contender(step) for b, step in steps.items()})
    return result


def _all_reduce(group: dist.ProcessGroup | None, mib: int) -> Contender:
    x = torch.zeros(mib * _MIB // 4)
    return Contender(lambda: dist.all_reduce(x, group=group))


def _ddp(model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    return DistributedDataParallel(model, process_group=group)


def _fsdp_kept(model: Any, group: Any) -> nn.Module:
    made = fully_sharded(model, group)
    for module in made.modules():
        if isinstance(module, FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)
    return made


def _step(model: nn.Module, samples: int, tokens: int) -> Callable[[], float]:
    """One training step on this rank's own samples; its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    source = torch.Generator().manual_seed(dist.get_rank())
    data = torch.randint(VOCABULARY, (samples, tokens + 1), generator=source)

    def step() -> float:
        optimizer.zero_grad()
        scores = model(data[:, :-1])
        loss = functional.cross_entropy(scores.flatten(0, 1), data[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _agree(kind: str, losses: dict[str, list[float]]) -> None:
    ours, theirs = losses["mpitrain"], losses["gloo"]
    if any(abs(a - b) > 1e-3 * abs(b) for a, b in zip(ours, theirs, strict=True)):
        raise CommunicationError(f"{kind}: the losses over our backend, {ours}, are not those over gloo, {theirs}")


# -- the report --------------------------------------------------------------------------------------------


def report(results: dict[int, Any], options: argparse.Namespace) -> Report:
    """Tables, targets and the plot of the results by rank count."""
    tables, targets = [], []
    for ranks, result in results.items():
        rows = []
        for name, times in result.items():
            ours, theirs = times["mpitrain"]["median"], times["gloo"]["median"]
            rows.append((name, ours * 1e3, theirs * 1e3, theirs / ours))
        columns = ("operation or step", "mpitrain", "gloo", "gloo / mpitrain")
        note = "Milliseconds, median; a step: samples x tokens a rank."
        tables.append(ReportTable(f"{ranks} ranks", columns, rows, note))
        for kind, wanted in WANTED.items():
            least = min(ratio for name, *_, ratio in rows if name.split()[0] == kind)
            met = None if options.quick else least >= wanted
            what = f"{ranks} ranks: {kind}, as fast as over gloo, worst case"
            targets.append(ReportTarget(what, f"at least {wanted:g} times", f"{least:.2f} times", met))
    return Report("PyTorch over our backend and over gloo", tables, targets, lambda figure: _draw(figure, results))


def _draw(figure: Any, results: dict[int, Any]) -> None:
    axes = figure.subplots(1, len(results), squeeze=False)[0]
    for ax, (ranks, result) in zip(axes, results.items(), strict=True):
        ratios = [times["gloo"]["median"] / times["mpitrain"]["median"] for times in result.values()]
        ax.barh(range(len(result)), ratios)
        ax.axvline(1, color="black", linewidth=0.8)
        ax.set_yticks(range(len(result)), result.keys())
        ax.set_xlabel("times as fast as gloo")
        ax.set_title(f"{ranks} ranks")
