"""The frozen weights under adapters: they are not saved, but come from their source again, and must be the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mpitrain.errors import refusal
from mpitrain.storage.hdf5 import crc32


@dataclass(frozen=True)
class BaseWeights:
    """What is frozen in a model with adapters.

    Attributes:
        source: Where it comes from, the setting.
        names: Of the parameters, in the whole model.
        crc: Of their names, shapes and values.
        adapter: What the adapters are: rank, alpha and the like.
        seed: Of torch's generator when the model was made, from which weights without a file come.
        checkpoint: The folder that they come from, where model.base names one.
    """

    source: str
    names: frozenset[str]
    crc: int
    adapter: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    checkpoint: str = ""

    @staticmethod
    def of(module: nn.Module, source: str, adapter: dict[str, Any] | None = None, checkpoint: str = "") -> BaseWeights:
        """Of a whole model that was just made, what it does not train. Every value is read once."""
        frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        return BaseWeights(
            source,
            frozenset(name for name, _ in frozen),
            _crc_of(frozen),
            adapter or {},
            torch.initial_seed(),
            checkpoint,
        )

    def values(self) -> dict[str, Any]:
        """What a checkpoint says of it."""
        told = {"source": self.source, "crc32": self.crc, "seed": self.seed, "adapter": self.adapter}
        return told | ({"checkpoint": self.checkpoint} if self.checkpoint else {})

    def require(self, found: Any) -> None:
        """Raise InputError, on all ranks alike, unless a checkpoint's values are of these weights and adapters."""
        if not isinstance(found, dict):
            raise refusal(
                f"the checkpoint holds a whole model, and this run trains adapters of {self.source}; give another "
                "run.dir, or set model.lora to 0"
            )
        if found.get("crc32") != self.crc:
            raise refusal(
                f"the checkpoint's adapters are for other base weights than those of {self.source} now (they came from "
                f"{found.get('source')}, run.seed {found.get('seed')}); give these again, or another run.dir"
            )
        if (there := found.get("adapter")) != self.adapter:
            raise refusal(
                f"the checkpoint's adapters are {_told(there)}, and this run's {_told(self.adapter)}; set model.lora, "
                "lora_alpha and lora_targets as they were, or give another run.dir"
            )


def require_whole(found: Any) -> None:
    """Raise InputError, on all ranks alike, for a checkpoint's values that are of adapters, where a model is whole."""
    if isinstance(found, dict):
        raise refusal(
            f"the checkpoint holds adapters of {found.get('source')} alone ({_told(found.get('adapter'))}); set "
            "model.lora and model.factory as they were, or give another run.dir"
        )


def _told(adapter: Any) -> str:
    known = adapter if isinstance(adapter, dict) else {}
    names = known.get("layers", ())
    more = f" in {len(names)} layers" if names else ""
    return f"of rank {known.get('rank')} and alpha {known.get('alpha')}{more}" if known else "others"


def _crc_of(named: Iterable[tuple[str, nn.Parameter]]) -> int:
    crc = 0
    for name, parameter in named:
        crc = crc32(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode(), crc)
        data = parameter.detach().cpu().contiguous().reshape(-1)
        crc = crc32(data.view(torch.uint8).numpy(), crc) if data.numel() else crc
    return crc
