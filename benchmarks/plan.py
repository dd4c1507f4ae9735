"""The planner's predictions beside measured steps: layouts of three models at several rank counts.

The models are the built-in GPT, a ResNet, and one created by a factory (`make`, below). For each model and number of
ranks, the planner first predicts the step time and memory of two groups of layouts: a selection of all kinds (data
parallel with ZeRO 0 to 3, pipelines with several schedules, tensor parallel, combinations, microbatch sizes,
recompute), and the planner's own first choices among all possible layouts. Then all of them are trained in the same
processes, in turns (`training_runs`).

The machine profile is read from the file `--machine`; `python -m mpitrain.plan --measure` writes it. To measure on
several nodes, predict first, with --nodes and --predictions FILE; then measure under mpirun with the same options.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.runner.jobs import BenchmarkParser, run
from benchmarks.runner.report import MIB, Panel, Report, ReportTable, rank_correlation, target_of
from benchmarks.runner.training_runs import UNENDING, TrainerRun, Values, measured_runs, merged, step_seconds
from mpitrain.comm import Communicator
from mpitrain.config.settings import Config
from mpitrain.data import Description
from mpitrain.errors import EXIT_DONE, InputError, MpitrainError
from mpitrain.measuring.self_start import is_launched
from mpitrain.models.losses import cross_entropy
from mpitrain.parallel.layouts import ParallelLayout, read, settings, text
from mpitrain.parallel.rules import rules_of
from mpitrain.planner.machine import MachineProfile, read_machine
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.profile import profile_of
from mpitrain.planner.search import best
from mpitrain.planner.subject import description_of

SECONDS = 3.0  # most of one measurement
_BUDGET = 60.0  # seconds of measuring the blocks of a model at one number of ranks
_TIME, _MEMORY, _RANKS, _CHOICE = 0.15, 0.10, 0.90, 1.05  # targets
Row = dict[str, Any]
Pair = tuple[float, float]  # a measured and a predicted value
Groups = Mapping[tuple[str, int], Sequence[Row]]  # rows by model and number of ranks
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model": {"layers": 4, "width": 256, "heads": 8, "sequence": 64}, "train": {"batch": 16}},
    # for numbers of ranks that are multiples of three
    "gpt-of-6-heads": {"model": {"layers": 4, "width": 192, "heads": 6, "sequence": 64}, "train": {"batch": 24}},
    "resnet": {
        "data": {"path": "digits"},
        "model": {"name": "resnet", "layers": 18, "width": 32},
        "train": {"batch": 64},
    },
    "factory": {"model": {"factory": "benchmarks.plan:make", "sequence": 64}, "train": {"batch": 16}},
}
QUICK: dict[str, dict[str, Any]] = {
    "gpt": {"model": {"layers": 2, "width": 64, "heads": 4, "sequence": 32}, "train": {"batch": 8}}
}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return its exit code."""
    parser = _parser()
    if is_launched():
        return run(parser, measure, report, arguments)
    options = parser.parse(arguments)
    text = json.dumps(_predictions(options))
    if options.predictions is not None:
        options.predictions.write_text(text, encoding="utf-8")
        print(f"written: {options.predictions}; measure them with mpirun -n N and the same options")
        return EXIT_DONE
    with tempfile.TemporaryDirectory(prefix="mpitrain-bench-plan-") as folder:
        predictions_file = Path(folder) / "asked.json"
        predictions_file.write_text(text, encoding="utf-8")
        return run(parser, measure, report, [*arguments, "--predictions", str(predictions_file)])


