"""Growth: the share of a step that is not computing, over sizes of a model, ranks and hosts, beside the planner's.

The trainer trains GPTs of 5 to 300 M parameters as a job does by default, with one sample of 128 tokens per rank: more
ranks have a larger batch. In turns with whole steps, the same ranks compute the same passes at the same time without
reducing the gradients:

    computing       these passes, and the optimizer's own part of a step: each rank updates its share of the parameters
    not computing   the rest of the step: reducing gradients, publishing parameters, waiting for other ranks, the norm,
                    setting gradients to zero, loading data, Python

Both are those of the slowest rank. More ranks than cores take turns, in steps and in passes alone.

Without mpirun, it measures ranks of this host, and then three hosts with one and two ranks each: network namespaces of
this machine (tests/cluster/namespace_hosts.py), which share its cores and speak TCP. They need root. A model that would
need more memory than there is is left out.

With --machine, the planner predicts the same steps, and those of up to 4,096 ranks on more nodes of this machine: one
rank on each core, and between nodes the latency and bandwidth that were measured between the hosts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from benchmarks.runner.jobs import BenchmarkParser, maxima, quiet, run, run_on_hosts, say
from benchmarks.runner.report import Panel, Report, ReportTable
from benchmarks.runner.training_runs import UNENDING, TrainerRun, merged
from mpitrain.comm import Communicator
from mpitrain.config.settings import Config
from mpitrain.measuring.self_start import is_launched
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.planner.machine import MachineProfile, read_machine
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.profile import profile_of
from mpitrain.planner.subject import description_of
from mpitrain.speeds import links
from mpitrain.storage import proc
from mpitrain.trainer.threads import time_passes

TOKENS = 128  # of a sample; each rank has one
SIZES = {"5 M": (6, 256), "20 M": (6, 512), "80 M": (11, 768), "300 M": (24, 1024)}  # (layers, width)
HOSTS = ("1,1,1", "2,2,2")  # ranks of each host
PLANNED = tuple(1 << power for power in range(13))  # numbers of ranks, up to 4,096
_LEAST = 3  # steps that are measured, however long they take
Shares = dict[str, dict[str, float]]  # see `predictions`


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark and return its exit code."""
    options, hosts = _parser().parse(arguments), dict[int, Any]()
    for ranks in HOSTS[: 1 if options.quick else None] if not is_launched() else ():
        total = sum(map(int, ranks.split(",")))
        print(f"growth on hosts with {ranks} ranks …", flush=True)
        more = ["--sizes", ",".join(_fitting(total, options, ranks.count(",") + 1)), "--machine", ""]
        code, values = run_on_hosts("growth", [*arguments, *more], options.limit, "--ranks", ranks)
        if not code:  # else it has said why
            hosts[total] = values["results"][str(total)]

    def report_all(results: dict[int, Any], options: argparse.Namespace) -> Report:
        results |= hosts
        return report(results, predictions(results, options.machine) if options.machine else {})

    return run(_parser(), measure, report_all, arguments)


def _parser() -> BenchmarkParser:
    what, of = "Measure the share of a step that is not computing, and predict it for more ranks.", "one model"
    parser = BenchmarkParser("growth", what, "1,2,4,8", repeats=15, seconds=15.0, of=of, quick=(3, 1.0))
    parser.names("sizes", SIZES, "numbers of parameters", noun="model")
    parser.add("machine", metavar="FILE", help="machine profile, for the planner [without predictions]")
    return parser


