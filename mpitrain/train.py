"""The main job: `mpirun -n 8 python -m mpitrain.train [CONFIG.toml] [--section.key value]...`

Here is the order of things; each of them is done by the room it is called from.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before the other imports, which take seconds
    from mpitrain import early

    early.keep_signals()
    from mpitrain.config.settings import start_timeout

    early.allow(start_timeout(sys.argv[1:]))

import time
from pathlib import Path
from typing import Any

import torch

from mpitrain.checkpoint import FRUITLESS, Store
from mpitrain.comm import Communicator, init, set_timeout
from mpitrain.comm.faults import ulfm
from mpitrain.config.settings import Config, help_text
from mpitrain.data import Batch, Dataset, Loader, SampleOrder, evaluation_batches
from mpitrain.errors import EXIT_DONE, EXIT_REQUEUE, CheckpointError, InputError, NothingLearned
from mpitrain.mesh import Mesh
from mpitrain.models import build_model
from mpitrain.shard.virtual_workers import VirtualWorkers
from mpitrain.trainer.assemble import assemble
from mpitrain.trainer.elastic import Survivors, keep_training
from mpitrain.trainer.engine import Engine
from mpitrain.trainer.fruitless import Fruitless
from mpitrain.trainer.learning_rate import LearningRate
from mpitrain.trainer.run import Run, refuse_what_is_not_there_yet, set_threads, settled

FRUITLESS_STEPS = 50  # in a row, after which a run is given up


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
    if config.elastic.mode == "off":
        with Run(config, world) as run:
            return train(config, world, run)
    world = ulfm.begin(world)
    with Run(config, world) as run:
        code = keep_training(
            config,
            world,
            run,
            lambda left: train(left.config, left.world, run, left),
            lambda comm: make_store(config, comm, run),
        )
    ulfm.leave(init(), code)
    return code


def read_config(world: Communicator, arguments: list[str]) -> Config:
    """Rank 0 reads and checks it; all ranks get the same."""
    config = Config.from_dict(world.on_root(lambda: settled(Config.from_args(arguments)).model_dump()))
    refuse_what_is_not_there_yet(config)
    return config


def train(config: Config, world: Communicator, run: Run, survivors: Survivors | None = None) -> int:
    """survivors: where the job is to go on without ranks that die."""
    data, held_out = run.open_data()
    torch.manual_seed(config.run.seed)
    task = build_model(config.model, data.description)
    mesh = Mesh.make(world, config.parallel.data, config.parallel.pipeline, config.parallel.tensor)
    cut = VirtualWorkers.of(mesh.data, config.run.reproducible, config.run.workers)
    assembled = assemble(config, mesh, task, data)
    engine = assembled.engine
    rounds = cut.rounds(config.train.batch, microbatch_size(config, mesh))
    schedule = LearningRate.of(config.optim, config.train.steps)
    del task  # a stage needs no more than its own blocks
    with make_store(config, world, run) as store:
        identity = data.description.identity
        step, values = resume(config, run, store, engine, identity, survivors)
        for moved in store.make_way(step):
            run.say(moved)
        store.require_room(engine.checkpoint_bytes(), saves_between(step, config))
        fruitless = Fruitless(values[FRUITLESS])
        if survivors is not None:
            survivors.copy(engine, step, values)
        run.begin(assembled.parameters, data, held_out, step)
        if survivors is not None:
            survivors.going_on(step)
        loss, held_out_loss, stop = float("nan"), None, False
        with batches(config, cut, data, values["position"]) as loader:
            while step < config.train.steps and not stop:
                began = time.perf_counter()
                batch = next(loader)
                losses = forward_backward(config, mesh, engine, cut, batch, step, rounds)
                lr = schedule.rate(step)
                loss = cut.total(mesh.data, losses)
                result = engine.step(lr)
                step, before = step + 1, fruitless
                fruitless = before.after(step, loss, result.skipped, engine.scale)
                values = values | {"position": values["position"] + config.train.batch} | fruitless.mark
                if survivors is not None:
                    survivors.reached(engine, step, values)
                if fruitless.count(step) >= FRUITLESS_STEPS:
                    raise InputError(f"{fruitless.reason}; {mend(store.newest_fruitful())}", agreed=True)
                stop, failing = any_rank(world, bool(run.stopping.reason()), store.failing)
                recovered = survivors.step_done() if survivors is not None else None
                if fruitless.bad and not before.bad:
                    run.say(fruitless.reason)
                if stop:
                    run.say(f"stopping after step {step}: {run.stopping.reason() or 'another rank was asked to'}")
                seconds = time.perf_counter() - began
                if failing:
                    store.finish()  # raises what the save in the background did
                last = stop or step == config.train.steps
                evaluated = None
                if last or due(step, config.train.evaluate_every):
                    held_out_loss = evaluated = evaluate(config, mesh, engine, cut, held_out)
                ids = gather_ids(mesh, batch) if config.data.record_ids else None
                memory = engine.memory() if step == run.start_step + 1 else None
                run.report(step, loss, evaluated, lr, result, seconds, ids, memory, recovered)
                if last or due(step, config.checkpoint.every):
                    save(config, store, engine, step, values, last)
                    if survivors is not None:
                        survivors.saved = True
                if survivors is not None and not last and due(step, config.elastic.copy_every):
                    survivors.copy(engine, step, values)
                run.stopping.took(time.perf_counter() - began)
        good = store.newest_fruitful() if fruitless.bad else None
    run.end(step, loss, held_out_loss, fruitless)
    if step < config.train.steps:
        return EXIT_REQUEUE
    if fruitless.bad:
        raise NothingLearned(f"{fruitless.reason}; {mend(good)}", agreed=True)
    return EXIT_DONE


def mend(good: Path | None) -> str:
    """What to do about a run that learns nothing. good: its newest checkpoint from before."""
    again = f"start from --checkpoint.resume {good} in another run.dir" if good is not None else "start again"
    return f"lower optim.lr, or look for values that are not finite in data.path, and {again}"


def make_store(config: Config, world: Communicator, run: Run) -> Store:
    section = config.checkpoint
    return Store(
        run.checkpoints,
        world,
        section.keep,
        files=section.files,
        local=section.local,
        redundancy=section.redundancy,
        flush_every=section.flush_every,
    )


def forward_backward(
    config: Config, mesh: Mesh, engine: Engine, cut: VirtualWorkers, batch: Batch, step: int, rounds: int
) -> list[float]:
    """Gradients of one step; the part of its loss that each of this rank's virtual workers has.

    rounds: most microbatches of a step that any rank has.
    """
    size, microbatch = config.train.batch, microbatch_size(config, mesh)
    leaves = [microbatches(batch.x[lo:hi], batch.y[lo:hi], microbatch) for lo, hi in cut.within(size)]

    def seed(leaf: int) -> None:
        seed_leaf(config.run.seed, step, cut.own[leaf] + mesh.pipeline.rank * cut.count)

    return engine.forward_backward(leaves, size, rounds=rounds, before=seed)


def batches(config: Config, cut: VirtualWorkers, data: Dataset, position: int) -> Loader:
    """This rank's share of every global batch from `position` on."""
    return Loader(
        data,
        SampleOrder(len(data), config.run.seed),
        batch=config.train.batch,
        share=cut.share,
        position=position,
        workers=config.data.workers,
    )


