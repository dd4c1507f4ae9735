"""Values of batches printed, indexed, sorted and written in place; views that are read after a write to the batch."""

import copy
import pickle

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

for x, y in DataLoader(TensorDataset(torch.arange(14.0).view(7, 2), torch.arange(7)), batch_size=5):
    print(x.shape, len(x), x.mean(), x[0], x[-1].tolist(), y, x.max(), x.std(), f"{x.mean():.3f} {x.sum().item()}")
    print(x.numpy().sum(), np.asarray(y).tolist(), [int(v) for v in y], x[x > 3], torch.where(y > 1)[0], x.norm())
    print(x.untyped_storage().nbytes(), x.storage().tolist())
    row, part, chunk = x[0], x[0:2][1], x.chunk(2)[1]
    x += 1
    x[:, 0] *= 2
    print(row, part, chunk)
    x[0] = 7.0
    row[1] = 5.0
    x[1:, 1] -= 1
    x.view(-1)[3] = -1.0
    print(x, row, part, x.detach().sum(0), copy.deepcopy(x).add_(1).sum(), pickle.loads(pickle.dumps(x)).sum())
    print(x.sort(0)[0], x.argmax(), x.cumsum(0), torch.unique(y), (y == 2).nonzero(), x.T @ x, x @ x.T, x.flip(0))
    order = torch.randperm(x.size(0))
    print(
        (0.3 * x + 0.7 * x[order]).sum(),
        torch.cat([x, x]).shape,
        torch.cat([x, x], 1).mean(0),
        torch.stack([x, x]).sum(),
    )
    print(torch.eye(7)[y].sum(0), torch.nn.functional.one_hot(y, 7).sum(0), torch.cdist(x, x).sum().item(), x.median())
    print(
        torch.einsum("bi,bj->ij", x, x), torch.linalg.svd(x)[1], x.var(0), x.topk(1)[0], x.t().reshape(-1), x.squeeze(0)
    )
    wide = x.unsqueeze(1).expand(-1, 3, -1)
    print(wide.repeat(1, 2, 1).sum((1, 2)), wide.repeat(2, 1, 1, 1).shape, wide.sort(0)[0].sum(), wide.flip(0)[0])
    w = torch.ones(2, requires_grad=True)
    total = (x * w).sum(1)
    total.sum().backward()
    print(w.grad, total, x.clone().fill_diagonal_(0), x.repeat(1, 2).shape, x.tile(2).sum(), torch.bincount(y))
    moved = x.clone().requires_grad_()
    (moved * w).pow(2).sum().backward()
    moved.data = moved.data + 0.1 * moved.grad.sign()  # as in attacks on a model
    w.grad.data = w.grad.data * 3
    print(torch.equal(x, x), x.equal(moved), torch.allclose(moved, x, atol=1.0), moved, moved.sum().item(), w.grad)
    moved.data = torch.ones(x.shape[0], 3)
    print(moved.shape, moved.sum().item())
    loss = x[0].sum() + x[:2].mean()
    x.zero_()
    print(loss, x, row)
    delta = torch.zeros_like(x, requires_grad=True)  # an attack on a model: the content of a batch is replaced
    for _ in range(2):
        ((x + 3 + delta) * w).square().sum().backward()
        delta.data = torch.clamp(delta + 0.5 * delta.grad.sign(), -0.7, 0.7)
        delta.grad.zero_()
    before = delta.detach()[0]
    delta.data = torch.ones(delta.shape)
    print(delta, before, torch.equal(x, x.clone()), torch.allclose(x, delta), torch.from_dlpack(x).sum())
    print(
        torch.tensor([y[0], 3]), torch.tensor([[a, b] for a, b in zip(y, x[:, 0], strict=True)]), w.new_tensor([y[1]])
    )
    print(torch.add(x, y.unsqueeze_(1), out=torch.empty(x.shape)), y.squeeze_(), delta.detach().t_(), y.apply_(abs))
    print(torch.func.vmap(torch.func.grad(lambda w, row: (row @ w).square()), (None, 0))(w.detach(), delta.detach()))
    array, part, same = x.numpy(), x[1].numpy(), np.asarray(x.detach())
    array += 1  # reaches the batch, its views and other arrays, as their writes reach the array
    x[:, 0] = 4
    part *= 2
    row = x[0]
    same[0] = 6
    print(array, part, same, row, x, (x * w).detach().numpy().sort(), (x * w).sum().item())
other = torch.zeros(3)
for (x,) in DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4):
    other.data = x
    print("data of a batch", other.sum().item(), (other + x).tolist())
    options = {"training": True, "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": True}
    print(torch.batch_norm(x.unsqueeze(1), None, None, None, None, **options).flatten().tolist())
