"""The report of the benchmark `strategies`: one table and one picture for each number of ranks."""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

from benchmarks.runner.report import Cell, Report, ReportTable
from benchmarks.runner.training_runs import KINDS

MIB = 1 << 20
_PEERS = ("torch", "FSDP2", "DeepSpeed")  # how their names begin
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#999999")  # of the kinds of memory; told apart by everybody

Found = dict[str, dict[str, Any]]  # by strategy


def report(results: dict[int, dict[str, Any]], options: argparse.Namespace) -> Report:
    """The tables and the picture of the results by rank count."""
    tables = [table for ranks, result in results.items() for table in _tables(ranks, result)]
    return Report("One model by every strategy", tables, draw=partial(_draw, results=results))


def seconds(of: dict[str, Any]) -> float:
    """A step's, of the round whose median is lowest: other work on the machine only ever adds to it."""
    return min(statistics.median(times) for times in of["seconds"])


def sent(of: dict[str, Any]) -> tuple[float | None, float | None]:
    """Bytes that a rank sends a step, inside its node and between nodes; None where that is not known."""
    counted = of["sent"]
    if counted["rows"]:
        return counted["inside"], counted["between"]
    return counted["loopback"], None if counted["loopback"] is None else 0.0


def _tables(ranks: int, result: dict[str, Any]) -> list[ReportTable]:
    found: Found = result["found"]
    model = ", ".join(f"{key} {value}" for key, value in result["model"].items() if key != "name")
    title = f"{ranks} ranks on {result['nodes']} node(s): GPT of {model}; batch {result['batch']}"
    base = seconds(found["DDP"])
    rows: list[list[Cell]] = []
    for name, of in found.items():
        if "why" in of:
            rows.append([f"{name} ({of['why']})", *[None] * (len(KINDS) + 6)])
            continue
        kinds = [of["largest"][kind] / MIB or None for kind in KINDS]
        through = [None if nbytes is None else nbytes / 1e6 for nbytes in sent(of)]
        step = seconds(of)
        rows.append([name, step * 1e3, step / base, of["memory"] / MIB, *kinds, *through, f"{of['losses'][-1]:.5f}"])
    columns = ("strategy", "step ms", "/ DDP", "peak MiB", *KINDS, "MB sent inside", "MB sent between", "loss")
    note = (
        "Step: median of the quietest round. Peak: the rank that takes most, shared pages divided by those who have "
        "them; the columns after it, in MiB, are counted from the tensors, each of the rank that has most of it. Sent: "
        "a rank and step, to ranks of its node (or out of their memory) and to other nodes; of peers what went through "
        "the loopback interface, with TCP's headers. Loss: of the third step."
    )
    operations: list[list[Cell]] = [
        [name, operation, axis, algorithm, calls, inside / 1e6, between / 1e6]
        for name, of in found.items()
        if "why" not in of
        for operation, axis, algorithm, calls, inside, between in of["sent"]["rows"]
    ]
    heads = ("strategy", "operation", "axis", "algorithm", "calls a step", "MB inside", "MB between")
    told = f"What rank 0 sends a step, {ranks} ranks"
    return [ReportTable(title, columns, rows, note), ReportTable(told, heads, operations)]


def _draw(figure: Any, results: dict[int, dict[str, Any]]) -> None:
    """For each number of ranks: a step's time, memory by category with the measured peak, and bytes sent."""
    most = max(len(result["found"]) for result in results.values())
    figure.set_size_inches(15, (1.4 + 0.32 * most) * len(results))
    axes = figure.subplots(len(results), 3, squeeze=False, sharey="row")
    for (time, memory, through), (ranks, result) in zip(axes, results.items(), strict=True):
        found = {name: of for name, of in result["found"].items() if "why" not in of}
        names = list(found)
        ours = ["#0072b2" if not name.startswith(_PEERS) else "#d55e00" for name in names]
        time.barh(names, [seconds(of) * 1e3 for of in found.values()], color=ours)
        time.set(title=f"{ranks} ranks (orange: peers)", xlabel="step, ms")
        left = [0.0] * len(names)
        for kind, colour in zip(KINDS, _COLOURS, strict=True):
            widths = [of["largest"][kind] / MIB for of in found.values()]
            memory.barh(names, widths, left=left, color=colour, label=kind)
            left = [before + width for before, width in zip(left, widths, strict=True)]
        peaks = [of["memory"] / MIB for of in found.values()]
        memory.plot(peaks, range(len(names)), "k|", markersize=12, label="measured peak")
        memory.set(title="memory of the rank with most", xlabel="MiB")
        tiers = [sent(of) for of in found.values()]
        inside, between = ([(tier[k] or 0.0) / 1e6 for tier in tiers] for k in (0, 1))
        through.barh(names, inside, color=_COLOURS[0], label="inside a node")
        through.barh(names, between, left=inside, color=_COLOURS[1], label="between nodes")
        through.set(title="sent by a rank", xlabel="MB a step")
        for axis, widths in ((memory, peaks), (through, [a + b for a, b in zip(inside, between, strict=True)])):
            axis.set_xlim(0, 1.05 * max(*widths, 1e-3))
        time.set_ylim(len(names) - 0.4, -0.6)
    for place, axis in (("outside lower center", memory), ("outside lower right", through)):
        figure.legend(*axis.get_legend_handles_labels(), loc=place, fontsize="small", ncols=6)
