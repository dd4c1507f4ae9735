"""Public names of mpitrain, MPI-native training of PyTorch models; see README.md.

Names are imported on first use, because `mpitrain.data` must be usable without MPI and because thousands of processes
import this package.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpitrain.early import __version__, missing_package, report_errors

if TYPE_CHECKING:
    from mpitrain.comm import ANY_SOURCE, Arena, Communicator, Work, compression, init
    from mpitrain.errors import InputError
    from mpitrain.layout.mesh import Mesh
    from mpitrain.loading import load_model
    from mpitrain.pipe.pipeline import Pipeline
    from mpitrain.shard.ddp import DistributedDataParallel
    from mpitrain.tensor import parallelize
    from mpitrain.trainer.run import Callback
    from mpitrain.trainer.trainer import Trainer
    from mpitrain.trainer.user_loop.initialize import initialize

_HOMES = {  # module of each public name that does not come from mpitrain.comm
    "Callback": "mpitrain.trainer.run",
    "DistributedDataParallel": "mpitrain.shard.ddp",
    "InputError": "mpitrain.errors",
    "Mesh": "mpitrain.layout.mesh",
    "Pipeline": "mpitrain.pipe.pipeline",
    "Trainer": "mpitrain.trainer.trainer",
    "initialize": "mpitrain.trainer.user_loop.initialize",
    "load_model": "mpitrain.loading",
    "parallelize": "mpitrain.tensor",
}
__all__ = ["ANY_SOURCE", "Arena", "Callback", "Communicator", "DistributedDataParallel", "InputError", "Mesh"]
__all__ += ["Pipeline", "Trainer", "Work", "compression", "init", "initialize", "load_model"]
__all__ += ["__version__", "parallelize"]

if sys.argv[:1] == ["-m"]:  # python -m mpitrain.COMMAND, before that module is imported
    report_errors(missing_package)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "mpitrain.comm")), name)


def __dir__() -> list[str]:
    """Return the public names, for tab completion."""
    return list(__all__)
