"""Explanations of full memory: errors that count, savings by the planner's formulas, and kills found from the run."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mpitrain.config.settings import Config
from mpitrain.parallel.layouts import layout_of
from mpitrain.planner.machine import MachineProfile
from mpitrain.planner.out_of_memory import ADVICE, MemoryAdvice, explain_killed, failed_allocation
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.profile import profile_of
from mpitrain.planner.subject import description_of
from mpitrain.storage.disk import ENLARGE
from mpitrain.storage.text import bytes_text

MIB = 1 << 20
FULL = f"an allocation failed because /dev/shm is full ({ENLARGE})"


def error_of(act) -> BaseException:
    with pytest.raises(BaseException) as caught:
        act()
    return caught.value


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (error_of(lambda: torch.empty(1 << 44, dtype=torch.uint8)), "the allocation of 16 TiB failed"),
        (error_of(lambda: np.empty(1 << 44)), "the allocation of 128. TiB failed"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. "),
            "the allocation of 2.00 GiB failed",
        ),
        (MemoryError("std::bad_alloc"), "an allocation failed"),
        (RuntimeError("std::bad_alloc"), "an allocation failed"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "an allocation failed"),
        (OSError(errno.ENOSPC, "No space left on device", "/dev/shm/torch_1"), FULL),
        (RuntimeError("unable to allocate shared memory(shm) for file </t>: No space left on device (28)"), FULL),
        (OSError(errno.ENOSPC, "No space left on device", "runs/a/metrics.jsonl"), ""),
        (error_of(lambda: torch.zeros(2) @ torch.zeros(3)), ""),
    ],
)
def test_failed_allocations_are_recognized_with_the_bytes_requested(error, text):
    assert failed_allocation(error) == text


@pytest.fixture(scope="module")
def config() -> Config:
    model = ["--model.layers", "4", "--model.width", "128", "--model.heads", "4", "--model.sequence", "128"]
    return Config.from_args([*model, "--train.batch", "32"])


def test_settings_save_what_the_formulas_say_and_the_mildest_that_fits_is_named(config):
    description = description_of(config)
    machine = MachineProfile("here", "assumed", 1, 800 * MIB)
    predictor = Predictor(profile_of(config, description, machine, measure=False), machine, 1, 2)
    layout = layout_of(config, 2)

    def nbytes(**change) -> float:
        return sum(predictor.memory(replace(layout, **change)).values())

    changes = {"train.recompute true": {"recompute": True}, "parallel.zero 3": {"zero": 3}}
    changes |= {f"train.microbatch {n}": {"microbatch": n} for n in range(1, 16)}
    changes |= {"parallel.tensor 2": {"tensor": 2, "data": 1, "zero": 0}}
    changes |= {"parallel.pipeline 2": {"pipeline": 2, "data": 1, "zero": 0}}
    for room in (nbytes(microbatch=8) * 2.01 / 0.9, 2000 * MIB, 100 * MIB):
        advice = MemoryAdvice(config, description, 1, 2, int(room))
        assert sum(advice.memory.values()) == nbytes()
        settings = [
            each.split(" would save ") for each in advice.text().removesuffix(" per rank, by formula").split(", ")
        ]
        assert len(settings) == 3
        for setting, saved in settings:
            assert saved == bytes_text(nbytes() - nbytes(**changes[setting]))
        (microbatch,) = [int(setting.split()[1]) for setting, _ in settings if "microbatch" in setting]
        fitting = [n for n in (8, 6, 5, 4, 2, 1) if nbytes(microbatch=n) <= 0.9 * min(room / 2, nbytes())]
        assert microbatch == (fitting[0] if fitting else 1)


def make_run(folder: Path, config: Config, *more: dict) -> Path:
    start = {"time": 1000.0, "event": "start", "step": 0, "ranks": 2, "nodes": 1, "hosts": ["a", "b"], "device": "CPU"}
    start |= {"oom_kills": {"a": {"node": 5}, "b": {"node": 1, "sys/fs/cgroup/job": 0}}, "config": config.model_dump()}
    lines = "".join(json.dumps(line, default=str) + "\n" for line in (start, *more))
    (folder / "events.jsonl").write_text(lines)
    (folder / "ranks").mkdir(exist_ok=True)
    for rank, host in enumerate("abb"):
        header = {"start": 1000.5, "rank": rank, "world_size": 3, "role": "worker", "host": host, "coordinates": [rank]}
        header |= {"expected_memory": {}, "expected_bytes": {}, "step": 0}
        memory = {"parameters": 3 * MIB, "activations": rank * 50 * MIB, "other": MIB, "host": (4 + rank * 50) * MIB}
        line = {"step": 1, "steps": 1, "time": 1001.0, "seconds": {}, "sent": [], "memory": memory}
        path = folder / "ranks" / f"rank-{rank:05d}.jsonl"
        path.write_text(json.dumps(header) + "\n" + json.dumps(line) + "\n")
    return folder


def test_a_kill_because_memory_was_full_is_distinguished_from_a_crash(tmp_path, config):
    run = make_run(tmp_path, config)
    before = {"a": {"node": 5}, "b": {"node": 1, "sys/fs/cgroup/job": 0}}
    assert explain_killed(run, before) == ""  # the counters are as they were: a crash
    assert explain_killed(run, {"c": {"node": 9}}) == ""  # on another host
    assert explain_killed(run, {"b": {"node": 0, "sys/fs/cgroup/new": 3}}) == ""  # counters that began anew
    line = explain_killed(run, {"a": {"node": 5}, "b": {"node": 2, "sys/fs/cgroup/job": 1}})
    assert line.startswith(
        "host b is out of memory: the kernel killed a process of this job's cgroup, most likely rank 2, which had "
        "parameters 3 MiB, activations 100 MiB, other 1 MiB; the limit is "
    )
    assert "train.microbatch" in line and line.endswith("per rank, by formula")
    assert "of that host during this run" in explain_killed(run, {"b": {"node": 2}})
    with (run / "ranks/rank-00001.jsonl").open("a") as file:  # what was rank 2 goes on as rank 1
        file.write(json.dumps({"start": 1002.0, "rank": 1, "world_size": 2, "host": "b"}) + "\n")
    line = explain_killed(run, {"b": {"node": 2}}, [1])
    assert "most likely rank 1, which had parameters 3 MiB, activations 50 MiB, other 1 MiB; " in line
    lost = {"time": 1002.0, "event": "lost", "step": 1, "ranks": [2], "oom_kills": {"b": {"node": 2}}}
    make_run(tmp_path, config, lost)
    assert explain_killed(run, {"b": {"node": 2}}) == ""  # it was reported with the loss of the rank
    make_run(tmp_path, config, {"time": 1002.0, "event": "end", "step": 1, "outcome": "failed"})
    assert explain_killed(run, {"b": {"node": 9}}) == ""


def test_configurations_beyond_the_planner_get_general_advice(tmp_path, config):
    served = Config.from_args(["--parallel.mode", "local"])
    line = explain_killed(make_run(tmp_path, served), {"a": {"node": 6}})
    assert "most likely rank 0, which had parameters 3 MiB" in line and line.endswith(ADVICE)
