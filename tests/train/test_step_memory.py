"""Memory by category within the steps of a timeline, beside the device's allocator and the meter of activations."""

from __future__ import annotations

import gc
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from train.jobs import run

import mpitrain as mt
from mpitrain.config.settings import Config
from mpitrain.shard.parameters import ReplicatedParameters
from mpitrain.trainer.memory import ActivationMeter, KeptTensors
from mpitrain.trainer.run import Callback

GPT = {"layers": 4, "width": 64, "heads": 4, "sequence": 64}
CASES = {
    "kept": {},
    "recomputed": {"train": {"recompute": True}},
    "selective": {"train": {"recompute": "selective", "microbatch": 8}},
    "zero 3": {"parallel": {"zero": 3, "share_node": False}},
}


class AllocatorPeak(Callback):
    """The largest number of bytes in use on the device in step 3."""

    def on_step_done(self, trainer, step):
        if step.number == 2:
            torch.accelerator.reset_peak_memory_stats(trainer.device)
        if step.number == 3:
            self.nbytes = torch.accelerator.max_memory_allocated(trainer.device)


def recorded(world, folder, text, kind, /, **sections):
    """Train with step 3 recorded; return this rank's samples in that step, and the callback."""
    settings = {"run": {"dir": str(folder), "device": kind}, "data": {"path": text}, "model": GPT}
    settings |= {"checkpoint": {"every": 0}, "monitor": {"timeline": "3:3"}} | sections
    settings["train"] = {"steps": 3, "batch": 16 * world.size, "evaluate_samples": 2} | sections.get("train", {})
    trainer, peak = mt.Trainer(Config.from_dict(settings), world=world), AllocatorPeak()
    if kind != "cpu":
        trainer.callbacks.insert(0, peak)
    with trainer.working():
        assert trainer.train() == 0
    (path,) = folder.glob(f"timeline/steps-3-3/rank-{world.rank:05d}.json")
    return [row for _, row in json.loads(path.read_text())["memory"]], peak


@pytest.mark.parametrize("device", ["pretend"], indirect=True)
@pytest.mark.parametrize(
    "case", ["kept", "recomputed", "selective", pytest.param("zero 3", marks=pytest.mark.ranks(2))]
)
def test_the_peak_within_a_step_is_that_of_the_allocator(world, folder, text, device, case):
    gc.collect()
    rows, peak = recorded(world, folder, text, device.type, **CASES[case])
    highest = max(rows, key=lambda row: sum(row.values()))
    assert 0.95 * peak.nbytes <= sum(highest.values()) <= peak.nbytes
    before = rows[0]["other"]  # what earlier tests have left on the device
    # gradients of activations, gradients of parameters not yet in flat memory, and scratch memory of real kernels
    is_least = case == "kept" and device.type == "pretend"
    assert highest["other"] - before < (0.05 if is_least else 0.25) * (peak.nbytes - before)
    assert rows[0]["activations"] == rows[-1]["activations"] == 0 < highest["activations"]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("case", CASES)
def test_recording_memory_changes_no_loss_and_sees_what_is_gathered_and_recomputed(world, folder, text, case):
    train = {"steps": 3, "batch": 16 * world.size} | CASES[case].get("train", {})
    settings = {"data": {"path": text}, "model": GPT, "checkpoint": {"every": 0}} | CASES[case] | {"train": train}
    plain = run(world, folder / "plain", **settings)
    rows, _ = recorded(world, folder / "run", text, "cpu", **CASES[case])
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [line["loss"] for line in plain]
    last, metered = rows[-1], lines[0]["memory"]
    assert {name: last[name] for name in ("gradients", "states")} == {n: metered[n] for n in ("gradients", "states")}
    assert last["parameters"] == metered["parameters"] and last["other"] > 1 << 20
    activations, parameters = (max(row[name] for row in rows) for name in ("activations", "parameters"))
    assert (parameters > last["parameters"]) == (case == "zero 3" and world.size > 1)
    assert all(row["parameters"] + row["buffers"] == last["parameters"] + last["buffers"] for row in rows)
    if world.rank == 0:  # bytes of one microbatch in its forward pass
        at_least = 1.5 if case == "recomputed" else 1.0
        assert activations >= at_least * metered["activations"]


def test_what_backward_has_freed_no_longer_counts():
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 192))
    kept, peaks = KeptTensors(), []
    kept.at_peak = lambda: peaks.append(kept.nbytes)
    meter, x = ActivationMeter(model, record=kept), torch.randn(16, 8)
    with meter.counting(ReplicatedParameters([])):
        y = model(x)
        thirds = y.chunk(3, dim=1)  # views of one tensor
        loss = (thirds[0] * thirds[1] * thirds[2]).sum()
    product = 16 * 64 * 4
    of_linear, of_gelu = x.nbytes + product, product
    assert kept.nbytes == of_linear + of_gelu + y.nbytes + product  # and the product of two thirds
    loss.backward()
    assert kept.nbytes == 0 and peaks == [of_linear + of_gelu + y.nbytes + product]


def test_expanded_and_empty_tensors_count_what_they_occupy():
    kept, meter = KeptTensors(), SimpleNamespace()
    meter.held = [kept.keep(t) for t in (torch.ones(4, 1).expand(4, 100), torch.empty(0), torch.ones(10)[2:4])]
    assert kept.nbytes == 4 * 4 + 0 + 2 * 4
    del meter.held[0]
    assert kept.nbytes == 2 * 4
