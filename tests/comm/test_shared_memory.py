"""Shared memory where it is scarce or forbidden, and vectors too long for a 32-bit count."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support import ROOT, job
from warm import shared

CHECKS = """
import torch
import mpitrain as mt

def check(world, x, expected, operation):
    assert torch.equal(x, expected), f"rank {world.rank}: {operation}"

def check_all_sums(world, arenas=()):
    \"\"\"All operations that may use shared memory, on small whole numbers, which every type here holds exactly.\"\"\"
    size, rank = world.size, world.rank
    small, large = (torch.float32, torch.bfloat16, torch.int64), (torch.float32,)
    for numel, dtypes in ((5, small), (3000, small), (700_001, large)):
        for dtype in dtypes:
            pattern = (torch.arange(numel) % 5).to(dtype)
            places = [arena.tensor.view(dtype)[:numel] for arena in arenas if arena.nbytes >= numel * dtype.itemsize]
            for x in (torch.empty(numel, dtype=dtype), *places):
                for algorithm in ("auto", "shared", "two_level", "ring"):
                    for reproducible in (False, True):
                        world.all_reduce(x.copy_(pattern + rank), algorithm=algorithm, reproducible=reproducible)
                        check(world, x, pattern * size + sum(range(size)), (numel, dtype, algorithm, reproducible))
                world.broadcast(x.copy_(pattern + rank), size - 1)
                check(world, x, pattern + size - 1, "broadcast")
                world.reduce(x.copy_(pattern + rank), 0)
                check(world, x, pattern * size + sum(range(size)) if rank == 0 else pattern + rank, "reduce")
                out = torch.empty(numel * size, dtype=dtype)
                world.all_gather(out, x.copy_(pattern + rank))
                check(world, out, torch.cat([pattern + r for r in range(size)]), "all_gather")
                world.reduce_scatter(x, out)
                check(world, x, (pattern + rank) * size, "reduce_scatter")
"""

SCARCE_MEMORY = """
import os, sys
import torch
import mpitrain as mt
from checks import check_all_sums

nbytes, count, left_free, late = map(int, sys.argv[1:])
world = mt.init()

def fill():
    if left_free and world.rank == 0:  # somebody else's file takes nearly all
        free = os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize
        with open("/dev/shm/filler", "wb") as file:
            file.write(bytes(free - left_free))
    world.barrier()

if not late:
    fill()
