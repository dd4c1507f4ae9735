"""Comparison of the first steps of a script on all ranks with the same steps in one process (`--check`).

Both stop after a number of optimizer steps. Compared are the losses whose backward was called, and the parameters
after the last step. Files that the script writes in these steps are written.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpitrain.errors import EXIT_DONE, EXIT_FAILED

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative; 16-bit parameters: 1e-2
_TIMEOUT = 3600.0  # seconds for the steps in one process


class EnoughSteps(BaseException):
    """End of a script whose steps are compared; not an error, so that scripts do not catch it."""


class StepRecorder:
    """Record of losses and parameters of the first steps.

    Attributes:
        losses: Values whose backward was called.

    Args:
        steps: Steps of optimizers after which the script ends.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._number = steps, 0
        self._optimizers: list[Any] = []
        self.losses: list[float] = []

    def install(self) -> None:
        """Record from now on."""
        backward = torch.Tensor.backward
        recorder = self

        def record(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            if self.numel() == 1:
                recorder.losses.append(self.item())
            backward(self, *args, **kwargs)

        torch.Tensor.backward = record  # type: ignore[method-assign]
        register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if all(each is not optimizer for each in self._optimizers):
            self._optimizers.append(optimizer)
        self._number += 1
        if self._number >= self._steps:
            raise EnoughSteps

    def parameters(self) -> list[torch.Tensor]:
        """Return copies of the parameters of all optimizers, in order."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return [p.detach().clone() for group in groups for p in group["params"]]


def record_alone(arguments: list[str]) -> None:
    """Record the steps in this process, into a file.

    Args:
        arguments: File, number of steps, seed, the script and its arguments.
    """
    from mpitrain.run.seeds import set_seeds

    path, steps, seed, *words = arguments
    recorder = StepRecorder(int(steps))
    recorder.install()
    set_seeds(int(seed))
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    with suppress(EnoughSteps):
        runpy.run_path(os.path.abspath(words[0]), run_name="__main__")
    torch.save({"losses": json.dumps(recorder.losses), "parameters": recorder.parameters()}, path)


def compare(recorder: StepRecorder, steps: int, seed: int, words: list[str]) -> tuple[str, int]:
    """Return a line about the differences to one process, and an exit code.

    Args:
        recorder: Record of these ranks.
        steps: Number of steps.
        seed: Seed of the generators at the start of the script.
        words: Script and its arguments.
    """
    code = "import sys; from mpitrain.run.check import record_alone; record_alone(sys.argv[1:])"
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "record")
        command = [sys.executable, "-c", code, path, str(steps), str(seed), *words]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=_TIMEOUT)
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            return f"check: the script fails in one process: {last}", EXIT_FAILED
        record = torch.load(path, weights_only=True)
    losses, parameters, ours = json.loads(record["losses"]), record["parameters"], recorder.parameters()
    if len(losses) != len(recorder.losses) or [p.shape for p in parameters] != [p.shape for p in ours]:
        return "check: one process takes other steps; the script depends on something that is not equal", EXIT_FAILED
    of_losses = max(
        (abs(a - b) / max(abs(a), 1e-300) for a, b in zip(losses, recorder.losses, strict=True)), default=0.0
    )
    differences = [
        ((a.double() - b.double()).abs().max() / a.double().abs().max().clamp_min(1e-300)).item()
        for a, b in zip(parameters, ours, strict=True)
        if a.numel()
    ]
    limit = max((TOLERANCE.get(p.dtype, 1e-2) for p in ours), default=1e-9)
    worst = max([of_losses, *differences])
    of_weights = max(differences, default=0.0)
    line = f"check: {steps} steps; losses differ from one process by {of_losses:.1e}, parameters by {of_weights:.1e}"
    return f"{line} (limit {limit:.0e})", EXIT_DONE if worst <= limit else EXIT_FAILED