def _config(name: str, ranks: int) -> dict[str, dict[str, Any]]:
    """Return the configuration of a model, a key of `SIZES`, on a number of ranks, by section and key."""
    layers, width = SIZES[name]
    model = {"name": "gpt", "layers": layers, "width": width, "heads": width // 64, "sequence": TOKENS}
    return merged(UNENDING, {"model": model, "train": {"batch": ranks}})


def _fitting(ranks: int, options: argparse.Namespace, hosts: int = 1) -> list[str]:
    """Return the models whose training fits into the memory of a machine with this many ranks and hosts."""
    names = options.sizes or list(SIZES)[: 1 if options.quick else None]
    available = proc.nbytes_of("meminfo", "MemAvailable") or 0
    # each rank has gradients, and at the start the whole model; each host has parameters and what it receives of others
    return [n for n in names if (8 * ranks + 12 * hosts) * SIZES[n][0] * 12 * SIZES[n][1] ** 2 < 0.9 * available]


class _GrowthRun(TrainerRun):
    """A training run whose passes can be timed without the rest of a step."""

    def times(self) -> list[float]:
        """Return the seconds of a step and of its computing, each of the slowest rank. Collective."""
        engine, world, batch = self._trainer.engine, self._trainer.world, next(self._coming)
        world.barrier()
        passes = time_passes(engine, [(batch.x, batch.y)], 0.0)
        world.barrier()
        updates, began = engine.clock.totals()["optimizer"], time.perf_counter()
        self.step()
        step = time.perf_counter() - began
        return maxima(world, [step, passes + engine.clock.totals()["optimizer"] - updates])


def measure(world: Communicator, options: argparse.Namespace) -> dict[str, Any]:
    """Measure steps and their computing for each model. Collective.

    Args:
        world: Communicator of all ranks.
        options: Options of the command.

    Returns:
        Number of nodes; latency and bandwidth between them, empty on one node; median seconds of a step and of its
        computing by model.
    """
    speeds = links.measure(world, options.quick) if world.num_nodes > 1 else {}
    between, times = {name: speeds[name] for name in ("latency", "bandwidth") if speeds}, dict[str, Any]()
    for name in world.on_root(lambda: _fitting(world.local_size, options)):
        with quiet():
            training = _GrowthRun(world, _config(name, world.size))
            training.prepare()
            first = training.times()  # touches memory, and does not count
            count = max(_LEAST, min(options.repeats, int(options.seconds / sum(first))))
            times[name] = [statistics.median(of) for of in zip(*(training.times() for _ in range(count)), strict=True)]
            training.close()
        say(world, f"{name}: {times[name][0] * 1e3:.1f} ms, of which computing {times[name][1] * 1e3:.1f} ms")
    return {"nodes": world.num_nodes, "between": between, "times": times}


# -- the planner -------------------------------------------------------------------------------------------


def predictions(results: dict[int, Any], file: str) -> Shares:
    """Return the predicted share of a step that is not computing.

    Args:
        results: Results of `measure`, by number of ranks.
        file: Machine profile.

    Returns:
        Shares by model, then by place: "RANKS on NODES" as measured, and "RANKS" on nodes with one rank on each core.
    """
    machine = read_machine(file)
    between = {name: value for result in results.values() for name, value in result["between"].items()}
    machine = replace(machine, links=replace(machine.links, **between))
    cores, shares = max(1, int(machine.cores)), dict[str, dict[str, float]]()
    places = {str(ranks): (ranks, -(-ranks // cores), machine) for ranks in PLANNED}
    for ranks, result in results.items():
        nodes = result["nodes"]
        places[f"{ranks} on {nodes}"] = ranks, nodes, _sharing(machine, nodes)
    for name in dict.fromkeys(name for result in results.values() for name in result["times"]):
        print(f"planning {name} …", flush=True)
        config = Config.from_dict(_config(name, 1))
        model = profile_of(config, description_of(config), machine, ranks_per_node=cores)
        shares[name] = {place: _predicted(model, *where) for place, where in places.items()}
        model.close()
    return shares


def _sharing(machine: MachineProfile, nodes: int) -> MachineProfile:
    """Return the profile of a node if this many of them share the cores of one machine."""
    cores = machine.cores / nodes
    return replace(machine, cores=cores, seen_cores=machine.cores, links=replace(machine.links, cores=cores))


def _predicted(model: Any, ranks: int, nodes: int, machine: MachineProfile) -> float:
    """Return the share of a step that is not computing, with one sample per rank."""
    larger = copy(model)
    larger.batch = ranks
    predictor = Predictor(larger, machine, nodes, ranks // nodes)
    step = predictor.predict(ParallelLayout(ranks, zero=int(ranks > 1)))
    return 1.0 - (step.times["compute"] + step.times["update"]) / step.seconds


# -- the report --------------------------------------------------------------------------------------------


def report(results: dict[int, Any], planned: Shares) -> Report:
    """Return the report with tables and a plot.

    Args:
        results: Results of `measure`, by number of ranks.
        planned: Result of `predictions`; empty without a machine profile.
    """
    rows: list[list[Any]] = []
    for name in SIZES:
        for ranks, result in sorted(results.items(), key=lambda each: (each[1]["nodes"], each[0])):
            if name in result["times"]:
                step, computing = result["times"][name]
                share = planned[name][f"{ranks} on {result['nodes']}"] * 100 if planned else None
                cells = [step * 1e3, computing * 1e3, 100 * (1 - computing / step), share]
                rows.append([name, result["nodes"], ranks, *cells])
    columns = ("parameters", "hosts", "ranks", "step ms", "computing ms", "not computing %", "predicted %")
    note = (
        f"Medians, one sample of {TOKENS} tokens per rank. Computing: passes without a reduction, and the update "
        "of a rank's share. The hosts are on this machine, and ranks share its cores. Models must fit into its memory."
    )
    tables = [ReportTable("Share of a step that is not computing", columns, rows, note)]
    return Report("Share of a step that is not computing", tables, panels=[_panel(rows, planned)])


def _panel(rows: Sequence[Sequence[Any]], planned: Shares) -> Panel:
    """Return the plot over ranks: measured points by model and hosts, and the planner's line for each model."""
    lines, styles = dict[str, tuple[Sequence[float], Sequence[float]]](), dict[str, dict[str, Any]]()
    for number, name in enumerate(dict.fromkeys(row[0] for row in rows)):
        for nodes in dict.fromkeys(row[1] for row in rows if row[0] == name):
            label, points = f"{name}, {nodes} host(s), measured", [r for r in rows if r[:2] == [name, nodes]]
            lines[label] = [row[2] for row in points], [row[5] for row in points]
            styles[label] = {"color": f"C{number}", "marker": "o" if nodes == 1 else "s", "linestyle": "none"}
        if name in planned:
            label = f"{name}, planner"
            lines[label] = PLANNED, [100 * planned[name][str(ranks)] for ranks in PLANNED]
            styles[label] = {"color": f"C{number}", "marker": ""}
    return Panel("not computing, % of a step", "ranks", lines, styles, doubling=True)
