"""CNN with BatchNorm, dropout and PReLU, a schedule per epoch, evaluation by hits, the best checkpoint kept."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.drop, self.slope, self.fc = nn.Dropout(0.25), nn.PReLU(36), nn.Linear(36, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn(self.conv1(x)), inplace=True), 2)
        return F.log_softmax(self.fc(self.slope(self.drop(torch.flatten(x, 1)))), dim=1)


x = torch.randn(75, 1, 8, 8)
data = TensorDataset(x, (x.mean((1, 2, 3)) * 30).long() % 5)
train, test = random_split(data, [50, 25])
loader, test_loader = DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=10)  # 50 = 3 * 16 + 2
model = Net()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
best = -1.0
for epoch in range(2):
    model.train()
    for i, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        print(f"{epoch} [{i * len(images)}/{len(loader.dataset)}] loss {loss.item():.12f} lr {scheduler.get_last_lr()}")
    model.eval()
    total = hits = 0
    with torch.no_grad():
        for images, labels in test_loader:
            output = model(images)
            total += F.nll_loss(output, labels, reduction="sum").item()
            prediction = output.argmax(dim=1, keepdim=True)
            hits += prediction.eq(labels.view_as(prediction)).sum().item()
    print(f"test loss {total / len(test):.12f}, {hits}/{len(test)} ({100.0 * hits / len(test):.1f} %)")
    if hits / len(test) > best:
        best = hits / len(test)
        if not os.path.isdir("best"):
            os.mkdir("best")
        torch.save({"model": model.state_dict(), "epoch": epoch}, "best/checkpoint.pt")
    scheduler.step()
model.load_state_dict(torch.load("best/checkpoint.pt")["model"])
print("running", model.bn.running_mean.tolist(), model.bn.running_var.tolist(), int(model.bn.num_batches_tracked))
torch.save(model.state_dict(), "classifier.pt")
