"""Class weights in the loss of training: train.class_weights.

The loss of a step is what torch.nn.CrossEntropyLoss(weight) gives for the whole global batch, however ranks and
microbatches divide it: the sum of w[y] times the cross-entropy of each sample, over the sum of w[y] of all of them. The
latter is known from the targets alone, so the ranks add their counts of each class before the forward pass.
"""

from __future__ import annotations

import numpy as np
import torch

from mpitrain.comm import Communicator
from mpitrain.config.settings import Config
from mpitrain.data import Dataset
from mpitrain.errors import refusal
from mpitrain.models.losses import WeightedCrossEntropy, cross_entropy
from mpitrain.models.task import Task
from mpitrain.trainer.folder import together

_AT_ONCE = 1024  # samples that are read for their classes


class ClassWeights:
    """The weights of the classes, inside the loss of a task that is to be trained.

    Args:
        weights: Weight of each class, float32 [classes].
        task: The task, whose criterion is replaced.
    """

    def __init__(self, weights: torch.Tensor, task: Task) -> None:
        self._criterion = WeightedCrossEntropy(weights)
        task.module.criterion = self._criterion  # type: ignore[assignment]

    def begin_step(self, y: torch.Tensor, comm: Communicator) -> None:
        """Take note of the targets of a step. Collective over the ranks that share its batch.

        Args:
            y: Targets of this rank, int64, any shape.
            comm: These ranks.
        """
        weights = self._criterion.weights.to(y.device)
        counts = torch.zeros(len(weights), dtype=torch.int64, device=y.device)
        counts.index_add_(0, y.flatten(), torch.ones_like(y).flatten())
        comm.all_reduce(counts)
        self._criterion.scale = (counts.sum() / (counts * weights.double()).sum()).float()


def class_weights(config: Config, task: Task, data: Dataset, world: Communicator) -> ClassWeights | None:
    """Put the weights that train.class_weights asks for into the loss of a task. Collective.

    Returns:
        The weights; None where none are asked for.

    Raises:
        InputError: On all ranks, where the loss is not the cross-entropy of classes, or not so many weights are given.
    """
    asked, classes = config.train.class_weights, data.description.classes
    if not asked:
        return None
    if config.parallel.mode != "sync":
        raise refusal(
            f"train.class_weights is for parallel.mode sync, where all ranks know a step's targets, and the mode is "
            f"{config.parallel.mode}; set parallel.mode to sync, or leave it out"
        )
    if not classes or getattr(task.module, "criterion", None) is not cross_entropy:
        raise refusal(
            "train.class_weights is for models of mpitrain or Hugging Face on data with classes; give the loss of "
            "your model the weights itself, or leave it out"
        )
    if asked == "balanced":
        return ClassWeights(_balanced(data, world), task)
    if len(asked) != len(classes):
        raise refusal(
            f"train.class_weights has {len(asked)} weights, and the data have {len(classes)} classes "
            f"({', '.join(classes[:4])}{', ...' if len(classes) > 4 else ''}); give one for each"
        )
    return ClassWeights(torch.tensor(asked, dtype=torch.float32), task)


def _balanced(data: Dataset, world: Communicator) -> torch.Tensor:
    """Return weights with which every class of the training samples counts alike, as in scikit-learn. Collective."""
    classes, samples = len(data.description.classes or ()), len(data)

    def counted() -> torch.Tensor:
        found = np.zeros(classes, dtype=np.int64)
        for first in range(world.rank * _AT_ONCE, samples, world.size * _AT_ONCE):
            _, y = data.read(np.arange(first, min(first + _AT_ONCE, samples)))
            found += np.bincount(y.reshape(-1), minlength=classes)
        return torch.from_numpy(found)

    counts = together(world, counted)
    world.all_reduce(counts)
    return (counts.sum() / (classes * counts.clamp(min=1))).float()
