"""One model by every strategy: DDP, ZeRO, offload, recompute, pipeline, tensor, their mixes; and torch and DeepSpeed.

Each strategy trains the same GPT from the same weights on the same batches. The strategies take turns in the same
processes, for several rounds. If their losses differ, the benchmark fails.

    DDP                          every rank has the whole model; gradients are averaged
    ZeRO-1, 2, 3                 optimizer states, gradients and parameters are sharded; a node has one copy of the
                                 parameters
    ZeRO-3 gathered              ZeRO-3 without that copy: the parameters of a block are gathered when it computes
    ZeRO-2, states on the host   `parallel.offload host`; without effect on the CPU
    DDP, ZeRO-3, recompute       activations of blocks are recomputed in the backward pass
    pipeline, tensor             stages, or layers, divided over ranks; also combined with data parallelism
    torch DDP, FSDP2, DeepSpeed  over gloo; DeepSpeed only if it is installed (extra `peers`), without its categories

The report shows for each strategy the measured time of a step and the measured memory of a rank, its memory by category
as counted from the tensors (maximum over the ranks), the bytes that a rank sends per step, and the joules of a step
where the machine counts them. `--layers`, `--width`, `--heads` and `--sequence` change the GPT.

`--full` is the benchmark `comparison`: ResNets, too, and the memory within a step. Without mpirun, it keeps the result
and writes the page docs/strategies.md, as `python -m benchmarks all --only comparison` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.runner.jobs import BenchmarkParser, gpt, run
from benchmarks.runner.peers import gloo, peers, require_equal
from benchmarks.runner.report import MIB, Cell, Report, ReportTable, ReportTarget, target_of
from benchmarks.runner.training_runs import KINDS, UNENDING, PeerRun, TrainerRun, measured_runs, merged, step_seconds
from mpitrain.comm import Communicator
from mpitrain.errors import InputError
from mpitrain.measuring.self_start import is_launched

SECONDS = 5.0  # most of one measurement
DDP = "DDP"  # the strategy that the others are compared with
AGREE = 2e-4  # largest relative difference of losses, from another order of sums
# our strategy, and the peer that must not need less memory
_COUNTERPARTS = {DDP: "torch DDP", "ZeRO-1": "torch DDP", "ZeRO-2": "torch DDP", "ZeRO-3": "FSDP2"}
_COUNTERPARTS |= {"ZeRO-3 gathered": "FSDP2"}

Stats = dict[str, dict[str, Any]]  # measured values by strategy


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return its exit code."""
    if "--full" in arguments:
        from benchmarks import all as every
        from benchmarks import comparison

        rest = [argument for argument in arguments if argument != "--full"]
        return comparison.main(rest) if is_launched() else every.main(["--only", "comparison", *rest])
    parser = make_parser("strategies", "Train one model with every strategy, and with torch.", "4", 3, 10, "only")
    parser.add("full", action="store_true", help="train ResNets, too, and write the page docs/strategies.md")
    return run(parser, measure, report, arguments)


