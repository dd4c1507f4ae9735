"""Samplers, workers, augmentation in the data set, a data set that counts its reads, batches smaller than the ranks."""

import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)


class Augmented(Dataset):
    def __init__(self, n):
        self.x, self.reads = torch.arange(float(n)), 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.reads += 1
        shift = torch.randint(0, 3, (1,)).item() + random.random() + np.random.rand()
        return {"x": torch.stack([self.x[i], self.x[i] + shift]), "name": f"sample {i}"}


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        for i in range(worker.id, 11, worker.num_workers):
            yield i, torch.rand(1)


class ByLength(torch.utils.data.Sampler):
    def __iter__(self):
        return iter([[5, 1], [2, 3, 4], [0]])

    def __len__(self):
        return 3


data, plain = Augmented(14), TensorDataset(torch.arange(14.0), torch.arange(14))
for batch in DataLoader(data, batch_size=5, shuffle=True):
    print(batch["x"].sum().item(), batch["name"])
print("reads", data.reads)
loaders = [
    DataLoader(plain, batch_size=4, sampler=WeightedRandomSampler(torch.arange(14.0) + 1, 14)),
    DataLoader(plain, batch_size=4, sampler=SubsetRandomSampler(range(3, 12)), drop_last=True),
    DataLoader(plain, batch_sampler=BatchSampler(RandomSampler(plain, replacement=True, num_samples=7), 3, False)),
    DataLoader(plain, batch_sampler=ByLength()),
    DataLoader(plain, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(5)),
    DataLoader(plain, batch_size=1, sampler=range(3)),
    DataLoader(plain, batch_size=6, shuffle=True, num_workers=2),
]
for loader in loaders:
    for _ in range(2):
        print(len(loader), *(f"{x.tolist()} {y.sum().item()}" for x, y in loader))
persistent = DataLoader(data, 4, num_workers=3, persistent_workers=True, worker_init_fn=lambda i: np.random.seed(i))
for _ in range(2):
    print(*(f"{batch['x'].sum().item():.12f}" for batch in persistent))
print(*(f"{i.tolist()} {x.sum().item():.12f}" for i, x in DataLoader(Stream(), 2, num_workers=3)))
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for size in (1, 2, 3, 5):  # one row on three ranks
    for batch in DataLoader(data, batch_size=size):
        loss = (model(batch["x"]) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(size, loss.item(), torch.rand(1).item())
torch.save(model.state_dict(), "samplers.pt")
