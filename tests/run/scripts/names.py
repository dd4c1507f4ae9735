"""Variables that are named like attributes of a model, and a variable that a model reads and every step replaces."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss, self.out = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(torch.relu(self.loss(x)))


class Scaled(Net):
    def forward(self, x):
        return super().forward(x * scale) + sum(self.out.weight.mean() * s for s in scale)


x = torch.randn(24, 3)
for model in (Net(), Scaled()):
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(40):
        scale = torch.full((3,), 1.0 - step / 80)
        out = model(x[step % 4 * 6 :][:6])
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{loss.item():.12f}")
torch.save(model.state_dict(), "names.pt")
