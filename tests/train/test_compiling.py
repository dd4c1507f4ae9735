"""`model.compile` leaves the losses unchanged; a model that does not compile is refused at the start."""

from __future__ import annotations

import pytest
from torch import nn
from train.jobs import run

import mpitrain as mt
from mpitrain.errors import InputError
from mpitrain.trainer.assemble import require_compiler

GPT = {"layers": 1, "width": 32, "heads": 2, "sequence": 8}


@pytest.mark.campaign
@pytest.mark.ranks(1, 2)
def test_compiled_blocks_give_the_losses_of_the_uncompiled_model(world, folder, text):
    losses = []
    for compiled in (False, True):
        sections = {"data": {"path": text}, "model": GPT | {"dropout": 0.1, "compile": compiled}}
        sections["train"] = {"steps": 3, "batch": 4, "evaluate_samples": 4}
        sections["parallel"] = {"zero": 2}
        losses.append([m["loss"] for m in run(world, folder / str(compiled), **sections)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.ranks(2)
def test_models_that_cannot_be_compiled_are_refused(world, folder, text):
    def refused(model, why, zero=0):
        config = {
            "model": {"compile": True},
            "parallel": {"zero": zero, "share_node": False},
            "optim": {"name": "adam"},
        }
        with pytest.raises(InputError, match=f"^model.compile .*{why}") as caught:
            mt.initialize(model, config=config, loss=lambda output, y: output.sum())
        assert caught.value.agreed

    refused(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "parallel.zero 3; use parallel.zero 2", zero=3)
    refused(nn.Linear(4, 4), "needs a model with blocks")
    for number, sections in enumerate([{"parallel": {"pipeline": 2, "slices": 2}}, {"run": {"reproducible": True}}]):
        sections["run"] = {"dir": str(folder / str(number))} | sections.get("run", {})
        with pytest.raises(InputError, match=r"^model.compile cannot .*set one of them to its default"):
            run(world, folder / str(number), model=GPT | {"compile": True}, data={"path": text}, **sections)


@pytest.mark.simulated
def test_missing_compiler_is_named(device):
    import torch._inductor.config as inductor

    names = "Triton for pretend" if device.type == "pretend" else r"a C\+\+ compiler on the CPU"
    missing = inductor.patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, pytest.raises(InputError, match=f"model.compile needs {names}"):
        require_compiler(device)
