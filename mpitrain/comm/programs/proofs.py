"""The debug mode: a program is proved right before it runs for the first time, whoever wrote it."""

from __future__ import annotations

from collections.abc import Hashable

from mpitrain.comm.programs.program import Program
from mpitrain.comm.programs.verify import verify

_MOST = 256  # chunks of all ranks together: a proof takes a millisecond for each


class Proofs:
    """The programs that a process has proved, each of which is proved once."""

    def __init__(self) -> None:
        self._proved: set[Hashable] = set()

    def require(self, program: Program) -> None:
        """Prove a program unless that was done before; one that is too large to be proved here is passed.

        Raises:
            ProgramError: The program is wrong.
        """
        shape = program.name, program.size, program.nodes, program.blocks, program.segments
        if shape in self._proved or program.size * program.chunks > _MOST:
            return
        verify(program)
        self._proved.add(shape)
