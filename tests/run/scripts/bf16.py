"""Training of a small model, under torch's own autocast if an argument says so."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
x, y = torch.randn(64, 12), torch.randint(0, 4, (64,))
model = nn.Sequential(nn.Linear(12, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
kinds = set()
model[0].register_forward_hook(lambda module, args, out: kinds.add(str(out.dtype)))
for epoch in range(3):
    for a, b in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16):
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in sys.argv):
            out = model(a)
        loss = nn.functional.cross_entropy(out.float(), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(epoch, loss.item())
print(sorted(kinds), {p.dtype for p in model.parameters()}, {p.grad.dtype for p in model.parameters()})
