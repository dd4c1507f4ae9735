"""What a rank sends in a training step by axis of the mesh, by formulas, to be held against what the journal counts.

    data        gradients and parameters, as `mpitrain.shard.traffic` says
    pipeline    the output of each block behind which the model is cut, and back its gradient, once for each microbatch,
                in messages; parameters that several stages share are summed
    tensor      what divided layers exchange, forward and backward: of two in each half of a block an all-reduce of its
                output in forward, and one of the gradient of its input in backward; 2 (T-1)/T of their bytes each

How large outputs are, and what layers exchange, is found as the planner finds it: by a pass without values through the
blocks (`mpitrain.planner.passes`). Where the T ranks of a tensor axis share memory, and there are more than two, little
is summed by each from all: T/2 times what the formula says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpitrain.comm.programs.rings import bytes_sent
from mpitrain.planner.model import AxisExchange, Divided
from mpitrain.planner.passes import Observed, observe
from mpitrain.planner.subject import Subject
from mpitrain.shard.sharding import Sharding
from mpitrain.shard.traffic import data_bytes
from mpitrain.trainer.data import microbatch_size

if TYPE_CHECKING:
    from mpitrain.trainer.trainer import Trainer


def expected_bytes(trainer: Trainer, samples: int) -> dict[str, float]:
    """Bytes that this rank sends in a step along each axis that has several ranks.

    Not told is what depends on how ranks run beside each other: parallel.mode server, the meetings of groups in
    parallel.mode local; and what is sent along the pipeline and tensor axes by a model of a subclass of `Trainer`, or
    one that looks at values in its forward pass.

    Args:
        trainer: One that was prepared.
        samples: Of the step's batch that this rank's group trains on.
    """
    found: dict[str, float] = {}
    engine, mesh, workers = trainer.engine, trainer.mesh, trainer.places.workers
    if not isinstance(engine.sharding, Sharding):
        return found
    microbatch = microbatch_size(trainer.config, mesh, samples)
    staged = mesh.pipeline.size > 1
    if mesh.data.size > 1:
        rounds = workers.rounds(samples, microbatch)
        found["data"] = data_bytes(engine.sharding, rounds, staged=staged)
    if mesh.tensor.size == mesh.pipeline.size == 1 or not _builds_its_model(trainer):
        return found
    share = sum(hi - lo for lo, hi in workers.within(samples))
    size = min(microbatch or share, share)
    try:
        names, blocks = _observed(trainer, size)
    except Exception:  # what a model of somebody else's does with tensors that have no values is nowhere written
        return found
    times = share / max(1, size)
    pipeline = engine.pipeline
    if pipeline is not None:
        tied = sum(bytes_sent("all_reduce", nbytes, ranks) for nbytes, ranks in pipeline.tied_bytes)
        found["pipeline"] = times * sum(blocks[number].given for number in pipeline.crossings) + tied
    if mesh.tensor.size > 1:
        own = pipeline.blocks if pipeline is not None else range(len(blocks))
        passes: list[Sequence[AxisExchange]] = [(*blocks[n].forwards, *blocks[n].backwards) for n in own]
        if trainer.config.train.recompute:
            passes += [_again(names[number], blocks[number], staged) for number in own]
        found["tensor"] = times * sum(exchanged(each, mesh.tensor.size) for each in passes)
    return found


def exchanged(exchanges: Sequence[AxisExchange], ranks: int) -> float:
    """Bytes that a rank of a tensor axis sends in a block's pass.

    Args:
        exchanges: What the block exchanges.
        ranks: Of the axis.
    """
    return sum(bytes_sent(each.operation, each.nbytes, ranks) for each in exchanges if each.axis == "tensor")


def _builds_its_model(trainer: Trainer) -> bool:
    """Whether the model is the one that the configuration names."""
    from mpitrain.trainer.trainer import Trainer as Plain

    return type(trainer).make_model is Plain.make_model


def _again(name: str, block: Observed, staged: bool) -> Sequence[AxisExchange]:
    """What a block exchanges when it is computed again for backward.

    A stage of a pipeline is computed again as a whole; else each block of a list is, up to the last tensor that
    backward needs, and what it exchanges last comes after that.
    """
    if staged:
        return block.forwards
    return block.forwards[:-1] if name.rpartition(".")[2].isdigit() else ()


def _observed(trainer: Trainer, samples: int) -> tuple[list[str], list[Observed]]:
    """The names of all blocks of the model, as the tensor axis divides it, and what each does with a microbatch."""
    config, mesh = trainer.config, trainer.mesh
    parallel, subject = config.parallel, Subject(config, trainer.data.description, real=False)
    several = subject.synchronous and mesh.data.size > 1
    divided = Divided(mesh.tensor.size, parallel.sequence, tuple(parallel.whole), synchronized=several)
    cut = subject.cut(divided, fake=True)
    return [name for name, _ in cut.blocks], observe(cut, samples)
