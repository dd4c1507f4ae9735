"""VAE: losses summed over the batch, noise drawn like it, division by the length of the data set."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.mu, self.log_var = nn.Linear(16, 10), nn.Linear(10, 3), nn.Linear(10, 3)
        self.decode, self.out = nn.Linear(3, 10), nn.Linear(10, 16)

    def forward(self, x):
        h = F.relu(self.encode(x.view(-1, 16)))
        mu, log_var = self.mu(h), self.log_var(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * log_var)
        return torch.sigmoid(self.out(F.relu(self.decode(z)))), mu, log_var


loader = DataLoader(TensorDataset(torch.rand(43, 1, 4, 4).round(), torch.zeros(43)), batch_size=12, shuffle=True)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(2):
    total = 0
    for x, _ in loader:
        optimizer.zero_grad()
        output, mu, log_var = model(x)
        loss = F.binary_cross_entropy(output, x.view(-1, 16), reduction="sum")
        loss = loss - 0.5 * torch.sum(1 + log_var - mu.pow(2) - log_var.exp())
        loss.backward()
        total += loss.item()
        optimizer.step()
    print(f"{epoch}: {total / len(loader.dataset):.12f}", loss)
    with torch.no_grad():
        torch.save(torch.cat([x.view(-1, 16)[:8], output[:8]]), f"vae-{epoch}.pt")
torch.save(model.state_dict(), "vae.pt")
