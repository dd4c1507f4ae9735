"""Each number of a machine file changes the prediction, and a worse machine gives a worse prediction."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from mpitrain.config.settings import Config
from mpitrain.data import Description
from mpitrain.errors import InputError
from mpitrain.parallel import layouts
from mpitrain.planner.machine import SECONDS, SECTIONS, TEXT
from mpitrain.planner.machine import profile_of as machine_of
from mpitrain.planner.predictor import Predictor
from mpitrain.planner.profile import BlockProfile, profile_of
from mpitrain.trainer.settings import require_device_kind

INT = np.dtype("int64")
TOKENS = Description("tokens", "train", 1000, (32,), INT, (32,), INT, 256, None, "x")
MODEL = {"name": "gpt", "layers": 2, "width": 256, "heads": 4, "sequence": 32}
HOST = {
    "node": {"cores": 6.0, "memory": 64e9, "memory_bandwidth": 50e9},
    "core": {"matrix": {"fp32": {0: 5e10}, "bf16": {0: 5e10}}},
    "folder": {"rank_write_rate": 5e8, "write_rate": 1e9, "write_limit": 2e9},
}
DEVICE = {
    "kind": "cuda",
    "count": 2.0,
    "memory": 16e9,
    "memory_bandwidth": 1e12,
    "host_bandwidth": 2e10,
    "link_latency": 1e-5,
    "matrix": {"bf16": {0: 1e14}},
}
MACHINES: dict[str, dict[str, Any]] = {
    "processors": HOST,
    "one core": HOST | {"node": HOST["node"] | {"cores": 1.0}},
    "linked devices": HOST | {"device": DEVICE | {"link_bandwidth": 1e11}},
    "devices": HOST | {"device": DEVICE},
}
LAYOUTS = ["4x1x1 zero1 mb2", "4x1x1 zero3 private mb2 offload:host", "4x1x1 zero1 mb2 offload:/scratch"]
LAYOUTS += ["2x1x2 mb2", "2x2x1 mb2", "1x4x1 mb2", "1x2x2 mb1"]
KEYS = [(section, key) for section, keys in SECTIONS.items() for key, of in keys.items() if of.unit is not TEXT]
BIGGER_IS_WORSE = {
    "node.seen_cores",
    "rank.process",
}  # ranks that wait keep cores that others need; bytes that are taken


def worse(machine: dict[str, Any], section: str, key: str) -> dict[str, Any]:
    """Return the machine with a lower speed, a smaller size or a longer time."""
    unit = SECTIONS[section][key].unit
    factor = 50.0 if unit is SECONDS or f"{section}.{key}" in BIGGER_IS_WORSE else 1 / 50
    factor = {"node.cores": 1 / 3, "node.seen_cores": 2.0, "device.count": 1 / 2}.get(f"{section}.{key}", factor)
    changed = copy.deepcopy(machine)
    entries = changed.setdefault(section, {})
    if SECTIONS[section][key].table:
        entries[key] = {name: {n: rate * factor for n, rate in table.items()} for name, table in entries[key].items()}
    else:
        entries[key] = number(machine, section, key) * factor
    return changed


def number(machine: dict[str, Any], section: str, key: str) -> float:
    """Return a number of a machine, set or derived, in the unit of its file."""
    spec, profile = SECTIONS[section][key], machine_of(machine, "a test")
    holder, _, attribute = spec.attribute.rpartition(".")
    return float(getattr(getattr(profile, holder) if holder else profile, attribute)) / spec.factor


def predictions(values: dict[str, Any]) -> np.ndarray:
    """Return the seconds of all layouts, the bytes of a process, and minus the bytes that a rank may use."""
    machine = machine_of(values, "a test")
    model = copy.copy(measured_profile())  # which counts the same operations by the speeds of this machine
    model._machine, model._cached_blocks = machine, lru_cache(None)(model._make_blocks)
    predictor = Predictor(model, machine, 2, 2)
    predictions = [predictor.predict(layouts.read(line)) for line in LAYOUTS]
    return np.array([*(each.seconds for each in predictions), predictions[0].memory["process"], -predictor.room()])


@lru_cache
def measured_profile() -> BlockProfile:
    """Return the profile of the model; its operations are counted once for all machines."""
    config = Config.from_dict({"model": MODEL, "train": {"batch": 8, "precision": "bf16"}})
    return profile_of(config, TOKENS, machine_of(HOST, "a test"), measure=False)


@lru_cache
def baseline(name: str) -> np.ndarray:
    return predictions(MACHINES[name])


@pytest.mark.parametrize(("section", "key"), KEYS, ids=".".join)
def test_a_worse_value_never_improves_a_prediction(section, key):
    """Up to 2 % better is allowed: reductions that cannot overlap for lack of cores are cut into fewer parts."""
    changed = False
    for name, machine in MACHINES.items():
        if section == "device" and (
            section not in machine or (key == "link_bandwidth" and key not in machine["device"])
        ):
            continue
        before, after = baseline(name), predictions(worse(machine, section, key))
        assert (after >= before - 0.02 * np.abs(before)).all(), name
        changed |= bool((np.abs(after - before) > 1e-3 * np.abs(before)).any())
    assert changed


def test_devices_without_links_are_staged_through_the_host():
    slow = copy.deepcopy(MACHINES["devices"])
    slow["device"]["host_bandwidth"] = 1e9
    tensor = LAYOUTS.index("2x1x2 mb2")
    assert baseline("linked devices")[tensor] < baseline("devices")[tensor] < predictions(slow)[tensor]
    linked = copy.deepcopy(slow) | {"device": slow["device"] | {"link_bandwidth": 1e11}}
    assert predictions(linked)[tensor] < predictions(slow)[tensor]


def test_parallel_auto_refuses_a_profile_of_another_device():
    cuda = machine_of(MACHINES["devices"], "a test")
    assert require_device_kind(cuda, "parallel.machine a.toml", "auto", torch.device("cuda", 0)) is cuda
    for device in ("xpu", "cpu"):
        with pytest.raises(InputError, match=f"kind cuda, but this job computes on {device}"):
            require_device_kind(cuda, "parallel.machine a.toml", "auto", torch.device(device))
