"""Runs a script that was written for torchrun, unchanged, over MPI.

    mpirun -n 4 python -m mpitrain.backend script.py arguments...
    srun python -m mpitrain.backend -m package.module arguments...

Every process group communicates over MPI, whether the script requests "gloo", "nccl", "mpi" or no backend. As with
torchrun, the script must not start its ranks itself (torch.multiprocessing.spawn).
"""

from __future__ import annotations

import os
import runpy
import socket
import sys

from mpitrain import early
from mpitrain.backend.registration import set_environment, use_for_all_groups
from mpitrain.errors import refusal

USAGE = "usage: mpirun -n N python -m mpitrain.backend [-m] SCRIPT [ARGUMENTS...]"


def main(arguments: list[str]) -> None:
    """Run a script or module as `__main__`, with a process group over MPI.

    Args:
        arguments: Optional "-m", the script or module, and its arguments.
    """
    early.print_help(arguments[:1], lambda: f"{__doc__}\n{USAGE}")
    early.read_arguments(lambda: _script(arguments))
    from mpitrain.comm import init

    world = init()
    as_module, words = _script(arguments)
    set_environment(world)
    os.environ.setdefault("MASTER_ADDR", world.broadcast_object(socket.gethostname()))  # for scripts that read them;
    os.environ.setdefault("MASTER_PORT", "29500")  # nothing listens there
    use_for_all_groups()
    sys.argv, script = words, words[0]
    try:
        if as_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(script))
            runpy.run_path(os.path.abspath(script), run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if code and world.size > 1:  # other ranks may still be waiting for this one
            reason = leaving.code if isinstance(leaving.code, str) else f"exited with code {code}"
            world.process.faults.end_job(f"mpitrain: rank {world.rank}: {reason}", code)
        raise


def _script(arguments: list[str]) -> tuple[bool, list[str]]:
    """Return whether to run a module, and a list of the script or module and its arguments.

    Raises InputError on all ranks if there is no such script.
    """
    as_module = arguments[:1] == ["-m"]
    words = arguments[1:] if as_module else arguments
    if not words:
        raise refusal(USAGE)
    if not as_module and not os.path.exists(words[0]):
        raise refusal(f"there is no script {words[0]}; {USAGE}")
    return as_module, words


if __name__ == "__main__":
    main(sys.argv[1:])
