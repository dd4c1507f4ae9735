"""Settings of a run, with the layout that the planner chooses if `parallel.auto` is set.

With `parallel.auto`, rank 0 plans. It reads the profile of the machine, measures the model's blocks in processes of its
own if the ranks compute on CPUs, and searches for the best layout. The other ranks sleep meanwhile, so that the
measurement has all cores. All ranks use the result, which is also written to config.toml in the run folder.

Settings that the configuration sets explicitly are not changed (see `planner.search.best`).
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
from mpitrain.storage.text import duration_text

_MEASURING = 5.0  # seconds, after which costs of divided models are estimated from the measured ones
_TAG = 31_600  # differs from the tags of training's messages
_PAUSE = 0.01  # seconds between two polls of a waiting rank


def with_planned_layout(config: Config, world: Communicator, device: torch.device) -> Config:
    """Return all settings, with a planned layout if `parallel.auto` is set. Collective.

    Args:
        config: Settings, equal on all ranks; `model_fields_set` of each section names those that were set explicitly.
        world: Ranks that train.
        device: Device of this rank.

    Raises:
        InputError: On all ranks, if no layout fits, nodes have different numbers of ranks, or a profile or the data
            cannot be read.
    """
    if not config.parallel.auto:
        return Config.from_dict(config.to_dict())
    began, rules = time.perf_counter(), rules_of(config)
    each = world.size // world.num_nodes
    if any(world.nodes.count(node) != each for node in range(world.num_nodes)):
        raise refusal(
            f"parallel.auto needs the same number of ranks on each node, but the {world.size} ranks on "
            f"{world.num_nodes} nodes are spread unevenly; start the same number on each, or set parallel.auto to false"
        )
    on_device = devices.is_accelerator(device)
    machine = _machine(config, world, device)
    values, text = run_on_root_alone(
        world, lambda: _plan_layout(config, rules, machine(), world.num_nodes, each, on_device)
    )
    if world.rank == 0:
        print(f"parallel.auto: {text} (planned in {duration_text(time.perf_counter() - began)})", flush=True)
    return Config.from_dict(values, "parallel.auto")


def run_on_root_alone(world: Communicator, act: Callable[[], Any]) -> Any:
    """Call `act()` on rank 0 alone, and return its result on every rank. Collective.

    The other ranks sleep meanwhile and leave rank 0 their cores. Errors are handled as by `world.on_root`.

    Args:
        world: Ranks that call this.
        act: Function without arguments.
    """
    message = torch.zeros(1)

    def wake_after() -> Any:
        try:
            return act()
        finally:
            for sent in [world.isend(message, rank, _TAG) for rank in range(1, world.size)]:
                sent.wait()

    if world.rank:
        arriving = world.irecv(message, 0, _TAG)
        while not arriving.done():
            time.sleep(_PAUSE)
        arriving.wait()
    return world.on_root(wake_after)


def _plan_layout(
    config: Config, rules: LayoutRules, machine: MachineProfile, nodes: int, ranks_per_node: int, on_device: bool
) -> tuple[dict[str, Any], str]:
    """Return the configuration's values with the best layout, and a line that describes the layout."""
    from mpitrain.parallel.layouts import settings  # these imports take a second
    from mpitrain.planner.predictor import Predictor
    from mpitrain.planner.profile import profile_of
    from mpitrain.planner.report import nothing_fits
    from mpitrain.planner.search import best, explicit_settings

    measure = not on_device and machine.origin.startswith("measured")
    requested = explicit_settings(config)
    description = description_of(config)
    with all_cores(), closing(profile_of(config, description, machine, measure, _MEASURING, ranks_per_node)) as model:
        predictor = Predictor(model, machine, nodes, ranks_per_node, bucket_mb=config.comm.bucket_mb)
        plan = best(predictor, rules, 1, requested=requested)
    if not plan.predictions:
        raise refusal(f"parallel.auto: {nothing_fits(plan)}; use a smaller model or more nodes")
    chosen = plan.predictions[0]
    values = config.to_dict()
    for section, keys in settings(chosen.layout, requested).items():
        values[section].update(keys)
    if config.elastic.mode == "shrink" and "data" not in requested:
        values["parallel"]["data"] = "auto"  # fewer if ranks are lost
    values["parallel"]["auto"] = False
    return values, f"{layout_text(chosen.layout)}, predicted {duration_text(chosen.seconds)} per step"


def _machine(config: Config, world: Communicator, device: torch.device) -> Callable[[], MachineProfile]:
    """Measure unknown properties of the machine, and return a function that gives rank 0 the profile. Collective."""
    file, on_device = config.parallel.machine, devices.is_accelerator(device)
    if file:
        return lambda: require_device_kind(read_machine(file), f"parallel.machine {file}", config.run.device, device)
    values = kept.load_profile() if world.rank == 0 else {}
    if not world.on_root(lambda: kept.has_sections_for(values, world, on_device)):
        values = kept.measure_and_store(world, on_device, config.run.device)
    if not on_device:
        values = {name: value for name, value in values.items() if name != "device"}
    return lambda: profile_of_values(values, str(kept.profile_path()))


def require_device_kind(machine: MachineProfile, where: str, kind: str, device: torch.device) -> MachineProfile:
    """Return the profile if it describes the kind of device that the ranks use; otherwise raise InputError.

    Args:
        machine: The profile.
        where: Source of the profile, for the message.
        kind: Value of run.device, for the message.
        device: Device of this rank.
    """
    has = "no device" if machine.device is None else f"devices of kind {machine.device.kind}"
    if has != (f"devices of kind {device.type}" if devices.is_accelerator(device) else "no device"):
        raise refusal(
            f"{where} has {has}, but this job computes on {device.type} (run.device {kind}); use another profile, or "
            "remove the setting to measure this machine"
        )
    return machine