arenas = [world.arena(nbytes // 4) for _ in range(count)]
for arena in arenas:
    arena.tensor.fill_(float(world.rank))  # touches every page: a bus error where there is none
if late:
    fill()
check_all_sums(world, arenas)
if arenas[0].kind == "shared":
    try:
        world.all_reduce(arenas[0].tensor[: 50_000 + world.rank], algorithm="shared")
    except mt.errors.CommunicationError as error:
        assert "rank 1: all_reduce of 50001 float32" in str(error), error
    else:
        raise AssertionError("unequal lengths went through")
    world.all_reduce(arenas[0].tensor, algorithm="shared")
if world.rank == 0:
    print("kinds", *(arena.kind for arena in arenas))
"""


def run_two_ranks(folder: Path, script: str, *, timeout: float = 90):
    (folder / "checks.py").write_text(CHECKS)
    (folder / "main.py").write_text(script)
    command = shared().launched(2, [sys.executable, str(folder / "main.py")])
    return job(0, command, timeout=timeout, PYTHONPATH=str(ROOT / "tests"))


@pytest.fixture
def small_shared_memory() -> Callable[[str], list[str]]:
    """Return a function that gives the command prefix for a mount namespace with a /dev/shm of a given size."""

    def prefix(size: str) -> list[str]:
        return ["unshare", "-m", "bash", "-c", f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"', "bash"]

    try:
        is_possible = subprocess.run([*prefix("1m"), "true"], capture_output=True).returncode == 0
    except OSError:
        is_possible = False
    if not is_possible:
        pytest.skip("mounting a small /dev/shm needs root (and unshare)")
    return prefix


MIB = 1 << 20
# size of /dev/shm, bytes of an arena a rank, arenas, bytes that are left free (0: all) and whether afterwards,
# kinds
SMALL = {
    "too small for one": ("40m", 64 * MIB, 1, 0, False, ["private"]),
    "too small for a second": ("60m", 20 * MIB, 2, 0, False, ["shared", "private"]),
    "too small for anything": ("40m", 4096, 1, 1 * MIB, False, ["private"]),
    "too small for more than one": ("60m", 8 * MIB, 1, 1 * MIB, True, ["shared"]),
}


@pytest.fixture
def other_shared_memory(small_shared_memory) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Yield a function that runs SCARCE_MEMORY on two forked ranks, with a /dev/shm of a given size."""
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen([*small_shared_memory("1m"), "sh", "-c", "echo; exec cat"], **pipes) as inside:
        inside.stdout.readline()  # after that it is where it belongs
        enter = ["nsenter", f"--target={inside.pid}", "--mount"]

        def run(folder: Path, size: str, *arguments: object) -> subprocess.CompletedProcess[str]:
            subprocess.run([*enter, "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", "/dev/shm"], check=True)
            (folder / "checks.py").write_text(CHECKS)
            (folder / "main.py").write_text(SCARCE_MEMORY)
            command = [sys.executable, str(folder / "main.py"), *map(str, arguments)]
            return job(0, [*enter, *shared().launched(2, command)], cwd=folder)

        yield run


@pytest.mark.timeout(240)
@pytest.mark.skipif(shutil.which("nsenter") is None, reason="needs nsenter")
def test_a_small_dev_shm_falls_back_to_private_memory_with_one_warning(tmp_path, other_shared_memory):
    for number, (case, (size, nbytes, count, free, late, kinds)) in enumerate(SMALL.items()):
        (tmp_path / str(number)).mkdir()
        result = other_shared_memory(tmp_path / str(number), size, nbytes, count, free, int(late))
        assert_fallback(result, kinds, case)


def assert_fallback(result: subprocess.CompletedProcess[str], kinds: list[str], case: str) -> None:
    assert result.returncode == 0, (case, result.stderr)
    assert result.stdout.split() == ["kinds", *kinds], case
    assert result.stderr.count("UserWarning") == 1
    assert re.search(r"/dev/shm has \d+ MiB free, but the ranks of this node need \d+ MiB", result.stderr)
    assert "mount -o remount,size=50% /dev/shm" in result.stderr


def test_memory_without_pages_is_detected_without_a_bus_error(small_shared_memory):
    script = """
import mmap
import torch
from mpitrain.comm.memory.arena import _fill_with_zeros
with open("/dev/shm/sparse", "w+b") as file:
    file.truncate(256 << 20)
    memory = mmap.mmap(file.fileno(), 256 << 20)
address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
print(_fill_with_zeros(address, 1 << 20), _fill_with_zeros(address, 256 << 20))
"""
    result = job(0, [*small_shared_memory("64m"), sys.executable, "-c", script])
    assert result.stdout.split() == ["True", "False"], result.stderr


UNREACHABLE = """
import platform
import torch
import without_ptrace
import mpitrain as mt
from checks import check_all_sums

without_ptrace.forbid(without_ptrace.NUMBERS[platform.machine()])
world = mt.init()
check_all_sums(world, [world.arena(4_000_000)])
binder = world.binder
assert binder.neighbours() is None and binder.staging("a test") is not None
"""


def test_sums_are_correct_if_reading_other_processes_is_forbidden(tmp_path):
    result = run_two_ranks(tmp_path, UNREACHABLE)
    assert result.returncode == 0, result.stderr


LONG = """
import torch
import mpitrain as mt

world = mt.init()
numel = 2**31 + 12_345
period = torch.arange(251, dtype=torch.uint8) // 2  # values to 125; what follows counts modulo 256, as MPI does
block = 251 << 12  # elements that are written or compared at a time
x = torch.empty(numel, dtype=torch.uint8)
for part in x.split(block):
    part.copy_(period.repeat(1 << 12)[: len(part)])

def check(expected, operation):
    tile = expected.repeat(1 << 12)
    assert all(torch.equal(part, tile[: len(part)]) for part in x.split(block)), operation

# each operation starts from the result of the one before, to which rank 1 adds 1: no rank holds the result already
for algorithm in ("auto", "mpi", "ring"):
    world.all_reduce(x.add_(world.rank), algorithm=algorithm)
    period = period * 2 + 1
    check(period, f"all_reduce {algorithm}")
for algorithm in ("auto", "mpi", "tree"):
    world.broadcast(x.add_(world.rank), 1, algorithm)
    period = period + 1
    check(period, f"broadcast {algorithm}")
x.add_(world.rank)
if world.rank == 0:
    world.send(x, 1)
else:
    world.recv(x, 0)
    check(period, "recv")
"""


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_vectors_and_messages_of_more_than_2_to_the_31_elements(tmp_path):
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 12 << 30:
        pytest.skip("needs 12 GiB of free memory")
    result = run_two_ranks(tmp_path, LONG, timeout=500)
    assert result.returncode == 0, result.stderr


@pytest.mark.ranks(2, 3)
def test_bound_programs_live_as_long_as_their_tensor(world):
    bound = world.binder.cache.bound
    tensor = torch.ones(1 << 18)
    view = tensor[10:]
    for algorithm in ("auto", "ring", "mpi"):
        world.all_reduce(view.detach(), algorithm=algorithm)
    entries = len(bound)
    for _ in range(5):
        for algorithm in ("auto", "ring", "mpi"):
            x = torch.full((1 << 19,), 2.0)
            world.all_reduce(x, algorithm=algorithm)
            assert bool((x == 2 * world.size).all())
            out = torch.empty((1 << 19) // 8)
            world.reduce_scatter(out, torch.ones(out.numel() * world.size))
            assert bool((out == world.size).all())
    del x, out
    assert len(bound) == entries
    del tensor, view
    assert len(bound) == entries - 3
