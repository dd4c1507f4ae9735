"""Data of a run: data sets, the batches and microbatches of a rank, and class weights.

With train.class_weights, the loss of a step equals torch.nn.CrossEntropyLoss(weight) of the whole global batch, however
ranks and microbatches divide it: the sum of w[y] times the cross-entropy of each sample, divided by the sum of w[y].
The divisor depends only on the targets, so the ranks add their class counts before the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from mpitrain.choices import Augmentation
from mpitrain.comm import Communicator
from mpitrain.comm.memory.device import CPU
from mpitrain.config.settings import Config
from mpitrain.data import Batch, Dataset, Description, Loader, Share, resolve, stage_on_nodes, staged_folder
from mpitrain.data.folders import agree_on_errors
from mpitrain.data.format import HELD_OUT, TRAIN
from mpitrain.data.mix import check_data, data_paths, open_split
from mpitrain.data.on_device import Augment, pin
from mpitrain.data.user_dataset import ENDLESS, UserAugment, UserDataset
from mpitrain.errors import refusal
from mpitrain.layers.loss_terms import Counts, counted, counts_samples, counts_targets, criterion_of
from mpitrain.layout.mesh import Mesh
from mpitrain.models.losses import WeightedCrossEntropy, cross_entropy
from mpitrain.models.task import Task
from mpitrain.pipe.schedule import default_microbatches
from mpitrain.shard.virtual_workers import VirtualWorkers

_CHUNK = 1024  # samples read at a time to count classes


@dataclass(frozen=True)
class GroupPlaces:
    """Place of this rank. A group is the set of ranks that take each step together.

    Attributes:
        mesh: Ranks of this rank's group.
        workers: Division of the group's part of a global batch.
        everyone: Ranks of all groups that have the same part of the model as this rank.
        evaluating: Division of held-out samples over `everyone`, with the virtual workers of all groups.
        first_worker: Number of virtual workers in the groups before this one.
    """

    mesh: Mesh
    workers: VirtualWorkers
    everyone: Communicator
    evaluating: VirtualWorkers
    first_worker: int = 0


def open_data(config: Config, world: Communicator) -> tuple[Dataset, Dataset | None]:
    """Return the training and the held-out samples, the latter None if there are none. Collective.

    Data sets that do not exist yet are made or staged once per node.

    Args:
        config: The settings.
        world: Ranks that train.

    Raises:
        InputError: On all ranks, if any rank cannot read a data set, or if it is too small for a batch.
    """
    paths, stage = [] if config.data.factory else data_paths(config), config.data.stage
    agree_on_errors(world, lambda: [resolve(path) for path in paths] if world.local_rank == 0 else None)
    for path in paths if stage else []:
        stage_on_nodes(world, path, Path(stage))

    def find(path: str) -> Path:
        return staged_folder(resolve(path), Path(stage)) if stage else resolve(path)

    def open_both() -> tuple[Dataset, Dataset | None]:
        threads = world.process.cores.per_rank
        data, held_out = (open_split(config, split, find, threads) for split in (TRAIN, HELD_OUT))
        assert data is not None
        check_data(config, data)
        augment_of(config).check(data.description)
        UserAugment(user_augmentations(config), config.run.seed).check(data)
        return data, held_out

    data, held_out = agree_on_errors(world, open_both)
    if isinstance(data, UserDataset):
        _require_equal_data(config, world, data)
    return data, held_out


def _require_equal_data(config: Config, world: Communicator, data: UserDataset) -> None:
    """Raise InputError unless data.factory made the same data set on all ranks. Collective."""
    if data.is_stream and config.parallel.mode != "sync":
        raise refusal(
            f"data.factory {config.data.factory} is a stream, which needs parallel.mode sync, but the mode is "
            f"{config.parallel.mode}; return a torch Dataset, or set parallel.mode to sync"
        )
    if config.train.epochs and len(data) == ENDLESS:
        raise refusal(
            f"train.epochs needs the length of the data, which the stream of data.factory {config.data.factory} does "
            "not have; give it a method __len__, or set train.steps"
        )
    seen = world.all_gather_object([data.description.identity, data.fingerprint])
    if other := next((rank for rank, each in enumerate(seen) if each != seen[0]), 0):
        raise refusal(
            f"data.factory {config.data.factory} gives other samples on rank {other} than on rank 0; return the whole "
            "data set on every rank, with its random choices seeded: mpitrain divides it among the ranks"
        )


def batches(
    config: Config, share: Share, data: Dataset, position: int, device: torch.device = CPU, *, step: int = 0
) -> Loader:
    """Return a loader of this rank's share of every global batch, from sample `position` of the run's order on.

    Args:
        config: The settings.
        share: Function that returns the range (first, last) of this rank's samples in a batch.
        data: The training data set.
        position: First sample, counted in the run's order.
        device: Device that the batches are moved to later (see `on_device`).
        step: Steps done.
    """
    augment, workers = augmentation(config, data), config.data.workers
    if isinstance(data, UserDataset) and (data.draws or data.is_stream):
        workers = 0 if data.draws else min(1, workers)  # one thread reads a stream in order

    def finish(batch: Batch) -> Batch:
        return pin(augment(batch), device)

    return Loader(
        data,
        data.order(config.run.seed),
        batch=config.train.batch,
        share=share,
        position=position,
        warmup=config.train.batch_sizes.warmup_after(step),
        workers=workers,
        finish=finish,
    )


def augmentation(config: Config, data: Dataset) -> Callable[[Batch], Batch]:
    """Return the function that augments a batch for training.

    Args:
        config: The settings.
        data: The training data set.
    """
    augment, user_augment = augment_of(config), UserAugment(user_augmentations(config), config.run.seed)

    def change(batch: Batch) -> Batch:
        places = batch.position + batch.first + np.arange(len(batch.ids))
        epochs = places if config.data.mix else places // len(data)  # in a mix, samples repeat at any time
        x, y = user_augment(replace(batch, x=augment(batch.x, batch.ids, epochs)), epochs)
        return replace(batch, x=x, y=y)

    return change


def augment_of(config: Config) -> Augment:
    """Return the augmentation of training images."""
    names = tuple(name for name in get_args(Augmentation) if name in config.data.augment)
    return Augment(names, config.data.augment_padding, config.run.seed)


def user_augmentations(config: Config) -> tuple[str, ...]:
    """Return the user's own functions in data.augment."""
    return tuple(name for name in config.data.augment if ":" in name)


