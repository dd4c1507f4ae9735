"""The data of a run: its samples, the batches of a rank, the microbatches in them, and the weights of classes.

With train.class_weights the loss of a step is what torch.nn.CrossEntropyLoss(weight) gives for the whole global batch,
however ranks and microbatches divide it: the sum of w[y] times the cross-entropy of each sample, over the sum of their
w[y]. The latter is known from the targets alone, so the ranks add their counts of each class before the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from mpitrain.comm import Communicator
from mpitrain.comm.memory.device import CPU
from mpitrain.config.settings import Config
from mpitrain.data import Batch, Dataset, Description, Loader, Share, resolve, stage_on_nodes, staged_folder
from mpitrain.data.format import HELD_OUT, TRAIN
from mpitrain.data.mix import check_data, data_paths, open_split
from mpitrain.data.on_device import Augment, pin
from mpitrain.errors import refusal
from mpitrain.layers.loss_terms import Counts, counted, counts_samples, counts_targets, criterion_of
from mpitrain.layout.mesh import Mesh
from mpitrain.models.losses import WeightedCrossEntropy, cross_entropy
from mpitrain.models.task import Task
from mpitrain.pipe.schedule import default_microbatches
from mpitrain.shard.virtual_workers import VirtualWorkers
from mpitrain.trainer.folder import together

_AT_ONCE = 1024  # samples that are read for their classes


@dataclass(frozen=True)
class GroupPlaces:
    """The place of this rank. A group is the ranks that take each step as one.

    Attributes:
        mesh: The ranks of this rank's group.
        workers: How the group divides its part of a global batch.
        everyone: All ranks that have the same part of the model as this one, of all groups.
        evaluating: How these divide held-out samples; as many virtual workers as all groups have together.
        first_worker: The virtual workers of the groups before this one: where its own are in a numbering of all.
    """

    mesh: Mesh
    workers: VirtualWorkers
    everyone: Communicator
    evaluating: VirtualWorkers
    first_worker: int = 0


def open_data(config: Config, world: Communicator) -> tuple[Dataset, Dataset | None]:
    """The training and the held-out samples; what is not there yet is made once per node. Collective.

    Raises InputError on all ranks where any of them cannot read the data set, or where it is too small for a batch.
    """
    paths, stage = data_paths(config), config.data.stage
    together(world, lambda: [resolve(path) for path in paths] if world.local_rank == 0 else None)
    for path in paths if stage else []:
        stage_on_nodes(world, path, Path(stage))

    def find(path: str) -> Path:
        return staged_folder(resolve(path), Path(stage)) if stage else resolve(path)

    def opened() -> tuple[Dataset, Dataset | None]:
        data, held_out = open_split(config, TRAIN, find), open_split(config, HELD_OUT, find)
        assert data is not None
        check_data(config, data)
        augment_of(config).check(data.description)
        return data, held_out

    return together(world, opened)


def batches(
    config: Config, share: Share, data: Dataset, position: int, device: torch.device = CPU, *, step: int = 0
) -> Loader:
    """This rank's share of every global batch from sample `position` of the run's order on.

    share: Gives (first, last) of its samples. device: What they are for (see `on_device`). step: Steps that are done.
    """
    augment = augment_of(config)

    def finish(batch: Batch) -> Batch:
        places = batch.position + batch.first + np.arange(len(batch.ids))
        epochs = places if config.data.mix else places // len(data)  # in a mix, samples come again at any time
        return pin(replace(batch, x=augment(batch.x, batch.ids, epochs)), device)

    return Loader(
        data,
        data.order(config.run.seed),
        batch=config.train.batch,
        share=share,
        position=position,
        warmup=config.train.batch_sizes.warmup_after(step),
        workers=config.data.workers,
        finish=finish,
    )


def augment_of(config: Config) -> Augment:
    """Return the augmentation of the images of a training batch."""
    return Augment(config.data.augment, config.data.augment_padding, config.run.seed)


def microbatch_size(config: Config, mesh: Mesh, samples: int = 0) -> int:
    """Samples of a microbatch; 0: all that a virtual worker has. A pipeline gets `default_microbatches` of a batch.

    samples: Of a batch that the ranks of the mesh share; 0: a global batch.
    """
    return microbatch_on(config, mesh.readers.size, mesh.stages.size, samples)


def microbatch_on(config: Config, readers: int, stages: int, samples: int = 0) -> int:
    """As `microbatch_size`, on so many ranks that read different samples, and stages."""
    if config.train.microbatch or stages == 1:
        return config.train.microbatch
    return -(-(samples or config.train.batch) // (readers * default_microbatches(stages)))


def with_microbatch(config: Config, ranks: int) -> Config:
    """Return the settings with the train.microbatch that train.accumulation makes at so many ranks, if it is given."""
    train, parallel = config.train, config.parallel
    if not train.accumulation:
        return config
    columns = max(1, (ranks - parallel.servers) // parallel.ranks_per_data)
    size = -(-train.batch // (columns * train.accumulation))
    return config.model_copy(update={"train": train.model_copy(update={"microbatch": size})})


def microbatches(x: torch.Tensor, y: torch.Tensor, samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(x, y) of at most `samples` samples each; 0: all at once."""
    size = samples or max(1, len(x))
    return [(x[lo : lo + size], y[lo : lo + size]) for lo in range(0, len(x), size)]


