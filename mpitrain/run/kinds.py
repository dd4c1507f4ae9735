"""Kinds of training scripts, by the library that they were written for, and the start of those that have ranks.

| kind | recognised by | runs |
|---|---|---|
| plain | none of the others | as one process to itself, data-parallel |
| torchrun | init_process_group, or torch.multiprocessing's spawn | with a process group over MPI (`mpitrain.backend`) |
| horovod, deepspeed | import horovod, import deepspeed | with the package of mpitrain that has these names |
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.errors import InputError, refusal

if TYPE_CHECKING:
    from mpitrain.comm import Communicator

KINDS = {
    "plain": "a script for one process, which trains data-parallel",
    "torchrun": "a script for torchrun, whose process groups communicate over MPI",
    "horovod": "a script for Horovod",
    "deepspeed": "a script for DeepSpeed",
}


def kind_of(script: str) -> str:
    """Return the kind of a script, one of `KINDS`, from its text.

    Args:
        script: Path of the script.

    Raises:
        InputError: The script is not Python.
    """
    try:
        tree = ast.parse(Path(script).read_bytes(), script)
    except (SyntaxError, ValueError) as error:
        raise refusal(f"{script} is not a Python script: {error}; pass the path of one") from None
    modules: set[str] = set()
    calls: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Call):
            calls.add(ast.unparse(node.func))
    for library in ("horovod", "deepspeed"):
        if library in modules:
            return library
    names = {call.rpartition(".")[2] for call in calls}
    spawns = bool(calls & {"mp.spawn", "multiprocessing.spawn", "torch.multiprocessing.spawn", "spawn"})
    return "torchrun" if "init_process_group" in names or spawns else "plain"


def use_own_library(kind: str) -> None:
    """Let `import horovod.torch` or `import deepspeed` import mpitrain's package of that name.

    Args:
        kind: "horovod" or "deepspeed".
    """
    from mpitrain.run.workers import use_in_every_loader

    use_in_every_loader()  # a process that runs MPI must not be forked
    getattr(importlib.import_module(f"mpitrain.{kind}"), f"as_{kind}")()


def replace_spawn(world: Communicator) -> None:
    """Let a script that spawns its ranks get those of mpirun instead.

    Args:
        world: Communicator over all ranks.
    """
    import torch.multiprocessing

    def spawn(function: Callable[..., Any], args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        if nprocs != world.size:
            raise InputError(
                f"the script spawns {nprocs} processes, and mpirun started {world.size} ranks; use mpirun -n {nprocs}",
                agreed=True,
            )
        if world.rank == 0:
            print(f"mpitrain.run: the {nprocs} processes that the script spawns are mpirun's ranks", file=sys.stderr)
        function(world.rank, *args)

    torch.multiprocessing.spawn = spawn  # type: ignore[assignment]
