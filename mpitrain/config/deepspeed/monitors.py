"""The monitors of a DeepSpeed configuration, which a loop of one's own has none of, and what has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitrain.config.deepspeed.findings import Findings, is_off
from mpitrain.config.deepspeed.keys import MONITORS


def read_monitors(values: Mapping[str, Any], findings: Findings) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the monitors that are on, the settings of a trainer that does what they do); those that are off are ignored."""
    on = [key for key in MONITORS if not is_off(values.get(key))]
    findings.ignored += [key for key in MONITORS if key in values and key not in on]
    instead = [MONITORS[key] for key in on]
    project = values["wandb"].get("project") if "wandb" in on and isinstance(values["wandb"], Mapping) else None
    if project and project != "auto":
        instead.append(f'monitor.project = "{project}"')
    return tuple(on), tuple(instead)
