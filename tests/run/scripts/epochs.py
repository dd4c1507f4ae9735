"""Training by epochs, whose ranks kill themselves where a file of that name lies in the working folder."""

import os
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
x = torch.randn(103, 6)
y = (x.sum(1) > 0).long()
data = TensorDataset(x[:83], y[:83])
held = TensorDataset(x[83:], y[83:])
loader = DataLoader(data, batch_size=8, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(5)))
test_loader = DataLoader(held, batch_size=8)


class Meter:
    def __init__(self):
        self.total, self.n = 0.0, 0

    def add(self, v, n):
        self.total += v * n
        self.n += n

    @property
    def mean(self):
        return self.total / self.n


model = nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=60)
history = []
log = open("log.txt", "w")  # noqa: SIM115


def train(epoch):
    model.train()
    meter = Meter()
    for i, (a, b) in enumerate(loader):
        if os.path.exists(f"kill-{epoch}-{i}"):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
        scheduler.step()
        meter.add(loss.item(), len(a))
        history.append(loss.item())
        print(f"{epoch} {i} {loss.item()!r} {scheduler.get_last_lr()[0]!r}", flush=True)
        print(epoch, i, file=log)
    return meter.mean


@torch.no_grad()
def evaluate():
    model.eval()
    right = total = 0
    for a, b in test_loader:
        right += (model(a).argmax(1) == b).sum().item()
        total += len(b)
    return right / total


best = 0.0
best_state = None
for epoch in range(5):
    mean = train(epoch)
    accuracy = evaluate()
    if accuracy > best:
        best = accuracy
        best_state = {k: v.clone() for k, v in model.state_dict().items()}
    print(f"epoch {epoch}: {mean!r} {accuracy} best {best} {sum(history)!r}", flush=True)
    with open("epochs.txt", "a") as f:
        f.write(f"{epoch} {mean}\n")
torch.save({"model": model.state_dict(), "best": best_state}, "out.pt")
log.close()
