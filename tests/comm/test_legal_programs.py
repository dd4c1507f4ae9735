"""Random programs that are legal in MPI complete with the right results."""

from __future__ import annotations

import dataclasses

import pytest
from legal_programs import CommunicatorExecutor, generate, perform


def run_program(world, monkeypatch, spare: int, seed: int) -> None:
    monkeypatch.setattr(world, "process", dataclasses.replace(world.process, spare_cores=spare, debug=False))
    program = generate(seed, world.size)
    executor = CommunicatorExecutor(world, program.groups)
    try:
        perform(program, executor)
    except BaseException as error:
        error.add_note(f"in the program of seed {seed}, rank {world.rank}")
        raise
    executor.free()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("spare", [0, 1], ids=["no core", "a core"])
def test_programs_of_messages_and_collectives_in_several_groups_complete(world, monkeypatch, spare):
    for seed in range(5):
        run_program(world, monkeypatch, spare, seed)


@pytest.mark.campaign
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("spare", [0, 1], ids=["no core", "a core"])
def test_many_programs_of_messages_and_collectives_in_several_groups_complete(world, monkeypatch, spare):
    for seed in range(5, 60):
        run_program(world, monkeypatch, spare, seed)