def make_parser(name: str, description: str, ranks: str, rounds: int, steps: int, only: str) -> BenchmarkParser:
    """Return the options of a benchmark of strategies.

    Args:
        name: Name of the benchmark.
        description: Description for `--help`.
        ranks, rounds, steps: Defaults of these options.
        only: Name of the option that selects strategies.
    """
    parser = BenchmarkParser(name, description, ranks, too_few="strategies divide work between ranks")
    parser.model()
    parser.number("samples", 4, "samples for each rank")
    parser.number("rounds", rounds, "measurements of each strategy", quick=1)
    parser.number("steps", steps, "steps of a measurement", quick=3)
    parser.add(only, dest="only", metavar="'A;B'", help="only these strategies, and DDP")
    return parser


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the training steps of each strategy. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        Number of nodes, [model], global batch, and the values of `measured_runs` by strategy.
    """
    train = {"batch": options.samples * world.size, "clip": 0.0}
    optim = {"schedule": "constant", "warmup": 0, "lr": 1e-3}
    base = merged(UNENDING, {"model": gpt(options), "train": train, "optim": optim})
    with gloo(world):
        return measured_strategies(world, base, strategies(world.size, base["model"]), options)


def measured_strategies(
    world: Communicator, base: dict[str, Any], ours: Mapping[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """Measure the training steps of a model by our strategies and by peers. Collective.

    Args:
        world: Communicator of all ranks, and of the default group of torch.distributed.
        base: Configuration of all strategies.
        ours: Settings of each of our strategies, by name.
        options: Options of the command.

    Returns:
        Number of nodes, [model], global batch, and the values of `measured_runs` by strategy.
    """
    makes = {name: partial(TrainerRun, world, merged(base, values)) for name, values in ours.items()} | {
        name: partial(PeerRun, world, base, make) for name, make in peers().items()
    }
    only = {DDP, *(name.strip() for name in options.only.split(";"))} if options.only else {*makes}
    if options.only and not only & {*makes} - {DDP}:
        raise InputError(f"there is no strategy {options.only!r} here; use some of {'; '.join(makes)}", agreed=True)
    runs = {name: make for name, make in makes.items() if name in only}
    results = measured_runs(world, runs, options.rounds, options.steps, 2.0 if options.quick else SECONDS)
    require_equal({name: of["losses"] for name, of in results.items()}, AGREE)
    return {"nodes": world.num_nodes, "model": base["model"], "batch": base["train"]["batch"], "results": results}


def strategies(ranks: int, model: Mapping[str, int]) -> dict[str, Any]:
    """Return the settings of each of our strategies, by name.

    Args:
        ranks: Number of ranks.
        model: Sizes of the GPT; strategies that cannot divide it among the ranks are left out.
    """
    parallel: dict[str, dict[str, Any]] = {
        DDP: {"zero": 0},
        **{f"ZeRO-{stage}": {"zero": stage} for stage in (1, 2, 3)},
        "ZeRO-3 gathered": {"zero": 3, "share_node": False},
        "ZeRO-2, states on the host": {"zero": 2, "offload": "host"},
    }
    by_name: dict[str, Any] = {name: {"parallel": values} for name, values in parallel.items()}
    recompute = {"train": {"recompute": True}}
    by_name |= {f"{name}, recompute": {"parallel": parallel[name], **recompute} for name in (DDP, "ZeRO-3")}
    # all ranks along one axis, two along one axis, and two along each
    for stages, tensor in dict.fromkeys([(ranks, 1), (1, ranks), (2, 1), (1, 2), (2, 2)]):
        data, rest = divmod(ranks, stages * tensor)
        if rest or stages > model["layers"] or model["heads"] % tensor:
            continue
        axes = {"data": data, "pipeline": stages, "tensor": tensor}
        name = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
        by_name[name] = {"parallel": {"pipeline": stages, "tensor": tensor, "zero": int(data > 1)}}
    return by_name


# -- the report --------------------------------------------------------------------------------------------


def report(results: dict[int, dict[str, Any]], options: argparse.Namespace) -> Report:
    """Return the report with tables and targets.

    Args:
        results: Results of `measure`, by number of ranks.
        options: Options of the command.
    """
    tables = [table(*each) for each in results.items()]
    targets = [target for ranks, result in results.items() for target in _targets(ranks, result["results"])]
    return Report("One model by every strategy", tables, targets)


def _targets(ranks: int, results: Stats) -> list[ReportTarget]:
    """Return the targets for the memory of our strategies beside that of peers."""
    targets = []
    for ours, theirs in _COUNTERPARTS.items():
        share = results[ours]["memory"] / results[theirs]["memory"] if {ours, theirs} <= set(results) else None
        targets.append(target_of(f"{ranks} ranks: peak memory of a rank, {ours} / {theirs}", share, most=1))
    return targets


def table(ranks: int, result: dict[str, Any], model: str = "") -> ReportTable:
    """Return the table of a model: time, memory, bytes sent, joules and loss of each strategy.

    Args:
        ranks: Number of ranks.
        result: Result of `measured_strategies`.
        model: Name of the model; empty: the sizes of the GPT.
    """
    results: Stats = result["results"]
    model = model or "GPT of " + ", ".join(f"{key} {of}" for key, of in result["model"].items() if key != "name")
    title = f"{ranks} ranks on {result['nodes']} node(s): {model}; batch {result['batch']}"
    base = step_seconds(results[DDP])
    rows: list[list[Cell]] = []
    for name, of in results.items():
        kinds = [of["largest"][kind] / MIB or None for kind in KINDS]
        through = [None if nbytes is None else nbytes / 1e6 for nbytes in of["sent"].values()]
        step = step_seconds(of)
        last = min((each for each in of["joules"] if each is not None), default=None), f"{of['losses'][-1]:.5f}"
        rows.append([name, step * 1e3, step / base, of["memory"] / MIB, *kinds, *through, *last])
    columns = ("strategy", "step ms", "/ DDP", "peak MiB", *KINDS, "MB sent inside", "MB sent between", "J", "loss")
    note = (
        "Step: median of the quietest round. Peak: the rank that takes most, shared pages divided by those who have "
        "them; the columns after it, in MiB, are counted from the tensors, each of the rank that has most of it. Sent: "
        "a rank and step, to ranks of its node (or out of their memory) and to other nodes; of peers what went through "
        "the loopback interface, with TCP's headers. J: joules of a step on all machines, as their processors count "
        "them. Loss: of the third step."
    )
    return ReportTable(title, columns, rows, note)
