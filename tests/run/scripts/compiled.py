"""torch.compile: of a model, of a loss with its whole graph, of a module in place; and a model of torch.jit.script."""

import torch
import torch.nn.functional as F
from torch import nn

model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
compiled = torch.compile(model, backend="eager")
head = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
head.compile(backend="eager")
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], 0.01)


@torch.compile(backend="eager", fullgraph=True)
def error(output, target):
    """Return a loss of the rows."""
    return F.mse_loss(output, target) + (output - target).abs().sum() / output.shape[0]


x = torch.randn(22, 6)
for epoch in range(2):
    for batch in torch.utils.data.DataLoader(x, batch_size=8, shuffle=True):
        loss = error(head(compiled(batch)), batch.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(epoch, loss.item())
torch.save({"model": compiled.state_dict(), "head": head.state_dict()}, "compiled.pt")

scripted = torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(scripted.parameters(), 0.05)
for batch in torch.utils.data.DataLoader(x, batch_size=8):
    loss = F.mse_loss(scripted(batch), batch.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
scripted.save("scripted.torch")
print(loss.item(), sum(p.abs().sum() for p in torch.jit.load("scripted.torch").parameters()).item())
