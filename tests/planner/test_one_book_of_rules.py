"""The planner offers only layouts that a job accepts at its start.

`start` makes the checks that a job makes before its first step, in the same order, on the whole model without ranks.
"""

from __future__ import annotations

import copy
import random
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mpitrain.config.settings import Config
from mpitrain.data import Description
from mpitrain.errors import InputError, refusal
from mpitrain.layout.mesh import Mesh, axes_of, coordinates, shape_of
from mpitrain.models import Task, build_model
from mpitrain.parallel.layouts import ParallelLayout, settings
from mpitrain.parallel.pipeline import SCHEDULES
from mpitrain.parallel.recompute import recompute_blocks
from mpitrain.parallel.rules import Combination, require_compatible, rules_of
from mpitrain.pipe.partition import listed_blocks, parameter_costs, stage_bounds
from mpitrain.pipe.schedule import make_schedule
from mpitrain.planner import search as search_module
from mpitrain.planner.candidates import candidates, microbatches
from mpitrain.planner.machine import MachineProfile, read_machine
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.profile import BlockProfile, profile_of
from mpitrain.planner.search import explicit_settings, layouts_with
from mpitrain.planner.subject import StandIn
from mpitrain.shard import placement
from mpitrain.shard.flat import blocks_of
from mpitrain.shard.parameters import shard_order
from mpitrain.shard.virtual_workers import VirtualWorkers
from mpitrain.tensor import parallelize, plan_for
from mpitrain.trainer.assemble import resolve_cut
from mpitrain.trainer.data import microbatch_size

INT, FLOAT = np.dtype("int64"), np.dtype("float32")
TOKENS = Description("tokens", "train", 1000, (16,), INT, (16,), INT, 64, None, "x")
IMAGES = Description("arrays", "train", 1000, (8, 8), FLOAT, (), INT, None, tuple("0123456789"), "x")
MODELS: dict[str, tuple[dict[str, Any], Description]] = {
    "gpt": ({"name": "gpt", "layers": 2, "width": 16, "heads": 4, "sequence": 16}, TOKENS),
    "counting": ({"factory": "planner.planned_models:counts_positions", "sequence": 16}, TOKENS),
    "mlp": ({"name": "mlp", "width": 16}, IMAGES),
    "resnet": ({"name": "resnet", "layers": 18, "width": 4}, IMAGES),
    "sequential": ({"factory": "planner.planned_models:sequential"}, IMAGES),
    "whole": ({"factory": "planner.planned_models:unlisted"}, IMAGES),
}
WORLDS = [(1, 2), (1, 4), (2, 2), (1, 6), (2, 3), (4, 2), (1, 8)]  # nodes, ranks of each
SETTINGS: dict[str, list[Any]] = {
    "parallel.pipeline": [1, 2, 4],
    "parallel.tensor": [1, 2, 4],
    "parallel.zero": [0, 1, 2, 3, 3],
    "parallel.share_node": [True, False],
    "parallel.shard_within": ["all", "node"],
    "parallel.reshard": [True, False],
    "parallel.schedule": ["gpipe", "1f1b", "interleaved", "zero-bubble"],
    "parallel.chunks": [1, 2],
    "parallel.slices": [1, 2],
    "parallel.sequence": [True, False],
    "parallel.offload": ["", "host"],
    "parallel.offload_parameters": ["", "host", "/tmp/states"],
    "parallel.cut": ["uniform", "parameters", (2, 1), (1, 1, 1)],
    "train.microbatch": [1, 2, 3],
    "train.recompute": [True, False, "selective", "every 2"],
    "train.batch_warmup": [[[5, 3]], [[5, 6]]],
    "run.reproducible": [True],
    "run.workers": [2, 8],
    "model.compile": [True],
}


MACHINES = [read_machine("cpu-128"), read_machine("cpu-128"), read_machine("gpu-8")]


def machine_of(name: str) -> MachineProfile:
    return next(machine for machine in MACHINES if machine.name == name)


@cache
def task_of(kind: str) -> Task:
    section, description = MODELS[kind]
    return build_model(Config.from_dict({"model": section}).model, description)


