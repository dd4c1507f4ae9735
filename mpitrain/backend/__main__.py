"""Runs a script that was written for torchrun, unchanged, over MPI.

    mpirun -n 4 python -m mpitrain.backend script.py arguments...
    srun python -m mpitrain.backend -m package.module arguments...

Every process group is ours, whether the script says "gloo", "nccl", "mpi" or nothing. Scripts that start their own
processes (torch.multiprocessing.spawn) are not for torchrun and not for this.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys

from mpitrain.backend import environment, patches
from mpitrain.backend.registration import ADDRESS, NAME
from mpitrain.comm import init
from mpitrain.errors import EXIT_BAD_INPUT, InputError

USAGE = "usage: mpirun -n N python -m mpitrain.backend [-m] SCRIPT [ARGUMENTS...]"


def main(arguments: list[str]) -> None:
    """Run the script.

    Args:
        arguments: -m where a module is to be run, the script or module, and its arguments.
    """
    as_module = arguments[:1] == ["-m"]
    if as_module:
        arguments = arguments[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{__doc__}\n{USAGE}" if arguments else USAGE, file=sys.stdout if arguments else sys.stderr)
        raise SystemExit(0 if arguments else EXIT_BAD_INPUT)
    script = arguments[0]
    world = init()
    if not as_module and not os.path.exists(script):
        raise InputError(f"there is no script {script}; {USAGE}", agreed=True)
    environment.publish(world)
    os.environ.setdefault("MASTER_ADDR", world.broadcast_object(socket.gethostname()))  # for scripts that read them;
    os.environ.setdefault("MASTER_PORT", "29500")  # nothing listens there
    patches.take_over(NAME, ADDRESS)
    sys.argv = arguments
    try:
        if as_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(script))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if code and world.size > 1:  # the other ranks may still wait for this one
            reason = leaving.code if isinstance(leaving.code, str) else f"left with exit code {code}"
            world.process.faults.end_job(f"mpitrain: rank {world.rank}: {reason}", code)
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
