import os
import subprocess
import sys
import textwrap

import pytest
import torch
from pseudo_terminal import ROOT

from mpitrain.comm.memory.device import memory_bytes as device_memory_bytes
from mpitrain.monitor.memory import memory_bytes, node_memory_bytes, out_of_memory_kills, peak_memory_bytes
from mpitrain.storage import proc

MIB = 2**20


def run(script: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [int(number) for number in done.stdout.split()]


def test_freed_memory_lowers_the_current_use_but_not_the_peak():
    before, peak, now = run("""
        from mpitrain.monitor.memory import memory_bytes, node_memory_bytes, out_of_memory_kills, peak_memory_bytes
        before = memory_bytes()
        block = bytearray(b"x" * 1) * (200 * 2**20)
        del block
        print(before, peak_memory_bytes(), memory_bytes())
    """)
    assert 2 * MIB < before < 150 * MIB
    assert 195 * MIB < peak - before < 260 * MIB
    assert now - before < 50 * MIB


def test_a_small_process_started_by_a_large_one_does_not_inherit_its_peak():
    (peak,) = run("""
        import os, sys
        block = bytearray(b"x") * (300 * 2**20)
        os.execv(sys.executable, [sys.executable, "-c",
            "from mpitrain.monitor.memory import peak_memory_bytes; print(peak_memory_bytes())"])
    """)
    assert peak < 150 * MIB


def test_without_proc_the_peak_comes_from_getrusage_in_bytes(monkeypatch, tmp_path):
    peak = peak_memory_bytes()
    monkeypatch.setattr(proc, "PROC", tmp_path)
    # the process that started this one may have been larger, never smaller by a unit's factor
    assert 0.8 * peak < peak_memory_bytes() < 100 * peak
    assert memory_bytes() == peak_memory_bytes()


def test_a_cpu_device_counts_host_memory():
    bytes_in_use = memory_bytes()  # first: reading it takes memory too
    assert peak_memory_bytes(torch.device("cpu")) >= bytes_in_use > 20 * MIB


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_counts_its_tensors():
    device = torch.device("cuda")
    before = device_memory_bytes(device)
    block = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    assert device_memory_bytes(device) - before == 64 * MIB
    del block
    assert device_memory_bytes(device) == before and peak_memory_bytes(device) >= before + 64 * MIB


GIB, NO_LIMIT = 1 << 30, str((1 << 63) - 4096)


@pytest.mark.parametrize(
    ("cgroup", "limits", "gib"),
    [
        ("", {}, 64),
        ("0::/job_1/step_0\n", {"memory.max": "max"}, 64),
        ("0::/job_1/step_0\n", {"job_1/memory.max": str(16 * GIB), "job_1/step_0/memory.max": "max"}, 16),
        ("0::/job_1/step_0\n", {"job_1/memory.max": str(16 * GIB), "job_1/step_0/memory.max": str(8 * GIB)}, 8),
        ("0::/\n", {"memory.max": str(4 * GIB)}, 4),  # a container with a view of its own
        ("0::/docker/12ab\n", {"memory.max": str(4 * GIB)}, 4),  # one without
        (
            "9:cpuset,memory:/slurm/job_1\n0::/\n",
            {
                "memory/slurm/memory.limit_in_bytes": str(32 * GIB),
                "memory/memory.limit_in_bytes": NO_LIMIT,
            },
            32,
        ),
        ("4:memory:/slurm/job_1\n", {"memory/slurm/job_1/memory.limit_in_bytes": NO_LIMIT}, 64),
    ],
)
def test_node_memory_respects_cgroup_limits(tmp_path, cgroup, limits, gib):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal:       {64 << 20} kB\nMemFree:  1 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, text in limits.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert node_memory_bytes(tmp_path) == gib * GIB
    assert 0 < node_memory_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("cgroup", "files", "kills"),
    [
        ("", {}, {"node": 3}),
        (
            "0::/job_1/step_0\n",
            {
                "job_1/memory.max": str(16 * GIB),
                "job_1/step_0/memory.max": str(16 * GIB),
                "job_1/memory.events": "low 0\noom 4\noom_kill 2\noom_group_kill 0",
                "job_1/step_0/memory.events": "oom_kill 1",
            },
            {"node": 3, "sys/fs/cgroup/job_1": 2},
        ),
        (
            "4:memory:/slurm/job_1\n",
            {
                "memory/slurm/memory.limit_in_bytes": str(16 * GIB),
                "memory/slurm/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0",
                "memory/slurm/job_1/memory.limit_in_bytes": str(32 * GIB),
                "memory/slurm/job_1/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1",
            },
            {"node": 3, "sys/fs/cgroup/memory/slurm": 0, "sys/fs/cgroup/memory/slurm/job_1": 1},
        ),
    ],
    ids=["no cgroup", "version 2", "version 1"],
)
def test_kills_because_memory_was_full_are_counted_where_the_limit_is(tmp_path, cgroup, files, kills):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/vmstat").write_text("pgfault 7\noom_kill 3\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert out_of_memory_kills(tmp_path) == kills
