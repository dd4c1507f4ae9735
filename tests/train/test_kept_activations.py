"""Activations that are offloaded or partitioned until backward: the bits of a run that keeps them, and fewer bytes."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import mpitrain as mt
from mpitrain.comm.memory import device as devices
from mpitrain.errors import InputError
from mpitrain.models.gpt import GPT
from mpitrain.parallel.activations import ActivationOffload
from mpitrain.parallel.recompute import recompute_blocks
from mpitrain.shard.parameters import ReplicatedParameters
from mpitrain.trainer.memory import ActivationMeter

LAYERS, WIDTH, SEQUENCE, MICROBATCH = 4, 64, 32, 2
INPUT = MICROBATCH * SEQUENCE * WIDTH * 4  # bytes of the input of a block
AXES = {
    1: [{}],
    2: [{"zero": 3, "share_node": False}, {"pipeline": 2, "schedule": "zero-bubble"}, {"tensor": 2}],
    4: [{"pipeline": 2, "tensor": 2}],
}


class Measured(mt.Callback):
    """A callback that reads losses, norms of the gradients, and the memory account of the last step."""

    def __init__(self) -> None:
        self.losses: list[tuple[float, float]] = []

    def on_update(self, trainer: mt.Trainer, step: mt.Step) -> None:
        self.losses.append((step.loss, step.norm))
        self.memory = trainer.engine.memory()

    @property
    def bytes_kept(self) -> int:
        return self.memory.activations + self.memory.offloaded


def trained(
    world,
    text,
    folder,
    name,
    *,
    device="cpu",
    train=None,
    model=None,
    comm=None,
    into: Measured | None = None,
    **parallel,
) -> Measured:
    """Return the losses and the memory account of a run."""
    measured = into or Measured()
    settings = {
        "data": {"path": text},
        "model": {"layers": LAYERS, "width": WIDTH, "heads": 4, "sequence": SEQUENCE, "dropout": 0.1} | (model or {}),
        "train": {"steps": 3, "batch": 8, "microbatch": MICROBATCH, "evaluate_samples": 8} | (train or {}),
        "run": {"dir": str(folder / name), "device": device},
        "checkpoint": {"every": 0},
        "parallel": parallel,
        "comm": comm or {},
    }
    with sdpa_kernel(SDPBackend.MATH):
        assert mt.Trainer(settings, [measured], world=world).fit() == 0
    return measured


def assert_same(one: Measured, other: Measured) -> None:
    assert one.losses == other.losses and len(one.losses) == 3


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("recompute", [False, True], ids=str)
def test_activations_in_files_give_the_same_bits(world, text, folder, recompute):
    for number, parallel in enumerate(AXES[world.size][-1:] if recompute else AXES[world.size]):
        files = {"recompute": recompute, "offload_activations": str(folder / "files")}
        plain = trained(world, text, folder, f"plain{number}", train={"recompute": recompute}, **parallel)
        moved = trained(world, text, folder, f"moved{number}", train=files, **parallel)
        assert_same(moved, plain)
        assert plain.memory.offloaded == 0 < moved.memory.offloaded
        if not (recompute and "pipeline" in parallel):  # a stage that is recomputed as a whole counts nothing
            assert moved.bytes_kept == pytest.approx(plain.bytes_kept, rel=0.05), parallel
    assert not list((folder / "files").iterdir())


def passed(device, layers, target="", recompute=False, waits=True):
    """Run three passes on a device; return their results, the bytes kept and moved after forward, and the peak."""
    gc.collect()  # recomputed models refer to themselves
    torch.manual_seed(0)
    model = GPT(17, layers, WIDTH, 4).to(device)
    if recompute:
        recompute_blocks(model, recompute)
    x = torch.randint(17, (MICROBATCH, SEQUENCE)).to(device)
    offload = ActivationOffload(target, model, device) if target else None
    meter, parameters, results = ActivationMeter(model, offload), ReplicatedParameters([]), []
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(3):
            model.zero_grad(set_to_none=False)  # the peak is that of the activations
            torch.accelerator.synchronize()
            before = devices.memory_bytes(device)
            torch.accelerator.reset_peak_memory_stats(device)
            with meter.counting(parameters):
                loss = model(x).square().mean()
            if waits:
                torch.accelerator.synchronize()
            kept = devices.memory_bytes(device) - before
            loss.backward()
            torch.accelerator.synchronize()
            results += [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]
            peak = devices.peak_memory_bytes(device) - before
    return results, kept, meter.offloaded, peak


@pytest.mark.ranks(1)
@pytest.mark.parametrize("device", ["pretend"], indirect=True)
@pytest.mark.parametrize("target", ["host", "files"])
def test_a_device_keeps_two_groups_and_computes_the_same_bits(device, target, folder):
    target = target if target == "host" else str(folder)
    plain, kept, _, peak = passed(device, 6)
    moved, kept_fewer, out, lower_peak = passed(device, 6, target)
    assert all(map(torch.equal, moved, plain))
    assert all(map(torch.equal, passed(device, 6, target, waits=False)[0], plain))
    block = (out - passed(device, 4, target)[2]) / 2
    assert kept - kept_fewer == pytest.approx(5 * block, rel=0.05)  # the last block's, and those after it, stay
    assert peak - lower_peak == pytest.approx(4 * block, rel=0.05)  # two blocks' at a time
    if target != "host":  # the rest does not depend on where bytes go
        return
    again, kept, *_ = passed(device, 6, recompute=True)
    moved, kept_fewer, out, _ = passed(device, 6, target, recompute=True)
    assert all(map(torch.equal, moved, plain)) and all(map(torch.equal, again, plain))
    assert kept - kept_fewer == pytest.approx(5 * INPUT, rel=0.05)
    assert out == pytest.approx(6 * INPUT + 2 * INPUT + 2 * MICROBATCH * SEQUENCE * 17 * 4, rel=0.05)
    again, kept, *_ = passed(device, 6, recompute="selective")
    moved, kept_fewer, out, _ = passed(device, 6, target, recompute="selective")
    assert all(map(torch.equal, moved, plain)) and all(map(torch.equal, again, plain))
    block = (out - passed(device, 4, target, recompute="selective")[2]) / 2
    assert block > 4 * INPUT  # outputs of products move, too
    assert kept - kept_fewer == pytest.approx(5 * block, rel=0.05)


class AfterForward(Measured):
    """A callback that also reads the bytes that the last forward pass has left on the device, and each step's peak."""

    def on_fit_start(self, trainer: mt.Trainer) -> None:
        forward, self.peaks, self.ends = trainer.engine.forward, [], []

        def measured(*args, **kwargs):
            torch.accelerator.synchronize()
            before = devices.memory_bytes(trainer.device)
            loss = forward(*args, **kwargs)
            torch.accelerator.synchronize()
            self.kept = devices.memory_bytes(trainer.device) - before
            return loss

        trainer.engine.forward = measured
        self.begin = devices.memory_bytes(trainer.device)

    def on_step_done(self, trainer: mt.Trainer, step: mt.Step) -> None:
        torch.accelerator.synchronize()
        self.ends.append(devices.memory_bytes(trainer.device) - self.begin)
        self.peaks.append(devices.peak_memory_bytes(trainer.device) - self.begin)
        torch.accelerator.reset_peak_memory_stats(trainer.device)


