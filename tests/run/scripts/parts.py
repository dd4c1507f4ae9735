"""Script whose ranks part, that fails, leaves early, or writes into its input; the argument says how."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
try:
    os.close(os.open("lock", os.O_CREAT | os.O_EXCL))  # a way around the functions that mpitrain.run replaces
    is_first = True
except FileExistsError:
    is_first = False
if sys.argv[1] == "weights" and is_first:
    model.bias.data[0] += 1e-7
for i, (x, y) in enumerate(DataLoader(TensorDataset(torch.randn(70, 3), torch.arange(70) % 2), batch_size=10)):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    if i == 3 and sys.argv[1] == "break" and is_first:
        print((y == 1).sum())
        break
    if i == 3 and sys.argv[1] == "small":
        print((y == 1).sum() if is_first else x.mean())
    if i == 3 and sys.argv[1] == "large":
        print((y == 1).sum() if is_first else (x.view(-1, 3, 1) * torch.ones(9000)).sum(0))
    optimizer.step()
    print(f"{loss.item():.4f}")
    if i == 3 and sys.argv[1] == "error":
        raise ValueError("bad value")
    if i == 3 and sys.argv[1] == "exit":
        sys.exit(5)
    if i == 3 and sys.argv[1] == "write":
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2))(torch.randn(6, 3))
