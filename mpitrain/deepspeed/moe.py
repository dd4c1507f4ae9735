"""Names of mixtures of experts, which scripts import whether they use them or not; a call is refused."""

from __future__ import annotations

from typing import Any, NoReturn

from mpitrain.deepspeed.names import explain_missing


def MoE(*_: Any, **__: Any) -> NoReturn:
    """Raise InputError: there are no expert layers."""
    raise explain_missing("moe.layer.MoE")


def split_params_into_different_moe_groups_for_optimizer(*_: Any, **__: Any) -> NoReturn:
    """Raise InputError: there are no expert layers."""
    raise explain_missing("moe.utils.split_params_into_different_moe_groups_for_optimizer")


def has_moe_layers(m: Any) -> tuple[bool, int]:
    """Return (False, 0), the presence and number of experts."""
    return False, 0


def is_moe_param(param: Any) -> bool:
    """Return False: no parameter is an expert's."""
    return False