def seed_worker(seed: int, step: int, worker: int) -> None:
    """Dropout of a step depends on nothing before it, so a resumed run draws what the first would have drawn."""
    torch.manual_seed((seed * 1_000_003 + step) * 1_000_003 + worker & (1 << 63) - 1)


def gather_ids(places: GroupPlaces, batch: Batch) -> list[int]:
    """The sample ids of the global batch, in order. Collective over the ranks that share it."""
    own = [] if places.mesh.parts.rank else batch.ids.tolist()  # others have parts of the same samples
    return [number for ids in places.everyone.all_gather_object(own) for number in ids]


def weigh_step(criterion: WeightedCrossEntropy, y: torch.Tensor, comm: Communicator) -> None:
    """Tell the loss the targets of a step. Collective over the ranks that share its batch.

    Args:
        criterion: The loss with the weights of the classes.
        y: Targets of this rank, int64, any shape.
        comm: These ranks.
    """
    weights = criterion.weights.to(y.device)
    counts = torch.zeros(len(weights), dtype=torch.int64, device=y.device)
    counts.index_add_(0, y.flatten(), torch.ones_like(y).flatten())
    comm.all_reduce(counts)
    criterion.scale = (counts.sum() / (counts * weights.double()).sum()).float()


def counts_of(config: Config, task: Task, description: Description) -> Counts | None:
    """Return what says how much the mean loss of some targets is over; None where shapes alone tell.

    Raises:
        InputError: On all ranks, where parallel.slices divides masked samples that a loss takes a mean over.
    """
    loss, y = task.loss, torch.empty(0, dtype=torch.from_numpy(np.empty(0, description.y_dtype)).dtype)
    if description.masked and config.parallel.slices > 1 and counts_samples(loss):
        raise refusal(
            f"parallel.slices {config.parallel.slices} cannot weigh targets that are not trained on, which differ from "
            "slice to slice, and these data have such; set parallel.slices to 1"
        )
    whole = description.classes or (description.kind == "tokens" and not description.masked)  # no target is masked
    weighted = isinstance(getattr(criterion_of(loss), "weight", None), torch.Tensor)
    says = getattr(criterion_of(loss), "counted", None) is not None
    if not counts_targets(loss, y) or (whole and not weighted and not says):
        return None
    return partial(counted, loss)


def class_weights(config: Config, task: Task, data: Dataset, world: Communicator) -> WeightedCrossEntropy | None:
    """Put the weights that train.class_weights asks for into the loss of a task. Collective.

    Returns:
        The loss with the weights; None where none are asked for.

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
    if asked != "balanced" and len(asked) != len(classes):
        raise refusal(
            f"train.class_weights has {len(asked)} weights, and the data have {len(classes)} classes "
            f"({', '.join(classes[:4])}{', ...' if len(classes) > 4 else ''}); give one for each"
        )
    weights = _balanced(data, world) if asked == "balanced" else torch.tensor(asked, dtype=torch.float32)
    task.module.criterion = criterion = WeightedCrossEntropy(weights)  # type: ignore[assignment]
    return criterion


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
