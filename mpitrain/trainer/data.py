"""The data of a run: the training and the held-out samples, the batches of a rank, and the microbatches in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mpitrain.comm import Communicator
from mpitrain.comm.memory.device import CPU
from mpitrain.config.batch_sizes import BatchSizes
from mpitrain.config.settings import Config
from mpitrain.data import (
    Batch,
    Dataset,
    Loader,
    Share,
    resolve,
    stage_on_nodes,
    staged_folder,
)
from mpitrain.data.format import HELD_OUT, TRAIN
from mpitrain.data.mix import check_data, data_paths, open_split
from mpitrain.data.on_device import Augment, pin
from mpitrain.mesh import Mesh
from mpitrain.pipe.schedules import default_microbatches
from mpitrain.trainer.folder import together


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
        warmup=BatchSizes.of(config.train).warmup_after(step),
        workers=config.data.workers,
        finish=finish,
    )


def augment_of(config: Config) -> Augment:
    """What is done to the images of a training batch."""
    return Augment(config.data.augment, config.data.augment_padding, config.run.seed)


def microbatch_size(config: Config, mesh: Mesh, samples: int = 0) -> int:
    """Samples of a microbatch; 0: all that a virtual worker has. A pipeline gets `default_microbatches` of a batch.

    samples: Of a batch that the ranks of the mesh share; 0: a global batch.
    """
    if config.train.microbatch or mesh.pipeline.size == 1:
        return config.train.microbatch
    return -(-(samples or config.train.batch) // (mesh.data.size * default_microbatches(mesh.pipeline.size)))


def with_microbatch(config: Config, ranks: int) -> Config:
    """Return the settings with the train.microbatch that train.accumulation makes at so many ranks, if it is given."""
    train, parallel = config.train, config.parallel
    if not train.accumulation:
        return config
    columns = max(1, (ranks - parallel.servers) // (parallel.pipeline * parallel.tensor))
    size = -(-train.batch // (columns * train.accumulation))
    return config.model_copy(update={"train": train.model_copy(update={"microbatch": size})})


def microbatches(x: torch.Tensor, y: torch.Tensor, samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(x, y) of at most `samples` samples each; 0: all at once."""
    size = samples or max(1, len(x))
    return [(x[lo : lo + size], y[lo : lo + size]) for lo in range(0, len(x), size)]


def seed_worker(seed: int, step: int, worker: int) -> None:
    """Dropout of a step depends on nothing before it, so a resumed run draws what the first would have drawn."""
    torch.manual_seed((seed * 1_000_003 + step) * 1_000_003 + worker & (1 << 63) - 1)


def gather_ids(everyone: Communicator, batch: Batch) -> list[int]:
    """The sample ids of the global batch, in order. Collective over the ranks that share it."""
    return [number for ids in everyone.all_gather_object(batch.ids.tolist()) for number in ids]
