"""RANK, WORLD_SIZE and their kin, as torchrun sets them, from MPI or from what its launcher left.

| variable | meaning |
|---|---|
| RANK, WORLD_SIZE | this process among all |
| LOCAL_RANK, LOCAL_WORLD_SIZE | this process among those of its node |
| GROUP_RANK, GROUP_WORLD_SIZE | its node among all |
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from mpitrain.early import launched_first
from mpitrain.errors import InputError

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

# what the launchers call rank, size and local rank
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("PMI_RANK", "PMI_SIZE", "SLURM_LOCALID"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


def from_launcher(environment: Mapping[str, str]) -> dict[str, str] | None:
    """RANK, WORLD_SIZE and LOCAL_RANK as the launcher says them; None if no launcher we know does."""
    for names in _LAUNCHERS:
        if all(environment.get(name, "").isdigit() for name in names):
            rank, size, local = (environment[name] for name in names)
            return {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local}
    return None


def publish(world: Communicator) -> None:
    """Set the variables to what MPI says."""
    values = {
        "RANK": world.rank,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": world.local_rank,
        "LOCAL_WORLD_SIZE": world.local_size,
        "GROUP_RANK": world.node,
        "GROUP_WORLD_SIZE": world.num_nodes,
    }
    os.environ.update({name: str(value) for name, value in values.items()})


def announce() -> None:
    """Set the variables before the script reads them, and without MPI where the launcher says enough.

    Raises:
        InputError: Processes of torchrun or accelerate launch are no ranks of MPI, or several are the same one.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        sys.excepthook = _say
        raise InputError(
            "torchrun (or accelerate launch, which calls it) starts processes that MPI does not know; start the script "
            f"with mpirun or srun instead: mpirun -n N python -m mpitrain.backend {os.path.basename(sys.argv[0])}"
        )
    told = from_launcher(os.environ)
    if told is not None:
        os.environ.update(told)
    elif multiprocessing.parent_process() is None and not _is_command():
        from mpitrain.comm import init

        publish(init(abort_on_error=False))


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an error before there is MPI, which would see to it that one rank speaks."""
    if not isinstance(error, InputError):
        sys.__excepthook__(kind, error, trace)
        return
    if launched_first() and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"mpitrain: {error}", file=sys.stderr, flush=True)
    raise SystemExit(error.exit_code)


def _is_command() -> bool:
    """Return whether this is `python -m mpitrain.backend`, which reads its arguments before it starts MPI."""
    return ("-m", "mpitrain.backend") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
