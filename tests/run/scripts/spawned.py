"""Script that spawns its own ranks for DistributedDataParallel."""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, size):
    dist.init_process_group("gloo", rank=rank, world_size=size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.full((2, 2), float(rank))).sum().backward()
    if rank == 0:
        print("gradient", model.module.weight.grad.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(int(sys.argv[1]),), nprocs=int(sys.argv[1]), join=True)