@pytest.mark.parametrize("device", ["pretend"], indirect=True)
@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"tensor": 2}, marks=pytest.mark.ranks(2)),
        pytest.param({"zero": 3, "share_node": False}, marks=pytest.mark.ranks(2)),
        pytest.param({"tensor": 4}, marks=pytest.mark.ranks(4)),
    ],
    ids=str,
)
def test_ranks_on_devices_keep_what_the_formula_says(world, text, folder, device, parallel):
    def run(name, **train):
        gc.collect()
        train |= {"recompute": True}
        model = {"dropout": 0.0}
        return trained(
            world, text, folder, name, device=device.type, into=AfterForward(), model=model, train=train, **parallel
        )

    plain = run("plain")
    moved = run("moved", offload_activations="host")
    assert_same(moved, plain)
    inputs = LAYERS - 1  # inputs of all blocks but the last leave the device
    assert plain.kept - moved.kept == pytest.approx(inputs * INPUT, rel=0.05)
    if tensor := parallel.get("tensor"):
        divided = run("divided", partition_activations=True)
        both = run("both", partition_activations=True, offload_activations="host")
        assert_same(divided, plain)
        assert_same(both, plain)
        assert plain.kept - divided.kept == pytest.approx(LAYERS * INPUT * (tensor - 1) / tensor, rel=0.05)
        assert divided.kept - both.kept == pytest.approx(inputs * INPUT / tensor, rel=0.05)
    for each in (plain, moved):
        for values in (each.ends, each.peaks):  # no step leaves a fragment; what is logged may come a step later
            assert values[2] == pytest.approx(values[1], rel=0.005)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_buffers_have_the_same_bytes_whatever_the_number_of_layers(world, text, folder, zero):
    def run(layers):
        how = {"model": {"layers": layers}, "comm": {"bucket_mb": 0.125}}
        return trained(world, text, folder, str(layers), **how, zero=zero, share_node=False).memory

    few, many = run(4), run(8)
    assert many.gradients > 1.9 * few.gradients
    assert many.buffers == few.buffers and (many.buffers > 0) == (zero > 1)


@pytest.mark.ranks(2, 4)
def test_partitioned_inputs_give_the_same_bits_and_divide_the_bytes(world, text, folder):
    parallel, recompute = ({"tensor": 2}, True) if world.size == 2 else ({"tensor": 2, "pipeline": 2}, "every 2")
    train = {"recompute": recompute}
    plain = trained(world, text, folder, "plain", train=train, **parallel)
    train["partition_activations"] = True
    divided = trained(world, text, folder, "divided", train=train, **parallel)
    train["offload_activations"] = str(folder / "files")
    both = trained(world, text, folder, "both", train=train, **parallel)
    assert_same(divided, plain)
    assert_same(both, plain)
    if world.size == 2:
        assert plain.bytes_kept - divided.bytes_kept == pytest.approx(LAYERS * INPUT / 2, rel=0.05)
    assert both.bytes_kept == pytest.approx(divided.bytes_kept, rel=0.05)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("train", "parallel"),
    [({"recompute": True}, {}), ({}, {"tensor": 2}), ({"recompute": True}, {"tensor": 2, "sequence": True})],
    ids=str,
)
def test_partition_without_equal_kept_inputs_is_refused(world, text, folder, train, parallel):
    with pytest.raises(InputError, match=r"train\.partition_activations divides .*; set these, or remove it"):
        trained(world, text, folder, "refused", train=train | {"partition_activations": True}, **parallel)
