"""The data of a run: the training and the held-out samples, the batches of a rank, and the microbatches in them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from mpitrain.comm import Communicator
from mpitrain.comm.memory.device import CPU
from mpitrain.config.settings import Config
from mpitrain.data import (
    Batch,
    Dataset,
    Loader,
    SampleOrder,
    Share,
    open_dataset,
    read_manifest,
    resolve,
    stage_on_nodes,
    staged_folder,
)
from mpitrain.data.on_device import pin
from mpitrain.errors import InputError
from mpitrain.mesh import Mesh
from mpitrain.trainer.folder import together


def open_data(config: Config, world: Communicator) -> tuple[Dataset, Dataset | None]:
    """The training and the held-out samples; what is not there yet is made once per node. Collective.

    Raises InputError on all ranks where any of them cannot read the data set, or where it is too small for a batch.
    """
    path, sequence = config.data.path, config.model.sequence
    together(world, lambda: resolve(path) if world.local_rank == 0 else None)
    stage = config.data.stage
    if stage:
        stage_on_nodes(world, path, Path(stage))

    def opened() -> tuple[Dataset, Dataset | None]:
        folder = staged_folder(resolve(path), Path(stage)) if stage else resolve(path)
        data = open_dataset(folder, sequence=sequence)
        evaluated = "held_out" in read_manifest(folder).splits
        held_out = open_dataset(folder, "held_out", sequence=sequence) if evaluated else None
        if len(data) < config.train.batch:
            raise InputError(
                f"data set {folder} has {len(data)} samples, fewer than train.batch {config.train.batch}; "
                "give more data or a smaller train.batch"
            )
        return data, held_out

    return together(world, opened)


def batches(config: Config, share: Share, data: Dataset, position: int, device: torch.device = CPU) -> Loader:
    """This rank's share of every global batch from sample `position` of the run's order on.

    share: Gives (first, last) of its samples. device: What they are for (see `on_device`).
    """
    return Loader(
        data,
        SampleOrder(len(data), config.run.seed),
        batch=config.train.batch,
        share=share,
        position=position,
        workers=config.data.workers,
        finish=partial(pin, to=device),
    )


def microbatch_size(config: Config, mesh: Mesh, samples: int = 0) -> int:
    """Samples of a microbatch; 0: all that a virtual worker has. A pipeline gets two a stage unless told otherwise.

    samples: Of a batch that the ranks of the mesh share; 0: a global batch.
    """
    if config.train.microbatch or mesh.pipeline.size == 1:
        return config.train.microbatch
    return max(1, -(-(samples or config.train.batch) // (mesh.data.size * 2 * mesh.pipeline.size)))


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
