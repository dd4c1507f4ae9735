"""The main job on an accelerator: the losses of the CPU, and one clear error where a device is missing or full."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from support import job, one_line, train_command
from torch.nn.attention import SDPBackend, sdpa_kernel
from train.jobs import run

from mpitrain.checkpoint.manifest import read_manifest
from mpitrain.comm.memory import device as devices
from mpitrain.errors import InputError
from mpitrain.trainer import device as placement
from mpitrain.trainer.engine import LossScale

STEPS, BATCH, CLIP = 8, 8, 0.3
GPT = {"layers": 2, "width": 32, "heads": 4, "sequence": 16}
ON_DEVICE = pytest.mark.parametrize("device", ["pretend"], indirect=True)

CASES = {
    "ddp": {"train": {"microbatch": 2}},
    "zero 1, recompute": {"parallel": {"zero": 1}, "train": {"recompute": True}},
    "zero 2": {"parallel": {"zero": 2}},
    "zero 3": {"parallel": {"zero": 3}},
    "reproducible": {"run": {"reproducible": True, "workers": 4}},
    "pipeline": {"parallel": {"pipeline": 2}},
    "tensor": {"parallel": {"tensor": 2}},
}


@pytest.fixture(scope="module")
def place(world, tmp_path_factory):
    return Path(world.broadcast_object(str(tmp_path_factory.mktemp("device"))))


def train(comm, folder, kind, text, /, **sections):
    settings = {"data": {"path": text}, "model": GPT, "checkpoint": {"every": 0}}
    settings["train"] = {"steps": STEPS, "batch": BATCH, "clip": CLIP, "evaluate_samples": 10} | sections.pop(
        "train", {}
    )
    settings["run"] = {"dir": str(folder), "device": kind} | sections.pop("run", {})
    with sdpa_kernel(SDPBackend.MATH):
        return run(comm, folder, **settings, **sections)


@pytest.fixture(scope="module")
def cpu_metrics(world, place, text):
    """Losses and norms of a run on the CPU, with which all cases are compared; only rounding differs."""
    return train(world, place / "cpu", "cpu", text)


@ON_DEVICE
@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_device_has_the_losses_of_the_cpu(world, place, text, cpu_metrics, device, case):
    assert_close_metrics(train(world, place / case, device.type, text, **CASES[case]), cpu_metrics)


@pytest.mark.simulated
@ON_DEVICE
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "parallel",
    [
        {"zero": 3},
        {"pipeline": 2, "tensor": 2},
        *(
            pytest.param(parallel, marks=pytest.mark.campaign)
            for parallel in ({"zero": 0}, {"zero": 1}, {"zero": 2}, {"pipeline": 2}, {"tensor": 2})
        ),
    ],
    ids=str,
)
def test_shared_devices_have_the_losses_of_the_cpu(world, place, text, cpu_metrics, device, parallel):
    assert placement.choose_device("auto", world)[1] == "1 x Pretend 0, 1 x Pretend 1 (2 ranks share each)"
    assert_close_metrics(train(world, place / str(parallel), device.type, text, parallel=parallel), cpu_metrics)


def assert_close_metrics(lines, cpu_metrics):
    assert [m["loss"] for m in lines] == pytest.approx([m["loss"] for m in cpu_metrics], rel=2e-6)
    assert [m["grad_norm"] for m in lines] == pytest.approx([m["grad_norm"] for m in cpu_metrics], rel=2e-5)
    assert lines[-1]["held_out_loss"] == pytest.approx(cpu_metrics[-1]["held_out_loss"], rel=2e-6)


@ON_DEVICE
@pytest.mark.ranks(2)
def test_device_skips_steps_with_overflowing_gradients(world, place, text, device, monkeypatch):
    """Train in fp16 with a loss scale that is too large at first: the device skips those steps by itself."""
    monkeypatch.setattr(LossScale, "of", staticmethod(lambda precision: LossScale(2.0**22, dynamic=True)))
    half = {"train": {"precision": "fp16", "steps": 10}}
    reference = train(world, place / "half cpu", "cpu", text, **half)
    lines = train(world, place / "half device", device.type, text, **half)
    assert 2 < sum(bool(m.get("skipped")) for m in lines) < 8
    assert [m.get("skipped") for m in lines] == [m.get("skipped") for m in reference]
    assert [m["loss"] for m in lines] == pytest.approx([m["loss"] for m in reference], rel=1e-4)


@pytest.mark.simulated
@ON_DEVICE
@pytest.mark.ranks(2)
def test_missing_device_error_names_the_host(world, device, monkeypatch):
    if world.rank == 1:
        monkeypatch.setattr(devices, "accelerator", lambda: "")
    with pytest.raises(
        InputError, match=r"rank 1: run.device on host \S+: there is no device of kind 'pretend'"
    ) as no_such:
        placement.choose_device("pretend", world)
    with pytest.raises(InputError, match=r"auto found cpu on host \S+, pretend on host \S+; set run.device") as mixed:
        placement.choose_device("auto", world)
    assert no_such.value.agreed and mixed.value.agreed


@ON_DEVICE
@pytest.mark.ranks(2)
def test_batch_may_be_changed_right_after_to_device(world, device):
    for x in (torch.ones(1000).pin_memory(), torch.ones(1000)):
        (there,) = placement.to_device((x,), device)
        x.fill_(7.0)
        assert there.device == device and there.cpu().eq(1).all()


@pytest.mark.simulated
@ON_DEVICE
@pytest.mark.ranks(2)
def test_banner_shows_the_devices(world, device):
    assert placement.choose_device("auto", world)[1] == "1 x Pretend 0, 1 x Pretend 1"
    assert placement.choose_device("cpu", world)[1] == "CPU"


@pytest.mark.simulated
@ON_DEVICE
def test_out_of_memory_error_names_settings_to_change(device, sentence, tmp_path):
    command = train_command("--run.dir", tmp_path / "run", "--data.path", sentence, "--run.device", device.type)
    done = job(2, [*command, "--model.layers", "4", "--train.steps", "3"], device="pretend", PRETEND_MEMORY_MIB="2")
    one_line(done, "rank", "(Pretend ", "is out of memory", "train.microbatch", code=1, alone=False)


MORTAL = """
import os, signal, sys
import mpitrain as mt

