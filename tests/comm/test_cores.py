"""Cores that a rank has to itself under every binding of ranks."""

from __future__ import annotations

import os
import sys

import pytest
from warm import job

from mpitrain.comm.job.topology import Share, processor_name, share_of, siblings

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
    "linked only by a later rank": ([[0], [3], [0, 3]], [(2, 3)] * 3),
}


@pytest.mark.parametrize("binding", BINDINGS)
def test_cores_are_shared_by_the_ranks_that_may_use_them(binding):
    allowed, shares = BINDINGS[binding]
    actual = [share_of(rank, allowed, {}) for rank in range(len(allowed))]
    assert [(share.cores, share.ranks) for share in actual] == shares


def machine(folder, cores, per_core):
    """Write Linux's topology files of a machine whose hardware thread t belongs to core t modulo `cores`."""
    for thread in range(cores * per_core):
        place = folder / f"sys/devices/system/cpu/cpu{thread}/topology"
        place.mkdir(parents=True)
        hardware_threads = range(thread % cores, cores * per_core, cores)
        (place / "thread_siblings_list").write_text(",".join(map(str, hardware_threads)) + "\n")
    return folder


@pytest.mark.parametrize(
    ("allowed", "expected"),  # hardware threads of each rank; computing threads and spare cores of each
    [
        ([[0, 4], [1, 5], [2, 6], [3, 7]], (1, 0)),  # bound to a core each, as by mpirun --bind-to core
        ([range(8)] * 4, (1, 0)),
        ([range(8)] * 2, (2, 2)),
        ([[0], [4]], (1, 0)),  # two ranks on the two threads of one core
        ([range(8)] * 8, (1, 0)),
        ([range(8)] * 9, (1, -1)),
    ],
)
def test_hardware_threads_of_a_core_count_as_one_core(tmp_path, allowed, expected):
    core_of = siblings(machine(tmp_path, cores=4, per_core=2))
    assert core_of[5] == core_of[1] == 1 and siblings(tmp_path / "nothing") == {}
    for rank in range(len(allowed)):
        share = share_of(rank, allowed, core_of)
        assert (share.per_rank, share.spare) == expected


def test_the_processor_name_is_read_on_every_architecture(tmp_path):
    processors = {
        "processor: 0|vendor_id: AuthenticAMD|model: 49|model name: AMD EPYC 7742": "AMD EPYC 7742",
        "CPU implementer: 0x41|CPU variant: 0x1|CPU part: 0xd40": "implementer 0x41 part 0xd40 variant 0x1",
        "CPU implementer: 0x46|CPU part: 0x001|CPU revision: 0": "implementer 0x46 part 0x001 revision 0",
        "processor: 0|cpu: POWER9, altivec supported||machine: PowerNV 8335": "POWER9, altivec supported PowerNV 8335",
        "hart: 0|isa: rv64imafdc|uarch: sifive,u74-mc": "sifive,u74-mc rv64imafdc",
    }
    for number, (text, expected) in enumerate(processors.items()):
        (tmp_path / f"{number}/proc").mkdir(parents=True)
        (tmp_path / f"{number}/proc/cpuinfo").write_text(text.replace(":", "\t:").replace("|", "\n") + "\n")
        assert processor_name(tmp_path / str(number)) == expected
    assert processor_name(tmp_path) == "" and processor_name()


def test_threads_and_spare_cores_follow_from_the_share():
    assert [(Share(*s).per_rank, Share(*s).spare) for s in [(8, 1), (9, 4), (8, 8), (2, 5)]] == [
        (8, 7), (2, 5), (1, 0), (1, -3),
    ]  # fmt: skip


PROGRAM = """
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
    ("cores", "expected"),
    [
        (("0", "0"), {"1 -1"}),  # both ranks share the one core of the job
        (("0", "1"), {"1 0"}),
        (("0,1",), {"2 1"}),
    ],
)
def test_ranks_use_the_cores_they_are_bound_to(forked, cores, expected):
    alone = len(cores) == 1
    result = forked.run("-c", PROGRAM, *cores) if alone else job(len(cores), [sys.executable, "-c", PROGRAM, *cores])
    assert result.returncode == 0 and set(result.stdout.splitlines()) == expected, result.stdout + result.stderr
