"""The settings of a run: the same on all ranks, with the layout that the planner chooses where `parallel.auto` asks.

With `parallel.auto` rank 0 plans: it reads the profile of the machine, measures the model's blocks by processes of its
own where ranks compute on the processors, and searches; the other ranks sleep meanwhile, so that what is measured has
all cores. Its choice is that of all ranks, and is what config.toml in the run folder says.

What the configuration sets explicitly is kept (see `planner.search.best`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from mpitrain.comm import Communicator
from mpitrain.comm.memory import device as devices
from mpitrain.config.settings import Config
from mpitrain.errors import refusal
from mpitrain.parallel.layouts import text as layout_text
from mpitrain.parallel.rules import LayoutRules, rules_of
from mpitrain.planner.machine import MachineProfile, read_machine
from mpitrain.planner.machine import profile_of as profile_of_values
from mpitrain.planner.subject import description_of
from mpitrain.speeds import kept
from mpitrain.speeds.cores import all_cores
from mpitrain.storage.text import lasting

_MEASURING = 5.0  # seconds, after which costs of divided models are reckoned from those that were measured
_TAG = 31_600  # apart from those of training's messages
_PAUSE = 0.01  # seconds between two looks of a rank that waits


def with_planned_layout(config: Config, world: Communicator, device: torch.device) -> Config:
    """All settings, with the layout that the planner chooses where they ask for that. Collective.

    Args:
        config: The same on all ranks, with what was set explicitly in `model_fields_set` of its sections.
        world: The ranks that train.
        device: On which this rank computes.

    Raises:
        InputError: On all ranks, where no layout fits, or a profile or the data cannot be read.
    """
    if not config.parallel.auto:
        return Config.from_dict(config.to_dict())
    began, rules = time.perf_counter(), rules_of(config)
    each = world.size // world.num_nodes
    if any(world.nodes.count(node) != each for node in range(world.num_nodes)):
        raise refusal(
            f"parallel.auto plans for as many ranks on each node, and {world.size} ranks are on {world.num_nodes} "
            "nodes; start as many on each, or set parallel.auto to false"
        )
    on_device = devices.is_accelerator(device)
    machine = _machine(config, world, device)
    values, text = while_others_sleep(
        world, lambda: _chosen(config, rules, machine(), world.num_nodes, each, on_device)
    )
    if world.rank == 0:
        print(f"parallel.auto: {text} (planned in {lasting(time.perf_counter() - began)})", flush=True)
    return Config.from_dict(values, "parallel.auto")


def while_others_sleep(world: Communicator, act: Callable[[], Any]) -> Any:
    """Call `act` on rank 0 as `world.on_root` does, while the other ranks sleep and leave it the cores. Collective."""
    word = torch.zeros(1)

    def wake_after() -> Any:
        try:
            return act()
        finally:
            for sent in [world.isend(word, rank, _TAG) for rank in range(1, world.size)]:
                sent.wait()

    if world.rank:
        arriving = world.irecv(word, 0, _TAG)
        while not arriving.done():
            time.sleep(_PAUSE)
        arriving.wait()
    return world.on_root(wake_after)


def _chosen(
    config: Config, rules: LayoutRules, machine: MachineProfile, nodes: int, ranks_per_node: int, on_device: bool
) -> tuple[dict[str, Any], str]:
    """The values of the configuration with the best layout, and what is to be said of it."""
    from mpitrain.parallel.layouts import settings  # these load what takes a second
    from mpitrain.planner.predictor import Predictor
    from mpitrain.planner.profile import profile_of
    from mpitrain.planner.report import nothing_fits
    from mpitrain.planner.search import best, given

    measure = not on_device and machine.origin.startswith("measured")
    wanted = given(config)
    description = description_of(config)
    with all_cores(), closing(profile_of(config, description, machine, measure, _MEASURING, ranks_per_node)) as model:
        predictor = Predictor(model, machine, nodes, ranks_per_node, bucket_mb=config.comm.bucket_mb)
        plan = best(predictor, rules, 1, wanted=wanted)
    if not plan.found:
        raise refusal(f"parallel.auto: {nothing_fits(plan)}; take a smaller model or more nodes")
    chosen = plan.found[0]
    values = config.to_dict()
    for section, keys in settings(chosen.layout, wanted).items():
        values[section].update(keys)
    if config.elastic.mode == "shrink" and "data" not in wanted:
        values["parallel"]["data"] = "auto"  # ranks that are left make fewer
    values["parallel"]["auto"] = False
    return values, f"{layout_text(chosen.layout)}, predicted {lasting(chosen.seconds)} a step"


def _machine(config: Config, world: Communicator, device: torch.device) -> Callable[[], MachineProfile]:
    """Measure what is not known of the machine; return what gives rank 0 the profile to plan with. Collective."""
    file, on_device = config.parallel.machine, devices.is_accelerator(device)
    if file:
        return lambda: fitting(read_machine(file), f"parallel.machine {file}", config.run.device, device)
    values = kept.kept() if world.rank == 0 else {}
    if not world.on_root(lambda: kept.tells(values, world, on_device)):
        values = kept.measured(world, on_device, config.run.device)
    if not on_device:
        values = {name: value for name, value in values.items() if name != "device"}
    return lambda: profile_of_values(values, str(kept.profile_path()))


def fitting(machine: MachineProfile, where: str, kind: str, device: torch.device) -> MachineProfile:
    """Return a given profile if it has what ranks compute on. Raises InputError otherwise."""
    has = "no device" if machine.device is None else f"devices of kind {machine.device.kind}"
    if has != (f"devices of kind {device.type}" if devices.is_accelerator(device) else "no device"):
        raise refusal(
            f"{where} has {has}, and this job computes on {device.type} (run.device {kind}); give another profile, or "
            "leave it out to have this machine measured"
        )
    return machine
