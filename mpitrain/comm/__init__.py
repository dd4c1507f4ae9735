"""Communication: groups of ranks, every operation between them, and the memory they share.

The only room that imports mpi4py. From outside: `init`, `Communicator`, `Arena`, `Work`.
"""

from mpitrain.comm.arena import Arena
from mpitrain.comm.communicator import ANY_SOURCE, Communicator
from mpitrain.comm.work import Work
from mpitrain.comm.world import init, set_timeout

__all__ = ["ANY_SOURCE", "Arena", "Communicator", "Work", "init", "set_timeout"]
