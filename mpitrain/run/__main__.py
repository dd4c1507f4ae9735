"""Runs a training script that was written for one process on several ranks, unchanged.

    mpirun -n 4 python -m mpitrain.run script.py arguments...

The script trains data-parallel, and prints, saves and ends as it would alone: its batch stays the global batch.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from mpitrain import early
from mpitrain.errors import EXIT_FAILED, printable, refusal

if TYPE_CHECKING:
    from mpitrain.run.session import Session

USAGE = "usage: mpirun -n N python -m mpitrain.run SCRIPT [ARGUMENTS...]"
_LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "SLURM_")  # prefixes of the variables of launchers
_MOST_NAMED = 8


def main(arguments: list[str]) -> None:
    """Run a script as `__main__`.

    Args:
        arguments: Script and its arguments.
    """
    early.print_help(arguments[:1], lambda: f"{__doc__}\n{USAGE}")
    early.read_arguments(lambda: _script(arguments))
    from mpitrain.comm import init

    world = init()
    words = _script(arguments)
    if world.size == 1:
        _execute(words)
        return
    from mpitrain.run.session import Session

    session = Session(world, words[0])
    _run_together(session, words)


def _script(arguments: list[str]) -> list[str]:
    """Return the script and its arguments.

    Raises InputError on all ranks if there is no such script.
    """
    if not arguments:
        raise refusal(USAGE)
    if not os.path.isfile(arguments[0]):
        raise refusal(f"there is no script {printable(arguments[0])}; {USAGE}")
    return arguments


def _execute(words: list[str]) -> None:
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


def _run_together(session: Session, words: list[str]) -> None:
    """Run the script on all ranks, and end all of them as one process would end. Collective."""
    import torch

    from mpitrain.run.batches import Batches
    from mpitrain.run.checks import Checks
    from mpitrain.run.files import Files
    from mpitrain.run.gradients import install as install_gradients
    from mpitrain.run.seeds import align

    for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
        del os.environ[name]  # libraries that find them would start other ranks' communication of their own
    align(session)
    checks = Checks(session)
    checks.install()
    Batches(session).install()
    install_gradients(torch.Tensor)
    Files(session).install()
    code = 0
    try:
        _execute(words)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        session.meet(f"the end of the script with code {code}")
    except BaseException as error:
        code = EXIT_FAILED
        if session.rank == 0:
            traceback.print_exception(type(error), error, _of_script(session, error.__traceback__), file=session.errors)
        session.meet(f"{type(error).__name__}: {printable(error)}")
    else:
        checks.finish()
    _name_gathered(session)
    sys.stdout.flush()
    if code:
        session.world.barrier()
        sys.exit(code)


def _of_script(session: Session, trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the first line of the script on, as one process prints it."""
    first = trace
    while first is not None and not session.is_script(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return first or trace


def _name_gathered(session: Session) -> None:
    """Print the operations that ran on the whole batch on every rank, which is what slows a script down."""
    if session.rank == 0 and session.gathered:
        names = ", ".join(f"{name} ({count} times)" for name, count in session.gathered.most_common(_MOST_NAMED))
        print(f"mpitrain: on whole batches on every rank ran {names}", file=session.errors)


if __name__ == "__main__":
    main(sys.argv[1:])
