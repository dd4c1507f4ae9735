"""Your own training loop with the engine: ZeRO, checkpoints to resume from, and a table of the memory.

    mpirun -n 2 python examples/engine.py --zero 2                          train 40 steps
    mpirun -n 2 python examples/engine.py --zero 2 --steps 20 --save kept   20 of them, and save
    mpirun -n 2 python examples/engine.py --zero 2 --save kept --resume     continue to step 40

A network learns what another network computes. Rank 0 prints the loss, then the measured memory of parameters,
gradients and optimizer states on rank 0 beside the formula's, and a hash of all parameters. The second and third
command together give the same hash as the first: a resumed run has the bits of one that was not interrupted.
A checkpoint also loads with another --zero and at another number of ranks; then the bits differ by rounding.

With --share-node (mpitrain's default) the ranks of a node share one copy of the parameters. Without it, as the formula
assumes, stages 1 and 2 have one copy on every rank, and stage 3 gathers each block as it computes.
"""

import argparse
import hashlib
from pathlib import Path

import torch
from torch import nn

import mpitrain as mt

BATCH, ACCUMULATE, WIDTH = 48, 2, 128


class Block(nn.Module):
    """A residual block: [samples, WIDTH] -> [samples, WIDTH]."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_model():
    """Return a model of blocks in an nn.Sequential, which stage 3 gathers one at a time (as in an nn.ModuleList)."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 8))


def samples(step):
    """Return the batch of a step, computed from its number, so that no data order has to be saved."""
    teacher = torch.Generator().manual_seed(7)
    weight = torch.randn(WIDTH, 8, generator=teacher) / WIDTH**0.5
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1000 + step))
    return x, torch.sin(2 * x @ weight)


def make_engine(world, zero, share_node=False):
    """Return an engine. Its settings are those of a TOML file, whose path may be given instead."""
    if BATCH % (ACCUMULATE * world.size):
        raise mt.InputError(f"{world.size} ranks do not divide {BATCH // ACCUMULATE}; use another number", agreed=True)
    microbatch = BATCH // (ACCUMULATE * world.size)  # samples of one rank in one backward pass
    config = {
        "train": {"batch": BATCH, "microbatch": microbatch, "clip": 1.0},
        "optim": {"name": "AdamW", "lr": 2e-3, "schedule": "constant", "warmup": 5},
        "parallel": {"zero": zero, "share_node": share_node},
    }
    return mt.initialize(make_model(), config=config, loss=nn.functional.mse_loss, comm=world)


def train_step(engine, world):
    """Do one update, and return the loss averaged over microbatches and ranks, like `engine.train_batch(iterator)`."""
    x, y = (t[world.rank :: world.size] for t in samples(engine.steps))
    total = torch.zeros(())
    for part in zip(x.chunk(ACCUMULATE), y.chunk(ACCUMULATE), strict=True):
        loss = engine(*part)  # the loss, because there are two arguments and the engine was given a loss
        engine.backward(loss)
        engine.step()  # only the last of the microbatches updates
        total += loss.detach() / ACCUMULATE
    world.all_reduce(total, "avg")
    return total.item()


def memory_table(account):
    """Return a table of the KiB in a MemoryAccount beside the formula of the stage."""
    rows = [f"{'KiB on rank 0':>14} {'counted':>10} {'formula':>10}"]
    for kind, expected in account.expected.items():
        rows.append(f"{kind:>14} {getattr(account, kind) / 1024:10.1f} {expected / 1024:10.1f}")
    return "\n".join(rows)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Train with the engine, save, and resume.")
    parser.add_argument("--zero", type=int, choices=range(4), default=2, help="stage of ZeRO (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="updates in all (default: %(default)s)")
    parser.add_argument("--save", type=Path, help="folder of checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in the folder")
    parser.add_argument("--share-node", action="store_true", help="one copy of the parameters on each node")
    args = parser.parse_args(arguments)
    world = mt.init()
    say = print if world.rank == 0 else lambda *_, **__: None
    if args.resume and args.save is None:
        raise mt.InputError("--resume continues from a folder; name it with --save", agreed=True)
    engine = make_engine(world, args.zero, args.share_node)
    if args.resume:
        extra = engine.load(args.save)
        say(f"continuing after step {engine.steps}, where the loss was {extra['loss']:.5f}")
    loss = None
    while engine.steps < args.steps:
        loss = train_step(engine, world)
        if engine.steps % 10 == 0 or engine.steps in (1, args.steps):
            say(f"step {engine.steps:4}  loss {loss:.5f}  lr {engine.lr:.5f}  norm {engine.norm:.4f}", flush=True)
    if args.save is not None and loss is not None:
        say(f"saved {engine.save(args.save, {'loss': loss}).name}")
    say(memory_table(engine.memory()))
    state = engine.state_dict()  # collective: the whole model on every rank
    digest = hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state)))
    say(f"parameters {digest.hexdigest()[:16]}", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
