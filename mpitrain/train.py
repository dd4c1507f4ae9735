"""The main job: `mpirun -n 8 python -m mpitrain.train [CONFIG.toml] [--section.key value]...`

Here is the order of things; each of them is done by the room it is called from.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

from mpitrain.checkpoint import Store
from mpitrain.comm import Communicator, init, set_timeout
from mpitrain.config import Config, help_text
from mpitrain.data import Batch, Dataset, Loader, SampleOrder, evaluation_batches
from mpitrain.errors import EXIT_DONE, EXIT_REQUEUE, CheckpointError, InputError
from mpitrain.layout import split
from mpitrain.models import build_model
from mpitrain.run import Run, refuse_what_is_not_there_yet, set_threads, settled
from mpitrain.shard.batchnorm import SyncBatchNorm
from mpitrain.shard.engine import Engine
from mpitrain.shard.optim import learning_rate, make_optimizer


def main() -> int:
    world = init()
    arguments = sys.argv[1:]
    if {"-h", "--help"} & set(arguments):
        if world.rank == 0:
            print(help_text("mpitrain.train"))
        return EXIT_DONE
    config = read_config(world, arguments)
    set_timeout(config.comm.timeout)
    set_threads(world, config.run.reproducible)
    with Run(config, world) as run:
        return train(config, world, run)


def read_config(world: Communicator, arguments: list[str]) -> Config:
    """Rank 0 reads and checks it; all ranks get the same."""
    config = Config.from_dict(world.on_root(lambda: settled(Config.from_args(arguments)).model_dump()))
    refuse_what_is_not_there_yet(config)
    return config


def train(config: Config, world: Communicator, run: Run) -> int:
    data, held_out = run.open_data()
    torch.manual_seed(config.run.seed)
    task = build_model(config.model, data.description)
    module = SyncBatchNorm.convert(task.module, world)
    engine = Engine(
        module,
        task.loss,
        make_optimizer(config.optim, module.named_parameters()),
        world,
        clip=config.train.clip,
        precision=config.train.precision,
        bucket_mb=config.comm.bucket_mb,
        algorithm=config.comm.algorithm,
    )
    store = Store(run.checkpoints, world, config.checkpoint.keep)
    step, position = resume(config, run, store, engine, data.description.identity)
    run.begin(module, data, held_out, step)
    loss, held_out_loss, stop = float("nan"), None, False
    with batches(config, world, data, position) as loader:
        while step < config.train.steps and not stop:
            began = time.perf_counter()
            batch = next(loader)
            seed_step(config.run.seed, step, world.rank)
            part = engine.forward_backward(microbatches(batch, config.train.microbatch), config.train.batch)
            lr = learning_rate(config.optim, step, config.train.steps)
            norm = engine.step(lr)
            loss, stop = totals(world, part, run.stop_asked)
            step, position = step + 1, position + config.train.batch
            seconds = time.perf_counter() - began
            last = stop or step == config.train.steps
            evaluated = None
            if last or due(step, config.train.evaluate_every):
                held_out_loss = evaluated = evaluate(config, world, engine, held_out)
            ids = gather_ids(world, batch) if config.data.record_ids else None
            run.report(step, loss, evaluated, lr, norm, seconds, ids)
            if last or due(step, config.checkpoint.every):
                save(store, engine, step, {"position": position, "data": data.description.identity})
    run.end(step, loss, held_out_loss)
    return EXIT_REQUEUE if step < config.train.steps else EXIT_DONE


def batches(config: Config, world: Communicator, data: Dataset, position: int) -> Loader:
    """This rank's share of every global batch from `position` on."""
    return Loader(
        data,
        SampleOrder(len(data), config.run.seed),
        batch=config.train.batch,
        share=lambda size: share(size, world),
        position=position,
        workers=config.data.workers,
    )


def share(size: int, world: Communicator) -> tuple[int, int]:
    bounds = split(size, world.size)
    return bounds[world.rank], bounds[world.rank + 1]


def microbatches(batch: Batch, samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(x, y) of at most `samples` samples each; 0: all at once."""
    size = samples or max(1, len(batch.x))
    return [(batch.x[lo : lo + size], batch.y[lo : lo + size]) for lo in range(0, len(batch.x), size)]


def seed_step(seed: int, step: int, rank: int) -> None:
    """Dropout of a step depends on nothing before it, so a resumed run draws what the first would have drawn."""
    torch.manual_seed((seed * 1_000_003 + step) * 1_000_003 + rank & (1 << 63) - 1)


def totals(world: Communicator, part: float, stop: bool) -> tuple[float, bool]:
    """The step's loss, and whether any rank was asked to stop."""
    both = torch.tensor([part, float(stop)], dtype=torch.float64)
    world.all_reduce(both)
    return float(both[0]), bool(both[1] > 0)


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def evaluate(config: Config, world: Communicator, engine: Engine, held_out: Dataset | None) -> float | None:
    """The mean loss of held-out samples, each counted once; None where none are held out. Collective."""
    if held_out is None:
        return None
    sums = torch.zeros(2, dtype=torch.float64)
    chosen = evaluation_batches(
        held_out,
        samples=config.train.evaluate_samples,
        batch=config.train.batch,
        share=lambda size: share(size, world),
    )
    for batch in chosen:
        for x, y in microbatches(batch, config.train.microbatch):
            sums += torch.tensor([engine.evaluate(x, y) * len(x), len(x)], dtype=torch.float64)
    world.all_reduce(sums)
    return float(sums[0] / sums[1])


def gather_ids(world: Communicator, batch: Batch) -> list[int]:
    """The sample ids of the global batch, in order."""
    return [number for ids in world.all_gather_object(batch.ids.tolist()) for number in ids]


def save(store: Store, engine: Engine, step: int, values: dict[str, Any]) -> None:
    parts, rest = engine.parts()
    store.save(step, parts, values | rest)


def resume(config: Config, run: Run, store: Store, engine: Engine, data: str) -> tuple[int, int]:
    """Load what there is to go on from; returns (steps done, samples seen). data: identity of the data set.

    Raises InputError for a path that is no checkpoint, or one of other data; CheckpointError when there are
    checkpoints and none of them is whole.
    """
    store.prepare(set_aside=config.checkpoint.resume == "never")
    if config.checkpoint.resume == "never":
        return 0, 0
    automatic = config.checkpoint.resume == "auto"
    candidates = store.newest_first() if automatic else store.at(Path(config.checkpoint.resume))
    reasons = []
    for folder in candidates:
        try:
            manifest = store.load(folder, engine.parts_to_load)
        except CheckpointError as error:
            reasons.append(str(error))
            run.say(f"passed over {folder}: {error}")
            continue
        if manifest.values["data"] != data:
            raise InputError(
                f"{folder} was trained on another data set than data.path {config.data.path!r}; give that one, or "
                "another run.dir",
                agreed=True,
            )
        engine.finish_load()
        run.resumed_step = manifest.step if folder.parent == run.checkpoints else None
        run.say(f"resumed from {folder}")
        return manifest.step, manifest.values["position"]
    if reasons:
        raise CheckpointError(f"none of {len(reasons)} checkpoints can be used: {reasons[0]}", agreed=True)
    return 0, 0


if __name__ == "__main__":
    sys.exit(main())
