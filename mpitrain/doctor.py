"""`mpirun -n N python -m mpitrain.doctor`: report on the MPI installation and the nodes, with a verdict on each line.

The exit code is 1 if a problem would stop a job, and 0 otherwise. Other options do other work: see --help. This module
loads MPI only when it runs a command that needs it, because --clean must work even if MPI cannot start.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from mpitrain import early
from mpitrain.errors import EXIT_DONE, EXIT_FAILED, InputError, echo, exit_code_of
from mpitrain.measuring import findings

_SELF_STARTED = ("--check", "--tune")  # have arguments and --help of their own
_EPILOG = "The exit code of the report is 1 if a problem would stop a job, and 0 otherwise. --check and --tune start "
_EPILOG += "ranks themselves; add --help to one of them for its options."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. The report is collective.

    Args:
        argv: Arguments; None for those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in _SELF_STARTED:
        return _start_ranks(arguments[0].removeprefix("--"), arguments[1:])
    early.print_help(arguments, make_parser().format_help)
    options = early.read_arguments(lambda: _parse(arguments))
    if options is not None and options.clean:
        from mpitrain.comm.job.cleanup import clean

        dry: bool = options.dry_run
        return exit_code_of(lambda: clean(dry=dry))
    if options is not None and options.killed:
        from mpitrain.planner import out_of_memory

        run: Path = options.killed
        return exit_code_of(lambda: out_of_memory.main(run))
    try:
        from mpitrain.comm import init
    except ImportError as error:  # without MPI, which a bug report should say
        if options is None or not options.json or not isinstance(error, InputError) or not early.is_first_rank():
            raise
        echo(findings.as_json([(findings.BAD, "MPI", str(error))]))
        return EXIT_FAILED
    from mpitrain.measuring import installation

    world = init(timeout=60)
    options = options or _parse(arguments)
    lines = installation.report(world)
    if world.rank == 0:
        echo(findings.as_json(lines) if options.json else findings.as_text(lines))
    return EXIT_FAILED if any(verdict == findings.BAD for verdict, _, _ in lines) else EXIT_DONE


def make_parser() -> early.Parser:
    """Return the parser of the command line."""
    about = "Report on the MPI installation and the nodes of a job, with a verdict on each line."
    parser = early.Parser("doctor", description=about, epilog=_EPILOG, allow_abbrev=False)
    instead = parser.add_mutually_exclusive_group()
    add = instead.add_argument
    add("--json", action="store_true", help="print the report as JSON, for bug reports; it adds versions of packages")
    add("--check", action="store_true", help="test whether every collective gives correct results on this machine")
    add("--tune", action="store_true", help="find the fastest algorithms for this machine, and store them for jobs")
    add("--clean", action="store_true", help="remove files that MPI left on this machine when jobs were killed")
    killed = "say whether the kernel killed the last job of a run because memory was full"
    add("--killed", type=Path, metavar="RUN", help=killed)
    parser.add_argument("--dry-run", action="store_true", help="with --clean: remove nothing")
    return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options. Raises InputError on all ranks if they are wrong."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.check or options.tune:
        parser.error("--check and --tune come before their own options")
    if options.dry_run and not options.clean:
        parser.error("--dry-run is for --clean")
    return options


def _start_ranks(name: str, arguments: Sequence[str]) -> int:
    from mpitrain.measuring import self_start

    def act() -> int:
        return int(importlib.import_module(f"mpitrain.measuring.{name}").main(arguments))

    return self_start.run_command(act)


if __name__ == "__main__":
    sys.exit(main())
