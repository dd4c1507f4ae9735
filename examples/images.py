"""Image classification on a prepared data set, read by mpitrain's own loader, tested on samples held out.

    mpirun -n 2 python examples/images.py                                       scikit-learn's digits, 8 x 8
    python -m mpitrain.data prepare photos/ --out data/photos                   one folder of images for each class
    mpirun -n 2 python examples/images.py --data data/photos                    images of your own

Rank 0 prints the loss, and at the end the accuracy on the held-out samples. The digits are made as data/digits in the
working folder the first time. They come with scikit-learn: nothing is downloaded.

Every rank takes its share of each global batch of 64 samples, of equal size or not, and weighs its loss by it. The
order of samples follows from the seed alone. So the losses are the same at any number of ranks, up to rounding.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional

import mpitrain as mt
from mpitrain.data import Loader, SampleOrder, evaluation_batches, open_dataset

BATCH = 64


class ConvolutionalNetwork(nn.Module):
    """A network for images of any size: [samples, channels, height, width] -> [samples, classes]."""

    def __init__(self, channels, classes, width=32):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        )  # fmt: skip
        self.scores = nn.Linear(32 * width, classes)

    def forward(self, images):
        return self.scores(self.features(images))


def share_of(world):
    """Return a function that gives this rank's part [start, stop) of a batch of `size` samples."""
    return lambda size: (size * world.rank // world.size, size * (world.rank + 1) // world.size)


def train(world, data, steps, say=print):
    """Train, and return the model and the loss of each step."""
    description = data.description
    if description.kind != "arrays" or len(description.x_shape) != 3 or not description.classes:
        raise mt.InputError(
            f"--data needs images with classes, not {description.kind} of shape {description.x_shape}", agreed=True
        )
    torch.manual_seed(0)
    model = mt.DistributedDataParallel(ConvolutionalNetwork(description.x_shape[0], len(description.classes)), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    losses = []
    with Loader(data, SampleOrder(len(data), seed=0), batch=BATCH, share=share_of(world)) as batches:
        for step in range(1, steps + 1):
            batch = next(batches)
            optimizer.zero_grad()
            # gradients are averaged over ranks: a mean over a part counts as much as the part is of the batch
            loss = functional.cross_entropy(model(batch.x), batch.y) * (len(batch.x) * world.size / BATCH)
            loss.backward()
            optimizer.step()
            scheduler.step()
            mean = loss.detach().clone()
            world.all_reduce(mean, "avg")
            losses.append(mean.item())
            if step % 20 == 0 or step in (1, steps):
                say(f"step {step:4}  loss {losses[-1]:.5f}")
    return model.module, losses


@torch.no_grad()
def accuracy(world, model, data):
    """Return the fraction of held-out samples that are classified correctly, on every rank."""
    model.eval()
    right = torch.zeros(1)
    for batch in evaluation_batches(data, samples=len(data), batch=256, share=share_of(world)):
        if len(batch.x):
            right += (model(batch.x).argmax(1) == batch.y).sum()
    world.all_reduce(right)
    return right.item() / len(data)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Classify images.")
    parser.add_argument("--data", default="digits", help="prepared data set (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="steps of 64 samples (default: %(default)s)")
    args = parser.parse_args(arguments)
    world = mt.init()

    def say(text):
        if world.rank == 0:
            print(text, flush=True)

    data, held_out = open_dataset(args.data), open_dataset(args.data, "held_out")
    say(f"{len(data)} images of {data.description.x_shape}, and {len(held_out)} held out")
    model, _ = train(world, data, args.steps, say)
    say(f"accuracy {accuracy(world, model, held_out):.1%} on the held-out images")


if __name__ == "__main__":
    main()
