"""`python -m mpitrain.report RUN [RUN...] [--out FILE.html] [--png DIR]`: report of runs from their folders.

`--watch` shows a run while it goes on. `python -m mpitrain.report timeline RUN` merges recorded timelines again, and
`python -m mpitrain.report schedule` draws a pipeline schedule (`--help` lists the options).

Neither MPI nor torch is needed; charts need altair and vl-convert (`pip install "mpitrain[monitor]"`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from mpitrain.early import VERSION
from mpitrain.errors import EXIT_DONE, InputError, echo, exit_code_of

Run = Callable[[argparse.Namespace], int | None]  # returns the exit code, or None for success
_PROGRAM = "python -m mpitrain.report"


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Run folders and options, or the word schedule or timeline and its arguments; None for the process's
            arguments.

    Returns:
        Exit code.
    """
    argv = sys.argv[1:] if argv is None else argv
    makers = {"schedule": _of_schedules, "timeline": _of_timelines}
    parser, run = makers[argv[0]]() if argv and argv[0] in makers else (make_parser(), _report)
    arguments = parser.parse_args(argv[1:] if argv[:1] and argv[0] in makers else argv)
    return exit_code_of(lambda: run(arguments) or EXIT_DONE)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, without the words schedule and timeline."""
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Report what runs did, as a few lines of text or as a page of charts.",
        epilog=f"{_PROGRAM} schedule --help and {_PROGRAM} timeline --help describe pipeline schedules and timelines.",
    )
    add = parser.add_argument
    add("--version", action="version", version=VERSION)
    runs = "run folder, or several to compare; or the word schedule or timeline"
    add("runs", type=Path, nargs="+", metavar="RUN", help=runs)
    add("--out", type=Path, metavar="FILE.html", help="write a page of charts, in one file")
    add("--png", type=Path, metavar="DIR", help="write each chart as a picture into this folder")
    add("--watch", action="store_true", help="show a run while it trains, until it ends")
    add("--once", action="store_true", help="show the state of the run once, and exit")
    return parser


def _of_schedules() -> tuple[argparse.ArgumentParser, Run]:
    from mpitrain.pipe import draw

    about = "Show the steps of a pipeline schedule, as text or as a picture."
    parser = argparse.ArgumentParser(prog=f"{_PROGRAM} schedule", description=about)
    draw.add_arguments(parser)
    return parser, draw.run


def _of_timelines() -> tuple[argparse.ArgumentParser, Run]:
    about = "Make the timelines of a run again from the recordings of its ranks."
    parser = argparse.ArgumentParser(prog=f"{_PROGRAM} timeline", description=about)
    parser.add_argument("run", type=Path, help="run folder, or one of RUN/timeline/")
    return parser, _merge_timelines


def _report(arguments: argparse.Namespace) -> int | None:
    """Print a report of runs, write it as a page or pictures, or show a run that goes on."""
    folders: list[Path] = arguments.runs
    if arguments.watch or arguments.once:
        from mpitrain.monitor.watch import run

        if len(folders) > 1 or arguments.out or arguments.png:
            raise InputError(
                "--watch and --once show one run and write no file; use them with one run folder and no option"
            )
        return run(folders[0], once=arguments.once)
    if len(folders) == 1 and not (arguments.out or arguments.png):
        from mpitrain.monitor.run_files import summary

        echo(summary(folders[0]))
        return None
    from mpitrain.monitor.report.findings import (
        NamedRun,
        comparison,
        short_names,
    )  # imports NumPy, which a summary does not need
    from mpitrain.monitor.report.reading import read_run

    if arguments.out or arguments.png:
        try:
            import altair  # noqa: F401
            import vl_convert  # noqa: F401
        except ImportError as error:
            raise InputError(
                f'charts need a package that is not installed ({error}); pip install "mpitrain[monitor]", '
                "or omit --out and --png to get text"
            ) from None
        from mpitrain.monitor.report.page import write_page, write_pictures
    runs = [NamedRun(name, read_run(folder)) for name, folder in zip(short_names(folders), folders, strict=True)]
    if arguments.out:
        size = write_page(runs, arguments.out)
        echo(f"page: {arguments.out} ({size / 1e6:.1f} MB; opens in a browser, without a network)")
    if arguments.png:
        echo(f"pictures: {len(write_pictures(runs, arguments.png))} in {arguments.png}")
    if not (arguments.out or arguments.png):
        echo(comparison(runs))
    return None


def _merge_timelines(arguments: argparse.Namespace) -> None:
    from mpitrain.monitor.timeline.merging import describe, merge, recordings

    folders = recordings(arguments.run)
    if not folders:
        raise InputError(f'{arguments.run} has no timeline; record one with monitor.timeline = "A:B"')
    for folder in folders:
        echo(*describe(merge(folder)))


if __name__ == "__main__":
    sys.exit(main())
