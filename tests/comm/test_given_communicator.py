"""A world built from the caller's mpi4py communicator, such as half of a job or one part of a coupled code."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support import ROOT
from warm import job

TRAIN = """
import torch
from torch import nn
import mpitrain as mt

torch.manual_seed(0)
rows = torch.randn(8, 4)
model = mt.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
local_rows = rows[world.rank :: world.size] * scale
for _ in range(3):
    optimizer.zero_grad()
    model(local_rows).square().mean().backward()
    optimizer.step()
torch.manual_seed(0)
torch.randn(8, 4)
reference = nn.Linear(4, 1)
reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
for _ in range(3):
    reference_optimizer.zero_grad()
    reference(rows * scale).square().mean().backward()
    reference_optimizer.step()
for actual, expected in zip(model.module.parameters(), reference.parameters()):
    torch.testing.assert_close(actual, expected)
"""


def run(tmp_path: Path, ranks: int, program: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "coupled.py"
    script.write_text(textwrap.dedent(program))
    return job(ranks, [sys.executable, str(script)], cwd=tmp_path, PYTHONPATH=str(ROOT))


def test_two_halves_of_a_job_train_separately_with_one_world_each(tmp_path):
    program = """
        import numpy as np
        from mpi4py import MPI
        import mpitrain as mt
        from mpitrain.errors import InputError

        mpi_world = MPI.COMM_WORLD
        half = mpi_world.Split(mpi_world.rank // 2)
        world = mt.init(comm=half)
        half.Free()  # the world has a duplicate of it
        assert (world.rank, world.size) == (mpi_world.rank % 2, 2)
        same = mpi_world.Split(mpi_world.rank // 2)
        assert mt.init() is world and mt.init(comm=same) is world
        for other in (mpi_world, MPI.COMM_SELF):
            try:
                mt.init(comm=other)
            except InputError as error:
                assert "already exists with 2 ranks" in str(error) and "\\n" not in str(error)
            else:
                raise AssertionError("a second world was made")
        scale = 1.0 + mpi_world.rank // 2
        if mpi_world.rank < 2:
            for _ in range(50):  # a step more or less makes no difference to the other half
                world.barrier()
    """
    end = """
        total = np.array([1.0])
        mpi_world.Allreduce(MPI.IN_PLACE, total)  # the halves can still communicate
        assert total[0] == 4
        print("done", flush=True)
    """
    result = run(tmp_path, 4, textwrap.dedent(program) + TRAIN + textwrap.dedent(end))
    assert result.returncode == 0 and result.stdout.count("done") == 4, result.stdout + result.stderr


def test_one_rank_trains_while_a_coupled_code_owns_mpi(tmp_path):
    program = """
        import atexit
        import mpi4py
        mpi4py.rc.initialize = False
        from mpi4py import MPI
        MPI.Init_thread(MPI.THREAD_MULTIPLE)  # the coupled code does, and finalizes

        def last():  # registered first, so that it comes after all that mpitrain does at the end
            assert MPI.Is_initialized() and not MPI.Is_finalized()
            MPI.Finalize()
            print("done", flush=True)

        atexit.register(last)
        mpi_world = MPI.COMM_WORLD
        alone = mpi_world.Split(0 if mpi_world.rank == 0 else MPI.UNDEFINED)
        if mpi_world.rank == 0:
            import mpitrain as mt
            world = mt.init(comm=alone)
            assert world.size == 1
            scale = 1.0
    """
    program = textwrap.dedent(program) + textwrap.indent(TRAIN, "    ") + "\nmpi_world.Barrier()\n"
    result = run(tmp_path, 2, program)
    assert result.returncode == 0 and result.stdout.count("done") == 2, result.stdout + result.stderr


def test_an_error_in_one_part_ends_the_whole_job_with_one_line(tmp_path):
    program = """
        import time
        from mpi4py import MPI
        part = MPI.COMM_WORLD.Split(min(MPI.COMM_WORLD.rank, 1))
        if MPI.COMM_WORLD.rank == 0:
            time.sleep(100)
        import mpitrain as mt
        mt.init(comm=part)
        raise mt.InputError("the part has no data; give it some", agreed=True)
    """
    result = run(tmp_path, 3, program)
    # MPICH ends ranks with code 9
    assert result.returncode in (2, 9) and "Traceback" not in result.stderr, result.stderr
    assert (
        result.stderr.count("\nmpitrain: the part has no data; give it some") + result.stderr.startswith("mpitrain")
        == 1
    )


@pytest.mark.ranks(1)
@pytest.mark.parametrize("wrong", ["world", "COMM_NULL"])
def test_init_refuses_a_communicator_without_this_rank(world, wrong):
    import mpi4py.MPI

    import mpitrain as mt
    from mpitrain.errors import InputError

    with pytest.raises(InputError, match="needs an mpi4py intracommunicator that contains this rank"):
        mt.init(comm=wrong if wrong == "world" else mpi4py.MPI.COMM_NULL)