def microbatch_size(config: Config, mesh: Mesh) -> int:
    """Samples of a microbatch; 0: all of a virtual worker's. A pipeline gets two a stage unless told otherwise."""
    if config.train.microbatch or mesh.pipeline.size == 1:
        return config.train.microbatch
    return max(1, -(-config.train.batch // (mesh.data.size * 2 * mesh.pipeline.size)))


def microbatches(x: torch.Tensor, y: torch.Tensor, samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(x, y) of at most `samples` samples each; 0: all at once."""
    size = samples or max(1, len(x))
    return [(x[lo : lo + size], y[lo : lo + size]) for lo in range(0, len(x), size)]


def seed_leaf(seed: int, step: int, leaf: int) -> None:
    """Dropout of a step depends on nothing before it, so a resumed run draws what the first would have drawn."""
    torch.manual_seed((seed * 1_000_003 + step) * 1_000_003 + leaf & (1 << 63) - 1)


def any_rank(world: Communicator, *flags: bool) -> list[bool]:
    """Whether each flag is set on any rank. Collective."""
    found = torch.tensor(flags, dtype=torch.uint8)
    world.all_reduce(found, "max")
    return [bool(flag) for flag in found]


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def saves_between(step: int, config: Config) -> int:
    """Checkpoints that are still to be written after this step, if the run is not stopped: the last step gets one."""
    steps, every = config.train.steps, config.checkpoint.every
    if step >= steps:
        return 0
    return steps // every - step // every + (steps % every > 0) if every else 1


def evaluate(config: Config, mesh: Mesh, engine: Engine, cut: VirtualWorkers, held_out: Dataset | None) -> float | None:
    """The mean loss of held-out samples, each counted once; None where none are held out. Collective."""
    if held_out is None:
        return None
    chosen = min(config.train.evaluate_samples, len(held_out))
    microbatch = config.train.microbatch if mesh.pipeline.size == 1 else 0  # a pipeline cuts batches itself
    sums = [0.0] * len(cut.own)
    for batch in evaluation_batches(held_out, samples=chosen, batch=config.train.batch, share=cut.share):
        size = min(config.train.batch, chosen - batch.position)
        done = 0
        for leaf, (lo, hi) in enumerate(cut.within(size)):
            for x, y in microbatches(batch.x[lo:hi], batch.y[lo:hi], microbatch):
                sums[leaf] += engine.evaluate(x, y) * len(x)
                done += 1
        for _ in range(done, cut.rounds(size, microbatch)):
            engine.evaluate()
    return cut.total(mesh.data, sums) / chosen


def gather_ids(mesh: Mesh, batch: Batch) -> list[int]:
    """The sample ids of the global batch, in order."""
    return [number for ids in mesh.data.all_gather_object(batch.ids.tolist()) for number in ids]


def save(config: Config, store: Store, engine: Engine, step: int, values: dict[str, Any], last: bool) -> None:
    parts, rest = engine.parts()
    store.save(step, parts, values | rest, background=config.checkpoint.background and not last, durable=last)


def resume(
    config: Config, run: Run, store: Store, engine: Engine, data: str, survivors: Survivors | None = None
) -> tuple[int, dict[str, Any]]:
    """Load what there is to go on from; returns (steps done, the values of its checkpoint that training needs).

    data: identity of the data set.

    Raises InputError for a path that is no checkpoint, or one of other data; CheckpointError when there are
    checkpoints and none of them is whole.
    """
    store.prepare(set_aside=config.checkpoint.resume == "never")
    beginning = {"position": 0, "data": data, FRUITLESS: 0}
    if survivors is not None and (restored := survivors.restore(engine, store)) is not None:
        return restored[0], {name: restored[1][name] for name in beginning}
    if store.remark:
        run.say(store.remark)
    if config.checkpoint.resume == "never":
        return 0, beginning
    automatic = config.checkpoint.resume == "auto"
    candidates = store.newest_first() if automatic else store.at(Path(config.checkpoint.resume))
    reasons = []
    for folder in candidates:
        try:
            manifest = store.load(folder, engine.parts_to_load)
            of, position = manifest.value("data"), manifest.value("position")
        except CheckpointError as error:
            reasons.append(str(error))
            run.say(f"passed over {folder}: {error}")
            continue
        if of not in (None, data):  # None: imported weights
            raise InputError(
                f"{folder} was trained on another data set than data.path {config.data.path!r}; give that one, or "
                "another run.dir",
                agreed=True,
            )
        engine.finish_load(manifest)
        run.resumed_step = manifest.step if store.owns(folder) else None
        for repaired in store.repairs:
            run.say(repaired)
        run.say(f"resumed from {folder}")
        return manifest.step, beginning | {"position": position, FRUITLESS: manifest.values.get(FRUITLESS, 0)}
    if reasons:
        raise CheckpointError(f"none of {len(reasons)} checkpoints can be used: {reasons[0]}", agreed=True)
    return 0, beginning


if __name__ == "__main__":
    sys.exit(main())