def microbatch_size(config: Config, mesh: Mesh, samples: int = 0) -> int:
    """Return the samples of a microbatch; 0 means all samples of a virtual worker.

    A pipeline divides a batch into `default_microbatches` unless train.microbatch is set.

    Args:
        config: The settings.
        mesh: Ranks that share the batch.
        samples: Samples of the batch; 0 for those of a global batch.
    """
    return microbatch_on(config, mesh.readers.size, mesh.stages.size, samples)


def microbatch_on(config: Config, readers: int, stages: int, samples: int = 0) -> int:
    """Return `microbatch_size` for given numbers of ranks and stages.

    Args:
        config: The settings.
        readers: Ranks that read different samples.
        stages: Stages of the pipeline; 1 without a pipeline.
        samples: Samples of the batch; 0 for those of a global batch.
    """
    if config.train.microbatch or stages == 1:
        return config.train.microbatch
    return -(-(samples or config.train.batch) // (readers * default_microbatches(stages)))


def with_microbatch(config: Config, ranks: int) -> Config:
    """Return the settings with train.microbatch derived from train.accumulation, if the latter is set.

    Args:
        config: The settings.
        ranks: Number of all ranks.
    """
    train, parallel = config.train, config.parallel
    if not train.accumulation:
        return config
    columns = max(1, (ranks - parallel.servers) // parallel.ranks_per_data)
    size = -(-train.batch // (columns * train.accumulation))
    return config.model_copy(update={"train": train.model_copy(update={"microbatch": size})})


def seed_worker(seed: int, step: int, worker: int) -> None:
    """Seed torch's generators for a step of a virtual worker.

    The seed does not depend on earlier steps, so a resumed run draws the same random numbers, for example in dropout.

    Args:
        seed: Seed of the run.
        step: Steps done.
        worker: Number of the virtual worker.
    """
    torch.manual_seed((seed * 1_000_003 + step) * 1_000_003 + worker & (1 << 63) - 1)


def gather_ids(places: GroupPlaces, batch: Batch) -> list[int]:
    """Return the sample ids of the global batch, in order. Collective over the ranks that share it.

    Args:
        places: Place of this rank.
        batch: This rank's share of the global batch.
    """
    local_ids = [] if places.mesh.parts.rank else batch.ids.tolist()  # the other ranks have parts of the same samples
    return [number for ids in places.everyone.all_gather_object(local_ids) for number in ids]


def weigh_step(criterion: WeightedCrossEntropy, y: torch.Tensor, comm: Communicator) -> None:
    """Set the scale of a class-weighted loss from the targets of a step. Collective over `comm`.

    Args:
        criterion: Loss with class weights.
        y: Targets of this rank, int64, any shape.
        comm: Ranks that share the step's batch.
    """
    weights = criterion.weights.to(y.device)
    counts = torch.zeros(len(weights), dtype=torch.int64, device=y.device)
    counts.index_add_(0, y.flatten(), torch.ones_like(y).flatten())
    comm.all_reduce(counts)
    criterion.scale = (counts.sum() / (counts * weights.double()).sum()).float()


def counts_of(config: Config, task: Task, description: Description) -> Counts | None:
    """Return the function from targets to the count that their mean loss is over; None if that follows from shapes.

    Args:
        config: The settings.
        task: Model and loss.
        description: Description of the data.

    Raises:
        InputError: On all ranks, if parallel.slices divides samples with masked targets and the loss is a mean over
            samples.
    """
    loss, y = task.loss, torch.empty(0, dtype=torch.from_numpy(np.empty(0, description.y_dtype)).dtype)
    if description.masked and config.parallel.slices > 1 and counts_samples(loss):
        raise refusal(
            f"parallel.slices {config.parallel.slices} does not support data with masked targets, because their number "
            "differs between slices; set parallel.slices to 1"
        )
    unmasked = description.classes or (description.kind == "tokens" and not description.masked)  # no target is masked
    weighted = isinstance(getattr(criterion_of(loss), "weight", None), torch.Tensor)
    criterion_counts = getattr(criterion_of(loss), "counted", None) is not None
    if not counts_targets(loss, y) or (unmasked and not weighted and not criterion_counts):
        return None
    return partial(counted, loss)


def class_weights(config: Config, task: Task, data: Dataset, world: Communicator) -> WeightedCrossEntropy | None:
    """Add the weights of train.class_weights to the loss of a task. Collective.

    Args:
        config: The settings.
        task: Model and loss; its loss is replaced.
        data: Training data set, read if the weights are "balanced".
        world: Ranks that train.

    Returns:
        Loss with the weights; None if train.class_weights is not set.

    Raises:
        InputError: On all ranks, if the loss is not the cross-entropy of classes, parallel.mode is not sync, or the
            number of weights differs from that of the classes.
    """
    setting, classes = config.train.class_weights, data.description.classes
    if not setting:
        return None
    if config.parallel.mode != "sync":
        raise refusal(
            f"train.class_weights needs parallel.mode sync, in which all ranks know a step's targets, but the mode is "
            f"{config.parallel.mode}; set parallel.mode to sync, or remove train.class_weights"
        )
    if not classes or getattr(task.module, "criterion", None) is not cross_entropy:
        raise refusal(
            "train.class_weights supports only models of mpitrain or Hugging Face on data with classes; use the "
            "weights in the loss of your model, or remove train.class_weights"
        )
    if setting != "balanced" and len(setting) != len(classes):
        raise refusal(
            f"train.class_weights has {len(setting)} weights, but the data have {len(classes)} classes "
            f"({', '.join(classes[:4])}{', ...' if len(classes) > 4 else ''}); give one weight for each class"
        )
    weights = _balanced(data, world) if setting == "balanced" else torch.tensor(setting, dtype=torch.float32)
    task.module.criterion = criterion = WeightedCrossEntropy(weights)  # type: ignore[assignment]
    return criterion


def _balanced(data: Dataset, world: Communicator) -> torch.Tensor:
    """Return weights that give each class of the training samples equal influence, as in scikit-learn. Collective."""
    classes, samples = len(data.description.classes or ()), len(data)

    def count_classes() -> torch.Tensor:
        local_counts = np.zeros(classes, dtype=np.int64)
        for first in range(world.rank * _CHUNK, samples, world.size * _CHUNK):
            _, y = data.read(np.arange(first, min(first + _CHUNK, samples)))
            local_counts += np.bincount(y.reshape(-1), minlength=classes)
        return torch.from_numpy(local_counts)

    counts = agree_on_errors(world, count_classes)
    world.all_reduce(counts)
    return (counts.sum() / (classes * counts.clamp(min=1))).float()
