"""Training with Hugging Face accelerate as its users write it, for `python -m mpitrain.backend`."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
x = torch.randn(64, 4)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for _ in range(5):
    for a, b in data:
        loss = torch.nn.functional.mse_loss(model(a), b)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
weights = accelerator.gather(next(model.parameters()).detach())
assert weights.shape[0] == accelerator.num_processes and (weights == weights[0]).all()
seen = sum(len(b) for _, b in data)
everyone = accelerator.gather_for_metrics(torch.tensor([seen]))
print(f"{type(model).__name__} {type(torch.distributed.group.WORLD).__name__} {int(everyone.sum())} {loss.item():.6f}")
accelerator.wait_for_everyone()
accelerator.end_training()
