"""What is predicted of a layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpitrain.planner.layouts import ParallelLayout


@dataclass(frozen=True)
class Prediction:
    """Time and memory of a layout on so many ranks of a machine.

    Attributes:
        layout: The layout.
        seconds: Of one step.
        parts: Seconds of the step by part, in the order in which they are shown; they add up to `seconds`: compute,
            tensor, pipeline (idle and messages), gradients (communication not hidden), update, parameters
            (communication of updated or gathered parameters not hidden), other.
        memory: Bytes on the rank that needs most, by category, in the order in which they are shown: parameters,
            gradients, states, activations, buffers, working, process.
        samples: Of a global batch, so that samples / seconds is the throughput.
    """

    layout: ParallelLayout
    seconds: float
    parts: Mapping[str, float]
    memory: Mapping[str, float]
    samples: int

    @property
    def total_memory(self) -> float:
        """Bytes of all categories."""
        return sum(self.memory.values())
