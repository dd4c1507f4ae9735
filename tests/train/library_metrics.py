"""Metrics of torchmetrics, as users name them in train.metrics."""

from __future__ import annotations

import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score, MulticlassPrecision, MulticlassRecall

f1_of_each = MulticlassF1Score(4, average=None)
area = MulticlassAUROC(4)  # which keeps all scores
both = MetricCollection({"recall": MulticlassRecall(4), "precision": MulticlassPrecision(4)})


class spread(Metric):
    """The variance of the largest scores; its state is a list that torchmetrics does not merge over ranks."""

    def __init__(self):
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx=None)

    def update(self, output, y):
        self.seen.append(output.amax(1))

    def compute(self):
        return torch.cat(self.seen).var(correction=0)
