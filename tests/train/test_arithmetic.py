"""Useful arithmetic of a step, compared with formulas: operations, TFLOP/s per rank, share of the peak."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from train.jobs import run

from mpitrain.config.settings import Config
from mpitrain.errors import InputError
from mpitrain.models import Task
from mpitrain.monitor import read_metrics
from mpitrain.monitor.report.findings import NamedRun, findings, key_figures
from mpitrain.monitor.report.reading import read_run
from mpitrain.monitor.run_files import summary
from mpitrain.pipe.schedule import Backward, Forward
from mpitrain.planner.machine import MachineProfile
from mpitrain.trainer.memory import PipelineMeter
from mpitrain.trainer.recording import arithmetic
from mpitrain.trainer.trainer import Trainer

L, W, T, V = 4, 32, 16, 256
GPT = {"layers": L, "width": W, "heads": 4, "sequence": T}
TRAIN = {"steps": 2, "batch": 12, "microbatch": 2, "evaluate_samples": 12}
WEIGHTS = 12 * L * W**2 + V * W  # in matrix products: four in attention, eight in the MLP, and the tied output
OF_SAMPLE = 6 * WEIGHTS * T + 12 * L * W * T * T  # 6 N D + 12 L W T D


def gpt(world, folder, text, *, model=GPT, **sections):
    """Train a small GPT and return the lines of metrics.jsonl."""
    return run(world, folder, data={"path": text}, model=model, train=TRAIN | sections.pop("train", {}), **sections)


@pytest.fixture(autouse=True)
def no_profile(monkeypatch):
    """Hide the profile of this machine, so that its peak is unknown."""
    monkeypatch.setattr(arithmetic.kept, "load_profile", dict)


def test_flops_of_a_gpt_are_those_of_the_formula_and_lines_have_the_keys(world, folder, text, recwarn, capsys):
    lines = gpt(world, folder, text)
    for line in lines:
        assert line["flops"] == 12 * OF_SAMPLE
        assert line["tflops_per_rank"] == pytest.approx(line["flops"] / line["step_s"] / 1e12)
        assert "mfu" not in line
    assert not [w for w in recwarn if "peak" in str(w.message)]
    last_lines = capsys.readouterr().out
    assert " TFLOP/s per rank\n" in last_lines and "of the peak" not in last_lines
    assert " TFLOP/s per rank\n" in summary(folder)
    assert any(
        "FLOP of useful arithmetic, as counted; 6 x parameters x tokens is" in s for s in findings(read_run(folder))
    )


@pytest.mark.parametrize("setting", [{"train": {"recompute": True}}, {"train": {"precision": "bf16"}}])
def test_recomputing_and_precision_do_not_change_the_count(world, folder, text, setting):
    assert gpt(world, folder, text, **setting)[0]["flops"] == 12 * OF_SAMPLE


def test_flops_of_an_mlp_are_exact_and_frozen_weights_get_no_gradient(world, folder):
    class Half(Trainer):
        def make_model(self):
            module = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
            for p in module[1].parameters() if freeze else ():
                p.requires_grad_(False)
            return Task(module, nn.CrossEntropyLoss())

    weights, parameters = 64 * 32 + 32 * 10, 64 * 32 + 32 + 32 * 10 + 10
    for freeze, each in ((False, 6.0), (True, 2 * (2 + (32 * 10 + 10) / parameters))):
        config = {
            "run": {"dir": str(folder / str(freeze))},
            "data": {"path": "digits"},
            "train": {**TRAIN, "steps": 1},
        }
        trainer = Half(Config.from_dict(config), world=world)
        with trainer.working():
            assert trainer.train() == 0
        assert read_metrics(folder / str(freeze))[0]["flops"] == round(12 * each * weights)


def test_losses_are_the_same_bits_with_and_without_the_count(world, folder, text, monkeypatch):
    counted = gpt(world, folder / "counted", text, train={"recompute": True})
    monkeypatch.setattr(
        arithmetic.UsefulArithmetic, "on_fit_start", lambda self, trainer: setattr(self, "_of_sample", 0.0)
    )
    plain = gpt(world, folder / "plain", text, train={"recompute": True})
    assert [m["loss"] for m in counted] == [m["loss"] for m in plain] and "flops" not in plain[0]


def test_of_a_pipeline_every_forward_step_counts_and_no_backward_step():
    layer, x = nn.Linear(8, 4), torch.ones(2, 8, requires_grad=True)
    parameters: Any = SimpleNamespace(watch_saved=lambda saved: nullcontext(), holds=lambda tensor: False)
    meter, counter = PipelineMeter(layer), arithmetic.ProductCounter()
    with meter.counting(parameters, counter):
        for microbatch in range(3):
            outputs: list[torch.Tensor] = []
            meter.perform(Forward(0, microbatch), lambda: outputs.append(layer(x)))  # noqa: B023
            meter.perform(Backward(0, microbatch), lambda: outputs[0].sum().backward())  # noqa: B023
    assert counter.flops == 3 * 2 * (2 * 8 * 4)


@pytest.mark.parametrize(
    ("parallel", "train"),
    [
        pytest.param({}, {}, marks=pytest.mark.ranks(3)),
        pytest.param({"zero": 3}, {}, marks=pytest.mark.ranks(2)),
        pytest.param({"tensor": 2}, {}, marks=pytest.mark.ranks(2, 4)),
        pytest.param({"pipeline": 2}, {"recompute": True}, marks=pytest.mark.ranks(2, 4)),
        pytest.param({"pipeline": 2, "schedule": "zero-bubble"}, {}, marks=pytest.mark.ranks(2)),
    ],
)
def test_the_sum_over_divided_ranks_is_that_of_the_whole_model(world, folder, text, parallel, train):
    line = gpt(world, folder, text, parallel=parallel, train=train)[0]
    assert line["flops"] == 12 * OF_SAMPLE
    assert line["tflops_per_rank"] == pytest.approx(line["flops"] / line["step_s"] / 1e12 / world.size)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_product_that_cannot_be_counted_or_is_compiled_gives_no_figures(world, folder, text, monkeypatch, compiled):
    if compiled:
        monkeypatch.setattr(arithmetic, "_is_compiled", lambda module: True)
    else:
        monkeypatch.setattr(arithmetic, "flops_of", lambda *args: 1 / 0)
    lines = gpt(world, folder, text)
    assert len(lines) == 2 and not {"flops", "tflops_per_rank", "mfu"} & set(lines[0])


def test_a_module_compiled_in_place_or_wrapped_is_recognized():
    inner = nn.Linear(2, 2)
    assert not arithmetic._is_compiled(nn.Sequential(inner))
    inner.compile(backend="eager")
    assert arithmetic._is_compiled(nn.Sequential(inner))
    assert arithmetic._is_compiled(nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager")))


def hardware_of(ranks, *, precision="fp32", device="cpu", machine=""):
    """Return a stand-in for a trainer with two nodes of `ranks` ranks each."""
    world = SimpleNamespace(size=2 * ranks, rank=0, nodes=[0] * ranks + [1] * ranks, node=0)
    world.all_gather_object = lambda value: [(node, value[1]) for node in world.nodes]
    config = Config.from_dict({"train": {"precision": precision}, "parallel": {"machine": machine}})
    return SimpleNamespace(world=world, config=config, device=torch.device(device))


def test_the_peak_on_cpus_is_the_fastest_product_on_the_cores_in_use(monkeypatch):
    profile = MachineProfile("m", "measured", cores=4, memory=1, matrix={"fp32": [(64, 2e10), (256, 5e10)]})
    monkeypatch.setattr(arithmetic, "_read_profile", lambda file: profile)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert arithmetic.peak_of_ranks(hardware_of(2)) == 2 * 2 * 5e10
    assert arithmetic.peak_of_ranks(hardware_of(8)) == 2 * 4 * 5e10  # ranks that share cores
    assert arithmetic.peak_of_ranks(hardware_of(2, precision="bf16")) is None


def test_the_peak_of_devices_is_the_manufacturers_and_shared_ones_count_once(monkeypatch):
    monkeypatch.setattr(arithmetic, "_read_profile", lambda file: None)
    monkeypatch.setattr(arithmetic.hardware, "is_accelerator", lambda device: True)
    monkeypatch.setattr(arithmetic.hardware, "identity", lambda device: "uuid")
    monkeypatch.setattr(arithmetic.hardware, "name", lambda device: "NVIDIA H100 80GB HBM3")
    assert arithmetic.peak_of_ranks(hardware_of(3, precision="bf16", device="cuda")) == 2 * 989e12
    assert arithmetic.peak_of_ranks(hardware_of(3, precision="fp32", device="cuda")) is None


def test_an_unreadable_profile_is_no_peak(monkeypatch):
    def fail(*_):
        raise InputError("damaged")

    monkeypatch.setattr(arithmetic, "read_machine", fail)
    assert arithmetic.peak_of_ranks(hardware_of(1, machine="missing.toml")) is None


def test_a_known_peak_gives_the_share_everywhere(world, folder, text, monkeypatch, capsys):
    monkeypatch.setattr(arithmetic, "peak_of_ranks", lambda trainer: 1e12)
    lines = gpt(world, folder, text)
    assert [m["mfu"] for m in lines] == pytest.approx([m["tflops_per_rank"] for m in lines])
    assert " % of the peak" in capsys.readouterr().out and " % of the peak" in summary(folder)
    of_run = read_run(folder)
    rows = dict(key_figures([NamedRun("run", of_run)]))
    assert rows["share of the peak (MFU)"].endswith("%") and "useful TFLOP/s per rank" in rows
    columns = of_run.columns
    total = sum(m["flops"] for m in lines) / sum(m["step_s"] for m in lines) / 1e12
    assert columns.mean(columns.mfu) == pytest.approx(total) and math.isnan(columns.mean(columns.mfu * math.nan))
