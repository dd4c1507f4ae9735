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
    from mpitrain.run.resume import Resume
    from mpitrain.run.session import ScriptRun

USAGE = "mpirun -n N python -m mpitrain.run [--as KIND] [OPTIONS] SCRIPT [ARGUMENTS...]"
_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "SLURM_")  # prefixes of the variables of launchers
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
    if kind != "plain" and (name := _option_of_plain(options)):
        raise refusal(f"{name} is for scripts for one process; leave it out")
    if kind == "torchrun":
        from mpitrain.backend.__main__ import main as run_with_backend

        replace_spawn(world)
        run_with_backend(words)
    elif kind != "plain" or (world.size == 1 and not (options.resume or options.folder)):
        if options.precision == "bf16":
            from mpitrain.run.precision import install

            install()
        _execute(words)
    else:
        from mpitrain.run.session import ScriptRun

        _run_together(ScriptRun(world, words[0]), words, options)


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
    resume = "save checkpoints, and continue from the newest one of the run folder if there is any"
    parser.add_argument("--resume", action="store_true", help=resume)
    folder = "run folder, for checkpoints and a report [runs/SCRIPT with --resume, else none]"
    parser.add_argument("--run.dir", dest="folder", default="", metavar="DIR", help=folder)
    every = "with --resume: training steps between two checkpoints [%(default)s]"
    parser.add_argument(
        "--checkpoint.every", dest="every", type=early.positive_integer, default=100, metavar="N", help=every
    )
    keep = "with --resume: number of newest checkpoints to keep [%(default)s]"
    parser.add_argument(
        "--checkpoint.keep", dest="keep", type=early.positive_integer, default=2, metavar="N", help=keep
    )
    precision = "precision in which modules compute, beside parameters in fp32 [%(default)s]"
    parser.add_argument("--train.precision", dest="precision", choices=["fp32", "bf16"], default="fp32", help=precision)
    zero = (
        "each rank keeps, of some parameters only, 1: optimizer states; 2: gradients too; 3: contents too [%(default)s]"
    )
    parser.add_argument("--parallel.zero", dest="zero", type=int, choices=[0, 1, 2, 3], default=0, help=zero)
    parser.add_argument("script", metavar="SCRIPT", help="path of the script")
    parser.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


def _options(arguments: list[str]) -> argparse.Namespace:
    """Return the options. Raises InputError on all ranks if one is wrong or there is no such script."""
    options = make_parser().parse_args(arguments)
    if options.check and (name := _option_of_plain(options, "--check")):
        raise refusal(f"--check runs the first steps of the script as it is, so it goes without {name}; leave one out")
    if not os.path.isfile(options.script):
        raise refusal(f"there is no script {printable(options.script)}; usage: {USAGE}")
    return options


def _option_of_plain(options: argparse.Namespace, without: str = "") -> str:
    """Return the name of an option that only a script for one process can have, or ""."""
    names = {
        "--check": options.check, "--resume": options.resume, "--run.dir": options.folder,
        "--train.precision": options.precision != "fp32", "--parallel.zero": options.zero,
    }  # fmt: skip
    return next((name for name, value in names.items() if value and name != without), "")


def _execute(words: list[str]) -> None:
    sys.argv = words
    path = os.path.abspath(words[0])  # as Python names the code, and as the script's own code is recognised
    sys.path[0] = os.path.dirname(path)
    runpy.run_path(path, run_name="__main__")


def _run_together(session: ScriptRun, words: list[str], options: argparse.Namespace) -> None:
    """Run the script on all ranks, and end all of them as one process would end. Collective."""
    from mpitrain.run.check import EnoughSteps, StepRecorder
    from mpitrain.run.checks import Checks
    from mpitrain.run.downloads import install as install_downloads
    from mpitrain.run.files import Files
    from mpitrain.run.precision import install as install_precision
    from mpitrain.run.resume import follow
    from mpitrain.run.seeds import agree_on_seed, set_seeds

    for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
        del os.environ[name]  # libraries that find them would start other ranks' communication of their own
    check: int = options.check
    follower = follow(session, words, options) if options.resume or options.folder else None
    if follower is not None and follower.has_ended:
        return
    seed = agree_on_seed(session) if follower is None or follower.seed is None else follower.seed
    source = set_seeds(seed)
    recorder = StepRecorder(check)
    checks = Checks(session)
    if session.size > 1:
        checks.install()
        _divide(session, options, follower)
    if options.precision == "bf16":
        install_precision()
    if check:
        recorder.install()
    Files(session).install()
    install_downloads(session)
    if follower is not None:
        follower.install(seed, source)
    code, failure = 0, None
    try:
        _execute(words) if follower is None else follower.execute(words)
        checks.finish()
    except EnoughSteps:
        checks.finish()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        session.meet(f"the end of the script with code {code}")
    except BaseException as error:
        code, failure = _report(session, error), error
    if follower is not None:
        follower.end(code, failure)
    _name_gathered(session)
    if check and not code:
        code = _compare(session, recorder, check, seed, words)
    sys.stdout.flush()
    if code:
        session.world.barrier()
        sys.exit(code)


def _divide(session: ScriptRun, options: argparse.Namespace, follower: Resume | None) -> None:
    """Divide batches, and states of optimizers where options say so, over the ranks from now on."""
    import torch

    from mpitrain.comm.memory.device import show_one
    from mpitrain.run.batches import Batches
    from mpitrain.run.gradients import install as install_gradients
    from mpitrain.run.zero import ShardedStates

    if torch.accelerator.current_accelerator() is not None:
        show_one(session.world.local_rank)
        torch.autograd.set_multithreading_enabled(False)  # ranks meet in backward, in one thread and in one order
    batches = Batches(session)
    batches.install()
    install_gradients(torch.Tensor)
    if follower is not None:
        follower.forget.append(batches.forget)
    if options.zero:
        states = ShardedStates(session, options.zero)
        states.install()
        if follower is not None:
            follower.whole_states = states.whole


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
