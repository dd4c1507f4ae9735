"""A script as people write it for torchrun, without any mention of mpitrain."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed import init_process_group

rank, local_rank, size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
init_process_group(sys.argv[1], init_method="env://")
assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
assert os.environ["MASTER_ADDR"] and local_rank <= rank
pair = dist.new_group([0, 1], backend=sys.argv[1])
x = torch.tensor([rank + 1.0])
dist.all_reduce(x, group=pair)
print(f"rank {rank} of {size} sum {x.item()} over {dist.get_backend()} with {sys.argv[2]}", flush=True)
if sys.argv[2] == "--fail":
    if rank == 1:
        sys.exit(3)
    dist.barrier()  # the other rank would wait here
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
model(torch.full((2, 3), rank + 1.0)).sum().backward()
assert (model.module.weight.grad == size + 1).all()  # 2 rows, and the mean of 1, 2, ... size
dist.destroy_process_group()
