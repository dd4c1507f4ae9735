"""Conversion of parameters and inputs to 16 bits (Micikevicius et al. 2018, Mixed Precision Training)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mpitrain.choices import Precision

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@torch.no_grad()
def convert(module: nn.Module, precision: Precision) -> None:
    """Convert fp32 parameters to a precision in place, except those of batch norms, whose statistics need fp32.

    Args:
        module: Model to convert.
        precision: "bf16" or "fp16"; "fp32" changes nothing.
    """
    if precision == "fp32":
        return
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            continue
        for parameter in layer.parameters(recurse=False):
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(DTYPES[precision])


def cast_input(x: Any, precision: Precision) -> Any:
    """Return a floating-point tensor in the precision of the model; return any other input unchanged.

    Args:
        x: Input of the model.
        precision: Precision of the model's parameters.
    """
    if precision != "fp32" and torch.is_tensor(x) and x.is_floating_point():
        return x.to(DTYPES[precision])
    return x
