"""Training by steps and by hand, whose ranks kill themselves where a file of that name lies in the working folder.

State in a closure, in slots, in containers, in two optimizers of which one accumulates, in an average of weights, in a
data set that draws and counts, in an iterator over a DataLoader, and in a generator function that a loop runs over.
"""

import argparse
import copy
import os
import random
import signal
from collections import defaultdict, deque

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.05)
args = parser.parse_args()
torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
random.seed(2)


class Noisy(Dataset):
    def __init__(self, n):
        self.x = np.random.default_rng(7).normal(size=(n, 5))
        self.reads = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.reads += 1
        x = torch.from_numpy(self.x[i]) + 0.01 * torch.randn(5)
        return x, float(x.sum())


class Early:
    __slots__ = ("best", "wait")

    def __init__(self):
        self.best, self.wait = float("inf"), 0


def end_at(name):
    if os.path.exists(name):
        os.kill(os.getpid(), signal.SIGKILL)


def shuffled(xs, size):
    order = list(range(len(xs)))
    random.shuffle(order)
    for i in range(0, len(order), size):
        yield xs[order[i : i + size]]


def make_counter():
    count = 0

    def tick():
        nonlocal count
        count += 1
        return count

    return tick


def main():
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    other, average = nn.Linear(5, 1), copy.deepcopy(net)
    large = torch.arange(200_000) / 1e5  # compared, not saved
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    opt2 = torch.optim.AdamW(other.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 0.99**s)
    loader = DataLoader(Noisy(50), batch_size=9, shuffle=True)
    batches = iter(loader)
    tick, early, rng = make_counter(), Early(), np.random.default_rng(3)
    recent, sums, hidden = deque(maxlen=4), defaultdict(list), None
    step = 0
    while step < 20:
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        end_at(f"kill-{step}")
        loss = ((net(x).squeeze(1) - y) ** 2).mean() + large[0]
        opt.zero_grad()
        loss.backward()
        opt.step()
        schedule.step()
        with torch.no_grad():
            for p, q in zip(net.parameters(), average.parameters(), strict=True):
                q.lerp_(p, 0.1)
        (other(x + torch.from_numpy(rng.normal(size=5))).mean() * 0.1).backward()
        if step % 4 == 3:
            opt2.step()
            opt2.zero_grad()
        recent.append(loss.item())
        sums[step % 3].append(loss.item())
        early.wait += 1
        if loss.item() < early.best:
            early.best, early.wait = loss.item(), 0
        hidden = loss if hidden is None else 0.5 * hidden.detach() + loss
        totals = [sum(v) for v in sums.values()]
        print(step, loss.item(), sum(recent), totals, tick(), early.best, early.wait, hidden.item(), random.random())
        print(loader.dataset.reads, schedule.get_last_lr(), flush=True)
        step += 1
    xs = torch.randn(40, 5)
    for epoch in range(2):
        for k, b in enumerate(shuffled(xs, 7)):
            end_at(f"kill-{epoch}-{k}")
            loss = net(b).pow(2).sum() / 40
            opt.zero_grad()
            loss.backward()
            opt.step()
            print("by hand", epoch, k, loss.item(), flush=True)
    torch.save({"net": net.state_dict(), "average": average.state_dict(), "other": other.state_dict()}, "out.pt")


if __name__ == "__main__":
    main()
