"""Batches by indexing, updates by hand, forward called outside, a second backward, LBFGS, hooks, schedules, EMA."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

x = torch.randn(37, 6)
y = (x[:, :1] * 2 - x[:, 1:2]).tanh()
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
model[0].weight.register_hook(lambda g: g.clamp(-0.05, 0.05))
average = copy.deepcopy(model)
for step in range(4):
    order = torch.randperm(len(x))[:11]
    inputs, targets = x[order], y[order]
    output = model(inputs)
    loss = F.mse_loss(output, targets)
    for p in model.parameters():
        p.grad = None
    loss.backward(retain_graph=True)
    first = model[2].weight.grad.norm()
    (output.abs().mean() * 0.1).backward()  # a second backward through the same graph adds to the gradients
    with torch.no_grad():
        for p, q in zip(model.parameters(), average.parameters(), strict=False):
            p -= 0.1 * p.grad
            q.mul_(0.9).add_(p, alpha=0.1)
    print(step, loss.item(), first, model[2].bias.grad, model.forward(inputs).std().item())
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
for _ in range(2):

    def closure():
        optimizer.zero_grad()
        loss = nn.SmoothL1Loss()(model(x), y)
        loss.backward()
        return loss

    print("lbfgs", optimizer.step(closure).item())
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
while loss.item() > 1e-3 and optimizer.param_groups[0]["lr"] > 1e-4:  # decisions by a loss
    optimizer.zero_grad(set_to_none=False)
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    optimizer.step()
    plateau.step(loss)
    print(f"{loss:.12f}", optimizer.param_groups[0]["lr"])
    if optimizer.param_groups[0]["lr"] < 0.05:
        break
torch.save({"model": model.state_dict(), "average": average.state_dict()}, "by_hand.pt")