def _parser() -> BenchmarkParser:
    parser = BenchmarkParser("plan", "Compare the planner's predictions with measured steps.")
    parser.add("machine", default="machine.toml", metavar="FILE", help="machine profile [machine.toml]")
    parser.add("models", default="gpt,resnet,factory", metavar="A,B", help=f"models, of {', '.join(MODELS)}")
    parser.number("rounds", 2, "measurements of each layout", quick=1)
    parser.number("steps", 8, "steps of a measurement", quick=3)
    parser.number("nodes", 1, "number of nodes")
    parser.add("predictions", type=Path, metavar="FILE", help="write only predictions; under mpirun, read them")
    parser.add("layouts", metavar="'A;B'", help="measure these layouts and the first choices, instead of all kinds")
    parser.number("choices", 3, "number of first choices to measure")
    return parser


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all predicted layouts at this rank count. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        For each model its predictions, each with the measured values as `measured`.
    """
    if options.predictions is None:
        raise InputError("there are no predictions; run python -m benchmarks plan without mpirun", agreed=True)
    predicted = world.on_root(lambda: json.loads(options.predictions.read_text(encoding="utf-8")))
    measured = {}
    for model, predictions in predicted[str(world.size)].items():
        if world.rank == 0:
            print(f" {model}:", flush=True)
        makes = {str(number): partial(TrainerRun, world, each["config"]) for number, each in enumerate(predictions, 1)}
        results = measured_runs(world, makes, options.rounds, options.steps, SECONDS).values()
        measured[model] = [each | {"measured": result} for each, result in zip(predictions, results, strict=True)]
    return measured


def _predictions(options: argparse.Namespace) -> dict[str, dict[str, list[Row]]]:
    """Return the layouts to measure with their predictions, by number of ranks (as text) and model."""
    machine = read_machine(options.machine)
    models = QUICK if options.quick else {name: MODELS[name] for name in options.models.split(",")}
    planned = {name: _planned(name, values, machine, options) for name, values in models.items()}
    return {str(ranks): {name: of[ranks] for name, of in planned.items()} for ranks in options.ranks}


def _planned(name: str, values: Values, machine: MachineProfile, options: argparse.Namespace) -> dict[int, list[Row]]:
    """Return the layouts of one model with their predictions, by number of ranks.

    Args:
        name: Name of the model.
        values: The configuration of the model, by section and key.
        machine: Machine profile.
        options: Options of the command.
    """
    print(f"planning {name} …", flush=True)
    base = merged(UNENDING, values)
    config = Config.from_dict(base)
    planned = {}
    for ranks in options.ranks:
        each = ranks // options.nodes
        model = profile_of(config, description_of(config), machine, budget=_BUDGET, ranks_per_node=each)
        predictor = Predictor(model, machine, options.nodes, each)
        plan = best(predictor, rules_of(config), options.choices)
        layouts: dict[ParallelLayout, int] = {each.layout: number for number, each in enumerate(plan.predictions)}
        requested = [read(line) for line in options.layouts.split(";")] if options.layouts else None
        for layout in requested or spread(ranks, model.batch, len(model.blocks(1))):
            layouts.setdefault(layout, -1)
        rows = []
        for layout, number in layouts.items():
            try:
                prediction = predictor.predict(layout)
            except MpitrainError:
                continue  # this layout is not possible for the model
            row = {"layout": text(layout), "choice": number, "config": merged(base, settings(layout))}
            parts, memory = dict(prediction.times), dict(prediction.memory)
            rows.append(row | {"seconds": prediction.seconds, "parts": parts, "memory": memory})
        if not rows:
            raise InputError(f"no layout of {ranks} ranks is possible")
        model.close()
        planned[ranks] = rows
    return planned


def spread(ranks: int, batch: int, blocks: int) -> list[Any]:
    """Return a selection of layouts of every kind.

    Args:
        ranks: Number of ranks.
        batch: Samples of the global batch.
        blocks: Number of blocks of the model, the most stages of a pipeline.
    """
    share = max(1, batch // ranks)
    half = max(1, share // 2)
    layouts = [
        *(ParallelLayout(ranks, zero=zero, microbatch=share) for zero in range(4)),
        ParallelLayout(ranks, zero=3, share_node=False, microbatch=share),
        *(ParallelLayout(ranks, zero=zero, microbatch=half) for zero in (0, 2)),
        ParallelLayout(ranks, zero=1, microbatch=share, recompute=True),
    ]
    for stages in {2, ranks} if ranks > 2 else {2}:
        data = ranks // stages
        some = max(1, batch // data // (2 * stages))
        layouts += [
            ParallelLayout(data, stages, zero=int(data > 1), microbatch=some, schedule=schedule, chunks=chunks)
            for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1))
            if stages * chunks <= blocks
        ]
    layouts += [ParallelLayout(ranks // n, 1, n, microbatch=batch // (ranks // n)) for n in {2, min(4, ranks)}]
    layouts.append(ParallelLayout(ranks // 2, 1, 2, microbatch=batch // (ranks // 2), sequence=True))
    if ranks >= 4:
        layouts.append(ParallelLayout(ranks // 4, 2, 2, microbatch=max(1, batch // (ranks // 4) // 4)))
    return list(dict.fromkeys(layouts))


# -- a model from a factory ---------------------------------------------------------------------------------


class Shifted(nn.Module):
    """A gated feed-forward block that combines each position with the one `distance` positions before it.

    Args:
        width: Features of a position.
        inner: Features inside the block.
        distance: Distance of the earlier position; the gate is computed from it.
    """

    def __init__(self, width: int, inner: int, distance: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.distance = distance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        earlier = functional.pad(y, (0, 0, self.distance, 0))[:, : y.shape[1]]
        return x + self.down(functional.silu(self.gate(earlier)) * self.up(y))


class ShiftModel(nn.Sequential):
    """A language model of `Shifted` blocks: tokens [batch, sequence] to scores [batch, sequence, vocabulary]."""

    def tensor_plan(self) -> dict[str, str]:
        """Return the tensor-parallel plan, which divides the feed-forward layers."""
        return {"*.gate": "column", "*.up": "column", "*.down": "row"}


def make(description: Description, layers: int = 6, width: int = 192, inner: int = 768) -> tuple[nn.Module, Any]:
    """Create a `ShiftModel`, whose head does not share its weights with the embedding; a setting `model.factory`.

    Args:
        description: Description of the data, with the size of the vocabulary.
        layers: Number of blocks.
        width: Features of a position.
        inner: Features inside a block.

    Returns:
        The model and its loss.
    """
    assert description.vocabulary is not None
    blocks = [Shifted(width, inner, 1 << number % 6) for number in range(layers)]
    ends = nn.LayerNorm(width), nn.Linear(width, description.vocabulary)
    return ShiftModel(nn.Embedding(description.vocabulary, width), *blocks, *ends), cross_entropy


# -- the report --------------------------------------------------------------------------------------------


def report(results: dict[int, dict[str, list[Row]]], options: argparse.Namespace) -> Report:
    """Return the report with table, targets and plots.

    Args:
        results: Results of `measure`, by number of ranks.
        options: Options of the command.
    """
    groups = {(model, ranks): rows for ranks, cases in results.items() for model, rows in cases.items()}
    models = list(dict.fromkeys(model for model, _ in groups))
    every = [row for rows in groups.values() for row in rows]
    order = [_order([row for (name, _), rows in groups.items() if name == model for row in rows]) for model in models]
    chosen = [_choice(rows) for rows in groups.values()]
    names = ", ".join(models)
    order_what = f"rank correlation of predicted and measured step times, of {names} at all numbers of ranks"
    time_what = f"step time of {len(every)} layouts, median distance"
    targets = [
        target_of(time_what, _distance(every, step_ms), most=_TIME, percent=True),
        target_of("memory, median distance", _distance(every, peak_mib), most=_MEMORY, percent=True),
        target_of(order_what, min(order), least=_RANKS, text=_texts(order)),
        target_of("time of the first choice / the best measured", max(chosen), most=_CHOICE, text=_texts(chosen)),
    ]
    return Report("Predicted and measured steps", [_summary(groups)], targets, _panels(groups))


def step_ms(row: Row) -> Pair:
    """Return the measured and the predicted milliseconds of a step."""
    return 1e3 * step_seconds(row["measured"]), 1e3 * row["seconds"]


def peak_mib(row: Row) -> Pair:
    """Return the measured and the predicted MiB of a rank, without those of a process that has no model."""
    predicted = sum(nbytes for kind, nbytes in row["memory"].items() if kind not in ("process", "allocator"))
    return row["measured"]["memory"] / MIB, predicted / MIB


def _summary(groups: Groups) -> ReportTable:
    """Return a table with one row per (model, number of ranks)."""
    columns = ["model", "ranks", "layouts", "step time, median distance %", "memory, median distance %"]
    columns += ["rank correlation with measurement", "of two rounds", "first choice / best measured"]
    rows = []
    for (model, ranks), of in groups.items():
        agreed = _agreement(of) if len(of[0]["measured"]["seconds"]) > 1 else None
        distances = (100 * _distance(of, pair) for pair in (step_ms, peak_mib))
        rows.append((model, ranks, len(of), *distances, _order(of), agreed, _choice(of)))
    return ReportTable("Summary", columns, rows)


def _distance(rows: Sequence[Row], pair: Callable[[Row], Pair]) -> float:
    """Return the median distance of predicted from measured values, relative to the measured ones."""
    return statistics.median(abs(predicted / measured - 1) for measured, predicted in map(pair, rows))


def _choice(rows: Sequence[Row]) -> float:
    """Return the measured time of the planner's first choice, relative to the best measured one."""
    return step_ms(rows[0])[0] / min(step_ms(row)[0] for row in rows)


