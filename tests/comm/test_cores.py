"""How many cores a rank has for itself, however the ranks are bound."""

from __future__ import annotations

import os
import sys

import pytest
from warm import job

from mpitrain.comm.process.cores import Share, share_of

BINDINGS = {  # cores of each rank, what each has: cores, ranks
    "alone on a machine": ([range(64)], [(64, 1)]),
    "not bound": ([range(4)] * 4, [(4, 4)] * 4),
    "fewer ranks than cores": ([range(9)] * 4, [(9, 4)] * 4),
    "more ranks than cores": ([range(2)] * 5, [(2, 5)] * 5),
    "the cores of a job, on a larger machine": ([range(40, 48)] * 8, [(8, 8)] * 8),
    "bound to a core each": ([[0], [5], [9]], [(1, 1)] * 3),
    "bound to several each": ([range(4), range(4, 8), range(8, 16)], [(4, 1), (4, 1), (8, 1)]),
    "bound to sockets": ([range(8), range(8, 16), range(8), range(8, 16)], [(8, 2)] * 4),
    "in a chain": ([[0, 1], [1, 2], [2, 3], [7]], [(4, 3)] * 3 + [(1, 1)]),
    "met only through one that comes later": ([[0], [3], [0, 3]], [(2, 3)] * 3),
}


@pytest.mark.parametrize("binding", BINDINGS)
def test_cores_that_several_ranks_may_use_are_shared_and_others_are_not(binding):
    allowed, shares = BINDINGS[binding]
    assert [share_of(rank, allowed) for rank in range(len(allowed))] == [Share(*share) for share in shares]


def test_threads_and_spare_cores_follow_from_the_share():
    assert [(Share(*s).each, Share(*s).spare) for s in [(8, 1), (9, 4), (8, 8), (2, 5)]] == [
        (8, 7), (2, 5), (1, 0), (1, -3),
    ]  # fmt: skip


SEEN = """
import os, sys
os.environ.pop("OMP_NUM_THREADS")
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
cores = [int(core) for core in sys.argv[1 + rank].split(",")]
os.sched_setaffinity(0, cores)
import torch
import mpitrain as mt
from mpitrain.trainer.device import set_threads
world = mt.init()
set_threads(world, reproducible=False)
print(torch.get_num_threads(), world.process.spare_cores, flush=True)
"""


@pytest.mark.skipif(os.cpu_count() < 2, reason="needs two cores")
@pytest.mark.parametrize(
    ("cores", "seen"),
    [
        (("0", "0"), {"1 -1"}),  # the job has one of the machine's cores: nobody has it alone
        (("0", "1"), {"1 0"}),
        (("0,1",), {"2 1"}),
    ],
)
def test_ranks_see_how_they_are_bound(forked, cores, seen):
    alone = len(cores) == 1
    done = forked.run("-c", SEEN, *cores) if alone else job(len(cores), [sys.executable, "-c", SEEN, *cores])
    assert done.returncode == 0 and set(done.stdout.splitlines()) == seen, done.stdout + done.stderr