class Mortal(mt.Callback):
    def on_step_end(self, trainer, step):
        if step.number == 5 and trainer.world.rank == 1 and os.environ.get("DIES"):
            os.kill(os.getpid(), signal.SIGKILL)

sys.exit(mt.Trainer(sys.argv[1], callbacks=[Mortal()]).fit())
"""


@pytest.mark.campaign
@ON_DEVICE
@pytest.mark.parametrize(
    "parallel",
    [
        "zero = 3",
        'zero = 2\noffload = "host"',
        *(pytest.param(parallel, marks=pytest.mark.full) for parallel in ("zero = 1", "pipeline = 2")),
    ],
)
def test_killed_run_on_a_device_resumes_with_the_same_bits(device, sentence, tmp_path, parallel):
    def train(name: str, code: int | None = 0, **environment: str) -> list[tuple[int, float, float]]:
        config = tmp_path / f"{name}.toml"
        config.write_text(
            f'[run]\ndir = "{tmp_path / name}"\ndevice = "{device.type}"\n[data]\npath = "{sentence}"\n'
            "[model]\nlayers = 2\nwidth = 32\nheads = 4\nsequence = 16\n"
            "[train]\nsteps = 8\nbatch = 8\nrecompute = true\n[checkpoint]\nevery = 2\n[parallel]\n" + parallel + "\n"
        )
        done = job(2, [sys.executable, "-c", MORTAL, str(config)], device=device.type, **environment)
        assert done.returncode == code if code is not None else done.returncode != 0, done.stderr
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return [(m["step"], m["loss"], m["grad_norm"]) for m in lines]

    reference = train("whole")
    train("killed", None, DIES="yes")
    assert not (tmp_path / "killed/checkpoints/step-00000006").exists()
    metrics = train("killed")
    assert dict.fromkeys(metrics) == dict.fromkeys(reference) and len(reference) == 8
    whole, again = (read_manifest(tmp_path / name / "checkpoints/step-00000008") for name in ("whole", "killed"))
    assert [extent.hashes for extent in whole.extents] == [extent.hashes for extent in again.extents] != []
