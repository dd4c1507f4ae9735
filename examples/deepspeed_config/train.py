"""A script written for DeepSpeed, with its ds_config.json, run by mpitrain. `DeepSpeed:` marks each line that differs.

    mpirun -n 2 python examples/deepspeed_config/train.py                           ds_config.json beside this file
    mpirun -n 2 python examples/deepspeed_config/train.py --deepspeed_config FILE   one of your own

Rank 0 first names the keys of the file that mean nothing here, because they tune DeepSpeed's own machinery. A key that
asks for something that mpitrain has not is refused in one line that names it. Then it prints the loss and the learning
rate. `deepspeed` need not be installed. There is no launcher of its own: mpirun, or srun, starts the ranks.
"""

import argparse
from itertools import count
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import mpitrain as mt  # DeepSpeed: import deepspeed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 4))

    def forward(self, x):
        return self.layers(x)


def make_data():
    """Return points, and the nearest of four directions for each point."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(960, 16, generator=draw)
    return TensorDataset(x, (x @ torch.randn(16, 4, generator=draw)).argmax(1))


def train(model_engine, world, steps, say):
    """Train, and return the loss of each step, averaged over ranks and microbatches."""
    data = make_data()
    # DeepSpeed: deepspeed.initialize(training_data=...) makes the loader
    sampler = DistributedSampler(data, num_replicas=world.size, rank=world.rank, shuffle=True, seed=0)
    # DeepSpeed: model_engine.train_micro_batch_size_per_gpu()
    loader = DataLoader(data, batch_size=model_engine.settings.microbatch, sampler=sampler)
    criterion = nn.CrossEntropyLoss()
    losses, total = [], torch.zeros(())
    for epoch in count():
        sampler.set_epoch(epoch)
        for x, y in loader:
            if model_engine.steps == steps:  # DeepSpeed: model_engine.global_steps
                return losses
            loss = criterion(model_engine(x), y)
            model_engine.backward(loss)  # divides by the accumulation itself, as DeepSpeed does
            total += loss.detach()
            if not model_engine.step():  # tells whether it updated. DeepSpeed: is_gradient_accumulation_boundary()
                continue
            world.all_reduce(total, "avg")  # DeepSpeed: deepspeed.comm.all_reduce
            losses.append(total.item() / model_engine.settings.accumulate)
            total.zero_()
            if len(losses) % 20 == 0 or len(losses) in (1, steps):
                say(f"step {len(losses):4}  loss {losses[-1]:.5f}  lr {model_engine.lr:.6f}")  # DeepSpeed: get_lr()[0]


def main(arguments=None):
    parser = argparse.ArgumentParser(description="A DeepSpeed script run by mpitrain.")
    # DeepSpeed: deepspeed.add_config_arguments(parser), and --local_rank
    here = Path(__file__).resolve().parent
    parser.add_argument("--deepspeed_config", type=Path, default=here / "ds_config.json", help="the JSON file")
    parser.add_argument("--steps", type=int, default=100, help="updates (default: %(default)s)")
    parser.add_argument("--save", type=Path, help="folder for a checkpoint at the end")
    args = parser.parse_args(arguments)
    world = mt.init()  # DeepSpeed: deepspeed.init_distributed()

    def say(text):
        if world.rank == 0:
            print(text, flush=True)

    torch.manual_seed(0)
    # DeepSpeed: model_engine, optimizer, loader, scheduler = deepspeed.initialize(args=args, model=..., ...)
    model_engine = mt.initialize(Net(), config=args.deepspeed_config, comm=world)
    train(model_engine, world, args.steps, say)
    if args.save is not None:
        folder = model_engine.save(args.save)  # DeepSpeed: save_checkpoint(folder); model_engine.load(folder) goes on
        say(f"saved {folder.name}")
    # DeepSpeed: zero_to_fp32.py gathers the weights later. Here: model_engine.state_dict(), on every rank
    model_engine.close()


if __name__ == "__main__":
    main()
