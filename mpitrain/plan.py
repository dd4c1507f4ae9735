"""`python -m mpitrain.plan [CONFIG.toml] --nodes 4 --ranks-per-node 8`: finds the fastest layouts before a job.

It needs no MPI.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from pathlib import Path

from mpitrain.config.settings import Config
from mpitrain.early import Parser, positive_integer
from mpitrain.errors import EXIT_DONE, exit_code_of, refusal
from mpitrain.parallel import layouts
from mpitrain.parallel.costs import ModelProfile
from mpitrain.parallel.layouts import ParallelLayout
from mpitrain.parallel.rules import LayoutRules, rules_of
from mpitrain.pipe.draw import figure_file
from mpitrain.planner.machine import MachineProfile, read_machine, ready_made_machines, size_of
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.report import HEAD, Point, details, excess_text, nothing_fits, picture, report, row
from mpitrain.planner.search import COUNT, SIMULATED, best, excess_of
from mpitrain.planner.subject import description_of
from mpitrain.storage.disk import reporting, write_whole

CONFIGURED = "config"  # value of --explain for the configuration's own layout
MACHINE = "machine.toml"  # default file of a profile written by --measure
MEASURE = "--measure"
FIND = ("--find-batch", "--find-bucket")  # options of `measuring.find`


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments; None for those of the process. With --measure, the others are those of `measuring.machine`;
            with --find-batch or --find-bucket, all are those of `measuring.find`.

    Returns:
        Exit code, which is 2 for wrong input and if no layout fits.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if MEASURE not in arguments and not {*FIND} & {*arguments}:
        return exit_code_of(lambda: _plan(arguments))
    from mpitrain.measuring import self_start

    def measure() -> int:
        from mpitrain.measuring import find, machine  # they load MPI

        if MEASURE not in arguments:
            return find.main(arguments)
        return machine.main([each for each in arguments if each != MEASURE])

    return self_start.run_command(measure)


def _plan(argv: Sequence[str]) -> int:
    options, rest = make_parser().parse_known_args(list(argv))
    config = Config.from_args(rest)
    rules = rules_of(config)
    nodes, each, ranks = options.nodes, options.ranks_per_node, sorted(set(options.scale))
    if wrong := [count for count in ranks if count % each]:
        raise refusal(f"--scale {wrong[0]} is not a multiple of the {each} ranks per node; use multiples of {each}")
    if ranks and (options.explain or nodes != 1):
        raise refusal("--scale sets the number of nodes and shows the best layouts; remove --nodes and --explain")
    explained = layouts.read(options.explain) if options.explain not in ("", CONFIGURED) else None
    out = Path(options.out or "plan.toml") if options.out or not (options.explain or ranks) else None
    if out is not None and any(Path(word) == out for word in rest if not word.startswith("-")):
        raise refusal(f"--out {out} would overwrite the configuration that is read; use another file")
    from mpitrain.planner.profile import profile_of  # its imports take seconds

    if not options.machine and not Path(MACHINE).is_file():
        raise refusal(
            f"there is no {MACHINE} in this folder; use --machine with one of {', '.join(ready_made_machines())} or a "
            "file, or measure this machine with python -m mpitrain.plan --measure"
        )
    machine = read_machine(options.machine or MACHINE)
    like_here = machine.origin.startswith("measured") and machine.device is None
    measure = options.measured or (like_here and not options.counted)
    model = profile_of(config, description_of(config), machine, measure=measure, ranks_per_node=each)
    if ranks:
        print_scaling(options, model, machine, rules, out)
        return EXIT_DONE
    predictor = Predictor(model, machine, nodes, each, options.memory, bucket_mb=config.comm.bucket_mb)
    if options.explain:
        chosen = explained or layouts.layout_of(config, nodes * each, model.blocks(1), predictor.slowness)
        text = details(predictor.predict(chosen), predictor.room())  # raises InputError if it is impossible
        if (excess := excess_of(predictor, chosen)) is not None:
            text += f"\n\ndoes not fit:\n{excess_text([excess])}"
        print(text)
    else:
        plan = best(predictor, rules, options.top, seconds=options.seconds)
        speeds = f" at speeds {', '.join(f'{speed:g}' for speed in machine.speeds)}" if machine.speeds else ""
        print(report(plan, f"{nodes * each:,} ranks on {nodes:,} x {machine.name}{speeds} ({machine.origin})"))
        if not plan.predictions:
            raise refusal(f"{nothing_fits(plan)}; use more nodes or a smaller model")
        chosen = plan.predictions[0].layout
    if out is not None:
        write(config, chosen, out)
        launcher = f"mpirun -n {each}" if nodes == 1 else f"srun --nodes {nodes} --ntasks-per-node {each}"
        print(f"\nwritten: {out}; train with\n  {launcher} python -m mpitrain.train {out}")
    return EXIT_DONE


def print_scaling(
    options: argparse.Namespace, model: ModelProfile, machine: MachineProfile, rules: LayoutRules, out: Path | None
) -> None:
    """Print the best layouts for several numbers of nodes, and draw them. Raises InputError if that is impossible.

    Args:
        options: Options of the command line.
        model: Profile of the model.
        machine: Profile of the machine.
        rules: Rules that layouts must follow.
        out: File for the picture, or None.
    """
    nodes = [count // options.ranks_per_node for count in sorted(set(options.scale))]
    lines: dict[bool, list[Point]] = {False: [], True: []}
    for weak, points in lines.items():
        print(f"{'weak' if weak else 'strong'} scaling on {machine.name} ({machine.origin})\n{HEAD}")
        for count in nodes:
            larger = copy(model)
            larger.batch = model.batch * count // nodes[0] if weak else model.batch
            predictor = Predictor(larger, machine, count, options.ranks_per_node, options.memory)
            plans = best(predictor, rules, 1, seconds=options.seconds).predictions
            points.append((predictor.ranks, plans[0] if plans else None))
            print(row(points), flush=True)
        print()
    if out is not None:
        with figure_file(out, 13, 4.2) as figure:
            picture(figure, lines[False], lines[True], f"{machine.name} ({machine.origin})")
        print(f"drawn: {out}")


def write(config: Config, layout: ParallelLayout, out: Path) -> None:
    """Write a configuration with the settings of a layout.

    Args:
        config: Configuration to start from.
        layout: Layout whose settings replace those of the configuration.
        out: Path of the file.

    Raises:
        InputError: The file cannot be written.
    """
    values = config.to_dict()
    for section, settings in layouts.settings(layout).items():
        values[section].update(settings)
    values["parallel"]["auto"] = False
    with reporting(f"--out {out} cannot be written", "use another file"):
        write_whole(out, f"# {layouts.text(layout)}\n{Config.from_dict(values, 'plan').to_toml()}")


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0")


def _rank_counts(text: str) -> list[int]:
    return [*map(positive_integer, text.split(","))]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    notes = (layouts.__doc__ or "").partition("\n\n")[2]
    parser = Parser(
        "plan",
        usage="%(prog)s [CONFIG.toml] [--section.key value]... --nodes N --ranks-per-node N [options]\n"
        "       %(prog)s --measure [--help]: measure the speeds of this machine\n"
        "       %(prog)s [CONFIG.toml] [--section.key value]... --find-batch | --find-bucket [--help]",
        description="Find the fastest layouts for a number of nodes, and predict their step time and memory.",
        epilog=f"layouts:\n{notes}\nkeys of the configuration: python -m mpitrain.train --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nodes", type=positive_integer, default=1, metavar="N", help="nodes of the job [1]")
    add("--ranks-per-node", type=positive_integer, required=True, metavar="N", help="ranks on each node")
    names = ", ".join(ready_made_machines())
    add("--machine", default="", metavar="FILE[,FILE]|NAME", help=f"machine profile: files or {names} [{MACHINE}]")
    memory = partial(size_of, option="--memory")
    add(
        "--memory",
        type=memory,
        metavar="SIZE",
        help="memory that a rank may use, such as 32GiB [its share of the node's]",
    )
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument(
        "--measured",
        action="store_true",
        help="measure each block's time here [default if --machine is a measured CPU profile]",
    )
    ways.add_argument(
        "--counted", action="store_true", help="estimate times from operations and bytes [default otherwise]"
    )
    add(
        "--explain",
        default="",
        metavar="LAYOUT",
        help=f"describe only this layout; {CONFIGURED} means the configuration's own layout",
    )
    counts = "show the best layout for each of these numbers of ranks"
    add("--scale", type=_rank_counts, default=[], metavar="N,N...", help=counts)
    early = f"end the search after S seconds; the result then depends on this machine's load [{SIMULATED} simulations]"
    add("--seconds", type=_seconds, default=float("inf"), metavar="S", help=early)
    add("--top", type=positive_integer, default=COUNT, metavar="K", help=f"number of layouts to show [{COUNT}]")
    out = "file for the best layout's configuration [plan.toml]; with --scale, for a picture"
    add("--out", default="", metavar="FILE", help=out)
    return parser


if __name__ == "__main__":
    sys.exit(main())
