"""Modules of which some treat samples apart and others only seem to, trained for several steps each."""

import random

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
SEEN, STEP = [], 0
OUTSIDE = nn.Linear(6, 6)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 6)
        self.gate = nn.Parameter(torch.zeros(1))  # hides at first what a branch computes
        self.calls = 0

    def forward(self, x):
        return x + self.second(F.gelu(self.norm(self.first(x))))


class DividesByCount(Block):
    def forward(self, x):
        return super().forward(x) + self.gate * x / x.shape[0]


class NumbersRows(Block):
    def forward(self, x):
        return super().forward(x) + torch.arange(x.size(0)).view(-1, 1) * self.gate


class PrintsShape(Block):
    def forward(self, x):
        if STEP < 4:
            print("shape", x.shape, len(x), x.numel())
        return super().forward(x)


class Keeps(Block):
    def forward(self, x):
        y = super().forward(x)
        SEEN.append(y.detach() * 1)
        return y


class Counts(Block):
    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1.0 + self.calls / 100)


class ChangesPath(Block):
    def forward(self, x):
        y = super().forward(x)
        return y - y.mean(0) if STEP >= 3 else y


class DrawsPath(Block):
    def forward(self, x):
        return super().forward(x) if random.random() < 0.5 else self.first(x - x.mean(0))[:, :6]


class UsesOther(Block):
    def forward(self, x):
        return super().forward(x) + F.linear(x, OUTSIDE.weight)


class Drops(Block):
    def __init__(self):
        super().__init__()
        self.drop, self.batch_norm = nn.Dropout(0.3), nn.BatchNorm1d(6)

    def forward(self, x):
        return self.batch_norm(super().forward(self.drop(x)) + F.dropout(x, 0.2, self.training))


class Token(Block):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 3))

    def forward(self, x):
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), x.view(-1, 2, 3)], dim=1)
        zeros = torch.zeros(x.shape[0], 3)
        zeros[:, 1] = 2.0
        return super().forward((tokens[:, :2] + tokens[:, 1:] * zeros[:, None]).reshape(x.shape[0], 6))


class Recomputes(Drops):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.shape[0]


class OwnBackward(Block):
    def forward(self, x):
        return Scale.apply(super().forward(x))


class InPlace(Block):
    def forward(self, x):
        y = super().forward(x)
        return F.relu_(y.add_(0.1))


class Recurrent(Block):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(3, 6, batch_first=True)

    def forward(self, x):
        return super().forward(self.cell(x.view(-1, 2, 3))[0][:, -1])


class Squeezes(Block):
    def forward(self, x):
        return super().forward(x[:, None].squeeze())


class Replaces(Block):
    """Block whose `forward` the script replaces."""


def own_forward(module, x):
    return module.first(x)[:, :6] - x.mean(0)


KINDS = (
    Block, DividesByCount, NumbersRows, PrintsShape, Keeps, Counts, ChangesPath, DrawsPath, UsesOther, Drops, Token,
    Recomputes, OwnBackward, InPlace, Recurrent, Squeezes, Replaces,
)  # fmt: skip


def train(kind, steps=7):
    """Train two modules of a kind; in between, freeze a parameter, add a hook, evaluate, and use a weight elsewhere."""
    global STEP
    torch.manual_seed(1)
    random.seed(2)
    model = nn.Sequential(kind(), kind())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    x, y = torch.randn(23, 6), torch.randn(23, 6)
    hooked = []
    for STEP in range(steps):
        if STEP == 4:
            model[0].first.bias.requires_grad_(False)
        if STEP == 5:
            model[1].norm.register_forward_hook(lambda module, args, out: hooked.append(out.sum().item()))
        rows = slice(0, 11) if STEP % 3 < 2 else slice(11, 23)
        optimizer.zero_grad()
        if STEP == 3 and kind is Replaces:
            model[1].forward = lambda x, module=model[1]: own_forward(module, x)
        out = model(x[rows])
        if kind is not InPlace:
            out += 0.25
            F.leaky_relu_(out, 0.3)
        loss = F.mse_loss(out, y[rows]) + F.linear(out, model[0].first.weight).mean()
        loss.backward()
        if STEP == 3:
            F.mse_loss(model(x[:11]), y[:11]).backward()  # accumulates
        optimizer.step()
        print(
            kind.__name__,
            STEP,
            loss.item(),
            sum(p.grad.abs().sum().item() for p in model.parameters() if p.requires_grad and p.grad is not None),
        )
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            print("evaluated", model(x).sum().item(), model(x).shape, hooked)
            print("three rows", model(x[:3]).sum().item())
    kept = [each.sum().item() for each in SEEN]
    SEEN.clear()
    return {"kept": torch.tensor(kept), **{name: p.detach().clone() for name, p in model.named_parameters()}}


def penalize(kind):
    """Train with a penalty on the gradient of the output by the input, which is differentiated again."""
    torch.manual_seed(3)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(9, 6)
    for step in range(4):
        inputs = (x + step / 10).requires_grad_()
        score = model(inputs).square().sum(1)
        (slope,) = torch.autograd.grad(score.sum(), inputs, create_graph=True)
        loss = score.mean() + (slope.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("penalty", kind.__name__, step, loss.item(), inputs.grad.sum().item())
    return {name: p.detach().clone() for name, p in model.named_parameters()}


torch.save({kind.__name__: train(kind) for kind in KINDS}, "regions.pt")
torch.save({kind.__name__: penalize(kind) for kind in (Block, Drops, Token)}, "penalties.pt")