@cache
def profile(kind: str) -> BlockProfile:
    section, description = MODELS[kind]
    return profile_of(Config.from_dict({"model": section}), description, measure=False)


class Samples:
    """A data set of random samples in the shapes of a model's input."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 1000

    def read(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rng, count = np.random.default_rng(1), len(which)
        if MODELS[self.kind][1] is TOKENS:
            return rng.integers(64, size=(count, 16)), rng.integers(64, size=(count, 16))
        return rng.random((count, 8, 8), dtype="float32"), rng.integers(10, size=count)


def start(config: Config, kind: str, nodes: int, each: int, on_device: bool) -> None:
    """Raise InputError if a job refuses the configuration at its start."""
    parallel, ranks, task = config.parallel, nodes * each, task_of(kind)
    axes = axes_of(parallel)
    shape = shape_of(axes, ranks)
    data, pipeline, tensor = shape.values()
    groups = {(name,) if size > 1 else (): SimpleNamespace(size=size, rank=0) for name, size in shape.items()}
    world = cast(Any, SimpleNamespace(on_root=lambda act: act()))
    mesh = Mesh(world, tuple(axis for axis, _ in axes), shape, dict.fromkeys(shape, 0), cast(Any, groups))
    workers = VirtualWorkers.of(data, config.run.reproducible, config.run.workers)
    begin = Combination(
        parallel, mesh.sizes, config.model.compile, config.run.reproducible, one_copy=parallel.share_node
    )
    require_compatible(begin)
    module = copy.deepcopy(task.module)
    if pipeline > 1:
        resolve_cut(config, mesh, task, cast(Any, Samples(kind)))
    if tensor > 1:
        plan = plan_for(module, sequence=parallel.sequence)
        parallelize(module, StandIn(tensor), plan, sequence=parallel.sequence, whole=parallel.whole)
    if pipeline > 1:
        share = -(-config.train.batch // data)
        count = -(-share // microbatch_size(config, mesh))
        schedule = make_schedule(parallel.schedule, pipeline, count, parallel.chunks, parallel.slices)
        blocks, cut = listed_blocks(module), parallel.cut
        costs = [parameter_costs(blocks)] * schedule.stages if cut == "parameters" else None
        bounds = stage_bounds(blocks, schedule.stages, () if isinstance(cut, str) else cut, costs)
        for rank in range(pipeline):
            rank_blocks = [block for n in schedule.stages_of(rank) for _, block in blocks[bounds[n] : bounds[n + 1]]]
            if not any(p.requires_grad for block in rank_blocks for p in block.parameters()):
                raise refusal("no parameter to train")
    elif config.train.recompute:
        recompute_blocks(module, config.train.recompute)
    gathers = placed(config, shape, each, on_device)
    synchronous = profile(kind).synchronous
    if config.model.compile:
        if not blocks_of(module):
            raise refusal("model.compile finds no blocks")
        require_compatible(Combination(parallel, compiled=True, gathers=gathers, synchronous=synchronous and data > 1))
    for size in config.train.batch_sizes.after(0) if pipeline == 1 else []:
        if why := workers.conflict(size, config.train.microbatch, synchronous=synchronous, gathers=gathers):
            raise refusal(why)


def placed(config: Config, shape: dict[str, int], each: int, on_device: bool) -> bool:
    """Return True if parameters are gathered, as `Sharding` decides for each data-parallel group."""
    parallel, (data, pipeline, tensor), gathers = config.parallel, shape.values(), False
    stage, offload = placement.STAGES[parallel.zero], parallel.offload_parameters
    for first in range(pipeline * tensor):
        members = [rank for rank in range(data * pipeline * tensor) if rank % (pipeline * tensor) == first]
        places = [coordinates(rank, shape) for rank in members]
        assert [place["data"] for place in places] == list(range(data))
        assert len({(place["pipeline"], place["tensor"]) for place in places}) == 1
        nodes = [rank // each for rank in members]
        comm = SimpleNamespace(nodes=nodes, node=0, local_rank=0, num_nodes=len(set(nodes)))
        even = shard_order(cast(Any, comm)) is not None
        if stage.states and data > 1 and parallel.shard_within == "node" and not even:
            raise refusal("sharding within nodes needs as many ranks on each node")
        shards = nodes.count(nodes[0]) if parallel.shard_within == "node" else data
        one_copy = placement.node_has_one_copy(stage, parallel.share_node, on_device, even)
        one_copy = one_copy and not placement.is_elsewhere(offload, on_device)
        staged = pipeline > 1
        has = {"one_copy": one_copy, "offload": offload, "on_device": on_device}
        if why := placement.conflict(parallel.zero, shards, staged=staged, **has):
            raise refusal(why)
        moved = placement.is_elsewhere(offload, on_device)
        gathers = gathers or (stage.parameters and not one_copy and (shards > 1 or moved))
    return gathers


def drawn(rng: random.Random, kind: str) -> Config | None:
    """Return a random configuration with some settings set, or None if it is refused when it is read."""
    share = rng.choice([0.0, 0.1, 0.4])
    values: dict[str, dict[str, Any]] = {"model": dict(MODELS[kind][0]), "train": {"batch": rng.choice([8, 12])}}
    for key, choices in SETTINGS.items():
        section, name = key.split(".")
        rare = section in ("run", "model") or name in ("cut", "offload_parameters", "batch_warmup")
        if rng.random() < (min(share, 0.15) if rare else share):
            values.setdefault(section, {})[name] = rng.choice(choices)
    try:
        return Config.from_dict(values)
    except InputError:
        return None


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache the candidates for each model, batch and world."""

    @lru_cache(None)
    def once(batch: int, kind: Any, *rest: Any) -> list[Any]:
        return list(candidates(kind, *rest))

    monkeypatch.setattr(search_module, "candidates", lambda model, *rest: once(model.batch, model, *rest))


