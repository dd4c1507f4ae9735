"""The step benchmark: contenders that train identically, and targets for what it measured."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
import pytest
from support import job
from warm import bench

from benchmarks.runner.peers import OUR_DDP, SINGLE, Shape, Trainee, batches, contender, contenders, gloo, mean_losses
from benchmarks.runner.training_runs import PeakMemory
from benchmarks.step import flops_of_a_token, main, parser, report
from mpitrain.errors import CommunicationError

MIB = 1 << 20
SMALL = Shape(vocabulary=32, layers=2, width=64, tokens=8)


# -- the command ---------------------------------------------------------------------------------------------


@pytest.mark.campaign
def test_a_quick_run_writes_times_and_targets(tmp_path):
    done = bench("step", "--quick", "--ranks", "2", "--only", "ZeRO-2", "--out", tmp_path, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads((tmp_path / "BENCH-step.json").read_text())
    runs = values["results"]["2"]["batches"]["communication-heavy"]
    assert set(runs) == {SINGLE, "ZeRO-2"}
    assert all(0 < v["best"] <= v["median"] < 60 for v in runs.values())
    assert runs["ZeRO-2"]["loss"] == pytest.approx(runs[SINGLE]["loss"], rel=1e-2)  # few steps: nearly the same yet
    text = (tmp_path / "BENCH-step.md").read_text()
    for words in ("Quick run", "/ one process", "not computing ms"):
        assert words in text, words


@pytest.mark.full
@pytest.mark.parametrize("device", ["pretend"], indirect=True)
def test_a_step_on_a_device_is_reported_in_tokens_per_second(device, tmp_path):
    command = [sys.executable, "-m", "benchmarks", "step", "--quick", "--ranks", "2", "--device", device.type]
    done = job(0, [*command, "--only", "ZeRO-0,torch DDP", "--out", str(tmp_path)], device=device.type)
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads((tmp_path / "BENCH-step.json").read_text())
    result = values["results"]["2"]
    assert result["devices"] == 2 and result["backend"] == "mpitrain"
    for figures in result["found"].values():
        assert figures["tokens"] == pytest.approx(2 * 2 * 32 / figures["step"]) and figures["share"] is None
    assert result["found"]["ZeRO-0"]["loss"] == pytest.approx(result["found"]["torch DDP"]["loss"], rel=0.03)
    assert [target["met"] for target in values["targets"]] == [None]


def test_flops_of_a_token_count_forward_and_backward_products():
    shape = Shape(vocabulary=1000, layers=3, width=128, tokens=64)
    inside = 3 * 2 * 12 * 128**2  # of the blocks: a product and a sum for each weight
    attention, scores = 3 * 2 * 2 * 64 * 128, 2 * 1000 * 128
    assert flops_of_a_token(shape) == pytest.approx(3 * (inside + attention + scores), rel=0.01)


def test_an_unknown_contender_is_refused_with_the_known_names(capsys):
    assert parser().parse(["--only", "ZeRO-2, torch DDP"]).only == ["ZeRO-2", "torch DDP"]
    with pytest.raises(SystemExit) as error:
        main(["--only", "ZeRO-4"])
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert "'ZeRO-4'" in message and "ZeRO-3 gathered" in message


# -- the contenders ------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_all_contenders_reach_the_same_losses(world):
    with gloo(world):
        trainees = {}
        for name in contenders():
            trainees[name] = contender(name, world, SMALL, 2)
        for _ in range(2):
            for trainee in trainees.values():
                trainee.prepare()
                trainee.step()
        losses = mean_losses(world, trainees, 2e-4)
        assert len(losses) >= 8 and len({round(loss, 3) for name, loss in losses.items() if name != SINGLE}) == 1
        for trainee in trainees.values():
            trainee.close()


@pytest.mark.ranks(2)
def test_a_contender_with_different_losses_is_named(world):
    trainees = {name: Trainee(batches(SMALL, 1, 0), lambda x, y: 0.0, lambda: None) for name in "abc"}
    for name, loss in (("a", 1.0), ("b", 1.0), ("c", 1.1)):
        trainees[name].loss = loss
    with pytest.raises(CommunicationError, match="c differs"):
        mean_losses(world, trainees, 2e-4)


def test_the_number_of_parameters_is_that_of_the_model():
    for shape in (SMALL, Shape(256, 3, 128, 4)):
        assert shape.numel == sum(p.numel() for p in shape.build().parameters())


def test_batches_differ_between_ranks_and_are_reproducible():
    first, again, other = (batches(SMALL, 2, rank) for rank in (0, 0, 1))
    x, y = next(first)
    assert (x[:, 1:] == y[:, :-1]).all() and (x == next(again)[0]).all() and (x != next(other)[0]).any()
    assert (x != next(first)[0]).any()


# -- memory --------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
def test_private_memory_counts_per_rank_and_shared_memory_per_node(world):
    memory = PeakMemory(world)
    with memory.training():
        private_memory = np.ones(16 * MIB, dtype=np.uint8)
        shared = world.arena(12 * MIB)
        node = shared.peer(world.world_ranks[0])  # 48 MiB that each rank of the node touches
        for _ in range(2):
            node.sum()
            world.barrier()
        shared.tensor.zero_()
        time.sleep(0.1)  # several readings
        private_memory.sum()
        world.barrier()
    bytes_by_rank = world.all_gather_object(memory.peak)
    assert sum(bytes_by_rank) / MIB == pytest.approx((16 + 48) * world.size, rel=0.15)
    shared.free()


# -- the report ----------------------------------------------------------------------------------------------


def test_targets_are_met_missed_or_not_measured():
    def one(seconds: float) -> dict[str, float]:
        return {"median": seconds, "best": seconds, "relative": seconds, "waiting": seconds - 1.0}

    figures = {SINGLE: one(1.0), OUR_DDP: one(1.3), "ZeRO-1": one(1.01), "ZeRO-3": one(1.0)}
    figures |= {"torch DDP": one(1.5), "FSDP2": one(2.9)}
    results = {2: {"nodes": 1, "parameters": 20000000, "batches": {"communication-heavy": figures}}}
    met = {
        target.what.removeprefix("2 ranks: step time, "): target.met
        for target in report(results, parser().parse([])).targets
    }
    assert met["ZeRO-1 / one process"] is True and met[f"{OUR_DDP} / one process"] is False
    assert met["ZeRO-2 / one process"] is None
    assert met["torch DDP / ZeRO-1"] is True and met["FSDP2 / ZeRO-3"] is False
    assert met["torch DDP / ZeRO-0"] is None
