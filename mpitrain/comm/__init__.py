"""Communication: groups of ranks, every operation between them, and the memory they share.

The only room that imports mpi4py. From outside: `init`, `Communicator`, `Arena`, `Mailbox`, `Work`, `compression`.
"""

import mpitrain.comm.process.start  # noqa: F401
from mpitrain.comm import compression
from mpitrain.comm.communicator import ANY_SOURCE, Communicator
from mpitrain.comm.mailbox import Letter, Mailbox
from mpitrain.comm.memory.arena import Arena
from mpitrain.comm.runtime.work import Work
from mpitrain.comm.world import carry_device_memory, init, set_timeout

__all__ = [
    "ANY_SOURCE",
    "Arena",
    "Communicator",
    "Letter",
    "Mailbox",
    "Work",
    "carry_device_memory",
    "compression",
    "init",
    "set_timeout",
]
