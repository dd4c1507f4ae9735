"""A reference for parallel.mode local in one process: a model for each group, averaged as in the papers."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from mpitrain.config.learning_rate import LearningRate
from mpitrain.config.settings import Config
from mpitrain.data import open_dataset
from mpitrain.layout.boxes import split
from mpitrain.models import build_model
from mpitrain.trainer.data import batches
from mpitrain.trainer.optimizing import make_optimizer


class Replicas:
    """Groups that train separately, each on its part of every batch; losses: one per step, over all groups."""

    def __init__(self, sections, groups):
        self.config = config = Config.from_dict(sections)
        self.data = open_dataset(config.data.path, sequence=config.model.sequence)
        torch.manual_seed(config.run.seed)
        task = build_model(config.model, self.data.description)
        self.loss, self.losses = task.loss, []
        bounds = split(config.train.batch, groups)
        self.weights = [(hi - lo) / config.train.batch for lo, hi in pairwise(bounds)]
        self.models = [deepcopy(task.module) for _ in range(groups)]
        self.optimizers = [make_optimizer(config.optim, model.named_parameters()) for model in self.models]
        self.schedule = LearningRate.of(config.optim, config.train.steps)

    def theta(self):
        return [parameters_to_vector(model.parameters()).detach().clone() for model in self.models]

    def set_parameters(self, vectors):
        for model, vector in zip(self.models, vectors, strict=True):
            vector_to_parameters(vector.clone(), model.parameters())

    def mean(self, vectors):
        return sum(weight * vector for weight, vector in zip(self.weights, vectors, strict=True))

    def gradients(self, batch):
        total = 0.0
        for g, model in enumerate(self.models):
            self.optimizers[g].zero_grad()
            lo, hi = split(len(batch.x), len(self.models))[g : g + 2]
            loss = self.loss(model(batch.x[lo:hi]), batch.y[lo:hi])
            loss.backward()
            total += self.weights[g] * float(loss.detach())
        self.losses.append(total)

    def update(self, is_joint):
        lr, clip = self.schedule.rate(len(self.losses) - 1), self.config.train.clip
        if is_joint:
            for parameters in zip(*(model.parameters() for model in self.models), strict=True):
                mean = self.mean([p.grad for p in parameters])
                for p in parameters:
                    p.grad = mean.clone()
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            for settings in optimizer.param_groups:
                settings["lr"] = lr
            optimizer.step()

    def train(self):
        """Train all steps and return the averaged parameters."""
        parallel, steps = self.config.parallel, self.config.train.steps
        anchor, before, outer = None, None, None
        with batches(self.config, lambda size: (0, size), self.data, 0) as loader:
            for number, batch in zip(range(1, steps + 1), loader, strict=False):
                if number == parallel.warm + 1:
                    anchor = torch.nn.Parameter(self.theta()[0])
                    mu = parallel.outer_momentum
                    outer = torch.optim.SGD([anchor], lr=parallel.outer_lr, momentum=mu, nesterov=True)
                self.gradients(batch)
                self.update(is_joint=anchor is None)
                if anchor is None or ((number - parallel.warm) % parallel.local_steps and number < steps):
                    continue
                if not parallel.overlap:
                    self.average(outer, anchor, self.theta())
                    self.set_parameters([anchor.detach()] * len(self.models))
                    continue
                theta = self.theta()
                if before is not None:
                    self.average(outer, anchor, before)
                    theta = [anchor.detach() + now - then for now, then in zip(theta, before, strict=True)]
                    self.set_parameters(theta)
                before = theta
                if number == steps:
                    self.average(outer, anchor, theta)
        return anchor.detach()

    def average(self, outer, anchor, theta):
        if self.config.parallel.outer == "nesterov":
            anchor.grad = anchor.detach() - self.mean(theta)
            outer.step()
        else:
            with torch.no_grad():
                anchor.copy_(anchor + self.mean(theta) - anchor if not self.config.parallel.overlap else
                             anchor + self.mean([t - anchor for t in theta]))  # fmt: skip
