"""The planner's predictions beside measured steps: layouts of three models at several rank counts.

The models are the built-in GPT, a ResNet and one of a factory (`plan_model`). For each and each number of ranks a
spread of layouts is predicted before anything is measured: data parallel and ZeRO 0 to 3, pipelines by several
schedules, tensor parallel, their mixes, microbatches, recompute; and the plan's own first choices among all that there
are. Then they are trained in the same processes, in turns (`training_runs`).

The machine profile is that of `--machine`, or what `python -m mpitrain.plan --measure` has left here.
On several nodes: predict first, with --nodes and --predictions FILE; then measure under mpirun with the same options.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plan.report import report
from benchmarks.runner.jobs import Benchmark, launched, parser, run
from benchmarks.runner.training_runs import measured, merged
from mpitrain.comm import Communicator
from mpitrain.errors import EXIT_DONE, InputError, MpitrainError

ROUNDS, STEPS, SECONDS = 2, 8, 3.0
_BUDGET = 60.0  # seconds of measuring the blocks of a model at one number of ranks
FIRST = 3  # of the plan's choices that are measured
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {
        "model": {"layers": 4, "width": 256, "heads": 8, "sequence": 64},
        "train": {"batch": 16},
    },
    "gpt-of-6-heads": {  # for numbers of ranks that three divides
        "model": {"layers": 4, "width": 192, "heads": 6, "sequence": 64},
        "train": {"batch": 24},
    },
    "resnet": {
        "data": {"path": "digits"},
        "model": {"name": "resnet", "layers": 18, "width": 32},
        "train": {"batch": 64},
    },
    "factory": {
        "model": {"factory": "benchmarks.plan.model:make", "sequence": 64},
        "train": {"batch": 16},
    },
}
QUICK: dict[str, dict[str, Any]] = {
    "gpt": {"model": {"layers": 2, "width": 64, "heads": 4, "sequence": 32}, "train": {"batch": 8}},
}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark, and give its exit code."""
    benchmark = Benchmark("plan", _parser(), measure, report)
    if launched():
        return run(benchmark, arguments)
    options = benchmark.parser.parse_args(list(arguments))
    if options.predictions is not None:
        options.predictions.write_text(json.dumps(_predictions(options)), encoding="utf-8")
        print(f"written: {options.predictions}; measure them with mpirun -n N and the same options")
        return EXIT_DONE
    with tempfile.TemporaryDirectory(prefix="mpitrain-bench-plan-") as folder:
        asked = Path(folder) / "asked.json"
        asked.write_text(json.dumps(_predictions(options)), encoding="utf-8")
        return run(benchmark, [*arguments, "--predictions", str(asked)])


