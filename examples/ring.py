"""A ring of sends and receives: every rank talks only to its two neighbours.

    python examples/ring.py                 one rank, which is its own neighbour
    mpirun -n 4 python examples/ring.py     four

    pass_token: one message is under way at a time        sum_by_ring: one from every rank at a time

       0 ---> 1 ---> 2 ---> 3                                0 ---> 1 ---> 2 ---> 3       ranks - 1 rounds
       ^                    |                                ^                    |
       +--------------------+                                +--------------------+

If all ranks received first, none would ever send. If all sent first, each might wait until its neighbour receives. In
`pass_token`, rank 0 therefore sends first and the others receive first. In `sum_by_ring`, each rank begins to send
(`isend`), receives, and then waits until its own message has left.

`sum_by_ring` sends ranks - 1 whole vectors from each rank. The ring of `world.all_reduce` cuts the vector into one part
for each rank, sends the parts round twice, and so sends fewer than two vectors (mpitrain/comm/algorithms/messages.py).
"""

import argparse

import torch

import mpitrain as mt


def neighbours(world):
    """Return the ranks from which this rank receives, and to which it sends."""
    return (world.rank - 1) % world.size, (world.rank + 1) % world.size


def pass_token(world):
    """Send a number round the ring, to which each rank adds its rank plus 1, and return it as it left this rank.

    Rank 0 starts it, and returns what came back to it.
    """
    left, right = neighbours(world)
    token = torch.zeros(1, dtype=torch.int64)
    if world.rank == 0:
        sending = world.isend(token + 1, right)
        world.recv(token, left)
        sending.wait()
    else:
        world.recv(token, left)
        token += world.rank + 1
        world.send(token, right)
    return token.item()


def sum_by_ring(world, x):
    """Return the sum of the x of all ranks, on every rank."""
    left, right = neighbours(world)
    total, outgoing, arriving = x.clone(), x.clone(), torch.empty_like(x)
    for _ in range(world.size - 1):
        sending = world.isend(outgoing, right)
        world.recv(arriving, left)
        sending.wait()  # from here on, `outgoing` may be overwritten
        total += arriving
        outgoing, arriving = arriving, outgoing
    return total


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Send numbers round a ring of ranks.")
    parser.add_argument("--length", type=int, default=1000, help="numbers in each vector (default: %(default)s)")
    args = parser.parse_args(arguments)
    world = mt.init()
    if args.length < 1:
        raise mt.InputError(f"--length {args.length} leaves no numbers; give at least 1", agreed=True)
    token = pass_token(world)
    x = torch.full((args.length,), world.rank + 1.0)
    mine = sum_by_ring(world, x)
    world.all_reduce(x)
    if world.rank == 0:
        print(f"the token came back to rank 0 as {token}, from {world.size} ranks", flush=True)
        print(f"first sum by the ring {mine[0].item()}, by all_reduce {x[0].item()}", flush=True)
    if not torch.equal(mine, x):
        raise SystemExit(f"rank {world.rank}: the ring's sums differ from those of all_reduce")


if __name__ == "__main__":
    main()
