"""A script written for torchrun, unchanged, as a job of several nodes of a real Slurm cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from support import environment_with

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
if "--fail" in sys.argv and rank == 3:
    raise ValueError("this rank is unwell")
x = torch.arange(40.0).view(10, 4) / 40 + torch.arange(size).view(size, 1, 1)
y = x.sum(-1, keepdim=True)

def trained(model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])

torch.manual_seed(1)
alone = torch.nn.Linear(4, 1)
together = torch.nn.Linear(4, 1)
together.load_state_dict(alone.state_dict())
wanted = trained(alone, x.flatten(0, 1), y.flatten(0, 1))
torch.testing.assert_close(trained(DistributedDataParallel(together), x[rank], y[rank]), wanted)
print(f"rank {rank} of {size}, number {os.environ['LOCAL_RANK']} on node {os.environ['GROUP_RANK']}: right\\n", end="")
dist.destroy_process_group()
"""
# as the README shows it
JOB = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --cpus-per-task=1
source {venv}/bin/activate
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
{launch} python -m mpitrain.backend train.py "$@"
"""
LAUNCH = {"mpich": "srun --mpi=pmi2 --kill-on-bad-exit=1", "openmpi": "mpirun -n $SLURM_NTASKS"}


@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.full)])
def test_a_torchrun_script_trains_on_two_nodes_and_a_failing_rank_ends_the_job(
    slurm: SlurmCluster, tmp_path: Path, mpi: str
):
    (tmp_path / "train.py").write_text(SCRIPT)
    venv = environment_with(mpi) if mpi == "mpich" else slurm.environment()["VENV"]
    (tmp_path / "job").write_text(JOB.format(venv=venv, launch=LAUNCH[mpi]))
    state, out = run(slurm, tmp_path)
    assert state == "COMPLETED", out
    lines = sorted(line for line in out.splitlines() if line.endswith(": right"))
    assert lines == [f"rank {r} of 4, number {r % 2} on node {r // 2}: right" for r in range(4)], out
    state, out = run(slurm, tmp_path, "--fail")
    assert state == "FAILED", out
    assert "rank 3: ValueError: this rank is unwell" in out


def run(slurm: SlurmCluster, folder: Path, *arguments: str) -> tuple[str, str]:
    """Run a job, and return its final state and its output."""
    as_root = "ALL,OMPI_ALLOW_RUN_AS_ROOT=1,OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    number = slurm.submit(f"--output={folder}/out", f"--export={as_root}", folder / "job", *arguments, cwd=folder)
    job = slurm.wait_for(number, lambda job: job.get("JobState") in ("COMPLETED", "FAILED", "TIMEOUT"), 150)
    return job["JobState"], (folder / "out").read_text(errors="replace")
