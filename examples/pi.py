"""Pi by Monte Carlo: the shortest program with more than one rank.

    python examples/pi.py                              one rank
    mpirun -n 4 python examples/pi.py --blocks 400     the same points, and more of them, on four

A point drawn at random in the unit square lies within the quarter circle of radius 1 with probability pi / 4, so
4 * hits / points estimates pi. Ranks draw different points and talk once, at the end: an all-reduce adds up their hits.

Points come in blocks, and the number of a block is the seed of its points. Rank r takes the blocks r, r + ranks,
r + 2 * ranks, ... All ranks together therefore count the same hits, and print the same estimate, at any number of
ranks. With one seed for all ranks, all would count the same points; with the rank as the seed, the estimate would
depend on the number of ranks.
"""

import argparse
import math

import torch

import mpitrain as mt

POINTS = 100_000  # of a block


def hits_in(block):
    """Return how many points of a block lie within the quarter circle."""
    x, y = torch.rand(2, POINTS, generator=torch.Generator().manual_seed(block), dtype=torch.float64)
    return (x * x + y * y <= 1).sum()


def estimate(world, blocks):
    """Return the estimate of pi by the points of all blocks, on every rank."""
    hits = torch.zeros(1, dtype=torch.int64)
    for block in range(world.rank, blocks, world.size):
        hits += hits_in(block)
    world.all_reduce(hits)  # without this line, every rank has only its own part
    return 4 * hits.item() / (blocks * POINTS)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Estimate pi by random points.")
    parser.add_argument("--blocks", type=int, default=40, help=f"blocks of {POINTS} points (default: %(default)s)")
    args = parser.parse_args(arguments)
    world = mt.init()
    if args.blocks < 1:
        raise mt.InputError(f"--blocks {args.blocks} leaves no points; give at least 1", agreed=True)
    pi = estimate(world, args.blocks)
    points = args.blocks * POINTS
    typical = math.sqrt(math.pi * (4 - math.pi) / points)  # standard deviation of 4 times a mean of hits
    if world.rank == 0:
        print(f"{points} points on {world.size} ranks: pi is about {pi:.6f}", flush=True)
        print(f"error {abs(pi - math.pi):.6f}; a typical error is {typical:.6f}", flush=True)


if __name__ == "__main__":
    main()
