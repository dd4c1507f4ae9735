"""The optimizer of a DeepSpeed configuration: a class of ours or of torch.optim, and its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpitrain.config.deepspeed.findings import Findings

_ADAM = ("adam", "adamw")
# what each takes over; torch says what it does not know of its other classes
_KNOWN = {
    **{name: {"lr", "betas", "eps", "weight_decay", "amsgrad", "foreach", "fused", "maximize"} for name in _ADAM},
    "lion": {"lr", "betas", "weight_decay"},
    "muon": {"lr", "weight_decay", "momentum", "nesterov", "ns_steps", "betas", "eps"},
    "lamb": {"lr", "betas", "eps", "weight_decay", "bias_correction", "min_coeff", "max_coeff"},
}
_LAMB = {"eps": 1e-8, "min_coeff": 0.01, "max_coeff": 10.0}  # DeepSpeed's defaults where ours are others
_ADAMS_OWN = {"adam_w_mode", "bias_correction"}
# that say how DeepSpeed computes, and not what
_HARMLESS = {"torch_adam", "set_grad_none", "fp32_optimizer_states", "legacy_fusion", "capturable"}
_COMPRESSED = (
    'use "AdamW", whose updates it approximates; fewer bytes go with communication_data_type "bf16", or '
    "comm.compression of a configuration of ours"
)
_BY_WIDTH = 'use {} and "optim.groups" of a configuration of ours, which give parameters rates of their own'
_INSTEAD = {
    "onebitadam": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "onebitlamb": _COMPRESSED.replace("AdamW", "Lamb"),
    "fusedlamb": 'use "Lamb"',
    "muadam": _BY_WIDTH.format('"Adam"'),
    "muadamw": _BY_WIDTH.format('"AdamW"'),
    "musgd": _BY_WIDTH.format('"SGD"'),
    "fusedadam": 'use "Adam", which is fused',
    "cpuadam": 'use "Adam", which is fused',
    "deepspeedcpuadam": 'use "Adam", which is fused',
}


def read_optimizer(
    section: Mapping[str, Any], params: Mapping[str, Any], findings: Findings
) -> tuple[str, dict[str, Any]] | None:
    """(class, options), or None where there is none. DeepSpeed's Adam is AdamW unless it is told otherwise."""
    findings.look(section, "optimizer.", {"type", "params"}, {"legacy_fusion"})
    if not section:
        return None
    if "type" not in section:
        findings.wrong("optimizer.type is missing", "name a class of torch.optim")
        return None
    name = str(section["type"])
    kind = name.lower()
    if kind in _INSTEAD:
        findings.wrong(f"optimizer.type {name} has no counterpart here", _INSTEAD[kind])
        return None
    options = dict(params)
    for key in ("lr", "weight_decay"):
        if key in options:
            options[key] = findings.number(f"optimizer.params.{key}", options[key])
    if kind in _KNOWN:
        taken = _KNOWN[kind] | (_ADAMS_OWN if kind in _ADAM else set())
        findings.look(options, "optimizer.params.", taken, _HARMLESS)
        options = {key: value for key, value in options.items() if key in taken}
    if kind in _ADAM:
        return _adam(kind, options, findings)
    if kind == "lamb":
        return "lamb", _lamb(options, findings)
    return {"lion": "Lion", "muon": "Muon"}.get(kind, name), options


def _adam(kind: str, options: dict[str, Any], findings: Findings) -> tuple[str, dict[str, Any]]:
    decoupled = bool(options.pop("adam_w_mode", True)) or kind == "adamw"
    if options.pop("bias_correction", True):
        return "AdamW" if decoupled else "Adam", options
    for key in sorted(set(options) - {"lr", "betas", "eps", "weight_decay"}):
        if options.pop(key):
            findings.wrong(f"optimizer.params.{key} does not go with bias_correction false", "leave one of them out")
    return "UncorrectedAdamW", options if decoupled else options | {"decoupled": False}


def _lamb(options: dict[str, Any], findings: Findings) -> dict[str, Any]:
    options = _LAMB | options
    for key in _LAMB:
        options[key] = findings.number(f"optimizer.params.{key}", options[key])
    least, most = options.pop("min_coeff"), options.pop("max_coeff")
    if not 0.0 <= least <= most:
        findings.wrong(
            f"optimizer.params.min_coeff {least:g} and max_coeff {most:g} are no range from 0 on",
            "give the smaller one as min_coeff",
        )
    return options | {"least": least, "most": most, "correct": bool(options.pop("bias_correction", True))}


def has_betas(optimizer: tuple[str, Mapping[str, Any]] | None) -> bool:
    """Whether a schedule that moves the momentum finds betas; where the caller brings the optimizer, it may."""
    return optimizer is None or "adam" in optimizer[0].lower() or optimizer[0] in ("Lion", "lamb")