def _texts(figures: Sequence[float]) -> str:
    """Return all figures as text, with two decimals."""
    return ", ".join(f"{figure:.2f}" for figure in figures)


def _order(rows: Sequence[Row]) -> float:
    """Return the rank correlation of predicted and measured step times."""
    return _correlation(*zip(*map(step_ms, rows), strict=True))


def _correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation; 1 for fewer than three figures, whose order means nothing."""
    return 1.0 if len(first) < 3 else rank_correlation(first, second)


def _agreement(rows: Sequence[Row]) -> float:
    """Return the mean rank correlation between rounds of measurements; no prediction can be expected to do better."""
    rounds = zip(*([statistics.median(each) for each in row["measured"]["seconds"]] for row in rows), strict=True)
    return statistics.mean(_correlation(one, other) for one, other in combinations(map(list, rounds), 2))


def _panels(groups: Groups) -> list[Panel]:
    """Return two plots, of predicted against measured times and bytes, with points by model and number of ranks."""
    panels = []
    for unit, pair, band in (("ms per step", step_ms, _TIME), ("MiB per rank", peak_mib, _MEMORY)):
        points = {f"{model}, {ranks} ranks": [*map(pair, rows)] for (model, ranks), rows in groups.items()}
        lines = {name: ([x for x, _ in of], [y for _, y in of]) for name, of in points.items()}
        panels.append(Panel(f"predicted, {unit}", f"measured, {unit}", lines, log=True, band=band))
    return panels
