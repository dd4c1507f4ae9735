"""Models that the main job can train: gpt, resnet, mlp, and the user's own by `model.factory`."""

from mpitrain.models.build import build_model
from mpitrain.models.task import Task

__all__ = ["Task", "build_model"]