def _parser() -> argparse.ArgumentParser:
    made = parser("plan", "The planner's predictions beside measured steps.")
    made.add_argument("--machine", default="machine.toml", metavar="FILE", help="machine profile [machine.toml]")
    made.add_argument("--models", default="gpt,resnet,factory", metavar="A,B", help=f"of {', '.join(MODELS)}")
    made.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"measurements of each [{ROUNDS}]")
    made.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"of a measurement [{STEPS}]")
    made.add_argument("--nodes", type=int, default=1, metavar="N", help="on so many nodes [1]")
    made.add_argument(
        "--predictions",
        type=Path,
        metavar="FILE",
        help="write predictions there alone; under mpirun: read them",
    )
    made.add_argument("--layouts", metavar="'A;B'", help="these, beside the first choices, instead of all kinds")
    made.add_argument("--choices", type=int, default=FIRST, metavar="N", help=f"first choices measured [{FIRST}]")
    return made


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Measure what was asked for at this rank count. Collective."""
    if options.predictions is None:
        raise InputError("what is measured is predicted first; start bench plan plainly", agreed=True)
    asked = world.on_root(lambda: json.loads(options.predictions.read_text(encoding="utf-8")))
    found = {}
    for model, predictions in asked[str(world.size)].items():
        if world.rank == 0:
            print(f" {model}:", flush=True)
        configs = [each["config"] for each in predictions]
        rounds, steps = (1, 3) if options.quick else (options.rounds, options.steps)
        results = measured(world, configs, rounds, steps, SECONDS)
        found[model] = [each | {"measured": result} for each, result in zip(predictions, results, strict=True)]
    return found


def _predictions(options: argparse.Namespace) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """By rank count and model: what is to be measured, with what the planner says of it."""
    from mpitrain.planner.machine_file import read_machine

    machine = read_machine(options.machine)
    models = QUICK if options.quick else {name: MODELS[name] for name in options.models.split(",")}
    found: dict[str, dict[str, list[dict[str, Any]]]] = {str(ranks): {} for ranks in options.ranks}
    for name, values in models.items():
        print(f"planning {name} …", flush=True)
        for ranks, predicted in _planned(values, machine, options).items():
            found[str(ranks)][name] = predicted
    return found


def _planned(values: Mapping[str, Any], machine: Any, options: argparse.Namespace) -> dict[int, list[dict[str, Any]]]:
    """By rank count, the layouts of one model."""
    from mpitrain.config.settings import Config
    from mpitrain.planner.candidates import rules_of
    from mpitrain.planner.layouts import ParallelLayout, read, settings, text
    from mpitrain.planner.predictor import Predictor
    from mpitrain.planner.profile import profile_of
    from mpitrain.planner.search import best
    from mpitrain.planner.subject import description_of

    base = merged(values, {"train": {"steps": 1000, "evaluate_every": 0}, "run": {"device": "cpu", "dir": "unused"}})
    config = Config.from_dict(base)
    found = {}
    for ranks in options.ranks:
        each = ranks // options.nodes
        model = profile_of(config, description_of(config), machine, budget=_BUDGET, ranks_per_node=each)
        predictor = Predictor(model, machine, options.nodes, each)
        plan = best(predictor, rules_of(config), options.choices)
        layouts: dict[ParallelLayout, int] = {each.layout: number for number, each in enumerate(plan.found)}
        asked = [read(line) for line in options.layouts.split(";")] if options.layouts else None
        for layout in asked or spread(ranks, model.batch, len(model.blocks(1))):
            layouts.setdefault(layout, -1)
        rows = []
        for layout, number in layouts.items():
            try:
                told = predictor.predict(layout)
            except MpitrainError:
                continue  # this model cannot be laid out so
            rows.append(
                {
                    "layout": text(layout),
                    "choice": number,
                    "config": merged(base, settings(layout)),
                    "seconds": told.seconds,
                    "parts": dict(told.parts),
                    "memory": dict(told.memory),
                }
            )
        if not rows:
            raise InputError(f"no layout of {ranks} ranks is possible")
        model.close()
        found[ranks] = rows
    return found


def spread(ranks: int, batch: int, blocks: int) -> list[Any]:
    """Layouts of every kind for so many ranks."""
    from mpitrain.planner.layouts import ParallelLayout

    share = max(1, batch // ranks)
    found = [ParallelLayout(ranks, zero=zero, microbatch=share) for zero in (0, 1, 2, 3)]
    found.append(ParallelLayout(ranks, zero=3, share_node=False, microbatch=share))
    found.append(ParallelLayout(ranks, zero=0, microbatch=max(1, share // 2)))
    found.append(ParallelLayout(ranks, zero=2, microbatch=max(1, share // 2)))
    found.append(ParallelLayout(ranks, zero=1, microbatch=share, recompute=True))
    for pipeline in {2, ranks} if ranks > 2 else {2}:
        data = ranks // pipeline
        if pipeline > blocks:
            continue
        some = max(1, batch // data // (2 * pipeline))
        for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)):
            if pipeline * chunks <= blocks:
                found.append(
                    ParallelLayout(
                        data, pipeline, zero=int(data > 1), microbatch=some, schedule=schedule, chunks=chunks
                    )
                )
    for tensor in {2, min(4, ranks)}:
        data = ranks // tensor
        found.append(ParallelLayout(data, 1, tensor, microbatch=batch // data))
    found.append(ParallelLayout(ranks // 2, 1, 2, microbatch=batch // (ranks // 2), sequence=True))
    if ranks >= 4:
        data = ranks // 4
        found.append(ParallelLayout(data, 2, 2, microbatch=max(1, batch // data // 4)))
    return list(dict.fromkeys(found))
