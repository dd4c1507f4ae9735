"""Runs a training script that was written for one process on several ranks, unchanged.

    mpirun -n 4 python -m mpitrain.run script.py arguments...

The script trains data-parallel, and prints, saves and ends as it would alone: its batch stays the global batch.
Scripts for torchrun, and those that spawn their ranks, get a process group over MPI. The first line says which kind of
script it is.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from mpitrain import early
from mpitrain.errors import EXIT_FAILED, InputError, printable, refusal
from mpitrain.run.kinds import KINDS, kind_of, replace_spawn, use_own_library

if TYPE_CHECKING:
    from mpitrain.run.check import StepRecorder
    from mpitrain.run.session import ScriptRun

USAGE = "mpirun -n N python -m mpitrain.run [--as KIND] [--check STEPS] SCRIPT [ARGUMENTS...]"
_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "SLURM_")  # prefixes of the variables of launchers
_MISSING = ("--resume", "--parallel.zero", "--train.precision")  # options of mpitrain.train that a script cannot have
_MOST_NAMED = 8


def main(arguments: list[str]) -> None:
    """Run a script as `__main__`.

    Args:
        arguments: Options of this command, the script and its arguments.
    """
    early.print_help(arguments[:1], lambda: make_parser().format_help())
    early.read_arguments(lambda: _options(arguments))
    from mpitrain.comm import init

    world = init()
    options = _options(arguments)
    kind = options.kind or kind_of(options.script)
    words = [options.script, *options.arguments]
    if kind in ("horovod", "deepspeed"):
        use_own_library(kind)
    if world.rank == 0:
        print(f"mpitrain.run: {printable(options.script)} is {KINDS[kind]}", file=sys.stderr, flush=True)
    if options.check and kind != "plain":
        raise refusal("--check compares scripts for one process; leave it out")
    if kind == "torchrun":
        from mpitrain.backend.__main__ import main as run_with_backend

        replace_spawn(world)
        run_with_backend(words)
    elif world.size == 1 or kind != "plain":
        _execute(words)
    else:
        from mpitrain.run.session import ScriptRun

        _run_together(ScriptRun(world, words[0]), words, options.check)


def make_parser() -> early.Parser:
    """Return the parser of the command line."""
    parser = early.Parser(
        "run",
        usage=USAGE,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kinds = list(KINDS)
    parser.add_argument("--as", dest="kind", choices=kinds, help="kind of the script [found out from its text]")
    steps = "compare losses and weights of the first STEPS optimizer steps with one process, and end"
    parser.add_argument("--check", type=early.positive_integer, default=0, metavar="STEPS", help=steps)
    parser.add_argument("script", metavar="SCRIPT", help="path of the script")
    parser.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


def _options(arguments: list[str]) -> argparse.Namespace:
    """Return the options. Raises InputError on all ranks if one is wrong or there is no such script."""
    for word in arguments:
        if not word.startswith("-"):
            break
        if word.partition("=")[0] in _MISSING:
            raise refusal(f"mpitrain.run has no {word}; it is a setting of mpitrain.train and of mt.initialize")
    options = make_parser().parse_args(arguments)
    if not os.path.isfile(options.script):
        raise refusal(f"there is no script {printable(options.script)}; usage: {USAGE}")
    return options


def _execute(words: list[str]) -> None:
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


def _run_together(session: ScriptRun, words: list[str], check: int) -> None:
    """Run the script on all ranks, and end all of them as one process would end. Collective."""
    import torch

    from mpitrain.run.batches import Batches
    from mpitrain.run.check import EnoughSteps, StepRecorder
    from mpitrain.run.checks import Checks
    from mpitrain.run.files import Files
    from mpitrain.run.gradients import install as install_gradients
    from mpitrain.run.seeds import align

    for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
        del os.environ[name]  # libraries that find them would start other ranks' communication of their own
    seed = align(session)
    recorder = StepRecorder(check)
    checks = Checks(session)
    checks.install()
    Batches(session).install()
    install_gradients(torch.Tensor)
    if check:
        recorder.install()
    Files(session).install()
    code = 0
    try:
        _execute(words)
        checks.finish()
    except EnoughSteps:
        checks.finish()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        session.meet(f"the end of the script with code {code}")
    except BaseException as error:
        code = _report(session, error)
    _name_gathered(session)
    if check and not code:
        code = _compare(session, recorder, check, seed, words)
    sys.stdout.flush()
    if code:
        session.world.barrier()
        sys.exit(code)


def _report(session: ScriptRun, error: BaseException) -> int:
    """Print an error of the script on rank 0 as Python does, and return the exit code. Collective."""
    if session.rank == 0:
        if isinstance(error, InputError):
            print(f"mpitrain: {error}", file=session.errors)
        else:
            trace = _of_script(session, error.__traceback__)
            traceback.print_exception(type(error), error, trace, file=session.errors)
    session.meet(f"{type(error).__name__}: {printable(error)}")
    return error.exit_code if isinstance(error, InputError) else EXIT_FAILED


def _compare(session: ScriptRun, recorder: StepRecorder, steps: int, seed: int, words: list[str]) -> int:
    """Print how the steps differ from one process, and return the exit code. Collective."""
    from mpitrain.run.check import compare

    code = 0
    with session.without_meetings():
        if session.rank == 0:
            line, code = compare(recorder, steps, seed, words)
            print(f"mpitrain.run: {line}", file=session.errors, flush=True)
    return int(session.world.broadcast_object(code))


def _of_script(session: ScriptRun, trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first line of the script on, as one process prints it."""
    first = trace
    while first is not None and not session.is_script(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return first or trace


def _name_gathered(session: ScriptRun) -> None:
    """Print the operations that ran on the whole batch on every rank, which is what slows a script down."""
    if session.rank == 0 and session.gathered:
        names = ", ".join(f"{name} ({count} times)" for name, count in session.gathered.most_common(_MOST_NAMED))
        print(f"mpitrain.run: on whole batches on every rank ran {names}", file=session.errors)


if __name__ == "__main__":
    main(sys.argv[1:])
