"""What the simulator predicts for each all_reduce algorithm, with speeds measured in the same run (`speeds.probes`).

The MPI library's own algorithm is predicted as the fastest of the textbook programs it is known to choose from
(Thakur, Rabenseifner & Gropp, IJHPCA 19, 2005), without the cost of Python.
"""

from __future__ import annotations

from dataclasses import replace

from mpitrain.comm import Communicator
from mpitrain.comm.algorithms.halving import doubling_all_reduce, halving_all_reduce
from mpitrain.comm.algorithms.ring import ring_all_reduce
from mpitrain.comm.programs.program import Program
from mpitrain.comm.programs.simulate import Machine, simulate
from mpitrain.comm.selection.registry import Setting
from mpitrain.comm.selection.tables import ALL_REDUCE, all_reduce_algorithm


def predicted(world: Communicator, size: int, machine: Machine) -> dict[str, float]:
    """Seconds of each algorithm for a vector of `size` bytes in an arena."""
    setting = Setting(size, size // 4, world.nodes, "arena")
    names = [name for name in ALL_REDUCE.names if name != ("two_level" if setting.one_node else "shared")]
    programs = {name: all_reduce_algorithm(name, setting).program for name in names}  # None: the library's own
    found = {name: _seconds(make(setting), size, machine) for name, make in programs.items() if make is not None}
    instant = replace(machine, step=0.0)
    ranks, nodes = world.size, world.nodes
    textbook = [doubling_all_reduce(ranks, nodes)]
    textbook += [halving_all_reduce(ranks, 1, nodes), ring_all_reduce(ranks, 1, nodes)]
    found["mpi"] = min(_seconds(program, size, instant) for program in textbook)
    return found


def _seconds(program: Program, size: int, machine: Machine) -> float:
    return simulate(program, [size / program.chunks] * program.chunks, machine)
