"""parallel.mode server as a user runs it: errors, kills, and the simulated accelerator."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import PATIENCE, clean_environment, one_line, train_command
from test_bulk_synchronous import assert_equal_metrics, settings
from torch.nn.attention import SDPBackend, sdpa_kernel
from train.jobs import run
from warm import job, shared

import mpitrain as mt
from mpitrain.checkpoint.manifest import read_manifest
from mpitrain.errors import InputError
from mpitrain.monitor import read_metrics

SERVER = {"mode": "server"}
REFUSED = [
    ({"parallel": SERVER | {"servers": 2}}, "parallel.servers 2 leaves no worker among 2 ranks; set it to at most 1"),
    ({"parallel": {"staleness": 1}}, "parallel.staleness 1 needs parallel.mode server, but the mode is sync"),
    ({"parallel": {"staleness": "none"}}, "parallel.staleness none needs parallel.mode server"),
    ({"parallel": {"servers": 1}}, "parallel.servers 1 needs parallel.mode server"),
    ({"parallel": SERVER | {"staleness": -1}}, "parallel.staleness"),
    ({"parallel": SERVER | {"local_steps": 4}}, "parallel.local_steps 4 needs parallel.mode local"),
    ({"parallel": SERVER | {"pipeline": 2}}, "parallel.pipeline 2 cannot be combined with parallel.mode server"),
    ({"parallel": SERVER | {"tensor": 2}}, "parallel.tensor 2 cannot be combined with"),
    ({"parallel": SERVER | {"zero": 1}}, "parallel.zero 1 cannot be combined with"),
    ({"parallel": SERVER | {"offload": "host"}}, "parallel.offload host cannot be combined with"),
    ({"parallel": SERVER, "comm": {"compression": "topk"}}, "comm.compression topk cannot be combined with"),
    ({"parallel": SERVER, "run": {"reproducible": True}}, "run.reproducible true cannot be combined with"),
    ({"parallel": SERVER, "model": {"compile": True}}, "model.compile true cannot be combined with"),
    ({"parallel": SERVER, "train": {"precision": "fp16"}}, "use bf16 or fp32"),
    ({"parallel": SERVER, "train": {"batch": 1}}, "train.batch 1 has fewer samples than there are workers"),
]


@pytest.mark.ranks(2)
def test_settings_incompatible_with_servers_are_refused_on_all_ranks(world, folder):
    for sections, words in REFUSED:
        with pytest.raises(InputError, match=re.escape(words)) as refused:
            mt.Trainer(sections | {"run": {"dir": str(folder / "r")} | sections.get("run", {})}, world=world)
        assert refused.value.agreed and "\n" not in str(refused.value)
    assert not (folder / "r").exists()


def test_too_many_servers_give_one_line_and_exit_code_2(tmp_path, forked):
    options = ("--parallel.mode", "server", "--parallel.servers", 1, "--run.dir", tmp_path / "r")
    one_line(forked.run("train", *options, cwd=tmp_path), "parallel.servers 1 leaves no worker among 1 ranks")
    one_line(forked.run("train", "--parallel.staleness", 2, "--run.dir", tmp_path / "r", cwd=tmp_path), "mode server")


@pytest.mark.campaign
@pytest.mark.parametrize("servers", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_killed_run_resumes_bitwise_equal(tmp_path, servers):
    arguments = (
        "--data.path", "digits", "--model.name", "mlp", "--model.width", 64, "--train.steps", 150, "--train.batch", 64,
        "--optim.lr", 0.01, "--checkpoint.every", 10, "--data.record_ids", "true", "--parallel.mode", "server",
        "--parallel.servers", servers,
    )  # fmt: skip
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert job(3, train_command("--run.dir", whole, *arguments)).returncode == 0
    command = shared().launched(3, train_command("--run.dir", killed, *arguments))
    process = subprocess.Popen(command, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60 * PATIENCE
        while not (killed / "checkpoints/step-00000020/manifest.json").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        for rank in range(3):  # the whole job
            started = (killed / f"logs/rank-{rank:05d}.log").read_text().splitlines()[0]
            os.kill(int(started.rpartition("process ")[2]), signal.SIGKILL)
        assert process.wait(30) != 0
    finally:
        process.kill()
    resumed = job(3, train_command("--run.dir", killed, *arguments))
    assert resumed.returncode == 0 and "resumed from" in resumed.stdout, resumed.stderr
    keys = ("step", "loss", "lr", "grad_norm", "ids", "held_out_loss")
    lines, reference = ([[m.get(k) for k in keys] for m in read_metrics(folder)] for folder in (killed, whole))
    assert lines == reference and len(lines) == 150
    mine, theirs = (read_manifest(folder / "checkpoints/step-00000150") for folder in (killed, whole))
    assert [extent.hashes for extent in mine.extents] == [extent.hashes for extent in theirs.extents] != []


@pytest.mark.campaign
@pytest.mark.parametrize("device", ["pretend"], indirect=True)
@pytest.mark.ranks(2)
def test_losses_on_a_device_equal_those_on_the_cpu(world, place: Path, text, device):
    with sdpa_kernel(SDPBackend.MATH):
        for servers, staleness in ((0, 0), (1, 0), (0, 2)):
            sections = settings(text, servers=servers, model={"dropout": 0.0}, parallel={"staleness": staleness})
            places = {kind: place / f"{kind}-{servers}-{staleness}" for kind in ("cpu", device.type)}
            cpu, on_device = (
                run(world, folder, **sections | {"run": {"dir": str(folder), "device": kind}})
                for kind, folder in places.items()
            )
            if staleness:
                assert on_device[-1]["loss"] == pytest.approx(cpu[-1]["loss"], rel=0.05)
            else:
                assert_equal_metrics(on_device, cpu)
