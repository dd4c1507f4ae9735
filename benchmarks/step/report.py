"""Tables, targets and plots of the step benchmark, from its results."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.runner.report import Cell, Report, ReportTable, ReportTarget
from benchmarks.step.contenders import ALONE

MIB = 1 << 20
HEAVY, LIGHT = "communication-heavy", "compute-heavy"  # the batches
_CATEGORIES = ("parameters", "gradients", "states", "activations", "buffers", "padding")
# what a stage of ours is to be compared with in memory
_COUNTERPARTS = {
    "DDP": ("torch DDP",),
    "ZeRO-1": ("torch DDP", "DeepSpeed ZeRO-1"),
    "ZeRO-2": ("torch DDP", "DeepSpeed ZeRO-2"),
    "ZeRO-3": ("FSDP2", "DeepSpeed ZeRO-3"),
    "ZeRO-3 gathered": ("FSDP2", "DeepSpeed ZeRO-3"),
}

Result = dict[str, Any]  # of one rank count
Found = dict[str, dict[str, Any]]  # by contender, at one size and batch


def report(results: dict[int, Result], options: argparse.Namespace) -> Report:
    """Tables, targets and the plot of the results by rank count."""
    if options.grow:
        tables = [_growth(results), *(_times(r, n, b, f) for r, n, b, f in _each(results))]
        return Report("A training step: how its cost grows", tables, draw=lambda figure: _draw_growth(figure, results))
    tables = []
    for ranks, numel, batch, found in _each(results):
        tables += [_times(ranks, numel, batch, found), _memory(ranks, numel, batch, found)]
        if batch == HEAVY:
            tables.append(_accounts(ranks, numel, found))
    targets = [t for ranks, _, batch, found in _each(results) if batch == HEAVY for t in _targets(ranks, found)]
    if options.quick:
        targets = [ReportTarget(t.what, t.wanted, t.measured, None) for t in targets]
    return Report("A training step", tables, targets, lambda figure: _draw(figure, results))


def _each(results: dict[int, Result]) -> list[tuple[int, int, str, Found]]:
    """(ranks, parameters, batch, what was found)."""
    return [
        (ranks, int(numel), batch, found)
        for ranks, result in results.items()
        for numel, batches in result["sizes"].items()
        for batch, found in batches.items()
    ]


# -- targets -----------------------------------------------------------------------------------------------


def _targets(ranks: int, found: Found) -> list[ReportTarget]:
    """Those for the communication-heavy batch; they were set for 2 ranks on 2 cores."""
    targets = []
    for name, most in (("ZeRO-1", 1.0), ("ZeRO-2", 1.0), ("ZeRO-3", 1.1), ("DDP", 1.1)):
        relative = found.get(name, {}).get("relative")
        told, met = ("not measured", None) if relative is None else (f"{relative:.2f}", relative <= most)
        targets.append(ReportTarget(f"{ranks} ranks: a step by {name} / one process'", f"≤ {most:g}", told, met))
    for name in ("DDP", "ZeRO-1", "ZeRO-2"):
        targets.append(_faster(ranks, found, "torch DDP", name, 1.3))
    for theirs in ("FSDP2", "DeepSpeed ZeRO-3"):
        targets.append(_faster(ranks, found, theirs, "ZeRO-3", 3.0))
    for name, others in _COUNTERPARTS.items():
        targets += [_smaller(ranks, found, name, theirs, where) for theirs in others for where in ("rank", "node")]
    return targets


def _faster(ranks: int, found: Found, theirs: str, ours: str, least: float) -> ReportTarget:
    what, wanted = f"{ranks} ranks: a step by {theirs} / {ours}", f"≥ {least:g}"
    if "median" not in found.get(theirs, {}) or "median" not in found.get(ours, {}):
        return ReportTarget(what, wanted, found.get(theirs, {}).get("why", "not measured"), None)
    ratio = found[theirs]["median"] / found[ours]["median"]
    return ReportTarget(what, wanted, f"{ratio:.2f}", ratio >= least)


def _smaller(ranks: int, found: Found, ours: str, theirs: str, where: str) -> ReportTarget:
    what, wanted = f"{ranks} ranks: memory per {where}, {ours} / {theirs}", "< 1"
    mine, other = (found.get(name, {}).get("memory") for name in (ours, theirs))
    if not mine or not other:
        return ReportTarget(what, wanted, found.get(theirs, {}).get("why", "not measured"), None)
    text = f"{mine[where] / other[where]:.2f} ({mine[where] / MIB:.0f} of {other[where] / MIB:.0f} MiB)"
    return ReportTarget(what, wanted, text, mine[where] < other[where])


# -- tables ------------------------------------------------------------------------------------------------


def _title(ranks: int, numel: int, batch: str) -> str:
    return f"{ranks} ranks, {numel / 1e6:.1f} M parameters, {batch}"


def _rows(found: Found, cells: Callable[[dict[str, Any]], Sequence[Cell] | None]) -> list[list[Cell]]:
    """One row a contender. cells: None where it has nothing to tell, for which the row says why."""
    rows: list[list[Cell]] = []
    width = next((len(c) for values in found.values() if (c := cells(values)) is not None), 0)
    for name, values in found.items():
        told = cells(values)
        if told is None and "why" in values:
            rows.append([f"{name} ({values['why']})", *[None] * width])
        elif told is not None:
            rows.append([name, *told])
    return rows


def _times(ranks: int, numel: int, batch: str, found: Found) -> ReportTable:
    def cells(values: dict[str, Any]) -> Sequence[Cell] | None:
        if "median" not in values:
            return None
        ms = (values[key] * 1e3 for key in ("median", "best"))
        return (*ms, values["relative"], values["waiting"] * 1e3, values["repeats"], f"{values['loss']:.4f}")

    columns = ("contender", "step ms", "best ms", "/ one process", "not computing ms", "repetitions", "loss")
    note = (
        "Medians. Not computing: the step less one process' step, which computes the same and updates everything "
        "itself; below zero where a rank saves more by updating its share alone than communication costs. Loss: of "
        "the last step; all that communicate must agree."
    )
    return ReportTable(f"Step time, {_title(ranks, numel, batch)}", columns, _rows(found, cells), note)


def _memory(ranks: int, numel: int, batch: str, found: Found) -> ReportTable:
    def cells(values: dict[str, Any]) -> Sequence[Cell] | None:
        peaks = values.get("memory")
        return None if not peaks else [peaks[key] / MIB for key in ("rank", "node", "process")]

    columns = ("contender", "a rank, MiB", "a node, MiB", "a rank's process, MiB")
    note = (
        "Peak proportional set size, shared memory counted once per node; the first two less what the process took "
        "before the model was made."
    )
    return ReportTable(f"Memory, {_title(ranks, numel, batch)}", columns, _rows(found, cells), note)


def _accounts(ranks: int, numel: int, found: Found) -> ReportTable:
    accounts = {name: values["account"] for name, values in found.items() if values.get("account")}
    rows = [[name, *(account[c] / MIB for c in _CATEGORIES)] for name, account in accounts.items()]
    note = "MiB a rank by `engine.memory()`, counted from the tensors, of ours."
    return ReportTable(f"Bytes by category, {_title(ranks, numel, HEAVY)}", ("contender", *_CATEGORIES), rows, note)


def _growth(results: dict[int, Result]) -> ReportTable:
    """One row a rank count and size: each contender's step in one process' steps."""
    each = _each(results)
    names = [name for name in each[0][3] if name != ALONE]
    rows: list[list[Cell]] = []
    for ranks, numel, _, found in each:
        alone = found[ALONE].get("median")
        relative = (found.get(name, {}).get("relative") for name in names)
        rows.append([ranks, numel / 1e6, None if alone is None else alone * 1e3, *relative])
    columns = ("ranks", "M parameters", "one process ms", *names)
    note = "Step time / one process' step with as many of them at once; -: not installed, or too large for this memory."
    return ReportTable(f"Growth, {HEAVY}", columns, rows, note)


# -- plots -------------------------------------------------------------------------------------------------


def _draw(figure: Any, results: dict[int, Result]) -> None:
    """Per rank count and batch: step time, of it not computing, and peak memory of a rank."""
    each = _each(results)
    figure.set_size_inches(14, 4 * len(each))
    axes = figure.subplots(len(each), 3, squeeze=False)
    for (time, waiting, memory), (ranks, _, batch, found) in zip(axes, each, strict=True):
        timed = {name: values for name, values in found.items() if "median" in values}
        for axis, key, label in ((time, "median", "step, ms"), (waiting, "waiting", "not computing, ms")):
            axis.barh(list(timed), [values[key] * 1e3 for values in timed.values()], color=_colours(timed))
            axis.set(title=f"{ranks} ranks, {batch}", xlabel=label)
            axis.invert_yaxis()
        time.axvline(found[ALONE]["median"] * 1e3, color="black", linewidth=0.8)
        seen = {name: values["memory"] for name, values in found.items() if values.get("memory")}
        memory.barh(list(seen), [peaks["rank"] / MIB for peaks in seen.values()], color=_colours(seen))
        memory.set(title=f"{ranks} ranks, {batch}", xlabel="peak of a rank, MiB")
        memory.invert_yaxis()


def _colours(names: dict[str, Any]) -> list[str]:
    """One process grey, ours blue, theirs orange."""
    return ["tab:gray" if n == ALONE else "tab:blue" if n in _COUNTERPARTS else "tab:orange" for n in names]


def _draw_growth(figure: Any, results: dict[int, Result]) -> None:
    """Per rank count: step time over one process' step, against the parameters; ours solid, theirs dashed."""
    figure.set_size_inches(4.5 * len(results) + 2, 4.5)
    axes = figure.subplots(1, len(results), squeeze=False, sharey=True)[0]
    for axis, (ranks, result) in zip(axes, results.items(), strict=True):
        sizes = [int(numel) / 1e6 for numel in result["sizes"]]
        names = [name for name in next(iter(result["sizes"].values()))[HEAVY] if name != ALONE]
        for name in names:
            found = [batches[HEAVY].get(name, {}).get("relative", math.nan) for batches in result["sizes"].values()]
            if not all(map(math.isnan, found)):
                axis.loglog(sizes, found, "-" if name in _COUNTERPARTS else "--", marker=".", label=name)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(title=f"{ranks} ranks", xlabel="million parameters")
        axis.set_xticks(sizes, [f"{size:.3g}" for size in sizes])
        axis.minorticks_off()
    ticks = [1, 1.2, 1.5, 2, 3, 4, 6, 8, 12, 16]
    axes[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes[0].set_ylabel("step / one process' step")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
