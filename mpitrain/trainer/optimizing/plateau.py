"""A learning rate that falls when the held-out loss does not: torch.optim.lr_scheduler.ReduceLROnPlateau."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from mpitrain.config.training import OptimSection
from mpitrain.errors import refusal

PLATEAU = ReduceLROnPlateau.__name__
_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


class PlateauSchedule:
    """The rate that torch's ReduceLROnPlateau gives, told the held-out loss of each evaluation.

    `min_lr` is optim.lr_end where the options lack it. Unlike other schedules it has a state, which checkpoints keep.

    Args:
        section: Its options, and the first rate.

    Raises:
        InputError: It has no such option, or refuses one.
    """

    def __init__(self, section: OptimSection) -> None:
        options = {"min_lr": section.lr_end} | section.schedule_options
        known = [name for name in inspect.signature(ReduceLROnPlateau).parameters if name not in ("optimizer", "mode")]
        if options.pop("mode", "min") != "min":
            raise refusal(
                f"optim.schedule_options: {PLATEAU} follows the held-out loss, which is to fall; use mode min"
            )
        if unknown := sorted(set(options) - set(known)):
            raise refusal(f"optim.schedule_options: {PLATEAU} has no {', '.join(unknown)}; it has {', '.join(known)}")
        self._optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=section.lr)
        try:
            self._plateau = ReduceLROnPlateau(self._optimizer, **options)
        except (TypeError, ValueError) as error:
            raise refusal(f"optim.schedule: {PLATEAU} refuses optim.schedule_options: {error}") from None

    def rate(self, step: int) -> float:
        """The rate of the steps up to the next evaluation."""
        return float(self._optimizer.param_groups[0]["lr"])

    def observe(self, loss: float) -> None:
        """Take the loss of an evaluation into account."""
        self._plateau.step(loss)

    def state(self) -> dict[str, Any]:
        """What `load` goes on from, as JSON has it, which knows no infinity."""
        kept = {name: getattr(self._plateau, name) for name in _STATE}
        return kept | {"rate": self.rate(0), "best": kept["best"] if math.isfinite(kept["best"]) else None}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        for name in _STATE:
            setattr(self._plateau, name, state[name])
        self._plateau.best = math.inf if state["best"] is None else state["best"]
        self._optimizer.param_groups[0]["lr"] = state["rate"]
