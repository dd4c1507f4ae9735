"""The whole model of a run, before it is divided; with model.base its trained weights are read by every rank."""

from __future__ import annotations

from mpitrain.comm import Communicator
from mpitrain.config.training import ModelSection
from mpitrain.data import Description
from mpitrain.loading import build_task
from mpitrain.models.task import Task
from mpitrain.trainer.folder import together


def make_task(section: ModelSection, description: Description, world: Communicator) -> Task:
    """The same model on every rank: torch's generator was seeded alike just before. Collective with model.base.

    Raises:
        InputError: See `build_model` and `build_task`; what is wrong with a base is raised on all ranks.
        CheckpointError: The base is damaged.
    """
    if not section.base:
        return build_task(section, description)
    return together(world, lambda: build_task(section, description))
