"""Your own model with DistributedDataParallel, in a loop as you would write it for torch.

    python examples/ddp.py                            one rank
    mpirun -n 4 python examples/ddp.py --steps 400    the same on four

A small network learns which of two spirals a point belongs to. Rank 0 prints the loss every 50 steps, and at the end
the share of all points that are classified correctly.

The losses are those of one rank at any number of ranks that divides 24, up to the rounding of sums:

- A step takes 48 samples whatever the number of ranks: two microbatches of 24, of which a rank computes 24 / ranks.
- All ranks shuffle by the same seed, and DistributedSampler deals the samples out in turn. So the ranks' parts of a
  microbatch together are the next 24 samples of one order. No sample is left over: 24 divides 960.
- The loss is a mean over samples, parts are equally large, and gradients are averaged over the ranks.
- Parameters begin as rank 0's, and the model has neither dropout nor batch norm.
"""

import argparse
from contextlib import nullcontext
from itertools import count

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import mpitrain as mt

SAMPLES, MICROBATCH, ACCUMULATE = 960, 24, 2


class Classifier(nn.Module):
    """A network that maps points in the plane to the scores of two classes."""

    def __init__(self, width=64):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.scores = nn.Linear(width, 2)

    def forward(self, points):
        return self.scores(self.hidden(points))


def spirals():
    """Return points on two spirals, and the spiral number of each point; the same on every rank."""
    draw = torch.Generator().manual_seed(1)
    y = torch.arange(SAMPLES) % 2
    angle = 0.5 + 5.5 * torch.rand(SAMPLES, generator=draw)
    turned = angle + torch.pi * y
    points = torch.stack([turned.cos(), turned.sin()], 1) * (angle / 3).unsqueeze(1)
    return points + 0.03 * torch.randn(SAMPLES, 2, generator=draw), y


def endless(loader, sampler):
    """Yield this rank's parts of the microbatches, epoch after epoch, each epoch in another order."""
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


def train(world, steps, say=print):
    """Train, and return the model and the loss of each step, averaged over the ranks."""
    if MICROBATCH % world.size:
        raise mt.InputError(f"{world.size} ranks do not divide {MICROBATCH}; use a number that does", agreed=True)
    data = TensorDataset(*spirals())
    sampler = DistributedSampler(data, num_replicas=world.size, rank=world.rank, shuffle=True, seed=0)
    batches = endless(DataLoader(data, batch_size=MICROBATCH // world.size, sampler=sampler), sampler)

    torch.manual_seed(0)
    model = mt.DistributedDataParallel(Classifier(), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))  # equal on all ranks
    losses = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        total = torch.zeros(())
        for number in range(ACCUMULATE):
            last = number == ACCUMULATE - 1
            with nullcontext() if last else model.no_sync():  # gradients travel once a step, with the last microbatch
                x, y = next(batches)
                loss = functional.cross_entropy(model(x), y) / ACCUMULATE
                loss.backward()
            total += loss.detach()
        optimizer.step()
        scheduler.step()
        world.all_reduce(total, "avg")
        losses.append(total.item())
        if step % 50 == 0 or step in (1, steps):
            say(f"step {step:4}  loss {losses[-1]:.5f}")
    return model, losses


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Classify points of two spirals, data parallel.")
    parser.add_argument("--steps", type=int, default=200, help="steps of 48 samples (default: %(default)s)")
    args = parser.parse_args(arguments)
    world = mt.init()

    def say(text):
        if world.rank == 0:
            print(text, flush=True)

    model, _ = train(world, args.steps, say)
    x, y = spirals()
    right = (model.module(x).argmax(1) == y).float().mean()
    say(f"{right:.1%} of the points are classified correctly, on {world.size} ranks")


if __name__ == "__main__":
    main()
