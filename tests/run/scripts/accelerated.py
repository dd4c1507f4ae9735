"""Trains on the accelerator that torch finds: copies of batches, data that lie there, noise and statistics."""

import os
import signal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(11)
device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.mix, self.drop = nn.Linear(width, width), nn.Dropout(0.2)

    def forward(self, x):
        heads = self.project(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(self.mix(mixed.transpose(1, 2).flatten(-2)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.block = Block(16)
        self.batch_norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 3, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + torch.linspace(0, 1, 16, device=tokens.device)
        return self.head(torch.relu(self.batch_norm(self.block(x).mean(dim=1))))


tokens, classes = torch.randint(0, 20, (50, 6)), torch.randint(0, 3, (50,))
loader = DataLoader(TensorDataset(tokens, classes), batch_size=8, shuffle=True, pin_memory=device.type != "cpu")
net = Net().to(device)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
for epoch in range(3):
    net.train()
    total, correct = 0.0, 0
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad()
        logits = net(x)
        loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        total += loss.item() * len(x)
        if epoch == 1 and len(y) == 2 and os.path.exists("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        correct += (logits.argmax(dim=1) == y).sum().item()
    schedule.step()
    net.eval()
    with torch.no_grad():
        every = net(tokens.to(device)).softmax(dim=1)
    print(f"epoch {epoch} loss {total / len(tokens):.6f} accuracy {correct / len(tokens):.3f} norm {norm:.6f}")
    print("surest", every.max(dim=1).values.cpu().numpy().round(4)[:4].tolist(), every.device.type == device.type)

torch.set_default_device(device)  # from here on, data lie there, and are cut there
data = torch.randn(41, 5)
truth = data @ torch.arange(5, dtype=torch.float64)
line = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 1))
momentum = torch.optim.SGD(line.parameters(), lr=0.02, momentum=0.9)
for _ in range(12):
    rows = torch.randperm(len(data))[:10]
    noisy = data[rows] + 0.01 * torch.randn(10, 5)
    loss = (line(noisy).squeeze(1) - truth[rows]).square().mean()
    momentum.zero_grad()
    loss.backward()
    momentum.step()
print(device.type, "line", f"{loss.item():.8f}", f"{sum(p.abs().sum() for p in line.parameters()).item():.8f}")
torch.save({"net": net.state_dict(), "line": line.state_dict()}, "accelerated.pt")