def any_layout(rng: random.Random, ranks: int, batch: int) -> ParallelLayout:
    """Return a random layout of `ranks` ranks in the planner's form; it may be impossible."""
    tensor = rng.choice([n for n in (1, 2, 4) if ranks % n == 0])
    pipeline = rng.choice([n for n in (1, 2, 4) if ranks // tensor % n == 0])
    data = ranks // tensor // pipeline
    schedule, chunks = rng.choice(SCHEDULES) if pipeline > 1 else ("1f1b", 1)
    zero = rng.randrange(4) if data > 1 else 0
    return ParallelLayout(
        data,
        pipeline,
        tensor,
        zero,
        share_node=zero < 3 or rng.random() < 0.5,
        microbatch=rng.choice(microbatches(batch, data)),
        schedule=schedule,
        chunks=chunks,
        slices=rng.choice([1, 2]) if pipeline > 1 else 1,
        recompute=rng.random() < 0.5,
        sequence=tensor > 1 and rng.random() < 0.5,
    )


def with_layout(config: Config, layout: ParallelLayout, requested: dict[str, Any]) -> Config:
    """Return the configuration that `parallel.auto` derives from a layout."""
    values = config.to_dict()
    for section, keys in settings(layout, requested).items():
        values[section].update(keys)
    return Config.from_dict(values)


@pytest.mark.parametrize("kind", MODELS)
def test_the_planner_offers_exactly_what_a_job_accepts(kind: str, listed: None) -> None:
    rng, offers, refusals = random.Random(kind), 0, 0
    while offers < 30 or refusals < 30:
        config, (nodes, each), machine = drawn(rng, kind), rng.choice(WORLDS), rng.choice(MACHINES)
        if config is None:
            continue
        model, requested = profile(kind), explicit_settings(config)
        model.batch = config.train.batch
        predictor, device = Predictor(model, machine, nodes, each), machine.device is not None
        layouts = layouts_with(predictor, rules_of(config), requested)
        offered_some = rng.sample(list(layouts), min(3, len(layouts)))
        for layout in [*offered_some, *(any_layout(rng, nodes * each, model.batch) for _ in range(3))]:
            try:
                start(with_layout(config, layout, requested), kind, nodes, each, device)
                offers += layout in layouts
            except InputError:
                refusals += 1
                if layout in layouts:  # then the search passes over it
                    with pytest.raises(InputError):
                        predictor.memory(layout)
