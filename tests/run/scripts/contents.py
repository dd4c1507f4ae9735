"""Uses of parameters beside forward and backward: reads, writes through views, copies, files and other optimizers."""

import copy
import io

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 12)
        self.mix = nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), nn.GELU())
        self.image = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.out = nn.Linear(12, 20, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        h = self.mix(self.words(x))
        return self.out(h + self.image(h.unsqueeze(1)).mean(1))


def show(name, *values):
    print(name, *(f"{v.double().norm().item():.12f}" if isinstance(v, torch.Tensor) else v for v in values))


model = Net()
frozen = copy.deepcopy(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
average = copy.deepcopy(model)
best = copy.deepcopy(model.state_dict())
x = torch.randint(0, 20, (24, 7))


def step(rows):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(rows).transpose(1, 2), (rows + 1) % 20)
    loss.backward()
    norms = [p.grad.norm().item() for p in model.parameters()]
    optimizer.step()
    show("step", loss.detach(), sum(norms), parameters_to_vector(model.parameters()).detach())


for k in range(3):
    step(x[8 * k : 8 * k + 8])
    with torch.no_grad():
        for p, a in zip(model.parameters(), average.parameters(), strict=True):
            a.mul_(0.9).add_(p, alpha=0.1)
show("average", *average.parameters())
for p in model.parameters():
    p.data.clamp_(-0.5, 0.5)
model.words.weight.data[3] = 0
model.mix[0].weight.data[:, 2].fill_(0.25)
with torch.no_grad():
    first, second = model.words.weight.chunk(2)
    second.mul_(0.5)
    model.mix[0].weight.t()[1] += first[0]
    model.image.weight.view(-1)[4:9].zero_()
    model.mix[1].weight -= 0.125
show("written", *model.parameters())
print(model.words.weight[3, :4], model.mix[0].weight[0], model.words.weight.numpy(force=True)[5, :3].round(6).tolist())
print([isinstance(p, nn.Parameter) for p in model.parameters()])
step(x[:8])
buffer = io.BytesIO()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
model.load_state_dict(best)
step(x[8:16])
buffer.seek(0)
saved = torch.load(buffer)
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
step(x[8:16])
vector = parameters_to_vector(model.parameters()).detach()
vector_to_parameters(vector * 0.5, model.parameters())
model.to("cpu").mix[0].requires_grad_(False)
print([p.requires_grad for p in model.parameters()])
optimizer.zero_grad(set_to_none=False)
head = nn.Linear(20, 1)
optimizer.add_param_group({"params": head.parameters(), "lr": 0.1})
loss = head(model(x[16:])).square().mean() + (model.words.weight - frozen.words.weight).square().sum()
loss.backward()
nn.utils.clip_grad_value_(model.parameters(), 0.01)
optimizer.step()
show("end", loss.detach(), *model.parameters(), *head.parameters())
with torch.no_grad():
    show("evaluated", model.eval()(x))
torch.save(model, "contents.model")
show("loaded", *torch.load("contents.model", weights_only=False).parameters())
torch.save(model.state_dict(), "contents.pt")
