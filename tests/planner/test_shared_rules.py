"""Rules shared by jobs and the planner: a change of a constant in a rule changes both."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from support import config_of

from mpitrain.config.settings import Config
from mpitrain.data import Description
from mpitrain.layout.mesh import axes_of, shape_of
from mpitrain.models import build_model
from mpitrain.parallel.costs import AxisExchange
from mpitrain.parallel.layouts import ParallelLayout, layout_of
from mpitrain.pipe import schedule
from mpitrain.planner.machine import read_machine
from mpitrain.planner.predictor import Predictor, StepSimulation
from mpitrain.planner.profile import profile_of
from mpitrain.shard import flat, placement
from mpitrain.shard.flat import in_backward_order
from mpitrain.shard.gradients import _slots
from mpitrain.shard.placement import STAGES
from mpitrain.shard.sharding import Sharding
from mpitrain.tensor import axis
from mpitrain.trainer.data import microbatch_size
from mpitrain.trainer.options import from_config

FLOAT, INT = np.dtype("float32"), np.dtype("int64")
IMAGES = Description("arrays", "train", 1000, (8, 8), FLOAT, (), INT, None, tuple("0123456789"), "x")
CONFIG = Config.from_dict({"model": {"name": "mlp", "width": 512, "layers": 40}, "train": {"batch": 96}})
BUSY = read_machine("cpu-128")  # of which each core has a rank below
NODES, EACH = 2, 128
WITHIN = ParallelLayout(256, zero=2, shard_within="node")


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor(profile_of(CONFIG, IMAGES, BUSY, measure=False), BUSY, NODES, EACH)


def shares(layout: ParallelLayout, overlaps: bool = False) -> Any:
    """Return a stand-in for the communicator of the ranks that share a layout's parameters."""
    within = layout.shard_within == "node"
    size, nodes = (EACH, 1) if within else (NODES * EACH, NODES)
    arena = SimpleNamespace(kind="shared")
    return SimpleNamespace(size=size, num_nodes=nodes, overlaps=overlaps, arena=lambda *_: arena)


def job_buckets(layout: ParallelLayout) -> list[int]:
    """Return the sizes in bytes of a job's buckets."""
    module, shard = build_model(CONFIG.model, IMAGES).module, shares(layout)
    config, stage = config_of(zero=layout.zero), STAGES[layout.zero]
    zero, parallel = layout.zero, config.parallel
    sharding = SimpleNamespace(config=config, parallel=parallel, shard=shard, zero=zero, stage=stage, _staged=False)
    sharding._share_on_node = lambda groups: "one copy"
    groups, _ = Sharding._place_parameters(cast(Any, sharding), in_backward_order(module))
    return [4 * (hi - lo) for group in groups for lo, hi in pairwise(group.layout.bounds)]


def planned_buckets(predictor: Predictor, layout: ParallelLayout) -> list[int]:
    return list(predictor.holdings(layout, predictor.places(layout), 0).buckets)


@pytest.mark.parametrize("within", ["node", "all"])
def test_planned_buckets_equal_those_of_the_job(predictor, within, monkeypatch):
    layout = ParallelLayout(256, zero=2, shard_within=within)
    before = job_buckets(layout)
    assert planned_buckets(predictor, layout) == before and len(before) > 2
    for module, name, value in [(placement, "CACHED_MB", 8.0), (flat, "FIRST_BUCKET", 3 << 20)]:
        with monkeypatch.context() as patched:
            patched.setattr(module, name, value)
            changed = Predictor(predictor.model, BUSY, NODES, EACH)
            assert planned_buckets(changed, layout) == (after := job_buckets(layout))
            assert (after != before) == (within == "node" or name == "FIRST_BUCKET")


@pytest.mark.parametrize("layout", [WITHIN, ParallelLayout(256, zero=2), ParallelLayout(64, 4, zero=2)], ids=str)
def test_planned_slots_equal_those_of_the_job(predictor, layout, monkeypatch):
    def both() -> tuple[int, float]:
        comm, staged = shares(layout), layout.pipeline > 1
        reduction = SimpleNamespace(comm=comm, overlaps=comm.overlaps, compression=None, reproducible=staged)
        slots = _slots(cast(Any, reduction), 16, torch.float32, torch.device("cpu"))
        return len(slots), predictor.places(layout).slots()

    job, planned = both()
    assert job == planned == (placement.DEFERRING if layout is WITHIN else 1)
    monkeypatch.setattr(placement, "DEFERRING", 5)
    job, planned = both()
    assert job == planned == (5 if layout is WITHIN else 1)


def test_tensor_reductions_switch_at_the_limit_of_the_job(predictor, monkeypatch):
    layout = ParallelLayout(64, tensor=4)
    simulated = StepSimulation(predictor, predictor.places(layout))

    def job() -> bool:
        tp_axis, calls = axis.Axis.__new__(axis.Axis), list[int]()
        tp_axis.size, tp_axis.rank, tp_axis.comm = 4, 0, cast(Any, SimpleNamespace(all_reduce=lambda x: None))
        monkeypatch.setattr(tp_axis, "_exchange", lambda *arguments: calls.append(arguments[-1]))
        tp_axis.all_reduce(torch.zeros(1024))
        return calls[0] > 0

    def planned() -> float:
        return simulated.exchange_seconds([AxisExchange("all_reduce", 4096)])

    direct, seconds = job(), planned()
    monkeypatch.setattr(axis, "_MAX_DIRECT", 1024)
    assert direct and not job() and planned() != seconds


def test_the_default_microbatches_equal_those_of_the_job(monkeypatch):
    config = Config.from_dict({"train": {"batch": 96}, "parallel": {"pipeline": 4}, "optim": {"name": "adamw"}})
    sizes = shape_of(axes_of(config.parallel), 8)
    mesh = SimpleNamespace(readers=SimpleNamespace(size=sizes["data"]), stages=SimpleNamespace(size=4))

    def microbatch_sizes() -> set[int]:
        loop = Config.from_dict({"train": {"batch": 96}, "parallel": {"pipeline": 4}})
        loop_microbatch = from_config(loop, 8, own_optimizer=True).microbatch
        return {layout_of(config, 8).microbatch, microbatch_size(config, cast(Any, mesh)), loop_microbatch}

    assert microbatch_sizes() == {6}
    monkeypatch.setattr(schedule, "_PER_STAGE", 4)
    assert microbatch_sizes() == {3}
