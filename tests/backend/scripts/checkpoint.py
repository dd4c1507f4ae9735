"""Saves a sharded model with torch.distributed.checkpoint, or loads and checks it on another number of ranks."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mpitrain.backend  # noqa: F401

what, path = sys.argv[1:]
dist.init_process_group("mpitrain")


def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


def whole(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


model, optimizer = build(1)
expected = whole(model)
if what == "load":
    model, optimizer = build(2)
    assert not torch.equal(whole(model)[0], expected[0])
parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
if what == "save":
    dcp.async_save(parts, checkpoint_id=path).result()
else:
    dcp.load(parts, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    for mine, theirs in zip(whole(model), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
print(f"{what} done", flush=True)
dist.destroy_process_group()
