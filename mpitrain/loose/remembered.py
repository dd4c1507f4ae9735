"""What the server that gives out samples knows, so that others can go on with it when workers died."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpitrain.loose.clock import Applied, Portion
from mpitrain.loose.letters import Commit, StepRecord


@dataclass(frozen=True)
class Told:
    """A part that was applied.

    Attributes:
        worker: Who computed it.
        commit: What it said.
        staleness: What was applied between the sending of its parameters and its own update, in steps.
    """

    worker: int
    commit: Commit
    staleness: float


@dataclass(frozen=True)
class Remembered:
    """What has been applied, and what is known of it.

    Attributes:
        parts: Of each step.
        completed: Steps of which all parts have been applied.
        beyond: Parts of later steps that have been.
        told: Of the steps that are not complete, by step.
        records: Of the steps since all ranks met last.
    """

    parts: int
    completed: int
    beyond: Sequence[Portion] = ()
    told: Mapping[int, Sequence[Told]] = field(default_factory=dict)
    records: Sequence[StepRecord] = ()

    def applied(self) -> Applied:
        """The same to be kept up to date."""
        return Applied(self.parts, self.completed, self.beyond)

    def to_json(self) -> list[Any]:
        """As values that JSON can hold."""
        told = [[step, t.worker, t.staleness, *t.commit] for step, some in self.told.items() for t in some]
        beyond = [[portion.step, portion.part] for portion in self.beyond]
        return [self.parts, self.completed, beyond, told, [list(record) for record in self.records]]

    @staticmethod
    def from_json(values: Sequence[Any]) -> Remembered:
        """From what `to_json` gave."""
        parts, completed, beyond, listed, records = values
        told: dict[int, list[Told]] = {}
        for step, worker, staleness, *commit in listed:
            told.setdefault(step, []).append(Told(worker, Commit(*commit), staleness))
        portions = [Portion(step, part) for step, part in beyond]
        return Remembered(parts, completed, portions, told, [StepRecord(*record) for record in records])
