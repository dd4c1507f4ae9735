"""Communication: groups of ranks, every operation between them, and the memory they share.

The only room that imports mpi4py. From outside: `init`, `Communicator`, `Arena`, `Work`, `compression`.
"""

# ruff: noqa: E402  MPI reads its settings once, when it is imported: they come first

import os

from mpitrain.comm import single_copy

single_copy.prepare()
# Open MPI's UCX component complains at every shared window it could not serve anyway; a setting of the user's wins.
os.environ.setdefault("OMPI_MCA_osc", "^ucx")
# With fault tolerance: coll/han waits in communicators of its own, which are not revoked with the one they serve.
if "OMPI_MCA_mpi_ft_enable" in os.environ:
    os.environ.setdefault("OMPI_MCA_coll", "^han")

import mpitrain.comm.presence  # noqa: F401  (MPI is started here, or that there is none is said)

# isort: split
from mpitrain.comm import compression
from mpitrain.comm.arena import Arena
from mpitrain.comm.communicator import ANY_SOURCE, Communicator
from mpitrain.comm.work import Work
from mpitrain.comm.world import init, set_timeout

__all__ = ["ANY_SOURCE", "Arena", "Communicator", "Work", "compression", "init", "set_timeout"]
